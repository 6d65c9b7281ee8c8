"""Two small tiers with a few chunks in them, without modules and hooks; and a checker of everything that must hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from chunkmem.data.layout import Group, Slot
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.modules.binding import BoundChunk, ManagedParameter
from chunkmem.runtime.arena import HostArena
from chunkmem.runtime.chunk import NO_CONTENT, Chunk
from chunkmem.runtime.device import ComputeDevice, runtime_mode
from chunkmem.runtime.ledger import Ledger
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.pool import DevicePool
from chunkmem.runtime.storage import ChunkStorage, default_backend
from chunkmem.runtime.store import ChunkStore
from tests.helpers.audit import audit_leaving, audit_ledgers

SLAB = 128
"""Bytes; 32 elements, of which a group uses 7:  |0 1 2 3 4 5 . . .|16 . . .|"""
SLOTS = ((0, 6), (16, 1))
"""(offset, elements): one of two rows and three columns, and a single element."""
SHAPES = ((2, 3), ())
NO_LIMIT = 1000
"""Slabs; more than any test takes."""


class World:
    """Groups of the given sizes in slabs; every group has a chunk in PARAM, GRAD and EXP_AVG, none with content yet."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        device: int,
        host: int = NO_LIMIT,
        cached: int = 0,
        limit: int | None = None,
    ) -> None:
        """Make tiers of `device` and `host` slabs; `limit` is what DEVICE may grow to."""
        compute = ComputeDevice.default()
        self.device = Ledger(Tier.DEVICE, device * SLAB, (device if limit is None else limit) * SLAB)
        self.host = Ledger(Tier.HOST, host * SLAB, host * SLAB)
        pools = {
            Tier.DEVICE: DevicePool(self.device, compute, capacity=cached),
            Tier.HOST: HostArena(self.host, compute),
        }
        for pool in pools.values():
            pool.poison = True
        self.store = ChunkStore(pools, compute.clock)
        self.pager = Pager(self.store)
        self.parameters: dict[int, tuple[ManagedParameter, ...]] = {}
        for index, slabs in enumerate(sizes):
            self._add_group(index, slabs, compute.device)

    def _add_group(self, index: int, slabs: int, device: torch.device) -> None:
        slots = tuple(Slot(2 * index + at, index, *place) for at, place in enumerate(SLOTS))
        group = Group(index, "float32", 4, slabs, slabs * SLAB // 4, slots)
        home = BoundChunk(ChunkStorage(default_backend(), device=device, dtype=torch.float32), device=device)
        forms = tuple((torch.Size(shape), torch.empty(shape).stride()) for shape in SHAPES)
        for role in (Role.PARAM, Role.GRAD, Role("exp_avg")):
            key = ChunkId(role, index)
            self.store.add(Chunk(key, group, torch.float32, str(key), forms, home if role is Role.PARAM else None))
        managed = []
        for position, (slot, shape) in enumerate(zip(slots, SHAPES, strict=True)):
            parameter = torch.nn.Parameter(torch.empty(shape, device=device))
            place = {"stride": parameter.stride(), "dtype": parameter.dtype}
            managed.append(ManagedParameter(parameter, f"p{index}.{position}", slot, position, home, **place))
            home.add(managed[-1])
            parameter.data = managed[-1].placeholder
            managed[-1].version = parameter._version
        self.parameters[index] = tuple(managed)

    def chunk(self, role: Role, group: int) -> Chunk:
        return self.store.chunks[ChunkId(role, group)]

    def param(self, group: int, fill: float | None = None) -> Chunk:
        """The PARAM chunk of a group; with `fill`, packed on HOST first, all its elements that value."""
        chunk = self.chunk(Role.PARAM, group)
        if fill is not None:
            self.pager.create(chunk, Tier.HOST, reader="packing", zero=False, elastic=True)
            self.fill(chunk, Tier.HOST, fill)
        return chunk

    def grad(self, group: int) -> Chunk:
        return self.chunk(Role.GRAD, group)

    def fill(self, chunk: Chunk, tier: Tier, value: float) -> None:
        """Write every slot of a replica, as the runtime does; who does so marks it written."""
        with runtime_mode():
            for view in self.store.views(chunk, tier):
                view.fill_(value)

    def cap(self, tier: Tier, slabs: int) -> None:
        """Set another cap, as if it had been the cap from the beginning."""
        ledger = self.store.pools[tier].ledger
        ledger.cap_nbytes = ledger.limit_nbytes = slabs * SLAB
        ledger.peak_nbytes = ledger.total_nbytes

    def on(self, tier: Tier) -> list[str]:
        """What is on a tier, in order of its names."""
        return sorted(map(str, self.store.resident[tier]))

    def check(self) -> None:
        """Assert what always has to hold, content aside."""
        audit_ledgers(self.store)
        audit_leaving(self.pager)
        for tier, resident in self.store.resident.items():
            assert {c.id for c in self.store.chunks.values() if tier in c.replicas} == set(resident)
            pinned = [c for c in resident.values() if c.replicas[tier].pins > 0]
            assert sum(c.nbytes for c in pinned) == self.pager.pinned_nbytes[tier]
        for chunk in self.store.chunks.values():
            if chunk.version != NO_CONTENT:
                assert chunk.newest_tier() is not None, f"{chunk.label}: its newest content is gone"
            for replica in chunk.replicas.values():
                assert replica.version <= chunk.version
                if replica.version == chunk.version != NO_CONTENT:
                    for start, stop in chunk.group.pads:
                        assert not replica.flat[start:stop].any(), f"{chunk.label}: pads are not 0"


def packed(sizes: list[int], **caps: Any) -> World:
    """A world whose PARAM chunks are on HOST, chunk i full of i + 1."""
    world = World(sizes, **caps)
    for index in range(len(sizes)):
        world.param(index, index + 1.0)
    return world


def values_on(chunk: Chunk, tier: Tier) -> list[float]:
    """The seven elements of a replica that are in slots."""
    flat = chunk.replicas[tier].flat
    return [float(x) for offset, numel in SLOTS for x in flat[offset : offset + numel].tolist()]
