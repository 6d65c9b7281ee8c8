"""When each moment of a step begins, and which part of the step it belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import TypeVar

from chunkmem.data.trace import Kind, Moment, Trace
from chunkmem.plan.model import Lane
from chunkmem.plan.timeline import Timeline

T = TypeVar("T")
FORWARD, BACKWARD, STEP = "forward", "backward", "optimizer step"
AGAIN = "forward again"
"""Recomputation, within a backward."""


def moment_starts_s(timeline: Timeline, num_moments: int) -> list[float]:
    """Return when each moment begins, and at the end when the last one is over; never decreasing.

    A moment that took no time, or never came, begins where the one before it ends.
    """
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    # The host that makes updates may run ahead of COMPUTE, so COMPUTE says when a moment begins, if it says anything.
    for lane in (Lane.COMPUTE, Lane.HOST_UPDATE):
        spans = [span for span in timeline.spans if span.lane is lane and span.moment not in begins]
        for span in spans:
            begins[span.moment] = min(span.start_s, begins.get(span.moment, span.start_s))
            ends[span.moment] = max(span.end_s, ends.get(span.moment, span.end_s))
    starts_s = []
    now_s = over_s = 0.0
    for moment in range(num_moments):
        now_s = max(now_s, begins.get(moment, over_s))
        over_s = max(over_s, ends.get(moment, over_s))
        starts_s.append(now_s)
    return [*starts_s, max(now_s, over_s, timeline.step_s)]


def runs(values: Iterable[T]) -> Iterator[tuple[T, int, int]]:
    """Yield (value, first, one past the last) of equal values that follow each other."""
    stop = 0
    for value, equal in groupby(values):
        start, stop = stop, stop + len(list(equal))
        yield value, start, stop


def phases(trace: Trace) -> list[tuple[str, int, int]]:
    """Return (name, first moment, one past the last) of the parts of a step.

    Micro-batches make forward and backward alternate; a recomputation belongs to the backward that needs it.
    """
    return list(runs(phase_names(trace)))


def phase_names(trace: Trace) -> list[str]:
    """Return by moment the part of the step that it is in."""
    names: list[str] = []
    for moment in trace.moments:
        names.append(_phase(moment, trace) or (names[-1] if names else FORWARD))
    return names


def recomputations(trace: Trace) -> list[tuple[int, int]]:
    """Return (first moment, one past the last) of what is computed again in backward."""
    again: list[bool] = []
    for moment in trace.moments:
        words = moment.label.split()
        goes_on = not words and moment.kind is Kind.RELEASE and again[-1:] == [True]
        again.append(goes_on or "recomputation" in words)
    return [(start, stop) for is_again, start, stop in runs(again) if is_again]


def _phase(moment: Moment, trace: Trace) -> str:
    """Return the phase that a moment shows it is in; empty if it shows nothing, as most releases do not."""
    is_activation = moment.chunk.role.kind.is_of_call
    if moment.kind in (Kind.UPDATE, Kind.CONSUME):
        # Of others' gradients, when they have been reduced.
        return "" if is_activation or trace.is_remote(moment.chunk) else STEP
    words = moment.label.split()
    is_gradient = moment.kind in (Kind.CREATE, Kind.WRITE) and not is_activation
    if is_gradient or "backward" in words or "recomputation" in words:
        return BACKWARD
    return FORWARD if "forward" in words else ""
