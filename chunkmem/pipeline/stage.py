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
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.pipelining.stage import _PipelineStageBase

from chunkmem.activations.regions import RegionActivations
from chunkmem.activations.stashed import Stashed
from chunkmem.assembly.runtime import Runtime
from chunkmem.pipeline.announced import AnnouncedForms
from chunkmem.pipeline.arguments import arguments_of
from chunkmem.pipeline.call_times import CallTimes
from chunkmem.pipeline.deferred_norm import DeferredStatistics
from chunkmem.pipeline.forms import BoundaryForm, MessageForm, form_of
from chunkmem.pipeline.frozen import FrozenBlocks
from chunkmem.pipeline.micro_batches import MicroBatch, loss_of
from chunkmem.pipeline.modules import StageModule
from chunkmem.pipeline.options import PipelineOptions
from chunkmem.pipeline.outputs import begin_history
from chunkmem.plan.timeline import StageWork
from chunkmem.ranks.neighbours import Message, Neighbours
from chunkmem.runtime.timestamps import Interval
from chunkmem.runtime.values import Structure


@dataclass(frozen=True)
class StageStep:
    """What the stages of a rank have to know of a step."""

    parts: Sequence[MicroBatch]
    boundaries: Sequence[dict[int, BoundaryForm]]
    """By micro-batch, then by stage: shapes of the stage's output."""
    times: CallTimes
    """Listener of the calls of the rank's blocks."""
    frozen: FrozenBlocks = field(default_factory=FrozenBlocks)
    """Blocks that nothing trains."""
    announced: AnnouncedForms | None = None
    """Shapes that senders announce, where they are unknown before stages run; None: they are known."""
    outputs: dict[int, Any] = field(default_factory=dict)
    """By micro-batch what the last stage has returned, if nobody wants a loss; empty on all others."""
    losses: list[torch.Tensor] = field(default_factory=list)
    """Losses of micro-batches, divided by their number; empty on all stages but the last."""


