"""What happened in a step, or what a plan says will: one type, so that both can be laid side by side."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property

from chunkmem.data.codec import Integer, Label, Seconds
from chunkmem.data.errors import PlanError
from chunkmem.data.json_files import Saved
from chunkmem.data.sizes import format_nbytes
from chunkmem.data.trace import Trace
from chunkmem.data.types import ChunkId, Tier
from chunkmem.plan.model import LANE_LINKS, Lane


@dataclass(frozen=True, slots=True)
class Span:
    """One operation on a lane, or a stall: COMPUTE waiting for another lane."""

    lane: Lane
    label: Label
    start_s: float
    """Seconds since the step began."""
    end_s: float
    moment: Integer
    """The moment it was issued in."""
    chunk: ChunkId | None = None
    nbytes: int = 0
    """Moved by it."""
    is_stall: bool = False


class StageWork(enum.Enum):
    """What a stage does at a time."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WAIT = "wait"
    """Waiting for another stage: a bubble."""

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class StageCall:
    """What a pipeline stage of this rank did for one micro-batch."""

    work: StageWork
    stage: Integer
    micro_batch: Integer
    start_s: float
    """Seconds since the step began."""
    end_s: float


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What a step comes to, without a look at its moments."""

    step_s: float
    stall_s: float
    moved_nbytes: Mapping[Lane, int]
    """Bytes copied on each link."""
    exchanged_nbytes: int
    fetched: int
    prefetched: int
    plan_misses: int


@dataclass(frozen=True)
class Timeline(
    Saved,
    name="chunkmem timeline",
    error=PlanError,
    again="record the run again",
    tables=("chunks", "labels"),
    optional=("stage_calls", "python_by_layer"),
):
    """One step."""

    spans: tuple[Span, ...]
    step_s: Seconds
    peak_nbytes: Mapping[Tier, int]
    """Highest sum over chunks; slabs kept for reuse do not count."""
    role_peak_nbytes: Mapping[tuple[Tier, str], int]
    """Each role's own highest sum, by tier and role name."""
    cap_nbytes: Mapping[Tier, int]
    device_nbytes: tuple[int, ...] = ()
    """Chunk bytes on DEVICE in each moment."""
    plan_misses: int = 0
    """Accesses that the plan did not foresee."""
    prefetched: int = 0
    """Copies to DEVICE that had arrived before they were needed."""
    fetched: int = 0
    """Copies to DEVICE that a moment needed."""
    stage_calls: tuple[StageCall, ...] = ()
    """Of pipeline stages over ranks, in the order of time. On an accelerator, torch waits for other stages unseen."""
    python_by_layer: Mapping[str, Seconds] | None = None
    """See `python_between_s`; None: it was not measured, as nobody has heard of moments, or the step was recorded."""

    @property
    def python_s(self) -> float | None:
        """Seconds that computing had between units; None: not measured."""
        return None if self.python_by_layer is None else sum(self.python_by_layer.values())

    @cached_property
    def moved_nbytes(self) -> Mapping[Lane, int]:
        """Bytes copied on each link."""
        moved = no_bytes_moved(self.cap_nbytes)
        for span in self.spans:
            if span.nbytes and not span.is_stall and span.lane is not Lane.COLLECTIVE:
                moved[span.lane] = moved.get(span.lane, 0) + span.nbytes
        return moved

    @cached_property
    def exchanged_nbytes(self) -> int:
        """Bytes of chunks that were exchanged with other ranks."""
        return sum(span.nbytes for span in self.spans if span.lane is Lane.COLLECTIVE)

    def busy_s(self, lane: Lane) -> float:
        """Return the time that a lane works: COMPUTE, on its moments and the updates there."""
        return sum(span.end_s - span.start_s for span in self.spans if span.lane is lane and not span.is_stall)

    @cached_property
    def stall_s(self) -> float:
        """Time that computing waited for copies."""
        return sum(span.end_s - span.start_s for span in self.spans if span.is_stall)

    def __str__(self) -> str:
        exchanged, python_s = self.exchanged_nbytes, self.python_s
        python = "not measured" if python_s is None else f"{1e3 * python_s:.0f} ms"
        return (
            f"moved {format_nbytes(sum(self.moved_nbytes.values()))}, "
            + (f"exchanged {format_nbytes(exchanged)}, " if exchanged else "")
            + f"stalled {1e3 * self.stall_s:.0f} ms, Python {python}, "
            f"prefetched {self.prefetched}/{self.fetched}, plan misses {self.plan_misses}, "
            f"peak {format_nbytes(self.peak_nbytes[Tier.DEVICE])} of {format_nbytes(self.cap_nbytes[Tier.DEVICE])}"
        )

    @property
    def figures(self) -> StepFigures:
        """What it comes to."""
        return StepFigures(**{each.name: getattr(self, each.name) for each in fields(StepFigures)})

    def __repr__(self) -> str:
        return f"Timeline({1e3 * self.step_s:.1f} ms, {self})"

    def require_sound(self) -> None:
        """Refuse spans that end before they start, and a timeline without DEVICE."""
        for index, span in enumerate(self.spans):
            if span.end_s < span.start_s:
                raise PlanError(f"spans[{index}] ends at {span.end_s} s, before it starts at {span.start_s} s")
        for name, by_tier in (("peak_nbytes", self.peak_nbytes), ("cap_nbytes", self.cap_nbytes)):
            if Tier.DEVICE not in by_tier:
                raise PlanError(f'{name} has no row for "{Tier.DEVICE.value}", which every timeline has')


def python_between_s(spans: Iterable[Span], trace: Trace | None) -> dict[str, float] | None:
    """Return the seconds that COMPUTE has between units, by the layer that has come before.

    No weights are held then, and nothing is updated or waited for.
    The step's Python runs, and operators that read no weights. Without a trace of the step it is not known: None.
    """
    if trace is None:
        return None
    found = dict[str, float]()
    for span in spans:
        if span.lane is Lane.COMPUTE and (layer := trace.between.get(span.moment)) is not None:
            computed_s = span.end_s - span.start_s
            found[layer] = found.get(layer, 0.0) + (-computed_s if span.is_stall else computed_s)
    return found


def no_bytes_moved(tiers: Iterable[Tier]) -> dict[Lane, int]:
    """Return 0 for each link between tiers that there are."""
    known = {Tier.DEVICE, Tier.HOST, *tiers}
    return {lane: 0 for lane, link in LANE_LINKS.items() if known.issuperset(link)}


def differences(predicted: Timeline, happened: Timeline) -> list[str]:
    """Return where a step without plan misses is not what was predicted: bytes on each link, chunk peak on each
    tier."""
    found = []
    for lane in sorted({*predicted.moved_nbytes, *happened.moved_nbytes}, key=lambda lane: lane.value):
        one, other = predicted.moved_nbytes.get(lane, 0), happened.moved_nbytes.get(lane, 0)
        if one != other:
            found.append(f"{lane.value}: {one} bytes predicted, {other} moved")
    for tier in sorted({*predicted.peak_nbytes, *happened.peak_nbytes}, key=lambda tier: tier.value):
        one, other = predicted.peak_nbytes.get(tier, 0), happened.peak_nbytes.get(tier, 0)
        if one != other:
            found.append(f"{tier.name}: a peak of {one} bytes predicted, {other} seen")
    return found
