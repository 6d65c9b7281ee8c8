"""Kept slabs that torch's allocator may have back: it asks for them before an allocation of the model fails.

A slab that is kept for reuse is no cache of torch's: without more, an allocation would fail while gigabytes lie idle.
Where none of the allocator's free blocks fits and less than an eighth of the device is free, it takes the memory of all
kept slabs, in C++ and in the allocating thread (`csrc/kept.cpp`). What is computed from then on comes after the copies
that use them yet. The pool finds a slab without memory when it wants to use it, and takes other memory. Until then the
ledger counts it.

Decided in ADR 58.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from chunkmem.runtime.build import storage_library
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.events import Event
from chunkmem.runtime.streams import cuda_handle

_CALLBACKS = "_ZN3c1031FreeCudaMemoryCallbacksRegistryB5cxx11Ev"
"""`c10::FreeCudaMemoryCallbacksRegistry()`."""


class NativeReclaimable:
    """Memory that may be taken from its owner between `offer` and `take`: `csrc/kept.cpp` has it, of all devices."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._keep = ctypes.CFUNCTYPE(None, address, address, number, number)(("chunkmem_keep", library))
        self._take = ctypes.CFUNCTYPE(ctypes.c_int, address)(("chunkmem_take", library))
        self._register = ctypes.CFUNCTYPE(None, address)(("chunkmem_offer", library))
        self._offered: dict[int, tuple[torch.Tensor, Sequence[Event]]] = {}
        """What is written down in C++, which has handles of the events alone: these live until it is crossed out."""
        weakref.finalize(self, _withdraw, self._take, self._offered)

    def offer(self, memory: torch.Tensor, events: Sequence[Event], stream: torch.Stream) -> None:
        """Let the allocator take the memory, after `events`, on `stream`; not if one of them is of no stream."""
        handles = [cuda_handle(event) for event in events]
        if None not in handles:
            key = memory.untyped_storage()._cdata
            self._offered[key] = memory, events
            self._keep(key, (ctypes.c_void_p * len(handles))(*handles), len(handles), stream.stream_id)

    def take(self, memory: torch.Tensor) -> bool:
        """Use the memory again; False: it is gone. Memory that was never offered is there."""
        key = memory.untyped_storage()._cdata
        is_there = bool(self._take(key))
        self._offered.pop(key, None)
        return is_there

    def register(self) -> None:
        """Have torch's allocator of CUDA ask. The second time, do nothing.

        Raises:
            OSError, AttributeError: this torch has no such allocator, or has it elsewhere.
        """
        cuda = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10_cuda.so"))
        self._register(ctypes.cast(cuda[_CALLBACKS], ctypes.c_void_p))


def _withdraw(take: Callable[[int], int], offered: dict[int, tuple[torch.Tensor, Sequence[Event]]]) -> None:
    """Cross out what a pool has offered that is gone without having been closed."""
    for key in offered:
        take(key)
    offered.clear()


def reclaimable_on(compute: ComputeDevice) -> NativeReclaimable | None:
    """Return what the allocator of an accelerator takes kept slabs by; None: it has to do without.

    Warns where it is CUDA's and the library cannot be built.
    """
    if not compute.runs_cuda_kernels:
        return None
    library = storage_library("memory kept for reuse is not given back where an allocation of the model fails")
    if library is None:
        return None
    found = NativeReclaimable(library)
    try:
        found.register()
    except (OSError, AttributeError):
        return None
    return found
