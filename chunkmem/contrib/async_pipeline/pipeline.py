"""A pipeline that never drains between batches: stages update their weights as soon as a batch has come back to them.

What runs when is in [Note: Rounds] of `chunkmem.contrib.async_pipeline.schedule`: a call of `step` is a round. Ranks
meet nowhere but in the messages of neighbours:

    round r of stage s    receives were posted             sends
    forward, r - s        in the round before              outputs, and what the batch was
    backward, r - P + 1   when this round began            gradients, and the loss

So whoever sends has a receiver that has posted its receive, or is about to without waiting for the sender. Graphs of
batches under way are kept over updates: messages and activations of a stage with a delay are non-model data.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chunkmem.assembly.runtime import Runtime
from chunkmem.comm.neighbours import Message
from chunkmem.contrib.async_pipeline.checks import require_trainable, require_updating
from chunkmem.contrib.async_pipeline.other_weights import Generations
from chunkmem.contrib.async_pipeline.schedule import delay_of, round_calls
from chunkmem.contrib.async_pipeline.versions import Updates, make_versions
from chunkmem.errors import ConfigError, StateError
from chunkmem.nn.parked import Parked
from chunkmem.optim.optimizer import RuleOptimizer
from chunkmem.pipeline.checkpoints import policy_of
from chunkmem.pipeline.forms import BorderForm
from chunkmem.pipeline.given_batch import digest_of
from chunkmem.pipeline.micro_batches import MicroBatch, split
from chunkmem.pipeline.modules import StageModule
from chunkmem.pipeline.options import ASYNCHRONOUS
from chunkmem.pipeline.schedules import RankSchedule, make_schedule
from chunkmem.pipeline.stage import PackedStage, StageStep
from chunkmem.pipeline.staged import StagedPipeline
from chunkmem.pipeline.width import Pipeline
from chunkmem.plan.timeline import StageWork


@dataclass(frozen=True)
class _Batch:
    """A batch under way."""

    parts: list[MicroBatch]
    borders: list[dict[int, BorderForm]]
    """By micro-batch and stage."""
    digest: int
    """Tells it from others."""


class AsynchronousStage(PackedStage):
    """A stage whose messages are under way over updates: they are tensors, as no step has all of a chunk's life."""

    def _park(self, tensors: list[torch.Tensor], *, step: int, what: str) -> Parked:
        return self._parking.keep([tensor.contiguous() for tensor in tensors])


