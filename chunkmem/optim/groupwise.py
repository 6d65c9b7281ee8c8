"""Chunk groups updated by a rule, one after the other: in a step, or inside backward."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch

from chunkmem.data.errors import StateError
from chunkmem.modules.begun import BegunStep, options_in_words
from chunkmem.modules.binding import ManagedParameter, by_group
from chunkmem.optim.chunk_states import ChunkStates
from chunkmem.optim.entries import Record
from chunkmem.optim.host import OptimizerHost
from chunkmem.optim.members import GroupMembers, Numbering
from chunkmem.optim.pending import Clipping, PendingGradients
from chunkmem.optim.rule import UpdateItem, UpdateRule
from chunkmem.optim.speculative import Intent
from chunkmem.optim.state import OptimizerState


class GroupwiseStep:
    """Scales gradients, updates chunk groups, and has noted what of a step is done.

    The last is told in [Note: Begun steps] of `chunkmem.modules.begun`.

    It is what a manager knows of an optimizer: see `chunkmem.optim.in_backward.Owner`.
    """

    def __init__(
        self,
        host: OptimizerHost,
        members: GroupMembers,
        rule: UpdateRule[Any],
        *,
        state: OptimizerState,
        in_backward: bool,
    ) -> None:
        """Begin without states of managed parameters.

        Args:
            host: of the manager that holds the parameters.
            members: the parameters.
            rule: the update.
            state: shows the states, and has those of excluded parameters.
            in_backward: groups are updated inside backward; see [Note: Updates in backward].
        """
        self._host = host
        self._updater = host.updater
        self._members = members
        self.rule = rule
        self.states = ChunkStates(host, self, rule, members)
        self._state = state
        state.show(self.states)
        self.in_backward = in_backward
        self.begun: BegunStep | None = None
        """What was updated since the last step: inside backward, or by a `step()` that has failed."""
        self._clipping: Clipping | None = None
        """What has failed, and is to be continued."""
        self._numbering = Numbering()
        """Of the parameters at the last step."""

    # Claims.

    def begin(self) -> None:
        """Be the optimizer of all its parameters from now on."""
        self.claim(self._members.groups())
        if self.in_backward:
            self._updater.in_backward.begin(self)

    def claim(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Have the states of parameter groups in chunks from now on; see `GroupUpdater.claim`."""
        self._updater.claim(self.states.wanted(groups), self, forget_plans=self._host.forget_plans)

    def require_room(self) -> None:
        """Check that weights, gradients and states of all parameter groups fit; see `Claims.require_room`."""
        self._updater.state_chunks.require_room(self.states.wanted(self._members.groups()), self)

    def check_owned(self, known: list[ManagedParameter] | None = None) -> None:
        """Raise a `StateError` if a newer optimizer has taken a parameter: one of `known`, by default of all."""
        self._updater.state_chunks.check(self._members.owned(self._members.known() if known is None else known), self)

    # A step.

    def new_begun(self, options: str) -> BegunStep:
        """Return a step that has changed nothing so far."""
        self._numbering = self._members.numbering()
        hypers = [self.rule.hyper(group) for group in self._members.groups()]
        return BegunStep(options, hypers, self._numbering.known)

    def has_gradients(self, begun: BegunStep) -> bool:
        """Look up what there is to do; tell whether there is anything."""
        pending = self._members.pending(begun.known, besides=begun.updated)
        begun.anywhere = pending
        if self._host.is_shared:  # the same on all ranks
            anywhere = self._updater.gradients.slots.anywhere
            begun.anywhere = [managed for managed in begun.known if managed in anywhere]
        excluded = self._members.with_excluded_gradients()
        begun.excluded = list(zip(excluded, begun.hypers, strict=True))
        begun.pending = [*begun.updated, *pending]
        return bool(begun.anywhere) or any(excluded) or self._is_counted_on()

    def run(self, begun: BegunStep) -> None:
        """Do what is left of a step."""
        left = begun.left(self._updater.gradients.slots.has_values)
        if not begun.is_scaled:
            self._scale(begun, left, self._members.optimizer.max_grad_norm)
        if begun.overflows:
            self._host.skip_step()
            self._updater.gradients.use_up(set(left))
        else:
            self._update(begun, left)
        self._updater.gradients.values.consumed(begun.known)
        self._updater.ahead.end_step()
        self._updater.gradients.slots.anywhere.difference_update(begun.anywhere)

    def end(self) -> None:
        """The step is over, or given up."""
        begun, self.begun, self._clipping = self.begun, None, None
        if not self._updater.ledger.is_empty:
            self._updater.ledger.end(self._members.known() if begun is None else begun.known)
        if self.in_backward:
            self._updater.in_backward.end_step()

    def end_if_begun(self, *, discards: bool = False) -> None:
        """Give up what has failed and was to be continued, if there is any; `discards` its gradients."""
        if self.begun is not None or self._clipping is not None:
            if discards:
                self._updater.gradients.use_up(set(self._members.known()))
            self.end()

    def hold(self, begun: BegunStep) -> None:
        """A step has failed: have it be continued if some weights are new, since nothing else is right then."""
        ledger = self._updater.ledger
        if begun.has_updated or ledger.half_updated:
            self.begun, begun.is_stepping = begun, True
            ledger.begun.update(dict.fromkeys(begun.known, begun))

    def _hold_gradients(self, begun: BegunStep) -> None:
        """Have the step be continued if it fails, as some gradients are changed."""
        self.begun, begun.is_stepping = begun, True
        self._updater.ledger.half_scaled.update(dict.fromkeys(begun.known, "optimizer.step()"))

    # Gradients.

    def _gradients(self, pending: list[ManagedParameter]) -> PendingGradients:
        return PendingGradients(self._host, self._members.params(), pending)

    def _scale(self, begun: BegunStep, pending: list[ManagedParameter], max_norm: float) -> None:
        """Clip where gradients are, as torch does: to the bit. Else find what updates multiply them by."""
        if not self._host.is_lowered:
            if max_norm > 0:
                self._clip(self._gradients(pending), max_norm, begun)
        else:
            multiplier = self._gradients(pending).multiplier(max_norm)
            begun.multiplier, begun.overflows = None if multiplier == 1.0 else multiplier, multiplier is None
            if begun.overflows:
                self._hold_gradients(begun)  # the norm of some of them may be finite
        begun.is_scaled = True

    def _clip(self, gradients: PendingGradients, max_norm: float, begun: BegunStep | None) -> torch.Tensor:
        """Clip for a step, or for a user if there is none; continue if that has failed before."""
        clipping = gradients.clipping(max_norm) if self._clipping is None else self._clipping
        self._clipping = clipping
        if begun is not None and clipping.left:
            self._hold_gradients(begun)
        elif clipping.left:
            called = dict.fromkeys(self._members.known(), "optimizer.clip_grad_norm_()")
            self._updater.ledger.half_scaled.update(called)
        gradients.clip(clipping)
        self._clipping = None
        return clipping.norm

    def require_clipped(self, call: str, *, max_norm: float | None = None) -> None:
        """Raise a `StateError` if clipping has failed and is to be continued, but not with `max_norm`."""
        if self._clipping is not None and self._clipping.max_norm != max_norm:
            raise StateError(
                f"{call} after an error in optimizer.clip_grad_norm_({self._clipping.max_norm}), which has "
                f"{len(self._clipping.left)} gradients to scale yet: call that again, or optimizer.zero_grad()"
            )

    def clip(self, max_norm: float) -> torch.Tensor:
        """See `RuleOptimizer.clip_grad_norm_`."""
        members, ledger = self._members, self._updater.ledger
        if self.begun is not None:
            ledger.require_over("clip_grad_norm_()", members.known())
            self.begun.require_new("clip_grad_norm_()")
        self.require_clipped(f"clip_grad_norm_({max_norm})", max_norm=max_norm)
        with self._host.step(f"a norm of {max_norm}", updates=False, goes_on=self._clipping is not None):
            pending = members.pending(members.known())
            is_without = not pending and not members.is_trainable() and not any(members.with_excluded_gradients())
            if is_without and not self._is_counted_on():
                return torch.zeros((), device=self._host.device)
            norm = self._clip(self._gradients(pending), max_norm, None)
        ledger.end(members.known())
        return norm

    def _is_counted_on(self) -> bool:
        """Tell whether other pipeline stages form a norm with this rank although it may have no gradients."""
        return self._host.ranks.stages is not None and (self._host.is_shared or not self._members.is_trainable())

    # Updates.

    def _update(self, begun: BegunStep, left: list[ManagedParameter]) -> None:
        if not self._host.ranks.are_one:  # the others update their groups without waiting for this rank
            begun.has_updated = True
        self.states.make(left, begun.hypers, anywhere=begun.anywhere)
        groups = by_group(left)
        for group in self._updater.in_order(groups):
            self._update_group(group, groups[group], begun, in_step=True)
        while begun.excluded:
            params, hyper = begun.excluded[0]
            if params:
                begun.has_updated = True
                with self._updater.ledger.updating(f"{len(params)} parameters outside of chunks"):
                    self.rule.update_excluded(params, self._state.excluded, hyper, multiplier=begun.multiplier)
            del begun.excluded[0]

    def _update_group(self, group: int, params: Iterable[ManagedParameter], begun: BegunStep, *, in_step: bool) -> None:
        """Update parameters of one chunk group, which have their states, in the order of the parameter groups."""
        found = self._items(params, begun.hypers.__getitem__)
        assert found is not None
        self._updater.update(group, Intent(self.rule, found, begun.multiplier))
        done = [managed for item in found for managed in item.params]
        begun.updated.update(dict.fromkeys(done))
        if in_step:
            begun.has_updated = True
        else:
            self._updater.ledger.begun.update(dict.fromkeys(done, begun))
        for item in found:
            for record, step in zip(item.records, item.steps, strict=True):
                record.count = step
        self._updater.rounded.difference_update(done)
        self._updater.mark_written(done)
        self._updater.gradients.use_up(done)  # last: it may raise, although they are gone then
        self._updater.in_backward.begin_again(group)

    def _items(
        self, params: Iterable[ManagedParameter], hyper_of: Callable[[int], Hashable], *, is_draft: bool = False
    ) -> list[UpdateItem] | None:
        """Return what to update parameters with, by the options of their groups; None if one lacks options or states.

        Args:
            params: of one chunk group.
            hyper_of: returns the options of a parameter group.
            is_draft: the update may be thrown away.
        """
        items: dict[int, UpdateItem] = {}
        ends, numbers, records = self._numbering.ends, self._numbering.numbers, self.states.records
        stateless = set[int]()
        for managed in params:
            if managed not in numbers:
                return None
            index = bisect(ends, numbers[managed])
            if index not in items:
                items[index] = UpdateItem(hyper_of(index), [], [], drafts=[] if is_draft else None)
                if self.rule.is_stateless(items[index].hyper):
                    stateless.add(index)
            if index not in stateless and managed not in records:
                return None
            items[index].add(managed, numbers[managed], Record() if index in stateless else records[managed])
        return list(items.values())

    @torch.no_grad()
    def update_in_backward(self, group: int) -> None:
        """Update a chunk group, all of whose gradients have landed, as `step()` would with the options there are now.

        Raises:
            CapacityError: its states fit neither tier.
        """
        begun = self.begun
        if begun is None or not begun.updated:
            begun = self.begun = self.new_begun(options_in_words(self._members.groups()))
        numbers = self._numbering.numbers
        params = sorted(self._updater.gradients.slots.landed[group] & numbers.keys(), key=numbers.__getitem__)
        self.states.make(params, begun.hypers, anywhere=params)
        try:
            self._update_group(group, params, begun, in_step=False)
        except BaseException:
            self.hold(begun)
            raise

    def intent(self, group: int) -> Intent | None:
        """Return what `step()` would do with a chunk group now if nothing is clipped; None if it cannot be told yet."""
        if self.in_backward:  # in place, and for good
            return None
        groups, landed = self._members.groups(), self._updater.gradients.slots.landed.get(group, ())
        if len(groups) < len(self._numbering.ends):  # one was removed
            return None
        items = self._items(landed, lambda index: self.rule.hyper(groups[index]), is_draft=True)
        if items is None:
            return None
        scaler = self._host.scaler
        multiplier = None if scaler is None or scaler.loss_scale == 1.0 else 1.0 / scaler.loss_scale
        needs_norm = scaler is not None or self._members.optimizer.max_grad_norm > 0
        return Intent(self.rule, items, multiplier, needs_norm=needs_norm)
