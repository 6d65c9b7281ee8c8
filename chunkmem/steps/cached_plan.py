"""What is known of one kind of step: its trace, its plan, and whether they still hold."""

from __future__ import annotations

import enum
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from chunkmem.data.errors import CapacityError, PlanError
from chunkmem.data.sizes import format_nbytes
from chunkmem.data.trace import Mode, Trace
from chunkmem.data.types import ChunkId, Tier
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.cursor import Said, TraceCursor
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import Plan
from chunkmem.plan.simulate import simulate
from chunkmem.plan.timeline import Timeline
from chunkmem.runtime.chunk import NO_CONTENT, Chunk
from chunkmem.runtime.device import give_back_freed_ram
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.plan_executor import PlanExecutor
from chunkmem.runtime.tiers import Tiers
from chunkmem.steps.plan_log import log_planning
from chunkmem.steps.planning import StepPlanner

_MAX_REFINEMENTS = 3
_CLOSE = 0.05
"""Durations this close, as a share of the step, do not ask for another plan."""


class Outcome(enum.Enum):
    """What became of a step's plan."""

    FOLLOWED = "followed"
    """The step followed its plan to the end, or there was no plan."""
    LEFT_OUT = "left out"
    """Followed but for moments that the step left out."""
    MISSED = "missed"
    """Some events came that were not foreseen, or the step was over before the plan."""
    NEEDLESS = "needless"
    """The step missed its plan, but copied nothing: all chunks that such steps use are on DEVICE."""


