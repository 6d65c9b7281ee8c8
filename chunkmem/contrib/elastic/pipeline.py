"""A pipeline whose number of stages is chosen between steps: it stays the same object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from chunkmem.assembly.runtime import Runtime
from chunkmem.contrib.elastic.block_times import BlockTimes
from chunkmem.contrib.elastic.costs import WidthCosts
from chunkmem.contrib.elastic.widths import Division, WidthChoice
from chunkmem.data.errors import CapacityError, ConfigError, LayoutError, StateError
from chunkmem.data.memory import FreezeReport
from chunkmem.pipeline.build import make_pipeline
from chunkmem.pipeline.by_layer import ByLayerPipeline
from chunkmem.pipeline.options import PipelineOptions
from chunkmem.pipeline.staged import StagedPipeline
from chunkmem.plan.pipeline_schedule import Schedule
from chunkmem.runtime.timestamps import Interval


class ElasticPipeline:
    """What `ChunkManager.pipeline(width="auto")` returns.

    `resize()` asks all ranks how long blocks have computed, has one of them decide (`chunkmem.contrib.elastic.widths`),
    and divides the same ranks again (`chunkmem.pipeline.build`) if that pays.
    """

    def __init__(self, runtime: Runtime, options: PipelineOptions, *, adopt: Callable[[Runtime], None]) -> None:
        """Make the first pipeline; for arguments and errors see `make_pipeline`.

        Raises:
            ConfigError: these ranks cannot be divided again.
        """
        if runtime.config.memory.disk is not None:
            raise ConfigError('width="auto" with memory.disk is not available in this version; leave out one of them')
        if runtime.origin.mesh is None:
            raise ConfigError(
                'width="auto" divides the ranks of a mesh: make the manager with ChunkManager(config, mesh=...), whose '
                'dimensions are "stage" and "shard"'
            )

        if not options.blocks:
            raise LayoutError('manager.pipeline(width="auto") was given no block: stages are cut between blocks')

        def adopt_here(after: Runtime) -> None:
            self._runtime = after
            adopt(after)

        self._runtime = runtime
        self._options = options
        self._times = BlockTimes(options.chain, runtime.memory.store.clock)
        self._costs = WidthCosts(options, self._times)
        self._cut: tuple[int, ...] | None = options.cut
        self.reason = ""
        """Why the last `resize()` did what it did."""
        self._pipeline: ByLayerPipeline | StagedPipeline
        self._use(make_pipeline(runtime, options, adopt=adopt_here))

    def _use(self, pipeline: Any) -> None:
        # Hooks run on the host, which an accelerator does not wait for.
        hooks = self._runtime.hooks
        in_hooks_s = (lambda: hooks.spent_s) if self._runtime.device.type == "cpu" else None
        self._times.divided(in_hooks_s=in_hooks_s, width=self.width)
        pipeline.times = self._times
        self._pipeline = pipeline

    def __repr__(self) -> str:
        return f"ElasticPipeline({self._pipeline!r})"

    @property
    def num_stages(self) -> int:
        """Ranks of each pipeline, which have different stages."""
        stages = self._runtime.ranks.stages
        return 1 if stages is None else stages.size

    @property
    def width(self) -> int:
        """Data-parallel ranks of each stage: a global batch has so many parts."""
        return self._runtime.ranks.size

    @property
    def place(self) -> int:
        """Which part of a global batch this rank is given: a number below `width`, the same on all its stages."""
        return self._runtime.ranks.rank

    @property
    def schedule(self) -> str:
        """What runs the stages now."""
        return self._pipeline.schedule if isinstance(self._pipeline, StagedPipeline) else "by-layer"

    def share(self, *values: Any) -> Any:
        """Return this rank's part of a global batch, one of `width` parts along dimension 0; memory is shared.

        Args:
            values: tensors, or tuples, lists and dicts of them, with as many samples each.

        Returns:
            The part of the one value, or a tuple of those of several: `pipe.step(*pipe.share(x, y))`.

        Raises:
            StateError: the samples cannot be divided by `width`.
        """
        width, place = self.width, self.place

        def part(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.ndim:
                return leaf
            if leaf.shape[0] % width:
                raise StateError(
                    f"pipe.share(): {leaf.shape[0]} samples cannot be divided by {width} data-parallel ranks; give a "
                    "global batch that all widths divide, and drop the last batch of an epoch if it is smaller"
                )
            length = leaf.shape[0] // width
            return leaf.narrow(0, place * length, length)

        parts = tree_map(part, values)
        return parts[0] if len(values) == 1 else parts

    def step(self, inputs: Any, target: Any = None, **options: Any) -> torch.Tensor:
        """Run forward and backward of this rank's part of a batch; see `step` of the pipeline of this width."""
        self._note_updates()
        clock = self._runtime.memory.store.clock
        began = clock.timestamp()
        loss = self._pipeline.step(inputs, target, **options)
        self._times.took(Interval(began, clock.timestamp()))
        return loss

    def _note_updates(self) -> None:
        """Those made since the last step count to that."""
        updates = self._runtime.entry_points.updates
        self._times.updated(updates)
        updates.clear()

    def evaluate(self, inputs: Any, target: Any = None, **options: Any) -> torch.Tensor:
        """Run forward of this rank's part of a batch; see `evaluate` of the pipeline of this width."""
        return self._pipeline.evaluate(inputs, target, **options)

    def resize(self) -> bool:
        """Divide the ranks into the number of stages that is predicted to be fastest; tell whether that changed it.

        All ranks call it between two steps, after `optimizer.zero_grad()`: when something was frozen, or after each
        epoch. From then on `width` and `place` are others, and so is the part of the data of this rank: `share` gives
        it. Stages may also stay as many, and be cut elsewhere. It is done where a step is predicted to be more than 5 %
        faster, from the times of the last steps; `reason` says what was compared.

        Raises:
            StateError: gradients wait for their step, or somebody keeps memory of parameters; nothing has been changed.
            ConfigError: there is an option that `repartition` refuses; likewise.
            RankError: a rank is missing, or has raised something. Training is over: continue from a checkpoint.
        """
        runtime = self._runtime
        runtime.require_open()
        self._note_updates()
        choice = self._costs.choose(runtime, self._now())
        if isinstance(choice, str):
            self.reason = choice
            return False
        self.reason = choice.reason
        return choice.best is not choice.now and self._change(choice)

    def _change(self, choice: WidthChoice) -> bool:
        try:
            self._divide(choice.best)
        except (CapacityError, LayoutError) as error:  # on all ranks, before or after something was changed
            if self._runtime.is_closed:
                raise
            self.reason = f"{choice.now} stays, as {choice.best} is not possible: {error}"
            return False
        return True

    def _divide(self, division: Division) -> None:
        options, self._cut = self._options, None
        if division.num_ranks > 1:
            self._cut = division.num_blocks
            options = replace(
                options,
                cut=division.num_blocks,
                schedule=division.schedule.value,
                stages_per_rank=len(division.num_blocks) // division.num_ranks,
            )
        self._use(self._pipeline.divide(division.num_ranks, changed=options))
        if isinstance(self._pipeline, StagedPipeline) and self._options.schedule == "auto":
            self._pipeline.reason = self.reason  # chosen here, so another one takes its place where it cannot run

    def _now(self) -> Division:
        pipeline, ranks, num_blocks = self._pipeline, self._runtime.ranks, len(self._options.blocks)
        if not isinstance(pipeline, StagedPipeline) or ranks.stages is None:
            return Division(1, ranks.shard.size, (num_blocks,))
        num = len(pipeline.stages) * ranks.stages.size
        even = tuple(num_blocks * (k + 1) // num - num_blocks * k // num for k in range(num))
        return Division(ranks.stages.size, ranks.shard.size, self._cut or even, Schedule(pipeline.schedule))

    def end_epoch(self) -> FreezeReport:
        """Freeze what the schedule says (`manager.pipeline(freeze=)`), and `resize()`; return what freezing gave back.

        All ranks call it between two steps. Raises what `end_epoch` of other pipelines and `resize` do.
        """
        report = self._pipeline.end_epoch()
        self.resize()
        return report

    def repartition(self, stages: int) -> ElasticPipeline:
        """Divide the ranks into so many stages, whatever is predicted; return this pipeline.

        For arguments and errors see `repartition` of other pipelines.
        """
        self._use(self._pipeline.divide(stages, changed=self._options))
        self._cut = None
        self.reason = f"{stages} stages were asked for"
        return self
