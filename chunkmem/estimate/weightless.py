"""Chunks without memory: everything is counted, nothing is allocated, so that a model of any size can be rehearsed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch

from chunkmem.assembly.parts import Memory
from chunkmem.nn.binding import BoundChunk, ManagedParameter
from chunkmem.runtime.chunk import Chunk, Replica
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.ledger import Ledger
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.pool import Slab
from chunkmem.runtime.store import ChunkStore
from chunkmem.runtime.tiers import TierCaps
from chunkmem.runtime.timestamps import HostClock
from chunkmem.types import Tier

NO_CAP_NBYTES = 2**62
_CPU = torch.device("cpu")


def open_ledger(tier: Tier, cap_nbytes: int = NO_CAP_NBYTES) -> Ledger:
    """Return a ledger that refuses nothing; the cap is what it says to those who ask."""
    return _OpenLedger(tier, cap_nbytes, NO_CAP_NBYTES)


class _OpenLedger(Ledger):
    """Counts bytes past its cap, too: what does not fit is found out later, from the trace."""

    @property
    def free_nbytes(self) -> int:
        return NO_CAP_NBYTES

    def charge(self, role: str, nbytes: int) -> None:
        self.total_nbytes += nbytes
        self.now[role] = self.now.get(role, 0) + nbytes


class _Nowhere:
    """Takes what is written to it, as a slot does, and keeps nothing."""

    def copy_(self, value: object) -> None:
        """Forget a first gradient."""

    def add_(self, value: object) -> None:
        """Forget a further gradient."""

    def zero_(self) -> None:
        """Forget that there is none."""


class _WeightlessPool:
    """A tier of unlimited size, whose slabs are sizes only."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.poison = False
        self._nothing = torch.empty(0, dtype=torch.uint8, device="cpu")

    def alloc(self, role: str, nbytes: int) -> Slab:
        self.ledger.charge(role, nbytes)
        return Slab(nbytes, self._nothing)

    def free(self, role: str, slab: Slab) -> None:
        self.ledger.release(role, slab.nbytes)

    def take_again(self, role: str, slab: Slab) -> bool:
        """Nothing ever fails."""
        return False

    def expect(self, nbytes: int) -> None:
        """Nothing is taken ahead of need."""

    def close(self) -> None:
        """Nothing is held."""


class WeightlessStore(ChunkStore):
    """Replicas that are only counted."""

    def __init__(self, ledgers: Iterable[Ledger]) -> None:
        super().__init__({ledger.tier: _WeightlessPool(ledger) for ledger in ledgers}, HostClock())

    def take_slab(self, chunk: Chunk, tier: Tier) -> Replica:
        slab = self.pools[tier].alloc(chunk.id.role.value, chunk.nbytes)
        return self._enter(chunk, tier, Replica(slab, slab.bytes))

    def create(self, chunk: Chunk, tier: Tier, *, zero: bool) -> Replica:
        replica = chunk.replicas.get(tier) or self.take_slab(chunk, tier)
        self.mark_written(chunk, tier)
        return replica

    def _give_slab_back(self, chunk: Chunk, tier: Tier) -> None:
        slab = chunk.replicas.pop(tier).slab
        del self.resident[tier][chunk.id]
        self.pools[tier].free(chunk.id.role.value, slab)

    def views(self, chunk: Chunk, tier: Tier) -> tuple[torch.Tensor, ...]:
        # Gradients are written to slots and never read back.
        return cast(tuple[torch.Tensor, ...], _EVERY_SLOT)


class _EverySlot(tuple[Any, ...]):
    """As many slots as anyone asks for."""

    __slots__ = ()

    def __getitem__(self, position: Any) -> Any:
        return _Nowhere()


_EVERY_SLOT = _EverySlot()


class RehearsedChunk:
    """Stands for the DEVICE side of a PARAM chunk: here each parameter keeps a (fake) storage of its own."""

    is_bound = True
    device = _CPU

    def __init__(self) -> None:
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


def one_tier(device_nbytes: int = NO_CAP_NBYTES) -> tuple[Ledger, Ledger]:
    """Return the ledgers of a DEVICE that refuses nothing, whatever its cap says, and of a HOST that has no room."""
    return open_ledger(Tier.DEVICE, device_nbytes), Ledger(Tier.HOST, 0, 0)


def two_tiers(device_nbytes: int = NO_CAP_NBYTES) -> tuple[Ledger, Ledger]:
    """Return the ledgers of a DEVICE and a HOST that refuse nothing, whatever the cap on DEVICE says."""
    return open_ledger(Tier.DEVICE, device_nbytes), open_ledger(Tier.HOST)


def counted_memory(
    device: Ledger,
    host: Ledger,
    disk: Ledger | None = None,
    *,
    make_pager: Callable[[ChunkStore], Pager] = Pager,
) -> Memory:
    """Return chunks that are only counted, on two tiers or three; where HOST has no room, the two are one."""
    pager = make_pager(WeightlessStore([device, host] if disk is None else [device, host, disk]))
    disk_nbytes = 0 if disk is None else disk.cap_nbytes
    caps = TierCaps(device.cap_nbytes, host.cap_nbytes, shared=host.limit_nbytes == 0, disk_nbytes=disk_nbytes)
    return Memory(ComputeDevice(_CPU), caps, pager, lambda dtype, tier: cast(BoundChunk, RehearsedChunk()))
