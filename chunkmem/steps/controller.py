"""Decide before each step: record it, have a plan followed, or serve on demand.

An iteration is one training step (from the first call of a model to the end of the optimizer's step, however many
micro-batches; sometimes a few of them, see `chunkmem.steps.iteration_end`) or one evaluation (a
call of a model without gradients, between steps). Between iterations nothing is recorded or followed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from chunkmem.activations.region_choice import RegionChoices
from chunkmem.activations.regions import RegionActivations
from chunkmem.data.errors import TraceError
from chunkmem.data.trace import Kind, Mode, Trace
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.cursor import label_of
from chunkmem.plan.garbage import no_collections
from chunkmem.plan.machine import Machine
from chunkmem.runtime.chunk import NO_CONTENT, Chunk
from chunkmem.runtime.failed import drain
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.plan_executor import PlanExecutor
from chunkmem.runtime.policy import BetweenSteps, OnDemand
from chunkmem.runtime.step_log import StepLog
from chunkmem.runtime.tiers import Tiers
from chunkmem.steps.cached_plan import CachedPlan
from chunkmem.steps.hook_levels import BlockSteps, Residence
from chunkmem.steps.iteration_end import IterationEnd
from chunkmem.steps.known import Iteration, KnownSteps
from chunkmem.steps.plan_cache import Key
from chunkmem.steps.plan_log import LOG
from chunkmem.steps.recorder import Recorder
from chunkmem.steps.timelines import LastTimelines
from chunkmem.steps.watch import Watch


class StepController:
    """For each step: record, follow a plan, or serve on demand. It hears when models are called and steps end."""

    def __init__(
        self,
        pager: Pager,
        tiers: Tiers,
        *,
        machine: Callable[[], Machine],
        options: PlanOptions,
        layout: Callable[[], str],
        watch: Callable[[], Watch],
        trainable: Callable[[], bytes],
        num_backwards: Callable[[], int],
        regions: RegionActivations,
        is_model: Callable[[int], bool],
        is_lone: bool = True,
    ) -> None:
        """Begin with nothing known.

        Args:
            pager: whose events are heard.
            tiers: of its store.
            machine: returns what plans are made for; called when the first one is.
            options: of the planner.
            layout: returns the digest of everything packed.
            watch: begins to watch memory, for a step that is recorded.
            trainable: returns which parameters require gradients.
            num_backwards: returns how many backwards there have been.
            regions: what is saved in them is managed.
            is_model: tells whether what is called from outside is a whole model that was packed.
            is_lone: there is one rank. Else steps are recorded from when `may_record` says so, since the exchanges of
                the first ones are not those of the others.
        """
        machine = cache(machine)  # it is measured
        choices = RegionChoices(machine, options)

        def make(mode: Mode) -> CachedPlan:
            return CachedPlan(mode, pager, tiers, machine=machine, options=options)

        self.now = Iteration()
        self.known = KnownSteps(
            pager, make, layout=layout, trainable=trainable, choices=choices, now=self.now, is_lone=is_lone
        )
        """Traces and plans by kind of step."""
        self._pager = pager
        self._tiers = tiers
        self._layout = layout
        self._choices = choices
        self._is_lone = is_lone
        self._make_watch = watch
        self.may_record = is_lone
        """Training steps are like those to come."""
        self._regions = regions
        self.residence = Residence(pager, is_model=is_model)
        self._blocks = BlockSteps(pager.events, machine=machine, is_model=is_model)
        self._iteration_end = IterationEnd(pending=self._pending, num_backwards=num_backwards, is_lone=is_lone)
        self.timelines = LastTimelines(tiers, pager.store)
        events = pager.events
        events.activation_taken.append(self._leave_out)
        events.activation_left.append(self._count_again)
        if is_lone:  # else the ranks have to agree on what they learn from
            events.failed.append(self.excuse_running)

    def adopt_trace(self, trace: Trace) -> None:
        """Use a trace of an earlier run: the same calls are recomputed as in it.

        Raises:
            TraceError: it is of another model, layout or policy for activations.
        """
        self.known.require_adoptable(trace)
        if trace.mode is Mode.TRAIN:
            self._regions.adopt(trace)
        self.known.adopt_trace(trace)

    # Iterations.

    @property
    def is_recording(self) -> bool:
        return self.now.recorder is not None and self.now.is_running

    @property
    def watch(self) -> Watch | None:
        """Watches memory in a step that is recorded."""
        return self.now.watch

    @property
    def is_excused(self) -> bool:
        """Nothing is to be learnt from the iteration that runs, or ran last."""
        return self.now.is_excused

    @property
    def is_between_steps(self) -> bool:
        """A step or an evaluation was the last thing, and a parameter that is used begins the next one."""
        is_over = self.now.mode is Mode.TRAIN and not self.now.is_running
        return self._is_lone and (self.now.mode is Mode.EVAL or is_over or self.now.is_learnt)

    def begin_root(
        self,
        root: int,
        *,
        grad_enabled: bool,
        before_iteration: Callable[[], None] = lambda: None,
        is_model: bool = True,
    ) -> None:
        """A model is called from outside: maybe an iteration begins.

        Args:
            root: identity of the model.
            grad_enabled: it is training.
            before_iteration: called if one may begin. Its events end the training step before it; after an evaluation
                they are of no iteration.
            is_model: else it is a parameter, which an operator outside of models gets. An iteration may begin with it,
                unless an evaluation comes next.

        Raises:
            CapacityError: a moment of the step cannot fit; nothing of it has run.
        """
        if self.now.mode is Mode.EVAL:
            self._pager.policy = BetweenSteps(self._pager.policy, has_hooks=False)
        if self.now.mode is not Mode.TRAIN or not self.now.is_running or self._iteration_end.is_over:
            before_iteration()
        is_no_step = self.now.is_prelude and not grad_enabled
        if self.now.mode is Mode.TRAIN and not self._iteration_end.is_over and not is_no_step:
            self.now.is_prelude = self.now.is_prelude and not is_model
            self._go_on()
            return
        if is_no_step:
            self.excuse_iteration()
        self._end_iteration()
        self._begin_iteration(Mode.TRAIN if grad_enabled else Mode.EVAL, root)
        self.now.is_prelude = not is_model

    def end_step(self) -> None:
        """The optimizer has stepped: the iteration is over but for other optimizers of the same step."""
        if self.now.mode is not Mode.TRAIN:
            return
        self._iteration_end.stepped()
        if self.now.is_running:
            self.now.is_running = False
            self._pager.policy = BetweenSteps(self._pager.policy, has_hooks=True)
        self._close_step()

    def _close_step(self) -> None:
        """A training step is over: keep its timeline."""
        if self.now.step_log is not None:
            self.now.step_log.end()
        self._keep_timeline()
        if self.now.watch is not None:
            self.now.watch.end_sampling()
        entry = self.known.training
        if self.now.recorder is None and entry is not None and (over_nbytes := self._tiers.overshoot_nbytes()):
            entry.charge_more(over_nbytes)

    def excuse_iteration(self) -> None:
        """The iteration that runs is not like the others: the next one is recorded instead, and no plan suffers from
        it."""
        self.now.is_excused = True

    def excuse_running(self) -> None:
        """If a step runs, it is not like others: an access has raised an error, or chunks were moved past its plan."""
        self.now.is_excused = self.now.is_excused or self.now.is_running

    def _leave_out(self, storage: torch.UntypedStorage) -> None:
        if self.watch is not None:
            self.watch.leave_out(storage)

    def _count_again(self, storage: torch.UntypedStorage) -> None:
        if self.watch is not None:
            self.watch.count_again(storage)

    def learn_from_last(self) -> None:
        """Chunks are about to change between two steps: learn from the last one now, and not from what happens then."""
        is_over = self._iteration_end.is_over and not self.now.is_running
        if self.now.mode is Mode.EVAL or (self.now.mode is Mode.TRAIN and is_over):
            if self.now.mode is Mode.EVAL:
                self._pager.policy = BetweenSteps(self._pager.policy, has_hooks=False)
            self._end_iteration()
            self.residence.leave()
            self.now.is_learnt = True
            for kinds in self.known.kinds.values():
                kinds.stop()

    def go_to_start(self) -> None:
        """Between two steps: have chunks where a training step like the last one begins, if there is a plan for it.

        Raises what `begin_root` does.
        """
        entry = None if self.now.is_running else self.known.kinds[Mode.TRAIN].last
        plan_executor = None if entry is None else entry.prepare()
        if plan_executor is not None:
            plan_executor.go_to_start()

    def note_compiled(self) -> None:
        """torch's compiler begins: what it takes is no part of computing. Several ranks have to agree on that."""
        self.now.has_compiled = self.now.has_compiled or self.now.is_running
        self.now.is_excused = self.now.is_excused or (self._is_lone and self.now.is_running)

    def forget(self) -> None:
        """There is more to manage than was recorded: record again."""
        self.residence.leave()
        self._blocks.hear(self.now.key, by_block=False)
        self.now.recorder, self.known.trained = None, b""
        self._stop_watch()
        for kinds in self.known.kinds.values():
            kinds.forget()
        self._serve_on_demand()

    def close(self) -> None:
        """Join the sampling thread, and have the lanes done."""
        self.forget()

    def _go_on(self) -> None:
        """The iteration continues after a step of an optimizer."""
        if not self.now.is_running:
            self.now.is_running = True
            policy = self._pager.policy
            self._pager.policy = policy.policy if isinstance(policy, BetweenSteps) else policy

    def _stay(self, entry: CachedPlan, key: Key) -> None:
        """A step begins that moves nothing: nobody need hear of it."""
        self.known.kinds[entry.mode].used(entry, key)
        self._serve_on_demand()
        self.now.step_log = StepLog(self._pager.store.clock)
        self.residence.enter(entry)

    @no_collections()
    def _begin_iteration(self, mode: Mode, root: int) -> None:
        kinds = self.known.kinds[mode]
        self.now.key = key = self.known.key_of(root, mode)
        self._blocks.begin(key, kinds)
        is_recorded = (self.may_record or mode is Mode.EVAL) and kinds.wants_record(key)
        entry = None if is_recorded else kinds.choose(key)
        if entry is not None and entry.is_by_block and entry.prepare(has_alternative=True) is None:
            kinds.hook_by_block(key, False)
            entry, is_recorded = None, True
        staying = None if is_recorded else self.residence.of(key, kinds, entry)
        if staying is None:
            self.residence.leave()
        else:
            entry = None
        if staying is None:
            self._blocks.hear(key, by_block=kinds.by_block.get(key, False) if entry is None else entry.is_by_block)
        for other in self.known.kinds.values():
            other.stop(besides=entry)
        plan_executor = None if entry is None else entry.prepare()
        self.now.mode, self.now.is_running, self.now.has_compiled, self.now.is_learnt = mode, True, False, False
        self._iteration_end.begin()
        self.timelines.begin()
        if mode is Mode.TRAIN:
            self._regions.begin_iteration(self._choices.kept(key), self._num_moments)
        if entry is not None and plan_executor is not None:
            plan_executor.begin_iteration(times_moments=entry.wants_durations)
            self._follow(entry, plan_executor)
        elif is_recorded:
            self._record(mode)
        elif staying is not None:
            self._stay(staying, key)
        else:
            self._serve_on_demand()

    @no_collections()
    def _end_iteration(self) -> None:
        """The iteration before is over for good: learn from it."""
        mode, recorder, entry = self.now.mode, self.now.recorder, self.now.entry
        if mode is Mode.EVAL:
            self._keep_timeline()
        elif mode is Mode.TRAIN and self._iteration_end.is_without_step:
            self._close_step()
        is_recorded = mode is Mode.TRAIN and recorder is not None and not self.now.is_excused
        if self._is_lone and is_recorded and self.is_choosing_regions:
            self.keep_regions(self.choose_regions())
        is_excused, self.now.is_excused = self.now.is_excused, False
        on_demand, self.now.on_demand = self.now.on_demand, None
        self.now.mode, self.now.recorder, self.now.is_running = None, None, False
        if recorder is not None:
            recorder.end()
            self._stop_watch()
        if is_excused:
            return
        if recorder is not None:
            self._learn_record(recorder)
        elif mode is not None and entry is not None and self.now.plan_executor is entry.plan_executor:
            if self.now.plan_executor is not None:
                self.now.plan_executor.end_iteration()
            self.known.kinds[mode].used(entry, self.now.key)
            self.known.kinds[mode].learn(entry)
            if mode is Mode.TRAIN and self._is_lone:
                self._choose_regions_again(entry)
        elif mode is not None and on_demand is not None and self._moved_nbytes > on_demand:
            if self.residence.is_on and (last := self.known.kinds[mode].last) is not None:
                last.has_moved = True
            self.known.kinds[mode].needs_plans()

    def _learn_record(self, recorder: Recorder) -> None:
        is_even = recorder.mode is Mode.EVAL or self._iteration_end.is_even

        def trace() -> Trace:
            if not is_even:
                raise TraceError("other gradients wait for their step at its end than did at its beginning")
            return self._trace_of(recorder)

        kinds = self.known.kinds[recorder.mode]
        kinds.recorded(self.now.key, trace)
        entry = kinds.of(self.now.key)
        if self._is_lone and entry is not None and entry.trace is not None:
            self._blocks.decide(self.now.key, kinds, entry.trace)

    @property
    def is_choosing_regions(self) -> bool:
        """Which regions this kind of step recomputes is not decided yet."""
        return self._regions.is_auto and self._choices.kept(self._training_key) is None

    @property
    def _training_key(self) -> Key:
        """Of the step that runs, or ran last, on whichever rank."""
        return self.now.key if self._is_lone else self.known.key_of(0, Mode.TRAIN)

    def choose_regions(self) -> frozenset[int]:
        """Return the calls of regions that steps like the one just recorded had better not recompute."""
        recorder = self.now.recorder
        try:
            trace = None if recorder is None else self._trace_of(recorder)
        except TraceError:
            trace = None  # it was torn down in the middle
        return frozenset() if trace is None or not trace.regions else self._choices.choose(trace)

    def _choose_regions_again(self, entry: CachedPlan) -> None:
        """A step has followed a plan: if another choice is faster by what is known now, the next step is recorded."""
        trace, plan = entry.trace, entry.plan
        if not (self._regions.is_auto and entry.has_measured_times) or trace is None or plan is None:
            return
        if self._choices.choose_again(self.now.key, trace, plan):
            self.known.kinds[Mode.TRAIN].drop(self.now.key)

    def keep_regions(self, kept: frozenset[int]) -> None:
        """Have steps of this kind recompute all calls of regions but these; what was recorded is of another kind."""
        self._choices.keep(self._training_key, kept)
        self.now.is_excused = self.now.is_excused or bool(kept)

    def _trace_of(self, recorder: Recorder) -> Trace:
        regions = self._regions.recorded() if recorder.mode is Mode.TRAIN else ()
        return recorder.trace(self._layout(), self._pager.store.chunks, regions)

    def _num_moments(self) -> int:
        return 0 if self.now.recorder is None else self.now.recorder.num_moments

    def _keep_timeline(self) -> None:
        trace = None if self.now.plan_executor is None else self.now.plan_executor.trace
        is_training, is_hooked = self.now.mode is Mode.TRAIN, self.now.on_demand is None
        self.timelines.keep(self.now.step_log, trace, is_training=is_training, is_hooked=is_hooked)

    def _record(self, mode: Mode) -> None:
        LOG.info("%s step: recorded, as %s", mode.value, self.known.kinds[mode].why_recorded)
        watch = self.now.watch = self._make_watch()
        self.now.recorder = Recorder(
            mode,
            clock=self._pager.store.clock,
            take_peaks=watch.take_peaks,
            sampling_interval_s=lambda: watch.sampling_interval_s,
            left_nbytes=watch.left_nbytes,
            by_block=self._blocks.is_on,
        )
        self.now.step_log, self.now.entry, self.now.plan_executor = self.now.recorder.step_log, None, None
        self._leave_plans()
        self._pager.policy = self.now.recorder

    def _follow(self, entry: CachedPlan, plan_executor: PlanExecutor) -> None:
        self.now.entry, self.now.plan_executor, self.now.step_log = entry, plan_executor, plan_executor.step_log
        plan_executor.elsewhere = self._take_another_way
        self._pager.policy = plan_executor

    def _serve_on_demand(self) -> None:
        self.now.step_log = self.now.entry = self.now.plan_executor = None
        self._leave_plans()
        self._pager.policy, self.now.on_demand = OnDemand(), self._moved_nbytes

    @property
    def _moved_nbytes(self) -> int:
        return sum(self._pager.store.moved.values())

    def _leave_plans(self) -> None:
        drain(self._tiers.lanes, self._pager.store)
        self._tiers.plan_is_left()
        if (excess_nbytes := self._tiers.excess_nbytes()) > 0:
            self._pager.shrink(Tier.DEVICE, excess_nbytes)
            self._tiers.leave_room_for_activations()
        self._pager.speculative.reserve({})

    def _take_another_way(self, kind: Kind, chunk: Chunk, reader: object, left_out: int | None) -> bool:
        """An event does not come next in the plan: go over to another plan if that fits the step better."""
        before, mode = self.now.plan_executor, self.now.mode
        if not self.now.is_running or self.now.entry is None or before is None or mode is None:
            return False
        came = [*before.came(), (kind, chunk.id, label_of(kind, chunk.id, reader))]
        entry = self.known.kinds[mode].better(self.now.entry, came, left_out=left_out)
        plan_executor = None if entry is None else entry.prepare(has_alternative=True)
        if entry is None or plan_executor is None:
            return False
        before.close()
        plan_executor.take_over(before.step_log, came, times_moments=entry.wants_durations)
        self._follow(entry, plan_executor)
        plan_executor.event(kind, chunk, reader)
        return True

    def _stop_watch(self) -> None:
        watch, self.now.watch = self.now.watch, None
        if watch is not None:
            watch.stop()

    def _pending(self) -> frozenset[ChunkId]:
        chunks = self._pager.store.chunks
        return frozenset(key for key, chunk in chunks.items() if key.role is Role.GRAD and chunk.version != NO_CONTENT)