class PackedStage(_PipelineStageBase):
    """Modules that this rank runs for every micro-batch."""

    def __init__(
        self,
        module: StageModule,
        index: int,
        num_stages: int,
        *,
        runtime: Runtime,
        options: PipelineOptions,
        neighbours: Neighbours,
        statistics: DeferredStatistics,
        hold: Callable[[torch.nn.Module], None],
    ) -> None:
        """Make stage `index` of `num_stages`.

        Args:
            module: managed, and called as a whole.
            index: of all stages.
            num_stages: of all ranks.
            runtime: of the manager, with one rank of each stage.
            options: what the user asks for.
            neighbours: has what goes to other stages sent.
            statistics: of layers whose running statistics are to be those of whole batches.
            hold: called with the module before its forward, and before its backward.
        """
        assert runtime.ranks.stages is not None
        super().__init__(module, index, num_stages, runtime.device, runtime.ranks.stages.connection.process_group)
        self.args_recv_info = {0: ()}
        self.module = module
        self.regions: RegionActivations | None = runtime.modules.regions
        """Manage what calls of blocks save; None: autograd does."""
        self.stashes = True
        """Tensors between stages are held in chunks: true except in evaluations."""
        self._runtime = runtime
        self._options = options
        self._neighbours = neighbours
        self._statistics = statistics
        self._hold = hold
        self._received: dict[int, Stashed] = {}
        """By micro-batch: the input that the stage before has sent."""
        self._gradients: dict[int, Stashed] = {}
        """By micro-batch: the gradients that the stage after has sent."""
        self._edges: dict[int, list[GradientEdge | None]] = {}
        """By micro-batch whose backward has not run: where the backward of each incoming gradient begins."""
        self._found: dict[int, Sequence[torch.Tensor | None]] = {}
        """By micro-batch whose backward is over: gradients of the stage's input."""
        self._outgoing: dict[int, Stashed] = {}
        """By micro-batch: tensors that forward or backward has made and that are about to be sent."""

    def begin(self, step: StageStep) -> None:
        """A step begins."""
        self._step = step
        start, end = step.frozen.start, self.module.first + len(self.module.blocks)
        self._is_idle = end <= start
        """All blocks of the stage are frozen, and their outputs are in a cache."""
        self._is_given = start > 0 and self.module.first <= start < end
        """A cache gives the stage its input, the output of the blocks before."""
        self._has_next = not self.is_last and not self._is_idle
        """It sends to the stage after it."""
        self._has_previous = not self.is_first and not self._is_idle and not self._is_given
        """It receives from the stage before it."""

    # What schedules call: sends and receives.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Begin to receive the inputs of a micro-batch."""
        if not self._has_previous:
            return []
        message = self.message(fwd_chunk_id, is_sent=False, forward=True)
        if self._step.announced is not None:
            with self._timed(StageWork.WAIT, fwd_chunk_id):
                self._step.boundaries[fwd_chunk_id][self.stage_index - 1] = self._step.announced.receive_form(message)
        tensors = [form.empty(self.device) for form in self._inputs(fwd_chunk_id)]
        buffers = self._received[fwd_chunk_id] = self._park(tensors, step=-1, what="output")
        return self._neighbours.receive(buffers.bring(), message)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the outputs of a micro-batch."""
        if not self._has_next:
            return []
        message = self.message(fwd_chunk_id, is_sent=True, forward=True)
        if self._step.announced is not None:
            self._step.announced.send_form(self._step.boundaries[fwd_chunk_id][self.stage_index], message)
        return self._send(self._outgoing.pop(fwd_chunk_id), message)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Begin to receive the gradients of the outputs of a micro-batch."""
        if not self._has_next or not self.has_backward:
            return []
        forms = self._step.boundaries[bwd_chunk_id][self.stage_index].tensors
        tensors = [form.empty(self.device) for form in forms if form.requires_grad]
        buffers = self._gradients[bwd_chunk_id] = self._park(tensors, step=0, what="gradient")
        return self._neighbours.receive(buffers.bring(), self.message(bwd_chunk_id, is_sent=False, forward=False))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradients of the inputs of a micro-batch."""
        if not self._has_previous or not self.has_backward:
            return []
        message = self.message(bwd_chunk_id, is_sent=True, forward=False)
        return self._send(self._outgoing.pop(bwd_chunk_id), message)

    # What schedules call: computations.

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> torch.Tensor | None:
        """Run forward for a micro-batch; return its loss on the last stage."""
        if self._is_idle:
            return None
        step, part = self._step, self._step.parts[fwd_chunk_id]
        if self._is_given:
            value = step.frozen.read(fwd_chunk_id, self.device)
        else:
            value = part.inputs if self.is_first else self._take_inputs(fwd_chunk_id)
        with self._timed(StageWork.FORWARD, fwd_chunk_id), self._statistics.micro_batch(fwd_chunk_id):
            output = self.submod(value, run=partial(self._run_blocks, fwd_chunk_id))
        del value
        if fwd_chunk_id in self._received:
            self._received.pop(fwd_chunk_id).end()
        if not self.is_last:
            if step.announced is not None:
                form = form_of(output, self.stage_index, dtype=self._runtime.dtype)
                step.boundaries[fwd_chunk_id][self.stage_index] = form
            form = step.boundaries[fwd_chunk_id][self.stage_index]
            tensors = form.flattened(output)
            del output
            if self.has_backward:
                pairs = [tensor for tensor, each in zip(tensors, form.tensors, strict=True) if each.requires_grad]
                self._edges[fwd_chunk_id] = [get_gradient_edge(t) if t.requires_grad else None for t in pairs]
                del pairs
            sent = [tensor.detach() for tensor in tensors]
            del tensors
            self._outgoing[fwd_chunk_id] = self._park(sent, step=0, what="output")
            return None
        if part.divisor is None:
            return self._keep_output(fwd_chunk_id, output)
        with step.times.forward(None):
            loss = loss_of(self._options.loss_fn, output, part.target, part.divisor)
        step.losses.append(loss.detach())
        if self._runtime.scaler is not None:
            loss = loss.float() * self._runtime.scaler.loss_scale
        if self.has_backward:
            self._edges[fwd_chunk_id] = [get_gradient_edge(loss)] if loss.requires_grad else []
        return loss.detach()

    def _keep_output(self, part: int, output: Any) -> torch.Tensor:
        """Keep what the last stage returns; return what stands for a loss."""
        structure, tensors = Structure.of(output)
        if torch.is_grad_enabled():
            self._edges[part] = [get_gradient_edge(each) if each.requires_grad else None for each in tensors]
        self._step.outputs[part] = structure.filled([each.detach() for each in tensors])
        return torch.zeros((), device=self.device)

    @property
    def is_trained(self) -> bool:
        """Some output of the last stage requires gradients."""
        return any(edge is not None for edges in self._edges.values() for edge in edges)

    def take_gradients(self, part: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Have those of the outputs of a micro-batch, on the last stage."""
        pairs = [(e, g) for e, g in zip(self._edges[part], gradients, strict=True) if e is not None and g is not None]
        self._edges[part] = [edge for edge, _ in pairs]
        self._gradients[part] = self._runtime.modules.stashed.keep([gradient for _, gradient in pairs])

    def forward_all(self, num: int) -> None:
        """Run forward of all micro-batches; backward comes later."""
        self.has_backward = True  # after an evaluation, torch's schedules say so when they step
        for part in range(num):
            _exchange(self.get_fwd_recv_ops(part))
            self.forward_one_chunk(part, ())
            _exchange(self.get_fwd_send_ops(part))

    def backward_all(self, num: int) -> None:
        """Run backward of all micro-batches, the last one first, as autograd does."""
        for part in reversed(range(num)):
            _exchange(self.get_bwd_recv_ops(part))
            self.backward_one_chunk(part)
            _exchange(self.get_bwd_send_ops(part))

    def _run_blocks(self, part: int, value: Any) -> Any:
        """Run the blocks of the stage for a micro-batch, those that are not left out; return what the last one does."""
        step, frozen = self._step, self._step.frozen
        self._hold(self.module)
        for number, block in enumerate(self.module.blocks):
            at = self.module.first + number
            if at < frozen.start:
                continue
            if at == frozen.num > frozen.start:
                frozen.keep(part, value, name=f"block {at - 1}")
            args = arguments_of(value)
            with step.times.forward(block):
                if self.regions is None or at < frozen.num:  # nothing is saved there
                    with frozen.running(at, args):
                        value = block(*args)
                else:
                    policy, start = self._options.policy(step.parts[part]), self.regions.now()
                    self.regions.enter(f"blocks.{number}", policy, block, args, {}, start=start)
                    try:
                        value = block(*args)
                    finally:
                        self.regions.leave()
            step.times.returned(block, value)
            del args
        return value

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run backward for a micro-batch, if the step has any."""
        if not self.has_backward or self._is_idle:
            return
        assert full_backward, "schedules that split backward are refused"
        edges = self._edges.pop(bwd_chunk_id)
        if not self.is_last:
            self._wait(bwd_chunk_id, forward=False)
        received = self._gradients.pop(bwd_chunk_id, None)
        gradients = [None] * len(edges) if received is None else received.bring()
        begun = [(edge, grad) for edge, grad in zip(edges, gradients, strict=True) if edge is not None]
        del gradients
        if begun:
            self._hold(self.module)
            with self._timed(StageWork.BACKWARD, bwd_chunk_id), self._step.times.backward(list(self.module.blocks)):
                # Gradients are not reduced after it: more of them come.
                self._runtime.sharding.units.backwards.declare_last(False)
                with self._runtime.backward():
                    torch.autograd.backward([edge for edge, _ in begun], [grad for _, grad in begun])
        del begun
        if received is not None:
            received.end()
        if self._has_previous:
            forms = [form for form in self._inputs(bwd_chunk_id) if form.requires_grad]
            found = self._found.pop(bwd_chunk_id, [None] * len(forms))
            tensors = [
                torch.zeros(form.shape, dtype=form.dtype, device=self.device) if grad is None else grad
                for form, grad in zip(forms, found, strict=True)
            ]
            del found
            self._outgoing[bwd_chunk_id] = self._park(tensors, step=-1, what="gradient")

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Do nothing: losses are divided."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: gradients are reduced when the optimizer steps."""

    def clear_runtime_states(self) -> None:
        """Forget what an interrupted step has left."""
        for messages in (self._received, self._gradients, self._outgoing):
            for stashed in messages.values():
                stashed.end()
            messages.clear()
        self._edges.clear()
        self._found.clear()

    # What schedules prepare, and nothing here needs.

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return None

    _prepare_backward_infra = _prepare_forward_infra

    def _create_grad_recv_info(self, act_send_info: Any) -> Any:
        return ()

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [] if self.device.type == "cpu" else super()._get_init_p2p_neighbors_ops()

    def _inputs(self, part: int) -> list[MessageForm]:
        return self._step.boundaries[part][self.stage_index - 1].tensors

    def _take_inputs(self, part: int) -> Any:
        self._wait(part, forward=True)
        tensors, forms = self._received[part].bring(), self._inputs(part)
        if torch.is_grad_enabled():
            wanted = [at for at, form in enumerate(forms) if form.requires_grad]
            begin_history(tensors, wanted, partial(self._found.__setitem__, part))
        return self._step.boundaries[part][self.stage_index - 1].filled(tensors)

    def _wait(self, part: int, *, forward: bool) -> None:
        if self.device.type == "cpu":
            with self._timed(StageWork.WAIT, part):
                self._neighbours.wait(self.message(part, is_sent=False, forward=forward).tag)

    @contextlib.contextmanager
    def _timed(self, work: StageWork, part: int) -> Iterator[None]:
        """Write down when that is done for a micro-batch."""
        log, clock = self._runtime.controller.now.step_log, self._runtime.memory.store.clock
        if log is None:
            yield
            return
        started = clock.timestamp()
        yield
        log.stage_calls.append((work, self.stage_index, part, Interval(started, clock.timestamp())))

    def _park(self, tensors: list[torch.Tensor], *, step: int, what: str) -> Stashed:
        """Return a chunk of tensors, of which the caller keeps none; see `stashes`.

        Args:
            tensors: that the stage before this one (`step` is -1), or this one (0), gives or is given.
            step: see there.
            what: "output" of that stage, or "gradient" of it.
        """
        contiguous: list[torch.Tensor] = []
        while tensors:
            contiguous.append(tensors.pop(0).contiguous())
        stashing = self._runtime.modules.stashed
        if not self.stashes or not torch.is_grad_enabled():
            return stashing.keep(contiguous)
        return stashing.stash(contiguous, name=f"stage {self.stage_index + step}", what=what, copies=True)

    def _send(self, stashed: Stashed, message: Message) -> list[dist.P2POp]:
        if not (tensors := stashed.bring()):  # no gradients come to a frozen stage
            stashed.end()
            return []
        return self._neighbours.send(tensors, message, done=stashed.end)

    def message(self, part: int, *, is_sent: bool, forward: bool) -> Message:
        """Return the message about a micro-batch; in forward it is sent to the stage after this one."""
        other = self.stage_index + (1 if is_sent == forward else -1)
        sender = self.stage_index if is_sent else other
        what = f"{'outputs' if forward else 'gradients'} of micro-batch {part}"
        how = f"sending the {what} to" if is_sent else f"waiting for the {what} from"
        return Message(
            self.stage_index_to_group_rank[other],
            2 * (part * self.num_stages + sender) + (not forward),
            f"stage {self.stage_index}: {how} stage {other}",
        )


def _exchange(operations: list[dist.P2POp]) -> None:
    """Have an accelerator send or receive; in RAM there is nothing to do."""
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
