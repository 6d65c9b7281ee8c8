"""Which optimizer trains a model, by a name on the command line, and the states that it keeps of each parameter."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from chunkmem.data.errors import ConfigError
from chunkmem.estimate.model import blocks_in
from chunkmem.estimate.models import imported
from chunkmem.modules.binding import ManagedParameter
from chunkmem.optim.any_class import require_whole, tiles_in
from chunkmem.optim.class_calls import require_class
from chunkmem.optim.class_rule import ClassHyper, ClassRule
from chunkmem.optim.class_trials import ClassTrial
from chunkmem.optim.entries import TensorForm
from chunkmem.optim.rule import StateSpec

BUILT_IN: Final = ("adamw", "adam")
"""Names of chunkmem's own classes, whose states the configuration chooses; others are for `chunkmem.Optimizer`."""
_WITH_OPTIONS: Final = MappingProxyType({"sgd-momentum": ("sgd", MappingProxyType({"momentum": 0.9}))})
"""Classes with other options than those they have by default."""
_ALLOWED: Final = "sgd-momentum, module:Class, or a class of torch.optim in lower case"

Trained = tuple[type[torch.optim.Optimizer], list[nn.Parameter], Mapping[str, Any]]
"""A class, its parameters, and options of its constructor: what `chunkmem.Optimizer` takes a list of."""


def class_named(name: str) -> tuple[type[torch.optim.Optimizer], Mapping[str, Any]]:
    """Return the class with a name, and options of its constructor.

    Args:
        name: a class of torch.optim in lower case, ``sgd-momentum``, or ``module:Class``.

    Raises:
        ConfigError: there is none; says what is allowed.
    """
    if ":" in name:
        return require_class(imported(name, what="optimizer", allowed=_ALLOWED)), {}
    known = {
        key.lower(): kind
        for key, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    of_class, options = _WITH_OPTIONS.get(name, (name, {}))
    if of_class not in known:
        raise ConfigError(f"optimizer {name!r} is not known; allowed: {_ALLOWED}: {', '.join(sorted(known))}")
    return known[of_class], options


def trained_by(name: str, module: nn.Module, *, lr: float = 1e-3) -> list[Trained]:
    """Return the classes that train a model, with the parameters of each.

    Muon takes the matrices of blocks, which are the children of the outermost ModuleList or Sequential modules;
    embeddings and the rest are AdamW's. `lr` is for classes that take a learning rate.

    Raises:
        ConfigError: there is no class of that name, or it takes matrices and the model has none in blocks.
    """
    kind, own_options = class_named(name)
    options = {**({"lr": lr} if "lr" in inspect.signature(kind).parameters else {}), **own_options}
    everything = list(module.parameters())
    if name != "muon":
        return [(kind, everything, options)]
    in_tables = {id(one.weight) for one in module.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)}
    in_blocks = {id(param) for block in blocks_in(module) for param in block.parameters()} - in_tables
    matrices = [param for param in everything if param.dim() == 2 and id(param) in in_blocks]
    if not matrices:
        raise ConfigError(
            f"{kind.__name__} takes the matrices of blocks, and the model has none in an nn.ModuleList or "
            "nn.Sequential; name another optimizer"
        )
    taken = set(map(id, matrices))
    rest = [param for param in everything if id(param) not in taken]
    return [(kind, matrices, options), *([(torch.optim.AdamW, rest, {"lr": lr})] if rest else [])]


def states_kept(
    name: str, module: nn.Module, forms: Mapping[ManagedParameter, TensorForm]
) -> dict[ManagedParameter, tuple[StateSpec, ...]]:
    """Return the states that parameters have slots for: those that a class of ours names, else found by trial steps.

    Args:
        name: see `class_named`; none of `BUILT_IN`.
        module: the model.
        forms: of the weights that an update sees, by managed parameter.

    Raises:
        ConfigError: there is no such class, or `chunkmem.Optimizer` refuses it for this model.
    """
    tiles = tiles_in([module])
    found = {}
    for kind, params, options in trained_by(name, module):
        if hasattr(kind, "default_states"):
            return dict.fromkeys(forms, kind.default_states)
        trial = ClassTrial(kind, options)
        rule = ClassRule([trial])
        hyper: ClassHyper | None = None
        taken = set(map(id, params))
        for managed, form in forms.items():
            if id(managed.param) not in taken:
                continue
            hyper = hyper or rule.hyper({**trial.sample(form, {}, name=managed.name).param_groups[0], "params": []})
            require_whole(managed, trial, tiles)
            found[managed] = tuple(sorted(rule.specs(hyper, form, managed), key=attrgetter("key")))
    return {managed: found.get(managed, ()) for managed in forms}


def is_elementwise(name: str) -> bool:
    """Tell whether tiles may be updated by a class, and whether its arithmetic takes no longer than its bytes."""
    return ClassTrial(*class_named(name)).is_elementwise
