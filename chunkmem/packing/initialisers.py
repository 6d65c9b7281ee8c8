"""What gives a model without values its own, and in which order: that in which a plain model draws random numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from chunkmem.modules.tiled import TiledLinear

InitFunction = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Initialisers:
    """What a user wants of a model on the meta device."""

    param_init_fn: InitFunction | None = None
    """Called for each module, when all have initialised themselves."""
    skip_init: bool = False
    """Parameters and saved buffers are going to be loaded: initialise the other buffers alone."""


@dataclass(frozen=True)
class Initialisation:
    """One call of an initialiser."""

    module: nn.Module
    """What it initialises, in the first place."""
    run: Callable[[], object]
    is_tied: bool = False
    """It sees one tensor under all names of a tied parameter."""


def initialisations(
    root: nn.Module, param_init_fn: InitFunction | None, *, holders: Collection[nn.Module]
) -> Iterator[Initialisation]:
    """Yield what initialises a model, in the order in which a plain one does.

    A constructor makes the children of a module, in the order in which they are registered, and then calls the module's
    own `reset_parameters()`. So modules are visited children first, each once. A model of transformers runs
    `post_init()` at the end of its constructor, which calls `_init_weights` for each of its modules that no inner model
    has called it for. Last comes what `model.apply(param_init_fn)` would do.

    Of a tied parameter, the module that is visited first gives the values, as `head.weight = words.weight` has it;
    others draw as many numbers for nothing. `param_init_fn` sees ties as they are.

    Args:
        root: the model.
        param_init_fn: of the user.
        holders: modules that have tensors without values.
    """
    initialised: set[nn.Module] = set()
    for module in _children_first(root, set()):
        reset = _reset_of(module)
        if reset is not None and _is_wanted(module, holders):
            yield Initialisation(module, reset)
        if _is_pretrained(module):
            for inner, function in _in_order_of_post_init(module, module._init_weights):
                if inner not in initialised:
                    initialised.add(inner)
                    yield Initialisation(inner, partial(function, inner))
    if param_init_fn is not None:
        for module in _in_order_of_apply(root):
            yield Initialisation(module, partial(param_init_fn, module), is_tied=True)


def without_initialiser(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose own tensors nothing gives values, as far as can be told before it is run."""
    if _reset_of(root) is None and not _is_pretrained(root):
        yield root
        for child in root.children():
            yield from without_initialiser(child)


def tie_again(root: nn.Module) -> None:
    """Tie the parameters of transformers models, as `post_init` does: `accelerate.init_empty_weights` unties them."""
    if _is_pretrained(root):
        root.tie_weights()  # type: ignore[operator]
        return
    for child in root.children():
        tie_again(child)


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    seen.add(module)
    for child in module.children() if not isinstance(module, TiledLinear) else ():
        if child not in seen:
            yield from _children_first(child, seen)
    yield module


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(found := getattr(module, name, None)):
            return found  # type: ignore[no-any-return]
    kind = type(module)
    if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."):
        return partial(_reset_conv1d, module)
    return None


def _reset_conv1d(module: Any) -> None:
    """Do what the constructor of transformers' `Conv1D` does, which has no `reset_parameters`."""
    nn.init.normal_(module.weight, std=0.02)
    nn.init.zeros_(module.bias)


def _is_wanted(module: nn.Module, holders: Collection[nn.Module]) -> bool:
    """Tell whether a constructor has called `reset_parameters`, as far as can be told.

    A module without tensors of its own often has one to start again, which its constructor does not call.
    """
    if module in holders or isinstance(module, nn.Transformer):
        return True
    if isinstance(module, TiledLinear):
        return any(tile in holders for tile in module.children())
    return any(inner in holders for child in module.children() for inner in without_initialiser(child))


def _is_pretrained(module: nn.Module) -> bool:
    """Tell whether a module is a `transformers.PreTrainedModel`."""
    return all(callable(getattr(module, name, None)) for name in ("_init_weights", "tie_weights", "post_init"))


def _in_order_of_post_init(module: nn.Module, function: Any) -> Iterator[tuple[nn.Module, InitFunction]]:
    """Yield the modules of a transformers model, each with the `_init_weights` of the model that it is of."""
    for child in module.children():
        inner: Any = child._init_weights if _is_pretrained(child) else function
        yield from _in_order_of_post_init(child, inner)
    yield module, function


def _in_order_of_apply(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _in_order_of_apply(child)
    yield module
