"""What is known of the steps of a run: traces and plans, asked for and brought by a user, and of two ways to step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from chunkmem.errors import PlanError, TraceError
from chunkmem.plan.model import Plan
from chunkmem.plan.timeline import Timeline
from chunkmem.runtime.pager import Pager
from chunkmem.steps.cached_plan import CachedPlan, check_adoptable
from chunkmem.steps.factory import CachedPlanFactory
from chunkmem.steps.iteration import Iteration
from chunkmem.steps.plan_cache import Key, PlanCache
from chunkmem.steps.region_choice import RegionChoices
from chunkmem.trace.ahead import overlapped
from chunkmem.trace.model import Mode, Trace
from chunkmem.trace.retimed import with_compute_s


class KnownSteps:
    """Traces and plans by kind of step."""

    def __init__(
        self,
        pager: Pager,
        maker: CachedPlanFactory,
        *,
        layout: Callable[[], str],
        trainable: Callable[[], bytes],
        choices: RegionChoices,
        is_lone: bool,
    ) -> None:
        """Begin with nothing known; the arguments are those of `StepController`, and what makes plans and choices."""
        self._pager = pager
        self._maker = maker
        self._layout = layout
        self._trainable = trainable
        self._choices = choices
        self._is_lone = is_lone
        self._is_first_of_two = False
        """What was just recorded is put aside for `compare`."""
        self._aside: Trace | None = None
        self._kinds_aside: PlanCache | None = None
        """Where steps followed plans of one way, before the other one is recorded: all of these."""
        self.kinds = {mode: self._no_plans(mode) for mode in Mode}
        """Of training steps, and of evaluations."""
        self.now = Iteration()
        self.trained = b""
        """Over ranks: which parameters they have last agreed on to train, as `Key.trainable`; empty: they have not."""

    def _no_plans(self, mode: Mode) -> PlanCache:
        return PlanCache(mode, partial(self._maker.make, mode), is_lone=self._is_lone)

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

    def key_of(self, root: int, mode: Mode) -> Key:
        """Return the key of an iteration that begins with a model.

        Over ranks steps are of one kind, until all of them agree to train something else: see `freeze`.
        """
        if self._is_lone:
            return Key(root, self._trainable() if mode is Mode.TRAIN else b"")
        if mode is Mode.EVAL:
            return Key()
        self.trained = self.trained or self._trainable()
        return Key(0, self.trained)

    def key_now(self) -> Key:
        """Other parameters are trained from now on; return the key of such steps that begin as the last one did."""
        cache, trainable = self.kinds[Mode.TRAIN], self._trainable()
        self.trained = b"" if self._is_lone else trainable
        return Key(0 if cache.last is None else cache.key_of(cache.last).root, trainable)

    def follow_again(self, key: Key, is_current: Callable[[Trace], bool]) -> bool:
        """Steps with a key come next; tell whether they are known.

        Args:
            key: of the steps.
            is_current: tells whether a trace of them has the chunks that there are now; what is outdated is forgotten.
        """
        cache = self.kinds[Mode.TRAIN]
        entry = cache.of(key)
        if entry is None:
            return False
        if entry.trace is not None and is_current(entry.trace):
            cache.expect_again(entry)
            return True
        self.drop(key)
        return False

    def drop(self, key: Key) -> None:
        """Forget what training steps with a key do."""
        cache = self.kinds[Mode.TRAIN]
        if self.now.entry is cache.of(key):
            self.now.entry = None  # nothing is to be learnt for it
        cache.drop(key)

    def record(self, key: Key, *, regions_of: Key | None = None) -> None:
        """The next training step with a key is to be recorded.

        Args:
            key: of the step.
            regions_of: steps with this key recompute the same regions; None: that is chosen once it is recorded.
        """
        if regions_of is not None and self._choices.kept(key) is None:
            kept = self._choices.kept(regions_of)
            if kept is not None:
                self._choices.keep(key, kept)
        self.kinds[Mode.TRAIN].record(key)

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
        """The next step goes another way than the one that is over: record it, too."""
        self._is_first_of_two = self.now.recorder is not None
        if not self._is_first_of_two:
            self._aside, self._kinds_aside = self.trace, self.kinds[Mode.TRAIN]
            self._kinds_aside.stop()
            self.kinds[Mode.TRAIN] = self._no_plans(Mode.TRAIN)
            self.now.entry = None  # nothing is to be learnt for what is put aside

    def put_back(self) -> None:
        """The other way is not recorded after all: follow what was put aside."""
        self._is_first_of_two = False
        self.keep(first=True)

    def fits_overlapped(self) -> bool:
        """Tell whether a plan for steps like the one that is over fits both tiers if exchanges overlap computing.

        A rank that knows nothing, as it had no batch, says yes as far as it is concerned.
        """
        recorder, trace = self.now.recorder, self.trace
        if recorder is not None:
            try:
                trace = recorder.trace(self._layout(), self._pager.store.chunks)
            except TraceError:
                return False  # it was torn down in the middle
        return trace is None or self._maker.make(Mode.TRAIN).fits(overlapped(trace))

    def compare(self) -> tuple[float, float] | None:
        """Return how long computing stalls in steps of both ways, as planned; inf: there is no plan for it.

        None if the two are not both known. What they compute is the same, but not how long that took when recorded.
        """
        entry, aside = self._training, self._aside
        if aside is None or entry is None or entry.trace is None:
            return None
        if self._kinds_aside is not None:  # its times are those of steps that followed a plan, which nobody watched
            aside = with_compute_s(aside, entry.trace.compute_s)
        return entry.planned_stall_s(aside), entry.planned_stall_s(entry.trace)

    def keep(self, *, first: bool) -> None:
        """Forget one of the two."""
        aside, self._aside = self._aside, None
        kinds, self._kinds_aside = self._kinds_aside, None
        if not first or aside is None:
            return
        if kinds is None:
            self.kinds[Mode.TRAIN].take(self.now.key, aside)
        else:
            self.kinds[Mode.TRAIN].stop()
            self.kinds[Mode.TRAIN] = kinds
        self.now.entry = None
