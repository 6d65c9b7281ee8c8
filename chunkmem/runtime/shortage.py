"""What a user is told when room cannot be made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from chunkmem.errors import CapacityError
from chunkmem.plan.demand import Shortage
from chunkmem.runtime.pool import SlabPool
from chunkmem.runtime.store import Chunk
from chunkmem.sizes import format_nbytes
from chunkmem.types import Role, Tier


def shortage_error(
    chunk: Chunk,
    tier: Tier,
    reader: object,
    shortage: Shortage,
    *,
    pools: Mapping[Tier, SlabPool],
    chunks: Iterable[Chunk],
    pinned_nbytes: int,
    holders: Sequence[str] = (),
) -> CapacityError:
    """Return the error that names what needs `chunk` on `tier`, both numbers, and the cap that would do.

    Args:
        shortage: what is missing, where.
        pools: by tier; their ledgers know the caps.
        chunks: all there are, with content or without.
        pinned_nbytes: in use on `tier`.
        holders: parameters whose memory somebody keeps: a view, `.data`, an array, a graph that was not run.
    """
    chunks = tuple(chunks)
    cap = pools[tier].ledger.cap_nbytes
    needed = cap + shortage.here_nbytes
    other = Tier.HOST if tier is Tier.DEVICE else Tier.DEVICE
    other_cap = pools[other].ledger.cap_nbytes
    if other_cap == 0:
        enough = max(needed, enough_for_all(each.nbytes for each in chunks))
        return CapacityError(
            f"{reader}: {format_nbytes(chunk.nbytes)} more needed for {chunk.label}, and "
            f"{format_nbytes(chunk.nbytes - shortage.here_nbytes)} of {format_nbytes(cap)} RAM is left; raise "
            "memory.host (or client.mem_tracer.overall_cpu_mem_ratio) to at least "
            f"{format_nbytes(needed)} ({needed} bytes){_also(needed, enough)}",
            needed_nbytes=needed,
            cap_nbytes=cap,
            enough_nbytes=enough,
        )
    if shortage.there_nbytes is not None:
        other_needed = other_cap + shortage.there_nbytes
        enough = max(other_needed, enough_for_all(each.nbytes for each in chunks))
        return CapacityError(
            f"{reader}: {format_nbytes(chunk.nbytes)} more needed on {tier.name} for {chunk.label}, but what would "
            f"leave it finds no room on {other.name}, which is {format_nbytes(shortage.there_nbytes)} short; "
            f"raise memory.{other.value} from {format_nbytes(other_cap)} to {format_nbytes(other_needed)} "
            f"({other_needed} bytes){_also(other_needed, enough)}, or memory.{tier.value} from {format_nbytes(cap)} to "
            f"{format_nbytes(needed)}",
            needed_nbytes=other_needed,
            cap_nbytes=other_cap,
            enough_nbytes=enough,
        )
    kept = ", ".join(holders[:3]) + (f" and {len(holders) - 3} more" if len(holders) > 3 else "")
    advice = (
        f". The memory of {kept} is kept by a tensor, an array or a graph that is alive: delete it, or" if kept else ";"
    )
    of_tier = _enough_for_access(chunks) if tier is Tier.DEVICE else enough_for_all(each.nbytes for each in chunks)
    enough = max(needed, of_tier)
    return CapacityError(
        f"{reader}: {format_nbytes(chunk.nbytes)} more needed on {tier.name} for {chunk.label}, only "
        f"{format_nbytes(chunk.nbytes - shortage.here_nbytes)} can be made free "
        f"({format_nbytes(pinned_nbytes)} in use){advice} raise memory.{tier.value} from {format_nbytes(cap)} "
        f"to at least {format_nbytes(needed)} ({needed} bytes){_also(needed, enough)}, or lower default_chunk_size",
        needed_nbytes=needed,
        cap_nbytes=cap,
        enough_nbytes=enough,
    )


def enough_for_all(chunk_nbytes: Iterable[int]) -> int:
    """Return a cap on HOST, in bytes, with which anything can leave DEVICE at any time: HOST holds all chunks."""
    return sum(chunk_nbytes)


def _enough_for_access(chunks: Sequence[Chunk]) -> int:
    """Return a cap on DEVICE, in bytes, that no access of a step passes: all weights, and one chunk more.

    What is pinned are weights, and while a gradient lands its chunk. Updates run on HOST where DEVICE has no room.
    """
    return sum(chunk.nbytes for chunk in chunks if chunk.id.role is Role.PARAM) + max(chunk.nbytes for chunk in chunks)


def _also(needed_nbytes: int, enough_nbytes: int) -> str:
    if enough_nbytes == needed_nbytes:
        return ", which is enough for every step"
    enough = f"{format_nbytes(enough_nbytes)} ({enough_nbytes} bytes)"
    return f" now, and later accesses may need more; {enough} is certain to do"
