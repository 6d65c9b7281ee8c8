"""A pipeline that never drains between batches: stages update their weights as soon as a batch has come back to them.

A call of `step` is a round: see `chunkmem.contrib.async_pipeline.rounds`.
"""

from __future__ import annotations

from typing import Any

import torch

from chunkmem.assembly.runtime import Runtime
from chunkmem.contrib.async_pipeline.checks import require_trainable, require_updating
from chunkmem.contrib.async_pipeline.rounds import Rounds
from chunkmem.contrib.async_pipeline.versions import Updates
from chunkmem.data.errors import ConfigError, StateError
from chunkmem.optim.optimizer import RuleOptimizer
from chunkmem.pipeline.micro_batches import split
from chunkmem.pipeline.options import ASYNCHRONOUS, PipelineOptions
from chunkmem.pipeline.staged import StagedPipeline
from chunkmem.pipeline.width import Pipeline


class AsynchronousPipeline(StagedPipeline):
    """Runs the stage of this rank in rounds, and updates it; see `ChunkManager.pipeline`."""

    require_trainable = staticmethod(require_trainable)

    def __init__(self, runtime: Runtime, options: PipelineOptions) -> None:
        super().__init__(runtime, options)
        (stage,) = self.stages
        self._rounds = Rounds(runtime, stage, options, neighbours=self._neighbours, times=self.times)
        self._updates: Updates | None = None

    def step(
        self,
        inputs: Any,
        target: Any = None,
        *,
        ids: Any = None,
        optimizer: RuleOptimizer | None = None,
        scheduler: Any = None,
    ) -> torch.Tensor:
        """Run one round: forward of this batch, or of an earlier one; backward and update of the batch P - 1 calls ago.

        P is the number of stages. All ranks of a pipeline are given the same batch.

        Args:
            inputs: a tensor, or tuples, lists and dicts of tensors, split into micro-batches along dimension 0.
            target: likewise.
            ids: of samples, for a cache, which there is none of.
            optimizer: of chunkmem, over the model; its `step()` and `zero_grad()` are called here, once a batch. Later
                calls may leave it out.
            scheduler: a learning rate scheduler of torch's, whose `step()` is called after each update; given with the
                optimizer.

        Returns:
            The loss of the batch that was updated for, on all ranks, detached; NaN while there is none yet.

        Raises:
            StateError: the batch cannot be split, or is not that of the other ranks; or gradients of another backward
                wait for their step.
            ConfigError: no optimizer was given, or one that cannot be used so: see `require_updating`; nothing has
                been done.
            CapacityError: something does not fit; the other ranks then raise a `RankError`, and training is over.
            RankError: a rank is missing, or has raised something.
        """
        self.require_current()
        if optimizer is not None:
            self._updates = self._checked(Updates(optimizer, scheduler))
        if self._updates is None:
            raise ConfigError("pipe.step() updates the weights itself: give it the optimizer, as optimizer=")
        self._rounds.require_same("pipe.step()")
        self._require_no_gradients()
        with self._running():
            parts = split(inputs, target, num=self._options.micro_batches)
            boundaries = self._forms.of(parts)
            if isinstance(boundaries, str):
                raise StateError(boundaries)
        self._rounds.add(parts, boundaries)
        return self._run_round(self._updates)

    def __call__(self, inputs: Any = None) -> Any:
        """Refuse: stages update themselves, by the loss of the pipeline.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f'pipe(x) is for synchronous schedules, not for "{ASYNCHRONOUS}": call pipe.step or evaluate')

    def _run_round(self, updates: Updates) -> torch.Tensor:
        with self._running():
            loss = self._rounds.compute(updates)
        self._rounds.end(updates)
        return loss

    def _require_no_gradients(self) -> None:
        runtime = self._runtime
        runtime.gradients.sync_with_grad(runtime.registry.parameters)
        if runtime.gradients.slots.any_given(runtime.registry.parameters):
            raise StateError(
                "pipe.step(): there are gradients of another backward, and no telling which update they are for; call "
                "optimizer.step() or optimizer.zero_grad() before it"
            )

    def _checked(self, updates: Updates) -> Updates:
        if updates != self._updates:
            assert self._options.versions is not None
            with self._runtime.ranks.telling():
                require_updating(updates.optimizer, updates.scheduler, versions=self._options.versions)
        return updates

    def flush(self) -> list[torch.Tensor]:
        """Run backward and update of all batches under way; return their losses. All ranks of a pipeline call it.

        Afterwards weights and states are final: save them, evaluate, or have a next epoch fill the pipeline again.

        Raises:
            StateError: what is trained was changed meanwhile.
            CapacityError, RankError: as `step`.
        """
        self.require_current()
        self._rounds.require_same("pipe.flush()")
        losses = []
        while self._rounds.batches:
            assert self._updates is not None
            is_updated = self._rounds.last >= 0
            loss = self._run_round(self._updates)
            losses += [loss] if is_updated else []
        with self._running():
            self._neighbours.wait_until_sent()
        self._rounds.drained()
        return losses

    def evaluate(self, inputs: Any, target: Any = None) -> torch.Tensor:
        """Run forward for a batch; return its loss. Call `flush` before.

        Raises:
            StateError: batches are under way.
        """
        if num := len(self._rounds.batches):
            raise StateError(f"pipe.evaluate() with {num} batches under way; call pipe.flush() on all ranks first")
        return super().evaluate(inputs, target)

    def repartition(self, stages: int) -> Pipeline:
        """Raise a `ConfigError`: what an asynchronous pipeline keeps is for its own number of stages."""
        raise ConfigError(
            f"pipe.repartition(): a pipeline of schedule {ASYNCHRONOUS!r} keeps its stages; save a checkpoint, and "
            "load it into another number of them"
        )
