"""The part of a step that one rank of several has: chunks are owned in turn, and whole only while they are in use.

Weights are exchanged chunk by chunk: one that is held is there as a whole, and a gradient is whole from its beginning
until its last addition, when it is reduced. At other times a rank has its own share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from chunkmem.layout.spec import ALIGN_NBYTES
from chunkmem.trace.model import Kind, Moment, Trace
from chunkmem.types import ChunkId, Role


def share_of(trace: Trace, world: int, *, slab_nbytes: int) -> Trace:
    """Return the trace of the rank with the most chunks, of `world` ranks that each have the batch of the trace.

    What is whole for a while beside the share counts as bytes beside the chunks.
    """
    if world == 1:
        return trace
    num_slabs = sum(nbytes // slab_nbytes for chunk, nbytes in trace.chunk_nbytes.items() if chunk.role is Role.PARAM)
    owned = -(-max(1, num_slabs) // world) / max(1, num_slabs)
    shares = {chunk: _aligned(nbytes * owned) for chunk, nbytes in trace.chunk_nbytes.items()}
    beside = {chunk: nbytes - shares[chunk] for chunk, nbytes in trace.chunk_nbytes.items()}
    return replace(trace, chunk_nbytes=shares, moments=tuple(_gathered(trace, beside)))


def exchanged_nbytes(trace: Trace, world: int) -> float:
    """Return the bytes that each rank sends in a step: weights for every use, gradients once, all but its own part."""
    uses = (m for m in trace.moments if m.kind is Kind.HOLD or (m.kind is Kind.CREATE and m.chunk.role is Role.GRAD))
    return sum(trace.chunk_nbytes[moment.chunk] for moment in uses) * (world - 1) / world


def _gathered(trace: Trace, beside: dict[ChunkId, int]) -> Iterator[Moment]:
    last_addition = {m.chunk: at for at, m in enumerate(trace.moments) if m.kind in (Kind.CREATE, Kind.WRITE)}
    whole_nbytes = 0
    for at, moment in enumerate(trace.moments):
        extra = beside[moment.chunk]
        if moment.kind is Kind.HOLD or moment.kind is Kind.CREATE:
            whole_nbytes += extra
        yield replace(moment, non_model_peak_nbytes=moment.non_model_peak_nbytes + whole_nbytes)
        if moment.kind is Kind.RELEASE or last_addition.get(moment.chunk) == at:
            whole_nbytes -= extra


def _aligned(nbytes: float) -> int:
    return max(1, -(-int(nbytes) // ALIGN_NBYTES)) * ALIGN_NBYTES
