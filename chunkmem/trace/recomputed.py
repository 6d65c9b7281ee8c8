"""A step as it would be if other regions were recomputed in backward. Pure.

[Note: Kept and recomputed regions] Where a region is kept or offloaded, its chunk has moments of its own; where it is
recomputed, its forward's HOLDs come again in backward, and what it saves is non-model data from there on.

    kept          forward CREATE  ...  HOLD                 backward RELEASE CONSUME
    recomputed    forward         ...       forward again   backward

A backward may have no moments: its recomputation and its gradients are part of the moment before if its weights are
held all along, as of a block that is called several times. Kept, it has the moments of its chunk.

What a recomputed region is recomputed from may be a chunk, too, from forward to the end of backward. If the region is
kept, it is part of what that saves.

The bytes saved grow in proportion to the time of forward that has passed, and stay until its backward is over. In
forward they are non-model data until the CREATE if the region is kept, and freed at once if it is recomputed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from chunkmem.trace.model import Kind, Moment, Moments, Region, Trace
from chunkmem.trace.shared import Shared
from chunkmem.types import ChunkId

_OF_READING = (Kind.HOLD, Kind.EXCHANGE, Kind.ARRIVE, Kind.RELEASE)


def with_recomputed(trace: Trace, recomputed: Collection[int], *, shared: Mapping[int, Shared] | None = None) -> Trace:
    """Return the trace of the same step if exactly these regions were recomputed; see [Note: Kept and recomputed
    regions].

    Durations and bytes are those of the moments that move; what the step really takes has to be recorded. Regions keep
    their order, and so their indices.

    Args:
        trace: of the step, whichever regions are recomputed in it.
        recomputed: indices into `trace.regions`.
        shared: by index: what is in no chunk if those next to a region, which is recomputed in `trace`, are kept as it
            is; None: all is. Where non-model data does not count, that and what forward has saved counts for nothing.
    """
    edit = _Edit(trace)
    for index, region in enumerate(trace.regions):
        if (index in recomputed) is (region.recomputed is None):
            if region.recomputed is None:
                edit.recompute(index)
            else:
                shared_nbytes = 0 if shared is None else shared[index].nbytes(recomputed)
                nbytes = max(0, region.nbytes - shared_nbytes)
                edit.keep(index, region.recomputed, nbytes=nbytes, is_counted=shared is None)
    return edit.result() if edit.changed else trace


@dataclass(frozen=True, slots=True)
class _Folded:
    """What is left of a moment that is gone: it is part of the one before."""

    duration_s: float = 0.0
    non_model_peak_nbytes: int = 0


class _Edit:
    """Changes to the moments of a trace, by their indices in it."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.moments: list[Moment | _Folded] = list(trace.moments)
        self.sizes = dict(trace.chunk_nbytes)
        self.closing: dict[int, list[Moment]] = defaultdict(list)
        """Moments to be inserted before an index, that end a region's forward or backward."""
        self.opening: dict[int, list[Moment | _Folded]] = defaultdict(list)
        """The same within a backward, after those of `closing` and `lone`."""
        self.lone: dict[int, list[Moment]] = defaultdict(list)
        """The same of whole backwards that have no other moments."""
        self.unseen = Counter(r.recomputed[0] - 1 for r in trace.regions if r.recomputed and _is_empty(r.recomputed))
        """By moment: how many regions are recomputed in it without events of their own."""
        self.saved = {
            at: {i: self._again_nbytes(r) for i, r in enumerate(trace.regions) if _is_saved(r, at)}
            for at in self.unseen
        }
        """By such a moment: the bytes of the regions that have been recomputed then or are, one after the other."""
        self.changed: dict[int, int | None] = {}
        """By region that is changed: where its forward is inserted; None: it is kept."""
        self.kept_nbytes: dict[int, int] = {}
        """By region that is kept now: what its chunk has."""

    def keep(self, index: int, again: Moments, *, nbytes: int, is_counted: bool) -> None:
        """Let a region that is recomputed be kept.

        Args:
            index: of it.
            again: where it is recomputed.
            nbytes: what its chunk has then.
            is_counted: what forward has saved counts before the chunk has it.
        """
        region, given = self.trace.regions[index], self.trace.moments
        forward, after = _plain(self.trace, region), range(again[1], region.backward[1])
        again_nbytes = self._again_nbytes(region)
        forward_s = sum(given[at].duration_s for at in forward)
        # The recomputation began in the moment before its first event, and ended in that of its last one.
        whole_s = sum(given[at].duration_s for at in range(*again))
        before, last = again[0] - 1, again[1] - 1
        before_s = max(0.0, forward_s - whole_s)
        if before == last:  # nobody knows when in it one recomputation ends and another one begins
            whole_s = before_s = given[last].duration_s / self.unseen[last]
        self._change(before, duration_s=max(0.0, self.moments[before].duration_s - before_s))
        rest_s = max(0.0, whole_s - forward_s)
        most_nbytes = max(self.saved[last].values()) if last in self.saved else again_nbytes
        hold_peak_nbytes = max(0, given[last].non_model_peak_nbytes - most_nbytes)
        pairs = _read_in(given, range(*again), held=())
        for at in range(*again):
            self.moments[at] = _Folded() if at in pairs else replace(self.moments[at], duration_s=0.0)
        during = [last] if before == last else [at for at in range(*again) if at not in pairs]
        self._uncharge(index, [*during, *after])
        created_peak_nbytes = given[max(0, region.forward[1] - 1)].non_model_peak_nbytes
        if is_counted:
            self._charge(forward, _growing(nbytes, [given[at].duration_s for at in forward]))
        self.changed[index] = None
        self.kept_nbytes[index] = nbytes
        self._drop_inputs(region)
        if nbytes == 0:
            self.opening[again[0]].append(_Folded(rest_s, hold_peak_nbytes))
            return
        self.sizes[region.chunk] = nbytes
        label, stop = f"{region.name} backward", region.backward[1]
        end_peak_nbytes = self.moments[stop - 1].non_model_peak_nbytes if after else hold_peak_nbytes
        created = Moment(Kind.CREATE, region.chunk, f"{region.name} forward", 0.0, created_peak_nbytes)
        self.closing[region.forward[1]].append(created)
        held = Moment(Kind.HOLD, region.chunk, label, rest_s, hold_peak_nbytes)
        ends = [Moment(kind, region.chunk, label, 0.0, end_peak_nbytes) for kind in (Kind.RELEASE, Kind.CONSUME)]
        if again[0] == stop:
            self.lone[stop][:0] = held, *ends  # in front: what came later in forward comes first in backward
        else:
            self.opening[again[0]].append(held)
            self.closing[stop] += ends

    def _again_nbytes(self, region: Region) -> int:
        """Return what a region saves when it is recomputed, besides what it is recomputed from, if that is a chunk."""
        inputs_nbytes = 0 if region.inputs is None else self.trace.chunk_nbytes.get(region.inputs, 0)
        return max(0, region.nbytes - inputs_nbytes)

    def _uncharge(self, index: int, moments: Iterable[int]) -> None:
        """Take what a recomputed region saves off the non-model peaks of moments."""
        nbytes = self._again_nbytes(self.trace.regions[index])
        for at in moments:
            left = [left for i, left in self.saved.get(at, {}).items() if i != index and i not in self.changed]
            self._charge([at], [min(0, max(left, default=0) - nbytes)])

    def _drop_inputs(self, region: Region) -> None:
        """Let a region have no chunk that it is recomputed from."""
        if region.inputs is None:
            return
        for at in range(region.forward[1], len(self.moments)):
            if self.trace.moments[at].chunk == region.inputs:
                self.moments[at] = _Folded(self.moments[at].duration_s, self.moments[at].non_model_peak_nbytes)
                if self.trace.moments[at].kind is Kind.CONSUME:
                    return  # what follows is of another call

    def recompute(self, index: int) -> None:
        """Let a region that is kept be recomputed."""
        region, given = self.trace.regions[index], self.trace.moments
        own = [at for at, moment in enumerate(given) if moment.chunk == region.chunk]
        start = next((at for at in own if given[at].kind is Kind.HOLD), region.backward[0])
        forward = _plain(self.trace, region)
        saved = _growing(region.nbytes, [given[at].duration_s for at in forward])
        self._charge(forward, [-nbytes for nbytes in saved])
        pairs = _read_in(given, forward, held=_held_before(given, start))
        for at, nbytes in zip(forward, saved, strict=True):
            peak_nbytes = self.moments[at].non_model_peak_nbytes + nbytes
            again = replace(given[at], non_model_peak_nbytes=peak_nbytes)
            self.opening[start].append(again if at in pairs else _Folded(again.duration_s, peak_nbytes))
        after = [at for at in range(start, region.backward[1]) if at not in own]
        self._charge(after, [region.nbytes] * len(after))
        for at in own:
            nbytes = region.nbytes if at == start else 0
            now = self.moments[at]  # another region may have been taken out of it
            self.moments[at] = _Folded(now.duration_s, now.non_model_peak_nbytes + nbytes)
        self.sizes.pop(region.chunk, None)
        self.changed[index] = start

    def result(self) -> Trace:
        """Return the trace with all changes."""
        moments: list[Moment] = []
        places = []
        """By index in the given trace: the same in the new one, before what is inserted in a backward there."""
        for at in range(len(self.moments) + 1):
            moments += self.closing[at]
            places.append(len(moments))
            moments += self.lone[at]
            for entry in (*self.opening[at], *self.moments[at : at + 1]):
                if isinstance(entry, Moment):
                    moments.append(entry)
                elif moments:
                    moments[-1] = moments[-1].longer(entry.duration_s, peak_nbytes=entry.non_model_peak_nbytes)
        regions = tuple(self._moved(index, places) for index in range(len(self.trace.regions)))
        used = {moment.chunk for moment in moments}
        sizes = {key: n for key, n in self.sizes.items() if not key.role.kind.is_of_call or key in used}
        return replace(self.trace, chunk_nbytes=sizes, moments=tuple(moments), regions=regions)

    def _moved(self, index: int, places: Sequence[int]) -> Region:
        """Return a region with its new moments."""
        region = self.trace.regions[index]
        forward, backward = ((places[span[0]], places[span[1]]) for span in (region.forward, region.backward))
        again, inputs = region.recomputed, region.inputs
        if index not in self.changed:
            again = None if again is None else (places[again[0]], places[again[1]])
        elif (start := self.changed[index]) is None:
            assert again is not None
            if again[0] == region.backward[1]:
                backward = backward[0], backward[1] + len(self.lone[again[0]])
            again = inputs = None
        else:
            num = sum(isinstance(entry, Moment) for entry in self.opening[start])
            again = (places[start], places[start] + num)
        nbytes = self.kept_nbytes.get(index, region.nbytes)
        return replace(region, nbytes=nbytes, forward=forward, backward=backward, recomputed=again, inputs=inputs)

    def _change(self, at: int, *, duration_s: float) -> None:
        self.moments[at] = replace(self.moments[at], duration_s=duration_s)

    def _charge(self, moments: Iterable[int], nbytes: Iterable[int]) -> None:
        """Add to the non-model peaks of moments, or take off."""
        for at, more in zip(moments, nbytes, strict=True):
            peak_nbytes = max(0, self.moments[at].non_model_peak_nbytes + more)
            self.moments[at] = replace(self.moments[at], non_model_peak_nbytes=peak_nbytes)


