"""The gradients that wait for a step: their norm, and what they are multiplied by."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from chunkmem.data.errors import StateError
from chunkmem.modules.binding import ManagedParameter, by_group
from chunkmem.modules.lazy_gradient import LazyGradient
from chunkmem.optim.host import OptimizerHost
from chunkmem.optim.ops import global_norm, number_on, on_host
from chunkmem.runtime.device import runtime_mode


@dataclass(frozen=True)
class Clipping:
    """Gradients that are scaled to a norm, one after the other."""

    max_norm: float
    norm: torch.Tensor  # 0D
    """Before that, as it is without a loss scale."""
    coefficient: torch.Tensor  # 0D
    left: list[torch.Tensor]
    """Parameters whose gradients are to be scaled yet, the next one last."""


class PendingGradients:
    """Every gradient there is, wherever it is: in the slots of managed parameters, in `.grad` of excluded ones."""

    def __init__(
        self, host: OptimizerHost, params: Iterable[torch.Tensor], managed: Iterable[ManagedParameter]
    ) -> None:
        """Look the gradients up.

        Args:
            host: knows where gradients are, by what losses were multiplied, and the ranks over which the norm is
                formed: each has the gradients of its own groups, all those of `.grad`.
            params: of an optimizer. Their order is that of `model.parameters()`, as torch's clip_grad_norm_ is given
                them: a sum has other last bits in the order of the parameter groups.
            managed: those of them that are managed and have a gradient.

        Raises:
            StateError: there is no gradient.
        """
        self._managed: dict[torch.Tensor, ManagedParameter] = {one.param: one for one in managed}
        self._updater = host.updater
        self._is_lowered = host.is_lowered
        """The model computes in less than float32, and squares are summed in that."""
        self._scaler = host.scaler
        self._ranks = host.ranks
        parts = host.ranks.parts
        self._counts_excluded = host.ranks.rank == 0 and (parts is None or parts.rank == 0)
        """Every rank has the gradients of excluded parameters, and one counts them."""
        self._counted_elsewhere = host.registry.counted_elsewhere
        """Managed parameters that are part of the norm on another rank."""
        self._params = [
            param
            for param in host.registry.in_order(params)
            if param in self._managed or (param.grad is not None and not isinstance(param.grad, LazyGradient))
        ]
        """Those with a gradient. A lazy one of a parameter that is not among `managed` is another rank's."""
        if not self._params and self._ranks.are_one:
            raise StateError("no gradient to clip: call manager.backward(loss) or loss.backward() before it")

    def clipping(self, max_norm: float) -> Clipping:
        """Return how the gradients are scaled where they are, given their norm."""
        with runtime_mode():
            norm = self._norm()
            coefficient = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
            changes_nothing = float(coefficient) == 1.0  # torch multiplies by it all the same
        return Clipping(float(max_norm), norm, coefficient, [] if changes_nothing else self._params[::-1])

    def clip(self, clipping: Clipping) -> None:
        """Scale the gradients that are left to scale."""
        if clipping.left:
            self._updater.ahead.roll_back()
        coefficients: dict[torch.device, torch.Tensor] = {}
        with runtime_mode():
            while clipping.left:
                managed = self._managed.get(param := clipping.left[-1])
                replicas = [self._gradient(param)] if managed is None else self._updater.gradient_replicas(managed)
                for replica in replicas:
                    if replica.device not in coefficients:
                        coefficients[replica.device] = number_on(replica.device, clipping.coefficient)
                    replica.mul_(coefficients[replica.device])
                clipping.left.pop()

    def _gradient(self, param: torch.Tensor) -> torch.Tensor:
        """Return a gradient, to be read: there may be no memory for all at a time."""
        managed = self._managed.get(param)
        if managed is not None:
            return self._updater.gradient(managed)
        assert param.grad is not None
        return param.grad

    def multiplier(self, max_norm: float) -> float | None:
        """Return what an update multiplies gradients by, for the loss scale and clipping; None: they overflowed.

        Raises:
            StateError: there is a loss scale, and the gradients are of a loss that was not multiplied by it.
        """
        scaler = self._scaler
        if scaler is not None and not scaler.is_used:
            raise StateError(
                "fp16 gradients need the loss scale: call manager.backward(loss), not loss.backward(); gradients that "
                "came multiplied by it, as to a pipeline stage, need manager.backward(outputs, gradient=..., "
                "is_scaled=True) or, before another backward of them, manager.mark_scaled()"
            )
        if scaler is None and max_norm <= 0:
            return 1.0
        with runtime_mode():
            norm = float(self._norm())
        is_overflow = scaler is not None and not math.isfinite(norm)
        clipping = min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
        if is_overflow or clipping != 1.0:
            self._updater.ahead.roll_back()
        if is_overflow:
            return None
        return clipping if scaler is None else clipping / scaler.loss_scale

    def _norm(self) -> torch.Tensor:
        own = (managed for managed in self._managed.values() if managed not in self._counted_elsewhere)
        groups = by_group(sorted(own, key=lambda managed: managed.position))
        if self._is_lowered:
            norm = self._norm_in_float32(groups)
            return norm if self._scaler is None else norm / self._scaler.loss_scale
        parts = map(self._updater.ahead.norm_parts, groups)
        known: dict[torch.Tensor, torch.Tensor] = {
            managed.param: norm for part in parts for managed, norm in part.norms.items()
        }
        counted = self._counted()
        norm = global_norm(counted, self._gradient, known=known) if counted else torch.zeros(())
        if self._ranks.are_one:
            return norm
        (total,) = self._ranks.sum_over((float(norm.double().square()),), label="norm of the gradients")
        return torch.tensor(total, dtype=torch.float64).sqrt().float()

    def _norm_in_float32(self, groups: dict[int, list[ManagedParameter]]) -> torch.Tensor:
        squares = [self._squares_of(group, members) for group, members in sorted(groups.items())]
        excluded: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for param in self._counted():
            if param not in self._managed:
                grad = self._gradient(param)
                excluded.setdefault((grad.dtype, grad.device), []).append(grad)
        squares += [self._updater.native.squares(alike) for alike in excluded.values()]
        squares = on_host(squares)
        total = math.fsum(float(square) for square, _ in squares)
        num_infinite = float(sum(not is_finite for _, is_finite in squares))
        if not self._ranks.are_one:
            total, num_infinite = self._ranks.sum_over((total, num_infinite), label="norm of the gradients")
        return torch.tensor(math.inf if num_infinite else math.sqrt(total))

    def _counted(self) -> list[torch.Tensor]:
        """Return whose gradients this rank adds."""
        elsewhere = {managed.param for managed in self._counted_elsewhere}
        counts, managed = self._counts_excluded, self._managed
        return [param for param in self._params if (counts or param in managed) and param not in elsewhere]

    def _squares_of(self, group: int, members: list[ManagedParameter]) -> torch.Tensor:
        is_whole = not any(managed.group == group for managed in self._counted_elsewhere)
        known = self._updater.ahead.norm_parts(group).squares if is_whole else None
        return self._updater.native.squares([self._updater.gradient(m) for m in members]) if known is None else known
