"""What demand paging needs to know of a trace: which chunks are in use on DEVICE, and what room that leaves.

Nothing here knows how plans are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from chunkmem.data.errors import CapacityError
from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import ChunkId, Role, Tier


def device_budgets(trace: Trace, cap_nbytes: int, *, charges_non_model: bool) -> tuple[int, ...]:
    """Return what chunks may take on DEVICE in each moment, at most."""
    return tuple(cap_nbytes - charges_non_model * moment.non_model_peak_nbytes for moment in trace.moments)


def chunks_in_use(trace: Trace, update_tiers: Mapping[int, Tier]) -> tuple[frozenset[ChunkId], ...]:
    """Return the chunks that have to be on DEVICE in each moment."""
    held: set[ChunkId] = set()
    in_use = []
    for moment in trace.moments:
        touched: tuple[ChunkId, ...] = ()
        if moment.kind is Kind.HOLD:
            held.add(moment.chunk)
        elif moment.kind is Kind.RELEASE:
            held.remove(moment.chunk)
        elif moment.kind in (Kind.CREATE, Kind.WRITE):
            touched = (moment.chunk,)
        elif moment.kind is Kind.UPDATE and update_tiers[moment.chunk.group] is Tier.DEVICE:
            touched = trace.update(moment.chunk.group).chunks
        in_use.append(frozenset((*held, *touched)))
    return tuple(in_use)


def rooms_beside(trace: Trace, budgets: Sequence[int], update_tiers: Mapping[int, Tier]) -> tuple[int, ...]:
    """Return what each moment's budget leaves for chunks that are not in use, in bytes.

    Raises:
        CapacityError: what a moment uses does not fit; the bytes it names are that moment's.
    """
    rooms = []
    for moment, budget, used in zip(trace.moments, budgets, chunks_in_use(trace, update_tiers), strict=True):
        nbytes = sum(trace.chunk_nbytes[chunk] for chunk in used)
        if nbytes > budget:
            raise CapacityError(
                f"{moment} uses {nbytes} bytes on DEVICE and has {budget}; raise the cap by {nbytes - budget} bytes",
                needed_nbytes=nbytes,
                cap_nbytes=budget,
            )
        rooms.append(budget - nbytes)
    return tuple(rooms)


def chunks_written(trace: Trace, index: int) -> tuple[ChunkId, ...]:
    """Return the chunks that moment number `index` writes, on whatever tier."""
    moment = trace.moments[index]
    if moment.kind is Kind.UPDATE:
        return tuple(c for c in trace.update(moment.chunk.group).chunks if c.role is not Role.GRAD)
    return (moment.chunk,) if moment.kind in (Kind.CREATE, Kind.WRITE) else ()
