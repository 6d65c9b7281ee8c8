"""What is where, in program order, and the bytes of it: the book-keeping half of `simulate`."""

from __future__ import annotations

from typing import NoReturn

from chunkmem.errors import CapacityError, PlanError
from chunkmem.plan.ahead import UNDO_LOG
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import Action, Alloc, Copy, Free, Plan, Update, Wait
from chunkmem.trace.model import Trace
from chunkmem.types import ChunkId, Tier

ABSENT, EMPTY, NEWEST = range(3)
"""A replica: no slab; a slab without the newest version; the newest version."""
_STATES = ("absent", "without the newest version", "there")
TIERS = (Tier.DEVICE, Tier.HOST)


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


class Residency:
    """The state of every replica. A chunk's replica on DEVICE has an even number, the one on HOST the next."""

    def __init__(self, plan: Plan, trace: Trace, machine: Machine, position: Position) -> None:
        self._position = position
        self._numbers = {chunk: 2 * index for index, chunk in enumerate(trace.chunk_nbytes)}
        self.replicas = [(chunk, tier) for chunk in trace.chunk_nbytes for tier in TIERS]
        self.nbytes = [trace.chunk_nbytes[chunk] for chunk, _ in self.replicas]
        self._roles = [(tier, chunk.role.value) for chunk, tier in self.replicas]
        self.states = [ABSENT] * len(self.replicas)
        self.used_nbytes = [0, 0]
        self.peak_nbytes = [0, 0]
        self.charge_nbytes = 0
        """On DEVICE beside the chunks."""
        self._caps = (machine.device_nbytes, machine.host_nbytes)
        self._role_nbytes: dict[tuple[Tier, str], int] = {}
        self.role_peak_nbytes: dict[tuple[Tier, str], int] = {}
        self.start: list[int] = []
        for placed in plan.start:
            replica = self.replica(placed.chunk, placed.tier)
            if self.states[replica] != ABSENT:
                position.fail(f"{placed.chunk} is on {placed.tier.name} twice")
            self.add(replica)
            self.states[replica] = NEWEST if placed.newest else EMPTY
            self.start.append(replica)
        self._first_states = list(self.states)

    def set_aside(self, nbytes: int) -> None:
        """Take bytes of HOST for the undo log, all the time."""
        self.used_nbytes[1] += nbytes
        self.peak_nbytes[1] += nbytes
        self.role_peak_nbytes[Tier.HOST, UNDO_LOG] = nbytes
        self.check_cap(1)

    def replica(self, chunk: ChunkId, tier: Tier) -> int:
        """Return the number of a replica."""
        if chunk not in self._numbers:
            self._position.fail(f"the trace does not know {chunk}")
        if tier not in TIERS:
            self._position.fail(f"there is no {tier.name}")
        return self._numbers[chunk] + TIERS.index(tier)

    def add(self, replica: int) -> None:
        """Give a replica a slab."""
        if self.states[replica] != ABSENT:
            self._position.fail("the chunk has a slab there already")
        self.states[replica] = EMPTY
        self._count(replica, self.nbytes[replica])
        self.check_cap(replica & 1)

    def drop(self, replica: int) -> None:
        """Take a replica's slab."""
        self.states[replica] = ABSENT
        self._count(replica, -self.nbytes[replica])

    def need_newest(self, replica: int) -> None:
        """Require that a replica holds the newest version."""
        if self.states[replica] == NEWEST:
            return
        chunk, tier = self.replicas[replica]
        if self.states[replica ^ 1] != NEWEST:
            self._position.fail(f"{chunk} has no content: it was never created, or is used up")
        self._position.fail(f"{chunk} on {tier.name} is {_STATES[self.states[replica]]}; a Copy to it is missing")

    def need_slab(self, replica: int) -> None:
        """Require that a replica has a slab."""
        if self.states[replica] == ABSENT:
            self._position.fail(f"the chunk has no slab on {self.replicas[replica][1].name}; an Alloc is missing")

    def need_alone(self, replica: int) -> None:
        """Require that a chunk about to be written has no other replica."""
        if self.states[replica ^ 1] != ABSENT:
            chunk, tier = self.replicas[replica ^ 1]
            self._position.fail(f"{chunk} would be stale on {tier.name}; a Free is missing")

    def check_cap(self, side: int) -> None:
        """Require that a tier is within its cap."""
        charge_nbytes = 0 if side else self.charge_nbytes
        needed_nbytes, cap_nbytes = self.used_nbytes[side] + charge_nbytes, self._caps[side]
        if needed_nbytes > cap_nbytes:
            beside = f" and {charge_nbytes} bytes beside them" if charge_nbytes else ""
            raise CapacityError(
                f"{self._position}: {self.used_nbytes[side]} bytes of chunks{beside} on {TIERS[side].name} pass the "
                f"cap of {cap_nbytes} bytes; plan anew for this cap, or raise it to {needed_nbytes} bytes",
                needed_nbytes=needed_nbytes,
                cap_nbytes=cap_nbytes,
            )

    def check_end(self) -> None:
        """Require that everything is as it was at the start."""
        for (chunk, tier), first, last in zip(self.replicas, self._first_states, self.states, strict=True):
            if first != last:
                raise PlanError(
                    f"after the last moment: {chunk} on {tier.name} is {_STATES[last]}, at the start it is "
                    f"{_STATES[first]}; a plan must end as it begins"
                )

    def _count(self, replica: int, nbytes: int) -> None:
        side = replica & 1
        key = self._roles[replica]
        self.used_nbytes[side] += nbytes
        self.peak_nbytes[side] = max(self.peak_nbytes[side], self.used_nbytes[side])
        now = self._role_nbytes[key] = self._role_nbytes.get(key, 0) + nbytes
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
