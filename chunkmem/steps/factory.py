"""What plans are made for, and who follows them: the same for every kind of step."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.machine import Machine
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.plan_executor import PlanExecutor
from chunkmem.runtime.tiers import Tiers
from chunkmem.steps.cached_plan import CachedPlan
from chunkmem.trace.model import Mode, Trace
from chunkmem.types import Tier


class CachedPlanFactory:
    """Makes cached plans of which nothing is known yet."""

    def __init__(
        self,
        pager: Pager,
        tiers: Tiers,
        *,
        machine: Callable[[], Machine],
        options: PlanOptions,
    ) -> None:
        """Take what all of them have in common; for the arguments see `StepController`."""
        self._pager = pager
        self._tiers = tiers
        self._make_machine = machine
        self._machine: Machine | None = None
        self._options = options

    def make(self, mode: Mode) -> CachedPlan:
        """Return an entry for training, or for evaluation."""
        return CachedPlan(
            mode,
            machine=self.machine,
            options=self._options,
            perform=lambda plan, trace: PlanExecutor(plan, trace, self._pager, self._tiers),
            bystanders_nbytes=self._bystanders_nbytes,
            kept_nbytes=lambda: {tier: self._pager.store.kept_nbytes(tier).total() for tier in self._pager.store.pools},
        )

    def machine(self) -> Machine:
        """Return what plans are made for; it is measured the first time."""
        if self._machine is None:
            self._machine = self._make_machine()
        return self._machine

    def _bystanders_nbytes(self, trace: Trace) -> Mapping[Tier, int]:
        resident = self._pager.store.resident
        return {
            tier: sum(
                chunk.nbytes for chunk in chunks.values() if chunk.id not in trace.chunk_nbytes and not chunk.stays
            )
            for tier, chunks in resident.items()
        }
