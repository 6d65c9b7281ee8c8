"""Over data-parallel ranks: the weights of a stage come together once for all of its micro-batches.

Else each unit is gathered for each micro-batch, and what is exchanged grows with their number. A stage is held from its
first micro-batch until another stage of the rank runs, or the step is over, if DEVICE has room for it in addition to
all that was ever pinned together without it. That is known after the first step, so it is the second one that holds.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from chunkmem.assembly.runtime import Runtime
from chunkmem.data.types import Tier


class HeldStage:
    """Holds one stage of this rank at a time; with one rank for each stage, nothing."""

    def __init__(self, runtime: Runtime) -> None:
        """Hold none."""
        self._runtime = runtime
        self._held: tuple[int, ...] = ()
        self._num_steps = 0
        self._fits: set[nn.Module] = set()
        """Stages that all ranks have room for."""
        self._refused: set[nn.Module] = set()
        """Stages that a rank has no room for, in this step."""

    def begin(self, stages: Iterable[nn.Module]) -> None:
        """A step begins. Raises a `RankError` if a rank is missing."""
        runtime = self._runtime
        self._refused.clear()
        self._num_steps += 1
        if runtime.sharding.shards is not None and self._num_steps == 2:
            cap_nbytes = runtime.memory.store.pools[Tier.DEVICE].ledger.cap_nbytes
            room_nbytes = cap_nbytes - runtime.memory.pager.required_nbytes[Tier.DEVICE]
            chunks = runtime.modules.access.chunks
            sizes = {stage: sum(chunks[group].nbytes for group in self._groups(stage)) for stage in stages}
            is_short = [nbytes > room_nbytes for nbytes in sizes.values()]
            found = zip(sizes, runtime.ranks.any_over(is_short, label="room for stages"), strict=True)
            self._fits = {stage for stage, any_is_short in found if not any_is_short}
            if self._fits:
                runtime.forget_plans()

    def hold(self, stage: nn.Module) -> None:
        """Hold a stage, which runs or is about to, in place of the one that is held, if all ranks have room.

        Raises:
            RankError: a rank is missing, or somewhere else.
        """
        prefetch = self._runtime.sharding.units.prefetch
        if prefetch is None or stage in self._refused:
            return
        groups = self._groups(stage)
        if groups == self._held:
            return
        self.release()
        if prefetch.hold(groups, reader="a stage", can=stage in self._fits):
            self._held = groups
        else:
            self._refused.add(stage)

    def release(self) -> None:
        """Hold none."""
        held, self._held = self._held, ()
        if held and self._runtime.sharding.shards is not None:
            self._runtime.sharding.shards.release(held)

    def _groups(self, stage: nn.Module) -> tuple[int, ...]:
        chunks = self._runtime.modules.access.chunks
        groups = {one.group for one in self._runtime.registry.managed_under(stage).values()}
        return tuple(sorted(group for group in groups if chunks[group].is_exchanged))
