"""The rounds of one stage of an asynchronous pipeline; `chunkmem.contrib.async_pipeline.schedule` draws them.

Ranks meet nowhere but in the messages of neighbours:

    round r of stage s    receives were posted             sends
    forward, r - s        in the round before              outputs, and what the batch was
    backward, r - P + 1   when this round began            gradients, and the loss

So whoever sends has a receiver that has posted its receive, or is about to without waiting for the sender. Graphs of
batches under way are kept over updates: messages and activations of a stage with a delay are non-model data.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import torch

from chunkmem.assembly.runtime import Runtime
from chunkmem.contrib.async_pipeline.other_weights import Generations
from chunkmem.contrib.async_pipeline.schedule import delay_of, round_calls
from chunkmem.contrib.async_pipeline.versions import Updates, make_versions
from chunkmem.data.errors import StateError
from chunkmem.pipeline.call_times import CallTimes
from chunkmem.pipeline.forms import BoundaryForm
from chunkmem.pipeline.given_batch import digest_of
from chunkmem.pipeline.micro_batches import MicroBatch
from chunkmem.pipeline.options import PipelineOptions
from chunkmem.pipeline.stage import PackedStage, StageStep
from chunkmem.plan.timeline import StageWork
from chunkmem.ranks.neighbours import Message, Neighbours

_BATCH, _LOSS = "batch", "loss"


@dataclass(frozen=True)
class _Batch:
    """A batch under way."""

    parts: list[MicroBatch]
    boundaries: list[dict[int, BoundaryForm]]
    """By micro-batch and stage."""
    digest: int
    """Tells it from others."""


class _Words:
    """Numbers about batches, one a message: what a batch was goes to the stage after, its loss to the one before."""

    def __init__(self, stage: PackedStage, neighbours: Neighbours, micro_batches: int) -> None:
        self._stage = stage
        self._neighbours = neighbours
        self._num_places = stage.num_stages * micro_batches
        """Of micro-batches under way, whose messages have other tags."""
        self._coming: dict[tuple[int, str], torch.Tensor] = {}

    def expect(self, batch: int, what: str) -> None:
        """Post the receive of a number."""
        coming = torch.zeros(1, dtype=torch.int64 if what == _BATCH else torch.float64)
        self._coming[batch, what] = coming
        self._neighbours.receive([coming], self._message(batch, what, is_sent=False))

    def hear(self, batch: int, what: str) -> torch.Tensor:
        """Return a number, whose receive was posted."""
        self._neighbours.wait(self._message(batch, what, is_sent=False).tag)
        return self._coming.pop((batch, what))

    def tell(self, batch: int, what: str, number: torch.Tensor) -> None:
        """Send a number."""
        self._neighbours.send([number], self._message(batch, what, is_sent=True))

    def _message(self, batch: int, what: str, *, is_sent: bool) -> Message:
        stage, forward = self._stage, what == _BATCH
        message = stage.message(self._num_places + batch % stage.num_stages, is_sent=is_sent, forward=forward)
        how, other = "telling" if is_sent else "hearing from", stage.stage_index + (1 if is_sent == forward else -1)
        return replace(message, label=f"stage {stage.stage_index}: {how} stage {other} of the {what}")


class Rounds:
    """The rounds of the stage of this rank, and the batches under way in them."""

    def __init__(
        self,
        runtime: Runtime,
        stage: PackedStage,
        options: PipelineOptions,
        *,
        neighbours: Neighbours,
        times: CallTimes,
    ) -> None:
        """Begin with an empty pipeline.

        Args:
            runtime: of the manager.
            stage: of this rank.
            options: of the pipeline.
            neighbours: ranks with the other stages.
            times: of blocks.
        """
        self._runtime = runtime
        self._stage = stage
        self._options = options
        self._times = times
        self._words = _Words(stage, neighbours, options.micro_batches)
        self._delay = delay_of(stage.stage_index, stage.num_stages)
        stage.stashes = False  # no step has all of the life of such a chunk
        if self._delay:
            stage.regions = None  # likewise
            runtime.forget_plans()
            runtime.controller.may_record = False  # a plan does not know that weights change their version
        self.batches: dict[int, _Batch] = {}
        """Under way, by number."""
        self.number = 0
        """Of the next round."""
        self._fill()

    def _fill(self) -> None:
        """The pipeline is empty: begin with the weights as they are."""
        module, kind = self._stage.module, self._options.versions
        assert kind is not None
        self._versions = make_versions(self._runtime, module, kind=kind, delay=self._delay)
        self._generations = Generations(list(self._runtime.registry.managed_under(module).values()))
        self._layout = self._layout_now()

    def _layout_now(self) -> list[tuple[int, bool]]:
        managed = self._runtime.registry.managed_under(self._stage.module).values()
        return [(one.group, one.requires_grad) for one in managed]

    @property
    def last(self) -> int:
        """The batch that is updated for in the next round; below 0: none is."""
        return self.number - (self._stage.num_stages - 1)

    def require_same(self, call: str) -> None:
        """Raise a `StateError` if other parameters are trained than when the pipeline was filled."""
        if self.batches and self._layout != self._layout_now():
            raise StateError(
                f"{call}: requires_grad of a parameter was changed while batches are under way; set it back, and call "
                "pipe.flush() on all ranks before"
            )

    def add(self, parts: list[MicroBatch], boundaries: list[dict[int, BoundaryForm]]) -> None:
        """Have a batch enter with the next round: its micro-batches, and what goes from stage to stage of each."""
        if not self.batches:
            self._fill()
        self.batches[self.number] = _Batch(parts, boundaries, digest_of(parts))

    def compute(self, updates: Updates) -> torch.Tensor:
        """Run the calls of a round; return the loss of the batch that is to be updated for, NaN if there is none.

        Raises:
            StateError: a neighbour was given another batch.
            RankError: a neighbour is missing.
        """
        first, backward = self.number - self._stage.stage_index, self.batches.get(self.last)
        forward, step = self.batches.get(first), self._begin()
        self._post(backward)
        if forward is not None or backward is not None:
            self._runtime.entry_points.begin_root(self._stage.module)
            self._call(first, forward, backward, updates)
        if backward is None:
            return torch.tensor(float("nan"), dtype=torch.float32, device=self._runtime.device)
        self._runtime.note_scaled()
        return self._pass_loss(step)

    def end(self, updates: Updates) -> None:
        """Update the weights for the batch whose backward has run; the round is over."""
        if self.last in self.batches:
            self._versions.update(updates)
            self._generations.forget(self.last)
            del self.batches[self.last]
        self.number += 1
        self._runtime.entry_points.batches_under_way = len(self.batches)

    def drained(self) -> None:
        """No batch is under way: keep no weights but those that there are."""
        self._versions.end()
        self.number = 0

    def _begin(self) -> StageStep:
        """Have the stage know all batches under way."""
        filler = next(iter(self.batches.values()))
        num = self._stage.num_stages * self._options.micro_batches
        parts, boundaries = [filler.parts[0]] * num, [filler.boundaries[0]] * num
        for number, batch in self.batches.items():
            for part, micro_batch in enumerate(batch.parts):
                place = self._place(number, part)
                parts[place], boundaries[place] = micro_batch, batch.boundaries[part]
        step = StageStep(parts, boundaries, self._times)
        self._stage.has_backward = True
        self._stage.begin(step)
        return step

    def _call(self, first: int, forward: _Batch | None, backward: _Batch | None, updates: Updates) -> None:
        stage, last = self._stage, self.last
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
        return batch % self._stage.num_stages * self._options.micro_batches + part

    # Messages.

    def _post(self, backward: _Batch | None) -> None:
        """Post the receives of what neighbours send in this round."""
        stage, coming = self._stage, self.number + 1 - self._stage.stage_index
        if not stage.is_first and (batch := self.batches.get(coming)) is not None:
            for part in range(len(batch.parts)):
                stage.get_fwd_recv_ops(self._place(coming, part))
            self._words.expect(coming, _BATCH)
        if backward is not None and not stage.is_last:
            for part in range(len(backward.parts)):
                stage.get_bwd_recv_ops(self._place(self.last, part))
            self._words.expect(self.last, _LOSS)

    def _compare(self, number: int, batch: _Batch) -> None:
        """Compare a batch with that of the stage before, and have the stage after do so.

        Raises:
            StateError: they differ.
        """
        stage = self._stage
        if not stage.is_first and int(self._words.hear(number, _BATCH)) != batch.digest:
            index = stage.stage_index
            raise StateError(
                f"pipe.step(): stage {index} was given another batch than stage {index - 1}; give all ranks of a "
                "pipeline the same one"
            )
        if not stage.is_last:
            self._words.tell(number, _BATCH, torch.tensor([batch.digest], dtype=torch.int64))

    def _pass_loss(self, step: StageStep) -> torch.Tensor:
        """Return the loss of a batch, which the last stage knows, and the others hear from the stage after them."""
        if self._stage.is_last:
            loss = torch.tensor([float(sum(step.losses))], dtype=torch.float64)
        else:
            loss = self._words.hear(self.last, _LOSS)
        if not self._stage.is_first:
            self._words.tell(self.last, _LOSS, loss)
        return torch.tensor(float(loss), dtype=torch.float32, device=self._runtime.device)
