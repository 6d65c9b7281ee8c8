"""A model cut into stages over ranks, each of them on the ranks that share its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chunkmem.data.errors import CapacityError
from chunkmem.data.sizes import format_nbytes
from chunkmem.data.types import Tier
from chunkmem.estimate.question import Question
from chunkmem.plan.balance import Block, Stage
from chunkmem.plan.pipeline_choice import PipelineChoice, PipelineMachine, choose_schedule

MICRO_BATCHES_A_STAGE = 4
"""Where their number is not given: the bubble is a fifth then."""


@dataclass(frozen=True)
class StagedStep:
    """A step of a pipeline, for the rank that has most."""

    choice: PipelineChoice
    exchange_s: float
    """What exchanges of weights and gradients take beyond the micro-batch that they overlap with."""
    update_s: float
    device_nbytes: int
    host_nbytes: int

    @property
    def step_s(self) -> float:
        return self.choice.best.step.step_s + self.exchange_s + self.update_s


def staged_step(
    question: Question,
    blocks: Sequence[Block],
    *,
    num_micro_batches: int | None = None,
    batch: int | None = None,
) -> StagedStep:
    """Cut a rehearsed model into stages and choose their schedule.

    Weights of a stage come together once a step, while its first micro-batch computes, and gradients are reduced while
    the last one does (`chunkmem.pipeline.held`). Nothing overlaps with updates.

    Args:
        question: about what was rehearsed; times grow with the batch.
        blocks: of the rehearsed model.
        num_micro_batches: None: four a device.
        batch: samples of a step, if not those rehearsed.

    Raises:
        ConfigError: there are fewer blocks than devices.
        CapacityError: a stage does not fit.
    """
    num_devices = question.mesh.stage
    scale = (batch or question.batch) / question.batch
    batch = batch or question.batch
    num_micro_batches, size = micro_batches(batch, num_devices, num_micro_batches)
    passing_nbytes = question.rehearsal.activation_nbytes * size // question.batch
    """Of one micro-batch, in the whole model."""
    machine = _machine(question, passing_nbytes * min(num_micro_batches, num_devices) // num_devices)
    of_a_rank = [_of_a_rank(block, question.mesh.shard, scale) for block in blocks]
    choice = choose_schedule(of_a_rank, num_micro_batches, machine)
    # Of schedules that DEVICE has room for, the best one.
    most = question.device_nbytes / max(1, passing_nbytes)
    ways = sorted((choice.best, *choice.others), key=lambda way: way.in_flight > most)
    best = ways[0]
    devices = [Stage(sum((stage.blocks for stage in best.stages[at::num_devices]), ())) for at in range(num_devices)]
    fullest = max(devices, key=lambda device: device.nbytes)
    activation_nbytes = int(best.in_flight * passing_nbytes)
    on_host_nbytes = max(0, fullest.nbytes + activation_nbytes - question.device_nbytes)
    in_flight = f"activations of {max(best.step.num_in_flight)} micro-batches"
    _require_room(activation_nbytes, question.device_nbytes, Tier.DEVICE, in_flight)
    _require_room(on_host_nbytes, question.host_nbytes, Tier.HOST, f"stages beside {in_flight}")
    return StagedStep(
        PipelineChoice(best, tuple(ways[1:])),
        max(_exchange_s(question, device, num_micro_batches) for device in devices),
        _update_s(question, fullest, on_host_nbytes),
        fullest.nbytes + activation_nbytes - on_host_nbytes,
        on_host_nbytes,
    )


def micro_batches(batch: int, num_devices: int, wanted: int | None) -> tuple[int, int]:
    """Return how many micro-batches there are, about as many as `wanted`, or four a device, and the samples of each."""
    size = -(-batch // min(wanted or MICRO_BATCHES_A_STAGE * num_devices, batch))
    return -(-batch // size), size  # as `tensor.chunk`, which may give fewer


def _machine(question: Question, activation_nbytes: int) -> PipelineMachine:
    hardware, mesh = question.hardware, question.mesh
    is_alone = mesh.num_ranks == mesh.stage  # then few of a machine's ranks send out of it
    return PipelineMachine(
        mesh.stage,
        send_Bps=(hardware.send_Bps if is_alone else hardware.across_Bps)(mesh.num_ranks),
        fetch_Bps=hardware.link_Bps,
        kept_nbytes=max(0, question.device_nbytes - activation_nbytes),
        cap_nbytes=None if question.host_nbytes is None else question.device_nbytes + question.host_nbytes,
    )


def _require_room(needed_nbytes: int, cap_nbytes: int | None, tier: Tier, what: str) -> None:
    if cap_nbytes is not None and needed_nbytes > cap_nbytes:
        needed, cap = format_nbytes(needed_nbytes), format_nbytes(cap_nbytes)
        raise CapacityError(
            f"{what} need {needed} of {tier.name}, which has {cap}; give it more, or use more stages or micro-batches",
            needed_nbytes=needed_nbytes,
            cap_nbytes=cap_nbytes,
            tier=tier,
        )


def _of_a_rank(block: Block, shards: int, scale: float) -> Block:
    """Return a block with the bytes that one of `shards` ranks has, and the times of a batch of another size."""
    shared = {name: nbytes // shards for name, nbytes in block.shared.items()}
    nbytes = block.nbytes // shards + _gathered_nbytes(block, shards)
    output_nbytes = int(scale * block.output_nbytes)
    forward_s, backward_s = scale * block.forward_s, scale * block.backward_s
    return replace(
        block, nbytes=nbytes, shared=shared, forward_s=forward_s, backward_s=backward_s, output_nbytes=output_nbytes
    )


def _gathered_nbytes(part: Block | Stage, shards: int) -> int:
    """Return the bytes of whole weights and gradients, which a rank has in addition to its shard."""
    return 2 * part.weight_nbytes if shards > 1 else 0


def _exchange_s(question: Question, device: Stage, num_micro_batches: int) -> float:
    mesh, nbytes = question.mesh, device.weight_nbytes
    gather_s = nbytes * (mesh.shard - 1) / mesh.shard / question.peers.exchange_Bps(mesh.shard)
    across_s = mesh.across_share * nbytes / question.peers.across_Bps(mesh.world)
    reduce_s = question.sent_share * (gather_s + across_s)
    waits_s = gather_s - device.forward_s / num_micro_batches, reduce_s - device.backward_s / num_micro_batches
    return sum(max(0.0, seconds) for seconds in waits_s)


def _update_s(question: Question, device: Stage, on_host_nbytes: int) -> float:
    own_nbytes = device.nbytes - _gathered_nbytes(device, question.mesh.shard)
    updated_on_host_nbytes = min(own_nbytes, on_host_nbytes)
    machine = question.peers.machine(question.device_nbytes, 0)
    on_device_s = (own_nbytes - updated_on_host_nbytes) / machine.device_update_Bps
    return on_device_s + updated_on_host_nbytes / machine.host_update_Bps
