"""Decide before each step: record it, have a plan followed, or serve on demand.

A lap is one training step (from the first call of a model to the end of the optimizer's step, however many
micro-batches; sometimes a few of them, see [Note: Even steps] in `chunkmem.steps.laps`) or one evaluation (a call of a
model without gradients, between steps). Between laps nothing is recorded or followed.
"""

from __future__ import annotations

from collections.abc import Callable

from chunkmem.errors import TraceError
from chunkmem.plan.machine import Machine
from chunkmem.plan.planner import PlanOptions
from chunkmem.runtime.events import Lanes
from chunkmem.runtime.executor import DemandExecutor
from chunkmem.runtime.journal import Journal
from chunkmem.runtime.performer import Performer, label_of
from chunkmem.runtime.policy import BetweenSteps, OnDemand
from chunkmem.runtime.store import NO_CONTENT, Chunk
from chunkmem.runtime.tiers import Tiers
from chunkmem.steps.course import Course
from chunkmem.steps.kinds import Key
from chunkmem.steps.known import KnownSteps
from chunkmem.steps.laps import LapEnd
from chunkmem.steps.making import CourseMaker
from chunkmem.steps.timelines import LastTimelines
from chunkmem.trace.model import Kind, Mode, Trace
from chunkmem.tracing.recorder import Recorder
from chunkmem.tracing.watch import Watch
from chunkmem.types import ChunkId, Role


