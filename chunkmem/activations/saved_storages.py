"""Storages whose tensors autograd has saved: who else holds them, and their memory as that of a chunk."""

from __future__ import annotations

import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch._subclasses.fake_tensor import FakeTensor

from chunkmem.data.layout import ALIGN_NBYTES
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.values import over

_STALE = -1
"""The version of a tensor that was written to after it was saved."""


class SavedTensor:
    """What autograd has in place of a tensor that it saved in a region."""

    __slots__ = ("__weakref__", "call", "copy", "is_moved", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, call: object) -> None:
        self.tensor = tensor
        self.version = tensor._version
        self.call = call
        """That it was saved in; it lives as long as the tensor is kept."""
        self.is_moved = False
        """Its storage is part of the call's chunk."""
        self.copy: torch.Tensor | None = None
        """Of what it was, if somebody writes to it that may."""

    def move(self, storage: torch.UntypedStorage) -> None:
        """Be another tensor over the same storage, which nobody but autograd knows."""
        tensor, self.tensor = self.tensor, over(storage, self.tensor)
        self.version = self.tensor._version if tensor._version == self.version else _STALE

    def check(self, saver: str) -> None:
        """Raise what torch does, where there are no hooks, for a tensor that was written to after it was saved."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {list(self.tensor.shape)} that was saved in {saver}; clone it before it is "
                "written to"
            )


@dataclass(slots=True)
class SavedStorage:
    """A storage, and the tensors over it that autograd has saved."""

    storage: torch.UntypedStorage
    saved: list[weakref.ref[SavedTensor]] = field(default_factory=list)

    def take(self, *, is_rehearsal: bool) -> bool:
        """Make it ours if nobody but autograd holds it: then no tensor of others can see that it is emptied."""
        tensors = self._live()
        plain = FakeTensor if is_rehearsal else torch.Tensor
        if not tensors or not can_be_emptied(self.storage, is_rehearsal=is_rehearsal):
            return False
        if not all(is_plain(kept.tensor, plain) for kept in tensors):
            return False
        if not self._has_only([kept.tensor for kept in tensors]):
            return False
        for kept in tensors:
            kept.is_moved = True
            if not is_rehearsal:  # else it is never emptied
                kept.move(self.storage)
        return True

    def is_escaped(self) -> bool:
        """Tell whether somebody has got hold of it since: a backward has handed on a tensor that was saved.

        A user may have kept it, it may be a gradient, or saved again in a backward with `create_graph`.
        """
        return not self._has_only([kept.tensor for kept in self._live()])

    def _live(self) -> list[SavedTensor]:
        return [kept for each in self.saved if (kept := each()) is not None]

    def _has_only(self, saved: list[torch.Tensor]) -> bool:
        """Tell whether there are no tensors over the storage but these, with the bases of views, and nobody has them.

        Of a tensor without a history, autograd saves the object itself, which others may have, too.
        """
        if all(type(tensor) is torch.Tensor and tensor._base is None for tensor in saved):
            return self._is_alone_with(saved)
        bases = [tensor._base for tensor in saved]
        objects = {id(tensor): tensor for tensor in saved}
        objects |= {id(base): base for base in bases if base is not None}
        # A view of a fake tensor keeps, in C++, all that it was made of: then only what Python refers to is looked at.
        counts_cpp = not isinstance(saved[0], FakeTensor) or all(base is None for base in bases)
        bases.clear()
        # What refers, in this very place, to a storage that nobody else has in Python; this object does, too.
        alone = torch.empty(0)
        storage = alone.untyped_storage()
        if counts_cpp and torch._C._storage_Use_Count(self.storage._cdata) != len(objects) + 1:
            return False
        if sys.getrefcount(self.storage) != sys.getrefcount(storage):
            return False
        num_saved = Counter(map(id, saved))
        num_views = Counter(id(tensor._base) for tensor in objects.values() if tensor._base is not None)
        # What refers, in this very place, to a tensor that nobody else has, and to one that a view is of.
        view = torch.empty(1)[:]  # below autograd, it is a view of nothing; then none of ours has a base either
        listed = [torch.empty(0), torch.empty(1) if view._base is None else view._base, *objects.values()]
        objects.clear()
        in_python, in_cpp = [sys.getrefcount(tensor) for tensor in listed], [_use_count(tensor) for tensor in listed]
        return all(
            python == in_python[num_views[key] > 0] + 2 * num_saved[key]
            and (cpp == in_cpp[0] + num_views[key] or not counts_cpp)
            for key, python, cpp in zip(map(id, listed[2:]), in_python[2:], in_cpp[2:], strict=True)
        )

    def _is_alone_with(self, saved: list[torch.Tensor]) -> bool:
        """Tell the same where none of the tensors is a view: most often, and each time that a chunk is emptied."""
        alone, keys = _Alone.counted(), [id(tensor) for tensor in saved]
        if torch._C._storage_Use_Count(self.storage._cdata) != len(set(keys)) + 1:
            return False
        if self._num_in_python() != (alone.storage if saved else alone.unused_storage):
            return False
        return all(
            python - 2 * (keys.count(key) - 1) == alone.tensor_in_python and _use_count(tensor) == alone.tensor_in_cpp
            for tensor, key, python in zip(saved, keys, _num_in_python(saved), strict=True)
        )

    def _num_in_python(self) -> int:
        """Return the references to the storage in Python, that of this object among them."""
        return sys.getrefcount(self.storage)


@dataclass(frozen=True, slots=True)
class _Alone:
    """References where nobody else has any, as `SavedStorage._is_alone_with` counts them."""

    tensor_in_python: int
    """To a tensor that was saved once."""
    tensor_in_cpp: int
    storage: int
    """To its storage, in Python."""
    unused_storage: int
    """To one without a tensor."""

    @classmethod
    @cache
    def counted(cls) -> _Alone:
        """Count them: they are those of this Python and this torch."""
        with runtime_mode():
            kept = SavedTensor(torch.empty(1), None)
            used, unused = SavedStorage(kept.tensor.untyped_storage()), SavedStorage(torch.UntypedStorage(0))
        (in_python,) = _num_in_python([kept.tensor])
        return cls(in_python, _use_count(kept.tensor), used._num_in_python(), unused._num_in_python())


def _num_in_python(tensors: list[torch.Tensor]) -> list[int]:
    """Return the references to each in Python, those of the list and of this function among them."""
    return [sys.getrefcount(tensor) for tensor in tensors]


def _use_count(tensor: torch.Tensor) -> int:
    count: int = tensor._use_count()  # type: ignore[attr-defined]
    return count


def is_plain(tensor: torch.Tensor, plain: type[torch.Tensor] = torch.Tensor) -> bool:
    """Tell whether a tensor, of the class `plain`, is its type, its strides and what lies in its storage."""
    is_odd = tensor.is_conj() or tensor.is_neg() or tensor.is_nested or tensor.is_quantized
    return type(tensor) is plain and not is_odd


def can_be_emptied(storage: torch.UntypedStorage, *, is_rehearsal: bool = False) -> bool:
    """Tell whether a storage has memory that may go and come back."""
    is_shared = storage.device.type == "cpu" and not is_rehearsal and storage.is_shared()
    return not is_shared and storage.nbytes() > 0 and storage.resizable()


class LeftStorages:
    """Counts storages that were a chunk's and are others' now, until they are freed."""

    def __init__(self) -> None:
        self._nbytes: dict[weakref.ref[torch.UntypedStorage], int] = {}
        self._freed: deque[weakref.ref[torch.UntypedStorage]] = deque()
        """From any thread: a C function is all that runs where a storage is freed."""

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage from now on."""
        self._nbytes[weakref.ref(storage, self._freed.append)] = storage.nbytes()

    @property
    def nbytes(self) -> int:
        """Of those that are alive."""
        while self._freed:
            del self._nbytes[self._freed.popleft()]
        return sum(self._nbytes.values())


