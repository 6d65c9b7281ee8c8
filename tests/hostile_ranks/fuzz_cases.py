"""Trainings over ranks, drawn at random as plain data: what the fuzzer sends to every rank, and shrinks.

A training has two phases: steps on so many ranks, a checkpoint, and steps on as many ranks as load it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.hostile.models import WIDTH, Block
from tests.hostile_ranks.harness import EQUAL, EXCHANGES, LIBRARY_TOLERANCE, Either, Expected

MAX_RANKS = 4
AMPLE_NBYTES = 8 << 20
MAX_NORM = 0.05
LOW_TOLERANCE = 2e-2
"""In bf16, where sums are in another order: a last bit that differs is 2**-8 of an activation."""
OWN = ("AdamW", "Adam", "SGD")
"""Optimizers that chunkmem has; others go through `chunkmem.Optimizer`."""


@dataclass(frozen=True)
class Unit:
    """A child of a list, which is a unit of exchange."""

    kind: str = "linear"
    by_rank: int = 0
    by_step: int = 0
    """How the expert that a batch goes to depends on the rank, and on the step and the micro-batch."""


@dataclass(frozen=True)
class Step:
    counts: tuple[int, ...] = (1,) * MAX_RANKS
    """Micro-batches by rank; the first rank has one if none had any."""
    drops: str = ""
    """Ranks that have a batch drop another one after its backward, before them: how."""
    frozen: frozenset[int] = frozenset()
    """Units."""
    clips: bool = False
    evaluation: str = "none"
    """By all ranks, of a copy on rank 0 alone, or of the model on one rank, which is refused."""

    def count(self, rank: int, size: int) -> int:
        return 1 if rank == 0 and not any(self.counts[:size]) else self.counts[rank]

    def backwards(self, rank: int, size: int) -> int:
        count = self.count(rank, size)
        return count + bool(self.drops) if count else 0


@dataclass(frozen=True)
class Phase:
    size: int
    """Ranks."""
    steps: tuple[Step, ...] = (Step(),)
    chunk_numel: int = 300
    device_nbytes: int = AMPLE_NBYTES
    exchange: str = "point to point"
    policy: str = "keep"
    """Of activations."""

    @property
    def expect(self) -> Expected:
        """What has to come of it, whatever model it trains."""
        if self.size > 1 and any(step.evaluation == "one rank" for step in self.steps):
            # Where units stay, one rank may gather them for that while the others gather them for their next step.
            return Either("RankError", "rank")
        return EQUAL if self.device_nbytes == AMPLE_NBYTES else Either("CapacityError", "DEVICE")

    def has_exact_sums(self, *, says_last: bool) -> bool:
        """Whether no mean is formed before the last backward of a step, and none by a library or for a norm."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        grows = any(
            b.backwards(rank, self.size) > max(1, a.backwards(rank, self.size))
            for a, b in pairs
            for rank in range(self.size)
        )
        clips = any(step.clips for step in self.steps)
        return self.exchange == "point to point" and not clips and (says_last or not grows)


@dataclass(frozen=True)
class Case:
    phases: tuple[Phase, ...]
    units: tuple[Unit, ...] = (Unit(),)
    ties: bool = False
    precision: str = "fp32"
    optimizer: str = "AdamW"
    says_last: bool = False

    @property
    def tolerance(self) -> float:
        if all(phase.has_exact_sums(says_last=self.says_last) for phase in self.phases):
            return 0.0
        return LIBRARY_TOLERANCE if self.precision == "fp32" else LOW_TOLERANCE

    @property
    def numbered(self) -> Iterator[tuple[Phase, list[tuple[int, Step]]]]:
        """Phases, with their steps and the numbers of these in the whole training."""
        number = 0
        for phase in self.phases:
            yield phase, list(enumerate(phase.steps, number))
            number += len(phase.steps)


class Recomputed(Block):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(torch.tanh(super().forward(x))))


