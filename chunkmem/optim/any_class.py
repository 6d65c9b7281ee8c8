"""`chunkmem.Optimizer`: any optimizer class that updates each parameter by itself, with its states in chunks."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.optim.optimizer import ParamsT

from chunkmem.errors import CheckpointError, ConfigError
from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.tiled import TiledLinear
from chunkmem.optim.checks import require_fit, saved_groups
from chunkmem.optim.class_calls import NOT_OPTIONS, OptimizerClass, require_class
from chunkmem.optim.class_rule import ClassHyper, ClassRule, Place, Record, add_to, new_item
from chunkmem.optim.class_trials import ClassTrial, EntryForm
from chunkmem.optim.entries import EntryStates, blank_entry, entry_problems
from chunkmem.optim.host import HasOptimizerHost, OptimizerHost
from chunkmem.optim.optimizer import RuleOptimizer
from chunkmem.optim.rule import StateSpec, UpdateItem
from chunkmem.optim.saved import HeldStates
from chunkmem.optim.shaped_state import ShapedState, TensorForm, moved_to

CLASS_KEY = "optimizer"
"""Of a parameter group that is added: its class, if there are several."""
Pair = tuple[type[torch.optim.Optimizer], ParamsT] | tuple[type[torch.optim.Optimizer], ParamsT, Mapping[str, Any]]


class Optimizer(RuleOptimizer):
    """A class of `torch.optim.Optimizer`, or several, over managed and excluded parameters.

    Each class updates its parameters with its own `step()`, a chunk group after the other, to the bits of plain
    PyTorch. Its states are in chunks; `state_dict()`, parameter groups and LR schedulers are the class's. Gradients are
    consumed by `step()`. Where there are several classes, a group given to `add_param_group` names its own as
    `"optimizer"`.

    Args:
        classes: the class, or a list of (class, parameters) or (class, parameters, options).
        params: parameters or parameter groups, as in torch.optim; None if `classes` is a list.
        manager: the manager that holds the parameters.
        max_grad_norm: clip the global norm to this in `step()`; default: the configuration's `gradient_clipping`.
        in_backward: update each chunk group inside backward, as soon as its gradients are complete, so that these never
            exist all at once; default: the configuration's `optimizer.params.in_backward`. For loops with one backward
            a step that neither clip nor look at gradients: what does not go is refused.
        options: of the constructor of each class; those of a list's entry win.

    Raises:
        ConfigError: a class refuses a parameter or an option, needs all parameters at once (as LBFGS), or needs whole
            matrices where a layer is tiled.
        StateError: a parameter is neither managed nor excluded.
        CapacityError: weights, gradients and states do not fit DEVICE and HOST together.
    """

    _rule: ClassRule
    _states: EntryStates

    def __init__(
        self,
        classes: type[torch.optim.Optimizer] | Sequence[Pair],
        params: ParamsT | None = None,
        *,
        manager: HasOptimizerHost,
        max_grad_norm: float | None = None,
        in_backward: bool | None = None,
        **options: Any,
    ) -> None:
        host = manager.runtime
        host.require_open()
        trials, groups = [], []
        for kind, own, own_options in _pairs(classes, params):
            trials.append(ClassTrial(OptimizerClass(require_class(kind), {**options, **own_options})))
            groups += [{**group, CLASS_KEY: len(trials) - 1} for group in _groups(own)]
        self._tiles: dict[int, str] | None = None
        self._hypers_of: dict[int, ClassHyper] = {}
        """By the identity of a parameter: the options of its group at the last step."""
        self._blank: set[torch.Tensor] = set()
        """Excluded parameters whose states are zeros to be loaded into."""
        self._kinds: list[Hashable] = []
        """What the states of each group depended on at the last step."""
        super().__init__(
            groups, {}, rule=ClassRule(trials), host=host, max_grad_norm=max_grad_norm, in_backward=in_backward
        )

    def __repr__(self) -> str:
        names = ", ".join(trial.made.name for trial in self._rule.trials)
        return super().__repr__().replace("Optimizer(", f"Optimizer({names}: ", 1)

    def _no_states(self) -> EntryStates:
        return EntryStates(self._host, self, self._rule, owned=self._managed, form_of=self._form_of)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; see the class.

        Raises:
            ConfigError: its class refuses it, or there are several and it names none of them.
        """
        self._host.require_open()
        group = dict(param_group)
        index = self._index_of(group.pop(CLASS_KEY, None))
        params = group["params"]
        group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
        found = [cast(torch.Tensor, one[1] if isinstance(one, tuple) else one) for one in group["params"]]
        if any(isinstance(param, torch.Tensor) for param in found):
            resolved = self._resolve(index, next(p for p in found if isinstance(p, torch.Tensor)), group)
            group = {**resolved, **{key: group[key] for key in NOT_OPTIONS if key in group}}
        new = [id(param) for param in found if id(param) not in self._rule.index_of]
        self._rule.index_of.update(dict.fromkeys(new, index))
        try:
            super().add_param_group(group)
        except Exception:
            for key in new:
                self._rule.index_of.pop(key, None)
            raise

    def _index_of(self, named: object) -> int:
        """Return the number of the class of a group, given what the group says."""
        if isinstance(named, int):
            return named
        kinds = [trial.made.kind for trial in self._rule.trials]
        for number, kind in enumerate(kinds):
            if kind is named:
                return number
        if named is None and len(kinds) == 1:
            return 0
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ConfigError(
            f"add_param_group(): this optimizer has the classes {names}, and the group names {named!r}; say whose "
            f'it is: {{"params": ..., "{CLASS_KEY}": {kinds[0].__name__}}}'
        )

    def _resolve(self, index: int, param: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a group with the defaults of its class, as that makes them of one parameter."""
        options = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        trial = self._rule.trials[index]
        made = trial.sample(self._weight_form(param), options, name=self._name_in(param, 0))
        if not self.defaults or len(self._rule.trials) > 1:
            known = made.defaults if not self.param_groups else {k: self.defaults[k] for k in self.defaults}
            self.defaults = {key: value for key, value in known.items() if key in made.defaults}
        given = {**trial.made.arguments, **options}
        resolved = {key: value for key, value in made.param_groups[0].items() if key not in NOT_OPTIONS}
        # A tensor stays the user's own, as in torch.optim: it may be written in place, such as a learning rate.
        own = {key: given[key] for key, value in resolved.items() if isinstance(value, torch.Tensor) and key in given}
        return {**resolved, **{key: value for key, value in own.items() if isinstance(value, torch.Tensor)}}

    def move_to(self, host: OptimizerHost) -> None:
        self._tiles, self._kinds = None, []
        super().move_to(host)

    def counts(self) -> dict[ManagedParameter, HeldStates]:
        found = {}
        for managed, count in self._states.steps.items():
            entry, specs = self._states.entry(managed), self._states.specs_of(managed)
            roles = tuple(specs[key].role for key, value in (entry or {}).items() if value is Place.CHUNK)
            found[managed] = HeldStates(count, roles, entry, tuple(specs.values()))
        return found

    def take_over(self, counts: Mapping[ManagedParameter, HeldStates]) -> None:
        wanted = {}
        for managed, held in counts.items():
            specs = {spec.key: moved_to(managed, spec) for spec in held.specs if isinstance(spec, ShapedState)}
            wanted[managed] = tuple({**self._states.specs_of(managed), **specs}.values())
        self._claim_more(wanted)
        for managed, held in counts.items():
            if self._host.owns(managed):
                self._states.steps[managed] = held.count.clone()
                entry = None if held.entry is None else dict(held.entry)
                self._states.records[managed] = Record(entry, is_new=False)
        self._states.note(managed for managed, held in counts.items() if held.entry is not None)

    # The states of a parameter.

    def _name_in(self, param: torch.Tensor, index: int) -> str:
        """Return what messages call a parameter, also one that is in no model."""
        managed = self._host.registry.find(param)
        return f"parameter {index}" if managed is None else managed.name

    def _weight_form(self, param: torch.Tensor) -> TensorForm:
        managed = self._host.registry.find(param)
        if managed is not None:
            return self._updater.weight_form(managed)
        return TensorForm(tuple(param.shape), tuple(param.stride()), param.dtype)

    def _form_for(self, param: torch.Tensor, hyper: ClassHyper, index: int = 0) -> EntryForm:
        return self._rule.entry_form(hyper, self._weight_form(param), name=self._name_in(param, index))

    def _form_of(self, managed: ManagedParameter) -> EntryForm:
        """Return what the state of a parameter has with the options of its group."""
        hyper = self._hypers_of.get(id(managed.param))
        if hyper is None:
            for group in self.param_groups:
                hypers = dict.fromkeys(map(id, group["params"]), self._rule.hyper(group))
                self._hypers_of.update(hypers)
            hyper = self._hypers_of[id(managed.param)]
        return self._form_for(managed.param, hyper)

    def _states_of(self, managed: ManagedParameter, hyper: ClassHyper) -> tuple[StateSpec, ...]:
        """Return the states that a parameter needs, and those that it has of this optimizer already."""
        self._require_whole(managed, hyper)
        weights = self._updater.weight_form(managed)
        form = self._rule.entry_form(hyper, weights, name=managed.name)
        found: dict[str, StateSpec] = {spec.key: spec for spec in self._rule.specs_of(form, weights, managed.position)}
        if self._updater.claims.owner(managed) is self:
            found = {**self._states.specs_of(managed), **found}
        return tuple(found[key] for key in sorted(found))

    def _require_whole(self, managed: ManagedParameter, hyper: ClassHyper) -> None:
        """Refuse a tile to a class that has to see the whole matrix."""
        if self._tiles is None:
            self._tiles = dict(tiles_in(model.root for model in self._host.registry.models))
        require_whole(managed, self._rule.trials[hyper.index], self._tiles)

    # A step.

    def _initialize(self) -> None:
        self._updater.claims.check(self._managed(), self)
        self._claim_more(self._wanted(self.param_groups))
        trainable = [param for param in self._params() if param.requires_grad]
        found = [(param, self._host.registry.lookup(param)) for param in trainable]
        self._states.make_blank(managed for _, managed in found if managed is not None)
        for group in self.param_groups:
            hyper = self._rule.hyper(group)
            for param in group["params"]:
                if param.requires_grad and self._host.registry.lookup(param) is None:
                    self._make_blank(param, self._form_for(param, hyper))
        for param in trainable:
            param.grad = None

    def _make_blank(self, param: torch.Tensor, form: EntryForm) -> None:
        """Have an entry of zeros for an excluded parameter, which its first update does not find."""
        if form.is_there:
            entry = blank_entry(form)
            for key, tensor in form.tensors.items():
                entry[key] = tensor.empty(str(param.device)).zero_()
            self.state.excluded[param] = entry
            self._blank.add(param)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._blank.clear()
        super().__setstate__(state)

    def _stateless(self, hypers: Sequence[Any]) -> Collection[ManagedParameter]:
        return ()  # whether a parameter has an entry is for its class to say

    def _make_states(
        self,
        pending: list[ManagedParameter],
        hypers: Sequence[Any],
        stateless: Collection[ManagedParameter],
        *,
        anywhere: list[ManagedParameter],
    ) -> None:
        needs = [self._rule.needs(hyper) for hyper in hypers]
        if needs != self._kinds:
            self._hypers_of.clear()
            self._claim_more(self._wanted(self.param_groups))
            self._kinds = needs
        self._states.prepare(pending)
        self._states.note(m for m in anywhere if m not in self._states and self._form_of(m).is_there)
        self._updater.complete_states(pending)

    def _new_item(self, hyper: Any, *, ahead: bool = False) -> UpdateItem:
        return new_item(hyper, ahead=ahead)

    def _add_to(self, item: UpdateItem, managed: ManagedParameter, step: torch.Tensor, number: int) -> None:
        add_to(item, managed, step, self._states.record(managed), self._states.specs_of(managed))
        item.numbers.append(number)

    def _update_excluded(self, params: list[torch.Tensor], hyper: Any, *, multiplier: float | None) -> None:
        for param in self._blank.intersection(params):
            del self.state.excluded[param]
        self._blank.difference_update(params)
        for param in params:
            self._form_for(param, hyper)  # a class that updates nothing in chunks was not tried so far
        self._rule.update_excluded(params, self.state.excluded, hyper, multiplier=multiplier)

    # Loading.

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        wrong = []
        groups = saved_groups(state_dict, self.param_groups)
        for saved, own in zip(groups, self.param_groups, strict=True):
            trial = self._rule.trials[self._rule.hyper(own).index]
            if missing := [key for key in trial.defaults if key not in saved]:
                raise CheckpointError(
                    f"the state is of another optimizer than {trial.made.name}: it has no {', '.join(missing)}"
                )
            hyper = self._rule.hyper({**saved, "params": own["params"]})
            for index, param in zip(saved["params"], own["params"], strict=True):
                if not (state := state_dict["state"].get(index)):
                    continue
                try:
                    form = self._form_for(param, hyper, index)
                except ConfigError as error:
                    raise CheckpointError(f"the state cannot be loaded: {error}") from None
                problems = entry_problems(state, form, is_whole=True)
                wrong += [f"{self._name_of(param, index)} {problem}" for problem in problems]
        require_fit(wrong)

    def _to_load(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return dict(state)

    def _kept_by(
        self, taken: Mapping[ManagedParameter, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
    ) -> dict[ManagedParameter, tuple[StateSpec, ...]]:
        found = {}
        for saved, own in zip(groups, self.param_groups, strict=True):
            hyper = self._rule.hyper({**saved, "params": own["params"]})
            managed = (self._host.registry.find(param) for param in own["params"])
            found.update({one: self._states_of(one, hyper) for one in managed if one is not None and one in taken})
        return found

    def _adopt(self, taken: Mapping[ManagedParameter, Mapping[str, Any]]) -> None:
        self._hypers_of.clear()
        super()._adopt(taken)


def _pairs(classes: Any, params: Any) -> list[tuple[Any, Any, Mapping[str, Any]]]:
    """Return (class, parameters, options) for what a user has passed."""
    if not isinstance(classes, list | tuple):
        if params is None:
            raise ConfigError("chunkmem.Optimizer(class, params, manager=manager): there are no parameters")
        return [(classes, params, {})]
    if params is not None:
        raise ConfigError(
            "chunkmem.Optimizer([(class, params), ...], manager=manager): each class has its parameters in the list; "
            "there are others in addition"
        )
    if not classes or any(not isinstance(pair, tuple) or len(pair) not in (2, 3) for pair in classes):
        raise ConfigError(
            "chunkmem.Optimizer([...]): the list has to have (class, params) or (class, params, options) in each place"
        )
    return [(pair[0], pair[1], pair[2] if len(pair) == 3 else {}) for pair in classes]


def _groups(params: Any) -> list[dict[str, Any]]:
    """Return parameters as parameter groups."""
    if isinstance(params, torch.Tensor):
        raise TypeError("params has to be an iterable of tensors or dicts, not a tensor")
    found = list(params)
    if not found:
        raise ValueError("optimizer got an empty parameter list")
    return [dict(group) for group in found] if isinstance(found[0], dict) else [{"params": found}]


def require_whole(managed: ManagedParameter, trial: ClassTrial, tiles: Mapping[int, str]) -> None:
    """Refuse a tile to a class that may have to see the whole matrix; `tiles` are those of `tiles_in`.

    Raises:
        ConfigError: it is one.
    """
    layer = tiles.get(id(managed.param))
    if layer is not None and not trial.is_elementwise:
        raise ConfigError(
            f"{trial.made.name} may need whole matrices, and parameter {managed.name} is a tile of layer {layer}; "
            "update tiles with an elementwise class (AdamW, SGD, ...), in the same chunkmem.Optimizer([...]), or "
            "do not tile that layer. A class of your own that updates each element by itself says so: "
            "is_elementwise = True"
        )


def tiles_in(roots: Iterable[torch.nn.Module]) -> Iterable[tuple[int, str]]:
    """Yield the identity of each tile with the name of its layer."""
    for root in roots:
        for name, module in root.named_modules():
            for tiles in module.tiles().values() if isinstance(module, TiledLinear) else ():
                yield from ((id(tile), name) for tile in tiles)
