"""A step over ranks as it would be with exchanges that overlap computing, from one that was recorded without.

Recorded: a unit's weights are held, exchanged and there before it computes, and a reduction is over before backward
continues. Overlapped: each gather begins when the one before it has arrived, and each reduction ends when the next one
begins, so weights of two units and gradients of two reductions are held at a time. What is still held when it would be
gathered again is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from chunkmem.trace.model import Kind, Moment, Trace
from chunkmem.types import ChunkId, Role


@dataclass
class _ExchangeBlock:
    """Moments that follow each other and are of one exchange."""

    begins: list[Moment] = field(default_factory=list)
    """HOLD and EXCHANGE."""
    ends: list[Moment] = field(default_factory=list)
    """ARRIVE; of a reduction, also what gives the gradients up."""

    @property
    def is_gather(self) -> bool:
        """Of weights, not a reduction of gradients."""
        return self.begins[0].chunk.role.kind.is_weights


def overlapped(trace: Trace) -> Trace:
    """Return the trace of the same step with exchanges that overlap computing, without regions.

    Its durations are those recorded.
    """
    return replace(trace, moments=tuple(_merged(_moved(_blocks(trace.moments)))), regions=())


def _blocks(moments: Sequence[Moment]) -> list[_ExchangeBlock | Moment]:
    """Return moments in their order, those of an exchange together."""
    found: list[_ExchangeBlock | Moment] = []
    exchanged = {m.chunk for m in moments if m.kind is Kind.EXCHANGE}
    at = 0
    while at < len(moments):
        block, after = _block_at(moments, at) if moments[at].chunk in exchanged else (None, at)
        if block is None:
            found.append(moments[at])
            at += 1
        else:
            found.append(block)
            at = after
    return found


def _block_at(moments: Sequence[Moment], at: int) -> tuple[_ExchangeBlock | None, int]:
    role, block = moments[at].chunk.role, _ExchangeBlock()
    while at < len(moments) and moments[at].kind in (Kind.HOLD, Kind.EXCHANGE) and moments[at].chunk.role == role:
        block.begins.append(moments[at])
        at += 1
    if not any(moment.kind is Kind.EXCHANGE for moment in block.begins):
        return None, at
    ends = (Kind.ARRIVE,) if role.kind.is_weights else (Kind.ARRIVE, Kind.RELEASE, Kind.CONSUME)
    while at < len(moments) and moments[at].kind in ends:
        block.ends.append(moments[at])
        at += 1
    return block, at


def _moved(parts: Sequence[_ExchangeBlock | Moment]) -> list[Moment]:
    """Return moments, the beginnings of gathers earlier and the ends of reductions later."""
    gathers = [part for part in parts if isinstance(part, _ExchangeBlock) and part.is_gather]
    following = dict(zip(map(id, gathers), gathers[1:], strict=False))
    moments: list[Moment] = []
    reduced: list[Moment] = []
    """Ends of the reduction that is under way."""
    is_same_reduction = False
    for part in parts:
        if isinstance(part, _ExchangeBlock) and not part.is_gather:
            if not is_same_reduction:
                moments += reduced
                reduced = []
            moments += part.begins
            reduced += part.ends
            is_same_reduction = True
        elif isinstance(part, _ExchangeBlock):
            moments += [*(part.begins if part is gathers[0] else ()), *part.ends]
            moments += following[id(part)].begins if id(part) in following else ()
            is_same_reduction = False
        else:
            if part.kind is Kind.UPDATE or part.chunk in {moment.chunk for moment in reduced}:
                moments += reduced  # what touches a gradient under reduction waits for it
                reduced = []
            # Lists of groups that are reduced together follow each other, with zeros for what has no gradient between.
            is_same_reduction = is_same_reduction and part.chunk.role is Role.GRAD
            moments.append(part)
    return moments + reduced


def _merged(moments: Sequence[Moment]) -> list[Moment]:
    """Leave out what there is no need for: gathers of chunks that are still held, and the releases before them."""
    left: list[Moment] = []
    depth: dict[ChunkId, int] = {}
    exchanges: dict[ChunkId, list[bool]] = {}
    """By chunk that is held and was sent: for each exchange that has not arrived, whether it is needed."""
    for moment in moments:
        chunk, kind = moment.chunk, moment.kind
        held = depth.get(chunk, 0)
        if kind is Kind.HOLD:
            depth[chunk] = held + 1
            is_needed = held == 0
        elif kind is Kind.RELEASE:
            depth[chunk] = held - 1
            is_needed = held == 1
            if is_needed:
                exchanges.pop(chunk, None)
        elif kind is Kind.EXCHANGE:
            is_needed = chunk not in exchanges
            exchanges.setdefault(chunk, []).append(is_needed)
        elif kind is Kind.ARRIVE:
            is_needed = exchanges[chunk].pop(0)
        else:
            is_needed = True
        if is_needed:
            left.append(moment)
        elif left:
            left[-1] = left[-1].longer(moment.duration_s, moment.entered)
    return left