class CachedPlan:
    """A trace, the plan made from it, and the plan pager that follows the plan; each None until there is one."""

    def __init__(
        self,
        mode: Mode,
        pager: Pager,
        tiers: Tiers,
        *,
        machine: Callable[[], Machine],
        options: PlanOptions,
    ) -> None:
        """Begin with nothing known.

        Args:
            mode: training or evaluation.
            pager: of the chunks.
            tiers: of its store.
            machine: returns what plans are made for; called when the first one is.
            options: of the planner.
        """
        self.mode = mode
        self.trace: Trace | None = None
        self.plan: Plan | None = None
        self.plan_executor: PlanExecutor | None = None
        self._planner: StepPlanner | None = None
        """Planner that made the plan, and may refine it; None: none did."""
        self.machine = machine
        self._options = options
        self._pager = pager
        self._tiers = tiers
        self._predicted: tuple[Plan, Trace, Timeline] | None = None
        """Last result of `predicted`, with the plan and the trace it is for."""
        self._num_refinements = 0
        """How often the trace was compared with durations of a step that followed the plan."""
        self._director: TraceCursor | None = None
        self.has_moved = False
        """A step that should have moved nothing has moved something."""
        self._is_hopeless = False
        self._charged_nbytes = 0
        """Bytes of activations that plans add to the recorded ones."""
        self._has_warned = False
        """The user was warned that no plan can be followed."""

    def adopt(self, trace: Trace, plan: Plan | None = None) -> None:
        """Take a trace, and perhaps a plan, of an earlier run; both have been checked."""
        self.take(trace)
        self.plan = plan
        self._num_refinements = _MAX_REFINEMENTS  # what the user gave stays as it is

    def forget(self) -> None:
        """Forget everything."""
        self.stop()
        self.trace = self.plan = self.plan_executor = self._planner = self._director = None
        self._is_hopeless = self.has_moved = False
        self._num_refinements = self._charged_nbytes = 0

    def take(self, trace: Trace) -> None:
        """Switch to a trace of another way to step, which was recorded in this run."""
        self.forget()
        self.trace = trace

    def take_if_planned(self, trace: Trace) -> bool:
        """Switch to a trace if there is a plan for it; tell whether there is."""
        with self._planning("another step was recorded, and one plan serves both"):
            try:
                planner = self._make_planner(trace)
            except PlanError:
                return False
            self.take(trace)
            self._planner, self.plan = planner, planner.plan
        return True

    def can_plan(self, trace: Trace) -> bool:
        """Tell whether there is a plan for a trace."""
        try:
            self._make_planner(trace)
        except PlanError:
            return False
        return True

    @property
    def predicted(self) -> Timeline | None:
        """What the plan says of a step; None: there is no plan. Simulated once for each plan."""
        plan, trace = self.plan, self.trace
        if plan is None or trace is None:
            return None
        if self._predicted is None or self._predicted[0] is not plan or self._predicted[1] is not trace:
            self._predicted = plan, trace, simulate(plan, trace)
        return self._predicted[2]

    @property
    def is_by_block(self) -> bool:
        """Steps like this one hear of blocks as a whole: [Note: Blocks as a whole] in `chunkmem.modules.blocks`."""
        return self.trace is not None and self.trace.by_block

    def fits(self, chunks: Mapping[ChunkId, Chunk]) -> bool:
        """Tell whether steps like this one move none of all these chunks, which are on DEVICE.

        There would be room for gradients and activations twice: in their chunks, and as autograd makes them.
        """
        plan, trace = self.plan, self.trace
        if plan is None or trace is None or self.has_moved or not plan.moves_nothing:
            return False
        staying = [chunk for key, chunk in chunks.items() if not key.role.kind.is_of_step]
        if not all(chunk.ready(Tier.DEVICE) or chunk.version == NO_CONTENT for chunk in staying):
            return False
        machine = self.machine()
        needed_nbytes = sum(chunk.nbytes for chunk in staying)
        needed_nbytes += 2 * sum(chunk.nbytes for key, chunk in chunks.items() if key.role.kind.is_of_step)
        if machine.charges_non_model:
            needed_nbytes += trace.non_model_peak_nbytes
        return needed_nbytes <= machine.device_nbytes

    def stop(self) -> None:
        """Follow the plan no further, until the next iteration begins."""
        if self.plan_executor is not None:
            self.plan_executor.close()

    def prepare(self, *, has_alternative: bool = False) -> PlanExecutor | None:
        """Return what the next step follows; None if it is to be recorded or served on demand.

        Args:
            has_alternative: there is another way to step, if this one does not fit.

        Raises:
            CapacityError: a moment of the step, as it was recorded, does not fit; with the smallest cap that works.
        """
        if self.trace is None or self._is_hopeless:
            return None
        if self.plan is None:
            more = f"activations took {format_nbytes(self._charged_nbytes)} more than when recorded"
            try:
                with self._planning(more if self._charged_nbytes else "its trace is known"):
                    self._planner = self._make_planner(self.trace)
                    self.plan = self._planner.plan
            except PlanError as error:
                lacks_device = isinstance(error, CapacityError) and error.tier is Tier.DEVICE
                is_fatal = lacks_device and not self._charged_nbytes
                if is_fatal and not has_alternative:
                    raise
                if not has_alternative:
                    why = f"{f'{more}: ' if self._charged_nbytes else ''}{error}"
                    warnings.warn(f"no plan is followed, every access is served on demand: {why}", stacklevel=2)
                self._is_hopeless = True
                return None
        if self.plan_executor is None:
            self.plan_executor = PlanExecutor(self.plan, self.trace, self._pager, self._tiers)
            give_back_freed_ram()  # what the recorded step has freed, and planning
        return self.plan_executor

    @property
    def left_out(self) -> Sequence[tuple[int, int]]:
        """What the last step that followed the plan left out: from which moment up to which."""
        return () if self.plan_executor is None else tuple(self.plan_executor.left_out.spans)

    def num_left_out(self, came: Sequence[Said]) -> int | None:
        """Return how many moments a step that begins with these events leaves out; None: it is another one."""
        if self.trace is None or self._is_hopeless:
            return None
        if self._director is None:
            self._director = TraceCursor(self.trace)
        return self._director.num_left_out(came)

    @property
    def wants_durations(self) -> bool:
        """Tell whether the plan is made again with the durations of the next step that follows it."""
        return self._num_refinements < _MAX_REFINEMENTS

    @property
    def has_measured_times(self) -> bool:
        """The plan was made here, and with the durations of steps that followed it."""
        return self._planner is not None and not self.wants_durations

    @property
    def is_timed(self) -> bool:
        """The plan was made here, and with the durations of a step that followed it."""
        return self._planner is not None and self._num_refinements > 0

    @property
    def is_final(self) -> bool:
        """While steps follow the plan, none is made any more: durations are known, and all was tried."""
        return self._planner is not None and not self.wants_durations and self._planner.is_done

    def learn(self) -> Outcome:
        """A step is over: keep the plan, or make it again with better times; tell what became of it."""
        plan_executor = self.plan_executor
        if plan_executor is None:
            return Outcome.FOLLOWED
        if plan_executor.step_log.plan_misses or not plan_executor.is_at_end:
            # Without a miss nothing was served on demand: the step was that of modules on HOST alone.
            was_missed = bool(plan_executor.step_log.plan_misses) and not plan_executor.was_followed
            if was_missed and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"a {self.mode.value} step could not follow its plan, and every access was served on demand, which "
                    f"is slower: {plan_executor.obstacle}",
                    stacklevel=2,
                )
            return Outcome.MISSED if plan_executor.step_log.copies else Outcome.NEEDLESS
        if plan_executor.left_out.spans:
            return Outcome.LEFT_OUT
        if not (self.wants_durations and self._refine(plan_executor)):
            self._improve()
        return Outcome.FOLLOWED

    def charge_more(self, nbytes: int) -> None:
        """Activations took `nbytes` more than traced: plan with more room for them, or serve on demand if none fits."""
        if self.trace is not None:
            trace = self.trace
            moments = tuple(
                replace(moment, non_model_peak_nbytes=moment.non_model_peak_nbytes + nbytes) for moment in trace.moments
            )
            charged_nbytes = self._charged_nbytes + nbytes
            self.adopt(replace(trace, moments=moments))
            self._charged_nbytes = charged_nbytes

    def _make_planner(self, trace: Trace) -> StepPlanner:
        store = self._pager.store
        kept_nbytes = {tier: store.kept_nbytes(tier).total() for tier in store.pools}
        bystanders_nbytes = {
            tier: sum(
                chunk.nbytes for key, chunk in chunks.items() if key not in trace.chunk_nbytes and not chunk.stays
            )
            for tier, chunks in store.resident.items()
        }
        try:
            return StepPlanner(
                trace,
                self.machine(),
                options=self._options,
                bystanders_nbytes=bystanders_nbytes,
                kept_nbytes=kept_nbytes,
            )
        except CapacityError as error:
            raise _next_to(kept_nbytes.get(error.tier, 0), error) from None

    @contextmanager
    def _planning(self, why: str) -> Iterator[None]:
        """Have the log tell of the plan that is made inside, and of the time that took."""
        before, began_s = self.plan, time.perf_counter()
        yield
        took_s = time.perf_counter() - began_s
        log_planning(self.mode, why, took_s=took_s, before=before, after=self.plan, step=lambda: self.predicted)

    def _improve(self) -> None:
        """Continue planning where it is not done."""
        if self._planner is not None:
            with self._planning("more was tried"):
                self._planner.improve()
                self._follow_instead(self._planner.plan)

    def _follow_instead(self, plan: Plan) -> None:
        before, self.plan = self.plan, plan
        if plan is before:
            return
        if before is None or (plan.actions, plan.start) != (before.actions, before.start):
            self.stop()
            self.plan_executor = None

    def _refine(self, plan_executor: PlanExecutor) -> bool:
        """Plan again with the times of a step that followed a plan; False if the plan was not made for longer ones.

        The recorded step was watched, and the first ones touch their memory for the first time. After that the shortest
        time of each moment counts: what makes one step longer than another is not the model.
        """
        assert self.trace is not None
        durations = plan_executor.step_log.durations()
        is_first = self._num_refinements == 0
        self._num_refinements += 1
        moments = []
        for at, moment in enumerate(self.trace.moments):
            measured_s = durations.get(at, moment.duration_s)
            duration_s = measured_s if is_first else min(measured_s, moment.duration_s)
            moments.append(replace(moment, duration_s=duration_s))
        refined = replace(self.trace, moments=tuple(moments))
        if not is_first and refined.compute_s > (1 - _CLOSE) * self.trace.compute_s:
            return False
        self.trace = refined
        with self._planning("a step was measured"):
            if self._planner is None:
                self._planner = self._make_planner(refined)
            else:
                self._planner.retime(refined)
            self._follow_instead(self._planner.plan)
        return True


