"""Move memory in and out of a storage that lives on, so that every view autograd has saved follows.

A parameter is a fixed view into its chunk's storage, and so is every tensor derived from it that autograd keeps for
backward (`weight.t()` in a Linear). Eviction takes the memory out of that storage and a later fetch puts other memory
in: all those views come back with it. Pointing the parameter elsewhere instead would leave the saved views on the old
memory, which could then neither be freed nor reused.

Decided in ADR 1.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from chunkmem.data.errors import StateError


@dataclass(frozen=True)
class StorageBackend:
    """One way to exchange the memory of two storages, one of which is empty."""

    name: str
    swap: Callable[[torch.UntypedStorage, torch.UntypedStorage], object]
    moves_contents: bool = True
    """The memory stays where it is and only changes hands; else what is copied has to be over before."""

    def exchange(self, a: torch.UntypedStorage, b: torch.UntypedStorage) -> None:
        """Give `a` the memory of `b` and the other way round; one of them holds 0 bytes.

        Raises:
            StateError: both hold memory; nothing has been changed.
        """
        if a.nbytes() != 0 and b.nbytes() != 0:  # of equal sizes, torch would exchange them
            raise StateError(f"storages of {a.nbytes()} and {b.nbytes()} bytes: one of them has to be empty")
        self.swap(a, b)


def can_swap() -> bool:
    """Tell whether torch has its own exchange of data pointers, as from 2.12 on. Contents move along."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def native_backend(library: ctypes.CDLL) -> StorageBackend:
    """Return the same in a few lines of C++ over torch's c10 headers, for torch before 2.12. Contents move along."""
    exchange = library.chunkmem_exchange_storages
    exchange.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return StorageBackend("native", lambda a, b: exchange(a._cdata, b._cdata))


def resize_backend() -> StorageBackend:
    """Return `resize_` of both: it works everywhere, but pays the allocator each time, and contents are undefined."""
    return StorageBackend("resize", _resize, moves_contents=False)


def _resize(a: torch.UntypedStorage, b: torch.UntypedStorage) -> None:
    # The full one first, so that there are never two of them.
    for storage, nbytes in sorted(((a, b.nbytes()), (b, a.nbytes())), key=lambda pair: pair[1]):
        storage.resize_(nbytes)


def default_backend() -> StorageBackend:
    """Return the fastest back end of this torch: its own exchange, else ours in C++, else `resize_`."""
    if can_swap():
        return StorageBackend("swap", lambda a, b: a._swap_data_ptr_(b))  # type: ignore[attr-defined]
    from chunkmem.runtime.build import storage_library

    library = storage_library("eviction will be slower than with torch 2.12 or later")
    return native_backend(library) if library is not None else resize_backend()


class ChunkStorage:
    """A chunk's memory on DEVICE: a storage that lives as long as the chunk and holds a slab only at times."""

    def __init__(self, backend: StorageBackend, *, device: torch.device, dtype: torch.dtype) -> None:
        self._backend = backend
        self.flat = torch.empty(0, dtype=dtype, device=device)
        """1-D view of the whole chunk, valid while a slab is attached."""
        self._slab: torch.UntypedStorage | None = None
        self._renew()

    def _renew(self) -> None:
        """Be another storage, of no memory."""
        self.storage = torch.UntypedStorage(0, device=self.flat.device)
        self.flat = torch.empty(0, dtype=self.flat.dtype, device=self.flat.device)

    def _let_go(self) -> torch.UntypedStorage:
        if self._slab is None:
            raise StateError("no slab is attached to this chunk")
        slab, self._slab = self._slab, None
        return slab

    def attach(self, slab: torch.UntypedStorage) -> None:
        """Take the memory of `slab`, which is empty from then on. Its contents are undefined."""
        if self._slab is not None:
            raise StateError("a slab is attached to this chunk already")
        first = self.flat.untyped_storage()._cdata != self.storage._cdata
        self._backend.exchange(self.storage, slab)
        self._slab = slab
        if first:
            self.flat.set_(self.storage)

    def take(self, slab: torch.Tensor) -> None:
        """Take the memory of `slab`, bytes in one dimension, which are all of their storage; see `attach`."""
        self.attach(slab.untyped_storage())

    def detach(self) -> torch.UntypedStorage:
        """Give the memory back to the slab it came with, and return that slab."""
        slab = self._let_go()
        self._backend.exchange(slab, self.storage)
        return slab

    def abandon(self) -> None:
        """Leave the memory to the tensors of others, and have none any more."""
        self._let_go()
        self._renew()


class HostStorage(ChunkStorage):
    """The memory of a chunk that is computed with on HOST: its slab, which it has for good, as a storage of its own."""

    def take(self, slab: torch.Tensor) -> None:
        """Be the memory of `slab`, which is one of many in its storage."""
        self.storage = torch.from_numpy(slab.numpy()).untyped_storage()
        self.flat = torch.empty(0, dtype=self.flat.dtype, device="cpu").set_(self.storage)
        self._slab = slab.untyped_storage()

    def detach(self) -> torch.UntypedStorage:
        """Have no memory any more; return the storage that the slab is in."""
        slab = self._let_go()
        self._renew()
        return slab
