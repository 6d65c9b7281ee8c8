"""`chunkmem.Optimizer`: any optimizer class, with its states in chunks, or over all parameters at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType, MethodType
from typing import Any, cast

import torch
from torch.optim.optimizer import ParamsT

from chunkmem.data.errors import ConfigError
from chunkmem.modules.binding import ManagedParameter
from chunkmem.optim.checks import flag
from chunkmem.optim.class_calls import NOT_OPTIONS, options_of, require_class
from chunkmem.optim.class_rule import ClassRule
from chunkmem.optim.class_trials import ClassTrial
from chunkmem.optim.host import HasOptimizerHost, OptimizerHost
from chunkmem.optim.members import weight_form
from chunkmem.optim.optimizer import RuleOptimizer
from chunkmem.optim.rule import UpdateRule
from chunkmem.optim.tiles import tiled_weights
from chunkmem.optim.whole import WholeClass, WholeRule, WholeStep
from chunkmem.ranks.local_parts import LocalPart

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
        whole: the class updates a parameter by others, too: it has all of them at once, as ordinary tensors on HOST,
            where there is room for their weights, gradients and states; one class, on one rank. The other public
            methods of the class, such as `train()` and `eval()`, are there, too.
        options: of the constructor of each class; those of a list's entry win.

    Raises:
        ConfigError: a class refuses a parameter or an option, needs all parameters at once (as LBFGS) and `whole` is
            false, or needs whole matrices where a layer is tiled.
        StateError: a parameter is neither managed nor excluded.
        CapacityError: weights, gradients and states do not fit DEVICE and HOST together.
    """

    def __new__(cls, *_: Any, whole: bool = False, **__: Any) -> Optimizer:
        """Make one; see the class."""
        return object.__new__(WholeOptimizer if flag("whole", whole) else cls)

    def __init__(
        self,
        classes: type[torch.optim.Optimizer] | Sequence[Pair],
        params: ParamsT | None = None,
        *,
        manager: HasOptimizerHost,
        max_grad_norm: float | None = None,
        in_backward: bool | None = None,
        whole: bool = False,
        **options: Any,
    ) -> None:
        host = manager.runtime
        host.require_open()
        groups, defaults, rule = self._make(host, classes, params, options, in_backward)
        super().__init__(groups, defaults, rule=rule, host=host, max_grad_norm=max_grad_norm, in_backward=in_backward)

    def _make(
        self, host: OptimizerHost, classes: Any, params: Any, options: Any, in_backward: bool | None
    ) -> tuple[Any, Any, UpdateRule[Any]]:
        """Return parameter groups, defaults of their options, and what updates them."""
        trials, groups = [], []
        for kind, own, own_options in _pairs(classes, params):
            trials.append(ClassTrial(require_class(kind), {**options, **own_options}))
            groups += [{**group, CLASS_KEY: trials[-1]} for group in _groups(own)]
        self._rule = ClassRule(trials)
        return groups, {}, self._rule

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; see the class.

        Raises:
            ConfigError: its class refuses it, or there are several and it names none of them.
        """
        self._host.require_open()
        group = dict(param_group)
        trial = self._trial_of(group.pop(CLASS_KEY, None))
        params = group["params"]
        group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
        found = [cast(torch.Tensor, one[1] if isinstance(one, tuple) else one) for one in group["params"]]
        if any(isinstance(param, torch.Tensor) for param in found):
            resolved = self._resolve(trial, next(p for p in found if isinstance(p, torch.Tensor)), group)
            group = {**resolved, **{key: group[key] for key in NOT_OPTIONS if key in group}}
        tiles = self._tiles()
        for managed in filter(None, map(self._host.registry.find, found)):
            require_whole(managed, trial, tiles)
        new = [id(param) for param in found if id(param) not in self._rule.trial_of]
        self._rule.trial_of.update(dict.fromkeys(new, trial))
        try:
            super().add_param_group(group)
        except Exception:
            for key in new:
                self._rule.trial_of.pop(key, None)
            raise

    def _tiles(self) -> dict[int, str]:
        registry = self._host.registry
        return tiles_in((model.root for model in registry.models), registry.local_parts)

    def _trial_of(self, named: object) -> ClassTrial:
        """Return the class of a group, given what the group says."""
        trials = self._rule.trials
        for trial in trials:
            if named in (trial, trial.kind) or (named is None and len(trials) == 1):
                return trial
        names = ", ".join(trial.name for trial in trials)
        raise ConfigError(
            f"add_param_group(): this optimizer has the classes {names}, and the group names {named!r}; say whose "
            f'it is: {{"params": ..., "{CLASS_KEY}": {trials[0].name}}}'
        )

    def _resolve(self, trial: ClassTrial, param: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a group with the defaults of its class, as that makes them of one parameter."""
        options = options_of(group)
        made = trial.sample(weight_form(self._host, param), options, name=self._members.name(param, 0))
        if not self.param_groups:
            self.defaults = made.defaults
        elif len(self._rule.trials) > 1:
            self.defaults = {key: value for key, value in self.defaults.items() if key in made.defaults}
        given = {**trial.arguments, **options}
        resolved = options_of(made.param_groups[0])
        # A tensor stays the user's own, as in torch.optim: it may be written in place, such as a learning rate.
        own = {key: given.get(key) for key, value in resolved.items() if isinstance(value, torch.Tensor)}
        return {**resolved, **{key: value for key, value in own.items() if isinstance(value, torch.Tensor)}}


