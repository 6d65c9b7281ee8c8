"""Norms and factors of gradients that are means over ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from chunkmem.data.errors import StateError
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.gradient_slots import GradientSlots
from chunkmem.ranks.shards import ShardStore
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.pager import Pager

_NONE = -1.0
"""Stands for the norm of a gradient that a rank does not own."""


class SharedGradients:
    """The gradients of several ranks, each of which owns some.

    What one rank has of a gradient is not the gradient. Below `DistributedDataParallel` it is: backward leaves means in
    `.grad`. Where there is such a wrapper, the first norm that a user asks for has all ranks form the means and compare
    the norms of all parameters, which are kept until a gradient changes. A factor is agreed on once, and each rank
    multiplies what it owns. All ranks have to ask for the same, as they do when they run the same program; what was
    multiplied is part of what they compare when the step begins.
    """

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
            StateError: each rank has a part of it.
        """
        if self._shards.is_each_ranks(managed.group):
            raise StateError(
                f"a norm of the gradient of {managed.name}, of which each rank has a part: call "
                "optimizer.clip_grad_norm_(max_norm) on all ranks, or set gradient_clipping"
            )
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
            with self._reduced(f"multiplication of gradients by {factor}"):
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
    def _reduced(self, call: str) -> Iterator[None]:
        """Surround a call that all ranks make, named alike, inside of which owners have the means."""
        with ExitStack() as stack:
            for surround in self._pager.events.reducing:
                stack.enter_context(surround(call))
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
        with torch.no_grad(), self._reduced(f"norms of order {order} of gradients"), runtime_mode():
            own = [self._own_norm(managed, order) for managed in params]
            found = self._shards.ranks.max_over(own, label="norms of gradients")
        return {managed: 0.0 if norm == _NONE else norm for managed, norm in zip(params, found, strict=True)}

    def _own_norm(self, managed: ManagedParameter, order: float) -> float:
        if not self._has(managed):
            return _NONE
        return float(torch.linalg.vector_norm(self._gradients.value(managed), order))
