"""One call of a region: what it has saved, when it did what, and copies of inputs that are written to in place."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import torch

from chunkmem.activations.saved_storages import SavedStorage, SavedTensor
from chunkmem.data.trace import Region
from chunkmem.data.types import ActivationPolicy
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.values import storage_id


@dataclass(slots=True)
class CallRecord:
    """When a call of a region did what, in moments of the step; None: it has not yet, or nobody records."""

    name: str
    policy: ActivationPolicy
    number: int
    """Of the call, among those of the step."""
    is_recomputed: bool
    forward: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    chunk: Chunk | None = None
    inputs: Chunk | None = None

    def region(self) -> Region | None:
        """Return it for a trace; None if its backward has not run, or it saved nothing."""
        if self.chunk is None or not (len(self.forward) == len(self.backward) == 2):
            return None
        return Region(
            self.name,
            self.chunk.id,
            self.chunk.nbytes,
            (self.forward[0], self.forward[1]),
            (self.backward[0], self.backward[1]),
            (self.again[0], self.again[-1]) if self.is_recomputed else None,
            None if self.inputs is None else self.inputs.id,
            self.number,
        )


@dataclass(eq=False, slots=True, weakref_slot=True)
class RegionCall:
    """One call of a region. Lives as long as autograd keeps something that it saved in it."""

    name: str
    record: CallRecord
    module: weakref.ref[Callable[..., object]]
    come_to: Callable[[], None] | None = None
    """Over ranks, called before it is recomputed; see `RegionActivations.enter`."""
    storages: dict[int, SavedStorage] = field(default_factory=dict)
    """What was saved in it, by identity, until it is looked over."""
    given: frozenset[int] = frozenset()
    """The same afterwards: of a call that is recomputed, its inputs."""
    chunk: Chunk | None = None
    """That has its content; None if there is none, or not yet."""
    around: Generator[None, None, None] | None = None
    """Surrounds it while it runs, if it is going to be recomputed."""
    handled: BaseException | None = None
    """What the caller was handling when it began, while it runs."""

    def __str__(self) -> str:
        return f"{self.name} backward"


class RecomputedInputs:
    """Knows the inputs that were saved in a step, and the modules whose inputs have been written to.

    A block may write to what it is given (`x.mul_(2)`), or the model to what it has given one (`x += block(x)`). Plain
    PyTorch trains that, so a recomputation begins with a copy of the input as it was. Steps that are recorded, and the
    first one of a process, run under a mode that hears of each write before it is made: then the copy is made, and from
    the next step on at the call, for blocks where that has happened. Nothing is copied for others.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._saved: dict[int, list[tuple[weakref.ref[SavedTensor], weakref.ref[Callable[..., object]]]]] = {}
        """By the identity of a storage, which lives as long as they do: inputs in it, each with the module."""
        self._written: weakref.WeakSet[Callable[..., object]] = weakref.WeakSet()
        self._num_steps = 0

    @property
    def in_first_step(self) -> bool:
        """Nobody has heard of writes in a whole step so far."""
        return self._num_steps <= 1

    def begin_iteration(self) -> None:
        """A training step begins."""
        self._saved.clear()
        self._num_steps += 1

    def know_as(self, other: RecomputedInputs) -> None:
        """Know what is known there."""
        self._written.update(other._written)
        self._num_steps = other._num_steps

    def add(self, kept: SavedTensor, module: Callable[..., object]) -> None:
        """A call of a module that is recomputed has saved an input."""
        memory = storage_id(kept.tensor)
        if not memory:
            return
        if module in self._written:
            _copy(kept)
        self._saved.setdefault(memory, []).append((weakref.ref(kept), weakref.ref(module)))

    def note_write(self, memory: int) -> None:
        """A storage, by its identity, is about to be written to."""
        for kept_ref, module_ref in self._saved.get(memory, ()):
            kept, module = kept_ref(), module_ref()
            if kept is not None and module is not None and kept.copy is None and not kept.is_moved:
                _copy(kept)
                self._written.add(module)

    def has_copy(self, tensor: torch.Tensor) -> bool:
        """Tell whether an input is there as it was, whatever is written to it."""
        found = self._saved.get(storage_id(tensor), ())
        return any((kept := ref()) is not None and kept.copy is not None for ref, _ in found)


def _copy(kept: SavedTensor) -> None:
    if kept.tensor._version == kept.version:  # else it has been written to, past the mode
        with runtime_mode():
            kept.copy = kept.tensor.detach().clone()
