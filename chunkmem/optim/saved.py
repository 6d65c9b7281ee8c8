"""The state of an optimizer over chunks, saved and loaded as torch's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from chunkmem.data.errors import CheckpointError, ConfigError
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.lazy_tensor import LazyTensor
from chunkmem.optim.entries import BlankEntry
from chunkmem.optim.groupwise import GroupwiseStep
from chunkmem.optim.host import OptimizerHost
from chunkmem.optim.masters import MASTER_KEY, check_masters, masters_to_save
from chunkmem.optim.members import GroupMembers, weight_form
from chunkmem.optim.rule import excluded_zeros
from chunkmem.optim.state import OptimizerState


class SavedStates:
    """What torch's `state_dict` has, and does not know to be in chunks."""

    def __init__(
        self, host: OptimizerHost, members: GroupMembers, updates: GroupwiseStep, state: OptimizerState
    ) -> None:
        """Save and load what `updates` has of `members`, which `state` shows."""
        self._host = host
        self._members = members
        self._updates = updates
        self._rule = updates.rule
        self._states = updates.states
        self._shown = state

    def is_asked_for(self) -> bool:
        """Tell whether a step is one that `torch.distributed.checkpoint` makes to have states to load into.

        That is one at learning rate 0, over gradients of zero that were assigned to all trainable parameters, before
        there are any states or other gradients.
        """
        if self._shown or any(not _is_zero(group.get("lr")) for group in self._members.groups()):
            return False
        if not self._rule.can_be_blank or self._host.updater.gradients.slots.any_given(self._members.known()):
            return False
        trainable = [param for param in self._members.params() if param.requires_grad]
        grads = [param.grad for param in trainable if param.grad is not None]
        return bool(grads) and len(grads) == len(trainable) and not any(bool(grad.any()) for grad in grads)

    def make_blank(self) -> None:
        """Make states of zero, and count no update: training continues as if nobody had asked for them."""
        self._updates.check_owned()
        found = []
        for group in self._members.groups():
            hyper = self._rule.hyper(group)
            params = [] if self._rule.is_stateless(hyper) else [p for p in group["params"] if p.requires_grad]
            for param in params:
                if (managed := self._host.registry.lookup(param)) is not None:
                    found.append(managed)
                    continue
                form = self._rule.form(hyper, weight_form(self._host, param), name=self._members.name(param, 0))
                if form.is_there:
                    entry = excluded_zeros(form, param)
                    self._shown.excluded[param] = entry if self._rule.begins_at_zero else BlankEntry(entry)
        self._states.make_blank(found)
        for param in self._members.params():
            if param.requires_grad:
                param.grad = None

    def complete(self, state_dict: dict[str, Any], *, lazily: bool) -> dict[str, Any]:
        """Return what `state_dict` of torch has returned with what it does not know of."""
        rows = self._members.by_index(state_dict["param_groups"])
        if masters := masters_to_save(rows, self._host, lazily=lazily):
            state_dict[MASTER_KEY] = masters
        if self._host.scaler is not None:
            state_dict["loss_scaler"] = self._host.scaler.state_dict()
        for group in state_dict["param_groups"]:
            group.update({key: value.clone() for key, value in group.items() if isinstance(value, torch.Tensor)})
        return state_dict

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Compare a state with the parameter groups it is to be loaded into.

        Raises:
            CheckpointError: groups or shapes differ, or it was made with an option there is no counterpart of.
        """
        if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
            raise CheckpointError("not an optimizer state: it needs the keys 'state' and 'param_groups'")
        members, saved = self._members, state_dict["param_groups"]
        ours, theirs = ([len(group["params"]) for group in each] for each in (members.groups(), saved))
        if ours != theirs:
            raise CheckpointError(f"the state has parameter groups of {theirs} parameters, this optimizer of {ours}")
        wrong = []
        try:
            for index, param, hyper in self._rows(state_dict):
                if state := state_dict["state"].get(index):
                    called = members.name(param, index)
                    form = self._rule.form(hyper, weight_form(self._host, param), name=called)
                    problems = form.problems(self._rule.to_load(state), is_whole=True)
                    wrong += [f"{called} {problem}" for problem in problems]
        except ConfigError as error:
            raise CheckpointError(f"the state cannot be loaded: {error}") from None
        if wrong:
            raise CheckpointError(f"the state does not fit the parameters ({'; '.join(wrong)}); nothing was loaded")

    def _rows(self, state_dict: Mapping[str, Any]) -> Iterator[tuple[int, torch.Tensor, Any]]:
        """Yield each parameter with its index in a state, and the options that it would have."""
        for saved, own in zip(state_dict["param_groups"], self._members.groups(), strict=True):
            name, options = self._rule.required(own)
            if missing := [option for option in options if option not in saved]:
                raise CheckpointError(f"the state is of another optimizer than {name}: it has no {', '.join(missing)}")
            self._rule.check(saved)
            hyper = self._rule.hyper({**own, **saved, "params": own["params"]})
            for index, param in zip(saved["params"], own["params"], strict=True):
                yield index, param, hyper

    def load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Load a state; see `RuleOptimizer.load_state_dict`."""
        host, updater = self._host, self._host.updater
        self._updates.check_owned()
        self.check(state_dict)
        saved = state_dict.get(MASTER_KEY, {})
        rows = self._members.by_index(state_dict["param_groups"])
        masters = {managed: saved[index] for index, managed in rows if index in saved and host.owns(managed)}
        if saved:
            check_masters(masters, updater, host.ranks)
        if host.scaler is not None and "loss_scaler" in state_dict:
            host.scaler.load_state_dict(state_dict["loss_scaler"])
        taken: dict[ManagedParameter, dict[str, Any]] = {}
        # The last hook before and the first after the loading. In between torch copies each state to the device of its
        # parameter: there the managed ones would not fit.
        hooks = (
            optimizer.register_load_state_dict_pre_hook(lambda _, state: self._take_managed(state, taken)),
            optimizer.register_load_state_dict_post_hook(lambda _: self._adopt(taken), prepend=True),
        )
        groups = optimizer.param_groups
        try:
            torch.optim.Optimizer.load_state_dict(optimizer, state_dict)
        finally:
            for hook in hooks:
                hook.remove()
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        optimizer.param_groups = groups  # those that `ChunkManager.optimizer` has shared
        for managed, value in masters.items():
            updater.write_weight(managed, value)

    def _take_managed(self, state_dict: dict[str, Any], taken: dict[ManagedParameter, Any]) -> dict[str, Any]:
        """Move the states of managed parameters to `taken`, once it is certain that they can be loaded."""
        self.check(state_dict)
        states, registry, updater = dict(state_dict["state"]), self._host.registry, self._host.updater
        keeps = {}
        for index, param, hyper in self._rows(state_dict):
            if registry.is_of_other_stage(param):
                states.pop(index, None)
            elif (managed := registry.lookup(param)) is not None:
                state = taken[managed] = self._rule.to_load(states.pop(index, {}))
                if state:  # it may have others than the options so far call for
                    needed = self._rule.specs(hyper, updater.weight_form(managed), managed)
                    keeps[managed] = [*needed, *(spec for spec in self._rule.all_states if spec.key in state)]
        self._states.claim_more(keeps)
        self._states.prepare([managed for managed in keeps if self._host.owns(managed)])
        # Those of excluded parameters, which torch takes as they are.
        return {**state_dict, "state": tree_map_only(LazyTensor, LazyTensor.read, states)}

    def _adopt(self, taken: Mapping[ManagedParameter, Mapping[str, Any]]) -> None:
        self._states.forget_options()
        for managed, state in taken.items():
            self._states.replace(managed, state)
        for group in self._members.groups():
            self._rule.adopt(group)


def _is_zero(rate: object) -> bool:
    """Tell whether a learning rate is 0; some classes have none, or find their own."""
    return isinstance(rate, int | float | torch.Tensor) and float(rate) == 0
