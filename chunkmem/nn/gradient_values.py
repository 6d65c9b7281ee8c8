"""The values of gradients that have landed, for the lazy ones in `.grad` that ask for them.

[Note: Clipping over ranks] What one rank has of a gradient is not the gradient. Below `DistributedDataParallel` it is:
backward leaves means in `.grad`. Where there is such a wrapper, the first norm that a user asks for has all ranks form
the means and compare the norms of all parameters, which are kept until a gradient changes. A factor is agreed on once,
and each rank multiplies what it owns. All ranks have to ask for the same, as they do when they run the same program;
what was multiplied is part of what they compare when the step begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

from chunkmem.errors import StateError
from chunkmem.nn.begun import StepLedger
from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.gradient_slots import GradientSlots
from chunkmem.nn.gradient_source import GradientSource, GradientState
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.pager import Pager
from chunkmem.shard.shards import ShardStore

_NONE = -1.0
"""Stands for the norm of a gradient that a rank does not own."""


class SharedGradients:
    """The gradients of several ranks, each of which owns some."""

    def __init__(
        self,
        gradients: GradientSlots,
        pager: Pager,
        shards: ShardStore,
        *,
        parameters: Callable[[], Iterable[ManagedParameter]],
    ) -> None:
        """Serve norms and scalings.

        Args:
            gradients: in their slots.
            pager: of their chunks.
            shards: of ranks, which own some each, and get the means of these.
            parameters: returns all managed ones, in the same order on all ranks.
        """
        self._gradients = gradients
        self._pager = pager
        self._shards = shards
        self._parameters = parameters
        self._norms: dict[float, dict[ManagedParameter, float]] = {}
        """By order: as long as no gradient changes."""
        self._norms_at = 0
        """The number of changes of gradients at that time."""
        self._factors: set[float] = set()
        """That ranks have agreed on since the last step."""
        self._scaled: list[tuple[int, int, float]] = []
        """Group and position of what was multiplied since the last step, and by what."""

    def norm(self, managed: ManagedParameter, order: float) -> float:
        """Return the norm of the mean over ranks of a gradient; all ranks ask for it.

        Raises:
            RankError: a rank is missing, or somewhere else.
        """
        if self._norms_at != self._gradients.num_changes:
            self._norms.clear()
        if order not in self._norms:
            self._norms[order] = self._all_norms(order)
            self._norms_at = self._gradients.num_changes
        return self._norms[order][managed]

    def slots_to_scale(self, managed: Sequence[ManagedParameter], factor: float) -> list[list[torch.Tensor]]:
        """Return for each parameter where its mean is on this rank, on every tier; all ranks multiply by `factor`.

        Raises:
            RankError: a rank is missing, or multiplies by something else.
        """
        if factor not in self._factors:
            with self._settled(f"multiplication of gradients by {factor}"):
                self._factors.add(factor)
        self._norms.clear()
        self._scaled += [(one.group, one.position, factor) for one in managed]
        return [self._replicas(one) if self._has(one) else [] for one in managed]

    def end_step(self) -> None:
        """The gradients were used up."""
        self._norms.clear()
        self._factors.clear()
        self._scaled.clear()

    def in_words(self) -> str:
        """Return what was multiplied since the last step: the same on all ranks."""
        if not self._scaled:
            return ""
        return f"; gradients multiplied: {hashlib.sha256(repr(sorted(self._scaled)).encode()).hexdigest()[:16]}"

    @contextmanager
    def _settled(self, call: str) -> Iterator[None]:
        """Surround a call that all ranks make, named alike, inside of which owners have the means."""
        with ExitStack() as stack:
            for settle in self._pager.events.settling:
                stack.enter_context(settle(call))
            yield

    def _has(self, managed: ManagedParameter) -> bool:
        return self._shards.owns(managed.group) and managed in self._gradients.landed.get(managed.group, ())

    def _replicas(self, managed: ManagedParameter) -> list[torch.Tensor]:
        chunk = self._gradients.groups[managed.group].chunk
        self._pager.policy.drain()
        tiers = self._pager.to_write(chunk, reader=f"the gradient of {managed.name}")
        return [self._pager.store.views(chunk, tier)[managed.position] for tier in tiers]

    def _all_norms(self, order: float) -> dict[ManagedParameter, float]:
        params = list(self._parameters())
        with torch.no_grad(), self._settled(f"norms of order {order} of gradients"), runtime_mode():
            own = [self._own_norm(managed, order) for managed in params]
            found = self._shards.ranks.max_over(own, label="norms of gradients")
        return {managed: 0.0 if norm == _NONE else norm for managed, norm in zip(params, found, strict=True)}

    def _own_norm(self, managed: ManagedParameter, order: float) -> float:
        if not self._has(managed):
            return _NONE
        return float(torch.linalg.vector_norm(self._gradients.value(managed), order))


class GradientValues:
    """Serves what users do to lazy gradients; see `GradientOwner`."""

    def __init__(
        self,
        slots: GradientSlots,
        pager: Pager,
        ledger: StepLedger,
        *,
        before_change: Callable[[], None],
        shards: ShardStore | None = None,
        is_of_stage: bool = False,
    ) -> None:
        """Begin with none.

        Args:
            slots: of the gradients.
            pager: of their chunks.
            ledger: of begun steps; it may refuse what backward adds.
            before_change: called before gradients are changed by a user: updates that have read them are wrong.
            shards: over ranks; summed over those, what one has is not the gradient.
            is_of_stage: other ranks have the gradients of other pipeline stages.
        """
        self._slots = slots
        self._pager = pager
        self._ledger = ledger
        self._before_change = before_change
        self.shared = None if shards is None else SharedGradients(slots, pager, shards, parameters=lambda: self.sources)
        """Over ranks: norms and scalings that users ask for."""
        self.shows_means = False
        """`.grad` stands for the mean over ranks, as it does below `DistributedDataParallel`."""
        self.is_of_stage = is_of_stage
        self.sources: dict[ManagedParameter, GradientSource] = {}
        """Of all managed parameters."""
        self._by_param: dict[int, ManagedParameter] = {}
        """By the identity of the Parameter."""

    @property
    def is_shared(self) -> bool:
        """Several ranks have parts of each gradient."""
        return self.shared is not None

    def add(self, parameters: Iterable[ManagedParameter]) -> None:
        """Take in the parameters of a model that was packed."""
        for managed in parameters:
            self.sources[managed] = GradientSource(managed, self)
            self._by_param[id(managed.param)] = managed

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
        shared = [self._over_ranks(source) for source in sources]
        self._before_change()
        managed = [self._managed(source) for source in sources]
        return shared[0].slots_to_scale(managed, factor) if shared else []

    def _managed(self, source: GradientSource) -> ManagedParameter:
        return self._slots.groups[source.group].members[source.position]

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
        sources = [self.sources[managed] for managed in params]
        for source in sources:
            if source.state is GradientState.OVERDUE:
                raise source.is_overdue()
        consumed = [source for source in sources if source.state is GradientState.CONSUMED]
        if consumed and (has_new or any(source.state is GradientState.LIVE for source in sources)):
            raise consumed[0].lacks_values()

    def consumed(self, params: Iterable[ManagedParameter]) -> None:
        """The step has used up the gradients of `params`, on whichever rank."""
        for managed in params:
            if self.sources[managed].state is GradientState.LIVE:
                self.sources[managed].state = GradientState.CONSUMED

    def accumulate(self, source: GradientSource, grad: torch.Tensor) -> None:
        """Add what autograd has found to the gradient that `.grad` shows. Raises what `land` does."""
        managed = self._managed(source)
        self._ledger.before_gradient(managed)
        if source.state is GradientState.LIVE:
            self._slots.land(managed, grad)
        elif source.state is GradientState.ZEROED:
            self._slots.land(managed, grad + 0, replacing=True)  # -0 becomes 0, as in a sum
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
        managed = self._managed(source)
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
        if self._pager.closed is not None:
            raise StateError(f"the gradient of {source.name}: {self._pager.closed}")
        if source.state is GradientState.NONE:
            raise source.lacks_values()
        if source.state is not GradientState.LIVE:
            source.state = GradientState.ZEROED
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
        self._slots.land(managed, zero, replacing=True)
        source.state = GradientState.LIVE
