"""A recorded step with the times of other ones, in which other regions are recomputed. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace

from chunkmem.activations.kept_regions import forward_of, recomputation_of
from chunkmem.data.trace import Trace

_FORWARD, _AGAIN, _BACKWARD = "forward", "again", "backward"


def retimed(trace: Trace, measured: Trace) -> Trace:
    """Return `trace` with times as measured: those of regions' forwards, recomputations and backwards as a whole.

    Where a region was kept in the measured step, its recomputation would take as long as its forward did there.

    Args:
        trace: of a step with the same regions, by their numbers; all are recomputed.
        measured: of a step with better durations.
    """
    is_s = dict(_seconds(measured))
    for region in measured.regions:
        if region.recomputed is None and (region.number, _FORWARD) in is_s:  # it may have no moment, on HOST alone
            is_s[region.number, _AGAIN] = is_s[region.number, _FORWARD]
    return _with_seconds(trace, is_s)


def with_warm_forward(trace: Trace) -> Trace:
    """Return a first step, in which forward touches memory for the first time, with forwards that take no longer than
    their recomputation."""
    was_s, is_s = _seconds(trace), dict[Hashable, float]()
    for region in trace.regions:
        forward_s, again_s = (was_s.get((region.number, part), 0.0) for part in (_FORWARD, _AGAIN))
        if 0.0 < again_s < forward_s:
            is_s[region.number, _FORWARD] = again_s
    return _with_seconds(trace, is_s)


def _with_seconds(trace: Trace, seconds: Mapping[Hashable, float]) -> Trace:
    """Return the trace with parts that take so long, their moments in proportion; all others as they are."""
    was_s = _seconds(trace)
    moments = []
    for part, moment in zip(_parts(trace), trace.moments, strict=True):
        factor = seconds[part] / was_s[part] if part in seconds and was_s[part] else 1.0
        moments.append(replace(moment, duration_s=factor * moment.duration_s))
    return replace(trace, moments=tuple(moments))


def _seconds(trace: Trace) -> Mapping[Hashable, float]:
    """Return how long each part of a step takes."""
    found: dict[Hashable, float] = defaultdict(float)
    for part, moment in zip(_parts(trace), trace.moments, strict=True):
        found[part] += moment.duration_s
    return dict(found)


def _parts(trace: Trace) -> Iterator[Hashable]:
    """Yield by moment the part of the step that it is of: a region's forward, recomputation or other backward, or what
    has its label.

    What has none belongs to the one before. Where two backwards overlap, the second one has begun.
    """
    spans = [(range(*region.backward), (region.number, _BACKWARD)) for region in reversed(trace.regions)]
    spans += [(forward_of(region), (region.number, _FORWARD)) for region in trace.regions]
    spans += [(recomputation_of(r), (r.number, _AGAIN)) for r in trace.regions if r.recomputed is not None]
    of_regions = {at: part for span, part in spans for at in span}
    part: Hashable = ""
    for at, moment in enumerate(trace.moments):
        part = of_regions.get(at, moment.label or part)
        yield part
