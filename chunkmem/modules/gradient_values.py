"""The values of gradients that have landed, for the lazy ones in `.grad` that ask for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum

import torch

from chunkmem.data.errors import StateError
from chunkmem.modules.begun import StepLedger
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.gradient_slots import GradientSlots
from chunkmem.modules.shared_gradients import SharedGradients
from chunkmem.ranks.shards import ShardStore
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.pager import Pager


class GradientState(Enum):
    """What `.grad` stands for. Memory for values exists in LIVE alone."""

    NONE = "none"
    """There is no gradient: before the first backward, or after `zero_grad()`."""
    LIVE = "live"
    """It is in its slot; over ranks it may have gone into a mean."""
    CONSUMED = "consumed"
    """`step()` has used it up. Plain PyTorch would still have it."""
    OVERDUE = "overdue"
    """CONSUMED, and a backward has added to it: plain PyTorch would have the sum, and here it cannot be known."""
    ZEROED = "zeroed"
    """CONSUMED, and set to zero."""


class GradientSource:
    """One parameter's gradient. It refers to no parameter: Python does not see the cycle through `.grad`."""

    def __init__(self, managed: ManagedParameter, owner: GradientValues) -> None:
        self._owner = weakref.ref(owner)
        self.name = managed.name
        self.group = managed.group
        self.position = managed.position
        self.shape = managed.shape
        self.stride = managed.stride
        self.dtype = managed.placeholder.dtype
        self.device = managed.placeholder.device
        self.life = 0
        """Number of the gradient that `.grad` shows; what shows an earlier one has lost its values."""

    @property
    def owner(self) -> GradientValues:
        """The owner of the slot.

        Raises:
            StateError: there is nobody any more.
        """
        owner = self._owner()
        if owner is None:
            raise StateError(f"the gradient of {self.name}: its manager is gone; keep the manager, or clone() before")
        return owner

    def zeros(self) -> torch.Tensor:
        """Return an ordinary gradient of zeros."""
        with runtime_mode():
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()

    def require_current(self, life: int) -> None:
        """Raise if the gradient that was number `life` is gone.

        Raises:
            StateError: another one has taken its place.
        """
        if life != self.life:
            raise StateError(
                f"this gradient of {self.name} is an earlier one: zero_grad() or an assignment to .grad, and another "
                "backward, have taken its memory; keep a copy, p.grad.clone(), to have it longer"
            )

    def lacks_values(self, state: GradientState) -> StateError:
        """Return the error for what needs the values of a gradient that is not there."""
        if state is GradientState.CONSUMED:
            return StateError(
                f"the gradient of {self.name} was consumed by step(), or inside backward by an optimizer with "
                "in_backward=True, and has no values any more; read it, or take p.grad.clone(), between backward and "
                "step(), and call optimizer.zero_grad() before the next backward"
            )
        if state is GradientState.OVERDUE:
            return self.is_overdue()
        return StateError(
            f"the gradient of {self.name} was discarded by zero_grad() or by an assignment to .grad; keep a copy, "
            "p.grad.clone(), to have it longer"
        )

    def is_overdue(self) -> StateError:
        """Return the error for a loop without `zero_grad()`."""
        return StateError(
            f"the gradient of {self.name} was consumed by step(), and a backward has added another since without "
            "zero_grad() in between: plain PyTorch would have the sum of both, and the first is gone. Call "
            "optimizer.zero_grad() after each step(); to accumulate, call step() after the last backward"
        )


