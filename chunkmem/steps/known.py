"""What is known of the steps of a run: traces and plans, asked for and brought by a user, and of two ways to step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from chunkmem.activations.region_choice import RegionChoices
from chunkmem.data.errors import PlanError, TraceError
from chunkmem.data.trace import Mode, Trace
from chunkmem.plan.model import Plan
from chunkmem.plan.timeline import Timeline
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.plan_executor import PlanExecutor
from chunkmem.runtime.step_log import StepLog
from chunkmem.steps.cached_plan import CachedPlan, check_adoptable
from chunkmem.steps.plan_cache import Key, PlanCache
from chunkmem.steps.recorder import Recorder
from chunkmem.steps.watch import Watch


@dataclass(slots=True)
class Iteration:
    """At most one of `recorder` and `plan_executor` is set while it runs; with neither it is served on demand."""

    mode: Mode | None = None
    """Training or evaluation; None: before the first step, and after one that has been learnt from."""
    key: Key = field(default_factory=Key)
    is_running: bool = False
    is_learnt: bool = False
    """It is over, and has been learnt from."""
    is_prelude: bool = False
    """Parameters have been used outside of models, and no model has been called yet."""
    recorder: Recorder | None = None
    watch: Watch | None = None
    """Watches memory while it is recorded."""
    entry: CachedPlan | None = None
    """The trace and plan that it follows."""
    plan_executor: PlanExecutor | None = None
    """Follows the plan of `entry`."""
    on_demand: int | None = None
    """Bytes that had been moved between tiers when it began, if it neither is recorded nor follows a plan."""
    step_log: StepLog | None = None
    is_excused: bool = False
    """Nothing is to be learnt from it."""
    has_compiled: bool = False
    """torch's compiler has worked in it."""


class KnownSteps:
    """Traces and plans by kind of step."""

    def __init__(
        self,
        pager: Pager,
        make: Callable[[Mode], CachedPlan],
        *,
        layout: Callable[[], str],
        trainable: Callable[[], bytes],
        choices: RegionChoices,
        now: Iteration,
        is_lone: bool,
    ) -> None:
        """Begin with nothing known.

        Args:
            pager: of the chunks.
            make: an entry of training or evaluation, of which nothing is known yet.
            layout, trainable, is_lone: see `StepController`.
            choices: of the regions that are recomputed.
            now: the step that runs, or ran last, as the controller goes on with it.
        """
        self._pager = pager
        self._make = make
        self._layout = layout
        self._trainable = trainable
        self._choices = choices
        self._is_lone = is_lone
        self.kinds = {mode: self._no_plans(mode) for mode in Mode}
        """Plans by mode: of training steps, and of evaluations."""
        self._now = now
        self.trained = b""
        """Over ranks: which parameters they have last agreed on to train, as `Key.trainable`; empty: they have not."""

    def _no_plans(self, mode: Mode) -> PlanCache:
        return PlanCache(mode, partial(self._make, mode), is_lone=self._is_lone)

    # What a user asks for.

    @property
    def trace(self) -> Trace | None:
        """The trace of the last training step's kind."""
        return None if self.training is None else self.training.trace

    @property
    def traces(self) -> list[Trace]:
        """The traces of all kinds of steps."""
        return [trace for cache in self.kinds.values() for trace in cache.traces]

    @property
    def plan(self) -> Plan | None:
        """The plan of the last training step's kind."""
        return None if self.training is None else self.training.plan

    @property
    def predicted(self) -> Timeline | None:
        """What the plan says of a step of the last training step's kind; None: there is no plan."""
        return None if self.training is None else self.training.predicted

    @property
    def training(self) -> CachedPlan | None:
        """What the training step that runs, or ran last, has followed, or was recorded for."""
        if self._now.mode is Mode.TRAIN and self._now.entry is not None:
            return self._now.entry
        return self.kinds[Mode.TRAIN].last

    def adopt_trace(self, trace: Trace) -> None:
        """Use a trace of an earlier run, which `require_adoptable` lets pass, instead of recording one."""
        if trace.mode is Mode.TRAIN:
            self._choices.adopt(trace)
        self.kinds[trace.mode].adopt(trace)
        if trace.mode is self._now.mode:
            self._now.entry = None  # forgotten: nothing is to be learnt for it

    def require_adoptable(self, trace: Trace) -> None:
        """Raise a `TraceError` if a trace is of another model or layout, or there are several ranks."""
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
            return True
        self.drop(key)
        return False

    def drop(self, key: Key) -> None:
        """Forget what training steps with a key do."""
        cache = self.kinds[Mode.TRAIN]
        if self._now.entry is cache.of(key):
            self._now.entry = None  # nothing is to be learnt for it
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
        assert self.training is not None
        check_adoptable(plan, self.trace, self.training.machine())
        self.training.adopt(self.trace, plan)

    # How ranks exchange, see `chunkmem.steps.first_steps`.

    def can_plan(self) -> bool:
        """Tell whether there is a plan for training steps like the one that is over, as far as this rank knows."""
        recorder, trace = self._now.recorder, self.trace
        if recorder is not None:
            try:
                trace = recorder.trace(self._layout(), self._pager.store.chunks)
            except TraceError:
                return False  # it was torn down in the middle
        return trace is None or self._make(Mode.TRAIN).can_plan(trace)

    def record_again(self) -> None:
        """Training steps of all kinds go another way from now on; what the last one did does not count."""
        self.kinds[Mode.TRAIN].forget()
        self._now.entry, self._now.is_excused = None, True
