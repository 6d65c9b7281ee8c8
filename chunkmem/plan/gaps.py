"""When chunks are needed on DEVICE, and the gaps between those uses: what there is to decide in a plan. Pure.

A use is a run of moments in which a chunk has to be on DEVICE. Between two uses it may stay (the gap is *kept*: it
takes room in every moment of the gap) or leave (its bytes come back later, and if DEVICE alone has the newest version
they are written to the tier below first). A step is a loop body, so the gap after a chunk's last use reaches into the
next iteration.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from chunkmem.data.errors import CapacityError, PlanError
from chunkmem.data.sizes import format_nbytes
from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import ChunkId, Tier
from chunkmem.plan.machine import Machine
from chunkmem.plan.semantics import arrives


class After(enum.Enum):
    """What becomes of a chunk's content in the gap after a use."""

    LIVES = "lives"
    """The next use reads it: keeping it saves a copy."""
    RENEWED = "renewed"
    """The tier below makes a new version of it, which has to be fetched: keeping it saves nothing."""
    DIES = "dies"
    """The next use begins new content."""

    __hash__ = object.__hash__


@dataclass(slots=True)
class Use:
    """Moments `[start, stop)` in which a chunk is on DEVICE."""

    start: int
    stop: int
    creates: bool = False
    """It begins new content."""
    writes: bool = False
    """It changes the content, so the copy below is no longer the newest."""


@dataclass
class Life:
    """Of one chunk on a tier."""

    uses: list[Use] = field(default_factory=list)
    renewed: list[int] = field(default_factory=list)
    """Moments at which the tier below writes a new version."""
    ends: list[int] = field(default_factory=list)
    """Moments at which the tier below needs the content, or it is used up where no tier above has it."""


@dataclass(slots=True)
class Gap:
    """What lies between a use of a chunk and its next one."""

    chunk: int
    """Index into `Problem.chunks`."""
    use: int
    """Index of the use before it, among the chunk's."""
    start: int
    stop: int
    """Moments `[start, stop)`; `start` lies in the trace, `stop` past its end if the gap reaches into the next
    iteration."""
    after: After
    ready: int
    """First moment in whose list a fetch for the next use may stand."""
    needed_below: int | None
    """The tier below needs the content at this moment: the update of a gradient there, or that it is used up without
    one."""
    epoch: int
    """Gaps of one content version of a chunk share it; -1 if the tier below always has the newest version."""


@dataclass(frozen=True)
class Problem:
    """A trace with the tier of each update, and what is free to decide."""

    trace: Trace
    update_tiers: Mapping[int, Tier]
    chunks: tuple[ChunkId, ...]
    nbytes: tuple[int, ...]
    uses: tuple[tuple[Use, ...], ...]
    """By chunk: its uses in order; empty if DEVICE never needs the chunk."""
    gaps: tuple[Gap, ...]
    """Gaps of all chunks: those of one chunk are consecutive, one after each of its uses."""
    first_gap: tuple[int, ...]
    """By chunk: the index of its first gap in `gaps`."""
    required: tuple[int, ...]
    """By moment: bytes of the chunks in use, and of those in gaps that are always kept."""
    durations_s: tuple[float, ...]
    """By moment: seconds of computing."""
    always_kept: frozenset[int] = frozenset()
    """Indices of gaps that are not free to decide: the content of resident groups never leaves DEVICE."""
    tier: Tier = Tier.DEVICE
    """Tier on which the chunks are used."""
    below: Tier = Tier.HOST
    """Where they are when they are not there."""

    @cached_property
    def free_to_choose(self) -> tuple[int, ...]:
        """The gaps that cost a copy if they are not kept, and may be kept or not."""
        return tuple(at for at, gap in enumerate(self.gaps) if may_be_kept(gap) and at not in self.always_kept)

    def fetch_nbytes(self, gap: Gap) -> int:
        """Bytes that come back if the gap is not kept."""
        return 0 if gap.after is After.DIES else self.nbytes[gap.chunk]


def budgets(trace: Trace, machine: Machine, *, static_nbytes: int | None = None) -> list[int]:
    """Return the bytes that chunks may take on DEVICE in each moment.

    `static_nbytes` is a fixed share instead of what the moment leaves; the largest moment has to fit all the same.
    Without HOST it has no meaning: nothing could go elsewhere.
    """
    if not machine.charges_non_model:
        return [machine.device_nbytes] * len(trace.moments)
    left = [machine.device_nbytes - moment.non_model_peak_nbytes for moment in trace.moments]
    if static_nbytes is not None and machine.host_nbytes:
        share = max(static_nbytes, max(held_nbytes(trace), default=0))
        left = [min(share, nbytes) for nbytes in left]
    return left


