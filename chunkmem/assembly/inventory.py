"""What ranks have in chunks, what they are going to have, and whether there is room on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import nn

from chunkmem.assembly.runtime import Runtime
from chunkmem.data.errors import CapacityError
from chunkmem.data.layout import Group, MasterCopy
from chunkmem.data.sizes import format_nbytes
from chunkmem.data.types import TIERS, Role, Tier
from chunkmem.optim.rule import StateSpec
from chunkmem.optim.shaped_state import ShapedState, SlotForm
from chunkmem.plan.moves import HeldGroup, Moves, WantedGroup, extra_nbytes, plan_moves
from chunkmem.ranks.ranks import Ranks
from chunkmem.runtime.chunk import NO_CONTENT, Chunk
from chunkmem.runtime.tiers import Tiers

T = TypeVar("T")


@dataclass(frozen=True)
class Inventory:
    """What one rank has."""

    groups: Mapping[int, tuple[int, ...]]
    """Of the groups that it owns, the numbers that their parameters have on all ranks."""
    nbytes: Mapping[tuple[int, Role], int]
    """By such a group and phase: of its chunks, once each."""
    dtypes: Mapping[int, torch.dtype]
    """By parameter: of its weights, those of its master weights if there are any."""
    masters: frozenset[int]
    """Parameters with master weights."""
    rounded: frozenset[int]
    """Parameters whose master weights hold no more than their weights, and are given up."""
    states: Mapping[int, tuple[Role, ...]]
    """By parameter, the optimizer states that it has."""
    shaped: Mapping[int, tuple[ShapedState, ...]]
    """By parameter, the states of a shape of their own that it has slots for."""


def take_inventory(
    runtime: Runtime,
    numbers: Mapping[int, int],
    states: Mapping[int, tuple[Role, ...]],
    rounded: Iterable[nn.Parameter],
) -> Inventory:
    """Return what this rank has.

    Args:
        runtime: of the chunks.
        numbers: by the identity of a Parameter, its number on all ranks.
        states: by number, the optimizer states that parameters of this rank have.
        rounded: parameters whose master weights hold no more than their weights, and are given up.
    """
    store = runtime.memory.store
    groups: dict[int, tuple[int, ...]] = {}
    masters: set[int] = set()
    dtypes: dict[int, torch.dtype] = {}
    nbytes = Counter[tuple[int, Role]]()
    for group, slots in runtime.gradients.slots.groups.items():
        members = slots.members
        if runtime.owns(members[0]):
            params = groups[group] = tuple(numbers[id(managed.param)] for managed in members)
            param = store.weights(group)
            has_master = param.master is not None and param.master.version != NO_CONTENT
            weights = param.master if has_master and param.master is not None else param
            masters.update(params if has_master else ())
            dtypes.update(dict.fromkeys(params, weights.dtype))
            nbytes[group, Role.PARAM] = weights.nbytes
    for key, chunk in store.chunks.items():
        if key.role.is_state and key.group in groups and chunk.version != NO_CONTENT:
            nbytes[key.group, key.role] = chunk.nbytes
    given_up = frozenset(numbers[id(param)] for param in rounded)
    shaped = {
        numbers[id(managed.param)]: tuple(spec for spec in specs if isinstance(spec, ShapedState))
        for group in groups
        for managed, specs in runtime.updater.state_chunks.by_parameter(group).items()
    }
    return Inventory(groups, nbytes, dtypes, frozenset(masters), given_up, states, shaped)


def tier_of(chunk: Chunk) -> Tier | None:
    """Return where the content is, on HOST rather than on DEVICE; None if there is none."""
    return next((tier for tier in reversed(TIERS) if chunk.ready(tier)), None)


def free_copies(runtime: Runtime) -> None:
    """Free what is there twice, can be made again, or is of no use any more, once the runtime has stopped."""
    store = runtime.memory.store
    for chunk in list(store.chunks.values()):
        kind, is_dead = chunk.id.role.kind, chunk.version == NO_CONTENT
        if (kind.is_of_step and (is_dead or not kind.is_of_call)) or chunk.is_remote or chunk.is_copy:
            store.remove(chunk)
        elif not kind.is_of_call:
            kept = None if chunk.can_be_rounded else tier_of(chunk)
            for tier in [tier for tier in chunk.replicas if tier is not kept]:
                store.drop(chunk, tier)
    runtime.tiers.device_pool.trim(0)


class Contents:
    """What all ranks of a replica have together, and what becomes of it."""

    def __init__(
        self, own: Inventory, specs: Mapping[Role, StateSpec], numbers: Mapping[int, int], *, ranks: Ranks, reader: str
    ) -> None:
        """Put together what each rank has.

        Args:
            own: what this one has.
            specs: of optimizer states.
            numbers: by the identity of a Parameter, its number on all ranks.
            ranks: those of the replica.
            reader: what all of them call.

        Raises:
            RankError: a rank is missing.
        """
        self.specs, self.numbers, self.ranks, self.reader = specs, numbers, ranks, reader
        inventories = self.of_all(own, "what ranks have")
        self.masters = frozenset().union(*(each.masters - each.rounded for each in inventories))
        """Parameters with master weights that stay."""
        self.dtypes = {
            (rank, param): dtype for rank, each in enumerate(inventories) for param, dtype in each.dtypes.items()
        }
        """By rank and parameter: of its weights, those of its master weights if there are any."""
        self.masters_of = tuple(each.masters for each in inventories)
        """By rank, those with any: of a tied weight that is frozen, one stage may have them and the other one not."""
        self.states = {param: roles for each in inventories for param, roles in each.states.items()}
        """By parameter, the optimizer states that it has."""
        self._shaped = {
            (spec.role, param): spec for each in inventories for param, specs in each.shaped.items() for spec in specs
        }
        self.phases = [Role.PARAM, *sorted({role for roles in self.states.values() for role in roles})]
        """What is moved in turn: weights, with their master weights, then each state."""
        self.held = [
            HeldGroup(rank, group, params, tuple(each.nbytes.get((group, phase), 0) for phase in self.phases))
            for rank, each in enumerate(inventories)
            for group, params in each.groups.items()
        ]
        """All groups of all ranks."""

    def has_master(self, group: Group, params: Iterable[int]) -> bool:
        """Tell whether a group of these parameters is going to have master weights."""
        if group.master is MasterCopy.NONE:
            return False
        return group.master is MasterCopy.PACKED or not self.masters.isdisjoint(params)

    def has_state(self, role: Role, params: Iterable[int]) -> bool:
        """Tell whether one of these parameters has a state."""
        return any(role in self.states.get(param, ()) for param in params)

    def of_all(self, own: T, label: str) -> list[T]:
        """Return what each rank passes."""
        label = f"{self.reader}: {label}"
        return [self.ranks.broadcast_object(own, label=label, source=rank) for rank in range(self.ranks.size)]

    def moves_to(self, groups: Iterable[tuple[Group, tuple[int, ...]]]) -> Moves:
        """Return what is moved in which order.

        Args:
            groups: that this rank is going to own, each with its parameters.

        Raises:
            RankError: a rank is missing.
        """
        rank = self.ranks.rank
        own = [
            WantedGroup(rank, g.id, params, tuple(self._nbytes(g, params, r) for r in self.phases))
            for g, params in groups
        ]
        wanted = self.of_all(own, "new groups")
        return plan_moves(self.held, [group for groups in wanted for group in groups])

    def _nbytes(self, group: Group, params: tuple[int, ...], phase: Role) -> int:
        if phase is not Role.PARAM:
            return self._state_nbytes(group, params, phase) if self.has_state(phase, params) else 0
        if not self.has_master(group, params):
            return group.nbytes
        # Weights are rounded again where they are used; those that are computed with on HOST never leave it.
        return group.in_float32().nbytes + group.nbytes * group.is_on_host

    def _state_nbytes(self, group: Group, params: tuple[int, ...], role: Role) -> int:
        found = enumerate(self._shaped.get((role, param)) for param in params)
        shaped = [(at, spec) for at, spec in found if spec is not None]
        if not shaped:
            return self.specs[role].form(group).nbytes
        forms = [spec.forms[0]._replace(position=at) for at, spec in shaped]
        for at, (slot, param) in enumerate(zip(group.slots, params, strict=True)):
            if (role, param) not in self._shaped and role in self.states.get(param, ()):
                forms.append(SlotForm(at, (slot.numel,), (1,)))
        return replace(shaped[0][1], forms=tuple(sorted(forms))).form(group).nbytes


def require_room(contents: Contents, moves: Moves, tiers: Tiers, *, freed_nbytes: int = 0) -> None:
    """Check that all ranks have room for what they have meanwhile; all of them call it.

    Args:
        contents: what they have.
        moves: what is moved.
        tiers: of this rank.
        freed_nbytes: that are going to be free before.

    Raises:
        CapacityError: one has not; on all ranks.
        RankError: a rank is missing.
    """
    ranks, reader = contents.ranks, contents.reader
    extra = extra_nbytes(contents.held, moves, rank=ranks.rank)
    ledgers = (tiers.host, tiers.device)
    spare_nbytes = sum(ledger.spare_nbytes for ledger in ledgers) + freed_nbytes
    # On two tiers, a chunk may find half of the room on either.
    is_split = all(ledger.limit_nbytes for ledger in ledgers)
    largest = max((nbytes for group in moves.order for nbytes in group.nbytes), default=0)
    kept_nbytes = sum(
        nbytes
        for group in moves.order
        for phase, nbytes in zip(contents.phases, group.nbytes, strict=True)
        if group.rank == ranks.rank and phase.kind.stays
    )
    lacking = max(extra + largest * is_split - spare_nbytes, (kept_nbytes - tiers.host.limit_nbytes) * is_split)
    (most,) = ranks.max_over([float(lacking)], label=f"{reader}: comparing room")
    if most > 0:
        kept = " and ".join({phase.label for phase in contents.phases if phase.kind.stays})
        said = f", and its {kept} are to take {format_nbytes(kept_nbytes)} of HOST" if kept_nbytes else ""
        cap_nbytes = ledgers[0].limit_nbytes or ledgers[1].limit_nbytes
        needed_nbytes = cap_nbytes + int(most)
        raise CapacityError(
            f"{reader}: while chunks move, this rank has up to {format_nbytes(max(0, extra))} more than before, and "
            f"{format_nbytes(spare_nbytes)} are free{said}; a rank lacks {format_nbytes(int(most))}: raise memory.host "
            f"to at least {format_nbytes(needed_nbytes)} ({needed_nbytes} bytes)",
            needed_nbytes=needed_nbytes,
            cap_nbytes=cap_nbytes,
            tier=Tier.HOST,
        )
