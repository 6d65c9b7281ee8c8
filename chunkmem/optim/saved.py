"""What every optimizer over chunks has: its parameters looked up, and its states shown, saved and loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch.optim.optimizer import ParamsT
from torch.utils._pytree import tree_map_only

from chunkmem.errors import StateError
from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.lazy_tensor import LazyTensor
from chunkmem.optim.checks import check_state
from chunkmem.optim.chunk_states import ChunkStates
from chunkmem.optim.excluded import first_state
from chunkmem.optim.foreign import ChunkedOptimizer
from chunkmem.optim.host import OptimizerHost
from chunkmem.optim.masters import MASTER_KEY, check_masters, masters_to_save
from chunkmem.optim.rule import StateSpec, UpdateRule
from chunkmem.optim.speculative import Intent
from chunkmem.optim.state import OptimizerState, ParameterState
from chunkmem.optim.tiles import require_together
from chunkmem.types import Role


def _is_zero(rate: object) -> bool:
    """Tell whether a learning rate is 0; some classes have none, or find their own."""
    return isinstance(rate, int | float | torch.Tensor) and float(rate) == 0


@dataclass(frozen=True)
class HeldStates:
    """What a rank has of a parameter, as it is told to others."""

    count: torch.Tensor
    """The number of its updates: 0-dim float32."""
    roles: tuple[Role, ...]
    """Of the states that it has."""
    entry: Mapping[str, Any] | None = None
    """Of a class of torch's: its state, with a mark for what chunks have."""
    specs: tuple[StateSpec, ...] = ()
    """Of a class of torch's: the states that were claimed for it."""


class StateHolder(Protocol):
    """Has states of parameters in chunks, and takes them along where these are packed again: [Note: Repacking]."""

    open_block: str
    """The `with` block that has to be left before that; empty: none."""

    @property
    def state_specs(self) -> tuple[StateSpec, ...]: ...
    @property
    def excluded(self) -> MutableMapping[Any, Any]:
        """States of parameters that no chunk holds, by parameter and name."""
        ...

    def counts(self) -> Mapping[ManagedParameter, HeldStates]: ...
    def move_to(self, host: OptimizerHost) -> None: ...
    def take_over(self, counts: Mapping[ManagedParameter, HeldStates]) -> None: ...