def held_nbytes(trace: Trace) -> list[int]:
    """Return the bytes of chunks that are held, or written, in each moment."""
    total = 0
    held = []
    for moment in trace.moments:
        nbytes = trace.chunk_nbytes[moment.chunk]
        total += nbytes if moment.kind is Kind.HOLD else -nbytes if moment.kind is Kind.RELEASE else 0
        momentary = nbytes if moment.kind in (Kind.CREATE, Kind.WRITE) else 0
        held.append(total + momentary)
    return held


def in_use_nbytes(trace: Trace, *, charges_non_model: bool) -> list[int]:
    """Return the bytes that DEVICE holds at least in each moment: chunks in use, all updates being on HOST.

    With `charges_non_model`, non-model data counts, too.
    """
    problem = find_gaps(trace, {moment.chunk.group: Tier.HOST for moment in trace.moments})
    others = (moment.non_model_peak_nbytes if charges_non_model else 0 for moment in trace.moments)
    return [chunks + other for chunks, other in zip(problem.required, others, strict=True)]


def require_fit(problem: Problem, budget: Sequence[int], machine: Machine) -> None:
    """Check that every moment has room for the chunks in use; without HOST, also for those that live between uses.

    Raises:
        CapacityError: one has not; with the smallest cap on DEVICE that all have.
    """
    living = [gap for gap in problem.gaps if gap.after is After.LIVES]
    needed_nbytes = problem.required
    if machine.host_nbytes == 0:
        needed_nbytes = _required_nbytes(len(budget), problem.nbytes, problem.uses, living)
    short = [need - have for need, have in zip(needed_nbytes, budget, strict=True)]
    worst = max(range(len(short)), key=lambda i: (short[i], -i), default=None)
    if worst is None or short[worst] <= 0:
        return
    needed = machine.device_nbytes + short[worst]
    moment = problem.trace.moments[worst]
    activations = moment.non_model_peak_nbytes if machine.charges_non_model else 0
    raise CapacityError(
        f"moment {worst} ({moment}): {format_nbytes(needed_nbytes[worst])} of chunks are in use at once"
        + (", or there is no HOST to keep them," if needed_nbytes is not problem.required else "")
        + (f" next to {format_nbytes(activations)} of activations" if activations else "")
        + f", and DEVICE may hold {format_nbytes(machine.device_nbytes)}; raise memory.device to at least "
        f"{format_nbytes(needed)} ({needed} bytes), or lower default_chunk_size",
        needed_nbytes=needed,
        cap_nbytes=machine.device_nbytes,
    )


def find_gaps(
    trace: Trace,
    update_tiers: Mapping[int, Tier],
    *,
    one_tier: bool = False,
    resident_groups: Collection[int] = frozenset(),
) -> Problem:
    """Read uses and gaps off a trace.

    Args:
        trace: of the step.
        update_tiers: by group that is updated.
        one_tier: there is no HOST, so chunks that nothing uses are on DEVICE all the time.
        resident_groups: groups whose content never leaves DEVICE, which is where they are updated.

    Raises:
        PlanError: the trace updates a group that `update_tiers` has no tier for.
    """
    durations_s = tuple(moment.duration_s for moment in trace.moments)
    lives = _read_lives(trace, update_tiers, one_tier=one_tier)
    return problem_of(trace, update_tiers, lives, durations_s, resident_groups=resident_groups)


def problem_of(
    trace: Trace,
    update_tiers: Mapping[int, Tier],
    lives: Mapping[ChunkId, Life],
    durations_s: tuple[float, ...],
    *,
    tier: Tier = Tier.DEVICE,
    below: Tier = Tier.HOST,
    resident_groups: Collection[int] = frozenset(),
) -> Problem:
    """Return what there is to decide for chunks with these lives on a tier, in moments of these durations."""
    chunks = tuple(sorted(lives, key=lambda chunk: (chunk.group, chunk.role)))
    nbytes = tuple(trace.chunk_nbytes[chunk] for chunk in chunks)
    uses = tuple(tuple(lives[chunk].uses) for chunk in chunks)
    gaps: list[Gap] = []
    first_gap = []
    for own, chunk in enumerate(chunks):
        first_gap.append(len(gaps))
        gaps += _gaps_of(own, lives[chunk], len(durations_s))
    always_kept = frozenset(
        at for at, gap in enumerate(gaps) if chunks[gap.chunk].group in resident_groups and may_be_kept(gap)
    )
    required = _required_nbytes(len(durations_s), nbytes, uses, [gaps[at] for at in always_kept])
    return Problem(
        trace, update_tiers, chunks, nbytes, uses, tuple(gaps), tuple(first_gap), required, durations_s, always_kept,
        tier, below,
    )  # fmt: skip