class GradientValues:
    """The values of gradients in their slots: serves what users do to lazy ones."""

    def __init__(
        self,
        slots: GradientSlots,
        pager: Pager,
        ledger: StepLedger,
        *,
        before_change: Callable[[], None],
        shards: ShardStore | None,
        own_share: str,
    ) -> None:
        """Begin with none.

        Args:
            slots: of the gradients.
            pager: of their chunks.
            ledger: of begun steps; it may refuse what backward adds.
            before_change: called before gradients are changed by a user: updates that have read them are wrong.
            shards: over ranks; summed over those, what one has is not the gradient.
            own_share: which gradients these are, where other ranks have others of the model; else "".
        """
        self._slots = slots
        self._pager = pager
        self._ledger = ledger
        self._before_change = before_change
        self.shared = None if shards is None else SharedGradients(slots, pager, shards, parameters=lambda: self.sources)
        """Over ranks: norms and scalings that users ask for."""
        self.shows_means = False
        """`.grad` stands for the mean over ranks, as it does below `DistributedDataParallel`."""
        self.own_share = own_share
        self.sources: dict[ManagedParameter, GradientSource] = {}
        """Of all managed parameters."""
        self.states: dict[ManagedParameter, GradientState] = {}
        """What `.grad` stands for, where that is not NONE."""
        self._by_param: dict[int, ManagedParameter] = {}
        """By the identity of the Parameter."""

    def add(self, parameters: Iterable[ManagedParameter]) -> None:
        """Take in the parameters of a model that was packed."""
        for managed in parameters:
            self.sources[managed] = GradientSource(managed, self)
            self._by_param[id(managed.param)] = managed

    def state(self, managed: ManagedParameter) -> GradientState:
        """Return what `.grad` of a parameter stands for."""
        return self.states.get(managed, GradientState.NONE)

    def norm_over_ranks(self, source: GradientSource, order: float) -> float:
        """Return the norm of the mean over ranks of a gradient that `.grad` shows; all ranks ask for it.

        Raises:
            StateError: there are no values.
            RankError: a rank is missing, or somewhere else.
        """
        return self._over_ranks(source).norm(self._managed(source), order)

    def slots_over_ranks(self, sources: Sequence[GradientSource], factor: float) -> list[list[torch.Tensor]]:
        """Return for each gradient where its mean is on this rank, to be multiplied by `factor`, as on all ranks.

        Raises what `norm_over_ranks` does.
        """
        managed = [self._managed(source) for source in sources]
        shared = [self._over_ranks(source) for source in sources]
        self._before_change()
        return shared[0].slots_to_scale(managed, factor) if shared else []

    def _managed(self, source: GradientSource) -> ManagedParameter:
        if self._pager.closed is not None:
            raise StateError(f"the gradient of {source.name}: {self._pager.closed}")
        return self._slots.groups[source.group].members[source.position]

    def _over_ranks(self, source: GradientSource) -> SharedGradients:
        state = self.state(self._managed(source))
        if state is not GradientState.LIVE:
            raise source.lacks_values(state)
        assert self.shared is not None
        return self.shared

    def require_known(self, params: Iterable[ManagedParameter], *, has_new: bool) -> None:
        """Raise if plain PyTorch would use a gradient that is gone, by itself or in a sum with a new one.

        `has_new`: others than `params` have got gradients since.

        Raises:
            StateError: there was no `zero_grad()` after a step, and a backward since.
        """
        if not self.states:
            return
        states = [(managed, self.states[managed]) for managed in params if managed in self.states]
        for managed, state in states:
            if state is GradientState.OVERDUE:
                raise self.sources[managed].is_overdue()
        consumed = [managed for managed, state in states if state is GradientState.CONSUMED]
        if consumed and (has_new or any(state is GradientState.LIVE for _, state in states)):
            raise self.sources[consumed[0]].lacks_values(GradientState.CONSUMED)

    def consumed(self, params: Iterable[ManagedParameter]) -> None:
        """The step has used up the gradients of `params`, on whichever rank."""
        states = self.states
        for managed in params if states else ():
            if managed in states and states[managed] is GradientState.LIVE:
                states[managed] = GradientState.CONSUMED

    def accumulate(self, source: GradientSource, grad: torch.Tensor) -> None:
        """Add what autograd has found to the gradient that `.grad` shows. Raises what `land` does."""
        managed = self._managed(source)
        self._ledger.before_gradient(managed)
        state = self.state(managed)
        if state is GradientState.LIVE:
            self._slots.land({managed: grad}, adding=True)
        elif state is GradientState.ZEROED:
            self._slots.land({managed: grad + 0})  # -0 becomes 0, as in a sum
            self.states[managed] = GradientState.LIVE
        elif state is GradientState.CONSUMED:
            self.states[managed] = GradientState.OVERDUE
        elif state is GradientState.NONE:
            raise source.lacks_values(state)

    def locate(self, source: GradientSource, *, writing: bool, overwriting: bool = False) -> list[torch.Tensor]:
        """Return the slot where it is; with `writing`, on every tier that has it, the newest first.

        With `overwriting`, values that were consumed are not missed.

        Raises:
            StateError: there are no values, or only this rank's part of them.
        """
        managed = self._managed(source)
        state = self.state(managed)
        known = (GradientState.LIVE, GradientState.ZEROED)
        if state not in known and (state is GradientState.NONE or not overwriting):
            raise source.lacks_values(state)
        if self.shared is not None:
            raise StateError(
                f"the gradient of {source.name} is summed over ranks when the step begins, and what this one has of it "
                "is not the gradient; clip with optimizer.clip_grad_norm_(), read and write it inside "
                "manager.gather(p, grads=True)"
            )
        if state is GradientState.ZEROED and not writing:
            return [source.zeros()]
        if state is not GradientState.LIVE:
            self.land_zeros(managed)
        if writing:
            self._before_change()
        self._pager.policy.drain()
        chunk = self._slots.groups[source.group].chunk
        reader = f"the gradient of {source.name}"
        in_use = self._pager.in_memory(chunk, reader=reader) if not writing else None
        tiers = [in_use] if in_use is not None else self._pager.to_write(chunk, reader=reader)
        return [self._pager.store.views(chunk, tier)[source.position] for tier in tiers]

    @property
    def may_page_out(self) -> bool:
        """Tell whether locating one gradient may move others out of memory, to DISK."""
        return self._pager.store.host_is_gateway

    def staying(self, source: GradientSource) -> AbstractContextManager[None]:
        """Inside, a gradient stays where it was located."""
        return self._pager.staying(self._slots.groups[source.group].chunk) if self.may_page_out else nullcontext()

    def zero(self, source: GradientSource) -> None:
        """Set a gradient to zero, over ranks this one's part of it; one that was consumed is zero from now on.

        Raises:
            StateError: the manager is closed, or the gradient was discarded.
        """
        managed = self._managed(source)
        state = self.state(managed)
        if state is GradientState.NONE:
            raise source.lacks_values(state)
        if state is not GradientState.LIVE:
            self.states[managed] = GradientState.ZEROED
        elif managed in self._slots.given:  # of a mean, this rank can only withdraw its part
            self._before_change()
            self.land_zeros(managed)
        elif self._slots.any_landed((managed,)):
            self._before_change()
            self._slots.zero_landed(managed)

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

    def land_zeros(self, managed: ManagedParameter) -> None:
        """Let a gradient that was consumed be zero, in its slot."""
        source = self.sources[managed]
        with runtime_mode():
            zero = torch.zeros((), dtype=source.dtype, device=source.device)
        self._slots.land({managed: zero})
        self.states[managed] = GradientState.LIVE
