"""What a user is told when room cannot be made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
    chunks: Iterable[Chunk],
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
    chunks = tuple(chunks)
    cap, below_cap = pools[tier].ledger.cap_nbytes, pools[below].ledger.cap_nbytes
    needed = cap + shortage.here_nbytes
    wanted = f"{reader}: {format_nbytes(chunk.nbytes)} more needed"
    for_all = enough_for_all(each.nbytes for each in chunks)
    if below_cap == 0:
        enough = max(needed, for_all)
        return _error(
            f"{wanted} for {chunk.label}, and {format_nbytes(chunk.nbytes - shortage.here_nbytes)} of "
            f"{format_nbytes(cap)} RAM is left; raise memory.host (or client.mem_tracer.overall_cpu_mem_ratio) to at "
            f"least {_exact(needed)}{_also(needed, enough)}",
            (tier, needed, cap, enough),
        )
    if shortage.below_nbytes is not None:
        below_needed = below_cap + shortage.below_nbytes
        enough = max(below_needed, for_all)
        return _error(
            f"{wanted} on {tier.name} for {chunk.label}, but what would leave it finds no room on {below.name}, which "
            f"is {format_nbytes(shortage.below_nbytes)} short; raise {cap_key(below)} from "
            f"{format_nbytes(below_cap)} to {_exact(below_needed)}{_also(below_needed, enough)}, or "
            f"{cap_key(tier)} from {format_nbytes(cap)} to {format_nbytes(needed)}",
            (below, below_needed, below_cap, enough),
        )
    enough = max(needed, _enough_for_access(chunks) if tier is Tier.DEVICE else for_all)
    others = ""
    if meter is not None and (now_nbytes := meter.now_nbytes):
        needed, enough = needed + now_nbytes, enough + max(now_nbytes, meter.highest_nbytes)
        others = f" next to {format_nbytes(now_nbytes)} of activations"
    return _error(
        f"{wanted} on {tier.name} for {chunk.label}, only {format_nbytes(chunk.nbytes - shortage.here_nbytes)} can be "
        f"made free ({format_nbytes(pinned_nbytes)} in use{others}){_advice(holders)} raise {cap_key(tier)} from "
        f"{format_nbytes(cap)} to at least {_exact(needed)}{_also(needed, enough, later=bool(others))}, or lower "
        "default_chunk_size",
        (tier, needed, cap, enough),
    )


def _error(text: str, caps: tuple[Tier, int, int, int]) -> CapacityError:
    tier, needed, cap, enough = caps
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


def _enough_for_access(chunks: Sequence[Chunk]) -> int:
    """Return a cap on DEVICE, in bytes, that no access of a step passes: all weights, and one chunk more.

    What is pinned are weights, and while a gradient lands its chunk. Updates run on HOST where DEVICE has no room.
    """
    return sum(chunk.nbytes for chunk in chunks if chunk.id.role.kind.is_weights) + max(
        chunk.nbytes for chunk in chunks
    )


def _also(needed_nbytes: int, enough_nbytes: int, *, later: bool = False) -> str:
    if later:
        return f" now; {_exact(enough_nbytes)} is certain to do for all chunks, unless activations grow"
    if enough_nbytes == needed_nbytes:
        return ", which is enough for every step"
    return f" now, and later accesses may need more; {_exact(enough_nbytes)} is certain to do"
