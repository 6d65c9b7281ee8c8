"""Chunk groups updated by a rule, one after the other: in a step, or inside backward."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from chunkmem.nn.begun import BegunStep, options_in_words
from chunkmem.nn.binding import ManagedParameter
from chunkmem.optim.chunk_states import FIRST_STEP
from chunkmem.optim.excluded import update_excluded
from chunkmem.optim.host import OptimizerHost
from chunkmem.optim.rule import StateSpec, UpdateItem, UpdateRule
from chunkmem.optim.saved import StatefulOptimizer


class GroupwiseOptimizer(StatefulOptimizer):
    """What updates chunk groups, and has noted what of a step is done: see [Note: Begun steps] in `nn.begun`."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        rule: UpdateRule[Any],
        host: OptimizerHost,
        in_backward: bool,
    ) -> None:
        """Take parameters in; see `RuleOptimizer`."""
        self._in_backward = in_backward
        self._begun: BegunStep | None = None
        """What was updated since the last step: inside backward, or by a `step()` that has failed."""
        self._options_of: dict[ManagedParameter, int] = {}
        """Which parameter group each one was in at the last step."""
        self._numbers: dict[ManagedParameter, int] = {}
        """Which place each one had in all of them then."""
        self._needs: list[tuple[StateSpec, ...]] = []
        """The states that the options of each parameter group called for at the last step."""
        super().__init__(params, defaults, rule=rule, host=host)

    @property
    def in_backward(self) -> bool:
        """Groups are updated inside backward; see [Note: Updates in backward] in `chunkmem.optim.in_backward`."""
        return self._in_backward

    def _new_begun(self, options: str) -> BegunStep:
        self._number_parameters()
        hypers = [self._rule.hyper(group) for group in self.param_groups]
        return BegunStep(options, hypers, self._stateless(hypers))

    def _hold(self, begun: BegunStep, *, weights: bool) -> None:
        """Have the step be continued if it fails; with `weights`, some of which are new, nothing else is right then."""
        self._begun, begun.is_stepping = begun, True
        ledger = self._updater.ledger
        if weights and not begun.holds_weights:
            begun.holds_weights = True
            ledger.begun.update(dict.fromkeys(self._known(), begun))
        elif not weights:
            ledger.half_scaled.update(dict.fromkeys(self._known(), "optimizer.step()"))

    def _update_excluded(self, params: list[torch.Tensor], hyper: Any, *, multiplier: float | None) -> None:
        update_excluded(params, self.state, self._rule, hyper, multiplier=multiplier)

    def _new_item(self, hyper: Any, *, ahead: bool = False) -> UpdateItem:
        """Return what to update, without parameters so far; `ahead` of the step, in other memory."""
        return UpdateItem(hyper, [], [], [])

    def _add_to(self, item: UpdateItem, managed: ManagedParameter, step: torch.Tensor, number: int) -> None:
        item.params.append(managed)
        item.steps.append(step)
        item.numbers.append(number)

    def _update_managed(self, begun: BegunStep, left: list[ManagedParameter]) -> None:
        self._make_states(left, begun.hypers, begun.stateless, anywhere=begun.anywhere)
        by_group: dict[int, list[ManagedParameter]] = {}
        for managed in left:
            by_group.setdefault(managed.group, []).append(managed)
        for group in self._updater.in_order(by_group):
            self._update_group(group, by_group[group], begun, in_step=True)

    def _number_parameters(self) -> None:
        """Note the place of each parameter in the parameter groups as they are now."""
        number = -1
        for index, options in enumerate(self.param_groups):
            for param in options["params"]:
                number += 1
                managed = self._host.registry.lookup(param)
                if managed is not None:
                    self._options_of[managed], self._numbers[managed] = index, number

    def _update_group(self, group: int, params: Iterable[ManagedParameter], begun: BegunStep, *, in_step: bool) -> None:
        """Update parameters of one chunk group, which have their states, in the order of the parameter groups."""
        items: dict[int, UpdateItem] = {}
        for managed in params:
            index = self._options_of[managed]
            if index not in items:
                items[index] = self._new_item(begun.hypers[index])
            step = FIRST_STEP if managed in begun.stateless else self._states.steps[managed] + 1
            self._add_to(items[index], managed, step, self._numbers[managed])
        found = list(items.values())
        try:
            self._updater.update(group, found, self._rule, multiplier=begun.multiplier)
        except BaseException:
            if self._updater.ledger.half_updated:
                self._hold(begun, weights=True)
            raise
        done = {m: step for item in found for m, step in zip(item.params, item.steps, strict=True)}
        begun.updated.update(dict.fromkeys(done))
        if in_step:
            self._hold(begun, weights=True)
        else:
            self._updater.ledger.begun.update(dict.fromkeys(done, begun))
        self._states.steps.update((m, step) for m, step in done.items() if m not in begun.stateless)
        self._updater.mark_updated(done)
        self._updater.gradients.use_up(done.keys())  # last: it may raise, although they are gone then
        self._updater.in_backward.begin_again(group)

    @torch.no_grad()
    def update_in_backward(self, group: int) -> None:
        """Update a chunk group, all of whose gradients have landed, as `step()` would with the options there are now.

        Raises:
            CapacityError: its states fit neither tier.
        """
        begun = self._begun
        if begun is None or not begun.updated:
            begun = self._begun = self._new_begun(options_in_words(self.param_groups))
        params = sorted(self._updater.gradients.landed[group], key=self._numbers.__getitem__)
        self._make_states(params, begun.hypers, begun.stateless, anywhere=params)
        self._update_group(group, params, begun, in_step=False)

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
