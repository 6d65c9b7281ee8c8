"""A plan that was tried, and what candidates are made for. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from chunkmem.plan.model import FETCH, LANE_LINKS, Copy, Plan
from chunkmem.plan.placement import Placement
from chunkmem.plan.timeline import Timeline


@dataclass(frozen=True)
class PlanOptions:
    """What a user's configuration, and what else there is to train, decide about plans."""

    margin_use_ratio: float = 0.8
    """Share of the space left on DEVICE at the traced peak that optimizer states may take; 0: all updates on HOST."""
    static_nbytes: int | None = None
    """A fixed share of DEVICE for chunks instead of what each moment leaves."""
    with_residents: bool = True
    """Groups may stay on DEVICE for good. Where steps of other kinds update other groups, they would take turns."""


@dataclass(frozen=True)
class Candidate:
    """A plan that was tried, and what the simulator says of it."""

    plan: Plan
    timeline: Timeline
    placement: Placement

    @property
    def nbytes(self) -> int:
        """Bytes moved in an iteration, over both links."""
        return sum(self.timeline.moved_nbytes.values())

    @cached_property
    def num_copies(self) -> int:
        """Copies in an iteration."""
        return sum(isinstance(action, Copy) for actions in self.plan.actions for action in actions)

    @property
    def step_s(self) -> float:
        """Seconds of a step; where the host computes itself, with those that it takes to hand copies over."""
        machine = self.plan.machine
        latency_s = machine.links[LANE_LINKS[FETCH]].latency_s if machine.one_processor else 0.0
        return self.timeline.step_s + latency_s * self.num_copies
