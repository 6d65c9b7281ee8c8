"""Which schedule a pipeline takes: the one whose simulated step is shortest. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from chunkmem.data.errors import CapacityError, ConfigError
from chunkmem.plan.balance import Block, Stage, balance
from chunkmem.plan.pipeline_schedule import PipelineStep, Schedule, StageTimes, simulate_pipeline

_LOOPS = (1, 2, 4)
"""Stages on each device."""
_AS_FAST = 1.01
"""Ratio up to which two step times count as equal; then the schedule with fewer activations wins."""


@dataclass(frozen=True)
class PipelineMachine:
    """What the devices of a pipeline can do."""

    num_devices: int
    send_Bps: float = inf
    """Bytes per second from one device to the next."""
    fetch_Bps: float = inf
    """Bytes per second from HOST to DEVICE."""
    kept_nbytes: int | None = None
    """Bytes of weights that DEVICE can keep besides activations; None: all of them."""
    cap_nbytes: int | None = None
    """Of weights, gradients and optimizer states that each device may have, with its HOST; None: of all."""


@dataclass(frozen=True)
class PipelineCandidate:
    """A way to cut a model into stages and to run them."""

    stages: tuple[Stage, ...]
    step: PipelineStep

    @property
    def in_flight(self) -> float:
        """Activations on the device that has most of them, as a number of micro-batches through the whole model."""
        return max(self.step.num_in_flight) / self.step.num_stages

    def __str__(self) -> str:
        step = self.step
        return (
            f"{step.schedule.value} with {step.num_stages} stages: {1e3 * step.step_s:,.1f} ms a step, bubble "
            f"{100 * step.bubble:.0f} %, at most {max(step.num_in_flight)} in flight"
        )


@dataclass(frozen=True)
class PipelineChoice:
    """The best candidate, and those that it is better than."""

    best: PipelineCandidate
    others: tuple[PipelineCandidate, ...]
    """The fastest first."""

    @property
    def reason(self) -> str:
        """Say in one line why."""
        over = f"; next {self.others[0]}" if self.others else ", the only one for these devices and micro-batches"
        return f"{self.best}{over}"


def try_schedule(
    schedule: Schedule, stages: Sequence[Stage], num_micro_batches: int, machine: PipelineMachine
) -> PipelineCandidate:
    """Simulate a step of these stages, over equal micro-batches of the batch that their blocks were timed with.

    Raises:
        ConfigError: the schedule cannot have so many stages or micro-batches.
    """
    times = [
        StageTimes(
            stage.forward_s / num_micro_batches,
            stage.backward_s / num_micro_batches,
            stage.output_nbytes / num_micro_batches / machine.send_Bps,
            stage.weight_nbytes / machine.fetch_Bps,
        )
        for stage in stages
    ]
    step = simulate_pipeline(
        schedule,
        times,
        num_devices=machine.num_devices,
        num_micro_batches=num_micro_batches,
        num_kept=_num_kept(stages, machine),
    )
    return PipelineCandidate(tuple(stages), step)


def _num_kept(stages: Sequence[Stage], machine: PipelineMachine) -> int | None:
    """Return how many stages' weights a device has room for. With their states there, too, none has to be fetched."""
    kept_nbytes, num_devices = machine.kept_nbytes, machine.num_devices
    totals = [sum(stage.nbytes for stage in stages[device::num_devices]) for device in range(num_devices)]
    if kept_nbytes is None or max(totals) <= kept_nbytes:
        return None
    # Weights that are updated on HOST are fetched in each step once at least.
    return kept_nbytes // max(1, *(stage.weight_nbytes for stage in stages))


def choose_schedule(blocks: Sequence[Block], num_micro_batches: int, machine: PipelineMachine) -> PipelineChoice:
    """Cut blocks into 1, 2 or 4 stages a device, and choose among all schedules.

    Of those that are as fast, the one with fewer activations is chosen. One device computes by layer, a block a stage.

    Raises:
        ConfigError: there are fewer blocks than devices.
        CapacityError: a stage has more bytes than a device may have, however blocks are cut.
    """
    num_devices = machine.num_devices
    if num_devices == 1:
        balance(blocks, 1, cap_nbytes=machine.cap_nbytes)  # does it fit at all
        stages = balance(blocks, len(blocks))
        return PipelineChoice(try_schedule(Schedule.BY_LAYER, stages, num_micro_batches, machine), ())
    found: list[PipelineCandidate] = []
    for loops in _LOOPS:
        with contextlib.suppress(*((ConfigError, CapacityError) if found else ())):
            cap_nbytes = None if machine.cap_nbytes is None else machine.cap_nbytes // loops
            stages = balance(blocks, loops * num_devices, cap_nbytes=cap_nbytes)
            # Interleaved with one stage a device is 1F1B that begins earlier, with more in flight.
            for schedule in (each for each in Schedule if loops > 1 or each is not Schedule.INTERLEAVED):
                with contextlib.suppress(ConfigError):
                    found.append(try_schedule(schedule, stages, num_micro_batches, machine))
    found.sort(key=lambda candidate: candidate.step.step_s)
    as_fast = [each for each in found if each.step.step_s <= _AS_FAST * found[0].step.step_s]
    best = min(as_fast, key=lambda candidate: candidate.in_flight)
    return PipelineChoice(best, tuple(candidate for candidate in found if candidate is not best))
