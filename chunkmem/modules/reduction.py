"""Gradients over ranks: the owner of each group gets the mean, once a step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy
import torch
from torch import nn

from chunkmem.data.layout import EACH
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.gradient_slots import GradientSlots
from chunkmem.ranks.agreement import Operation
from chunkmem.ranks.exchange import Shard
from chunkmem.ranks.shards import ShardStore
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.pager import Pager

_READER = "reduction of gradients"
_BUCKET_NUMEL = 1 << 22


class Reduction:
    """Reduces what has landed on any rank and has not been reduced yet."""

    def __init__(
        self, shards: ShardStore, gradients: GradientSlots, pager: Pager, *, show: Callable[[ManagedParameter], None]
    ) -> None:
        """Begin with nothing under way.

        Args:
            shards: of ranks, which own the groups.
            gradients: in their slots.
            pager: of their chunks.
            show: is told of each parameter whose mean this rank has, of gradients that any rank had.
        """
        self.shards = shards
        self._gradients = gradients
        self._pager = pager
        self._show = show
        self._under_way: list[tuple[list[Chunk], Callable[[], None]]] = []
        """Chunks that are being reduced, and what waits for that."""

    def is_trained(self, group: int) -> bool:
        """Tell whether a group has gradients at all; the same on all ranks, which agree on what is frozen."""
        return bool(self._gradients.groups[group].trained)

    def reduce(self, params: Sequence[ManagedParameter], *, is_step: bool) -> None:
        """Let the owners have the means over ranks; a rank without a gradient counts as one of zeros.

        All ranks have just agreed that they come here.

        Args:
            params: all managed parameters, in the same order on all ranks.
            is_step: an optimizer uses the means now.

        Raises:
            CapacityError: a chunk of gradients does not fit DEVICE.
            RankError: a rank is missing, or somewhere else, or has discarded its part in a mean, and another has not.
        """
        self._reduce_fresh(params, is_alike=self.shards.ranks.connection.is_alike, is_agreed=True)
        if is_step:
            self._gradients.hand_over()

    def _reduce_fresh(self, params: Sequence[ManagedParameter], *, is_alike: bool, is_agreed: bool) -> None:
        gradients = self._gradients
        sets = self._sets()
        if not is_alike:
            sets = self._anywhere(params, *sets, is_agreed=is_agreed)
        is_fresh, is_given, is_withdrawn = sets
        if disputed := is_given & is_withdrawn:
            self._refuse(disputed)
        gradients.withdrawn.clear()
        gradients.take_out(is_withdrawn)
        groups = {managed.group for managed in is_fresh}
        self._reduce_groups(groups)
        self._reduce_own(groups)
        has_any = is_fresh | is_given
        gradients.anywhere.difference_update(is_withdrawn - has_any)
        gradients.anywhere |= has_any
        for managed in params:
            if managed in has_any and self.shards.owns(managed.group) and managed.group in gradients.landed:
                self._show(managed)  # others were updated in backward
        gradients.drop_empty()

    def _sets(self) -> list[set[ManagedParameter]]:
        """Return of which parameters this rank has a gradient, has one in a mean, and has withdrawn one from a mean."""
        fresh = {managed for landed in self._gradients.fresh.values() for managed in landed}
        return [fresh, set(self._gradients.given), set(self._gradients.withdrawn)]

    def state(self) -> bytes:
        """Return of which parameters this rank has gradients: where all ranks have alike, none need tell the others."""
        sets, slots, is_own = self._sets(), self._gradients.groups, self.shards.is_each_ranks
        is_one_replica = self.shards.ranks.replicate is None
        shared = [group for number, group in sorted(slots.items()) if not (is_one_replica and is_own(number))]
        flags = [managed in some for some in sets for group in shared for managed in group.members]
        return numpy.packbits(numpy.array(flags, dtype=bool)).tobytes()

    def _anywhere(
        self, params: Sequence[ManagedParameter], *sets: Collection[ManagedParameter], is_agreed: bool = False
    ) -> list[set[ManagedParameter]]:
        """Return which of `params` are in each of some sets on any rank that has them."""
        ranks, is_own = self.shards.ranks, self.shards.is_each_ranks
        here = ranks.shard.rank
        places = [(m, at) for m in params for at in (range(ranks.shard.size) if is_own(m.group) else (here,))]
        # What is each rank's own has a flag for each of them.
        flags = [managed in some and at == here for some in sets for managed, at in places]
        found = iter(ranks.any_over(flags, label=_READER, is_agreed=is_agreed))
        return [{managed for managed, at in places if next(found) and at == here} for _ in sets]

    def _refuse(self, disputed: set[ManagedParameter]) -> None:
        """Raise a `RankError`: of what has been added up, one rank's part cannot be taken out any more."""
        ranks = self.shards.ranks
        said = "gradients were given up since the last step"
        ranks.connection.know(frozenset(f"parameter {m.name}: {said}" for m in disputed & self._gradients.withdrawn))
        ranks.connection.begin(Operation(_READER))

    def reduce_early(self, params: Sequence[ManagedParameter]) -> list[ManagedParameter]:
        """Reduce before the step what has landed so far; return those of `params` that have a gradient on any rank.

        Raises what `reduce` does.
        """
        groups = self._gradients.groups
        params_of_all = [managed for group in sorted(groups) for managed in groups[group].members]
        self._reduce_fresh(params_of_all, is_alike=False, is_agreed=False)
        (anywhere,) = self._anywhere(params, {m for landed in self._gradients.landed.values() for m in landed})
        return [managed for managed in params if managed in anywhere]

    def reduce_groups(self, groups: Sequence[int]) -> None:
        """Let the owners of these groups have the means of what has landed on any rank.

        It is left to the step where a rank has withdrawn something: that is told there. Raises what `reduce` does.
        """
        if self._agree(groups):
            self._reduce_groups(groups)
            if self.shards.ranks.replicate is None:  # else it is not known which replicas have gradients
                self._reduce_own(groups)

    def _agree(self, groups: Sequence[int]) -> bool:
        return self.shards.agree_to_reduce(groups, reader=_READER, can=not self._gradients.withdrawn)

    def join(self, lists: Iterable[Sequence[int]]) -> None:
        """Take part in a reduction that other ranks have begun. Raises what `reduce` does."""
        self._reduce_groups([group for together in lists for group in together])

    def _reduce_groups(self, groups: Collection[int]) -> None:
        for together in self.shards.together(groups):
            self._begin(together)
            self.finish()

    def _reduce_own(self, groups: Iterable[int]) -> None:
        """Make means over ranks of what one rank of a replica has: the sum of the others' gradients has come to it."""
        gradients = self._gradients
        for group in filter(self.shards.is_each_ranks, sorted(groups)):
            gradients.complete(group, reader=_READER)
            chunk = gradients.groups[group].chunk
            self._pager.pin(chunk, reader=_READER)
            try:
                with runtime_mode():
                    own = Shard(group, EACH, chunk.replicas[chunk.compute_tier].flat)
                    self.shards.exchange.reduce([own], label=_READER).wait()
                gradients.reduced(group)
            finally:
                self._unpin([chunk])
            for listener in self._pager.events.reduced:
                listener(group)

    def begin(self, groups: Sequence[int]) -> None:
        """Begin what `reduce_groups` does; until it is finished the gradients stay on DEVICE."""
        for together in self.shards.together(groups) if self._agree(groups) else ():
            self._begin(together)

    def finish(self) -> None:
        """Wait for what was begun. Raises what `reduce` does."""
        under_way, self._under_way = self._under_way, []
        for chunks, _ in under_way:
            for chunk in chunks:
                self._gradients.groups[chunk.id.group].finish = None
        for chunks, wait in under_way:
            try:
                wait()
                for chunk in chunks:
                    if self.shards.owns(chunk.id.group):
                        self._gradients.reduced(chunk.id.group)  # before a plan may copy it anywhere
            finally:
                self._unpin(chunks)
            for chunk in chunks:
                if not self.shards.owns(chunk.id.group):
                    self._gradients.give_up(chunk.id.group)
        for chunk in (chunk for chunks, _ in under_way for chunk in chunks):
            for listener in self._pager.events.reduced:
                listener(chunk.id.group)

    def _begin(self, together: Sequence[int]) -> None:
        gradients, held = self._gradients, []
        try:
            for group in together:
                gradients.complete(group, reader=_READER)
                chunk = gradients.groups[group].chunk
                self._pager.pin(chunk, reader=_READER)
                held.append(chunk)
            wait = self.shards.begin_reduction(held, reader=_READER)
        except BaseException:
            self._unpin(held)
            raise
        self._under_way.append((held, wait))
        for group in together:
            gradients.groups[group].finish = self.finish

    def _unpin(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self._pager.unpin(chunk)


class OrdinaryGradients:
    """Gradients of parameters that no chunk holds, which are averaged over ranks: at the step, or before."""

    def __init__(self, shards: ShardStore | None) -> None:
        """Begin with none; with one rank nothing is done."""
        self._shards = shards
        self.parameters: list[nn.Parameter] = []
        """The same on all ranks, in one order."""
        self._is_last = False
        """The next backward is the last one before the step, as `DistributedDataParallel` says."""

    def declare_last(self, is_last: bool) -> None:
        """Say, as `DistributedDataParallel` does, whether the next backward is the last one before the step."""
        self._is_last = is_last

    def end_backward(self) -> None:
        """Below `DistributedDataParallel`, have the means when backward is over. Raises what `reduce` does."""
        if self._is_last and self.parameters:
            self._is_last = False
            self.reduce()

    def reduce(self) -> None:
        """Let every rank have the means. Where one has a gradient, the others get one.

        Raises:
            RankError: a rank does not come here.
        """
        if self._shards is None:
            return
        params, ranks = self.parameters, self._shards.ranks
        anywhere = ranks.any_over([p.grad is not None for p in params], label=_READER)
        alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for param, found in zip(params, anywhere, strict=True):
            if found:
                alike.setdefault((param.dtype, param.device), []).append(param)
        with runtime_mode():
            for some in alike.values():
                _reduce_alike(some, self._shards)


def _reduce_alike(params: Collection[torch.Tensor], shards: ShardStore) -> None:
    ranks, exchange = shards.ranks, shards.exchange
    ranks.connection.begin(Operation(f"{_READER} of {len(params)} parameters that no chunk holds"))
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in params])
    parts = [Shard(index, index % ranks.shard.size, part) for index, part in enumerate(flat.split(_BUCKET_NUMEL))]
    exchange.reduce(parts, label=_READER).wait()
    exchange.gather(parts, label=_READER).wait()
    for param, mean in zip(params, flat.split([p.numel() for p in params]), strict=True):
        if param.grad is None:
            param.grad = torch.empty_like(param)
        param.grad.copy_(mean.view_as(param))
