"""How many stages the ranks of a pipeline make up, and which blocks each has: what is predicted to be fastest. Pure.

R ranks are S stages of R / S data-parallel ranks, the width. The global batch stays the
same, so each stage of a pipeline half as long computes half of it. Three blocks on two ranks, two of them frozen
(F: forward of the frozen ones, f and b: of the last block; `.` is the bubble), as two stages and as one of width 2:

    2 x 1   rank 0   F0 F1 F2 F3 .. .. .. .. ..        1 x 2   rank 0   F0 F1 f0 f1 b1 b0 | reduce
            rank 1   .. f0 b0 f1 b1 f2 b2 f3 b3                rank 1   F2 F3 f2 f3 b3 b2 | reduce

What that costs is exchanges of weights and gradients, which a width of 1 has none of. They are added to the simulated
step as if nothing overlapped with them, and so is the update of what one rank has most of. A call of a block takes some
time however few samples it has (hooks, launches): a rank of 1 x 2 calls twice as many blocks as one of 2 x 1, with half
of the samples each. What a step has taken longer than all of that, or less, is added for each call at that width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import inf

from chunkmem.data.errors import CapacityError, ConfigError
from chunkmem.data.sizes import format_nbytes
from chunkmem.plan.balance import Block, Stage, balance
from chunkmem.plan.pipeline_choice import PipelineMachine, try_schedule
from chunkmem.plan.pipeline_schedule import Schedule

_LEAST_GAIN = 1.05
"""A step has to be so many times as fast for chunks to be moved: what is predicted is no more exact than that."""


@dataclass(frozen=True)
class WidthTask:
    """What is trained."""

    blocks: Sequence[Block]
    """Times, and bytes handed on, are those of a global batch on one rank."""
    exchanged_nbytes: Sequence[int]
    """By block: of weights and gradients, what data-parallel ranks exchange of it in a step."""
    held_nbytes: Sequence[int]
    """By block: of weights and gradients, what DEVICE has room for while data-parallel ranks run it."""
    num_samples: int
    """In a global batch."""
    micro_batches: int
    """Parts that each pipeline splits its batch into; fewer, if it has fewer samples."""
    schedules: Mapping[int, tuple[Schedule, int]]
    """By number of stages on different ranks, each that is possible: what runs them, and the stages of each rank."""
    costs: Sequence[CallCost] = ()
    """By block; empty: there are none."""


@dataclass(frozen=True)
class CallCost:
    """What a block costs that does not depend on the number of samples."""

    num_calls: int
    """For each micro-batch: forward, and backward if it has one."""
    call_s: float = 0.0
    """Of each of them."""
    num_exchanges: int = 0
    """Gathers and reductions, of data-parallel ranks in a step."""
    trained_nbytes: int = 0
    """Of weights that are updated."""


@dataclass(frozen=True)
class WidthMachine:
    """What the ranks of one replica can do."""

    num_ranks: int
    device_nbytes: int
    cap_nbytes: int
    """On each rank, of weights, gradients and optimizer states on all tiers."""
    exchange_Bps: float = inf
    """Of chunks, between data-parallel ranks; and between stages."""
    fetch_Bps: float = inf
    """From HOST to DEVICE."""
    keeps_all: bool = False
    """DEVICE and HOST are one piece of RAM: nothing is fetched."""
    exchange_s: float = 0.0
    """Of each exchange between data-parallel ranks, however small."""
    update_Bps: float = inf
    """Of trained weights."""
    overheads_s: Mapping[int, float] = field(default_factory=dict)
    """By number of stages on different ranks: what steps took longer than predicted, for each call of a block."""
    overhead_s: float = 0.0
    """The same where no step was run with so many."""


@dataclass(frozen=True)
class Division:
    """Ranks and blocks divided into stages."""

    num_ranks: int
    """That each pipeline has: one for each stage, or for some of them."""
    width: int
    """Data-parallel ranks of each stage."""
    num_blocks: tuple[int, ...]
    """By stage."""
    schedule: Schedule = Schedule.BY_LAYER
    """What runs the stages."""
    step_s: float = inf
    """Predicted."""

    def __str__(self) -> str:
        even = len(set(self.num_blocks)) < 2
        return f"{self.num_ranks} x {self.width}" + (
            "" if even else f" of {', '.join(map(str, self.num_blocks))} blocks"
        )


@dataclass(frozen=True)
class WidthChoice:
    """What is done."""

    now: Division
    best: Division
    """The same as `now` if nothing is changed."""
    reason: str
    """In one line."""


def choose_width(task: WidthTask, now: Division, machine: WidthMachine) -> WidthChoice:
    """Return how the ranks are divided from now on.

    Every number of stages in `task.schedules` is tried, with the stages as they are cut now if it is the present one,
    and cut so that the slowest stage is as fast as possible. All are given the same numbers, and choose alike.

    Args:
        task: what is trained.
        now: how the ranks are divided; its time is predicted here.
        machine: what they can do.
    """
    found, said = [], []
    for num_ranks in sorted(task.schedules, reverse=True):
        try:
            found.append(_balanced(task, num_ranks, machine))
        except (CapacityError, ConfigError) as error:
            if num_ranks != now.num_ranks:
                said.append(f"{num_ranks} x {machine.num_ranks // num_ranks} is not possible: {error}")
    with contextlib.suppress(ConfigError):  # else it takes for ever
        now = replace(now, step_s=predicted_s(task, now, machine))
    # Of those that are as fast, the one with fewer stages has the smaller bubble when batches get smaller.
    best = min(found, key=lambda each: (each.step_s, each.num_ranks), default=now)
    if now.step_s < _LEAST_GAIN * best.step_s or (best.num_blocks == now.num_blocks and best.width == now.width):
        best = now
    rest = [
        each for each in found if (each.width, each.num_blocks) not in ((d.width, d.num_blocks) for d in (best, now))
    ]
    others = [f"{each} would take {_shown(each.step_s)}" for each in rest]
    head = f"{best}, a step of {_shown(best.step_s)} in place of {_shown(now.step_s)} by {now}"
    if best is now:
        head = f"{now} stays, a step of {_shown(now.step_s)}"
    return WidthChoice(now, best, "; ".join([f"{head} (stages x data-parallel ranks, predicted)", *others, *said]))


def _shown(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _balanced(task: WidthTask, num_ranks: int, machine: WidthMachine) -> Division:
    """Return the fastest cut into the stages of so many ranks.

    Raises:
        CapacityError: a stage fits no rank, or what one has to hold together does not fit DEVICE.
        ConfigError: there are fewer blocks than stages, or fewer samples than data-parallel ranks.
    """
    width, (schedule, per_rank) = machine.num_ranks // num_ranks, task.schedules[num_ranks]
    held_nbytes = max(task.held_nbytes, default=0)
    if width > 1 and held_nbytes > machine.device_nbytes:
        raise CapacityError(
            f"data-parallel ranks hold {format_nbytes(held_nbytes)} of a block together, and DEVICE has "
            f"{format_nbytes(machine.device_nbytes)}",
            needed_nbytes=held_nbytes,
            cap_nbytes=machine.device_nbytes,
        )
    cap_nbytes = width * machine.cap_nbytes // per_rank
    if num_ranks == 1:
        balance(task.blocks, 1, cap_nbytes=cap_nbytes)
        division = Division(1, width, (len(task.blocks),))
    else:
        stages = balance(_with_calls(task, width), num_ranks * per_rank, cap_nbytes=cap_nbytes)
        division = Division(num_ranks, width, tuple(len(stage.blocks) for stage in stages), schedule)
    return replace(division, step_s=predicted_s(task, division, machine))


def predicted_s(task: WidthTask, division: Division, machine: WidthMachine) -> float:
    """Return the time of a step and its update.

    Raises:
        ConfigError: the schedule cannot have so many micro-batches, or there are fewer samples than ranks.
    """
    width, num_ranks = division.width, division.num_ranks
    if task.num_samples % width:
        raise ConfigError(f"a global batch of {task.num_samples} samples cannot be divided by {width} ranks")
    schedule = division.schedule
    cuts = [0, *accumulate(division.num_blocks)]
    shares = [_share(block, width) for block in _with_calls(task, width)]
    stages = [Stage(tuple(shares[first:stop])) for first, stop in pairwise(cuts)]
    if num_ranks == 1:
        schedule, stages = Schedule.BY_LAYER, [Stage((share,)) for share in shares]
    step = try_schedule(
        schedule,
        stages,
        _num_parts(task.num_samples // width, task.micro_batches),
        PipelineMachine(
            num_ranks,
            send_Bps=machine.exchange_Bps,
            fetch_Bps=machine.fetch_Bps,
            kept_nbytes=None if machine.keeps_all else machine.device_nbytes,
        ),
    ).step
    exchanging_s = [0.0] * len(task.blocks)
    if width > 1:
        exchanging_s = [nbytes / machine.exchange_Bps for nbytes in task.exchanged_nbytes]
        for at, cost in enumerate(task.costs):
            exchanging_s[at] += cost.num_exchanges * machine.exchange_s
    overhead_s = machine.overheads_s.get(num_ranks, machine.overhead_s) * num_calls(task, division)
    updating_s = trained_nbytes(task, division) / machine.update_Bps
    # Where exchanges overlap with computing, steps are faster than predicted, but never than what computes.
    return max(step.step_s, step.step_s + _of_one_rank(exchanging_s, division) + overhead_s) + updating_s


def num_calls(task: WidthTask, division: Division) -> int:
    """Return how many calls of blocks one rank makes in a step at most, backward included."""
    parts = _num_parts(task.num_samples // division.width, task.micro_batches)
    return int(_of_one_rank([parts * cost.num_calls for cost in task.costs], division))


def trained_nbytes(task: WidthTask, division: Division) -> float:
    """Return the bytes of weights that one rank updates at most."""
    return _of_one_rank([cost.trained_nbytes for cost in task.costs], division) / division.width


def _of_one_rank(of_blocks: Sequence[float], division: Division) -> float:
    """Return the largest sum that a rank of a pipeline has of what blocks have."""
    cuts = [0, *accumulate(division.num_blocks)]
    by_stage = [sum(of_blocks[first:stop]) for first, stop in pairwise(cuts)]
    return max(sum(by_stage[rank :: division.num_ranks]) for rank in range(division.num_ranks))


def _with_calls(task: WidthTask, width: int) -> list[Block]:
    """Return the blocks with what their calls take in addition, where each of so many ranks makes all of them."""
    blocks, num = list(task.blocks), width * _num_parts(max(1, task.num_samples // width), task.micro_batches)
    for at, cost in enumerate(task.costs):
        forward_s, backward_s = num * cost.call_s, num * cost.call_s * (cost.num_calls - 1)
        if cost.num_calls:
            block = blocks[at]
            blocks[at] = replace(block, forward_s=block.forward_s + forward_s, backward_s=block.backward_s + backward_s)
    return blocks


def _share(block: Block, width: int) -> Block:
    """Return what one of so many data-parallel ranks has of a block, and computes."""
    return Block(
        block.name,
        block.forward_s / width,
        block.backward_s / width,
        block.nbytes // width,
        {name: nbytes // width for name, nbytes in block.shared.items()},
        block.weight_nbytes // width,
        block.output_nbytes // width,
    )


def _num_parts(num_samples: int, micro_batches: int) -> int:
    """Return in how many parts `torch.chunk` splits so many samples."""
    return -(-num_samples // -(-num_samples // micro_batches))
