"""Steps that differ in what they leave out, as one trace, of which each leaves out some moments. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from heapq import merge as merge_sorted
from itertools import pairwise

from chunkmem.data.errors import TraceError
from chunkmem.data.trace import Kind, Moment, Trace
from chunkmem.data.types import ChunkId

_ALIKE = 0.5
"""Share of common moments below which two steps are of different kinds."""
_MAX_LONGER = 3
"""How many times as long as a step the trace may become: more would be moved in vain than is needed."""

Moments = Sequence[Moment]


@dataclass(frozen=True)
class Merged:
    """The trace of two, and whether it has moments that the first of them lacks."""

    trace: Trace
    is_longer: bool


def merge(known: Trace, found: Trace) -> Merged | None:
    """Return a trace that has all moments of both; None if they have too little in common, or their orders do not fit.

    Where one has modules that the other leaves out, and the other way round, forward is taken to go through groups
    upwards, and backward downwards. In which order groups are updated does not matter: that of `known` is kept.
    Moments of both keep the duration of `known` and the larger peak. A longer trace has no regions.
    """
    if (known.mode, known.layout, known.remote_groups) != (found.mode, found.layout, found.remote_groups):
        return None
    if _num_steps(known) != _num_steps(found) or _begun_before(known) != _begun_before(found):
        return None
    (body, updates), (found_body, found_updates) = _split(known.moments), _split(found.moments)
    keys, found_keys = [[_key(moment) for moment in each] for each in (body, found_body)]
    matcher = SequenceMatcher(None, keys, found_keys, autojunk=False)
    if matcher.quick_ratio() < _ALIKE or matcher.ratio() < _ALIKE:
        return None
    moments: list[Moment] = []
    for tag, at, to, found_at, found_to in matcher.get_opcodes():
        if tag == "equal":
            moments += map(_both, body[at:to], found_body[found_at:found_to])
        else:
            moments += _in_turns(body[at:to], found_body[found_at:found_to])
    moments += _with_updates(updates, found_updates)
    if len(moments) == len(known.moments):
        return Merged(known, is_longer=False)
    if len(moments) > _MAX_LONGER * len(found.moments) or not _are_used_in_order(moments):
        return None
    try:
        chunk_nbytes = {**known.chunk_nbytes, **found.chunk_nbytes}
        begun = tuple(_begun_once(moments, _begun_before(known)))
        merged = replace(known, chunk_nbytes=chunk_nbytes, moments=begun, regions=())
    except TraceError:  # a chunk would be held twice
        return None
    return Merged(merged, is_longer=True)


def phase_of(label: str) -> str:
    """Return the last word of a label: "blocks.3 forward" is in the forward."""
    return label.rpartition(" ")[2]


def _key(moment: Moment) -> tuple[str, ChunkId, str]:
    """Return what makes moments of two steps the same one."""
    if moment.kind in (Kind.CREATE, Kind.WRITE):
        return "gradient", moment.chunk, moment.label
    if moment.kind is Kind.HOLD:  # of modules that share a chunk, the first one that is not left out holds it
        return moment.kind.value, moment.chunk, phase_of(moment.label)
    return moment.kind.value, moment.chunk, ""


def _num_steps(trace: Trace) -> int:
    """Return how many times an optimizer's updates begin."""
    kinds = [Kind.HOLD, *(moment.kind for moment in trace.moments if moment.kind is not Kind.CONSUME)]
    return sum(before is not Kind.UPDATE and kind is Kind.UPDATE for before, kind in pairwise(kinds))


def _begun_before(trace: Trace) -> set[ChunkId]:
    """Return the chunks of gradients that have content when a step begins."""
    first: dict[ChunkId, Kind] = {}
    for moment in trace.moments:
        if moment.kind in (Kind.CREATE, Kind.WRITE):
            first.setdefault(moment.chunk, moment.kind)
    return {chunk for chunk, kind in first.items() if kind is Kind.WRITE}


def _split(moments: Moments) -> tuple[Moments, Moments]:
    """Return what comes before the updates that a step ends with, and those."""
    at = len(moments)
    while at and moments[at - 1].kind in (Kind.UPDATE, Kind.CONSUME) and not _is_saved(moments[at - 1]):
        at -= 1
    return moments[:at], moments[at:]


def _is_saved(moment: Moment) -> bool:
    """Tell whether a moment is of activations, which backward uses up."""
    return moment.chunk.role.kind.is_of_call


def _with_updates(known: Moments, found: Moments) -> list[Moment]:
    """Return updates of both, where groups of `found` alone come before those of higher number."""
    there = {_key(moment) for moment in known}
    merged = list(known)
    for moment in found:
        if _key(moment) not in there:
            later = (at for at, m in enumerate(merged) if m.chunk.group > moment.chunk.group)
            merged.insert(next(later, len(merged)), moment)
    return merged


def _in_turns(known: Moments, found: Moments) -> Iterator[Moment]:
    """Return both, cut where nothing that was held in them is held any more, by the numbers of their groups."""

    def place(part: list[Moment]) -> int:
        group = part[0].chunk.group
        return group if phase_of(part[0].label) == "forward" else -group

    for part in merge_sorted(_parts(known), _parts(found), key=place):
        yield from part


def _parts(moments: Moments) -> Iterator[list[Moment]]:
    held: set[ChunkId] = set()
    part: list[Moment] = []
    for moment in moments:
        part.append(moment)
        if moment.kind is Kind.HOLD:
            held.add(moment.chunk)
        elif moment.kind is Kind.RELEASE:
            held.discard(moment.chunk)
        if not held:
            yield part
            part = []
    if part:
        yield part


def _both(known: Moment, found: Moment) -> Moment:
    return replace(
        known,
        non_model_peak_nbytes=max(known.non_model_peak_nbytes, found.non_model_peak_nbytes),
        sampled_peak_nbytes=max(known.sampled_peak_nbytes, found.sampled_peak_nbytes),
    )


def _are_used_in_order(moments: Moments) -> bool:
    """Tell whether activations are created once before they are used, and used up once after that."""
    live: set[ChunkId] = set()
    for moment in moments:
        if not _is_saved(moment):
            continue
        if (moment.chunk in live) is (moment.kind is Kind.CREATE):
            return False
        if moment.kind is Kind.CREATE:
            live.add(moment.chunk)
        elif moment.kind is Kind.CONSUME:
            live.remove(moment.chunk)
    return not live


def _begun_once(moments: Iterable[Moment], has_content: set[ChunkId]) -> Iterator[Moment]:
    """Let the first gradient in a chunk without content begin it, and others be added to it."""
    for moment in moments:
        if moment.kind in (Kind.CREATE, Kind.WRITE):
            kind = Kind.WRITE if moment.chunk in has_content else Kind.CREATE
            has_content.add(moment.chunk)
            yield moment if moment.kind is kind else replace(moment, kind=kind)
            continue
        if moment.kind is Kind.CONSUME:
            has_content.discard(moment.chunk)
        yield moment
