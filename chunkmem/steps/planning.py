"""The plan of one trace: made at once, and improved during training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from chunkmem.data.errors import CapacityError
from chunkmem.data.trace import Mode, Trace
from chunkmem.data.types import MEMORY, Tier
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import Plan
from chunkmem.plan.planner import Planner
from chunkmem.plan.simulate import simulate

WORK_A_STEP = 400_000
"""Of a planner, in its units: less than half a second, and up to one candidate more."""


class StepPlanner:
    """Plans a trace next to chunks that it does not touch: some work when it is made, and as much at each `improve`."""

    def __init__(
        self,
        trace: Trace,
        machine: Machine,
        *,
        options: PlanOptions,
        bystanders_nbytes: Mapping[Tier, int],
        kept_nbytes: Mapping[Tier, int] = MappingProxyType({}),
    ) -> None:
        """Make a first plan.

        Args:
            trace: of the step.
            machine: caps and speeds to plan for.
            options: of a user's configuration.
            bystanders_nbytes: by tier, the bytes there of chunks that the trace does not touch.
            kept_nbytes: by tier, the bytes of chunks that are there for good: of modules on HOST, and of averages.

        Raises:
            CapacityError, PlanError: see `Planner.improve`.
        """
        self._trace = trace
        self._whole_machine = machine
        machine = self._machine = machine.with_caps(
            {tier: max(0, cap - kept_nbytes.get(tier, 0)) for tier, cap in machine.cap_nbytes.items()}
        )
        goes_elsewhere = trace.mode is Mode.EVAL or machine.tiers[-1] not in MEMORY
        self._bystanders_nbytes = 0 if goes_elsewhere else sum(bystanders_nbytes.values())
        """Bytes on HOST that the plan does not know of."""
        if self._bystanders_nbytes:
            options = replace(options, with_residents=False)
        self._planner = Planner(trace, machine, options=options)
        if trace.mode is Mode.EVAL:
            # What the evaluation does not touch stays where training left it, if that is possible.
            left_nbytes = max(0, machine.device_nbytes - bystanders_nbytes[Tier.DEVICE])
            self._try_instead(Planner(trace, replace(machine, device_nbytes=left_nbytes), options=options))
        self.plan = self._of_this_machine(self._planner.plan or self._planner.improve(WORK_A_STEP))
        """The best plan so far."""
        if not self._leaves_room(self.plan):
            # HOST is where chunks are that the step does not touch: a plan that fills it leaves them no room.
            left_nbytes = max(0, machine.host_nbytes - self._bystanders_nbytes)
            self._bystanders_nbytes = 0
            self._try_instead(Planner(trace, replace(machine, host_nbytes=left_nbytes), options=options))
            self.plan = self._of_this_machine(self._planner.plan or self.plan)

    @property
    def is_done(self) -> bool:
        """There is nothing more to try."""
        return self._planner.is_done

    def improve(self) -> None:
        """Continue planning if there is more to try."""
        if self.is_done:
            return
        before, plan = self._planner.plan, self._planner.improve(WORK_A_STEP)
        if plan is not before and self._leaves_room(plan):
            self.plan = self._of_this_machine(plan)

    def retime(self, trace: Trace) -> None:
        """Plan again for the same step with other durations. Raises what making this did."""
        self._trace = trace
        self._planner = self._planner.retimed(trace)
        plan = self._planner.improve(WORK_A_STEP)
        if self._leaves_room(plan):
            self.plan = self._of_this_machine(plan)

    def _try_instead(self, planner: Planner) -> None:
        try:
            planner.improve(WORK_A_STEP)
        except CapacityError:
            return
        self._planner = planner

    def _leaves_room(self, plan: Plan) -> bool:
        if not self._bystanders_nbytes:
            return True
        peak_nbytes = simulate(plan, self._trace).peak_nbytes[Tier.HOST]
        return peak_nbytes + self._bystanders_nbytes <= self._machine.host_nbytes

    def _of_this_machine(self, plan: Plan) -> Plan:
        """Return a plan with the caps of the machine, of which it leaves some of HOST to others."""
        is_whole = self._trace.mode is Mode.EVAL or plan.machine == self._whole_machine
        return plan if is_whole else replace(plan, machine=self._whole_machine)
