"""How to get from any residency to the one that a plan has. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from chunkmem.data.errors import PlanError
from chunkmem.data.types import PLACE, TIERS, ChunkId, Tier, neighbor
from chunkmem.plan.machine import cap_key
from chunkmem.plan.model import Action, Alloc, Copy, Free
from chunkmem.plan.semantics import ABSENT, EMPTY, NEWEST, Residency, State


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
) -> list[Action]:
    """Return the actions that lead from one residency to another, one after the other.

    Copies in both directions take turns, as each frees what the next one needs: where both tiers are nearly full, all
    of one direction first would find no room. Chunks without content are left without, wherever `wanted` has them.
    Bystanders, which `wanted` knows nothing of, stay where they are if the plan's peaks leave room for them, and go to
    the other tier, HOST first, otherwise.

    Args:
        now: the current residency.
        wanted: what should be.
        held: replicas in use.
        chunk_nbytes: of every chunk in either.
        free_nbytes: room on each tier at present.
        peak_nbytes: what the plan takes of each tier at most.
        keep_duplicates: leave copies on HOST, as far as there is room, that the plan has no use for: another plan has.
        rounded: chunks of the plan's whose content may go, since it can be made again.

    Raises:
        PlanError: there is no way, as a held replica would have to go, or as no order of copies stays within the caps;
            says which chunk is in the way.
    """
    way = _Way(
        State.of(now, chunk_nbytes), Residency(dict(wanted.newest)), held, chunk_nbytes, dict(free_nbytes), peak_nbytes,
        keep_duplicates, rounded,
    )  # fmt: skip
    way.find()
    return way.actions


@dataclass
class _Way:
    """What `resync` is given, and the actions so far; `now`, `wanted` and `free_nbytes` change."""

    now: State
    wanted: Residency
    held: frozenset[tuple[ChunkId, Tier]]
    chunk_nbytes: Mapping[ChunkId, int]
    free_nbytes: dict[Tier, int]
    peak_nbytes: Mapping[Tier, int]
    keep_duplicates: bool
    rounded: frozenset[ChunkId]

    def __post_init__(self) -> None:
        self.caps = {tier: free + self.now.used_nbytes[PLACE[tier]] for tier, free in self.free_nbytes.items()}
        self.known = {chunk for chunk, _ in self.wanted.newest}
        self.actions: list[Action] = []
        self._given_up: set[tuple[ChunkId, Tier]] = set()
        """Replicas that were freed to be copied again: once each, so that the search ends."""

    def find(self) -> None:
        content = {chunk for chunk, _ in self.now.present() if self.now.has_content(chunk)}
        for chunk in sorted(content & self.known - self.rounded, key=_order):
            if not self.wanted.has_content(chunk):
                raise PlanError(f"{chunk} holds something, and the plan has used it up there")
        dropped = {chunk for chunk in content & self.rounded if not self.wanted.has_content(chunk)}
        self._let_bystanders_stay(content - dropped)
        self._free_the_needless()
        while missing := self._missing(content):
            # DEVICE makes room first: HOST is where chunks are when nothing else is known.
            copied = [self._bring(chunk, tier) for chunk, tier in missing]
            if not any(copied) and not self._free_a_spare({t for _, t in missing}):
                raise self._obstacle(*missing[0])
        for (chunk, tier), _ in sorted(self.wanted.newest.items(), key=lambda item: _order(item[0][0])):
            if tier is Tier.DEVICE and not self._alloc(chunk, tier):
                raise self._obstacle(chunk, tier)
        for chunk, tier in self.now.present():
            if (chunk, tier) not in self.wanted.newest:
                raise PlanError(f"{chunk} is in use on {tier.name}, where the plan does not have it")

    def _obstacle(self, chunk: ChunkId, tier: Tier) -> PlanError:
        if (chunk, tier) in self.held:
            return PlanError(f"{chunk} on {tier.name} is stale and in use")
        nbytes, free, other = self.chunk_nbytes[chunk], self.free_nbytes[tier], self._neighbor(tier)
        return PlanError(
            f"{chunk} takes {nbytes} bytes on {tier.name}, and {free} of {self.caps[tier]} are free there, and "
            f"{self.free_nbytes[other]} of {self.caps[other]} on {other.name}; raise "
            f"{cap_key(tier)} by {max(0, nbytes - free)} bytes"
        )

    def _neighbor(self, tier: Tier) -> Tier:
        return neighbor(tier, self.caps)

    def _missing(self, content: set[ChunkId]) -> list[tuple[ChunkId, Tier]]:
        """Return the replicas that have to be copied yet, lower tiers first, but last what gave way to the others."""
        found = (
            (chunk, tier)
            for (chunk, tier), is_wanted in self.wanted.newest.items()
            if is_wanted and chunk in content and self.now.on(chunk, tier) != NEWEST
        )
        return sorted(found, key=lambda key: (key in self._given_up, -PLACE[key[1]], _order(key[0])))

    def _free_a_spare(self, short: set[Tier]) -> bool:
        """Free a slab that is wanted, but can be had again once room is made: no content, or not the only copy."""
        now = self.now
        for chunk, tier in sorted(now.present(), key=lambda key: (key[1] not in short, now.on(*key), _order(key[0]))):
            key = (chunk, tier)
            is_empty = tier is Tier.DEVICE and now.on(*key) == EMPTY
            is_spare = is_empty or now.is_newest_elsewhere(now.replica(*key))
            if is_spare and key not in self.held and key not in self._given_up:
                self._given_up.add(key)
                self._free(chunk, tier)
                return True
        return False

    def _let_bystanders_stay(self, content: set[ChunkId]) -> None:
        """Want each bystander where it is, while the plan and all of them fit; else on one tier alone, HOST first."""
        left = {tier: self.caps[tier] - self.peak_nbytes.get(tier, 0) for tier in self.caps}
        order = [tier for tier in (*TIERS[1:], Tier.DEVICE) if tier in left]
        for tier in order:
            duplicates = self.known if self.keep_duplicates and tier is Tier.HOST else set()
            for chunk in sorted(content & duplicates | content - self.known, key=_order):
                if (chunk, tier) in self.wanted.newest:
                    continue
                nbytes = self.chunk_nbytes[chunk]
                is_here = self.now.on(chunk, tier) == NEWEST
                if is_here and (left[tier] >= nbytes or (chunk, tier) in self.held):
                    self.wanted.newest[chunk, tier] = True
                    left[tier] -= nbytes
        for chunk in sorted(content - self.known, key=_order):
            if not self.wanted.has_content(chunk):
                nbytes = self.chunk_nbytes[chunk]
                tier = next((tier for tier in order if left[tier] >= nbytes), Tier.HOST)
                self.wanted.newest[chunk, tier] = True
                left[tier] -= nbytes
        for tier, nbytes in left.items():
            others_nbytes = self.caps[tier] - self.peak_nbytes.get(tier, 0) - nbytes
            if nbytes < 0 and others_nbytes > 0:
                raise PlanError(
                    f"the plan takes up to {self.peak_nbytes.get(tier, 0)} of {self.caps[tier]} bytes on {tier.name}, "
                    f"and what it does not touch takes {others_nbytes} there; raise {cap_key(tier)} by {-nbytes} "
                    "bytes"
                )

    def _free_the_needless(self) -> None:
        now = self.now
        for chunk, tier in sorted(now.present(), key=lambda key: (_order(key[0]), key[1].value)):
            key = (chunk, tier)
            is_spare = now.on(*key) == EMPTY or now.is_newest_elsewhere(now.replica(*key))
            is_spare = is_spare or (chunk in self.rounded and not self.wanted.has_content(chunk))
            if key not in self.wanted.newest and key not in self.held and is_spare:
                self._free(chunk, tier)

    def _free(self, chunk: ChunkId, tier: Tier) -> None:
        self._act(Free(chunk, tier))
        self.free_nbytes[tier] += self.chunk_nbytes[chunk]

    def _copy(self, chunk: ChunkId, source: Tier, target: Tier) -> bool:
        """Copy if there is room; the source is freed at once if it is not wanted, as another copy may need its room."""
        if (chunk, target) in self.held or not self._alloc(chunk, target):
            return False
        self._act(Copy(chunk, source, target))
        if (chunk, source) not in self.wanted.newest and (chunk, source) not in self.held:
            self._free(chunk, source)
        return True

    def _bring(self, chunk: ChunkId, tier: Tier) -> bool:
        """Copy from the nearest tier that has the newest version, one link of the chain; a further one comes next."""
        if self.now.on(chunk, tier) == NEWEST:  # on the way to a tier beyond, it has been brought
            return False
        here = PLACE[tier]
        source = min((t for t in TIERS if self.now.on(chunk, t) == NEWEST), key=lambda t: abs(PLACE[t] - here))
        return self._copy(chunk, source, neighbor(source, self.caps, end=tier))

    def _alloc(self, chunk: ChunkId, tier: Tier) -> bool:
        if self.now.on(chunk, tier) != ABSENT:
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
    return chunk.group, chunk.role
