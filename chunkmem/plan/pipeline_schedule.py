"""In which order devices compute the stages of a pipeline for each micro-batch, and how long a step then takes. Pure.

[Note: Schedules] A device computes one call after the other, in an order that does not depend on durations; a call
waits for its input, which the stage before (in backward: the stage after) has sent. Two stages, three micro-batches,
backward as long as forward; `.` is the bubble:

    gpipe  device 0   F0 F1 F2 .. .. B0 B1 B2        1f1b  device 0   F0 F1 .. B0 F2 B1 .. B2
           device 1   .. F0 F1 F2 B0 B1 B2 ..              device 1   .. F0 B0 F1 B1 F2 B2 ..

With several stages a device, stage s is on device s mod the number of devices. "looped-bfs" computes all micro-batches
in a stage before it comes to the next one, and in backward begins with the last micro-batch; "by-layer" is the same on
one device, whose stages are blocks. So their weights are fetched twice a step, however many micro-batches there are;
the other schedules come back to a stage for each of them. The orders are those of torch.distributed.pipelining.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count

from chunkmem.errors import ConfigError


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


class Pass(enum.Enum):
    """What a call of a stage computes."""

    FORWARD = "forward"
    BACKWARD = "backward"

    __hash__ = object.__hash__


Order = tuple[tuple[int, int, Pass], ...]
"""Of the calls of one device: stage, micro-batch, pass."""


@dataclass(frozen=True)
class StageTimes:
    """How long one micro-batch takes in a stage."""

    forward_s: float
    backward_s: float
    send_s: float = 0.0
    """To send its output to the next stage; as long for the gradient of that."""
    fetch_s: float = 0.0
    """To bring its weights to DEVICE, where they are not there."""


@dataclass(frozen=True, slots=True)
class StageCall:
    """One call of a stage, and when."""

    stage: int
    micro_batch: int
    kind: Pass
    start_s: float
    end_s: float


@dataclass(frozen=True)
class PipelineStep:
    """A step of a pipeline as simulated."""

    schedule: Schedule
    num_devices: int
    num_stages: int
    num_micro_batches: int
    calls: tuple[StageCall, ...]
    """By device, in the order in which it makes them."""

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
            changes[self.device_of(call)].append(1 if call.kind is Pass.FORWARD else -1)
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
    if schedule is Schedule.GPIPE:
        return tuple(
            (*_in_stage(stage, num_micro_batches, Pass.FORWARD), *_in_stage(stage, num_micro_batches, Pass.BACKWARD))
            for stage in range(num_stages)
        )
    if schedule is Schedule.ONE_F_ONE_B:
        return tuple(
            _alternating(
                list(_in_stage(stage, num_micro_batches, Pass.FORWARD)),
                list(_in_stage(stage, num_micro_batches, Pass.BACKWARD)),
                num_first=num_stages - stage - 1,
            )
            for stage in range(num_stages)
        )
    if schedule is Schedule.INTERLEAVED:
        return tuple(_interleaved(device, num_devices, num_stages, num_micro_batches) for device in range(num_devices))
    found = []
    for device in range(num_devices):
        own = range(device, num_stages, num_devices)
        forward = [call for stage in own for call in _in_stage(stage, num_micro_batches, Pass.FORWARD)]
        # Last in, first out: stages and micro-batches.
        found.append((*forward, *((stage, part, Pass.BACKWARD) for stage, part, _ in reversed(forward))))
    return tuple(found)


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
    return PipelineStep(schedule, num_devices, len(stages), num_micro_batches, calls)


def timed_calls(
    planned: Sequence[Order], stages: Sequence[StageTimes], *, num_kept: int | None = None
) -> tuple[StageCall, ...]:
    """Return when each call of some orders, one for each device, runs; see `simulate_pipeline`."""
    devices = [_Device(order, num_kept) for order in planned]
    network = _Network(stages, len(planned))
    calls: list[list[StageCall]] = [[] for _ in devices]
    is_going = True
    while is_going:
        is_going = False
        for device, made in zip(devices, calls, strict=True):
            while (call := device.next_call(stages, network)) is not None:
                made.append(call)
                is_going = True
    assert all(device.is_done for device in devices), "devices wait for each other"
    return tuple(call for made in calls for call in made)


class _Network:
    """When the inputs of calls arrive."""

    def __init__(self, stages: Sequence[StageTimes], num_devices: int) -> None:
        self._stages = stages
        self._num_devices = num_devices
        self._free_s: dict[tuple[int, int], float] = {}
        """When the link from one device to another has sent what it was given."""
        self._arrived_s: dict[tuple[int, int, Pass], float] = {}
        """By stage, micro-batch and pass."""

    def arrival_s(self, stage: int, part: int, kind: Pass) -> float | None:
        """Return when a call has its input; None: not known yet."""
        if kind is Pass.FORWARD and stage == 0:
            return 0.0
        return self._arrived_s.get((stage, part, kind))

    def send(self, call: StageCall) -> None:
        """Send what a call has returned."""
        step = 1 if call.kind is Pass.FORWARD else -1
        target, kind = call.stage + step, call.kind
        if target == len(self._stages):
            # Backward begins with the loss, where forward ends.
            target, kind = call.stage, Pass.BACKWARD
        arrival_s = call.end_s
        link = call.stage % self._num_devices, target % self._num_devices
        if link[0] != link[1]:
            send_s = self._stages[min(call.stage, target)].send_s
            self._free_s[link] = arrival_s = max(arrival_s, self._free_s.get(link, 0.0)) + send_s
        self._arrived_s[target, call.micro_batch, kind] = arrival_s


class _Device:
    """What one device has done so far."""

    def __init__(self, order: Order, num_kept: int | None) -> None:
        self._order = order
        self._num_kept = num_kept
        self._kept: list[int] = []
        """Stages whose weights are there, the one used last at the end."""
        self._at = 0
        self._free_s = 0.0

    @property
    def is_done(self) -> bool:
        return self._at == len(self._order)

    def next_call(self, stages: Sequence[StageTimes], network: _Network) -> StageCall | None:
        """Make the next call, if its input is on the way; None: it is not, or there is none."""
        if self.is_done:
            return None
        stage, part, kind = self._order[self._at]
        arrival_s = network.arrival_s(stage, part, kind)
        if arrival_s is None:
            return None
        self._at += 1
        start_s, times = max(self._free_s, arrival_s), stages[stage]
        duration_s = times.forward_s if kind is Pass.FORWARD else times.backward_s
        if self._fetches(stage):
            duration_s = max(duration_s, times.fetch_s)
        self._free_s = start_s + duration_s
        call = StageCall(stage, part, kind, start_s, self._free_s)
        network.send(call)
        return call

    def _fetches(self, stage: int) -> bool:
        """Note a use of a stage's weights, and tell whether they have to be fetched."""
        if self._num_kept is None:
            return False
        is_there = stage in self._kept
        if is_there:
            self._kept.remove(stage)
        self._kept.append(stage)
        del self._kept[: max(0, len(self._kept) - self._num_kept)]
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


