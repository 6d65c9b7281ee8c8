"""Trainings in which parts of chunks are frozen, with and without chunkmem."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn

import chunkmem
from chunkmem.data.types import Role
from chunkmem.runtime.chunk import NO_CONTENT
from chunkmem.runtime.ledger import Ledger
from tests.cpu.test_freezing import Training
from tests.helpers.audit import audit
from tests.helpers.low_precision import LowPlain
from tests.helpers.training import Chunked

CHUNK_NUMEL = 1024
"""About two blocks."""


def parameters_of(each: nn.Module | nn.Parameter) -> list[nn.Parameter]:
    return [each] if isinstance(each, nn.Parameter) else list(each.parameters())


class HalfFrozen(Training):
    """A training that freezes parameters, too, and counts what was packed."""

    packed_nbytes = 0

    def freeze(self, modules: Any, *, keep_states: bool = False) -> None:
        if isinstance(self.side, Chunked):
            self.packed_nbytes += self.side.manager.freeze(modules, keep_states=keep_states).packed_nbytes
            audit(self.side.manager)
            return
        for param in (param for each in modules for param in parameters_of(each)):
            param.requires_grad_(False)
            owner = (self.side.masters if isinstance(self.side, LowPlain) else {}).get(param, param)
            self.optimizer.state.pop(owner, None)
            owner.data.copy_(param.data)


def every_second(training: Training) -> Any:
    blocks = training.model.blocks
    yield from training.steps(4)
    training.freeze(blocks[::2])
    yield from training.steps(4)
    training.unfreeze([training.model])
    yield from training.steps(3)
    training.freeze(blocks[1::2])
    yield from training.steps(4)


def adapters(training: Training) -> Any:
    """Biases are trained, as small as adapters, in the chunks of the weights."""
    weights = [param for param in training.model.parameters() if param.dim() > 1]
    yield from training.steps(3)
    training.freeze(weights)
    yield from training.steps(4)
    training.unfreeze([training.model.blocks[2]])
    yield from training.steps(3)
    training.freeze([training.model])
    training.unfreeze([training.model])
    yield from training.steps(3)


def at_random(training: Training) -> Any:
    """Other layers in each round, mostly frozen ones."""
    chosen = random.Random(5)
    layers = [module for module in training.model.modules() if isinstance(module, nn.Linear)]
    for _ in range(4):
        yield from training.steps(3)
        frozen = chosen.sample(layers, 8)
        training.unfreeze([layer for layer in layers if layer not in frozen])
        training.freeze(frozen)
    yield from training.steps(2)


def again(training: Training) -> Any:
    """What was packed again is packed again; what is frozen by hand stays so."""
    blocks = training.model.blocks
    yield from training.steps(3)
    training.freeze(blocks[::2])
    yield from training.steps(2)
    blocks[1].requires_grad_(False)
    training.freeze([blocks[3][0]])
    yield from training.steps(3)
    blocks[1].requires_grad_(True)
    training.freeze([parameter for parameter in training.model.parameters() if parameter.dim() == 1])
    yield from training.steps(3)


def by_hand_first(training: Training) -> Any:
    """What was never trained, and frozen by hand, keeps all bits that it was built with."""
    training.model.blocks[0].requires_grad_(False)
    yield from training.steps(3)
    training.freeze(training.model.blocks[2:])
    training.unfreeze([block[2] for block in training.model.blocks[2:]])
    training.freeze([block[0] for block in training.model.blocks[1:]])
    yield from training.steps(3)
    training.unfreeze([training.model])
    yield from training.steps(2)


SCENES: dict[str, Callable[[Training], Any]] = {
    scene.__name__: scene for scene in (every_second, adapters, at_random, again, by_hand_first)
}


def trained_nbytes(manager: chunkmem.ChunkManager) -> int:
    """Of weights, master weights and states of this rank, once each."""
    chunks = manager.runtime.memory.store.chunks.values()
    kept = (c for c in chunks if c.id.role is not Role.GRAD and not c.is_remote and c.version != NO_CONTENT)
    return sum(chunk.nbytes for chunk in kept)


@contextmanager
def peak_of(manager: chunkmem.ChunkManager) -> Iterator[list[int]]:
    """Keep the most that DEVICE and HOST have together meanwhile."""
    peaks = [0]
    usual = Ledger.charge
    ledgers: Sequence[Ledger] = manager.runtime.tiers.ledgers

    def charge(self: Ledger, role: str, nbytes: int) -> None:
        usual(self, role, nbytes)
        peaks[0] = max(peaks[0], sum(ledger.total_nbytes for ledger in ledgers))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "charge", charge)
        yield peaks
