"""A step whose regions are all recomputed, as `with_recomputed` takes it: what they save is non-model data. Pure.

What was recorded has chunks for that (see `chunkmem.nn.regions`): one for what a region is recomputed from, and one for
what it saves then. Neither is there if the region is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chunkmem.trace.model import Kind, Moment, Moments, Region, Trace
from chunkmem.types import ChunkId, Role


def uncharged(trace: Trace, *, charges_non_model: bool) -> Trace:
    """Return the same step without the chunks of regions that are recomputed; their bytes are non-model data.

    Args:
        trace: of a step in which each of its regions is recomputed. What others save, whose policy is not to be
            chosen, stays as it is.
        charges_non_model: other non-model data counts, too; else it is left out.
    """
    moments = list(trace.moments)
    if not charges_non_model:
        moments = [replace(moment, non_model_peak_nbytes=0) for moment in moments]
    gone: set[int] = set()
    for region in trace.regions:
        for chunk in (region.chunk, region.inputs):
            if chunk is not None:
                own = _life_of(chunk, region, trace.moments)
                gone.update(at for at in own if trace.moments[at].chunk == chunk)
                for at in own:
                    peak_nbytes = moments[at].non_model_peak_nbytes + trace.chunk_nbytes[chunk]
                    moments[at] = replace(moments[at], non_model_peak_nbytes=peak_nbytes)
    left: list[Moment] = []
    places = []
    """By index of a moment: the new one."""
    for at, moment in enumerate(moments):
        places.append(len(left))
        if at not in gone or not left:
            left.append(moment)
            continue
        last = left[-1]
        peak_nbytes = max(last.non_model_peak_nbytes, moment.non_model_peak_nbytes)
        left[-1] = replace(last, duration_s=last.duration_s + moment.duration_s, non_model_peak_nbytes=peak_nbytes)
    places.append(len(left))
    theirs = {chunk for region in trace.regions for chunk in (region.chunk, region.inputs)}
    sizes = {chunk: nbytes for chunk, nbytes in trace.chunk_nbytes.items() if chunk not in theirs}
    first = 1 + max((chunk.group for chunk in trace.chunk_nbytes), default=0)
    regions = tuple(
        _moved(region, places, ChunkId(Role.ACTIVATION, first + index), _saved_nbytes(region, trace))
        for index, region in enumerate(trace.regions)
    )
    return replace(trace, moments=tuple(left), chunk_nbytes=sizes, regions=regions)


def _life_of(chunk: ChunkId, region: Region, moments: Sequence[Moment]) -> range:
    """Return the moments from a chunk's CREATE to its CONSUME; other calls of the same region may have it, too."""
    start = region.forward[1] if chunk == region.inputs else region.backward[0]
    own = [at for at in range(start, len(moments)) if moments[at].chunk == chunk]
    stop = next((at for at in own if moments[at].kind is Kind.CONSUME), len(moments) - 1)
    return range(own[0] if own else stop, stop + 1)


def _saved_nbytes(region: Region, trace: Trace) -> int:
    return sum(trace.chunk_nbytes[chunk] for chunk in (region.chunk, region.inputs) if chunk is not None)


def _moved(region: Region, places: Sequence[int], chunk: ChunkId, nbytes: int) -> Region:
    def moved(span: Moments) -> Moments:
        return places[span[0]], places[span[1]]

    again = None if region.recomputed is None else moved(region.recomputed)
    forward, backward = moved(region.forward), moved(region.backward)
    return Region(region.name, chunk, nbytes, forward, backward, again, number=region.number)
