"""Chunks without memory: everything is counted, nothing is allocated, so that a model of any size can be rehearsed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch

from chunkmem.assembly.parts import Memory
from chunkmem.data.types import Tier
from chunkmem.modules.binding import BoundChunk, ManagedParameter
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.ledger import Ledger
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.pool import DevicePool, Slab
from chunkmem.runtime.store import ChunkStore
from chunkmem.runtime.tiers import TierCaps
from chunkmem.runtime.timestamps import HostClock

NO_CAP_NBYTES = 2**62
ANYTHING = torch.empty((), device="meta")
"""What is written to slots, which hold nothing."""
_CPU = torch.device("cpu")


class _OpenLedger(Ledger):
    """Counts bytes past its cap, too: what does not fit is found out later, from the trace."""

    @property
    def free_nbytes(self) -> int:
        return NO_CAP_NBYTES

    def charge(self, role: str, nbytes: int) -> None:
        self._count(role, nbytes)


class _CountedStore(ChunkStore):
    """Chunks in memory of torch's meta device, which is all of a size and holds nothing."""

    def __init__(self, ledgers: Iterable[Ledger]) -> None:
        nowhere = ComputeDevice(torch.device("meta"))
        super().__init__({ledger.tier: DevicePool(ledger, nowhere, capacity=0) for ledger in ledgers}, HostClock())

    def follow(self, chunk: Chunk, tier: Tier) -> None:
        """No value differs from another one."""


class RehearsedChunk:
    """Stands for the DEVICE side of a PARAM chunk: here each parameter keeps a (fake) storage of its own."""

    is_bound = True
    device = _CPU

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.parameters: list[ManagedParameter] = []
        self._storages: dict[ManagedParameter, int] = {}
        self._num_own: dict[ManagedParameter, int] = {}

    def add(self, managed: ManagedParameter) -> None:
        """Take a parameter in: it has the chunk's dtype from now on."""
        self.parameters.append(managed)
        with torch._C.DisableTorchFunctionSubclass():
            if managed.param.dtype is not managed.placeholder.dtype:
                managed.param.data = managed.param.data.to(managed.placeholder.dtype)
            self._storages[managed] = int(managed.param.untyped_storage()._cdata)
        self._num_own[managed] = torch._C._storage_Use_Count(self._storages[managed])

    def storage_of(self, managed: ManagedParameter) -> int:
        """Return the identity of the storage that a parameter is in."""
        return self._storages[managed]

    def num_references(self) -> int:
        """Return how many tensors have this chunk's memory, ours included."""
        return sum(map(torch._C._storage_Use_Count, self._storages.values()))

    def num_foreign_references(self, *, besides: int) -> int:
        """Return how many references there are to the memory and to the parameters that are not ours."""
        ours = sum(self._num_own.values())
        return self.num_references() - ours + sum(managed.num_references() for managed in self.parameters)

    def attach(self, slab: Slab) -> torch.Tensor:
        """The slab is only counted."""
        return slab.flat(self._dtype)

    def bind(self) -> None:
        """The parameters stay where they are."""

    def detach(self) -> None:
        """The parameters stay where they are."""

    def abandon(self) -> None:
        """The parameters stay where they are."""

    def was_written(self) -> bool:
        """Nothing is kept of what is written."""
        return False

    def take_written(self) -> bool:
        """The same."""
        return False


def uncapped(device_nbytes: int, *, has_host: bool) -> list[Ledger]:
    """Return the ledgers of a DEVICE that refuses nothing, whatever its cap says, and of such a HOST, or of none."""
    host = _OpenLedger(Tier.HOST, NO_CAP_NBYTES, NO_CAP_NBYTES) if has_host else Ledger(Tier.HOST, 0, 0)
    return [_OpenLedger(Tier.DEVICE, device_nbytes, NO_CAP_NBYTES), host]


def counted_memory(ledgers: Sequence[Ledger]) -> Memory:
    """Return chunks that are only counted, on two tiers or three; where HOST has no room, the two are one."""
    device_nbytes, host_nbytes, *_ = (ledger.cap_nbytes for ledger in ledgers)
    caps = TierCaps(device_nbytes, host_nbytes, shared=host_nbytes == 0)
    return Memory(
        ComputeDevice(_CPU),
        caps,
        Pager(_CountedStore(ledgers)),
        lambda dtype, tier: cast(BoundChunk, RehearsedChunk(dtype)),
    )
