"""The memory of weights that one rank holds while several build a model: [Note: Holders]."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from chunkmem.modules.binding import blank
from chunkmem.packing.built import FreedRam
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.values import storage_id

_ALONE = 2
"""Uses of a storage that one tensor has: the tensor, and who counts."""


@dataclass(eq=False, slots=True)
class Weight:
    """A parameter whose module was attached."""

    param: weakref.ref[nn.Parameter]
    name: str
    """As far as it is known."""
    holder: int = -1
    """The rank whose part it is; -1: every rank has the values."""


@dataclass(eq=False, slots=True)
class Released:
    """A storage whose content one rank holds; on the others it is empty, unless it is open."""

    weight: Weight
    """The parameter that it was the memory of."""
    ref: StorageWeakRef
    """Its identity: no other storage gets the same as long as there is a weak reference."""
    nbytes: int
    dtype: torch.dtype
    is_whole: bool = False
    """All ranks have the content, while it is open."""

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """The storage; None if no tensor has it any more."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.ref.cdata)
        return found

    def parameter(self) -> nn.Parameter | None:
        """Return the parameter if this is its memory still."""
        param = self.weight.param()
        return param if param is not None and _memory_of(param) == self.ref.cdata else None


class ReleasedMemory:
    """All storages whose content one rank holds, and which of them all ranks have just now: [Note: Holders]."""

    def __init__(self, rank: int, fetch: Callable[[Released, torch.UntypedStorage], None]) -> None:
        """Begin without any.

        Args:
            rank: this one.
            fetch: copies the content of a storage from its holder to all ranks, which call it together.
        """
        self._rank = rank
        self._fetch = fetch
        self._by_storage: dict[int, Released] = {}
        self._open: list[Released] = []
        """Those that all ranks have memory for."""
        self._moved: list[Weight] = []
        """Parameters that were given other memory since theirs was released."""
        self._freed = FreedRam()

    # Which there are.

    def release(self, weight: Weight) -> None:
        """Leave the memory of a parameter to its holder, if it `can_go`."""
        param = weight.param()
        if param is None or not can_go(param):
            return
        with runtime_mode():
            if weight.holder != self._rank and not param.untyped_storage().resizable():  # numpy's, or a mapped file
                param.data = torch.empty_strided(param.shape, param.stride(), dtype=param.dtype, device=param.device)
            storage = param.untyped_storage()
        released = Released(weight, StorageWeakRef(storage), storage.nbytes(), param.dtype)
        self._by_storage[released.ref.cdata] = released
        self._empty(released, storage)

    def find(self, tensor: torch.Tensor) -> Released | None:
        """Return the released memory that a tensor is in."""
        return self._by_storage.get(_memory_of(tensor))

    def alive(self) -> list[Released]:
        """Return the storages that are some tensor's, in the order in which they were released."""
        return [each for each in self._by_storage.values() if not each.ref.expired()]

    def keep(self, released: Released) -> None:
        """Bring the content to all ranks, for good."""
        self.open([released], needed=[released])
        self._open.remove(released)
        del self._by_storage[released.ref.cdata]

    def end(self) -> None:
        """Put the parameters on placeholders, but those of this rank: no tensor may be without memory unguarded."""
        for released in self.alive():
            param = released.parameter()
            if param is not None and released.weight.holder != self._rank:
                with runtime_mode():
                    param.data = blank(param.dtype, param.device).expand(param.shape)
            storage = released.storage
            if storage is not None and storage.nbytes() < released.nbytes:
                storage.resize_(released.nbytes)
        self._by_storage.clear()
        self._open.clear()
        self._moved.clear()

    # Who has their content.

    def open(self, given: Sequence[Released], *, needed: Sequence[Released]) -> None:
        """Let all ranks have memory for these, and for no others, and the content of those that are `needed`."""
        self.close(besides=given)
        for released in given:
            storage = released.storage
            if storage is None:
                continue
            if released not in self._open:
                self._open.append(released)
                if released.weight.holder != self._rank:
                    storage.resize_(released.nbytes)
                    with runtime_mode():  # with what happens to be there, some operators would raise
                        content_of(released, storage).zero_()
            if released in needed and not released.is_whole:
                self._fetch(released, storage)
                released.is_whole = True

    def close(self, *, besides: Collection[Released] = ()) -> None:
        """Let the holders only have memory, but for what is in `besides`."""
        # Not those of now: what converts a module keeps the new memory until it comes to the next parameter.
        moved, self._moved = self._moved, []
        for weight in moved:
            if self._has_moved(weight):
                self.release(weight)
        for released in [each for each in self._open if each not in besides]:
            self._open.remove(released)
            released.is_whole = False
            storage = released.storage
            if storage is not None:
                released.nbytes = storage.nbytes()
                self._empty(released, storage)
            self.look_again(released.weight)

    def look_again(self, weight: Weight) -> None:
        """If a parameter was given other memory since its own was released, release that, the next time but one."""
        if self._has_moved(weight):
            self._moved.append(weight)

    def _has_moved(self, weight: Weight) -> bool:
        param = weight.param()
        return param is not None and weight.holder >= 0 and self.find(param) is None

    def _empty(self, released: Released, storage: torch.UntypedStorage) -> None:
        if released.weight.holder != self._rank:
            storage.resize_(0)
            self._freed.add(released.nbytes)


def _memory_of(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunction():  # which would ask what memory this is
        return storage_id(tensor)


def can_go(param: nn.Parameter) -> bool:
    """Tell, alike on all ranks, whether others can do without the values of a parameter until they are exchanged."""
    # An exact type: a lazy one, or one of a tensor subclass, is refused or kept as a whole.
    if type(param) is not nn.Parameter or type(param.data) is not torch.Tensor or not storage_id(param):
        return False
    if not param.is_floating_point() or param.numel() == 0 or param.untyped_storage().nbytes() != param.nbytes:
        return False
    if not is_alone(param):
        gc.collect()  # when garbage goes may differ between ranks
    return is_alone(param)


def is_alone(param: nn.Parameter) -> bool:
    """Tell whether no other tensor has the memory of a parameter."""
    return int(torch._C._storage_Use_Count(param.untyped_storage()._cdata)) == _ALONE


def content_of(released: Released, storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all of a storage as a tensor of one dimension."""
    shape = (storage.nbytes() // released.dtype.itemsize,)
    return torch.empty(0, dtype=released.dtype, device=storage.device).set_(storage, 0, shape, (1,))