class Conductor(KnownSteps):
    """For each step: record, follow a plan, or serve on demand. It hears when models are called and steps end."""

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
        trainable: Callable[[], bytes],
        num_backwards: Callable[[], int],
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
            trainable: returns which parameters require gradients.
            num_backwards: returns how many backwards there have been.
            is_lone: there is one rank. Else steps are recorded from when `may_record` says so, since the exchanges of
                the first ones are not those of the others.
        """
        maker = CourseMaker(executor, tiers, lanes, machine=machine, options=options)
        super().__init__(executor, maker, layout=layout, is_lone=is_lone)
        self._tiers = tiers
        self._lanes = lanes
        self._make_watch = watch
        self.may_record = is_lone
        """Training steps are like those to come."""
        self._trainable = trainable
        self._lap_end = LapEnd(pending=self._pending, num_backwards=num_backwards, is_lone=is_lone)
        self._key = Key()
        """Of the lap that runs, or ran last."""
        self._is_running = False
        self._watch: Watch | None = None
        self._performer: Performer | None = None
        """Follows `_course` in the lap that runs, or ran last; None if that is recorded or served on demand."""
        self._journal: Journal | None = None
        """Of the lap that runs, or ran last."""
        self.is_excused = False
        """Nothing is to be learnt from the lap that runs, or ran last."""
        self.timelines = LastTimelines(tiers)

    # Laps.

    @property
    def is_recording(self) -> bool:
        return self._recorder is not None and self._is_running

    @property
    def watch(self) -> Watch | None:
        """Watches memory in a step that is recorded."""
        return self._watch

    def begin_root(self, root: int, *, grad_enabled: bool, before_lap: Callable[[], None] = lambda: None) -> None:
        """A model is called from outside: maybe a lap begins.

        Args:
            root: identity of the model.
            grad_enabled: it is training.
            before_lap: called if one may begin. Its events end the training step before it; after an evaluation they
                are of no lap.

        Raises:
            CapacityError: a moment of the step cannot fit; nothing of it has run.
        """
        if self._mode is Mode.EVAL:
            self._executor.policy = BetweenSteps(self._executor.policy, hears=False)
        if self._mode is not Mode.TRAIN or not self._is_running or self._lap_end.is_over:
            before_lap()
        if self._mode is Mode.TRAIN and not self._lap_end.is_over:
            self._go_on()
            return
        self._end_lap()
        self._begin_lap(Mode.TRAIN if grad_enabled else Mode.EVAL, root)

    def end_step(self) -> None:
        """The optimizer has stepped: the lap is over but for other optimizers of the same step."""
        if self._mode is not Mode.TRAIN:
            return
        self._lap_end.stepped()
        if self._is_running:
            self._is_running = False
            self._executor.policy = BetweenSteps(self._executor.policy, hears=True)
        if self._journal is not None:
            self._journal.end()
        self._keep_timeline()
        if self._watch is not None:
            self._watch.end_sampling()
        course = self._training
        if self._recorder is None and course is not None and (over_nbytes := self._tiers.overshoot_nbytes()):
            course.charge_more(over_nbytes)

    def excuse_lap(self) -> None:
        """The lap that runs is not like the others: the next one is recorded instead, and no plan suffers from it."""
        self.is_excused = True

    def forget(self) -> None:
        """There is more to manage than was recorded: record anew."""
        self._aside, self._is_first_of_two = None, False
        self._recorder = None
        self._stop_watch()
        for kinds in self.kinds.values():
            kinds.forget()
        self._serve_on_demand()

    def close(self) -> None:
        """Join the sampling thread and the lanes."""
        self.forget()
        self._lanes.close()

    def _go_on(self) -> None:
        """The lap goes on after a step of an optimizer."""
        if not self._is_running:
            self._is_running = True
            policy = self._executor.policy
            self._executor.policy = policy.policy if isinstance(policy, BetweenSteps) else policy

    def _begin_lap(self, mode: Mode, root: int) -> None:
        kinds, is_lone = self.kinds[mode], self._is_lone
        self._key = key = Key(root, self._trainable() if mode is Mode.TRAIN else b"") if is_lone else Key()
        is_recorded = (self.may_record or mode is Mode.EVAL) and kinds.wants_record(key)
        course = None if is_recorded else kinds.choose(key)
        for other in self.kinds.values():
            other.stop(besides=course)
        has_alternative = mode is Mode.TRAIN and self._aside is not None
        performer = None if course is None else course.prepare(has_alternative=has_alternative)
        self._mode, self._is_running = mode, True
        self._lap_end.begin()
        self.timelines.begin()
        if course is not None and performer is not None:
            performer.begin_lap()
            self._follow(course, performer)
        elif is_recorded:
            self._record(mode)
        else:
            self._serve_on_demand()

    def _end_lap(self) -> None:
        """The lap before is over for good: learn from it."""
        mode, recorder, course = self._mode, self._recorder, self._course
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
            self._learn_record(recorder)
        elif mode is not None and course is not None and self._performer is course.performer:
            if self._performer is not None:
                self._performer.end_lap()
            self.kinds[mode].used(course, self._key)
            self.kinds[mode].learn(course)

    def _learn_record(self, recorder: Recorder) -> None:
        is_even = recorder.mode is Mode.EVAL or self._lap_end.is_even

        def trace() -> Trace:
            if not is_even:
                raise TraceError("other gradients wait for their step at its end than did at its beginning")
            return recorder.trace(self._layout(), self._executor.store.chunks)

        kinds = self.kinds[recorder.mode]
        kinds.recorded(self._key, trace)
        if self._is_first_of_two and recorder.mode is Mode.TRAIN:
            self._is_first_of_two, self._aside = False, kinds.trace
            kinds.forget()

    def _keep_timeline(self) -> None:
        trace = None if self._performer is None else self._performer.trace
        self.timelines.keep(self._journal, trace, is_training=self._mode is Mode.TRAIN)

    def _record(self, mode: Mode) -> None:
        watch = self._watch = self._make_watch()
        self._recorder = Recorder(
            mode, take_peaks=watch.take_peaks, sampling_interval_s=lambda: watch.sampling_interval_s
        )
        self._journal, self._course, self._performer = self._recorder.journal, None, None
        self._leave_plans()
        self._executor.policy = self._recorder

    def _follow(self, course: Course, performer: Performer) -> None:
        self._course, self._performer, self._journal = course, performer, performer.journal
        performer.elsewhere = self._take_another_way
        self._executor.policy = performer

    def _serve_on_demand(self) -> None:
        self._journal = self._course = self._performer = None
        self._leave_plans()
        self._executor.policy = OnDemand()

    def _leave_plans(self) -> None:
        self._lanes.drain()
        self._executor.speculative.reserve({})

    def _take_another_way(self, kind: Kind, chunk: Chunk, reader: object, left_out: int | None) -> bool:
        """An event does not come next in the plan: go over to another plan if that fits the step better."""
        before, mode = self._performer, self._mode
        if not self._is_running or self._course is None or before is None or mode is None:
            return False
        came = [*before.came(), (kind, chunk.id, label_of(kind, chunk.id, reader))]
        course = self.kinds[mode].better(self._course, came, left_out=left_out)
        performer = None if course is None else course.prepare(has_alternative=True)
        if course is None or performer is None:
            return False
        before.close()
        performer.take_over(before.journal, came)
        self._follow(course, performer)
        performer.event(kind, chunk, reader)
        return True

    def _stop_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()

    def _pending(self) -> frozenset[ChunkId]:
        chunks = self._executor.store.chunks
        return frozenset(key for key, chunk in chunks.items() if key.role is Role.GRAD and chunk.version != NO_CONTENT)
