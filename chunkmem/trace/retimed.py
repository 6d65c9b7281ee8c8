"""A recorded step with the times of later ones, in which other regions are recomputed. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace

from chunkmem.trace.model import Trace
from chunkmem.trace.recomputed import with_recomputed


def retimed(trace: Trace, measured: Trace) -> Trace:
    """Return `trace` with times as measured, by which a region's forward is scaled as a whole, and so its backward.

    Args:
        trace: of a step with the same regions, by their numbers; all are recomputed.
        measured: of a step with better durations.
    """
    kept = {region.number for region in measured.regions if region.recomputed is None}
    alike = with_recomputed(trace, [at for at, region in enumerate(trace.regions) if region.number not in kept])
    was_s, is_s = _seconds(alike), _seconds(measured)
    moments = []
    for part, moment in zip(_parts(trace), trace.moments, strict=True):
        factor = is_s[part] / was_s[part] if part in is_s and was_s.get(part) else 1.0
        moments.append(replace(moment, duration_s=factor * moment.duration_s))
    return replace(trace, moments=tuple(moments))


def _seconds(trace: Trace) -> Mapping[Hashable, float]:
    """Return how long each part of a step takes."""
    found: dict[Hashable, float] = defaultdict(float)
    for part, moment in zip(_parts(trace), trace.moments, strict=True):
        found[part] += moment.duration_s
    return dict(found)


def _parts(trace: Trace) -> Iterator[Hashable]:
    """Yield by moment the part of the step that it is of: a region's forward or backward, or what has its label.

    What has none belongs to the one before.
    """
    spans = [(region.forward, (region.number, "forward")) for region in trace.regions]
    spans += [(region.backward, (region.number, "backward")) for region in trace.regions]
    of_regions = {at: part for span, part in spans for at in range(*span)}
    part: Hashable = ""
    for at, moment in enumerate(trace.moments):
        part = of_regions.get(at, moment.label or part)
        yield part