class StatefulOptimizer(ChunkedOptimizer):
    """A real `torch.optim.Optimizer` whose states of managed parameters live in chunks."""

    open_block = ""

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], *, rule: UpdateRule[Any], host: OptimizerHost
    ) -> None:
        """Take parameters in; see `torch.optim.Optimizer`."""
        self._host = host
        self._updater = host.updater
        self._rule = rule
        self._complete = False
        self._states = self._no_states()
        super().__init__(params, defaults)
        self._require_tiles_together()
        self._complete = True
        host.add_holder(self)

    def _no_states(self) -> ChunkStates:
        return ChunkStates(self._host, self, self._rule, owned=self._managed)

    def __getstate__(self) -> NoReturn:
        raise StateError(
            "this optimizer cannot be copied or pickled: its states live in chunks. Take optimizer.state_dict() and "
            "load it into a new optimizer"
        )

    def __repr__(self) -> str:
        groups = self.param_groups
        count = f"{len(groups)} group" if len(groups) == 1 else f"{len(groups)} groups"
        shown = [f"{sum(len(group['params']) for group in groups)} parameters in {count}"]
        for name in self._rule.options or (("lr",) if all("lr" in group for group in groups) else ()):
            values = [_plain(group[name]) for group in groups]
            shown.append(f"{name}={values[0]!r}" if all(value == values[0] for value in values) else f"{name}={values}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def state_dict(self, *, lazy: bool = False) -> dict[str, Any]:
        """Return what the optimizer of torch over the same parameters would: CPU copies, never views.

        Under the key "master_weights" it also has, by the index of a parameter, float32 weights of those built in bf16
        or fp16: the model's `state_dict` has them as they were built. torch leaves that key out.

        Args:
            lazy: see `ChunkManager.state_dict`.

        Raises:
            StateError: `lazy` over several ranks.
        """
        self._host.require_open()
        if lazy:
            self._host.ranks.require_one("optimizer.state_dict(lazy=True)")
            return self.lazy_state_dict()
        with self._host.together("optimizer.state_dict()"):
            state_dict = self._saved()
            for key in ("state", MASTER_KEY):
                found = self._host.ranks.over_stages(state_dict.get(key, {}), label=f"sending the {key} of a stage")
                if found or key in state_dict:
                    state_dict[key] = dict(sorted(found.items()))
            return state_dict

    def lazy_state_dict(self) -> dict[str, Any]:
        """Return `state_dict()` with `LazyTensor`s for the states of managed parameters, and for master weights.

        With pipeline stages it has those of this one. Over ranks, all call it.
        """
        self._host.require_open()
        with self._host.together("optimizer.lazy_state_dict()"):
            return self._saved(lazily=True)

    def _saved(self, *, lazily: bool = False) -> dict[str, Any]:
        self._updater.claims.check(self._managed(), self)
        with self._states_filled_in(lazily=lazily):
            state_dict: dict[str, Any] = super().state_dict()
        rows = self._by_index(state_dict["param_groups"])
        if masters := masters_to_save(rows, self._host, lazily=lazily):
            state_dict[MASTER_KEY] = masters
        if self._host.scaler is not None:
            state_dict["loss_scaler"] = self._host.scaler.state_dict()
        for group in state_dict["param_groups"]:
            group.update({key: value.clone() for key, value in group.items() if isinstance(value, torch.Tensor)})
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of its torch counterpart over the same parameters.

        Its "master_weights", if there are any, become those of the model: load the model's weights first.

        Raises:
            CheckpointError: groups or shapes differ, it was made with an option there is no counterpart of, or its
                master weights are of other weights than the model has; nothing has been changed.
        """
        self._host.require_open()
        with self._host.together("optimizer.load_state_dict()"):
            self._load(state_dict)

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise what `load_state_dict` would; nothing is changed, and master weights are not looked at.

        Raises:
            CheckpointError: groups or shapes differ, or it was made with an option there is no counterpart of.
        """
        check_state(state_dict, self.param_groups, self._rule, name_of=self._name_of)

    def _load(self, state_dict: dict[str, Any]) -> None:
        self._updater.claims.check(self._managed(), self)
        self.check_state_dict(state_dict)
        saved = state_dict.get(MASTER_KEY, {})
        rows = self._by_index(state_dict["param_groups"])
        masters = {managed: saved[index] for index, managed in rows if index in saved and self._host.owns(managed)}
        if saved:
            check_masters(masters, self._updater, self._host.ranks)
        if self._host.scaler is not None and "loss_scaler" in state_dict:
            self._host.scaler.load_state_dict(state_dict["loss_scaler"])
        taken: dict[ManagedParameter, dict[str, Any]] = {}
        # The last hook before and the first after the loading. In between torch copies each state to the device of its
        # parameter: there the managed ones would not fit.
        hooks = (
            self.register_load_state_dict_pre_hook(lambda _, state: self._take_managed(state, taken)),
            self.register_load_state_dict_post_hook(lambda _: self._adopt(taken), prepend=True),
        )
        groups = self.param_groups
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.clear()
            group.update(loaded)
        self.param_groups = groups  # those that `ChunkManager.optimizer` has shared
        for managed, value in masters.items():
            self._updater.write_weight(managed, value)

    def _by_index(self, saved: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, ManagedParameter]]:
        """Yield managed parameters with the index that each has in the parameter groups of a `state_dict`."""
        for group, own in zip(saved, self.param_groups, strict=True):
            for index, param in zip(group["params"], own["params"], strict=True):
                managed = self._host.registry.lookup(param)
                if managed is not None:
                    yield index, managed

    @property
    def in_backward(self) -> bool:
        """Groups are updated inside backward; see [Note: Updates in backward] in `chunkmem.optim.in_backward`."""
        return False

    def update_in_backward(self, group: int) -> None:
        """See `chunkmem.optim.in_backward.BackwardUpdater`."""

    def give_up_step(self) -> None:
        """Weights and states were replaced: a step that was to go on does not."""

    def intent(self, group: int) -> Intent | None:
        """See `chunkmem.optim.claims.Owner`."""
        return None

    def move_to(self, host: OptimizerHost) -> None:
        """Have the same Parameters in other chunks from now on, which `host` has; there are no states in them yet.

        Raises:
            CapacityError: weights, gradients and states do not fit DEVICE and HOST together.
        """
        self._host, self._updater = host, host.updater
        self._states = self._no_states()
        self._state.show(self._states)
        host.add_holder(self)

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """All states that it may keep of a parameter."""
        return self._rule.all_states

    @property
    def excluded(self) -> MutableMapping[Any, Any]:
        """See `StateHolder`."""
        return self.state.excluded

    def counts(self) -> dict[ManagedParameter, HeldStates]:
        """Return the parameters whose states this rank has: each one's number of updates, and the states it has."""
        states_of = self._updater.claims.states_of
        steps = self._states.steps.items()
        return {m: HeldStates(count, tuple(spec.role for spec in states_of(m))) for m, count in steps}

    def take_over(self, counts: Mapping[ManagedParameter, HeldStates]) -> None:
        """Have the states of parameters that `counts` has returned on other ranks; what is in them comes later.

        Args:
            counts: of all ranks, in the same order on all.

        Raises:
            CapacityError: see `move_to`.
        """
        self._claim_more({m: self._rule.states_in(dict.fromkeys(held.roles)) for m, held in counts.items()})
        own = {managed: held.count.clone() for managed, held in counts.items() if self._host.owns(managed)}
        self._states.steps.update(own)
        self._states.note(counts)

    def _require_tiles_together(self) -> None:
        require_together((model.root for model in self._host.registry.models), self.param_groups)

    def _params(self) -> Iterator[torch.Tensor]:
        return (param for group in self.param_groups for param in group["params"])

    def _managed(self) -> list[ManagedParameter]:
        """Return the managed parameters, over ranks those that this one owns: it has their states."""
        owns = self._host.owns
        return [m for m in self._looked_up() if m is not None and owns(m)]

    def _looked_up(self) -> list[ManagedParameter | None]:
        lookup = self._host.registry.lookup
        return [lookup(param) for group in self.param_groups for param in group["params"]]

    def _known(self) -> list[ManagedParameter]:
        """Return the managed parameters, on whichever rank."""
        return [managed for managed in self._looked_up() if managed is not None]

    def _excluded(self) -> list[torch.Tensor]:
        return [param for param in self._params() if self._host.registry.lookup(param) is None]

    def _name_of(self, param: torch.Tensor, index: int) -> str:
        return managed.name if (managed := self._host.registry.lookup(param)) is not None else f"parameter {index}"

    def _pending(self, *, besides: Collection[ManagedParameter] = ()) -> list[ManagedParameter]:
        """Return the managed parameters that this rank owns and that have a gradient; `besides` have had their update.

        Raises:
            StateError: plain PyTorch would use a gradient that is gone.
        """
        landed = self._updater.gradients.landed
        others = (m for m in self._looked_up() if m is not None and m not in besides)
        self._updater.gradients.require_known(others, has_new=bool(besides))
        return [managed for managed in self._managed() if managed in landed.get(managed.group, ())]

    def _is_initialization(self) -> bool:
        """Tell whether a step is one that `torch.distributed.checkpoint` makes to have states to load into.

        That is one at learning rate 0, over gradients of zero that were assigned to all trainable parameters, before
        there are any states or other gradients.
        """
        if self.state or any(not _is_zero(group.get("lr")) for group in self.param_groups):
            return False
        if self._updater.gradients.any_given(self._known()):
            return False
        trainable = [param for param in self._params() if param.requires_grad]
        grads = [param.grad for param in trainable if param.grad is not None]
        return bool(grads) and len(grads) == len(trainable) and not any(bool(grad.any()) for grad in grads)

    def _initialize(self) -> None:
        """Make states of zero, and count no update: training continues as if nobody had asked for them."""
        self._updater.claims.check(self._managed(), self)
        groups = [group for group in self.param_groups if self._rule.states(self._rule.hyper(group))]
        found = [(p, self._host.registry.lookup(p)) for group in groups for p in group["params"] if p.requires_grad]
        managed = [managed for _, managed in found if managed is not None]
        self._states.prepare([one for one in managed if self._host.owns(one)])
        self._states.note(managed)
        self.state.excluded.update((param, first_state(param, self._rule)) for param, one in found if one is None)
        for param in self._params():
            if param.requires_grad:
                param.grad = None

    @property  # type: ignore[override]
    def state(self) -> OptimizerState:
        """States by parameter, as in torch.optim; those of managed parameters are copies, see `OptimizerState`."""
        return self._state

    @state.setter
    def state(self, value: MutableMapping[Any, Any]) -> None:
        if not self._complete:  # torch.optim's constructor
            self._state = OptimizerState(self._states, value, self._params)
        elif value is not self._state:
            entries = list(value.items())
            self._state.clear()
            self._state.update(entries)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Of `load_state_dict`: of excluded parameters alone, as those of managed ones were taken out.
        self._state.excluded = state["state"]
        super().__setstate__({key: value for key, value in state.items() if key != "state"})

    @contextmanager
    def _states_filled_in(self, *, lazily: bool) -> Iterator[None]:
        """Let `state` be ordinary copies of all states for a while: `torch.optim.Optimizer.state_dict` packs them.

        Args:
            lazily: in place of copies of managed parameters' states there are `LazyTensor`s.
        """
        shown = self._state
        copies: dict[Any, dict[str, torch.Tensor]] = {}
        for param, entry in shown.items():
            if isinstance(entry, ParameterState):
                copies[param] = entry.lazy() if lazily else entry.copies()
            elif entry:
                copies[param] = tree_map_only(torch.Tensor, lambda value: value.to("cpu", copy=True), dict(entry))
        self._state = copies  # type: ignore[assignment]
        try:
            yield
        finally:
            self._state = shown

    def _take_managed(self, state_dict: dict[str, Any], taken: dict[ManagedParameter, Any]) -> dict[str, Any]:
        """Move the states of managed parameters to `taken`, once it is certain that they can be loaded."""
        self.check_state_dict(state_dict)
        states = dict(state_dict["state"])
        for saved, own in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for index, param in zip(saved["params"], own["params"], strict=True):
                if self._host.registry.is_elsewhere(param):
                    states.pop(index, None)
        for index, managed in self._by_index(state_dict["param_groups"]):
            taken[managed] = self._to_load(states.pop(index, {}))
        # The states that are saved may be others than those that the options so far call for.
        keeps = self._kept_by({m: state for m, state in taken.items() if state}, state_dict["param_groups"])
        self._claim_more(keeps)
        self._states.prepare([managed for managed in keeps if self._host.owns(managed)])
        # Those of excluded parameters, which torch takes as they are.
        return {**state_dict, "state": tree_map_only(LazyTensor, LazyTensor.read, states)}

    def _to_load(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is loaded of a parameter's saved state."""
        return {key: state[key] for key in self._states.keys if state.get(key) is not None}

    def _kept_by(
        self, taken: Mapping[ManagedParameter, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
    ) -> dict[ManagedParameter, tuple[StateSpec, ...]]:
        """Return the states that there have to be for saved ones, which come with these parameter groups."""
        return {managed: self._rule.states_in(state) for managed, state in taken.items()}

    def _wanted(self, groups: Iterable[Mapping[str, Any]]) -> dict[ManagedParameter, tuple[StateSpec, ...]]:
        """Return the states that managed parameters of some parameter groups need, over ranks all of them."""
        found: dict[ManagedParameter, tuple[StateSpec, ...]] = {}
        for group in groups:
            hyper = self._rule.hyper(group)
            looked_up = (self._host.registry.lookup(param) for param in group["params"])
            found.update((managed, self._states_of(managed, hyper)) for managed in looked_up if managed is not None)
        return found

    def _states_of(self, managed: ManagedParameter, hyper: Any) -> tuple[StateSpec, ...]:
        """Return the states of a parameter that an update with `hyper` needs."""
        return self._rule.states(hyper)

    def _claim_more(self, wanted: Mapping[ManagedParameter, Sequence[StateSpec]]) -> None:
        """Claim states that were not when a parameter was added."""
        claims = self._updater.claims
        lacking = {m: specs for m, specs in wanted.items() if not set(specs) <= set(claims.states_of(m))}
        if lacking:
            claims.require_room(lacking, self)
            self._updater.claim(lacking, self, forget_plans=self._host.forget_plans)

    def _adopt(self, taken: Mapping[ManagedParameter, Mapping[str, Any]]) -> None:
        for managed, state in taken.items():
            self._states.replace(managed, state)
        for group in self.param_groups:
            self._rule.adopt(group)


def _plain(value: object) -> object:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
