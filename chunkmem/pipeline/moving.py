"""Chunks of one layout moved, parameter by parameter, into those of another one, over ranks.

[Note: Moving chunks] Weights first, then each optimizer state; in each of these phases all ranks go through the new
groups in one order, see [Note: Order of moves] in `chunkmem.plan.moves`. The owner of a group gets memory for one chunk
of it. Each parameter comes from the rank that has it, straight into its slot, and goes to no other rank. An old chunk
is freed as soon as all of its parameters are gone. Weights that are rounded from master weights are not sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from chunkmem.assembly import Runtime
from chunkmem.comm.neighbours import Message, Neighbours
from chunkmem.comm.ranks import Ranks
from chunkmem.errors import CapacityError
from chunkmem.layout.spec import MasterCopy
from chunkmem.nn.binding import ManagedParameter
from chunkmem.plan.moves import HeldGroup, WantedGroup, extra_nbytes, plan_moves
from chunkmem.runtime.chunk import FIRST_CONTENT, NO_CONTENT, Chunk
from chunkmem.runtime.device import give_back_freed_ram, runtime_mode
from chunkmem.sizes import format_nbytes
from chunkmem.types import TIERS, ChunkId, Role, Tier

_FIRST_TAG, _NUM_TAGS = 1 << 29, 1 << 28
_WEIGHTS = (Role.PARAM, Role.MASTER)


@dataclass(frozen=True)
class Inventory:
    """What one rank has."""

    groups: Mapping[int, tuple[int, ...]]
    """Of the groups that it owns, the numbers that their parameters have on all ranks."""
    nbytes: Mapping[tuple[int, Role], int]
    """By such a group and phase: of its chunks."""
    dtypes: Mapping[int, torch.dtype]
    """By parameter: of its weights, those of its master weights if there are any."""
    masters: frozenset[int]
    """Parameters with master weights."""
    states: Mapping[int, tuple[Role, ...]]
    """By parameter, the optimizer states that it has."""


def take_inventory(
    runtime: Runtime, numbers: Mapping[int, int], states: Mapping[ManagedParameter, Sequence[Role]]
) -> Inventory:
    """Return what this rank has; free what is there twice, or can be made again.

    Args:
        runtime: of the chunks; it has stopped.
        numbers: by the identity of a Parameter, its number on all ranks.
        states: the optimizer states that parameters of this rank have.
    """
    store = runtime.memory.store
    for chunk in list(store.chunks.values()):
        if chunk.id.role is Role.GRAD or chunk.is_remote or chunk.is_copy:
            store.remove(chunk)
            continue
        if chunk.id.role is Role.ACTIVATION:
            continue
        kept = None if chunk.can_be_rounded else _tier_of(chunk)
        for tier in [tier for tier in chunk.replicas if tier is not kept]:
            store.drop(chunk, tier)
    runtime.tiers.device_pool.trim(0)
    groups: dict[int, tuple[int, ...]] = {}
    masters: set[int] = set()
    dtypes: dict[int, torch.dtype] = {}
    nbytes = Counter[tuple[int, Role]]()
    for group, members in runtime.gradients.members.items():
        if runtime.owns(members[0]):
            params = groups[group] = tuple(numbers[id(managed.param)] for managed in members)
            param = store.chunks[ChunkId(Role.PARAM, group)]
            has_master = param.master is not None and param.master.version != NO_CONTENT
            masters.update(params if has_master else ())
            dtypes.update(dict.fromkeys(params, torch.float32 if has_master else param.dtype))
    for key, chunk in store.chunks.items():
        nbytes[key.group, _phase(key.role)] += chunk.nbytes * len(chunk.replicas)
    found = {numbers[id(managed.param)]: tuple(roles) for managed, roles in states.items()}
    return Inventory(groups, nbytes, dtypes, frozenset(masters), found)


class ChunkMover:
    """Moves the chunks of one runtime to another one, whose model is packed and has no content yet."""

    def __init__(
        self,
        before: Runtime,
        after: Runtime,
        inventories: Sequence[Inventory],
        *,
        ranks: Ranks,
        numbers: Mapping[int, int],
    ) -> None:
        """Decide what goes where; see [Note: Moving chunks].

        Args:
            before: has the content.
            after: is to have it; its optimizers have claimed their states.
            inventories: what each rank has.
            ranks: those that have one replica, before and after.
            numbers: by the identity of a Parameter, its number on all ranks.

        Raises:
            CapacityError: a rank has no room for what it has meanwhile; on all ranks.
            RankError: a rank is missing.
        """
        self._before, self._after, self._ranks, self._numbers = before, after, ranks, numbers
        self._neighbours = Neighbours(ranks, torch.device("cpu"))
        self._masters = frozenset().union(*(each.masters for each in inventories))
        self._dtypes = {param: dtype for each in inventories for param, dtype in each.dtypes.items()}
        self._states = {param: roles for each in inventories for param, roles in each.states.items()}
        self._phases = [Role.PARAM, *sorted({role for roles in self._states.values() for role in roles})]
        self._slots = {
            (group, numbers[id(managed.param)]): managed.position
            for group, members in before.gradients.members.items()
            for managed in members
        }
        """By old group and parameter: its place among the slots."""
        self.sent_nbytes = 0
        """That this rank has sent."""
        held = [
            HeldGroup(rank, group, params, tuple(each.nbytes.get((group, phase), 0) for phase in self._phases))
            for rank, each in enumerate(inventories)
            for group, params in each.groups.items()
        ]
        self._held = [group for group in held if group.rank == ranks.rank]
        own = [
            WantedGroup(ranks.rank, group, params, tuple(self._wanted_nbytes(group, phase) for phase in self._phases))
            for group, params in self._wanted_groups().items()
        ]
        wanted = [
            ranks.broadcast_object(own, label="repartition: new groups", source=rank) for rank in range(ranks.size)
        ]
        self._moves = plan_moves(held, [group for groups in wanted for group in groups])
        self._tags = {place: number for number, place in enumerate(self._moves.sources)}
        self._require_room(extra_nbytes(held, self._moves, rank=ranks.rank))

    def run(self) -> None:
        """Move all. All ranks call it.

        Raises:
            RankError: a rank is missing.
        """
        for phase in self._phases:
            left = self._moves.num_moves()
            self._free([group for group in self._held if not left[group]], phase)
            for wanted in self._moves.order:
                slots = self._begin(wanted, phase) if wanted.rank == self._ranks.rank else {}
                for param, source in self._moves.of(wanted):
                    self._move(param, source, wanted, slots.get(param), phase)
                    left[source] -= 1
                if slots:
                    self._complete(wanted.group, phase)
                sources = {source for _, source in self._moves.of(wanted) if source.rank == self._ranks.rank}
                self._free([source for source in sources if not left[source]], phase)
        self._begin_remote()
        give_back_freed_ram()

    def _wanted_groups(self) -> dict[int, tuple[int, ...]]:
        members = self._after.gradients.members
        own = {group: managed for group, managed in sorted(members.items()) if self._after.owns(managed[0])}
        return {group: tuple(self._numbers[id(one.param)] for one in managed) for group, managed in own.items()}

    def _wanted_nbytes(self, group: int, phase: Role) -> int:
        return sum(chunk.nbytes for chunk in self._chunks(group, phase))

    def _chunks(self, group: int, phase: Role) -> list[Chunk]:
        """Return the chunks of a new group that get content in a phase; the first of them is that which is sent."""
        chunks = self._after.memory.store.chunks
        members = [self._numbers[id(managed.param)] for managed in self._after.gradients.members[group]]
        if phase is not Role.PARAM:
            has_any = any(phase in self._states.get(param, ()) for param in members)
            return [chunks[ChunkId(phase, group)]] if has_any else []
        param = chunks[ChunkId(Role.PARAM, group)]
        if param.master is None or not self._has_master(param, members):
            return [param]
        # Weights are rounded again where they are used; those that are computed with on HOST never leave it.
        return [param.master, param] if param.compute_tier is Tier.HOST else [param.master]

    def _has_master(self, param: Chunk, members: Iterable[int]) -> bool:
        return param.group.master is MasterCopy.PACKED or not self._masters.isdisjoint(members)

    def _require_room(self, extra_nbytes: int) -> None:
        pools = self._after.memory.store.pools
        ledgers = [pools[tier].ledger for tier in (Tier.HOST, Tier.DEVICE)]
        spare_nbytes = sum(ledger.spare_nbytes for ledger in ledgers)
        # On two tiers, a chunk may find half of the room on either.
        is_split = all(ledger.limit_nbytes for ledger in ledgers)
        largest = max((nbytes for group in self._moves.order for nbytes in group.nbytes), default=0)
        lacking = extra_nbytes + largest * is_split - spare_nbytes
        (most,) = self._ranks.max_over([float(lacking)], label="repartition: comparing what is free")
        if most > 0:
            cap_nbytes = ledgers[0].limit_nbytes or ledgers[1].limit_nbytes
            needed_nbytes = cap_nbytes + int(most)
            raise CapacityError(
                f"repartition: while chunks are moved, this rank has up to {format_nbytes(max(0, extra_nbytes))} more "
                f"than before, and {format_nbytes(spare_nbytes)} are free; a rank lacks {format_nbytes(int(most))}: "
                f"raise memory.host from {format_nbytes(cap_nbytes)} to at least {format_nbytes(needed_nbytes)} "
                f"({needed_nbytes} bytes)",
                needed_nbytes=needed_nbytes,
                cap_nbytes=cap_nbytes,
            )

    def _begin(self, wanted: WantedGroup, phase: Role) -> dict[int, torch.Tensor]:
        """Begin the content of a new group in a phase; return the slots of its parameters, 1-D."""
        filled = self._chunks(wanted.group, phase)
        for chunk in filled:
            replica = self._after.memory.pager.place(chunk, reader="repartition")
            if phase is not Role.PARAM:
                with runtime_mode():
                    replica.flat.zero_()
        return dict(zip(wanted.params, _flat_slots(filled[0]), strict=True)) if filled else {}

    def _complete(self, group: int, phase: Role) -> None:
        """All parameters of a new group have arrived."""
        if phase is not Role.PARAM:
            return
        store = self._after.memory.store
        param = store.chunks[ChunkId(Role.PARAM, group)]
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
        rank = self._ranks.rank
        if rank not in (source.rank, wanted.rank) or (
            phase is not Role.PARAM and phase not in self._states.get(param, ())
        ):
            return
        role = Role.MASTER if phase is Role.PARAM and param in self._masters else phase
        place = self._phases.index(phase) * len(self._tags) + self._tags[wanted.rank, wanted.group, param]
        tag, label = _FIRST_TAG + place % _NUM_TAGS, f"repartition: {role.value} of parameter {param}"
        with runtime_mode():
            if source.rank == wanted.rank:
                assert slot is not None
                slot.copy_(self._old_slot(source, role, param))
            elif source.rank == rank:
                values = self._old_slot(source, role, param).cpu()
                self._neighbours.send([values], Message(wanted.rank, tag, label))
                self.sent_nbytes += values.nbytes
            else:
                assert slot is not None
                dtype = self._dtypes[param] if phase is Role.PARAM else slot.dtype
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
        """Give up the chunks of a phase of old groups of this rank, of which nothing is wanted any more."""
        store = self._before.memory.store
        for group in groups:
            self._neighbours.settle()
            for role in (*_WEIGHTS,) if phase is Role.PARAM else (phase,):
                if (chunk := store.chunks.get(ChunkId(role, group.group))) is not None:
                    store.remove(chunk)
            self._after.tiers.device_pool.trim(0)

    def _begin_remote(self) -> None:
        """Have the chunks of other ranks count as there; send what is computed with on HOST to all."""
        after = self._after
        for group, members in after.gradients.members.items():
            param = after.memory.store.chunks[ChunkId(Role.PARAM, group)]
            numbers = [self._numbers[id(managed.param)] for managed in members]
            if param.is_copy:
                after.memory.pager.place(param, reader="repartition")
            elif param.is_remote:
                param.version = FIRST_CONTENT
            if param.master is not None and param.master.is_remote and self._has_master(param, numbers):
                param.master.version = FIRST_CONTENT
        if after.sharding.shards is not None:
            after.sharding.shards.send_on_host(reader="repartition")


def _phase(role: Role) -> Role:
    return Role.PARAM if role in _WEIGHTS else role


def _tier_of(chunk: Chunk) -> Tier | None:
    """Return where the content is, on HOST rather than on DEVICE; None if there is none."""
    return next((tier for tier in reversed(TIERS) if chunk.ready(tier)), None)


def _flat_slots(chunk: Chunk) -> list[torch.Tensor]:
    """Return the memory of each slot, 1-D, where the content is."""
    tier = _tier_of(chunk)
    assert tier is not None, f"{chunk.label} has no content"
    flat = chunk.replicas[tier].flat
    return [flat[slot.offset : slot.end] for slot in chunk.group.slots]
