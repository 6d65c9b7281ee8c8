"""What a user is told when room cannot be made."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from chunkmem.errors import CapacityError
from chunkmem.plan.demand import Shortage
from chunkmem.plan.machine import cap_key
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.meter import NonModelMeter
from chunkmem.runtime.pool import SlabPool
from chunkmem.sizes import format_nbytes
from chunkmem.types import Tier


def shortage_error(
    chunk: Chunk,
    tier: Tier,
    reader: object,
    shortage: Shortage,
    *,
    below: Tier,
    pools: Mapping[Tier, SlabPool],
    chunks: Collection[Chunk],
    pinned_nbytes: int,
    meter: NonModelMeter | None = None,
    holders: Sequence[str] = (),
) -> CapacityError:
    """Return the error that names what needs `chunk` on `tier`, both numbers, and the cap that would do.

    Args:
        shortage: what is missing, where.
        below: where what leaves `tier` goes.
        pools: by tier; their ledgers know the caps.
        chunks: all there are, with content or without.
        pinned_nbytes: in use on `tier`.
        meter: of what else the cap on `tier` covers: a cap that does has room for what is there now, and one that is
            certain to do, for the most that was there so far.
        holders: parameters whose memory somebody keeps: a view, `.data`, an array, a graph that was not run.
    """
    cap, below_cap = pools[tier].ledger.cap_nbytes, pools[below].ledger.cap_nbytes
    needed = cap + shortage.here_nbytes
    wanted = f"{reader}: {format_nbytes(chunk.nbytes)} more needed"
    for_all = enough_for_all(each.nbytes for each in chunks)
    may_grow = any(each.id.role.kind.is_of_call for each in chunks)
    free = format_nbytes(chunk.nbytes - shortage.here_nbytes)
    if below_cap == 0:
        enough = max(needed, for_all)
        text = (
            f"{wanted} for {chunk.label}, and {free} of {format_nbytes(cap)} RAM is left; raise memory.host (or "
            f"client.mem_tracer.overall_cpu_mem_ratio) to at least {_exact(needed)}{_also(needed, enough, may_grow)}"
        )
    elif shortage.below_nbytes is not None:
        below_needed = below_cap + shortage.below_nbytes
        enough = max(below_needed, for_all)
        text = (
            f"{wanted} on {tier.name} for {chunk.label}, but what would leave it finds no room on {below.name}, which "
            f"is {format_nbytes(shortage.below_nbytes)} short; raise {cap_key(below)} from "
            f"{format_nbytes(below_cap)} to {_exact(below_needed)}{_also(below_needed, enough, may_grow)}, "
            f"or {cap_key(tier)} from {format_nbytes(cap)} to {format_nbytes(needed)}"
        )
        tier, needed, cap = below, below_needed, below_cap
    else:
        enough = max(needed, _enough_for_access(chunks) if tier is Tier.DEVICE else for_all)
        others = ""
        if meter is not None and (now_nbytes := meter.now_nbytes):
            needed, enough = needed + now_nbytes, enough + max(now_nbytes, meter.highest_nbytes)
            others, may_grow = f" next to {format_nbytes(now_nbytes)} of activations", True
        text = (
            f"{wanted} on {tier.name} for {chunk.label}, only {free} can be made free "
            f"({format_nbytes(pinned_nbytes)} in use{others}){_advice(holders)} raise {cap_key(tier)} from "
            f"{format_nbytes(cap)} to at least {_exact(needed)}{_also(needed, enough, may_grow)}, or lower "
            "default_chunk_size"
        )
    return CapacityError(text, needed_nbytes=needed, cap_nbytes=cap, enough_nbytes=enough, tier=tier)


def _exact(nbytes: int) -> str:
    return f"{format_nbytes(nbytes)} ({nbytes} bytes)"


def _advice(holders: Sequence[str]) -> str:
    if not holders:
        return ";"
    kept = ", ".join(holders[:3]) + (f" and {len(holders) - 3} more" if len(holders) > 3 else "")
    return f". The memory of {kept} is kept by a tensor, an array or a graph that is alive: delete it, or"


def enough_for_all(chunk_nbytes: Iterable[int]) -> int:
    """Return a cap on HOST, in bytes, with which anything can leave DEVICE at any time: HOST holds all chunks."""
    return sum(chunk_nbytes)


def _enough_for_access(chunks: Collection[Chunk]) -> int:
    """Return a cap on DEVICE, in bytes, that no access of a step passes: all weights, and one chunk more.

    What is pinned are weights, and while a gradient lands its chunk. Updates run on HOST where DEVICE has no room.
    What is kept of calls for backward may be pinned, too, and counts as far as there is any by now.
    """
    kept = (each.nbytes for each in chunks if each.id.role.kind.is_weights or each.id.role.kind.is_of_call)
    return sum(kept) + max(each.nbytes for each in chunks)


def _also(needed_nbytes: int, enough_nbytes: int, may_grow: bool) -> str:
    if may_grow:
        return f" now; {_exact(enough_nbytes)} is certain to do for all chunks, unless activations grow"
    if enough_nbytes == needed_nbytes:
        return ", which is enough for every step"
    return f" now, and later accesses may need more; {_exact(enough_nbytes)} is certain to do"
