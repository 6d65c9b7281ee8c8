"""Inputs of calls that are recomputed, copied before somebody writes to them in place."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from chunkmem.nn.saved_storages import SavedTensor
from chunkmem.nn.values import storage_id
from chunkmem.runtime.device import runtime_mode


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
