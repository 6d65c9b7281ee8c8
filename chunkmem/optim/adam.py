"""Adam and AdamW as torch optimizers whose states live in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from chunkmem.errors import StateError
from chunkmem.nn.binding import ManagedParameter
from chunkmem.optim.checks import check_available, check_number, check_options, plain_options
from chunkmem.optim.excluded import update_excluded
from chunkmem.optim.host import HasRuntime
from chunkmem.optim.order import in_order_of_update
from chunkmem.optim.pending import PendingGradients
from chunkmem.optim.saved import StatefulOptimizer
from chunkmem.optim.speculative import Intent


class Adam(StatefulOptimizer):
    """`torch.optim.Adam` (L2 weight decay) over managed and excluded parameters, with torch's fused kernel.

    Parameter groups, LR schedulers and `state_dict()` are torch's. Gradients are consumed by `step()`.

    Args:
        params: parameters or parameter groups, as in torch.optim.
        manager: the manager that holds the parameters.
        lr, betas, eps, weight_decay: given ones win over `optimizer.params` of the configuration.
        max_grad_norm: clip the global norm to this in `step()`; default: the configuration's `gradient_clipping`.

    Raises:
        ConfigError: an option is out of range.
        StateError: a parameter is neither managed nor excluded.
        CapacityError: weights, gradients and states do not fit DEVICE and HOST together.
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        manager: HasRuntime,
        lr: float | torch.Tensor | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        host = manager.runtime
        host.require_open()
        configured = host.config.optimizer.params_for("AdamW" if self._decoupled else "Adam")
        if max_grad_norm is not None:
            check_number("max_grad_norm", max_grad_norm)
        self.max_grad_norm = host.config.gradient_clipping if max_grad_norm is None else max_grad_norm
        """0 or less: gradients are not clipped."""
        self._options_of: dict[ManagedParameter, int] = {}
        """Which parameter group each one was in at the last step."""
        defaults = {
            "lr": configured.lr if lr is None else lr,
            "betas": configured.betas if betas is None else betas,
            "eps": configured.eps if eps is None else eps,
            "weight_decay": configured.weight_decay if weight_decay is None else weight_decay,
            # The rest says to torch.optim what this optimizer does, so that a state_dict goes both ways.
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": True,
            "decoupled_weight_decay": self._decoupled,
        }
        super().__init__(params, defaults, host=host)
        self._complete = True
        self._updater.claim(self._managed(), self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch.optim; its parameters have to be managed or excluded."""
        self._host.require_open()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_options(group)
            looked_up = (self._host.registry.lookup(p) for p in group["params"])
            managed = [m for m in looked_up if m is not None and self._host.owns(m)]
            self._updater.require_room([*self._managed(), *managed])
        except Exception:
            self.param_groups.pop()
            raise
        if self._complete:  # until all its groups are accepted, an older optimizer keeps its parameters
            self._updater.claim(managed, self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Clip if asked to, update every parameter that has a gradient, and consume the gradients.

        Args:
            closure: called once before that, with gradients enabled, as torch's AdamW does: it runs forward and
                backward.

        Returns:
            What `closure` returns; None without one.

        Raises:
            StateError: there is no gradient at all, although a managed parameter of this optimizer is trainable. Over
                ranks nothing is updated then: all of them may have left out their batch.
        """
        self._host.require_open()
        for group in self.param_groups:
            check_available(group)
        if closure is None and self._is_initialization():
            return self._initialize()
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        with self._host.step(self._options_in_words(), updates=True):
            self._updater.check_owner(self._managed(), self)
            pending, anywhere = self._pending(), self._pending_anywhere()
            if anywhere or any(p.grad is not None for p in self._excluded()):
                self._step_over(pending)
                self._updater.gradients.anywhere.difference_update(anywhere)
            elif self._is_trainable() and not self._host.is_shared:
                raise StateError("step() without a gradient: call manager.backward(loss) or loss.backward() before it")
        return result

    def _step_over(self, pending: list[ManagedParameter]) -> None:
        if not self._host.is_lowered:
            if self.max_grad_norm > 0:  # where they are, as torch does: to the bit
                self._gradients(pending).clip(self.max_grad_norm)
            self._update(pending, multiplier=None)
        else:
            self._step_lowered(pending)
        self._updater.gradients.consumed(m for m in self._looked_up() if m is not None)
        self._updater.ahead.end_step()

    def _step_lowered(self, pending: list[ManagedParameter]) -> None:
        """Update with the loss scale and clipping folded in, or, if gradients overflowed, consume them."""
        scaler = self._host.scaler
        multiplier = self._gradients(pending).multiplier(self.max_grad_norm)
        if scaler is not None:
            scaler.step(overflow=multiplier is None)
        if multiplier is None:
            self._host.skip_step()
            self._updater.gradients.discard(set(pending))
        else:
            self._update(pending, multiplier=None if multiplier == 1.0 else multiplier)

    def intent(self, group: int) -> Intent | None:
        """Return what `step()` would do with a chunk group now if nothing is clipped; None if it cannot be told yet."""
        items: dict[int, tuple[dict[str, Any], list[tuple[ManagedParameter, torch.Tensor]]]] = {}
        for managed in self._updater.gradients.landed.get(group, ()):
            index = self._options_of.get(managed)
            if index is None or index >= len(self.param_groups) or managed not in self._states.steps:
                return None
            item = items.setdefault(index, (plain_options(self.param_groups[index]), []))
            item[1].append((managed, self._states.steps[managed] + 1))
        scaler = self._host.scaler
        multiplier = None if scaler is None or scaler.scale == 1.0 else 1.0 / scaler.scale
        return Intent(items, multiplier, needs_norm=scaler is not None or self.max_grad_norm > 0)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients that `step()` has not consumed, or set them to 0."""
        self._host.require_open()
        super().zero_grad(set_to_none)  # with lazy gradients, zeros reach the chunks
        if set_to_none:
            self._host.gradients_given_up([m for m in self._looked_up() if m is not None])
            self._updater.gradients.discard({m for m in self._looked_up() if m is not None})
            if self._host.scaler is not None:
                self._host.scaler.is_used = False

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`; return the norm before that, 0-dim.

        Raises:
            StateError: there is no gradient at all, although a managed parameter of this optimizer is trainable.
        """
        with self._host.step(f"a norm of {float(max_norm)}", updates=False):
            pending = self._pending()
            excluded = self._excluded()
            if not pending and not self._is_trainable() and all(p.grad is None for p in excluded):
                return torch.zeros((), device=self._host.device)
            return self._gradients(pending).clip(max_norm)

    def _options_in_words(self) -> str:
        """Return what an update depends on in addition to gradients and states."""
        found = []
        for group in self.param_groups:
            options = plain_options(group)
            words = (f"{name} {value}" for name, value in options.items() if name != "params")
            found.append(f"{len(options['params'])} parameters, {', '.join(words)}")
        return "; ".join(found)

    def _is_trainable(self) -> bool:
        """Tell whether a managed parameter, of any rank, may get a gradient."""
        return any(managed is not None and managed.param.requires_grad for managed in self._looked_up())

    def _pending_anywhere(self) -> list[ManagedParameter]:
        """Return the parameters of which a rank has a gradient; the same on all of them."""
        if not self._host.is_shared:
            return self._pending()
        return [m for m in self._looked_up() if m is not None and m in self._updater.gradients.anywhere]

    def _gradients(self, pending: list[ManagedParameter]) -> PendingGradients:
        host = self._host
        return PendingGradients(
            host.registry.in_order(self._params()),
            pending,
            self._updater,
            is_lowered=host.is_lowered,
            scaler=host.scaler,
            ranks=host.ranks,
        )

    def _update(self, pending: list[ManagedParameter], *, multiplier: float | None) -> None:
        self._update_managed(pending, multiplier)
        for options in self.param_groups:
            params = [p for p in options["params"] if self._host.registry.lookup(p) is None and p.grad is not None]
            update_excluded(params, self.state, options, multiplier=multiplier)

    def _update_managed(self, pending: list[ManagedParameter], multiplier: float | None) -> None:
        self._states.prepare(pending)
        self._states.note(self._pending_anywhere())
        waiting = set(pending)
        by_group: dict[int, dict[int, tuple[dict[str, Any], list[tuple[ManagedParameter, torch.Tensor]]]]] = {}
        for index, options in enumerate(self.param_groups):
            for param in options["params"]:
                managed = self._host.registry.lookup(param)
                if managed is not None:
                    self._options_of[managed] = index
                    if managed in waiting:
                        item = by_group.setdefault(managed.group, {}).setdefault(index, (options, []))
                        item[1].append((managed, self._states.steps[managed] + 1))
        landing = list(self._updater.gradients.landed)
        for group in self._updater.planned_order(by_group) or in_order_of_update(list(by_group), landing=landing):
            items = by_group[group]
            self._updater.update(group, items, multiplier=multiplier)
            done = {managed: step for _, pairs in items.values() for managed, step in pairs}
            self._states.steps.update(done)
            self._updater.gradients.discard(done.keys())
            self._updater.mark_updated(done)


class AdamW(Adam):
    """`torch.optim.AdamW` (decoupled weight decay) over managed and excluded parameters; see `Adam`."""

    _decoupled = True
