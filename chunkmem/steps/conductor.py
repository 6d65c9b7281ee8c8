"""Decide before each step: record it, have a plan followed, or serve on demand.

A lap is one training step (from the first call of a model to the end of the optimizer's step, however many
micro-batches) or one evaluation (a call of a model without gradients, between steps). Between laps nothing is recorded
or followed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from chunkmem.errors import PlanError, TraceError
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import Plan
from chunkmem.plan.planner import PlanOptions
from chunkmem.plan.timeline import Timeline
from chunkmem.runtime.events import Lanes
from chunkmem.runtime.executor import DemandExecutor, Listener
from chunkmem.runtime.journal import Journal
from chunkmem.runtime.performer import Performer
from chunkmem.runtime.store import Chunk
from chunkmem.runtime.tiers import Tiers
from chunkmem.steps.course import Course, check_adoptable
from chunkmem.trace.ahead import overlapped
from chunkmem.trace.model import Kind, Mode, Trace
from chunkmem.tracing.recorder import Recorder
from chunkmem.tracing.watch import Watch
from chunkmem.types import Tier


def _ignore(kind: Kind, chunk: Chunk, reader: object) -> None:
    return None


class Conductor:
    """Hears when models are called and steps end, and tells the executor whom to announce its events to."""

    def __init__(
        self,
        executor: DemandExecutor,
        tiers: Tiers,
        lanes: Lanes,
        *,
        machine: Callable[[], Machine],
        options: PlanOptions,
        layout: Callable[[], str],
        watch: Callable[[], Watch],
        is_lone: bool = True,
    ) -> None:
        """Begin with nothing known.

        Args:
            executor: whose events are heard.
            tiers: of its store.
            lanes: what copies when a plan is followed.
            machine: returns what plans are made for; called when the first one is.
            options: of the planner.
            layout: returns the digest of everything packed.
            watch: begins to watch memory, for a step that is recorded.
            is_lone: there is one rank. Else steps are recorded from when `may_record` says so, since the exchanges of
                the first ones are not those of the others.
        """
        self._executor = executor
        self._tiers = tiers
        self._lanes = lanes
        self._make_machine = machine
        self._machine: Machine | None = None
        self._layout = layout
        self._make_watch = watch
        self._is_lone = self.may_record = is_lone
        """`may_record`: training steps are like those to come."""
        self._is_first_of_two = False
        """What was just recorded is put aside for `compare`."""
        self._aside: Trace | None = None
        self._courses = {
            mode: Course(
                mode,
                machine=self._own_machine,
                options=options,
                perform=lambda plan, trace: Performer(plan, trace, executor, lanes, tiers),
                bystanders_nbytes=self._bystanders_nbytes,
            )
            for mode in Mode
        }
        self._mode: Mode | None = None
        """Of the lap that runs, or ran last."""
        self._is_running = False
        self._recorder: Recorder | None = None
        self._watch: Watch | None = None
        self._performer: Performer | None = None
        """Follows the lap that runs, or ran last; None if that is recorded or served on demand."""
        self._journal: Journal | None = None
        """Of the lap that runs, or ran last."""
        self.is_excused = False
        """Nothing is to be learnt from the lap that runs, or ran last."""
        self._in_lap: Listener = _ignore
        """Hears of events within the lap."""
        self._last: Callable[[], Timeline] | None = None
        self._last_training: Callable[[], Timeline] | None = None
        self._ledgers = (tiers.device, tiers.host)

    # What a user asks for.

    @property
    def trace(self) -> Trace | None:
        """The trace of training."""
        return self._courses[Mode.TRAIN].trace

    @property
    def plan(self) -> Plan | None:
        """The plan of training."""
        return self._courses[Mode.TRAIN].plan

    def timeline(self) -> Timeline | None:
        """Return what happened in the last lap that is over; None before the first."""
        return None if self._last is None else self._last()

    def training_timeline(self) -> Timeline | None:
        """Return what happened in the last training step, whatever has been evaluated since; None before the first."""
        return None if self._last_training is None else self._last_training()

    def adopt_trace(self, trace: Trace) -> None:
        """Use a trace of an earlier run instead of recording one.

        Raises:
            TraceError: it is of another model or layout.
        """
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
        self._courses[trace.mode].adopt(trace)

    def adopt_plan(self, plan: Plan) -> None:
        """Use a plan of an earlier run. Its trace has to be there: adopt or record that first.

        Raises:
            PlanError: it was made from another trace, for another machine, or it is not sound.
        """
        if self.trace is None:
            raise PlanError("a plan needs the trace it was made from; set manager.trace first, or train one step")
        check_adoptable(plan, self.trace, self._own_machine())
        self._courses[Mode.TRAIN].adopt(self.trace, plan)

    # Laps.

    @property
    def is_recording(self) -> bool:
        return self._recorder is not None and self._is_running

    @property
    def watch(self) -> Watch | None:
        """Watches memory in a step that is recorded."""
        return self._watch

    def begin_root(self, *, grad_enabled: bool, before_lap: Callable[[], None] = lambda: None) -> None:
        """A model is called from outside: maybe a lap begins.

        Args:
            grad_enabled: it is training.
            before_lap: called if one begins. Its events end the training step before it; after an evaluation they are
                of no lap.

        Raises:
            CapacityError: a moment of the step cannot fit; nothing of it has run.
        """
        if self._is_running and self._mode is Mode.TRAIN:
            return
        if self._mode is Mode.EVAL:
            self._executor.on_event = _ignore
        before_lap()
        self._end_lap()
        self._begin_lap(Mode.TRAIN if grad_enabled else Mode.EVAL)

    def end_step(self) -> None:
        """The optimizer has stepped: the lap is over but for other optimizers of the same step."""
        if self._mode is not Mode.TRAIN:
            return
        if self._is_running:
            self._is_running = False
            self._in_lap, self._executor.on_event = self._executor.on_event, self._between_laps
        if self._journal is not None:
            self._journal.end()
        self._keep_timeline()
        if self._watch is not None:
            self._watch.end_sampling()
        if self._recorder is None and (over_nbytes := self._tiers.overshoot_nbytes()):
            self._courses[Mode.TRAIN].charge_more(over_nbytes)

    def excuse_lap(self) -> None:
        """The lap that runs is not like the others: the next one is recorded instead, and no plan suffers from it."""
        self.is_excused = True

    # Two ways to step, of which one is kept; see `chunkmem.steps.trial`.

    def record_another(self) -> None:
        """The next step goes another way than the one recorded before it, or just now: record it, too."""
        self._is_first_of_two = True

    def fits_overlapped(self) -> bool:
        """Tell whether a plan for steps like the one just recorded fits both tiers if exchanges overlap computing.

        A rank that recorded nothing, as it had no batch, says yes as far as it is concerned.
        """
        recorder = self._recorder
        if recorder is None:
            return True
        try:
            trace = recorder.trace(self._layout(), self._executor.store.chunks)
        except TraceError:
            return False  # it was torn down in the middle
        return self._courses[Mode.TRAIN].planned_stall_s(overlapped(trace)) < inf

    def compare(self) -> tuple[float, float] | None:
        """Return how long computing stands still in steps of both ways, as planned; inf: there is no plan for it.

        None if the two are not both known. What they compute is the same, but not how long that took when recorded.
        """
        course = self._courses[Mode.TRAIN]
        if self._aside is None or course.trace is None:
            return None
        return course.planned_stall_s(self._aside), course.planned_stall_s(course.trace)

    def keep(self, *, first: bool) -> None:
        """Forget one of the two."""
        aside, self._aside = self._aside, None
        if first and aside is not None:
            self._courses[Mode.TRAIN].take(aside)

    def forget(self) -> None:
        """There is more to manage than was recorded: record anew."""
        self._aside, self._is_first_of_two = None, False
        self._recorder = None
        self._stop_watch()
        for course in self._courses.values():
            course.forget()
        self._serve_on_demand()

    def close(self) -> None:
        """Join the sampling thread and the lanes."""
        self.forget()
        self._lanes.close()

    def _begin_lap(self, mode: Mode) -> None:
        for other, course in self._courses.items():
            if other is not mode:
                course.stop()
        performer = self._courses[mode].prepare(has_alternative=mode is Mode.TRAIN and self._aside is not None)
        self._mode, self._is_running = mode, True
        for ledger in self._ledgers:
            ledger.restart_peak()
        if performer is not None:
            self._follow(performer)
        elif self._courses[mode].wants_record and (self.may_record or mode is Mode.EVAL):
            self._record(mode)
        else:
            self._serve_on_demand()

    def _end_lap(self) -> None:
        """The lap before is over for good: learn from it."""
        mode, recorder = self._mode, self._recorder
        if mode is Mode.EVAL:
            self._keep_timeline()
        is_excused, self.is_excused = self.is_excused, False
        self._mode, self._recorder, self._is_running = None, None, False
        if recorder is not None:
            recorder.end()
            self._stop_watch()
        if is_excused:
            return
        if recorder is not None:
            course = self._courses[recorder.mode]
            course.recorded(lambda: recorder.trace(self._layout(), self._executor.store.chunks))
            if self._is_first_of_two and recorder.mode is Mode.TRAIN:
                self._is_first_of_two, self._aside = False, course.trace
                course.forget()
        elif mode is not None and self._performer is self._courses[mode].performer:
            self._courses[mode].learn()

    def _keep_timeline(self) -> None:
        """Keep what a timeline of this lap is made of: the journal, and peaks that the next lap begins anew."""
        if self._journal is None:
            return
        journal, trace = self._journal, None if self._performer is None else self._performer.trace
        peaks = {ledger.tier: (ledger.chunk_peak_nbytes, dict(ledger.role_peak)) for ledger in self._ledgers}
        caps = {ledger.tier: ledger.limit_nbytes for ledger in self._ledgers}
        self._last = lambda: journal.timeline(trace, peaks, caps)
        if self._mode is Mode.TRAIN:
            self._last_training = self._last

    def _between_laps(self, kind: Kind, chunk: Chunk, reader: object) -> None:
        """A second optimizer's updates belong to the lap that is over; a read outside of it only has to be safe."""
        if kind is Kind.HOLD:
            self._executor.drain()
        elif kind not in (Kind.EXCHANGE, Kind.ARRIVE):
            self._in_lap(kind, chunk, reader)

    def _record(self, mode: Mode) -> None:
        self._serve_on_demand()
        watch = self._watch = self._make_watch()
        self._recorder = Recorder(
            mode, take_peaks=watch.take_peaks, sampling_interval_s=lambda: watch.sampling_interval_s
        )
        self._journal = self._recorder.journal
        self._executor.on_event = self._recorder.event
        self._executor.store.on_copy = self._journal.served
        self._executor.on_arrival = self._journal.exchanged

    def _follow(self, performer: Performer) -> None:
        executor = self._executor
        self._performer = performer
        performer.begin_lap()
        self._journal = performer.journal
        executor.on_event = performer.event
        executor.before_demand = performer.depart
        executor.drain = performer.drain
        executor.update_tier = performer.update_tier
        executor.is_planned = lambda: performer.is_on_plan
        executor.store.on_copy = performer.journal.served
        executor.on_arrival = performer.journal.exchanged

    def _serve_on_demand(self) -> None:
        executor = self._executor
        self._lanes.drain()
        executor.reserve_log({})
        self._journal = self._performer = None
        executor.on_event = self._in_lap = _ignore
        executor.before_demand = executor.drain = lambda: None
        executor.update_tier = lambda group: None
        executor.is_planned = lambda: False
        executor.store.on_copy = lambda chunk, target, started_s: None
        executor.on_arrival = lambda chunk, issued_s, waited_s: None

    def _stop_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()

    def _own_machine(self) -> Machine:
        if self._machine is None:
            self._machine = self._make_machine()
        return self._machine

    def _bystanders_nbytes(self, trace: Trace) -> Mapping[Tier, int]:
        resident = self._executor.store.resident
        return {
            tier: sum(chunk.nbytes for chunk in chunks.values() if chunk.id not in trace.chunk_nbytes)
            for tier, chunks in resident.items()
        }
