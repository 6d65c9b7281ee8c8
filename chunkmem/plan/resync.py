"""What is where, as a plan goes on, and how to get there from anywhere else. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from chunkmem.plan.model import Action, Alloc, Copy, Free, Placed, Plan
from chunkmem.trace.model import Kind, Trace
from chunkmem.types import ChunkId, Role, Tier

_OTHER = {Tier.DEVICE: Tier.HOST, Tier.HOST: Tier.DEVICE}


@dataclass
class Residency:
    """Replicas by (chunk, tier): do they hold the newest version?"""

    newest: dict[tuple[ChunkId, Tier], bool] = field(default_factory=dict)

    @classmethod
    def of(cls, placed: Iterable[Placed]) -> Residency:
        return cls({(p.chunk, p.tier): p.newest for p in placed})

    def has_content(self, chunk: ChunkId) -> bool:
        """Tell whether some replica holds a version at all."""
        return any(self.newest.get((chunk, tier), False) for tier in _OTHER)

    def act(self, action: Action) -> None:
        """Follow one action."""
        if isinstance(action, Alloc):
            self.newest[action.chunk, action.tier] = False
        elif isinstance(action, Free):
            del self.newest[action.chunk, action.tier]
        elif isinstance(action, Copy):
            self.newest[action.chunk, action.target] = True

    def consume(self, chunk: ChunkId) -> None:
        """The content is used up: only an empty slab on DEVICE stays."""
        self.newest.pop((chunk, Tier.HOST), None)
        if (chunk, Tier.DEVICE) in self.newest:
            self.newest[chunk, Tier.DEVICE] = False


def residency_before(plan: Plan, trace: Trace, moment: int) -> Residency:
    """Return what is where before the actions of `moment`, if the plan was followed from its start."""
    now = Residency.of(plan.start)
    for at in range(moment):
        for action in plan.actions[at]:
            now.act(action)
        event = trace.moments[at]
        if event.kind is Kind.CREATE:
            now.newest[event.chunk, Tier.DEVICE] = True
        elif event.kind is Kind.HOLD and trace.is_remote(event.chunk):
            now.newest[event.chunk, Tier.DEVICE] = True  # an exchange brings it
        elif event.kind is Kind.RELEASE and trace.is_remote(event.chunk) and event.chunk.role is Role.PARAM:
            now.newest.pop((event.chunk, Tier.DEVICE), None)
        elif event.kind is Kind.CONSUME:
            now.consume(event.chunk)
        elif event.kind is Kind.UPDATE and trace.is_rounded(event.chunk):
            now.newest[event.chunk, plan.update_tiers[event.chunk.group]] = True
    return now


def resync(
    now: Residency,
    wanted: Residency,
    *,
    held: frozenset[tuple[ChunkId, Tier]],
    chunk_nbytes: Mapping[ChunkId, int],
    free_nbytes: Mapping[Tier, int],
    peak_nbytes: Mapping[Tier, int],
    keep_duplicates: bool,
    rounded: frozenset[ChunkId] = frozenset(),
) -> list[Action] | None:
    """Return the actions that lead from one residency to another, one after the other; None if there is no way.

    Chunks without content are left without, wherever `wanted` has them. Bystanders, which `wanted` knows nothing of,
    stay where they are if the plan's peaks leave room for them, and go to HOST otherwise. There is no way if a held
    replica would have to go, or if no order of copies stays within the caps.

    Args:
        now: what is where.
        wanted: what should be.
        held: replicas in use.
        chunk_nbytes: of every chunk in either.
        free_nbytes: room on each tier at present.
        peak_nbytes: what the plan takes of each tier at most.
        keep_duplicates: leave copies on HOST, as far as there is room, that the plan has no use for: another plan has.
        rounded: chunks of the plan's whose content may go, since it can be made again.
    """
    way = _Way(now, wanted, held, chunk_nbytes, free_nbytes, peak_nbytes)
    way.keep_duplicates, way.rounded = keep_duplicates, rounded
    return way.actions if way.found() else None


class _Way:
    def __init__(
        self,
        now: Residency,
        wanted: Residency,
        held: frozenset[tuple[ChunkId, Tier]],
        chunk_nbytes: Mapping[ChunkId, int],
        free_nbytes: Mapping[Tier, int],
        peak_nbytes: Mapping[Tier, int],
    ) -> None:
        self.now = Residency(dict(now.newest))
        self.wanted = Residency(dict(wanted.newest))
        self.held = held
        self.chunk_nbytes = chunk_nbytes
        self.free_nbytes = dict(free_nbytes)
        self.caps = {t: n + sum(chunk_nbytes[c] for c, at in now.newest if at is t) for t, n in free_nbytes.items()}
        self.peak_nbytes = peak_nbytes
        self.known = {chunk for chunk, _ in wanted.newest}
        self.actions: list[Action] = []
        self.keep_duplicates = False
        self.rounded: frozenset[ChunkId] = frozenset()

    def found(self) -> bool:
        content = {chunk for chunk, _ in self.now.newest if self.now.has_content(chunk)}
        if any(not self.wanted.has_content(chunk) for chunk in content & self.known - self.rounded):
            return False
        dropped = {chunk for chunk in content & self.rounded if not self.wanted.has_content(chunk)}
        self._let_bystanders_stay(content - dropped)
        self._free_the_needless()
        # DEVICE makes room first: HOST is where chunks are when nothing else is known.
        for source in (Tier.DEVICE, Tier.HOST):
            target = _OTHER[source]
            for chunk in sorted(content, key=_order):
                wants = self.wanted.newest.get((chunk, target), False)
                has = self.now.newest.get((chunk, target), False)
                if wants and not has and not self._copy(chunk, source, target):
                    return False
            self._free_the_needless()
        for (chunk, tier), _ in sorted(self.wanted.newest.items(), key=lambda item: _order(item[0][0])):
            if (chunk, tier) not in self.now.newest and tier is Tier.DEVICE and not self._alloc(chunk, tier):
                return False
        return all(key in self.wanted.newest for key in self.now.newest)

    def _let_bystanders_stay(self, content: set[ChunkId]) -> None:
        """Want each bystander where it is, while the plan and all of them fit; else on HOST alone."""
        for tier in (Tier.HOST, Tier.DEVICE):
            left = self.caps[tier] - self.peak_nbytes.get(tier, 0)
            duplicates = self.known if self.keep_duplicates and tier is Tier.HOST else set()
            for chunk in sorted(content & duplicates | content - self.known, key=_order):
                if (chunk, tier) in self.wanted.newest:
                    continue
                nbytes = self.chunk_nbytes[chunk]
                is_here = self.now.newest.get((chunk, tier), False)
                if is_here and (left >= nbytes or (chunk, tier) in self.held):
                    self.wanted.newest[chunk, tier] = True
                    left -= nbytes
        for chunk in content - self.known:
            if not self.wanted.has_content(chunk):
                self.wanted.newest[chunk, Tier.HOST] = True

    def _free_the_needless(self) -> None:
        for chunk, tier in sorted(self.now.newest, key=lambda key: (_order(key[0]), key[1].value)):
            key = (chunk, tier)
            other = self.now.newest.get((chunk, _OTHER[tier]), False)
            other = other or (chunk in self.rounded and not self.wanted.has_content(chunk))
            if key not in self.wanted.newest and key not in self.held and (other or not self.now.newest[key]):
                self._act(Free(chunk, tier))
                self.free_nbytes[tier] += self.chunk_nbytes[chunk]

    def _copy(self, chunk: ChunkId, source: Tier, target: Tier) -> bool:
        if (chunk, target) in self.held or not self._alloc(chunk, target):
            return False
        self._act(Copy(chunk, source, target))
        return True

    def _alloc(self, chunk: ChunkId, tier: Tier) -> bool:
        if (chunk, tier) in self.now.newest:
            return True
        if self.free_nbytes[tier] < self.chunk_nbytes[chunk]:
            return False
        self.free_nbytes[tier] -= self.chunk_nbytes[chunk]
        self._act(Alloc(chunk, tier))
        return True

    def _act(self, action: Action) -> None:
        self.now.act(action)
        self.actions.append(action)


def _order(chunk: ChunkId) -> tuple[int, str]:
    return chunk.group, chunk.role.value
