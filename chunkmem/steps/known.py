"""What is known of the steps of a run: traces and plans, asked for and brought by a user, and of two ways to step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf

from chunkmem.errors import PlanError, TraceError
from chunkmem.plan.model import Plan
from chunkmem.plan.timeline import Timeline
from chunkmem.runtime.pager import Pager
from chunkmem.steps.cached_plan import CachedPlan, check_adoptable
from chunkmem.steps.factory import CachedPlanFactory
from chunkmem.steps.iteration import Iteration
from chunkmem.steps.plan_cache import Key, PlanCache
from chunkmem.trace.ahead import overlapped
from chunkmem.trace.model import Mode, Trace


class KnownSteps:
    """Traces and plans by kind of step."""

    def __init__(self, pager: Pager, maker: CachedPlanFactory, *, layout: Callable[[], str], is_lone: bool) -> None:
        """Begin with nothing known; the arguments are those of `StepController`, and what makes cached plans."""
        self._pager = pager
        self._maker = maker
        self._layout = layout
        self._is_lone = is_lone
        self._is_first_of_two = False
        """What was just recorded is put aside for `compare`."""
        self._aside: Trace | None = None
        self.kinds = {mode: PlanCache(mode, partial(maker.make, mode), is_lone=is_lone) for mode in Mode}
        """Of training steps, and of evaluations."""
        self.now = Iteration()

    # What a user asks for.

    @property
    def trace(self) -> Trace | None:
        """The trace of the last training step's kind."""
        return None if self._training is None else self._training.trace

    @property
    def traces(self) -> list[Trace]:
        """The traces of all kinds of steps."""
        return [trace for cache in self.kinds.values() for trace in cache.traces]

    @property
    def plan(self) -> Plan | None:
        """The plan of the last training step's kind."""
        return None if self._training is None else self._training.plan

    @property
    def predicted(self) -> Timeline | None:
        """What the plan says of a step of the last training step's kind; None: there is no plan."""
        return None if self._training is None else self._training.predicted

    @property
    def _training(self) -> CachedPlan | None:
        """What the training step that runs, or ran last, has followed, or was recorded for."""
        if self.now.mode is Mode.TRAIN and self.now.entry is not None:
            return self.now.entry
        return self.kinds[Mode.TRAIN].last

    def adopt_trace(self, trace: Trace) -> None:
        """Use a trace of an earlier run instead of recording one.

        Raises:
            TraceError: it is of another model or layout.
        """
        self._check_trace(trace)
        self.kinds[trace.mode].adopt(trace)
        if trace.mode is self.now.mode:
            self.now.entry = None  # forgotten: nothing is to be learnt for it

    def _check_trace(self, trace: Trace) -> None:
        if not self._is_lone:
            raise TraceError(
                "several ranks train together, and have to agree on how far ahead they gather: leave the trace out, it "
                "is recorded within three steps"
            )
        own = self._layout()
        if trace.layout != own:
            raise TraceError(
                f"the trace is of a model with layout {trace.layout}, and this manager's is {own}; build the same "
                "model with the same default_chunk_size, or train one step to record a trace"
            )

    def expect_fewer_trained(self, trainable: bytes, edit: Callable[[Trace], Trace]) -> None:
        """Fewer parameters are trained from the next step on: have a plan for it, from the trace of the last one.

        With regions it is recorded, as what frozen blocks save cannot be told before.

        Args:
            trainable: which parameters require gradients now.
            edit: returns the trace of such a step, from one of the last kind.
        """
        cache = self.kinds[Mode.TRAIN]
        entry = cache.last
        if entry is not None and entry.trace is not None and not entry.trace.regions:
            key = replace(cache.key_of(entry), trainable=trainable) if self._is_lone else Key()
            cache.expect(key, edit(entry.trace))

    def adopt_plan(self, plan: Plan) -> None:
        """Use a plan of an earlier run. Its trace has to be there: adopt or record that first.

        Raises:
            PlanError: it was made from another trace, for another machine, or it is not sound.
        """
        if self.trace is None:
            raise PlanError("a plan needs the trace it was made from; set manager.trace first, or train one step")
        check_adoptable(plan, self.trace, self._maker.machine())
        assert self._training is not None
        self._training.adopt(self.trace, plan)

    # Two ways to step, of which one is kept; see `chunkmem.steps.trial`.

    def record_another(self) -> None:
        """The next step goes another way than the one recorded before it, or just now: record it, too."""
        self._is_first_of_two = True

    def fits_overlapped(self) -> bool:
        """Tell whether a plan for steps like the one just recorded fits both tiers if exchanges overlap computing.

        A rank that recorded nothing, as it had no batch, says yes as far as it is concerned.
        """
        recorder = self.now.recorder
        if recorder is None:
            return True
        try:
            trace = recorder.trace(self._layout(), self._pager.store.chunks)
        except TraceError:
            return False  # it was torn down in the middle
        return self._maker.make(Mode.TRAIN).planned_stall_s(overlapped(trace)) < inf

    def compare(self) -> tuple[float, float] | None:
        """Return how long computing stalls in steps of both ways, as planned; inf: there is no plan for it.

        None if the two are not both known. What they compute is the same, but not how long that took when recorded.
        """
        entry = self._training
        if self._aside is None or entry is None or entry.trace is None:
            return None
        return entry.planned_stall_s(self._aside), entry.planned_stall_s(entry.trace)

    def keep(self, *, first: bool) -> None:
        """Forget one of the two."""
        aside, self._aside = self._aside, None
        if first and aside is not None:
            self.kinds[Mode.TRAIN].take(aside)
            self.now.entry = None