def _plain(trace: Trace, region: Region) -> list[int]:
    """Return the moments of a region's forward without those of its chunk."""
    return [at for at in range(*region.forward) if trace.moments[at].chunk != region.chunk]


def _read_in(moments: Sequence[Moment], span: Iterable[int], *, held: Collection[ChunkId]) -> set[int]:
    """Return the moments of a span in which chunks are held and released, but for those that are `held` all along."""
    found: set[int] = set()
    begun: dict[ChunkId, list[int]] = {}
    for at in span:
        kind, chunk = moments[at].kind, moments[at].chunk
        if chunk.role.kind.is_of_call or chunk in held or kind not in _OF_READING:
            continue
        if kind is Kind.HOLD:
            begun[chunk] = []
        if chunk in begun:
            begun[chunk].append(at)
            if kind is Kind.RELEASE:
                found.update(begun.pop(chunk))
    return found


def _held_before(moments: Sequence[Moment], stop: int) -> set[ChunkId]:
    held: set[ChunkId] = set()
    for moment in moments[:stop]:
        if moment.kind is Kind.HOLD:
            held.add(moment.chunk)
        elif moment.kind is Kind.RELEASE:
            held.remove(moment.chunk)
    return held


def _growing(nbytes: int, durations_s: Sequence[float]) -> list[int]:
    """Return what forward has saved at the end of each of its moments."""
    total_s = sum(durations_s)
    return [int(nbytes * done_s / total_s) if total_s else nbytes for done_s in accumulate(durations_s)]


def _is_empty(span: Moments) -> bool:
    return span[0] == span[1]


def _is_saved(region: Region, at: int) -> bool:
    """Tell whether a region that is recomputed has what it saves in a moment, or at some time of it."""
    again = region.recomputed
    return again is not None and again[0] - _is_empty(again) <= at < max(region.backward[1], again[1])
