"""What ranks have in chunks, what they are going to have, and whether there is room on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from chunkmem.assembly.runtime import Runtime
from chunkmem.comm.ranks import Ranks
from chunkmem.errors import CapacityError
from chunkmem.layout.spec import Group, MasterCopy
from chunkmem.nn.binding import ManagedParameter
from chunkmem.optim.rule import StateSpec
from chunkmem.optim.shaped_state import ShapedState, SlotForm
from chunkmem.plan.moves import HeldGroup, Moves, WantedGroup, extra_nbytes, plan_moves
from chunkmem.runtime.chunk import NO_CONTENT, Chunk
from chunkmem.runtime.tiers import Tiers
from chunkmem.sizes import format_nbytes
from chunkmem.types import TIERS, Role, Tier


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
    states: Mapping[ManagedParameter, Sequence[Role]],
    *,
    rounded: Collection[int] = (),
) -> Inventory:
    """Return what this rank has.

    Args:
        runtime: of the chunks.
        numbers: by the identity of a Parameter, its number on all ranks.
        states: the optimizer states that parameters of this rank have.
        rounded: numbers of parameters whose master weights hold no more than their weights, and are given up.
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
    found = {numbers[id(managed.param)]: tuple(roles) for managed, roles in states.items()}
    shaped = {
        numbers[id(managed.param)]: tuple(spec for spec in specs if isinstance(spec, ShapedState))
        for group in groups
        for managed, specs in runtime.updater.claims.by_parameter(group).items()
    }
    return Inventory(groups, nbytes, dtypes, frozenset(masters), frozenset(rounded), found, shaped)


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
    """What all ranks of a replica have together."""

    def __init__(self, inventories: Sequence[Inventory]) -> None:
        """Put together what each rank has."""
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

    def wanted(
        self, groups: Iterable[tuple[Group, tuple[int, ...]]], specs: Mapping[Role, StateSpec], *, rank: int
    ) -> list[WantedGroup]:
        """Return what a rank is going to have.

        Args:
            groups: that it is going to own, each with its parameters.
            specs: of optimizer states.
            rank: it.
        """
        return [
            WantedGroup(rank, group.id, params, tuple(self._nbytes(group, params, specs, role) for role in self.phases))
            for group, params in groups
        ]

    def _nbytes(self, group: Group, params: tuple[int, ...], specs: Mapping[Role, StateSpec], phase: Role) -> int:
        if phase is not Role.PARAM:
            return self._state_nbytes(group, params, specs, phase) if self.has_state(phase, params) else 0
        if not self.has_master(group, params):
            return group.nbytes
        # Weights are rounded again where they are used; those that are computed with on HOST never leave it.
        return group.in_float32().nbytes + group.nbytes * group.is_on_host

    def _state_nbytes(self, group: Group, params: tuple[int, ...], specs: Mapping[Role, StateSpec], role: Role) -> int:
        found = enumerate(self._shaped.get((role, param)) for param in params)
        shaped = [(at, spec) for at, spec in found if spec is not None]
        if not shaped:
            return specs[role].form(group).nbytes
        forms = [spec.forms[0]._replace(position=at) for at, spec in shaped]
        for at, (slot, param) in enumerate(zip(group.slots, params, strict=True)):
            if (role, param) not in self._shaped and role in self.states.get(param, ()):
                forms.append(SlotForm(at, (slot.numel,), (1,)))
        return replace(shaped[0][1], forms=tuple(sorted(forms))).form(group).nbytes


def agreed_moves(contents: Contents, own: list[WantedGroup], *, ranks: Ranks, reader: str) -> Moves:
    """Return what is moved in which order, where each rank wants its own groups; all ranks call it.

    `reader` is what they call.

    Raises:
        RankError: a rank is missing.
    """
    label = f"{reader}: new groups"
    wanted = [ranks.broadcast_object(own, label=label, source=rank) for rank in range(ranks.size)]
    return plan_moves(contents.held, [group for groups in wanted for group in groups])


def require_room(
    contents: Contents, moves: Moves, tiers: Tiers, *, ranks: Ranks, reader: str, freed_nbytes: int = 0
) -> None:
    """Check that all ranks have room for what they have meanwhile; all of them call it.

    Args:
        contents: what they have.
        moves: what is moved.
        tiers: of this rank.
        ranks: those of the replica.
        reader: what they call.
        freed_nbytes: that are going to be free before.

    Raises:
        CapacityError: one has not; on all ranks.
        RankError: a rank is missing.
    """
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
