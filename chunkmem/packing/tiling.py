"""Which linear layers of a model are tiled, and into what."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import FrameType, GeneratorType

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from chunkmem.data.errors import LayoutError, StateError
from chunkmem.modules.parameter_reads import is_managed
from chunkmem.modules.tiled import make_tiled
from chunkmem.packing.released_memory import is_alone
from chunkmem.runtime.device import runtime_mode

_BY_DEFAULT = 4
"""Tiles of the widest layer, as PatrickStar has them."""
_MOST_TILES = 4096
"""Of one layer; with so many, calling modules takes all the time there is."""
_SCOPES = (FrameType, GeneratorType)


def splits_for(in_features: int, out_features: int, *, max_numel: int) -> tuple[int, int]:
    """Return into how many tiles a layer is cut, along its inputs and its outputs, so that none has more elements.

    The longer side of a tile is split first: that of sums of partial outputs, or of partial input gradients, is the
    shorter one, and so is what they cost.
    """
    in_splits = out_splits = 1
    while (width := -(-in_features // in_splits)) * (height := -(-out_features // out_splits)) > max_numel:
        if height >= width:
            out_splits += 1
        else:
            in_splits += 1
    return in_splits, out_splits


def tile_linears(root: nn.Module, *, max_numel: int | None, excluded: Iterable[nn.Module] = ()) -> dict[str, str]:
    """Turn the linear layers under `root` that have a larger weight into `TiledLinear`s, in place.

    Args:
        root: a model that has not been packed.
        max_numel: elements of a tile at most; None: a quarter of the largest weight that can be tiled.
        excluded: modules that are not going to be packed.

    Returns:
        Why larger ones were left as they are, by name.

    Raises:
        LayoutError: `max_numel` is no number of elements, or too small; no layer was changed.
        StateError: a module under `root` is managed already.
    """
    if max_numel is not None and (not isinstance(max_numel, int) or isinstance(max_numel, bool) or max_numel < 1):
        raise LayoutError(f"max_numel is {max_numel!r}; it is a number of elements, at least 1, or None")
    found = _linears(root, {id(module) for module in excluded})
    reasons = {name: reason for name, module in found.items() if (reason := _left_alone(module)) is not None}
    reasons |= _shared(root, {name: module for name, module in found.items() if name not in reasons})
    if max_numel is None:
        most = max((_numel(module) for name, module in found.items() if name not in reasons), default=0)
        max_numel = max(1, most // _BY_DEFAULT)
    wide = {name: module for name, module in found.items() if name not in reasons and _numel(module) > max_numel}
    for name, module in wide.items():
        if _numel(module) > _MOST_TILES * max_numel:
            raise LayoutError(
                f"max_numel is {max_numel}, but {name} has {_numel(module)} elements: make it at least "
                f"{-(-_numel(module) // _MOST_TILES)}, since each tile is a module of its own"
            )
    for module in wide.values():
        in_splits, out_splits = splits_for(module.in_features, module.out_features, max_numel=max_numel)
        make_tiled(module, in_splits=in_splits, out_splits=out_splits)
    return {name: reason for name, reason in reasons.items() if _numel(found[name]) > max_numel}


def _linears(root: nn.Module, excluded: Collection[int]) -> dict[str, nn.Linear]:
    found: dict[str, nn.Linear] = {}
    for name, module in root.named_modules():
        if is_managed(module):
            raise StateError(
                f"module {name or type(root).__name__} is managed already; call manager.tile() inside manager.init(), "
                "or before manager.wrap()"
            )
        if isinstance(module, nn.Linear) and id(module) not in excluded:
            found[name or type(root).__name__] = module
    return found


def _numel(linear: nn.Linear) -> int:
    return linear.in_features * linear.out_features


def _left_alone(linear: nn.Linear) -> str | None:
    """Return why a layer cannot be tiled, as far as it can be told of itself."""
    if type(linear) is not nn.Linear:
        return f"it is a {type(linear).__name__}"
    if "forward" in vars(linear):
        return "its forward was replaced"
    if any(value for key, value in vars(linear).items() if key.endswith("_hooks")):
        return "it has hooks"
    if linear._buffers or linear._modules or set(linear._parameters) != {"weight", "bias"}:
        return "it has other parameters, buffers or modules than nn.Linear"
    for name, param in _parameters(linear):
        if type(param) is not nn.Parameter and not isinstance(param, FakeTensor):
            return f"its {name} is a {type(param).__name__}"
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            return f"its {name} has hooks"
        if param.grad is not None:
            return f"its {name} has a gradient"
    return None


def _parameters(linear: nn.Linear) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in linear._parameters.items() if param is not None]


def _shared(root: nn.Module, linears: Mapping[str, nn.Linear]) -> dict[str, str]:
    """Return which layers share a parameter, or its memory, with somebody who would keep the untiled one."""
    names: dict[int, list[str]] = {}
    for name, param in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    holders = _holders([param for linear in linears.values() for _, param in _parameters(linear)])
    reasons: dict[str, str] = {}
    for name, linear in linears.items():
        for kind, param in _parameters(linear):
            why = _why_shared(param, kind, names=names[id(param)], holders=holders[id(param)])
            if why is not None:
                reasons.setdefault(name, why)
    return reasons


def _why_shared(param: nn.Parameter, kind: str, *, names: Sequence[str], holders: Collection[str]) -> str | None:
    with runtime_mode():
        is_shared = not isinstance(param, FakeTensor) and not is_alone(param)
    if not holders:
        return f"who holds its {kind} cannot be told after gc.freeze()"
    if len(holders) > 1 and len(names) > 1:
        return f"its {kind} is tied: {', '.join(names)}"
    if len(holders) > 1:
        return f"its {kind} is held elsewhere, too ({', '.join(sorted(set(holders)))})"
    return f"its {kind} shares its memory with another tensor" if is_shared else None


def _holders(params: Sequence[nn.Parameter]) -> dict[int, list[str]]:
    """Return by identity the types of what refers to each parameter: modules, containers and objects of the user's."""
    found: dict[int, list[str]] = {id(param): [] for param in params}
    gc.collect()  # over ranks, all are to find the same
    for referrer in gc.get_referrers(*params) if params else ():
        # Variables of functions and scripts are no holders: a loop over parameters leaves the last one in one.
        is_scope = isinstance(referrer, _SCOPES) or (isinstance(referrer, dict) and "__builtins__" in referrer)
        if referrer is not params and not is_scope:
            for referent in gc.get_referents(referrer):
                if id(referent) in found:
                    found[id(referent)].append(type(referrer).__name__)
    return found
