"""In which order devices compute the stages of a pipeline for each micro-batch, and how long a step then takes. Pure.

A device computes one call after the other, in an order that does not depend on durations; a call waits for its input,
which the stage before (in backward: the stage after) has sent. Two stages, three micro-batches, backward as long as
forward; `.` is the bubble:

    gpipe  device 0   F0 F1 F2 .. .. B0 B1 B2        1f1b  device 0   F0 F1 .. B0 F2 B1 .. B2
           device 1   .. F0 F1 F2 B0 B1 B2 ..              device 1   .. F0 B0 F1 B1 F2 B2 ..

With several stages a device, stage s is on device s mod the number of devices. "looped-bfs" computes all micro-batches
in a stage before it comes to the next one, and in backward begins with the last micro-batch; "by-layer" is the same on
one device, whose stages are blocks. So their weights are fetched twice a step, however many micro-batches there are;
the other schedules come back to a stage for each of them. The orders are those of torch.distributed.pipelining.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from chunkmem.data.errors import ConfigError
from chunkmem.plan.timeline import StageCall, StageWork


class Schedule(enum.Enum):
    """The order of calls."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    LOOPED_BFS = "looped-bfs"
    BY_LAYER = "by-layer"

    __hash__ = object.__hash__

    @property
    def is_looped(self) -> bool:
        """A device may have several stages."""
        return self not in (Schedule.GPIPE, Schedule.ONE_F_ONE_B)


Call = tuple[int, int, StageWork]
"""Stage, micro-batch, forward or backward."""
Order = tuple[Call, ...]
"""The calls of one device, in order."""


@dataclass(frozen=True)
class StageTimes:
    """How long one micro-batch takes in a stage."""

    forward_s: float
    backward_s: float
    send_s: float = 0.0
    """Seconds to send the stage's output to the next stage, and as many for its gradient."""
    fetch_s: float = 0.0
    """Seconds to bring the stage's weights to DEVICE; 0: they stay there."""


@dataclass(frozen=True)
class PipelineStep:
    """A step of a pipeline as simulated."""

    schedule: Schedule
    num_devices: int
    num_stages: int
    calls: tuple[StageCall, ...]
    """By device: its calls, in order."""

    @property
    def step_s(self) -> float:
        """Time from the first call to the end of the last one."""
        return max(call.end_s for call in self.calls)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Time that each device computes."""
        busy_s = [0.0] * self.num_devices
        for call in self.calls:
            busy_s[self.device_of(call)] += call.end_s - call.start_s
        return tuple(busy_s)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Share of the step in which each device waits for others."""
        return tuple(1 - busy_s / self.step_s if self.step_s else 0.0 for busy_s in self.busy_s)

    @property
    def bubble(self) -> float:
        """The same over all devices."""
        return sum(self.bubbles) / self.num_devices

    @property
    def num_in_flight(self) -> tuple[int, ...]:
        """Most micro-batches whose forward has begun and whose backward has not ended, over all stages of a device."""
        changes: list[list[int]] = [[] for _ in range(self.num_devices)]
        for call in self.calls:
            changes[self.device_of(call)].append(1 if call.work is StageWork.FORWARD else -1)
        return tuple(max(accumulate(of_device)) for of_device in changes)

    def device_of(self, call: StageCall) -> int:
        """Return the device that makes a call."""
        return call.stage % self.num_devices


def orders(schedule: Schedule, *, num_devices: int, num_stages: int, num_micro_batches: int) -> tuple[Order, ...]:
    """Return the calls of each device, in order.

    Raises:
        ConfigError: the schedule cannot have so many stages, devices or micro-batches.
    """
    _check(schedule, num_devices, num_stages, num_micro_batches)
    return tuple(
        _order(schedule, device, range(device, num_stages, num_devices), num_devices, num_micro_batches)
        for device in range(num_devices)
    )


def _order(schedule: Schedule, device: int, own: range, num_devices: int, num: int) -> Order:
    """Return the calls of a device with the stages `own`, in each of which `num` micro-batches are computed."""
    is_interleaved = schedule is Schedule.INTERLEAVED
    a_round = num // max(1, num // num_devices) if is_interleaved else num

    def calls(stages: range, work: StageWork) -> list[Call]:
        """Some micro-batches, a round, go through all stages of the device, then the next ones."""
        return [
            (stage, part, work)
            for start in range(0, num, a_round)
            for stage in stages
            for part in range(start, start + a_round)
        ]

    forward, backward = calls(own, StageWork.FORWARD), calls(own[::-1], StageWork.BACKWARD)
    if schedule in (Schedule.LOOPED_BFS, Schedule.BY_LAYER):  # last in, first out: micro-batches, too
        backward = [(stage, part, StageWork.BACKWARD) for stage, part, _ in reversed(forward)]
    num_first, later = len(forward), num_devices - 1 - device
    if schedule is Schedule.ONE_F_ONE_B or is_interleaved:
        num_first = min(num_first, (len(own) - 1) * a_round + 2 * later if is_interleaved else later)
    # Forward `num_first` times, then forward and backward in turn, then the rest of backward.
    found = forward[:num_first]
    for pair in zip(forward[num_first:], backward, strict=False):
        found += pair
    return (*found, *backward[len(forward) - num_first :])


