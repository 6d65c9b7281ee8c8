"""The state of replicas in program order, with what may not be: the book-keeping half of `simulate`."""

from __future__ import annotations

from typing import NoReturn

from chunkmem.data.errors import CapacityError, PlanError
from chunkmem.data.trace import Trace
from chunkmem.data.types import PLACE, TIERS, ChunkId, Tier
from chunkmem.plan.ahead import SHADOW
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import Action, Alloc, Copy, Free, Plan, Update, Wait
from chunkmem.plan.semantics import ABSENT, NEWEST, State

_STATES = ("absent", "without the newest version", "there")


class Position:
    """Where in a plan, for messages."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.index = -1
        self.action: Action | None = None

    def __str__(self) -> str:
        if self.index < 0:
            return "the plan's start"
        moment = self._trace.moments[self.index]
        doing = f"{moment.kind.name} {moment.chunk}" if self.action is None else _shown(self.action)
        return f"moment {self.index} ({moment}): {doing}"

    def fail(self, sentence: str) -> NoReturn:
        """Raise a `PlanError` that names the place."""
        raise PlanError(f"{self}: {sentence}")


class CheckedState(State):
    """A plan's replicas, and the bytes of them that it takes at most; what may not be raises, with the place."""

    def __init__(self, plan: Plan, trace: Trace, machine: Machine, position: Position) -> None:
        super().__init__(trace.chunk_nbytes)
        self._position = position
        self.peak_nbytes = [0] * len(TIERS)
        self._roles = [(tier, chunk.role.value) for chunk, tier in self.replicas]
        self.charge_nbytes = 0
        """Non-model data on DEVICE."""
        self._caps = tuple(machine.cap_nbytes[tier] for tier in TIERS)
        self._role_nbytes: dict[tuple[Tier, str], int] = {}
        self.role_peak_nbytes: dict[tuple[Tier, str], int] = {}
        self.start: list[int] = []
        for placed in plan.start:
            replica = self.replica(placed.chunk, placed.tier)
            if self.states[replica] != ABSENT:
                position.fail(f"{placed.chunk} is on {placed.tier.name} twice")
            self.place(replica, is_newest=placed.newest)
            self.start.append(replica)
        self._first_states = list(self.states)

    def set_aside(self, nbytes: int) -> None:
        """Take bytes of HOST for the shadow buffers, all the time."""
        host = PLACE[Tier.HOST]
        self.used_nbytes[host] += nbytes
        self.peak_nbytes[host] += nbytes
        self.role_peak_nbytes[Tier.HOST, SHADOW] = nbytes
        self.check_cap(host)

    def replica(self, chunk: ChunkId, tier: Tier) -> int:
        """Return the number of a replica."""
        try:
            return self._first[chunk] + PLACE[tier]
        except KeyError:
            self._position.fail(f"the trace does not know {chunk}" if tier in TIERS else f"there is no {tier.name}")

    def alloc(self, replica: int) -> None:
        """Give a replica a slab."""
        if self.states[replica] != ABSENT:
            self._position.fail("the chunk has a slab there already")
        super().alloc(replica)
        self.check_cap(replica % len(TIERS))

    def need_newest(self, replica: int) -> None:
        """Require that a replica holds the newest version."""
        if self.states[replica] == NEWEST:
            return
        chunk, tier = self.replicas[replica]
        if not self.is_newest_elsewhere(replica):
            self._position.fail(f"{chunk} has no content: it was never created, or is used up")
        self._position.fail(f"{chunk} on {tier.name} is {_STATES[self.states[replica]]}; a Copy to it is missing")

    def need_slab(self, replica: int) -> None:
        """Require that a replica has a slab."""
        if self.states[replica] == ABSENT:
            self._position.fail(f"the chunk has no slab on {self.replicas[replica][1].name}; an Alloc is missing")

    def need_alone(self, replica: int) -> None:
        """Require that a chunk about to be written has no other replica."""
        for other in self.elsewhere(replica):
            if self.states[other] != ABSENT:
                chunk, tier = self.replicas[other]
                self._position.fail(f"{chunk} would be stale on {tier.name}; a Free is missing")

    def check_cap(self, side: int) -> None:
        """Require that a tier, an index into `TIERS`, is within its cap."""
        charge_nbytes = self.charge_nbytes if TIERS[side] is Tier.DEVICE else 0
        needed_nbytes, cap_nbytes = self.used_nbytes[side] + charge_nbytes, self._caps[side]
        if needed_nbytes > cap_nbytes:
            others = f" and {charge_nbytes} bytes of non-model data" if charge_nbytes else ""
            raise CapacityError(
                f"{self._position}: {self.used_nbytes[side]} bytes of chunks{others} on {TIERS[side].name} pass the "
                f"cap of {cap_nbytes} bytes; plan again for this cap, or raise it to {needed_nbytes} bytes",
                needed_nbytes=needed_nbytes,
                cap_nbytes=cap_nbytes,
                tier=TIERS[side],
            )

    def check_end(self) -> None:
        """Require that everything is as it was at the start."""
        for (chunk, tier), first, last in zip(self.replicas, self._first_states, self.states, strict=True):
            if first != last:
                raise PlanError(
                    f"after the last moment: {chunk} on {tier.name} is {_STATES[last]}, at the start it is "
                    f"{_STATES[first]}; a plan must end as it begins"
                )

    def count(self, replica: int, nbytes: int) -> None:
        super().count(replica, nbytes)
        side, key = replica % len(TIERS), self._roles[replica]
        now = self._role_nbytes[key] = self._role_nbytes.get(key, 0) + nbytes
        if nbytes > 0:
            self.peak_nbytes[side] = max(self.peak_nbytes[side], self.used_nbytes[side])
            self.role_peak_nbytes[key] = max(self.role_peak_nbytes.get(key, 0), now)


def _shown(action: Action) -> str:
    if isinstance(action, Wait):
        return f"Wait of {action.lane.name} on {action.on.name}, count {action.count}"
    if isinstance(action, Update):
        return f"Update group {action.group} on {action.tier.name}"
    if isinstance(action, Copy):
        return f"Copy {action.chunk} to {action.target.name}"
    if isinstance(action, Alloc | Free):
        return f"{type(action).__name__} {action.chunk} on {action.tier.name}"
    return f"{type(action).__name__} {action.chunk}"
