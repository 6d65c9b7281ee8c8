"""Chunks of one layout moved, parameter by parameter, into those of another one, over ranks.

Weights first, then each optimizer state; in each of these phases all ranks go through the new groups in one order, see
`chunkmem.plan.moves`. The owner of a group gets memory for one chunk of it. Each parameter comes from the rank that has
it, straight into its slot, and goes to no other rank. An old chunk is freed as soon as all of its parameters are gone.
Weights that are rounded from master weights are not sent.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from chunkmem.assembly.inventory import Contents, require_room, tier_of
from chunkmem.assembly.runtime import Runtime
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.plan.moves import HeldGroup, WantedGroup
from chunkmem.ranks.neighbours import Message, Neighbours
from chunkmem.runtime.chunk import FIRST_CONTENT, Chunk
from chunkmem.runtime.device import give_back_freed_ram, runtime_mode

_FIRST_TAG, _NUM_TAGS = 1 << 29, 1 << 28


class ChunkMover:
    """Moves the chunks of one runtime to another one, whose model is packed and has no content yet."""

    def __init__(self, before: Runtime, after: Runtime, contents: Contents) -> None:
        """Decide what goes where.

        Args:
            before: has the content.
            after: is to have it; its optimizers have claimed their states.
            contents: what all ranks have.

        Raises:
            CapacityError: a rank has no room for what it has meanwhile; on all ranks.
            RankError: a rank is missing.
        """
        self._before, self._after, self._contents = before, after, contents
        self._rank, self._reader, numbers = contents.ranks.rank, contents.reader, contents.numbers
        self._neighbours = Neighbours(contents.ranks, torch.device("cpu"))
        self._params = {
            number: tuple(numbers[id(managed.param)] for managed in group.members)
            for number, group in after.gradients.slots.groups.items()
        }
        """By new group."""
        self._slots = {
            (number, numbers[id(managed.param)]): managed.position
            for number, group in before.gradients.slots.groups.items()
            for managed in group.members
        }
        """By old group and parameter: its place among the slots."""
        layouts = (group for model in after.registry.models for group in model.layout.groups)
        owned = (group for group in layouts if after.owns(after.gradients.slots.groups[group.id].members[0]))
        self._moves = contents.moves_to((group, self._params[group.id]) for group in owned)
        self._tags = {place: number for number, place in enumerate(self._moves.sources)}
        require_room(contents, self._moves, after.tiers)

    def run(self) -> None:
        """Move all. All ranks call it.

        Raises:
            RankError: a rank is missing.
        """
        for phase in self._contents.phases:
            left = self._moves.num_moves()
            self._free((group for group in self._contents.held if not left[group]), phase)
            for wanted in self._moves.order:
                slots = self._begin(wanted, phase) if wanted.rank == self._rank else {}
                for param, source in self._moves.of(wanted):
                    self._move(param, source, wanted, slots.get(param), phase)
                    left[source] -= 1
                if slots:
                    self._complete(wanted.group, phase)
                self._free({source for _, source in self._moves.of(wanted) if not left[source]}, phase)
        self._begin_remote()
        self._place_on_one_tier()
        give_back_freed_ram()

    def _chunks(self, group: int, phase: Role) -> list[Chunk]:
        """Return the chunks of a new group that get content in a phase; the first of them is that which is sent."""
        store, params = self._after.memory.store, self._params[group]
        if phase is not Role.PARAM:
            return [store.chunks[ChunkId(phase, group)]] if self._contents.has_state(phase, params) else []
        param = store.weights(group)
        if param.master is None or not self._contents.has_master(param.group, params):
            return [param]
        return [param.master, param] if param.compute_tier is Tier.HOST else [param.master]

    def _begin(self, wanted: WantedGroup, phase: Role) -> dict[int, torch.Tensor]:
        """Begin the content of a new group in a phase; return the slots of its parameters, 1-D."""
        filled = self._chunks(wanted.group, phase)
        for chunk in filled:
            pager = self._after.memory.pager
            replica = pager.place(chunk, reader=self._reader)
            if phase is not Role.PARAM:
                with runtime_mode():
                    replica.flat.zero_()
        return dict(zip(wanted.params, _flat_slots(filled[0]), strict=True)) if filled else {}

    def _complete(self, group: int, phase: Role) -> None:
        """All parameters of a new group have arrived."""
        if phase is not Role.PARAM:
            return
        store = self._after.memory.store
        param = store.weights(group)
        filled = self._chunks(group, phase)
        if param not in filled:
            param.version = FIRST_CONTENT
            return
        if len(filled) > 1:
            with runtime_mode():
                for low, full in zip(_flat_slots(param), _flat_slots(filled[0]), strict=True):
                    low.copy_(full)
        if param.newest_tier() is param.compute_tier and param.home is not None:
            with runtime_mode():
                param.home.bind()

    def _move(self, param: int, source: HeldGroup, wanted: WantedGroup, slot: torch.Tensor | None, phase: Role) -> None:
        """Take part in moving one parameter."""
        rank = self._rank
        if rank not in (source.rank, wanted.rank) or (
            phase is not Role.PARAM and phase not in self._contents.states.get(param, ())
        ):
            return
        role = Role.MASTER if phase is Role.PARAM and param in self._contents.masters_of[source.rank] else phase
        place = self._contents.phases.index(phase) * len(self._tags) + self._tags[wanted.rank, wanted.group, param]
        tag, label = _FIRST_TAG + place % _NUM_TAGS, f"{self._reader}: {role.value} of parameter {param}"
        with runtime_mode():
            if source.rank == wanted.rank:
                assert slot is not None
                slot.copy_(self._old_slot(source, role, param))
            elif source.rank == rank:
                values = self._old_slot(source, role, param).cpu()
                self._neighbours.send([values], Message(wanted.rank, tag, label))
            else:
                assert slot is not None
                dtype = self._contents.dtypes[source.rank, param] if phase is Role.PARAM else slot.dtype
                is_direct = slot.is_cpu and slot.dtype is dtype
                values = slot if is_direct else torch.empty(slot.numel(), dtype=dtype, device="cpu")
                self._neighbours.receive([values], Message(source.rank, tag, label))
                self._neighbours.wait(tag)
                if values is not slot:
                    slot.copy_(values)

    def _old_slot(self, source: HeldGroup, role: Role, param: int) -> torch.Tensor:
        chunk = self._before.memory.store.chunks[ChunkId(role, source.group)]
        return _flat_slots(chunk)[self._slots[source.group, param]]

    def _free(self, groups: Iterable[HeldGroup], phase: Role) -> None:
        """Give up the chunks of a phase of old groups, those of this rank: nothing is wanted of them any more."""
        store = self._before.memory.store
        for group in (group for group in groups if group.rank == self._rank):
            self._neighbours.wait_until_sent()
            for role in (Role.PARAM, Role.MASTER) if phase is Role.PARAM else (phase,):
                if (chunk := store.chunks.get(ChunkId(role, group.group))) is not None:
                    store.remove(chunk)
            self._after.tiers.device_pool.trim(0)

    def _begin_remote(self) -> None:
        """Have the chunks of other ranks count as there; send what is computed with on HOST to all."""
        after = self._after
        for group, params in self._params.items():
            param = after.memory.store.weights(group)
            if param.is_copy:
                after.memory.pager.place(param, reader=self._reader)
            elif param.is_remote:
                param.version = FIRST_CONTENT
            if param.master is not None and param.master.is_remote and self._contents.has_master(param.group, params):
                param.master.version = FIRST_CONTENT
        if after.sharding.shards is not None:
            after.sharding.shards.send_on_host(reader=self._reader)

    def _place_on_one_tier(self) -> None:
        """Have what stays on one tier there: HOST has room for it by now.

        Raises:
            CapacityError: it has not.
        """
        pager = self._after.memory.pager
        home = pager.store.staying_tier
        for chunk in [chunk for key, chunk in pager.store.chunks.items() if key.role.kind.stays]:
            for tier in [tier for tier in chunk.replicas if tier is not home]:
                pager.pin(chunk, home, reader=self._reader, elastic=True)
                pager.unpin(chunk, home)
                pager.store.drop(chunk, tier)


def _flat_slots(chunk: Chunk) -> list[torch.Tensor]:
    """Return the memory of each slot, 1-D, where the content is."""
    tier = tier_of(chunk)
    assert tier is not None, f"{chunk.label} has no content"
    flat = chunk.replicas[tier].flat
    return [flat[slot.offset : slot.end] for slot in chunk.group.slots]