def _next_to(kept_nbytes: int, error: CapacityError) -> CapacityError:
    """Return the error of a plan for what chunks that are there for good leave of a tier, in bytes of the whole."""
    if not kept_nbytes:
        return error
    needed_nbytes = error.needed_nbytes + kept_nbytes
    return CapacityError(
        f"{error}, and by another {format_nbytes(kept_nbytes)} that stay there for averages or modules on HOST: to "
        f"{format_nbytes(needed_nbytes)} ({needed_nbytes} bytes)",
        needed_nbytes=needed_nbytes,
        cap_nbytes=error.cap_nbytes + kept_nbytes,
        enough_nbytes=None if error.enough_nbytes is None else error.enough_nbytes + kept_nbytes,
        tier=error.tier,
    )


def check_adoptable(plan: Plan, trace: Trace, machine: Machine) -> None:
    """Check that a plan of an earlier run can be followed here.

    Raises:
        PlanError: it was made from another trace, for another machine, or it is not sound.
    """
    if plan.trace_digest != trace.digest:
        raise PlanError(
            f"the plan was made from trace {plan.trace_digest}, and this manager's is {trace.digest}; load the trace "
            "that was saved with it, or let the manager make a plan"
        )
    for name, key in (
        ("device_nbytes", "memory.device"),
        ("host_nbytes", "memory.host"),
        ("shadow_nbytes", "client.opts.undo_log_ratio"),
    ):
        was, now = getattr(plan.machine, name), getattr(machine, name)
        if was != now:
            raise PlanError(
                f"the plan was made for a {key} of {was} bytes, and here it is {now}; set it back, or let the manager "
                "make a plan"
            )
    for name in ("charges_non_model", "one_processor"):
        if getattr(plan.machine, name) != getattr(machine, name):
            raise PlanError("the plan was made for a machine of another kind; let the manager make a plan")
    simulate(plan, trace)