class AsynchronousPipeline(StagedPipeline):
    """Runs the stage of this rank in rounds, and updates it; see `ChunkManager.pipeline`."""

    make_stage = AsynchronousStage
    require_trainable = staticmethod(require_trainable)

    def _set_up(self, runtime: Runtime, modules: Sequence[StageModule]) -> None:
        (self._stage,) = self.stages
        self._module: StageModule = modules[self._stage.stage_index]
        self._delay = delay_of(self._stage.stage_index, self._num_stages)
        if self._delay:
            self._module.regions = None  # their chunks belong to one step
            runtime.forget_plans()
            runtime.controller.may_record = False  # a plan does not know that weights change their version
        self._fill()
        self._batches: dict[int, _Batch] = {}
        """Under way, by number."""
        self._digests: dict[int, torch.Tensor] = {}
        """By number: what the stage before says of batches."""
        self._round = 0
        """Number of the next one."""
        self._updates: Updates | None = None

    def _fill(self) -> None:
        """The pipeline is empty: begin with the weights as they are."""
        runtime, module, kind = self._runtime, self._module, self._options.versions
        assert kind is not None
        self._versions = make_versions(runtime, module, kind=kind, delay=self._delay)
        self._generations = Generations(list(runtime.registry.managed_under(module).values()))
        self._layout = self._layout_now()

    def _layout_now(self) -> list[tuple[int, bool]]:
        managed = self._runtime.registry.managed_under(self._module).values()
        return [(one.group, one.requires_grad) for one in managed]

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
        self._runtime.require_open()
        if optimizer is not None:
            self._updates = self._checked(Updates(optimizer, scheduler))
        if self._updates is None:
            raise ConfigError("pipe.step() updates the weights itself: give it the optimizer, as optimizer=")
        self._require_same("pipe.step()")
        self._require_no_gradients()
        if not self._batches:
            self._fill()
        with self._running():
            parts = split(inputs, target, num=self._options.micro_batches)
            borders = [self._forms.of(part.inputs, part.form) for part in parts]
        self._batches[self._round] = _Batch(parts, borders, _number_of(digest_of(parts)))
        return self._run_round()

    def _require_same(self, call: str) -> None:
        if self._batches and self._layout != self._layout_now():
            raise StateError(
                f"{call}: requires_grad of a parameter was changed while batches are under way; set it back, and call "
                "pipe.flush() on all ranks before"
            )

    def _require_no_gradients(self) -> None:
        runtime = self._runtime
        runtime.gradients.settle(runtime.registry.parameters)
        if runtime.gradients.any_given(list(runtime.registry.parameters)):
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
        self._runtime.require_open()
        self._require_same("pipe.flush()")
        losses = []
        while self._batches:
            is_updated = self._round >= self._num_stages - 1
            loss = self._run_round()
            losses += [loss] if is_updated else []
        with self._running():
            self._neighbours.settle()
        self._versions.end()
        self._round = 0
        return losses

    def evaluate(self, inputs: Any, target: Any = None) -> torch.Tensor:
        """Run forward for a batch; return its loss. Call `flush` before.

        Raises:
            StateError: batches are under way.
        """
        self._require_drained("pipe.evaluate()")
        return super().evaluate(inputs, target)

    def repartition(self, stages: int) -> Pipeline:
        """Raise a `ConfigError`: what an asynchronous pipeline keeps is for its own number of stages."""
        raise ConfigError(
            f"pipe.repartition(): a pipeline of schedule {ASYNCHRONOUS!r} keeps its stages; save a checkpoint, and "
            "load it into another number of them"
        )

    def _require_drained(self, call: str) -> None:
        if self._batches:
            raise StateError(
                f"{call} with {len(self._batches)} batches under way; call pipe.flush() on all ranks first"
            )

    def _make_schedule(self, num: int) -> RankSchedule:
        return make_schedule("gpipe", self.stages, num)  # of an evaluation

    # A round.

    def _run_round(self) -> torch.Tensor:
        number, stage = self._round, self._stage
        last = number - (self._num_stages - 1)
        forward, backward = self._batches.get(number - stage.stage_index), self._batches.get(last)
        step, updates = self._begin_round(number), self._updates
        assert updates is not None
        found = torch.tensor(float("nan"), dtype=torch.float32, device=self._runtime.device)
        with self._running():
            self._post(number, backward)
            if forward is not None or backward is not None:
                self._runtime.entry_points.begin_root(stage.submod)
                self._call(number, forward, backward, updates)
            if backward is not None:
                self._runtime.note_scaled()
                found = self._pass_loss(step, last)
        if backward is not None:
            self._versions.update(updates)
            self._generations.forget(last)
            del self._batches[last]
        self._round += 1
        self._runtime.entry_points.batches_under_way = len(self._batches)
        return found

    def _begin_round(self, number: int) -> StageStep:
        """Have the stage know all batches under way."""
        filler = next(iter(self._batches.values()))
        num = self._num_stages * self._options.micro_batches
        parts, borders = [filler.parts[0]] * num, [filler.borders[0]] * num
        policies = ["auto"] * num
        for batch, each in self._batches.items():
            for part, micro_batch in enumerate(each.parts):
                place = self._place(batch, part)
                parts[place], borders[place] = micro_batch, each.borders[part]
                policies[place] = policy_of(self._options.checkpoint, part, len(each.parts))
        step = StageStep(
            parts,
            borders,
            policies,
            self._options.loss_fn,
            None if self._runtime.scaler is None else self._runtime.scaler.loss_scale,
            self._in_backward,
            self._statistics,
            self._held.hold,
        )
        self._stage.has_backward = True
        self._stage.begin(step)
        return step

    def _call(self, number: int, forward: _Batch | None, backward: _Batch | None, updates: Updates) -> None:
        stage = self._stage
        first, last = number - stage.stage_index, number - (self._num_stages - 1)
        counts = [0 if batch is None else len(batch.parts) for batch in (forward, backward)]
        if forward is not None:
            self._compare(first, forward)
        with self._versions.in_round(updates), contextlib.ExitStack() as stack:
            if forward is not None:
                self._generations.note(first)
            late = False
            for work, part in round_calls(*counts, is_grouped=self._versions.is_grouped):
                if work is StageWork.FORWARD:
                    place = self._place(first, part)
                    stage.forward_one_chunk(place, ())
                    stage.get_fwd_send_ops(place)
                    continue
                if not late:
                    late = True
                    stack.enter_context(self._versions.in_backward())
                place = self._place(last, part)
                with self._generations.of(last) if self._delay else contextlib.nullcontext():
                    stage.backward_one_chunk(place)
                stage.get_bwd_send_ops(place)

    def _place(self, batch: int, part: int) -> int:
        """Return the number of a micro-batch among all that may be under way."""
        return batch % self._num_stages * self._options.micro_batches + part

    # Messages.

    def _post(self, number: int, backward: _Batch | None) -> None:
        """Post the receives of what neighbours send in this round."""
        stage, last = self._stage, number - (self._num_stages - 1)
        coming = number + 1 - stage.stage_index
        if not stage.is_first and (batch := self._batches.get(coming)) is not None:
            for part in range(len(batch.parts)):
                stage.get_fwd_recv_ops(self._place(coming, part))
            self._digests[coming] = torch.zeros(1, dtype=torch.int64)
            self._neighbours.receive([self._digests[coming]], self._word(coming, -1, is_sent=False, what="batch"))
        if backward is not None and not stage.is_last:
            for part in range(len(backward.parts)):
                stage.get_bwd_recv_ops(self._place(last, part))
            self._loss_of_next = torch.zeros(1, dtype=torch.float64)
            self._neighbours.receive([self._loss_of_next], self._word(last, 1, is_sent=False, what="loss"))

    def _compare(self, number: int, batch: _Batch) -> None:
        """Compare a batch with that of the stage before, and have the stage after do so.

        Raises:
            StateError: they differ.
        """
        stage = self._stage
        if not stage.is_first:
            self._neighbours.wait(self._word(number, -1, is_sent=False, what="batch").tag)
            if int(self._digests.pop(number)) != batch.digest:
                index = stage.stage_index
                raise StateError(
                    f"pipe.step(): stage {index} was given another batch than stage {index - 1}; give all ranks of a "
                    "pipeline the same one"
                )
        if not stage.is_last:
            sent = torch.tensor([batch.digest], dtype=torch.int64)
            self._neighbours.send([sent], self._word(number, 1, is_sent=True, what="batch"))

    def _pass_loss(self, step: StageStep, number: int) -> torch.Tensor:
        """Return the loss of a batch, which the last stage knows, and the others hear from the stage after them."""
        stage = self._stage
        if stage.is_last:
            loss = torch.tensor([float(sum(step.losses))], dtype=torch.float64)
        else:
            self._neighbours.wait(self._word(number, 1, is_sent=False, what="loss").tag)
            loss = self._loss_of_next
        if not stage.is_first:
            self._neighbours.send([loss], self._word(number, -1, is_sent=True, what="loss"))
        return torch.tensor(float(loss), dtype=torch.float32, device=self._runtime.device)

    def _word(self, batch: int, step: int, *, is_sent: bool, what: str) -> Message:
        """Return the message of one number about a batch, to or from the stage after (1) or before (-1) this one."""
        beyond = self._num_stages * self._options.micro_batches + batch % self._num_stages
        message = self._stage._message(beyond, step, is_sent=is_sent, forward=what == "batch")
        how = "telling" if is_sent else "hearing from"
        label = f"stage {self._stage.stage_index}: {how} stage {self._stage.stage_index + step} of the {what}"
        return replace(message, label=label)


def _number_of(digest: str) -> int:
    return int.from_bytes(hashlib.sha256(digest.encode()).digest()[:7], "big")
