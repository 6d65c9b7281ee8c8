"""A step that does not follow its plan: what it has left out, and the way back.

The way is found by `plan.resync` and gone with blocking copies, with room for shadow buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from chunkmem.data.errors import PlanError
from chunkmem.data.trace import Kind, Mode, Trace
from chunkmem.data.types import ChunkId, Tier
from chunkmem.plan.ahead import SHADOW
from chunkmem.plan.facts import PlanFacts
from chunkmem.plan.model import Action, Alloc, Copy, Free
from chunkmem.plan.resync import resync
from chunkmem.plan.semantics import Residency
from chunkmem.runtime.chunk import residency
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.store import ChunkStore

_MAX_SHARE = 0.75
"""Largest share of a trace's moments that a step may leave out: copies for moments that do not come are wasted."""


class LeftOut:
    """The moments of a trace that one step did not have. Who releases a chunk, and when, does not count."""

    def __init__(self, trace: Trace) -> None:
        """Begin with none.

        Over ranks none may be left out: all of them have to exchange the same.
        """
        counts = (moment.kind is not Kind.RELEASE for moment in trace.moments)
        self._num_before = tuple(accumulate(counts, initial=0))
        self._kinds = tuple(moment.kind for moment in trace.moments)
        self.is_possible = not trace.remote_groups and all(kind is not Kind.EXCHANGE for kind in self._kinds)
        self.spans: list[tuple[int, int]] = []
        """Half-open ranges `[start, stop)` of the moments that were left out."""

    @property
    def num_moments(self) -> int:
        return sum(self._num_before[stop] - self._num_before[start] for start, stop in self.spans)

    def number(self, start: int, stop: int) -> int:
        """Return how many moments are left out if `stop` comes where `start` is expected."""
        return self.num_moments + self._num_before[stop] - self._num_before[start]

    def may_go(self, start: int, stop: int) -> bool:
        """Tell whether that is not too much."""
        return self.is_possible and self.number(start, stop) <= _MAX_SHARE * self._num_before[-1]

    def go(self, start: int, stop: int) -> None:
        """They are left out."""
        if self._num_before[stop] > self._num_before[start]:
            self.spans.append((start, stop))

    def come(self, stop: int) -> Iterator[int]:
        """Yield the moments before `stop` that were not left out, but for releases."""
        left_out = {at for span in self.spans for at in range(*span)}
        for at in range(stop):
            if at not in left_out and self._kinds[at] is not Kind.RELEASE:
                yield at


def way_to(wanted: Residency, peaks: Mapping[Tier, int], facts: PlanFacts, trace: Trace, pager: Pager) -> list[Action]:
    """Return how to get from any residency to one of a plan's.

    Copies have to be over. Shadow buffers are the first to give way, those that are there and those that the plan
    would have.

    Args:
        wanted: the residency.
        peaks: what the plan takes of each tier at most, in bytes.
        facts, trace: of the plan.
        pager: of the chunks.

    Raises:
        PlanError: there is no way; says what is in it.
    """
    host = peaks[Tier.HOST]
    # The plan's peak includes the shadow buffers. What is reserved of it already is no room that a way could take.
    reserved_nbytes = min(host, pager.store.pools[Tier.HOST].ledger.now.get(SHADOW, 0))
    obstacle = ""  # not the error itself: with its frames it would keep what their callers have
    for host_nbytes in dict.fromkeys((host - reserved_nbytes, host - facts.shadow_nbytes)):
        try:
            return _actions(wanted, {**peaks, Tier.HOST: host_nbytes}, trace, pager)
        except PlanError as error:
            obstacle = str(error)
        pager.speculative.reserve({})
    raise PlanError(obstacle)


def _actions(wanted: Residency, peak_nbytes: Mapping[Tier, int], trace: Trace, pager: Pager) -> list[Action]:
    """Return the actions; what the plan wants and nobody has any more is rounded again on the way.

    Raises: what `way_to` does.
    """
    store = pager.store
    chunks = [chunk for chunk in store.chunks.values() if not chunk.stays]
    for chunk in chunks:
        pager.notice_writes(chunk)
        if wanted.has_content(chunk.id) and not pager.restore(chunk):
            raise PlanError(f"{chunk.id} takes {chunk.nbytes} bytes to be rounded again, and neither tier has them")
    return resync(
        residency(chunks),
        wanted,
        held=frozenset((c.id, t) for c in chunks for t, r in c.replicas.items() if r.pins > 0),
        chunk_nbytes={chunk.id: chunk.nbytes for chunk in chunks},
        free_nbytes={t: pool.ledger.limit_nbytes - pool.ledger.chunk_nbytes for t, pool in store.pools.items()},
        peak_nbytes=peak_nbytes,
        keep_duplicates=trace.mode is Mode.EVAL,
        rounded=frozenset(c.id for c in chunks if c.can_be_rounded and c.id in trace.chunk_nbytes),
    )


def reserve_shadow_buffers(facts: PlanFacts, pager: Pager, *, own: Iterable[ChunkId]) -> None:
    """Reserve what a plan has, as far as HOST has room for it and for all chunks that are not its `own`."""
    host, resident = pager.store.pools[Tier.HOST].ledger, pager.store.resident[Tier.HOST]
    own_nbytes = sum(resident[chunk].nbytes for chunk in own if chunk in resident)
    others_nbytes = max(0, host.chunk_nbytes - host.now.get(SHADOW, 0) - own_nbytes)
    chunks_nbytes = facts.peak_nbytes[Tier.HOST] - facts.shadow_nbytes
    pager.speculative.reserve(facts.shadow_counts(host.limit_nbytes - chunks_nbytes - others_nbytes))


def go(actions: Iterable[Action], store: ChunkStore) -> None:
    """Do what `way_to` returned, one after the other."""
    for action in actions:
        if isinstance(action, Alloc):
            store.take_slab(store.chunks[action.chunk], action.tier)
        elif isinstance(action, Copy):
            store.copy(store.chunks[action.chunk], action.source, action.target)
        elif isinstance(action, Free):
            store.drop(store.chunks[action.chunk], action.tier)