def _read_lives(trace: Trace, update_tiers: Mapping[int, Tier], *, one_tier: bool) -> dict[ChunkId, Life]:
    """Return the life of each chunk on DEVICE; the arguments are those of `find_gaps`."""
    lives = {chunk: Life() for chunk in trace.chunk_nbytes}
    for at, moment in enumerate(trace.moments):
        life = lives[moment.chunk]
        uses = life.uses
        if moment.kind is Kind.HOLD:
            comes = arrives(moment.chunk, trace)
            uses.append(Use(at, -1, creates=comes, writes=comes))
        elif moment.kind is Kind.RELEASE:
            uses[-1].stop = at
        elif moment.kind in (Kind.CREATE, Kind.WRITE):
            uses.append(Use(at, at + 1, creates=moment.kind is Kind.CREATE, writes=True))
        elif moment.kind is Kind.UPDATE:
            group = moment.chunk.group
            if group not in update_tiers:
                raise PlanError(f"moment {at} ({moment}): no tier is given for the update of group {group}")
            update = trace.update(group)
            for chunk in update.chunks:
                reads_only = chunk not in update.writes
                if update_tiers[group] is Tier.DEVICE:
                    creates = trace.is_rounded(chunk)
                    lives[chunk].uses.append(Use(at, at + 1, creates=creates, writes=not reads_only))
                else:
                    (lives[chunk].ends if reads_only else lives[chunk].renewed).append(at)
        elif moment.kind is Kind.CONSUME:
            # Until then the content is there, on DEVICE where the update was there, else on HOST. Nobody but backward
            # reads activations: where they are used up as soon as it has, they need not be written back before.
            last = uses[-1] if uses else None
            is_read_last = last is not None and moment.chunk.role.kind.is_of_call and at - last.stop <= 1
            stays = one_tier or trace.is_remote(moment.chunk) or is_read_last
            if last is not None and (stays or trace.moments[last.start].kind is Kind.UPDATE):
                last.stop = at + 1
            else:
                life.ends.append(at)
    for life in lives.values() if one_tier else ():
        if not life.uses:
            life.uses.append(Use(0, len(trace.moments)))
    return lives


def may_be_kept(gap: Gap) -> bool:
    """Tell whether a gap costs a copy if it is not kept, and may be kept."""
    return gap.after is After.LIVES and gap.start < gap.stop and gap.needed_below is None


def _gaps_of(chunk: int, life: Life, n: int) -> list[Gap]:
    """Return the gap after each use of a chunk, which is given by its index, in a step of `n` moments."""
    chain = life.uses
    found = []
    # The version a gap carries begins with the last write at or before the use; before the first, in the last
    # iteration.
    epoch = next((at for at in range(len(chain) - 1, -1, -1) if chain[at].writes), -1)
    for at, use in enumerate(chain):
        following = chain[(at + 1) % len(chain)]
        stop = following.start + (n if at + 1 == len(chain) else 0)
        inside = [m + iteration for m in life.renewed for iteration in (0, n) if use.stop <= m + iteration < stop]
        needed_below = next(
            (m + iteration for iteration in (0, n) for m in life.ends if use.stop <= m + iteration < stop), None
        )
        after = After.DIES if following.creates else After.RENEWED if inside else After.LIVES
        if use.writes:
            epoch = at
        ready = max([use.stop, *inside]) + 1
        if use.stop == n:  # it lies in the next iteration as a whole
            gap = Gap(
                chunk, at, 0, stop - n, after, ready - n, None if needed_below is None else needed_below - n, epoch
            )
        else:
            gap = Gap(chunk, at, use.stop, stop, after, ready, needed_below, epoch)
        found.append(gap)
    return found


def _required_nbytes(
    n: int, nbytes: Sequence[int], uses: Sequence[Sequence[Use]], kept: Iterable[Gap]
) -> tuple[int, ...]:
    """Return, for each of `n` moments, the bytes of chunks in use, and of those in gaps that are kept."""
    change = [0] * (n + 1)
    for size, chain in zip(nbytes, uses, strict=True):
        for use in chain:
            change[use.start] += size
            change[use.stop] -= size
    for gap in kept:
        size = nbytes[gap.chunk]
        change[gap.start] += size
        change[min(gap.stop, n)] -= size
        if gap.stop > n:
            change[0] += size
            change[gap.stop - n] -= size
    return tuple(accumulate(change[:n]))
