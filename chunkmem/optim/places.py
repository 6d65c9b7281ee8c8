"""Where groups keep their optimizer states, and so where they are updated: decided once, before the first update."""

from __future__ import annotations

from collections.abc import Iterable

from chunkmem.optim.checks import STATE_ROLES
from chunkmem.plan.placement import GroupBytes, place_states
from chunkmem.runtime.store import Chunk, ChunkStore
from chunkmem.runtime.tiers import TierCaps
from chunkmem.types import ChunkId, Role, Tier


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

    def decide(self, groups: Iterable[int]) -> None:
        """Choose the place of groups that have none yet."""
        new = sorted(set(groups) - self._on_device.keys())
        sizes = [
            GroupBytes(g, self._nbytes(g, Role.PARAM, Role.GRAD), self._nbytes(g, Role.MASTER, *STATE_ROLES))
            for g in new
        ]
        chosen = frozenset(new) if self._is_one_tier else self._choose(sizes)
        self._on_device.update((group, group in chosen) for group in new)
        # On HOST a group has its gradient and both states, in addition to its weights.
        expected = sum(self._nbytes(g, Role.GRAD, *STATE_ROLES) for g in new if g not in chosen)
        self._store.pools[Tier.HOST].expect(expected)

    def tier_for(self, chunk: Chunk) -> Tier:
        """Return where to make a state: as decided, or on the other tier if a full HOST leaves no choice."""
        is_full = self._store.pools[Tier.HOST].ledger.free_nbytes < chunk.nbytes
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

    def _nbytes(self, group: int, *roles: Role) -> int:
        """Return the bytes of a group's chunks in these roles, those that there are."""
        found = (self._store.chunks.get(ChunkId(role, group)) for role in roles)
        return sum(chunk.nbytes for chunk in found if chunk is not None)
