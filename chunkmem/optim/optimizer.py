"""What every optimizer over chunks does: claim parameters, clip, unscale, step by its rule, give gradients up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from chunkmem.errors import StateError
from chunkmem.nn.binding import ManagedParameter
from chunkmem.optim.checks import check_number
from chunkmem.optim.chunk_states import FIRST_STEP
from chunkmem.optim.excluded import update_excluded
from chunkmem.optim.host import OptimizerHost
from chunkmem.optim.in_backward import BegunStep, require_possible
from chunkmem.optim.pending import PendingGradients
from chunkmem.optim.rule import StateSpec, UpdateItem, UpdateRule
from chunkmem.optim.saved import StatefulOptimizer
from chunkmem.optim.scaler import LossScaler
from chunkmem.optim.speculative import Intent


class RuleOptimizer(StatefulOptimizer):
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
        self._in_backward = host.config.optimizer.params.in_backward if in_backward is None else in_backward
        if self._in_backward:
            require_possible(self.max_grad_norm, scaler=host.scaler, num_ranks=host.ranks.size)
        self._begun: BegunStep | None = None
        """What was updated inside backward since the last step."""
        self._options_of: dict[ManagedParameter, int] = {}
        """Which parameter group each one was in at the last step."""
        self._numbers: dict[ManagedParameter, int] = {}
        """Which place each one had in all of them then."""
        self._needs: list[tuple[StateSpec, ...]] = []
        """The states that the options of each parameter group called for at the last step."""
        super().__init__(params, defaults, rule=rule, host=host)
        self._updater.claim(self._wanted(self.param_groups), self, forget_plans=host.forget_plans)
        if self._in_backward:
            self._updater.in_backward.optimizers.add(self)

    @property
    def in_backward(self) -> bool:
        """Groups are updated inside backward; see [Note: Updates in backward] in `chunkmem.optim.in_backward`."""
        return self._in_backward

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
            wanted = self._wanted(self.param_groups[-1:])
            self._updater.claims.require_room(self._wanted(self.param_groups), self)
        except Exception:
            self.param_groups.pop()
            raise
        if self._complete:  # until all its groups are accepted, an older optimizer keeps its parameters
            self._updater.claim(wanted, self, forget_plans=self._host.forget_plans)

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
        """
        self._host.require_open()
        for group in self.param_groups:
            self._rule.hyper(group)  # what it refuses is refused before anything is done
        if closure is None and self._is_initialization():
            return self._initialize()
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        options = self._options_in_words()
        begun = self._begun
        updated = self._end_backward(options)
        with self._begun_again_after_an_error(begun), self._host.step(options, updates=True):
            self._updater.claims.check(self._managed(), self)
            pending, anywhere = self._pending(besides=updated), self._pending_anywhere(besides=updated)
            has_gradients = anywhere or any(p.grad is not None for p in self._excluded())
            if has_gradients or self._is_counted_on():
                self._step_over(pending)
                self._updater.gradients.anywhere.difference_update(anywhere)
            elif updated:
                self._updater.ahead.end_step()
            elif self._is_trainable() and not self._host.is_shared:
                raise StateError("step() without a gradient: call manager.backward(loss) or loss.backward() before it")
        return result

    def _end_backward(self, options: str) -> Collection[ManagedParameter]:
        """Return what backward has updated since the last step, which ends here. Raises what `step` does."""
        if self._begun is None:
            return ()
        self._begun.require_options(options)
        begun, self._begun = self._begun, None
        self._updater.in_backward.end_step(begun.updated)
        begun.require_consumed(self._updater.gradients)
        return begun.updated

    @contextmanager
    def _begun_again_after_an_error(self, begun: BegunStep | None) -> Iterator[None]:
        """Let a step that fails be tried again: what backward has updated is no part of what is missing."""
        try:
            yield
        except BaseException:
            if begun is not None:
                self._begun = begun
                self._updater.in_backward.updated.update(begun.updated)
            raise

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
            self._updater.gradients.use_up(set(pending))
        else:
            self._update(pending, multiplier=None if multiplier == 1.0 else multiplier)

    def move_to(self, host: OptimizerHost) -> None:
        super().move_to(host)
        self._options_of, self._numbers, self._needs = {}, {}, []
        wanted = self._wanted(self.param_groups)
        self._updater.claims.require_room(wanted, self)
        self._updater.claim(wanted, self, forget_plans=host.forget_plans)
        if self._in_backward:
            self._updater.in_backward.optimizers.add(self)

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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients that `step()` has not consumed, or set them to 0.

        Raises:
            StateError: some have been used inside backward, and `step()` has to come first.
        """
        self._host.require_open()
        if self._begun is not None:
            self._updater.in_backward.require_stepped("zero_grad()", self._begun.updated)
            self._begun = None
        super().zero_grad(set_to_none)  # with lazy gradients, zeros reach the chunks
        if set_to_none:
            self._updater.gradients.discard({m for m in self._looked_up() if m is not None})
            if self._host.scaler is not None:
                self._host.scaler.is_used = False

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global 2-norm is at most `max_norm`; return the norm before that, 0-dim.

        Raises:
            StateError: there is no gradient at all, although a managed parameter of this optimizer is trainable.
        """
        if self._begun is not None:
            self._updater.in_backward.require_stepped("clip_grad_norm_()", self._begun.updated)
        with self._host.step(f"a norm of {float(max_norm)}", updates=False):
            pending = self._pending()
            excluded = self._excluded()
            is_without = not pending and not self._is_trainable() and all(p.grad is None for p in excluded)
            if is_without and not self._is_counted_on():
                return torch.zeros((), device=self._host.device)
            return self._gradients(pending).clip(max_norm)

    def _is_counted_on(self) -> bool:
        """Tell whether other pipeline stages form a norm with this rank although it may have no gradients."""
        return self._host.ranks.stages is not None and (self._host.is_shared or not self._is_trainable())

    def _options_in_words(self) -> str:
        """Return what an update depends on in addition to gradients and states."""
        found = []
        for group in self.param_groups:
            words = (f"{name} {_plain(value)}" for name, value in group.items() if name != "params")
            found.append(f"{len(group['params'])} parameters, {', '.join(words)}")
        return "; ".join(found)

    def _is_trainable(self) -> bool:
        """Tell whether a managed parameter, of any rank, may get a gradient."""
        return any(managed is not None and managed.param.requires_grad for managed in self._looked_up())

    def _pending_anywhere(self, *, besides: Collection[ManagedParameter] = ()) -> list[ManagedParameter]:
        """Return the parameters of which a rank has a gradient; the same on all of them."""
        if not self._host.is_shared:
            return self._pending(besides=besides)
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
            counted_elsewhere=host.registry.counted_elsewhere,
        )

    def _update(self, pending: list[ManagedParameter], *, multiplier: float | None) -> None:
        hypers = [self._rule.hyper(options) for options in self.param_groups]
        self._update_managed(pending, hypers, multiplier)
        for options, hyper in zip(self.param_groups, hypers, strict=True):
            params = [p for p in options["params"] if self._host.registry.lookup(p) is None and p.grad is not None]
            self._update_excluded(params, hyper, multiplier=multiplier)

    def _update_excluded(self, params: list[torch.Tensor], hyper: Any, *, multiplier: float | None) -> None:
        update_excluded(params, self.state, self._rule, hyper, multiplier=multiplier)

    def _new_item(self, hyper: Any, *, ahead: bool = False) -> UpdateItem:
        """Return what to update, without parameters so far; `ahead` of the step, in other memory."""
        return UpdateItem(hyper, [], [], [])

    def _add_to(self, item: UpdateItem, managed: ManagedParameter, step: torch.Tensor, number: int) -> None:
        item.params.append(managed)
        item.steps.append(step)
        item.numbers.append(number)

    def _update_managed(
        self, pending: list[ManagedParameter], hypers: Sequence[Hashable], multiplier: float | None
    ) -> None:
        self._number_parameters()
        anywhere = self._pending_anywhere() if self._host.is_shared else pending
        stateless = self._stateless(hypers)
        self._make_states(pending, hypers, stateless, anywhere=anywhere)
        by_group: dict[int, list[ManagedParameter]] = {}
        for managed in pending:
            by_group.setdefault(managed.group, []).append(managed)
        for group in self._updater.in_order(by_group):
            self._update_group(group, by_group[group], hypers, stateless, multiplier)

    def _number_parameters(self) -> None:
        """Note the place of each parameter in the parameter groups as they are now."""
        number = -1
        for index, options in enumerate(self.param_groups):
            for param in options["params"]:
                number += 1
                managed = self._host.registry.lookup(param)
                if managed is not None:
                    self._options_of[managed], self._numbers[managed] = index, number

    def _update_group(
        self,
        group: int,
        params: Iterable[ManagedParameter],
        hypers: Sequence[Hashable],
        stateless: Collection[ManagedParameter],
        multiplier: float | None,
    ) -> None:
        """Update parameters of one chunk group, which have their states, in the order of the parameter groups."""
        items: dict[int, UpdateItem] = {}
        for managed in params:
            index = self._options_of[managed]
            if index not in items:
                items[index] = self._new_item(hypers[index])
            step = FIRST_STEP if managed in stateless else self._states.steps[managed] + 1
            self._add_to(items[index], managed, step, self._numbers[managed])
        found = list(items.values())
        self._updater.update(group, found, self._rule, multiplier=multiplier)
        done = {m: step for item in found for m, step in zip(item.params, item.steps, strict=True)}
        self._states.steps.update(done if not stateless else {m: s for m, s in done.items() if m not in stateless})
        self._updater.gradients.use_up(done.keys())
        self._updater.in_backward.begin_again(group)
        self._updater.mark_updated(done)

    @torch.no_grad()
    def update_in_backward(self, group: int) -> None:
        """Update a chunk group, all of whose gradients have landed, as `step()` would with the options there are now.

        Raises:
            CapacityError: its states fit neither tier.
        """
        if self._begun is None or not self._begun.updated:
            self._number_parameters()
            hypers = [self._rule.hyper(options) for options in self.param_groups]
            self._begun = BegunStep(self._options_in_words(), hypers, self._stateless(hypers))
        begun = self._begun
        params = sorted(self._updater.gradients.landed[group], key=self._numbers.__getitem__)
        self._make_states(params, begun.hypers, begun.stateless, anywhere=params)
        self._update_group(group, params, begun.hypers, begun.stateless, None)
        begun.updated.update(dict.fromkeys(params))
        self._updater.in_backward.updated.update(dict.fromkeys(params))

    def _stateless(self, hypers: Sequence[Hashable]) -> Collection[ManagedParameter]:
        """Return the parameters whose options call for no state."""
        rows = zip(self.param_groups, hypers, strict=True)
        return set(self._wanted(group for group, hyper in rows if not self._rule.states(hyper)))

    def _make_states(
        self,
        pending: list[ManagedParameter],
        hypers: Sequence[Hashable],
        stateless: Collection[ManagedParameter],
        *,
        anywhere: list[ManagedParameter],
    ) -> None:
        """Make the states that are missing, also those that options call for only now.

        Args:
            pending: what is about to be updated.
            hypers: by parameter group, its options.
            stateless: parameters that need none.
            anywhere: the parameters of which a rank has a gradient.
        """
        needs = [self._rule.states(hyper) for hyper in hypers]
        if needs != self._needs:  # else a look at each parameter would find nothing
            self._claim_more(self._wanted(self.param_groups))
            self._needs = needs
        updated = pending
        if stateless:
            for group in {managed.group for managed in pending if managed in stateless}:
                self._updater.make_master(group)
            pending = [managed for managed in pending if managed not in stateless]
            anywhere = [managed for managed in anywhere if managed not in stateless]
        self._states.prepare(pending, others=updated)
        self._states.note(anywhere)
        self._updater.complete_states(updated)


def _plain(value: object) -> object:
    """Return an option with the numbers that tensors have now."""
    if isinstance(value, torch.Tensor):
        return float(value)
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value
