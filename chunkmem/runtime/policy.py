"""What decides, from one access to the next, what is moved: one object at a time, which the pager asks.

OnDemand        nothing is known: what is not where it is needed is brought with blocking copies
Recorder        the same, and written down (`chunkmem.steps.recorder`)
PlanExecutor       a plan is followed (`chunkmem.runtime.plan_executor`)
BetweenSteps    one of these, after the step that it was for
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from chunkmem.data.trace import Kind
from chunkmem.data.types import Tier
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.events import Event
from chunkmem.runtime.step_log import StepLog


class StepPolicy(Protocol):
    """Told of every access before it is served; it may bring what that needs, and is asked what it has planned.

    As it is here it does nothing, and plans nothing.
    """

    @property
    def is_planned(self) -> bool:
        """Tell whether a plan decides what leaves DEVICE."""
        return False

    def event(self, kind: Kind, chunk: Chunk, reader: object) -> None:
        """Something is about to happen to a chunk on DEVICE; of a RELEASE, it has. `str(reader)` says for whom."""
        return

    def entered(self, call: object) -> None:
        """A module is entered: `str(call)` is "blocks.3 forward"; or its backward begins: "blocks.3 backward"."""
        return

    def before_demand(self) -> None:
        """Something is about to be moved on demand, or changed past the events: who follows a plan leaves it."""
        return

    def drain(self) -> None:
        """Memory is about to be read past the events: copies that were issued are over when this returns."""
        return

    def update_tier(self, group: int) -> Tier | None:
        """Return where a group is to be updated; None: where its states are."""
        return None

    def update_order(self, groups: Sequence[int]) -> Sequence[int]:
        """Return the order in which groups are to be updated; empty: any."""
        return ()

    def defer(self, work: Callable[[], object], chunks: Sequence[Chunk]) -> bool:
        """Have the update on HOST that comes now done on HOST_UPDATE; whatever needs its results waits for it.

        Args:
            work: what to do, in any thread.
            chunks: PARAM, GRAD, and all others it touches on HOST.

        Returns:
            False if the caller has to do it, after an `await_update`.
        """
        return False

    def await_update(self) -> None:
        """A group is about to be updated by the caller: updates that were deferred are over when this returns."""
        return

    def log(self) -> StepLog | None:
        """Return where is written down what blocking copies and waits for other ranks take."""
        return None


class OnDemand(StepPolicy):
    """Nothing is known of what comes next."""


class BetweenSteps:
    """The policy of a step that is over.

    A second optimizer's updates belong to that step still; a read only has to be safe.
    """

    def __init__(self, policy: StepPolicy, *, has_hooks: bool) -> None:
        """Stand in for `policy`, which `hears` of further updates or not."""
        self.policy = policy
        self._has_hooks = has_hooks
        self.before_demand = policy.before_demand
        self.drain = policy.drain
        self.update_tier = policy.update_tier
        self.update_order = policy.update_order
        self.defer = policy.defer
        self.await_update = policy.await_update
        self.log = policy.log

    @property
    def is_planned(self) -> bool:
        return self.policy.is_planned

    def entered(self, call: object) -> None:
        return

    def event(self, kind: Kind, chunk: Chunk, reader: object) -> None:
        if not self._has_hooks:
            return
        if kind is Kind.HOLD:
            self.policy.drain()
        elif kind not in (Kind.EXCHANGE, Kind.ARRIVE):
            self.policy.event(kind, chunk, reader)


class SpeculativeUpdates(Protocol):
    """Groups updated before their moment, while backward runs. Here none is."""

    def begin(self, group: int, after: Sequence[Event]) -> Event | None:
        """Begin a group's update after some events; return the end of it, None if it is not done."""
        return None

    def reserve(self, counts: Mapping[int, int]) -> None:
        """Provide, while no plan is followed, for so many slabs of which sizes; for none where room is short."""
        return


class NoSpeculativeUpdates(SpeculativeUpdates):
    """There is no optimizer."""
