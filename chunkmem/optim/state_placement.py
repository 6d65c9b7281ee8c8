"""Where groups keep their optimizer states, and so where they are updated: decided once, before the first update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from chunkmem.data.types import Role, Tier
from chunkmem.plan.placement import GroupNeed, first_residents
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.store import ChunkStore
from chunkmem.runtime.tiers import TierCaps


@dataclass(eq=False)
class StatePlacement:
    """The tier of each group's states."""

    store: ChunkStore
    caps: TierCaps
    margin_use_ratio: float
    """As for `first_residents`."""
    _on_device: dict[int, bool] = field(default_factory=dict)
    """By group that was decided about: do its states live on DEVICE?"""
    _resident_nbytes: int = 0
    """That those take there."""

    def updates_on_host(self, group: int) -> bool:
        """Tell whether a group's finished gradient is wanted on HOST next."""
        return not self._on_device.get(group, True)

    def undecided(self, groups: set[int]) -> list[int]:
        """Return those of `groups` that have no place yet, in ascending order."""
        return sorted(groups - self._on_device.keys())

    def decide(self, groups: Mapping[int, Sequence[Chunk]]) -> None:
        """Choose the places of groups that have none, of which these are the chunks: PARAM, GRAD, and then the rest.

        As a plan is going to: the first ones are resident on DEVICE (`plan/placement.py`).
        """
        order = sorted(group for group, chunks in groups.items() if chunks[0].compute_tier is Tier.DEVICE)
        chosen = set(order if self.caps.shared else order[: self._num_resident([groups[g] for g in order])])
        self._on_device.update((group, group in chosen) for group in groups)
        # On HOST a group has its gradient and its states, in addition to its weights.
        away = (chunk for group, chunks in groups.items() if group not in chosen for chunk in chunks)
        self.store.pools[Tier.HOST].expect(_nbytes(c for c in away if c.id.role is Role.GRAD or c.id.role.is_state))

    def tier_for(self, chunk: Chunk) -> Tier:
        """Return where to make a state: as decided, or on the other tier if a full HOST leaves no choice."""
        is_full = not self.store.host_is_gateway and self.store.pools[Tier.HOST].ledger.spare_nbytes < chunk.nbytes
        may_leave = chunk.compute_tier is Tier.DEVICE
        return Tier.DEVICE if self._on_device[chunk.id.group] or (is_full and may_leave) else Tier.HOST

    def _num_resident(self, groups: Sequence[Sequence[Chunk]]) -> int:
        """Return how many of `groups`, of which these are the chunks, are resident next to those that are already."""
        needs = [_need(chunks) for chunks in groups]
        cap_nbytes = self.store.pools[Tier.DEVICE].ledger.cap_nbytes - self._resident_nbytes
        count = first_residents(needs, cap_nbytes=cap_nbytes, margin_use_ratio=self.margin_use_ratio)
        self._resident_nbytes += sum(need.resident_nbytes for need in needs[:count])
        return count


def _need(chunks: Sequence[Chunk]) -> GroupNeed:
    """Return what a group takes of DEVICE; its gradients take the place of weights that can be rounded again."""
    param, grad = chunks[:2]
    twice_nbytes = 0 if param.master is None else min(param.nbytes, grad.nbytes)
    states_nbytes = _nbytes(chunk for chunk in chunks if chunk.id.role.is_state)
    return GroupNeed(_nbytes(chunks) - twice_nbytes, param.nbytes, states_nbytes)


def _nbytes(chunks: Iterable[Chunk]) -> int:
    return sum(chunk.nbytes for chunk in chunks)
