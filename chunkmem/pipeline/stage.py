"""One stage of a pipeline, as the schedules of torch.distributed.pipelining drive it.

They say what runs when. What they would do with receive buffers for every micro-batch, with shapes found out in real
runs and with gradients in `.grad` is done here in other ways:

    received    memory for a micro-batch is allocated when its receive is posted, and goes with its graph
    sent        let go of when it has arrived; a graph is kept by its gradient edges, not by its outputs
    both        chunks of activations, on the device until then
    shapes      of `chunkmem.pipeline.forms`, or said ahead (`chunkmem.pipeline.announced`); micro-batches may differ
    gradients   stay in the slots of chunks: each micro-batch's loss is divided, not the sum of gradients
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining.stage import _PipelineStageBase

from chunkmem.comm.neighbours import Message, Neighbours
from chunkmem.errors import StateError
from chunkmem.nn.parked import Parked, ParkedTensors
from chunkmem.pipeline.announced import AnnouncedForms
from chunkmem.pipeline.block_times import BlockTimes
from chunkmem.pipeline.deferred_norm import DeferredStatistics
from chunkmem.pipeline.forms import BorderForm, MessageForm, border_name
from chunkmem.pipeline.frozen_stages import FrozenStep
from chunkmem.pipeline.micro_batches import MicroBatch
from chunkmem.pipeline.modules import StageModule
from chunkmem.plan.timeline import StageWork
from chunkmem.runtime.step_log import StepLog
from chunkmem.runtime.timestamps import Clock, Interval


@dataclass(frozen=True)
class StageStep:
    """What the stages of a rank have to know of a step."""

    parts: Sequence[MicroBatch]
    borders: Sequence[dict[int, BorderForm]]
    """By micro-batch and stage: what goes out of that."""
    policies: Sequence[str]
    """By micro-batch: what becomes of what blocks save."""
    loss_fn: Callable[..., torch.Tensor]
    """Of the output of a micro-batch, and its target if there is one."""
    loss_scale: float | None
    """In fp16."""
    around_backward: Callable[[], AbstractContextManager[Any]]
    statistics: DeferredStatistics
    hold: Callable[[torch.nn.Module], None]
    """Called before the backward of a stage; its forward does so itself."""
    frozen: FrozenStep = field(default_factory=FrozenStep)
    """Blocks that nothing trains."""
    announced: AnnouncedForms | None = None
    """Where borders are not known before stages run: their sender says them."""
    losses: list[torch.Tensor] = field(default_factory=list)
    """Of micro-batches, divided; on the last stage."""


class PackedStage(_PipelineStageBase):
    """Modules that this rank runs for every micro-batch."""

    def __init__(
        self,
        module: StageModule,
        index: int,
        num_stages: int,
        *,
        neighbours: Neighbours,
        parking: ParkedTensors,
        clock: Clock,
        log: Callable[[], StepLog | None],
        device: torch.device,
        group: Any,
        first_block: int,
    ) -> None:
        """Make stage `index` of `num_stages`.

        Args:
            module: managed, and called as a whole.
            index: of all stages.
            num_stages: of all ranks.
            neighbours: has what goes to other stages sent.
            parking: makes chunks of that, and of what they send.
            clock: of what the device computes.
            log: of the step that runs; None: nothing is written down of it.
            device: where values go in and out.
            group: one rank of each stage, for torch's schedules.
            first_block: number of the first block that it has, of those of all stages.
        """
        super().__init__(module, index, num_stages, device, group)
        self.args_recv_info = {0: ()}
        self._neighbours = neighbours
        self._parking = parking
        self._clock = clock
        self._log = log
        self._module = module
        self._first_block = first_block
        self._step: StageStep | None = None
        self._is_idle = False
        """All of its blocks are frozen, and what comes out of them is in a cache."""
        self._is_given = False
        """So are those of all stages before."""
        self._received: dict[int, Parked] = {}
        """By micro-batch: what the stage before sends."""
        self._gradients: dict[int, Parked] = {}
        """By micro-batch: what the stage after sends."""
        self._edges: dict[int, list[GradientEdge | None]] = {}
        """By micro-batch whose backward has not run: where it begins, for each gradient that comes."""
        self._cuts: dict[int, list[_Cut]] = {}
        """By such a micro-batch: where it ends."""
        self._outgoing: dict[int, Parked] = {}
        """What is about to be sent, from forward or backward to the call that sends it."""

    def begin(self, step: StageStep, *, times: BlockTimes | None = None) -> None:
        """A step begins, whose blocks are timed by `times`."""
        self._step, self._module.times = step, times
        size = len(self._module.blocks)
        self._is_idle = self._first_block + size <= step.frozen.start
        self._is_given = step.frozen.reads(self._first_block, size)

    # What schedules call: sends and receives.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Begin to receive the inputs of a micro-batch."""
        if self.is_first or self._is_idle or self._is_given:
            return []
        message = self._message(fwd_chunk_id, -1, is_sent=False, forward=True)
        self._hear_form(fwd_chunk_id, message)
        tensors = [form.empty(self.device) for form in self._inputs(fwd_chunk_id)]
        buffers = self._received[fwd_chunk_id] = self._park(tensors, step=-1, what="output")
        return self._neighbours.receive(buffers.bring(), message)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the outputs of a micro-batch."""
        if self.is_last or self._is_idle:
            return []
        assert self._step is not None
        message = self._message(fwd_chunk_id, 1, is_sent=True, forward=True)
        if self._step.announced is not None:
            self._step.announced.send(self._step.borders[fwd_chunk_id][self.stage_index], message)
        return self._send(self._outgoing.pop(fwd_chunk_id), message)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Begin to receive the gradients of the outputs of a micro-batch."""
        if self.is_last or not self.has_backward or self._is_idle:
            return []
        forms = [form for form in self._outputs(bwd_chunk_id) if form.requires_grad]
        tensors = [form.empty(self.device) for form in forms]
        buffers = self._gradients[bwd_chunk_id] = self._park(tensors, step=0, what="gradient")
        return self._neighbours.receive(buffers.bring(), self._message(bwd_chunk_id, 1, is_sent=False, forward=False))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradients of the inputs of a micro-batch."""
        if self.is_first or not self.has_backward or self._is_idle or self._is_given:
            return []
        message = self._message(bwd_chunk_id, -1, is_sent=True, forward=False)
        return self._send(self._outgoing.pop(bwd_chunk_id), message)

    # What schedules call: computations.

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> torch.Tensor | None:
        """Run forward for a micro-batch; return its loss on the last stage."""
        assert self._step is not None
        if self._is_idle:
            return None
        part = self._step.parts[fwd_chunk_id]
        frozen = self._step.frozen.part(self._first_block, len(self._module.blocks), fwd_chunk_id, device=self.device)
        if self._is_given:
            value = frozen.given
        else:
            value = part.inputs if self.is_first else self._take_inputs(fwd_chunk_id)
        self._module.frozen = frozen
        del frozen
        with self._timed(StageWork.FORWARD, fwd_chunk_id), self._step.statistics.micro_batch(fwd_chunk_id):
            output = self.submod(value, policy=self._step.policies[fwd_chunk_id])
        del value
        if fwd_chunk_id in self._received:
            self._received.pop(fwd_chunk_id).end()
        if not self.is_last:
            borders = self._step.borders[fwd_chunk_id]
            if self._step.announced is not None:
                name = border_name(self.stage_index)
                borders[self.stage_index] = self._step.announced.form(output, name=name)
            tensors = borders[self.stage_index].flattened(output)
            del output
            if self.has_backward:
                forms = self._outputs(fwd_chunk_id)
                pairs = [tensor for tensor, form in zip(tensors, forms, strict=True) if form.requires_grad]
                self._edges[fwd_chunk_id] = [get_gradient_edge(t) if t.requires_grad else None for t in pairs]
                del pairs
            sent = [tensor.detach() for tensor in tensors]
            del tensors
            self._outgoing[fwd_chunk_id] = self._park(sent, step=0, what="output")
            return None
        given = (output,) if part.target is None else (output, part.target)
        with self._block_times(None):
            loss = self._step.loss_fn(*given)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise StateError(f"loss_fn returned {what}; it has to return the mean loss of its samples as one number")
        loss = loss / part.divisor
        self._step.losses.append(loss.detach())
        if self._step.loss_scale is not None:
            loss = loss.float() * self._step.loss_scale
        if self.has_backward:
            self._edges[fwd_chunk_id] = [get_gradient_edge(loss)] if loss.requires_grad else []
        return loss.detach()

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run backward for a micro-batch, if the step has any."""
        if not self.has_backward or self._is_idle:
            return
        assert self._step is not None
        assert full_backward, "schedules that split backward are refused"
        edges, cuts = self._edges.pop(bwd_chunk_id), self._cuts.pop(bwd_chunk_id, [])
        if not self.is_last:
            self._wait(self._message(bwd_chunk_id, 1, is_sent=False, forward=False), bwd_chunk_id)
        received = self._gradients.pop(bwd_chunk_id, None)
        gradients = [None] * len(edges) if received is None else received.bring()
        begun = [(edge, grad) for edge, grad in zip(edges, gradients, strict=True) if edge is not None]
        del gradients
        if begun:
            self._step.hold(self.submod)
            with (
                self._timed(StageWork.BACKWARD, bwd_chunk_id),
                self._block_times(list(self._module.blocks)),
                self._step.around_backward(),
            ):
                torch.autograd.backward([edge for edge, _ in begun], [grad for _, grad in begun])
        del begun
        if received is not None:
            received.end()
        if not self.is_first and not self._is_given:
            tensors = [cut.gradient(self.device) for cut in cuts if cut.form.requires_grad]
            self._outgoing[bwd_chunk_id] = self._park(tensors, step=-1, what="gradient")

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Do nothing: losses are divided."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: gradients are reduced when the optimizer steps."""

    def clear_runtime_states(self) -> None:
        """Forget what an interrupted step has left."""
        for messages in (self._received, self._gradients, self._outgoing):
            for parked in messages.values():
                parked.end()
            messages.clear()
        self._edges.clear()
        self._cuts.clear()

    # What schedules prepare, and nothing here needs.

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return None

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return None

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [] if self.device.type == "cpu" else super()._get_init_p2p_neighbors_ops()

    def _inputs(self, part: int) -> list[MessageForm]:
        assert self._step is not None
        return self._step.borders[part][self.stage_index - 1].tensors

    def _outputs(self, part: int) -> list[MessageForm]:
        assert self._step is not None
        return self._step.borders[part][self.stage_index].tensors

    def _hear_form(self, part: int, message: Message) -> None:
        """Wait for the word of what is received next, if the step has such words."""
        assert self._step is not None
        if self._step.announced is not None:
            with self._timed(StageWork.WAIT, part):
                self._step.borders[part][self.stage_index - 1] = self._step.announced.receive(message)

    def _take_inputs(self, part: int) -> Any:
        assert self._step is not None
        self._wait(self._message(part, -1, is_sent=False, forward=True), part)
        tensors, forms = self._received[part].bring(), self._inputs(part)
        cuts = self._cuts[part] = [_Cut(form, tensor) for form, tensor in zip(forms, tensors, strict=True)]
        del tensors
        return self._step.borders[part][self.stage_index - 1].filled([cut.take() for cut in cuts])

    def _wait(self, message: Message, part: int) -> None:
        if self.device.type == "cpu":
            with self._timed(StageWork.WAIT, part):
                self._neighbours.wait(message.tag)

    @contextlib.contextmanager
    def _timed(self, work: StageWork, part: int) -> Iterator[None]:
        """Write down when that is done for a micro-batch."""
        log = self._log()
        if log is None:
            yield
            return
        started = self._clock.timestamp()
        yield
        log.stage_calls.append((work, self.stage_index, part, Interval(started, self._clock.timestamp())))

    def _block_times(self, modules: list[torch.nn.Module] | None) -> AbstractContextManager[None]:
        """Time the backward of modules, or the loss."""
        times = self._module.times
        if times is None:
            return contextlib.nullcontext()
        return times.forward(None) if modules is None else times.backward(modules)

    def _park(self, tensors: list[torch.Tensor], *, step: int, what: str) -> Parked:
        """Return a chunk of tensors, of which the caller keeps none; in evaluations the tensors as they are.

        Args:
            tensors: that the stage before this one (`step` is -1), or this one (0), gives or is given.
            step: see there.
            what: "output" of that stage, or "gradient" of it.
        """
        if not torch.is_grad_enabled():
            return self._parking.keep(tensors)
        contiguous: list[torch.Tensor] = []
        while tensors:
            contiguous.append(tensors.pop(0).contiguous())
        return self._parking.park(contiguous, name=f"stage {self.stage_index + step}", what=what, copies=True)

    def _send(self, parked: Parked, message: Message) -> list[dist.P2POp]:
        if not (tensors := parked.bring()):  # no gradients come to a frozen stage
            parked.end()
            return []
        return self._neighbours.send(tensors, message, done=parked.end)

    def _message(self, part: int, step: int, *, is_sent: bool, forward: bool) -> Message:
        other = self.stage_index + step
        sender = self.stage_index if is_sent else other
        what = f"{'outputs' if forward else 'gradients'} of micro-batch {part}"
        how = f"sending the {what} to" if is_sent else f"waiting for the {what} from"
        return Message(
            self.stage_index_to_group_rank[other],
            2 * (part * self.num_stages + sender) + (not forward),
            f"stage {self.stage_index}: {how} stage {other}",
        )


class _Cut:
    """An input of a stage: a tensor whose gradient goes to the stage before."""

    def __init__(self, form: MessageForm, tensor: torch.Tensor) -> None:
        self.form = form
        self.content: torch.Tensor | None = tensor
        self.found: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """Return the tensor; it is not kept here."""
        if self.form.requires_grad and torch.is_grad_enabled():
            anchor = torch.zeros(0, requires_grad=True)
            taken: torch.Tensor = _CutFunction.apply(anchor, self)  # type: ignore[no-untyped-call]
            return taken
        content, self.content = self.content, None
        assert content is not None
        return content

    def gradient(self, device: torch.device) -> torch.Tensor:
        """Return its gradient; 0 where there is none."""
        found, self.found = self.found, None
        return torch.zeros(self.form.shape, dtype=self.form.dtype, device=device) if found is None else found


class _CutFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, cut: _Cut) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.cut = cut
        content, cut.content = cut.content, None
        assert content is not None
        # Not the tensor itself: an input that is returned would count as changed in place.
        return torch.empty(0, dtype=content.dtype, device=content.device).set_(content)  # type: ignore[call-overload, no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None]:
        ctx.cut.found = grads[0]
        return None, None
