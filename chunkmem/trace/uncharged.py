"""A step whose regions are all recomputed, as `with_recomputed` takes it: what they save is non-model data. Pure.

What was recorded has two chunks for a region (see `chunkmem.nn.regions`): what it is recomputed from, and what it saves
then. The first stays a chunk, which may be offloaded; `with_recomputed` drops it where the region is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from chunkmem.trace.model import Kind, Moment, Moments, Region, Trace
from chunkmem.types import ChunkId, Role

_UNKNOWN: Mapping[int, int] = MappingProxyType({})


def uncharged(trace: Trace, *, charges_non_model: bool, kept_nbytes: Mapping[int, int] = _UNKNOWN) -> Trace:
    """Return the same step without the chunks that recomputed regions fill; their bytes are non-model data.

    Args:
        trace: of a step in which each of its regions is recomputed. What others save, whose policy is not to be
            chosen, stays as it is.
        charges_non_model: other non-model data counts, too; else it is left out.
        kept_nbytes: what regions have in their chunks where they are kept, and so are those next to them, by number of
            the call, as far as that is known. Where non-model data does not count, `shared_bytes` makes use of it;
            else what they are recomputed from comes on top, which may be an output that a kept region before has saved,
            too: then it is in neither's chunk. Where nothing is known, they are taken to save all of both.
    """
    moments = list(trace.moments)
    if not charges_non_model:
        moments = [replace(moment, non_model_peak_nbytes=0) for moment in moments]
    gone: set[int] = set()
    for region in trace.regions:
        own = _life_of(region, trace.moments)
        gone.update(at for at in own if trace.moments[at].chunk == region.chunk)
        for at in own:
            peak_nbytes = moments[at].non_model_peak_nbytes + trace.chunk_nbytes[region.chunk]
            moments[at] = replace(moments[at], non_model_peak_nbytes=peak_nbytes)
    left: list[Moment] = []
    places = []
    """By index of a moment: the new one."""
    for at, moment in enumerate(moments):
        places.append(len(left))
        if at not in gone or not left:
            left.append(moment)
            continue
        peak_nbytes = moment.non_model_peak_nbytes
        left[-1] = left[-1].longer(moment.duration_s, moment.entered, peak_nbytes=peak_nbytes)
    places.append(len(left))
    own_chunks = {region.chunk for region in trace.regions}
    sizes = {chunk: nbytes for chunk, nbytes in trace.chunk_nbytes.items() if chunk not in own_chunks}
    first = 1 + max((chunk.group for chunk in trace.chunk_nbytes), default=0)

    def moved(span: Moments) -> Moments:
        return places[span[0]], places[span[1]]

    regions = tuple(
        replace(
            region,
            chunk=ChunkId(Role.ACTIVATION, first + index),
            nbytes=_kept_nbytes(region, trace, kept_nbytes.get(region.number) if charges_non_model else None),
            forward=moved(region.forward),
            backward=moved(region.backward),
            recomputed=None if region.recomputed is None else moved(region.recomputed),
        )
        for index, region in enumerate(trace.regions)
    )
    return replace(trace, moments=tuple(left), chunk_nbytes=sizes, regions=regions)


def _life_of(region: Region, moments: Sequence[Moment]) -> range:
    """Return the moments in which a region's own chunk has content; other calls of the same module may fill it, too."""
    own = [at for at in range(region.backward[0], len(moments)) if moments[at].chunk == region.chunk]
    stop = next((at for at in own if moments[at].kind is Kind.CONSUME), len(moments) - 1)
    return range(own[0] if own else stop, stop + 1)


def _kept_nbytes(region: Region, trace: Trace, known_nbytes: int | None) -> int:
    inputs_nbytes = 0 if region.inputs is None else trace.chunk_nbytes[region.inputs]
    most_nbytes = trace.chunk_nbytes[region.chunk] + inputs_nbytes
    return most_nbytes if known_nbytes is None else min(most_nbytes, known_nbytes + inputs_nbytes)
