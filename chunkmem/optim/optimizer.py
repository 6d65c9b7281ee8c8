"""What every optimizer over chunks does: claim parameters, clip, unscale, step by its rule, give gradients up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from chunkmem.errors import StateError
from chunkmem.nn.begun import BegunStep, options_in_words
from chunkmem.nn.binding import ManagedParameter
from chunkmem.optim.checks import check_number
from chunkmem.optim.groupwise import GroupwiseOptimizer
from chunkmem.optim.host import OptimizerHost
from chunkmem.optim.in_backward import require_possible
from chunkmem.optim.pending import Clipping, PendingGradients
from chunkmem.optim.rule import UpdateItem, UpdateRule
from chunkmem.optim.scaler import LossScaler
from chunkmem.optim.speculative import Intent


class RuleOptimizer(GroupwiseOptimizer):
    """A torch optimizer over managed and excluded parameters, which an `UpdateRule` updates."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        rule: UpdateRule[Any],
        host: OptimizerHost,
        max_grad_norm: float | None,
        in_backward: bool | None = None,
    ) -> None:
        """Claim parameters.

        Args:
            params: parameters or parameter groups, as in torch.optim.
            defaults: of the options of parameter groups.
            rule: the update.
            host: of the manager that holds the parameters.
            max_grad_norm: clip the global norm to this in `step()`; default: the configuration's `gradient_clipping`.
            in_backward: update groups inside backward; default: the configuration's `optimizer.params.in_backward`.

        Raises:
            ConfigError: an option is out of range, or cannot be had inside backward.
            StateError: a parameter is in no model of the manager.
            CapacityError: weights, gradients and states do not fit DEVICE and HOST together.
        """
        host.require_open()
        if max_grad_norm is not None:
            check_number("max_grad_norm", max_grad_norm)
        self.max_grad_norm = host.config.gradient_clipping if max_grad_norm is None else max_grad_norm
        """0 or less: gradients are not clipped."""
        in_backward = host.config.optimizer.params.in_backward if in_backward is None else in_backward
        if in_backward:
            require_possible(self.max_grad_norm, scaler=host.scaler, num_ranks=host.ranks.size)
        self._clipping: Clipping | None = None
        """What has failed, and is to be continued."""
        super().__init__(params, defaults, rule=rule, host=host, in_backward=in_backward)
        self._updater.claim(self._wanted(self.param_groups), self, forget_plans=host.forget_plans)
        if self._in_backward:
            self._updater.in_backward.optimizers.add(self)

    @property
    def loss_scaler(self) -> LossScaler | None:
        """Scales losses in fp16, by its `loss_scale`; None in other precisions."""
        return self._host.scaler

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch.optim; its parameters have to be in models of the manager."""
        self._host.require_open()
        super().add_param_group(param_group)
        try:
            self._host.adopt(self.param_groups[-1]["params"])
            self._rule.check(self.param_groups[-1])
            self._require_tiles_together()
            wanted = self._wanted(self.param_groups[-1:])
            self._updater.claims.require_room(self._wanted(self.param_groups), self)
        except Exception:
            self.param_groups.pop()
            raise
        if self._complete:  # until all its groups are accepted, an older optimizer keeps its parameters
            self._updater.claim(wanted, self, forget_plans=self._host.forget_plans)

    def move_to(self, host: OptimizerHost) -> None:
        super().move_to(host)
        self._options_of, self._numbers, self._needs = {}, {}, []
        wanted = self._wanted(self.param_groups)
        self._updater.claims.require_room(wanted, self)
        self._updater.claim(wanted, self, forget_plans=host.forget_plans)
        if self._in_backward:
            self._updater.in_backward.optimizers.add(self)

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
                ranks nothing is updated then: all of them may have left out their batch. Or, with `in_backward`,
                options or gradients have changed since they were used.

        After any other error, `step()` again continues where it was, with the options that it began with; the closure
        is not called again, and another one is refused.
        """
        self._host.require_open()
        scaler = self._host.scaler
        self._updater.ledger.require_sound("optimizer.step()")
        begun = self._begun
        if begun is not None and closure is not None:
            begun.require_closure(closure)
        if begun is None or not begun.is_stepping:
            self._require_clipped("optimizer.step()")
            for group in self.param_groups:
                self._rule.hyper(group)  # what it refuses is refused before anything is done
            if closure is None and self._is_initialization():
                return self._initialize()
            begun = self._begin(closure)
        with self._host.step(begun.options, updates=True, goes_on=begun.is_stepping):
            self._updater.claims.check(self._managed(), self)
            if begun.is_stepping or self._has_gradients(begun):
                self._step_over(begun)
            elif begun.updated:
                self._updater.ahead.end_step()
            elif self._is_trainable() and not self._host.is_shared:
                self._end()
                raise StateError("step() without a gradient: call manager.backward(loss) or loss.backward() before it")
        if scaler is not None and begun.is_scaled:
            scaler.step(overflow=begun.overflows)
        self._end()
        return begun.result

    def _begin(self, closure: Callable[[], Any] | None) -> BegunStep:
        """Return a step that has changed nothing so far, or what backward has updated. Raises what `step` does."""
        called = self._begun if self._begun is not None and self._begun.closure is not None else None
        result = None if called is None else called.result
        if closure is not None and called is None:
            with torch.enable_grad():
                result = closure()
        options, begun = options_in_words(self.param_groups), self._begun
        if begun is None or not begun.updated:
            begun = self._new_begun(options)
        else:
            begun.require_options(options)
            try:
                begun.require_consumed(self._updater.gradients.is_consumed)
            except StateError:
                self._end()
                raise
        begun.closure, begun.result = closure if called is None else called.closure, result
        if begun.closure is not None:  # its gradients are there: called again, it would add to them
            self._begun = begun
        return begun

    def _has_gradients(self, begun: BegunStep) -> bool:
        """Look up what there is to do; tell whether there is anything."""
        begun.pending = self._pending(besides=begun.updated)
        begun.anywhere = self._pending_anywhere(begun.pending)
        excluded = [
            [param for param in group["params"] if self._host.registry.lookup(param) is None and param.grad is not None]
            for group in self.param_groups
        ]
        begun.excluded = list(zip(excluded, begun.hypers, strict=True))
        begun.pending = [*begun.updated, *begun.pending]
        return bool(begun.anywhere) or any(excluded) or self._is_counted_on()

    def _end(self) -> None:
        """The step is over, or given up."""
        self._begun = self._clipping = None
        self._updater.ledger.end(self._known())
        if self._in_backward:
            self._updater.in_backward.end_step()

    def give_up_step(self) -> None:
        """Weights and states were replaced: a step that was to go on does not."""
        if self._begun is not None or self._clipping is not None:
            self._updater.gradients.use_up(set(self._known()))
            self._end()

    def _step_over(self, begun: BegunStep) -> None:
        left = begun.left(self._updater.gradients.has_values)
        if not begun.is_scaled:
            self._scale(begun, left)
        if begun.overflows:
            self._host.skip_step()
            self._updater.gradients.use_up(set(left))
        else:
            self._update(begun, left)
        self._updater.gradients.consumed(self._known())
        self._updater.ahead.end_step()
        self._updater.gradients.anywhere.difference_update(begun.anywhere)

    def _scale(self, begun: BegunStep, pending: list[ManagedParameter]) -> None:
        """Clip where gradients are, as torch does: to the bit. Else find what updates multiply them by."""
        if not self._host.is_lowered:
            if self.max_grad_norm > 0:
                self._clip(self._gradients(pending), self.max_grad_norm, begun)
        else:
            multiplier = self._gradients(pending).multiplier(self.max_grad_norm)
            begun.multiplier, begun.overflows = None if multiplier == 1.0 else multiplier, multiplier is None
            if begun.overflows:
                self._hold(begun, weights=False)  # the norm of some of them may be finite
        begun.is_scaled = True

    def _clip(self, gradients: PendingGradients, max_norm: float, begun: BegunStep | None) -> torch.Tensor:
        """Clip for a step, or for a user if there is none; continue if that has failed before."""
        clipping = gradients.clipping(max_norm) if self._clipping is None else self._clipping
        self._clipping = clipping
        if begun is not None and clipping.left:
            self._hold(begun, weights=False)
        elif clipping.left:
            self._updater.ledger.half_scaled.update(dict.fromkeys(self._known(), "optimizer.clip_grad_norm_()"))
        gradients.clip(clipping)
        self._clipping = None
        return clipping.norm

    def _require_clipped(self, call: str, *, max_norm: float | None = None) -> None:
        """Raise a `StateError` if clipping has failed and is to be continued, but not with `max_norm`."""
        if self._clipping is not None and self._clipping.max_norm != max_norm:
            raise StateError(
                f"{call} after an error in optimizer.clip_grad_norm_({self._clipping.max_norm}), which has "
                f"{len(self._clipping.left)} gradients to scale yet: call that again, or optimizer.zero_grad()"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients that `step()` has not consumed, or set them to 0.

        Raises:
            StateError: some have been used inside backward, or by a `step()` that has failed: `step()` has to come
                first.
        """
        self._host.require_open()
        if self._begun is not None:
            self._updater.ledger.require_over("zero_grad()", self._known())
        super().zero_grad(set_to_none)  # with lazy gradients, zeros reach the chunks
        if set_to_none:
            self._updater.gradients.discard(set(self._known()))
            if self._host.scaler is not None:
                self._host.scaler.is_used = False
        if self._begun is not None or self._clipping is not None:
            self._end()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`; return the norm before that, 0-dim.

        Raises:
            StateError: there is no gradient at all, although a managed parameter of this optimizer is trainable.
        """
        if self._begun is not None:
            self._updater.ledger.require_over("clip_grad_norm_()", self._known())
            self._begun.require_new("clip_grad_norm_()")
        self._require_clipped(f"clip_grad_norm_({float(max_norm)})", max_norm=float(max_norm))
        goes_on = self._clipping is not None
        with self._host.step(f"a norm of {float(max_norm)}", updates=False, goes_on=goes_on):
            pending = self._pending()
            excluded = self._excluded()
            is_without = not pending and not self._is_trainable() and all(p.grad is None for p in excluded)
            if is_without and not self._is_counted_on():
                return torch.zeros((), device=self._host.device)
            norm = self._clip(self._gradients(pending), max_norm, None)
        self._updater.ledger.end(self._known())
        return norm

    def _is_counted_on(self) -> bool:
        """Tell whether other pipeline stages form a norm with this rank although it may have no gradients."""
        return self._host.ranks.stages is not None and (self._host.is_shared or not self._is_trainable())

    def _is_trainable(self) -> bool:
        """Tell whether a managed parameter, of any rank, may get a gradient."""
        return any(managed is not None and managed.param.requires_grad for managed in self._looked_up())

    def _pending_anywhere(self, pending: list[ManagedParameter]) -> list[ManagedParameter]:
        """Return the parameters of which a rank has a gradient; the same on all of them. This one's are `pending`."""
        if not self._host.is_shared:
            return pending
        return [managed for managed in self._known() if managed in self._updater.gradients.anywhere]

    def _gradients(self, pending: list[ManagedParameter]) -> PendingGradients:
        host = self._host
        return PendingGradients(
            host.registry.in_order(self._params()),
            pending,
            self._updater,
            is_lowered=host.is_lowered,
            scaler=host.scaler,
            ranks=host.ranks,
            counted_elsewhere=host.registry.counted_elsewhere,
        )

    def _update(self, begun: BegunStep, left: list[ManagedParameter]) -> None:
        if not self._host.ranks.are_one:  # the others update their groups without waiting for this rank
            self._hold(begun, weights=True)
        self._update_managed(begun, left)
        while begun.excluded:
            params, hyper = begun.excluded[0]
            if params:
                self._hold(begun, weights=True)
                with self._updater.ledger.updating(f"{len(params)} parameters outside of chunks"):
                    self._update_excluded(params, hyper, multiplier=begun.multiplier)
            del begun.excluded[0]

    def intent(self, group: int) -> Intent | None:
        """Return what `step()` would do with a chunk group now if nothing is clipped; None if it cannot be told yet."""
        if self._in_backward:  # in place, and for good
            return None
        items: dict[int, UpdateItem] = {}
        for managed in self._updater.gradients.landed.get(group, ()):
            index = self._options_of.get(managed)
            if index is None or index >= len(self.param_groups):
                return None
            item = items.get(index)
            if item is None:
                item = items[index] = self._new_item(self._rule.hyper(self.param_groups[index]), ahead=True)
            if (step := self._states.next_step(managed, has_state=bool(self._rule.states(item.hyper)))) is None:
                return None
            self._add_to(item, managed, step, self._numbers[managed])
        scaler = self._host.scaler
        multiplier = None if scaler is None or scaler.loss_scale == 1.0 else 1.0 / scaler.loss_scale
        needs_norm = scaler is not None or self.max_grad_norm > 0
        return Intent(self._rule, list(items.values()), multiplier, needs_norm=needs_norm)
