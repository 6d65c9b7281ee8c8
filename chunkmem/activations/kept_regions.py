"""A step that recomputes all of its regions, as it would be if it kept some of them. Pure.

A recomputed region has two chunks: what it is recomputed from, and what its second forward saves. A kept one has a
chunk from the end of forward on, and no second forward:

    recomputed    forward, CREATE inputs  ...  HOLD inputs, forward again, CREATE, HOLD   backward   CONSUME both
    kept          forward, CREATE         ...                                      HOLD   backward   CONSUME

A forward may have no moments, if its weights are held all along: then it is part of the moment before, as the beginning
of each second forward is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from chunkmem.data.trace import Kind, Moment, Region, Trace
from chunkmem.data.types import ChunkId, Role

_OF_READING = (Kind.HOLD, Kind.EXCHANGE, Kind.ARRIVE, Kind.RELEASE)


def with_kept(trace: Trace, kept: Mapping[int, int]) -> Trace:
    """Return the trace of the same step if exactly these regions were kept; it names no regions.

    Durations and peaks are those recorded, and what forward saves until its end is non-model data, in proportion to the
    time that has passed. What the step really takes has to be recorded.

    Args:
        trace: of a step that recomputes all of its regions, as it was recorded.
        kept: by index into `trace.regions`, the bytes of the chunk of a region that is kept; 0: it has none.
    """
    moments, gone = list(trace.moments), set[int]()
    created: dict[int, list[Moment]] = defaultdict(list)
    """Moments to be inserted before an index."""
    sizes = dict(trace.chunk_nbytes)
    first_group = 1 + max((chunk.group for chunk in sizes), default=0)
    for index, nbytes in kept.items():
        region, chunk = trace.regions[index], ChunkId(Role.ACTIVATION, first_group + index)
        assert region.recomputed is not None
        start, stop = region.recomputed
        own = list(_life(trace.moments, region.chunk, stop))
        gone.update(_read_in(trace.moments, range(start, stop)), own[:1] if nbytes else own)
        gone.update(_life(trace.moments, region.inputs, region.forward[1]))
        for at, seconds in (*_again(trace, region), (stop, 0.0)):
            moment = moments[at]
            peak_nbytes = 0 if at in gone else moment.non_model_peak_nbytes
            if at >= start:  # what is left of it is part of backward, as the CREATE is
                peak_nbytes = min(peak_nbytes, trace.moments[stop].non_model_peak_nbytes)
            duration_s = max(0.0, moment.duration_s - seconds)
            moments[at] = replace(moment, duration_s=duration_s, non_model_peak_nbytes=peak_nbytes)
        for at in own:
            moments[at] = replace(moments[at], chunk=chunk)
        if nbytes:
            sizes[chunk] = nbytes
            # Of calls on HOST alone there are no moments: they are part of the one before.
            left_nbytes = trace.moments[max(region.forward[1] - 1, 0)].non_model_peak_nbytes
            made = Moment(Kind.CREATE, chunk, f"{region.name} forward", 0.0, left_nbytes)
            created[region.forward[1]].append(made)
        forward = forward_of(region) if nbytes else range(0)
        forward_s, done_s = sum(trace.moments[at].duration_s for at in forward), 0.0
        for at in forward:
            done_s += trace.moments[at].duration_s
            saved_nbytes = int(nbytes * done_s / forward_s) if forward_s else nbytes
            moments[at] = _charged(moments[at], moments[at].non_model_peak_nbytes + saved_nbytes)
    left: list[Moment] = []
    for at, moment in enumerate(moments):
        left += created[at]
        if at in gone and left:
            left[-1] = _charged(left[-1].longer(moment.duration_s), moment.non_model_peak_nbytes)
        else:
            left.append(moment)
    used = {moment.chunk for moment in left}
    sizes = {chunk: nbytes for chunk, nbytes in sizes.items() if not chunk.role.kind.is_of_call or chunk in used}
    return replace(trace, chunk_nbytes=sizes, moments=tuple(left), regions=())


def forward_of(region: Region) -> range:
    """Return the moments in which a region's forward runs."""
    start, stop = region.forward
    return range(max(0, min(start, stop - 1)), stop)


def recomputation_of(region: Region) -> range:
    """Return the moments in which a region is recomputed; where it has a chunk of inputs, that is held in the first."""
    assert region.recomputed is not None
    start, stop = region.recomputed
    return range(start - (region.inputs is not None), stop)


def recomputation_s(trace: Trace, region: Region) -> float:
    """Return the seconds that it takes to recompute a region."""
    return sum(seconds for _, seconds in _again(trace, region))


def _again(trace: Trace, region: Region) -> Iterator[tuple[int, float]]:
    """Yield the moments in which a region is recomputed, with the seconds of that."""
    span = recomputation_of(region)
    yield from ((at, trace.moments[at].duration_s) for at in span)
    if region.inputs is None and span.start:
        # It began in the moment before, nobody knows when, and is taken to be as long as the first forward.
        forward_s, again_s = (sum(trace.moments[at].duration_s for at in each) for each in (forward_of(region), span))
        before_s = trace.moments[span.start - 1].duration_s
        yield span.start - 1, min(before_s, max(0.0, forward_s - again_s))


def _life(moments: Sequence[Moment], chunk: ChunkId | None, start: int) -> Iterator[int]:
    """Yield the moments of a chunk of activations until it is used up; later ones are of another call."""
    for at in range(start, len(moments)):
        if moments[at].chunk == chunk:
            yield at
            if moments[at].kind is Kind.CONSUME:
                return


def _read_in(moments: Sequence[Moment], span: Iterable[int]) -> set[int]:
    """Return the moments of a span in which weights are held and released."""
    found: set[int] = set()
    begun: dict[ChunkId, list[int]] = {}
    for at in span:
        kind, chunk = moments[at].kind, moments[at].chunk
        if chunk.role.kind.is_of_call or kind not in _OF_READING:
            continue
        if kind is Kind.HOLD:
            begun[chunk] = []
        if chunk in begun:
            begun[chunk].append(at)
            if kind is Kind.RELEASE:
                found.update(begun.pop(chunk))
    return found


def _charged(moment: Moment, nbytes: int) -> Moment:
    return replace(moment, non_model_peak_nbytes=max(moment.non_model_peak_nbytes, nbytes))