class SavedStorages:
    """The memory of an ACTIVATION chunk on DEVICE; see `SavedMemory`."""

    def __init__(self, on_left: Callable[[torch.UntypedStorage], object] = lambda storage: None) -> None:
        """Hold none. `on_left` is called with each that somebody else has from then on."""
        self._on_left = on_left
        self._storages: list[tuple[int, int, SavedStorage]] = []
        """Offset and bytes of each."""

    def hold(self, taken: Sequence[SavedStorage]) -> int:
        """Be these storages from now on; return how many bytes they take, each at its offset."""
        at = 0
        for each in taken:
            nbytes = each.storage.nbytes()
            self._storages.append((at, nbytes, each))
            at += aligned(nbytes)
        return at

    def let_go(self) -> None:
        """Leave the storages as they are; there is nothing here any more."""
        storages, self._storages = self._storages, []
        for _, _, each in storages:
            self._on_left(each.storage)

    def fill(self) -> Sequence[tuple[int, torch.Tensor]]:
        pieces = []
        for at, nbytes, each in self._storages:
            if each.storage.nbytes() == 0:
                each.storage.resize_(nbytes)
            pieces.append((at, torch.empty(0, dtype=torch.uint8, device=each.storage.device).set_(each.storage)))
        return pieces

    def empty(self) -> None:
        # What somebody else has got hold of stays as it is from now on: its content is not ours to take away.
        storages, self._storages = self._storages, []
        for at, nbytes, each in storages:
            if each.is_escaped():
                self._on_left(each.storage)
            else:
                self._storages.append((at, nbytes, each))
                each.storage.resize_(0)


def aligned(nbytes: int) -> int:
    """Return how much of a chunk so many bytes take."""
    return -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES
