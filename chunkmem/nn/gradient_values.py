"""The values of gradients that have landed, for the lazy ones in `.grad` that ask for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from chunkmem.errors import StateError
from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.gradient_slots import GradientSlots
from chunkmem.nn.gradient_source import GradientSource, GradientState
from chunkmem.nn.shared_gradients import SharedGradients
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.pager import Pager
from chunkmem.types import Tier


class GradientValues(GradientSlots):
    """Serves what users do to lazy gradients; see `GradientOwner`."""

    def __init__(
        self, pager: Pager, *, settles: Callable[[int], bool], is_shared: bool = False, is_of_stage: bool = False
    ) -> None:
        """Begin with none.

        Args:
            pager, settles: see `GradientSlots`.
            is_shared: summed over ranks, what one has is not the gradient.
            is_of_stage: other ranks have the gradients of other pipeline stages.
        """
        super().__init__(pager, settles=settles)
        self.is_shared = is_shared
        self.shared: SharedGradients | None = None
        """Over ranks: norms and scalings that users ask for."""
        self.shows_means = False
        """`.grad` stands for the mean over ranks, as it does below `DistributedDataParallel`."""
        self.is_of_stage = is_of_stage
        self.before_change: Callable[[], None] = lambda: None
        """Called before gradients are changed by a user: updates that have read them are wrong."""
        self.before_adding: Callable[[ManagedParameter], None] = lambda managed: None
        """Called before backward adds to a gradient; may refuse that."""
        self._sources: dict[ManagedParameter, GradientSource] = {}
        self._by_param: dict[int, ManagedParameter] = {}
        """By the identity of the Parameter."""

    def add(self, parameters: Iterable[ManagedParameter]) -> None:
        """Take in the parameters of a model that was packed."""
        parameters = tuple(parameters)
        super().add(parameters)
        for managed in parameters:
            self._sources[managed] = GradientSource(managed, self)
            self._by_param[id(managed.param)] = managed

    def land(self, managed: ManagedParameter, grad: torch.Tensor, *, replacing: bool = False) -> None:
        super().land(managed, grad, replacing=replacing)
        if self.shared is not None:
            self.shared.changed()

    def forget(self, params: Collection[ManagedParameter], *, of_all_ranks: bool = True) -> None:
        if self.shared is not None:
            self.shared.changed()
        super().forget(params, of_all_ranks=of_all_ranks)

    def norm_over_ranks(self, source: GradientSource, order: float) -> float:
        """Return the norm of the mean over ranks of a gradient that `.grad` shows; all ranks ask for it.

        Raises:
            StateError: there are no values.
            RankError: a rank is missing, or somewhere else.
        """
        return self._over_ranks(source).norm(self.members[source.group][source.position], order)

    def slots_over_ranks(self, sources: Sequence[GradientSource], factor: float) -> list[list[torch.Tensor]]:
        """Return for each gradient where its mean is on this rank, to be multiplied by `factor`, as on all ranks.

        Raises what `norm_over_ranks` does.
        """
        shared = [self._over_ranks(source) for source in sources]
        self.before_change()
        managed = [self.members[source.group][source.position] for source in sources]
        return shared[0].slots_to_scale(managed, factor) if shared else []

    def _over_ranks(self, source: GradientSource) -> SharedGradients:
        if self._pager.closed is not None:
            raise StateError(f"the gradient of {source.name}: {self._pager.closed}")
        if source.state is not GradientState.LIVE:
            raise source.lacks_values()
        assert self.shared is not None
        return self.shared

    def require_known(self, params: Iterable[ManagedParameter], *, has_new: bool = False) -> None:
        """Raise if plain PyTorch would use a gradient that is gone, by itself or in a sum with a new one.

        `has_new`: others than `params` have got gradients since.

        Raises:
            StateError: there was no `zero_grad()` after a step, and a backward since.
        """
        sources = [self._sources[managed] for managed in params]
        for source in sources:
            if source.state is GradientState.OVERDUE:
                raise source.is_overdue()
        consumed = [source for source in sources if source.state is GradientState.CONSUMED]
        if consumed and (has_new or any(source.state is GradientState.LIVE for source in sources)):
            raise consumed[0].lacks_values()

    def consumed(self, params: Iterable[ManagedParameter]) -> None:
        """The step has used up the gradients of `params`, on whichever rank."""
        for managed in params:
            if self._sources[managed].state is GradientState.LIVE:
                self._sources[managed].state = GradientState.CONSUMED

    def accumulate(self, source: GradientSource, grad: torch.Tensor) -> None:
        """Add what autograd has found to the gradient that `.grad` shows. Raises what `land` does."""
        managed = self.members[source.group][source.position]
        self.before_adding(managed)
        if source.state is GradientState.LIVE:
            self.land(managed, grad)
        elif source.state is GradientState.ZEROED:
            self.land(managed, grad + 0, replacing=True)  # -0 becomes 0, as in a sum
            source.state = GradientState.LIVE
        elif source.state is GradientState.CONSUMED:
            source.state = GradientState.OVERDUE
        elif source.state is GradientState.NONE:
            raise source.lacks_values()

    def locate(self, source: GradientSource, *, writing: bool, overwriting: bool = False) -> list[torch.Tensor]:
        """Return the slot where it is; with `writing`, on every tier that has it, the newest first.

        With `overwriting`, values that were consumed are not missed.

        Raises:
            StateError: there are no values, or only this rank's part of them.
        """
        managed = self.members[source.group][source.position]
        if self._pager.closed is not None:
            raise StateError(f"the gradient of {source.name}: {self._pager.closed}")
        known = (GradientState.LIVE, GradientState.ZEROED)
        if source.state not in known and (source.state is GradientState.NONE or not overwriting):
            raise source.lacks_values()
        if self.is_shared:
            raise StateError(
                f"the gradient of {source.name} is summed over ranks when the step begins, and what this one has of it "
                "is not the gradient; clip with optimizer.clip_grad_norm_(), read and write it inside "
                "manager.gather(p, grads=True)"
            )
        if source.state is GradientState.ZEROED and not writing:
            return [source.zeros()]
        if source.state is not GradientState.LIVE:
            self._land_zeros(managed)
        if writing:
            self.before_change()
        self._pager.policy.drain()
        chunk = self.chunks[source.group]
        reader = f"the gradient of {source.name}"
        in_use = self._pager.in_memory(chunk, reader=reader) if not writing else None
        tiers = [in_use] if in_use is not None else self._pager.to_write(chunk, reader=reader)
        return [self._pager.store.views(chunk, tier)[source.position] for tier in tiers]

    @property
    def may_page_out(self) -> bool:
        """Tell whether locating one gradient may move others out of memory, to DISK."""
        return Tier.DISK in self._pager.store.pools

    def staying(self, source: GradientSource) -> AbstractContextManager[None]:
        """Inside, a gradient stays where it was located."""
        return self._pager.staying(self.chunks[source.group]) if self.may_page_out else nullcontext()

    def zero(self, source: GradientSource) -> None:
        """Set a gradient to zero, over ranks this one's part of it; one that was consumed is zero from now on.

        Raises:
            StateError: the manager is closed, or the gradient was discarded.
        """
        managed = self.members[source.group][source.position]
        if self._pager.closed is not None:
            raise StateError(f"the gradient of {source.name}: {self._pager.closed}")
        if source.state is GradientState.NONE:
            raise source.lacks_values()
        if source.state is not GradientState.LIVE:
            source.state = GradientState.ZEROED
        elif managed in self.given:  # of a mean, this rank can only withdraw its part
            self.before_change()
            self._land_zeros(managed)
        elif managed in self._landed.get(managed.group, ()):
            self.before_change()
            self.zero_landed(managed)

    def require_present(self, tensor: torch.Tensor) -> None:
        """Raise if `tensor` is a managed parameter that is away.

        Raises:
            StateError: what is written to it would be lost.
        """
        managed = self._by_param.get(id(tensor))
        if managed is not None and managed.param is tensor and not managed.bound.is_bound:
            raise StateError(
                f"parameter {managed.name} is not on DEVICE, and what is written to it would be lost; update it with "
                "chunkmem.AdamW, chunkmem.Adam or chunkmem.Optimizer, or write to it inside manager.gather()"
            )

    def _land_zeros(self, managed: ManagedParameter) -> None:
        source = self._sources[managed]
        with runtime_mode():
            zero = torch.zeros((), dtype=source.dtype, device=source.device)
        self.land(managed, zero, replacing=True)
        source.state = GradientState.LIVE