def simulate_pipeline(
    schedule: Schedule,
    stages: Sequence[StageTimes],
    *,
    num_devices: int,
    num_micro_batches: int,
    num_kept: int | None = None,
) -> PipelineStep:
    """Return a step in which each call begins as soon as its device and its input are there.

    What is sent overlaps with computing; what goes from one device to another goes one after the other. A stage whose
    weights are not on DEVICE is computed while they come, so its call takes as long as the longer of both.

    Args:
        stages: in the order of forward.
        num_kept: stages whose weights a device has room for: those of its last calls; None: all; 0: not even one, so
            each call fetches them.

    Raises:
        ConfigError: the schedule cannot have so many stages, devices or micro-batches.
    """
    planned = orders(schedule, num_devices=num_devices, num_stages=len(stages), num_micro_batches=num_micro_batches)
    calls = timed_calls(planned, stages, num_kept=num_kept)
    return PipelineStep(schedule, num_devices, len(stages), calls)


def timed_calls(
    planned: Sequence[Order], stages: Sequence[StageTimes], *, num_kept: int | None = None
) -> tuple[StageCall, ...]:
    """Return when each call of some orders, one for each device, runs; see `simulate_pipeline`."""
    made: list[list[StageCall]] = [[] for _ in planned]
    kept: list[list[int]] = [[] for _ in planned]
    """Stages whose weights are on a device, the one used last at the end."""
    arrived_s = {call: 0.0 for order in planned for call in order if call[::2] == (0, StageWork.FORWARD)}
    """By call: the time in seconds at which its input arrives, as far as it is known."""
    sent_s: defaultdict[tuple[int, int], float] = defaultdict(float)
    """By (sender, receiver): the time in seconds from which on their link is idle."""
    is_going = True
    while is_going:
        is_going = False
        for device, (order, own) in enumerate(zip(planned, made, strict=True)):
            while len(own) < len(order) and (call := order[len(own)]) in arrived_s:
                is_going = True
                stage, part, work = call
                times = stages[stage]
                duration_s = times.forward_s if work is StageWork.FORWARD else times.backward_s
                if num_kept is not None and _fetches(kept[device], stage, num_kept):
                    duration_s = max(duration_s, times.fetch_s)
                start_s = max(own[-1].end_s if own else 0.0, arrived_s[call])
                end_s = start_s + duration_s
                own.append(StageCall(work, stage, part, start_s, end_s))
                given = _given(call, len(stages))
                link = device, given[0] % len(planned)
                if device != link[1]:
                    sent_s[link] = end_s = max(end_s, sent_s[link]) + stages[min(stage, given[0])].send_s
                arrived_s[given] = end_s
    assert list(map(len, made)) == list(map(len, planned)), "devices wait for each other"
    return tuple(call for own in made for call in own)


def _given(call: Call, num_stages: int) -> Call:
    """Return the call that is given what this one returns: backward begins with the loss, where forward ends."""
    stage, part, work = call
    if work is StageWork.BACKWARD:
        return stage - 1, part, work
    return (stage + 1, part, work) if stage + 1 < num_stages else (stage, part, StageWork.BACKWARD)


def _fetches(kept: list[int], stage: int, num_kept: int) -> bool:
    """Note a use of a stage's weights, and tell whether they have to be fetched."""
    is_there = stage in kept
    if is_there:
        kept.remove(stage)
    kept.append(stage)
    del kept[: max(0, len(kept) - num_kept)]
    return not is_there


def _check(schedule: Schedule, num_devices: int, num_stages: int, num_micro_batches: int) -> None:
    name = schedule.value
    if min(num_devices, num_stages, num_micro_batches) < 1:
        raise ConfigError(
            f"{name}: {num_devices} devices, {num_stages} stages, {num_micro_batches} micro-batches; give 1 at least"
        )
    if schedule is Schedule.BY_LAYER and num_devices != 1:
        raise ConfigError(f"{name} is for one device, and there are {num_devices}; looped-bfs is the same for several")
    if num_stages % num_devices or (num_stages != num_devices and not schedule.is_looped):
        each = "as many on each" if schedule.is_looped else "one on each"
        raise ConfigError(f"{name}: {num_stages} stages for {num_devices} devices; it needs {each}")
    if schedule is Schedule.ONE_F_ONE_B and num_micro_batches < num_stages:
        raise ConfigError(
            f"{name}: {num_micro_batches} micro-batches for {num_stages} stages; give {num_stages} at least, or gpipe"
        )
    num_rounds = max(1, num_micro_batches // num_devices)
    if schedule is Schedule.INTERLEAVED and num_micro_batches % num_rounds:
        raise ConfigError(
            f"{name}: {num_micro_batches} micro-batches are not a multiple of {num_rounds} rounds; give "
            f"{num_devices * num_rounds}, or a multiple of the {num_devices} devices"
        )
