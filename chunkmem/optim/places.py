"""Where groups keep their optimizer states, and so where they are updated: decided once, before the first update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from chunkmem.plan.placement import GroupBytes, place_states
from chunkmem.runtime.store import Chunk, ChunkStore
from chunkmem.runtime.tiers import TierCaps
from chunkmem.types import Role, Tier


class StatePlaces:
    """The tier of each group's states."""

    def __init__(self, store: ChunkStore, caps: TierCaps, *, margin_use_ratio: float) -> None:
        """Decide nothing yet; `margin_use_ratio` is as for `place_states`."""
        self._store = store
        self._is_one_tier = caps.shared
        self._margin_use_ratio = margin_use_ratio
        self._on_device: dict[int, bool] = {}
        """By group that was decided about: do its states live on DEVICE?"""

    def updates_on_host(self, group: int) -> bool:
        """Tell whether a group's finished gradient is wanted on HOST next."""
        return not self._on_device.get(group, True)

    def undecided(self, groups: set[int]) -> list[int]:
        """Return those of `groups` that have no place yet, in ascending order."""
        return sorted(groups - self._on_device.keys())

    def decide(self, groups: Mapping[int, Sequence[Chunk]]) -> None:
        """Choose the places of groups that have none, of which these are the chunks: PARAM, GRAD, and then the rest."""
        sizes = [GroupBytes(group, _nbytes(chunks[:2]), _nbytes(chunks[2:])) for group, chunks in groups.items()]
        chosen = frozenset(groups) if self._is_one_tier else self._choose(sizes)
        self._on_device.update((group, group in chosen) for group in groups)
        # On HOST a group has its gradient and its states, in addition to its weights.
        away = (chunk for group, chunks in groups.items() if group not in chosen for chunk in chunks)
        self._store.pools[Tier.HOST].expect(_nbytes(c for c in away if c.id.role is Role.GRAD or c.id.role.is_state))

    def tier_for(self, chunk: Chunk) -> Tier:
        """Return where to make a state: as decided, or on the other tier if a full HOST leaves no choice."""
        is_full = self._store.pools[Tier.HOST].ledger.spare_nbytes < chunk.nbytes
        return Tier.DEVICE if self._on_device[chunk.id.group] or is_full else Tier.HOST

    def _choose(self, sizes: list[GroupBytes]) -> frozenset[int]:
        cap_nbytes = self._store.pools[Tier.DEVICE].ledger.cap_nbytes
        taken_nbytes = self._taken_nbytes(besides={size.group for size in sizes})
        return place_states(sizes, cap_nbytes=cap_nbytes - taken_nbytes, margin_use_ratio=self._margin_use_ratio)

    def _taken_nbytes(self, *, besides: set[int]) -> int:
        """Return what groups other than `besides` are meant to take on DEVICE: PARAM, and by their place the rest."""
        total = 0
        for key, chunk in self._store.chunks.items():
            if key.group not in besides and not chunk.is_remote:
                is_there = key.role is Role.PARAM or (
                    key.group in self._on_device if key.role is Role.GRAD else self._on_device.get(key.group, False)
                )
                total += chunk.nbytes * is_there
        return total


def _nbytes(chunks: Iterable[Chunk]) -> int:
    return sum(chunk.nbytes for chunk in chunks)