def _in_stage(stage: int, num_micro_batches: int, kind: Pass) -> Iterator[tuple[int, int, Pass]]:
    return ((stage, part, kind) for part in range(num_micro_batches))


def _interleaved(device: int, num_devices: int, num_stages: int, num_micro_batches: int) -> Order:
    """Some micro-batches, a round, go through all stages of the device, then the next ones."""
    own = list(range(device, num_stages, num_devices))
    a_round = num_micro_batches // max(1, num_micro_batches // num_devices)

    def calls(stages: Sequence[int], kind: Pass) -> list[tuple[int, int, Pass]]:
        parts = {stage: count() for stage in stages}
        places = [stages[at // a_round % len(stages)] for at in range(len(stages) * num_micro_batches)]
        return [(stage, next(parts[stage]), kind) for stage in places]

    num_first = (len(own) - 1) * a_round + 2 * (num_devices - 1 - device)
    return _alternating(calls(own, Pass.FORWARD), calls(own[::-1], Pass.BACKWARD), num_first=num_first)


def _alternating(
    forward: Sequence[tuple[int, int, Pass]], backward: Sequence[tuple[int, int, Pass]], *, num_first: int
) -> Order:
    """Forward `num_first` times, then forward and backward in turn, then the rest of backward."""
    num_first = min(num_first, len(forward))
    found = list(forward[:num_first])
    for one, other in zip(forward[num_first:], backward, strict=False):
        found += one, other
    return (*found, *backward[len(forward) - num_first :])
