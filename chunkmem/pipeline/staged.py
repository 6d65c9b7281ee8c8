"""A pipeline whose stages are on different ranks."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from chunkmem.assembly.runtime import Runtime
from chunkmem.data.errors import ChunkmemError, ConfigError, RankError, StateError
from chunkmem.pipeline.announced import AnnouncedForms
from chunkmem.pipeline.deferred_norm import DeferredStatistics
from chunkmem.pipeline.forms import BoundaryForms
from chunkmem.pipeline.frozen import FrozenBlocks, FrozenPrefix
from chunkmem.pipeline.given_batch import compare
from chunkmem.pipeline.held import HeldStage
from chunkmem.pipeline.joined import JoinedBatch, unchanged_weights
from chunkmem.pipeline.micro_batches import not_given, split
from chunkmem.pipeline.modules import StageModule, divide
from chunkmem.pipeline.options import PipelineOptions
from chunkmem.pipeline.outputs import Gradients
from chunkmem.pipeline.schedules import FOR_ANY_NUMBER, check_schedule, choose, make_schedule
from chunkmem.pipeline.stage import PackedStage, StageStep
from chunkmem.pipeline.ties import TiedParameters
from chunkmem.pipeline.width import Pipeline
from chunkmem.ranks.neighbours import Neighbours


def stages_of(
    runtime: Runtime, options: PipelineOptions, *, num_ranks: int, num_shards: int
) -> tuple[PipelineOptions, list[StageModule], str]:
    """Return options with the name of a schedule, all stages, and why these, if the schedule was not asked for.

    Args:
        runtime: of the manager.
        options: see `StagedPipeline`, as for errors.
        num_ranks: of a pipeline.
        num_shards: ranks that share a stage.
    """
    reason = ""
    if options.schedule == "auto" and options.stages_per_rank is None and len(options.blocks) >= num_ranks:
        device_nbytes = runtime.tiers.caps.device_nbytes
        options, reason = choose(options, num_ranks=num_ranks, num_shards=num_shards, device_nbytes=device_nbytes)
    name, per_rank = check_schedule(options.schedule, options.stages_per_rank)
    return replace(options, schedule=name), divide(options, per_rank * num_ranks), reason


_NOT_FIRST = "inputs that require gradients on a rank without the first stage"


class StagedPipeline(Pipeline):
    """Runs the stages of this rank, together with the ranks that have the others."""

    @staticmethod
    def require_trainable(runtime: Runtime, modules: Sequence[StageModule]) -> None:
        """Raise a `ConfigError` for what a kind of pipelines cannot train, before anything is packed."""

    def __init__(self, runtime: Runtime, options: PipelineOptions) -> None:
        """Divide a model into stages over ranks, and pack those of this rank.

        Every rank calls it with the same options, and without another model in between.

        Args:
            runtime: of the manager that the model was built with.
            options: see `ChunkManager.pipeline`; for `schedule` and `stages_per_rank` see `check_schedule`.

        Raises:
            ConfigError: an option is not for stages, or differs between ranks.
            LayoutError: there are fewer blocks than stages, or parameters of the model are in none of them.
            StateError: there is no model, or it is packed already.
            CapacityError: the weights fit no tier.
        """
        ranks = runtime.ranks.stages
        assert ranks is not None
        options, modules, reason = stages_of(
            runtime, options, num_ranks=ranks.size, num_shards=runtime.ranks.shard.size
        )
        super().__init__(runtime, options)
        per_rank = len(modules) // ranks.size
        what = f"{options.schedule} of {len(options.blocks)} blocks, {per_rank} stages a rank, {options.micro_batches}"
        ranks.agree("the pipeline", f"{what}, {options.checkpoint}, {options.versions}")
        runtime.built.check_stages(modules)
        self.require_trainable(runtime, modules)
        self._forms = BoundaryForms(modules, dtype=runtime.dtype)
        runtime.built.add_stages(dict(enumerate(modules)))
        self._ranks = ranks
        self.reason = reason
        """Why the schedule was chosen; empty if it was asked for."""
        self._schedules: dict[int, Any] = {}
        """By number of micro-batches: a schedule of torch's."""
        waiting = runtime.memory.pager.waiting
        self._neighbours = Neighbours(ranks, runtime.device, waiting=waiting)
        self._announced = AnnouncedForms(ranks, torch.device("cpu"), waiting=waiting)
        own = range(ranks.rank, len(modules), ranks.size)
        self._statistics = DeferredStatistics([modules[k] for k in own] if options.deferred_batch_norm else ())
        self._held = HeldStage(runtime)
        make = partial(PackedStage, runtime=runtime, options=options, statistics=self._statistics)
        make = partial(make, neighbours=self._neighbours, hold=self._held.hold)
        self.stages = [make(modules[index], index, len(modules)) for index in own]
        """Stages of this rank."""
        self._ties = TiedParameters(modules, runtime, ranks=ranks)
        self._frozen = FrozenPrefix(
            [block for module in modules for block in module.blocks][:-1],
            options.cache,
            units=runtime.sharding.units,
            ranks=ranks,
            owners=[number % ranks.size for number, module in enumerate(modules) for _ in module.blocks],
        )
        self._roots: defaultdict[int, nn.Module] = defaultdict(nn.Module)
        """By the first block that runs: the root of such steps, which are a kind of step of their own."""
        self._joined_root = nn.Module()
        """Likewise, where outputs are wanted."""
        self._pending: tuple[weakref.ref[JoinedBatch], Callable[[Any], None]] | None = None
        """What `pipe(x)` has returned, and its backward."""

    @property
    def schedule(self) -> str:
        """The name of the schedule."""
        return self._options.schedule

    @property
    def num_stages(self) -> int:
        """Those of all ranks."""
        return len(self.stages) * self._ranks.size

    def __repr__(self) -> str:
        own = ", ".join(str(stage.stage_index) for stage in self.stages)
        how = f"micro_batches={self._options.micro_batches}, schedule={self.schedule!r}"
        return f"{type(self).__name__}(stage {own} of {self.num_stages}, {how})"

    def step(self, inputs: Any, target: Any = None, *, ids: Any = None) -> torch.Tensor:
        """Run forward and backward for a batch; return its loss, the same on all ranks of a pipeline, detached.

        All ranks of a pipeline are given the same batch: the first stage uses `inputs`, the last one `target`, and
        other ranks may be given None. What stages give to each other is found out from the shapes of inputs; where a
        rank has none, or a block looks at values, it is said ahead of each micro-batch.

        Args:
            inputs: a tensor, or tuples, lists and dicts of tensors, split into micro-batches along dimension 0.
            target: likewise.
            ids: with a cache, of each sample, the same in each epoch and on all ranks of a pipeline: a list, or a 1-D
                tensor of integers.

        Raises:
            StateError: the batch cannot be split, the first stage has no inputs, or the last one no target that another
                rank has. Or a frozen block, or a sample, cannot be cached: see `FrozenCache`.
            ConfigError: ranks were given different batches, the schedule cannot run so many micro-batches, there is not
                one of `ids` for each sample, or a rank with a cache has no inputs.
            CapacityError: something does not fit; the other ranks then raise a `RankError`, and training is over.
            RankError: a rank is missing, or has raised something.
        """
        self._runtime.require_several_backwards("pipe.step()")
        step, schedule = self._prepare(inputs, target, ids, is_training=True)
        with self._running(), self._statistics.mini_batch(), self.times.step(step.parts):
            # What is received for the first call is part of the step.
            self._runtime.entry_points.begin_root(self._roots[step.frozen.start])
            self._held.begin([stage.module for stage in self.stages])
            self._ties.begin()
            schedule.step(target=torch.arange(len(step.parts)), return_outputs=False)
            self._runtime.note_scaled()  # also on a rank whose stages are frozen, and have no backward
            self._ties.end()
            loss = self._loss(step)
        self.end_step()
        return loss

    def __call__(self, inputs: Any = None) -> Any:
        """Run forward for a batch; return all that the last stage returns, on the ranks that have it, None on others.

        With gradients enabled, what is returned has a history, for any loss; the ranks without outputs call
        `pipe.backward()` while that with outputs runs the backward of its loss. With the first stage, it then runs that
        of what the inputs were made by, if they require gradients.

        Args:
            inputs: as for `step`; the first stage needs them.

        Raises:
            StateError, CapacityError, RankError: as `step`; or the backward of an earlier call may come, or there are
                gradients with several stages a rank, `deferred_batch_norm`, a cache, or inputs that require gradients
                on a rank without the first stage.
        """
        joined, is_training = JoinedBatch(inputs), torch.is_grad_enabled()
        if is_training:
            self._runtime.require_several_backwards("pipe(x)")
        step, schedule = self._prepare(joined.inputs, None, None, is_training=is_training, joined=joined)
        num = len(step.parts)
        with self._running():
            if is_training:
                self._runtime.entry_points.begin_root(self._joined_root)
                self._held.begin([stage.module for stage in self.stages])
                self._ties.begin()
                self.stages[0].forward_all(num)
            else:
                schedule.eval(target=torch.arange(num), return_outputs=False)
            self._wait_until_sent()
            last = self.stages[-1]
            has_backward = is_training and (last.is_trained or not last.is_last)
            require_same = unchanged_weights(stage.module for stage in self.stages)
            given = joined if joined.wants_gradients else None
            backward = partial(self._backward_of, step, require_same, given) if has_backward else None
            self._pending = None if backward is None else (weakref.ref(joined), backward)
            if not last.is_last:
                return None
            lengths = [part.num_samples for part in step.parts]
            return joined.outputs([step.outputs[at] for at in range(num)], lengths, backward)

    def backward(self) -> None:
        """Run the backward of `pipe(x)`, on ranks that have no outputs, while the last stage's run that of a loss.

        Raises:
            StateError: there is none, or this rank has outputs.
            RankError: a rank is missing, or has raised something.
        """
        self.require_current()
        if self._pending is None or self.stages[-1].is_last:
            what = "the outputs: call manager.backward(loss)" if self.stages[-1].is_last else "called no pipe(x) before"
            raise StateError(f"pipe.backward() is for ranks without outputs, after pipe(x); this rank has {what}")
        self._pending[1](None)

    def _problem(self, call: str, joined: JoinedBatch | None) -> str:
        """Return why this rank cannot run a batch; empty: it can."""
        earlier = None if self._pending is None else self._pending[0]()
        if earlier is not None and earlier.is_pending:
            return f"{call} before the backward of what pipe(x) has returned: run it, or drop that (del)"
        for asked, what in (
            (len(self.stages) > 1, "several stages a rank"),
            (self._options.deferred_batch_norm, "deferred_batch_norm"),
            (self._options.cache is not None, "a cache"),
            (joined is not None and joined.wants_gradients and not self.stages[0].is_first, _NOT_FIRST),
        ):
            if asked and joined is not None and torch.is_grad_enabled():
                return f"pipe(x) with gradients, over stages, and {what}: call pipe.step(x, y)"
        return ""

    def _backward_of(
        self,
        step: StageStep,
        require_same: Callable[[], None],
        joined: JoinedBatch | None,
        gradients: Sequence[Gradients] | None,
    ) -> None:
        """Run backward for a batch; the last stage is given gradients of its outputs by micro-batch.

        Then that of `joined`, whose inputs require gradients.
        """
        scaler, (stage,) = self._runtime.scaler, self.stages
        with self._running():
            if gradients is not None and scaler is not None and not scaler.is_used:
                raise StateError("fp16 gradients need the loss scale: call manager.backward(loss), not loss.backward()")
            require_same()
            for part, given in enumerate(gradients or ()):
                stage.take_gradients(part, given)
            self._pending = None
            stage.backward_all(len(step.parts))
            self._runtime.note_scaled()
            self._ties.end()
            self._wait_until_sent()
        self.end_step()
        if joined is not None:
            joined.go_on()

    def evaluate(self, inputs: Any, target: Any = None) -> torch.Tensor:
        """Run forward for a batch; return its loss. Arguments and errors are those of `step`."""
        step, schedule = self._prepare(inputs, target, None, is_training=False)
        with torch.no_grad(), self._running():
            schedule.eval(target=torch.arange(len(step.parts)), return_outputs=False)
            return self._loss(step)

    def _prepare(
        self, inputs: Any, target: Any, ids: Any, *, is_training: bool, joined: JoinedBatch | None = None
    ) -> tuple[StageStep, Any]:
        """Have the stages of this rank know a batch, the same on all ranks of the pipeline; return what runs it."""
        self.require_current()
        num = self._options.micro_batches
        with self._runtime.ranks.telling():
            if inputs is None and self._options.cache is not None:
                raise ConfigError("pipe.step(): a cache looks up samples on all ranks: give all of them the inputs")
            is_given = inputs is not None or target is not None
            parts = split(inputs, target, num=num) if is_given else []
        with self._naming_stages():
            boundaries = "" if inputs is None else self._forms.of(parts)
            call = "pipe(x)" if joined is not None else "pipe.step()" if is_training else "pipe.evaluate()"
            refused = self._problem(call, joined)
            knows_forms = not isinstance(boundaries, str)
            num_samples, are_known = compare(parts, ids, knows_forms=knows_forms, refused=refused, ranks=self._ranks)
            self._pending = None
            for stage in self.stages:
                stage.clear_runtime_states()  # of a call without a backward
            parts = parts or not_given(num_samples, num)
            parts = parts if joined is None else [replace(part, divisor=None) for part in parts]
            with self._runtime.ranks.telling():
                frozen = self._frozen.begin(parts, ids) if is_training else FrozenBlocks()
        num = len(parts)
        if not are_known or isinstance(boundaries, str):
            boundaries = [{} for _ in parts]
        step = StageStep(parts, boundaries, self.times, frozen, None if are_known else self._announced)
        if num not in self._schedules:
            self._schedules[num] = self._make_schedule(num)
        for stage in self.stages:
            stage.begin(step)
        return step, self._schedules[num]

    def _make_schedule(self, num: int) -> Any:
        """Return the schedule for so many micro-batches; where it was chosen here, another one if it is not for them.

        Raises:
            ConfigError: it was asked for, and is not for so many.
        """
        try:
            return make_schedule(self.schedule, self.stages, num)
        except ConfigError:
            if not self.reason:
                raise
            return make_schedule(FOR_ANY_NUMBER[self.schedule], self.stages, num)

    def _loss(self, step: StageStep) -> torch.Tensor:
        """Return the loss of a batch, when all messages have arrived."""
        self._wait_until_sent()
        (loss,) = self._ranks.sum_over([float(sum(step.losses))], label="sending the loss to all stages")
        return torch.tensor(loss, dtype=torch.float32, device=self._runtime.device)

    def _wait_until_sent(self) -> None:
        self._neighbours.wait_until_sent()
        self._announced.wait_until_sent()
        self._held.release()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Have all ranks hear of what is raised inside; name ranks with their stages."""
        try:
            with self._naming_stages(), self._runtime.modules.step_lock.taken():
                yield
        except Exception as error:
            own = self._ranks.name(self._ranks.rank)
            where = "" if isinstance(error, RankError) else self._stages_of([own])
            self._ranks.connection.leave("pipe.step()", error)
            self._runtime.ranks.connection.leave("pipe.step()", error, where=where)
            raise

    @contextlib.contextmanager
    def _naming_stages(self) -> Iterator[None]:
        """Name the ranks of a `RankError` with their stages; of what torch has wrapped, raise the error of chunkmem."""
        try:
            yield
        except Exception as error:
            found = _cause(error)
            if isinstance(found, RankError):
                where = self._stages_of(found.ranks)
                raise RankError(f"{found}{where if where not in str(found) else ''}", found.ranks) from error
            if found is error:
                raise
            raise found from None

    def _stages_of(self, ranks: Sequence[int]) -> str:
        """Say which stages some ranks have."""
        found = []
        for place in range(self._ranks.size):
            if self._ranks.name(place) in ranks:
                stages = [str(k) for k in range(place, self.num_stages, self._ranks.size)]
                found.append(
                    f"rank {self._ranks.name(place)} has stage{'s' * (len(stages) > 1)} {' and '.join(stages)}"
                )
        return f" ({'; '.join(found)})" if found else ""


def _cause(error: Exception) -> Exception:
    """Return the error of chunkmem that torch has wrapped, if there is one."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, ChunkmemError):
        found = found.__cause__
    return error if found is None else found
