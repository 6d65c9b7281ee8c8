"""What there is to decide about the traffic of a trace: the gaps between uses on DEVICE, and what each costs.

[Note: The interval program] A chunk is *in use* on DEVICE in the moments that hold, create, write or update it.
Between two uses, cyclically, lies a *gap*. A gap is kept, and then takes the chunk's bytes in each of its moments; or
it is not, and then the next use costs one copy H2D, and HOST needs the newest version. If that was written on DEVICE,
HOST gets it by one copy D2H for the whole *dirty epoch*, from one write to the next, however many of its gaps are not
kept. Content that is consumed, or written again from nothing, is worth no copy. An update on HOST reads there what
DEVICE wrote (D2H), and what it writes DEVICE has to fetch again (H2D): both are certain, whatever is kept.

    moment     0 1 2 3 4 5 6 7 8 9        budget of moment i: in use + kept gaps over i <= B_i
    chunk a    W W . . . R . . R .        moved = sum of H2D over gaps not kept
    epoch        └──────────────────>           + sum of D2H over epochs with a gap not kept
    gaps           (2-4)   (6-7) (9)      the last one leads to moment 0 and costs nothing if that is a CREATE

Nothing here knows how plans are made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

from benchmarks.traffic.uses import chunks_in_use, chunks_written
from chunkmem.data.errors import TraceError
from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import ChunkId, Role, Tier


@dataclass(frozen=True, slots=True)
class Gap:
    """Moments between two uses of a chunk on DEVICE whose content the later one reads."""

    chunk: ChunkId
    nbytes: int
    """It takes on DEVICE if kept; H2D moves as many if not."""
    first: int
    """Its first moment."""
    num_moments: int
    """At least 1; it may pass the trace's end."""
    epoch: int | None
    """Index of the dirty epoch that has to be written back if the gap is not kept; None: HOST has the content."""


@dataclass(frozen=True)
class Problem:
    """What there is to decide, and what is certain."""

    gaps: tuple[Gap, ...]
    epoch_nbytes: tuple[int, ...]
    """What the write-back of each dirty epoch moves."""
    certain_nbytes: int
    """Moved whatever is kept."""
    unit_nbytes: int
    """Divides the size of every chunk that is ever in use, and so every sum of them. To round the room beside used
    chunks down to it excludes no plan and strengthens the relaxation."""


@dataclass
class _Walk:
    """One chunk on its way through two iterations; what is seen in the first one prepares the second."""

    chunk: ChunkId
    since: int | None = None
    """First moment after the last use."""
    dirty: int | None = None
    """Moment of the write that HOST may not have."""
    gap_dirty: int | None = None
    """The same as the gap began."""
    is_stale: bool = False
    """HOST wrote since the last use."""
    is_consumed: bool = False
    gaps: list[tuple[int, int, int | None]] = field(default_factory=list)
    """First moment, number of moments, moment of the write."""
    forced: set[int] = field(default_factory=set)
    """Writes that an update on HOST reads."""
    num_refetched: int = 0

    def begin_use(self, trace: Trace, at: int) -> None:
        num_moments = len(trace.moments)
        moment = trace.moments[at % num_moments]
        if self.since is None or moment.kind is Kind.CREATE:
            pass
        elif self.is_consumed:
            raise TraceError(f"moment {at % num_moments} ({moment}) reads {self.chunk}, which is consumed")
        elif at >= num_moments and self.is_stale:
            self.num_refetched += 1
        elif at >= num_moments:
            self.gaps.append((self.since % num_moments, at - self.since, self.gap_dirty))

    def end_use(self, at: int) -> None:
        self.since, self.gap_dirty = at, self.dirty
        self.is_stale = self.is_consumed = False

    def update_on_host(self, at: int) -> None:
        if self.dirty is not None:
            self.forced.add(self.dirty)
        # No later gap pays for a write that is forced, so it may stay the last one.
        self.is_stale = self.is_stale or self.chunk.role is not Role.GRAD


def derive(trace: Trace, update_tiers: Mapping[int, Tier]) -> Problem:
    """Derive the gaps, the dirty epochs and what is certain. See [Note: The interval program].

    Raises:
        TraceError: an update on HOST writes what DEVICE is using, or consumed content is read.
    """
    in_use = chunks_in_use(trace, update_tiers)
    gaps: list[Gap] = []
    epochs: list[int] = []
    certain = 0
    chunks = sorted(set().union(*in_use), key=lambda chunk: (chunk.group, chunk.role.value))
    for chunk in chunks:
        walk, nbytes = _follow(trace, chunk, in_use, update_tiers), trace.chunk_nbytes[chunk]
        certain += nbytes * (walk.num_refetched + len(walk.forced))
        number: dict[int, int] = {}
        for first, num_moments, written in walk.gaps:
            epoch = None
            if written is not None and written not in walk.forced:
                if written not in number:
                    number[written] = len(epochs)
                    epochs.append(nbytes)
                epoch = number[written]
            gaps.append(Gap(chunk, nbytes, first, num_moments, epoch))
    return Problem(
        gaps=tuple(gaps),
        epoch_nbytes=tuple(epochs),
        certain_nbytes=certain,
        unit_nbytes=gcd(*(trace.chunk_nbytes[chunk] for chunk in chunks)) or 1,
    )


def _follow(
    trace: Trace, chunk: ChunkId, in_use: Sequence[frozenset[ChunkId]], update_tiers: Mapping[int, Tier]
) -> _Walk:
    num_moments = len(trace.moments)
    walk = _Walk(chunk)
    was_used = chunk in in_use[-1]
    for at in range(2 * num_moments):
        index = at % num_moments
        moment, is_used = trace.moments[index], chunk in in_use[index]
        if is_used and not was_used:
            walk.begin_use(trace, at)
        if was_used and not is_used:
            walk.end_use(at)
        if moment.kind is Kind.UPDATE and update_tiers[moment.chunk.group] is Tier.HOST:
            if chunk in trace.update(moment.chunk.group).chunks:
                if is_used and chunk.role is not Role.GRAD:
                    raise TraceError(f"moment {index} ({moment}) updates {chunk} on HOST while DEVICE uses it")
                walk.update_on_host(index)
        elif chunk in chunks_written(trace, index):
            walk.dirty = index
        elif moment.kind is Kind.CONSUME and moment.chunk == chunk:
            walk.is_consumed = True
        was_used = is_used
    return walk
