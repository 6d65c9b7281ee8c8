"""What pipelines have in common: they freeze, can be divided into another number of stages, and are over then."""

from __future__ import annotations

from collections.abc import Callable

from chunkmem.assembly.runtime import Runtime
from chunkmem.data.errors import StateError
from chunkmem.data.memory import FreezeReport
from chunkmem.pipeline.call_times import CallTimes
from chunkmem.pipeline.options import PipelineOptions


class Pipeline:
    """What `ChunkManager.pipeline` returns, over so many stages and ranks."""

    divide: Callable[..., Pipeline]
    """Makes a pipeline of another number of stages in place of this one; `changed` are options for it."""

    def __init__(self, runtime: Runtime, options: PipelineOptions) -> None:
        """Run what `options` name by the parts of a manager, which has packed it."""
        self._runtime = runtime
        self._options = options
        self.times = CallTimes()
        """Listener of the calls of blocks; by default it times none."""

    def end_epoch(self) -> FreezeReport:
        """Freeze what the schedule says (`manager.pipeline(freeze=)`), between two steps; return what that gave back.

        All ranks call it.

        Raises:
            StateError: the pipeline has no schedule; or what `FreezeSchedule.step` and `ChunkManager.freeze` raise.
            ConfigError: as `freeze`.
        """
        self.require_current()
        if self._options.epochs is None:
            raise StateError("pipe.end_epoch() freezes what a schedule says: give manager.pipeline() freeze=")
        return self._options.epochs.end()

    def end_step(self) -> None:
        """Have a schedule of freezing look at gradients, if it wants to."""
        if self._options.epochs is not None:
            self._options.epochs.stepped()

    def repartition(self, stages: int) -> Pipeline:
        """Divide the same ranks into another number of stages, between steps, without a file; return the new pipeline.

        2 stages x 1 rank become 1 x 2: chunks go from rank to rank, each parameter and optimizer state once, to where
        it is needed. Weights, states and counts keep all bits. Meanwhile a rank has at most one chunk a role more than
        before or afterwards, whichever is more. The model, its Parameters, the manager, optimizers and schedulers stay
        the same objects. From now on call `step` of what is returned, which has the options of this pipeline: with one
        stage it runs block by block, as `ChunkManager.pipeline` does on ranks that share chunks, and each of them is
        given batches of its own. This pipeline is over.

        All ranks call it, with the same number, after `optimizer.step()` and `optimizer.zero_grad()`.

        Args:
            stages: divides the number of ranks of one replica.

        Raises:
            StateError: gradients wait for their step, somebody keeps memory of parameters, or there are so many stages
                already; nothing has been changed.
            ConfigError: the ranks cannot be divided so; likewise.
            LayoutError: there are fewer blocks than stages, or parameters of the model are in none; likewise.
            CapacityError: there is no room for what a rank has meanwhile; likewise.
            RankError: a rank is missing, or has raised something. Training is over: continue from a checkpoint.
        """
        self.require_current()
        return self.divide(stages)

    def require_current(self) -> None:
        """Raise a `StateError` if the model was divided into another number of stages, or the manager is closed."""
        if (reason := self._runtime.memory.pager.closed) is not None:
            raise StateError(f"this pipeline is over: {reason}")
        self._runtime.require_open()