class WholeOptimizer(Optimizer):
    """What `chunkmem.Optimizer(..., whole=True)` makes."""

    updates: WholeStep

    def _make(
        self, host: OptimizerHost, classes: Any, params: Any, options: Any, in_backward: bool | None
    ) -> tuple[Any, Any, UpdateRule[Any]]:
        if isinstance(classes, list | tuple):
            raise ConfigError(
                "chunkmem.Optimizer([...], whole=True): make an optimizer for each class: all of them step over "
                "disjoint parameters of one manager"
            )
        kind = require_class(classes)
        ((_, own, _),) = _pairs(kind, params)
        groups = _groups(own)
        is_flat = len(groups) == 1 and groups[0].keys() == {"params"}
        call = f"chunkmem.Optimizer({kind.__name__}, whole=True)"
        host.ranks.require_one(call)
        if host.config.optimizer.params.in_backward if in_backward is None else in_backward:
            raise ConfigError(f"{call} needs all gradients before it updates anything: leave out in_backward")
        self._class = WholeClass(kind, host, groups[0]["params"] if is_flat else groups, options)
        return self._class.groups(), dict(self._class.inner.defaults), WholeRule(self._class)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as the class does."""
        self._host.require_open()
        group = self._class.add_group(param_group) if self._is_made else param_group
        tiles = self._tiles()
        for managed in filter(None, map(self._host.registry.find, group["params"])):
            if id(managed.param) in tiles:
                raise ConfigError(
                    f"parameter {managed.name} is a {tiles[id(managed.param)]}, and "
                    f"{self._class.name} with whole=True sees whole matrices: do not divide that layer"
                )
        RuleOptimizer.add_param_group(self, group)

    def move_to(self, host: OptimizerHost) -> None:
        """Refuse to be of other chunks.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"chunkmem.Optimizer({self._class.name}, whole=True) cannot move to other ranks")

    def _call(self, closure: Callable[[], Any]) -> Any:
        if self.max_grad_norm > 0 or self._host.scaler is not None:
            asked = "a loss scale (fp16)" if self._host.scaler is not None else f"max_grad_norm={self.max_grad_norm}"
            raise ConfigError(
                f"{self._class.name}.step(closure) with whole=True and {asked}: the class calls the closure, and "
                'nobody scales gradients in between; clip inside of the closure, or take precision "bf16"'
            )
        return self.updates.call(closure)

    def __getattr__(self, name: str) -> Any:
        """Return a public attribute or method of the class that torch.optim.Optimizer has not."""
        if name.startswith("_") or "_class" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = getattr(self._class.inner, name)
        return partial(self.updates.use, found) if isinstance(found, MethodType) else found


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
    """Refuse a part of a weight to a class that may have to see all of it; `tiles` are what `tiles_in` has found.

    Raises:
        ConfigError: it is one.
    """
    layer = tiles.get(id(managed.param))
    if layer is not None and not trial.is_elementwise:
        raise ConfigError(
            f"{trial.name} may need whole matrices, and parameter {managed.name} is a {layer}; update parts with an "
            "elementwise class (AdamW, SGD, ...), in the same chunkmem.Optimizer([...]), or do not divide that "
            "layer. A class of your own that updates each element by itself says so: is_elementwise = True"
        )


def tiles_in(roots: Iterable[torch.nn.Module], parts: Mapping[int, LocalPart] = MappingProxyType({})) -> dict[int, str]:
    """Return by the identity of each tile, and of each part of a DTensor, what it is a part of."""
    tiles = {id(tile): f"tile of layer {whole.layer_name}" for whole in tiled_weights(roots) for tile in whole.tiles}
    return tiles | {
        key: f"part of the DTensor {part.name}" for key, part in parts.items() if part.local_shape != part.shape
    }