class Experts(nn.Module):
    """Layers of which a batch goes to one, or past all."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.unit = unit
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.choice = 0

    def route(self, rank: int, number: int) -> None:
        self.choice = (self.unit.by_rank * rank + self.unit.by_step * number) % 3

    def forward(self, x: Tensor) -> Tensor:
        return x if self.choice == 2 else x + torch.tanh(self.experts[self.choice](x))


KINDS: dict[str, Callable[[Unit], nn.Module]] = {
    "linear": lambda unit: nn.Linear(WIDTH, WIDTH),
    "experts": Experts,
    "block": lambda unit: Block(),
    "twice": lambda unit: Twice(WIDTH, WIDTH),
    "recomputed": lambda unit: Recomputed(),
    "excluded": lambda unit: nn.Linear(WIDTH, WIDTH),
}


class Model(nn.Module):
    def __init__(self, case: Case, excluding: Callable[[], Any]) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        units = []
        for unit in case.units:
            # What is excluded computes in fp32, which the reference in bf16 does not.
            with excluding() if unit.kind == "excluded" and case.precision == "fp32" else torch.enable_grad():
                units.append(KINDS[unit.kind](unit))
        self.units = nn.ModuleList(units)
        self.head = nn.Linear(WIDTH, WIDTH)
        if case.ties:
            self.head.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for unit in self.units:
            x = unit(x)
        result: Tensor = self.head(x)
        return result

    def loss(self, rank: int, step: int, micro: int) -> Tensor:
        """That of a batch, which it knows by its numbers."""
        for unit in self.units:
            if isinstance(unit, Experts):
                unit.route(rank, step + micro)
        draw = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
        result: Tensor = self(torch.randn(3 + rank, WIDTH, generator=draw)).square().mean()
        return result

    def freeze(self, units: frozenset[int]) -> None:
        for index, unit in enumerate(self.units):
            unit.requires_grad_(index not in units)


def cases(*, most_ranks: int = MAX_RANKS, least_steps: int = 1, most_steps: int = 5) -> st.SearchStrategy[Case]:
    """Few of them are refused: what may be is drawn seldom. Only after a first step is it known which units stay."""
    small = st.integers(0, 2)
    units = st.builds(Unit, st.sampled_from(["experts", *KINDS]), small, small)
    counts = st.one_of(st.just((1,) * MAX_RANKS), st.tuples(*[st.integers(0, 3)] * MAX_RANKS))
    seldom = st.sampled_from([False, False, False, True])
    evaluations = st.sampled_from([*["none"] * 12, *["all ranks"] * 5, *["a copy"] * 2, "one rank"])
    drops = st.sampled_from([*[""] * 5, "by the optimizer", "by the model", "zeros"])
    steps = st.builds(Step, counts, drops, st.frozensets(st.integers(0, 3), max_size=2), seldom, evaluations)
    phases = st.builds(
        Phase,
        size=st.integers(2, most_ranks),
        steps=st.lists(steps, min_size=least_steps, max_size=most_steps).map(tuple),
        chunk_numel=st.sampled_from([300, 120, 1200, 5000]),
        device_nbytes=st.sampled_from([AMPLE_NBYTES, AMPLE_NBYTES, 32 << 10, 24 << 10]),
        exchange=st.sampled_from(list(EXCHANGES)),
        policy=st.sampled_from(["keep", "recompute", "offload", "auto"]),
    )
    later = st.builds(Phase, size=st.integers(1, most_ranks), steps=st.lists(steps, min_size=1, max_size=2).map(tuple))
    return st.builds(
        Case,
        phases=st.one_of(st.tuples(phases), st.tuples(phases, later)),
        units=st.lists(units, min_size=1, max_size=4).map(tuple),
        ties=seldom,
        precision=st.sampled_from(["fp32", "fp32", "bf16"]),
        optimizer=st.sampled_from([*OWN, "RMSprop", "Adamax"]),
        says_last=st.booleans(),
    )
