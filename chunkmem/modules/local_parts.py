"""Parameters that are DTensors, as tensor parallelism makes them: chunks have this rank's local part of each (ADR 75).

The local part takes the place of the DTensor among its module's parameters, as an ordinary Parameter, so that nothing
that moves, updates or saves chunks has to know of it. What reads `module.weight` gets a DTensor of it again, and
autograd brings its gradient back as the local part's, redistributed as the parameter is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from chunkmem.data.errors import CheckpointError, StateError
from chunkmem.modules.lazy_tensor import Extent, LazyTensor, Piece, Source, slices
from chunkmem.ranks.local_parts import LocalPart, is_dtensor
from chunkmem.ranks.ranks import Ranks

_PARTS = "_local_parts"
"""An attribute of modules that have such parameters: their parts by name."""


def shown(part: LocalPart, value: Any) -> Any:
    """Return what a state of the whole has, where one of the local part has `value`.

    That is a DTensor of an ordinary tensor, its form of one on the meta device, and of a lazy one what this rank
    saves. A number stays what it is.

    Raises:
        CheckpointError: it is a tensor of another shape than the part.
    """
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    if value.shape != part.local_shape:
        raise CheckpointError(
            f"parameter {part.name} is a DTensor, of which this rank has {tuple(part.local_shape)}, and a state of "
            f"it is {tuple(value.shape)}: no whole can be made of it; save the states of each rank by themselves"
        )
    if isinstance(value, LazyTensor):
        return _saved(part, value)
    if value.is_meta:
        return torch.empty(part.shape, dtype=value.dtype, device="meta")
    with torch.no_grad():
        made = part.whole(value)
    made._local_tensor = value  # not a view of it: tied names find the copy as long as somebody has it
    return made


def _saved(part: LocalPart, local: LazyTensor) -> LazyTensor:
    """Return the whole, of which this rank saves its part alone, and which all read together."""
    origin = (0,) * len(part.shape)
    own = [piece.moved(part.start) for piece in local.pieces] if part.is_counted else []
    return LazyTensor(
        [*own, Piece(_Joined(part, local), origin, origin, tuple(part.shape))], tuple(part.shape), local.dtype
    )


class _Joined(Source):
    """The whole of which ranks have parts."""

    is_here = False
    place = ""

    def __init__(self, part: LocalPart, local: LazyTensor) -> None:
        self._part = part
        self._local = local

    def read_here(self, start: Extent, shape: Extent) -> torch.Tensor:
        """Raise a `StateError`: it takes all ranks."""
        raise StateError(f"this rank has {tuple(self._local.shape)} of parameter {self._part.name} {start} {shape}")

    def read(self, start: Extent, shape: Extent) -> torch.Tensor:
        """Return a part of the whole; all ranks call it."""
        with torch.no_grad():
            whole: torch.Tensor = self._part.whole(self._local.read()).full_tensor()
        return whole[slices(start, shape)]


def shown_class(cls: type[nn.Module], names: Iterable[str]) -> type[nn.Module]:
    """Return a subclass, of the same name, whose instances show DTensors under these names."""
    own = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made: type[nn.Module] = type(cls)(cls.__name__, (cls,), own | {name: _shown(name) for name in names})  # type: ignore[misc]
    return made


def take_apart(
    module: nn.Module, parts: Mapping[str, tuple[nn.Parameter, LocalPart]], *, become: type[nn.Module]
) -> None:
    """Have local parts take the places of a module's DTensors; `become` is its `shown_class`."""
    module.__class__ = become
    vars(module)[_PARTS] = {name: part for name, (_, part) in parts.items()}
    for name, (local, _) in parts.items():
        module._parameters[name] = local
    if "forward" in vars(module):  # which may look for DTensors among the module's parameters, as transformers' does
        module.forward = _WholesInForward(module, module.forward)


class _WholesInForward:
    """A module's forward, while which DTensors have the places of their local parts."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        self.forward = forward
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parameters, parts = self._module._parameters, parts_of(self._module)
        locals_ = {name: parameters[name] for name in parts}
        wholes = {name: parts[name].whole(local) for name, local in locals_.items() if local is not None}
        dict.update(parameters, wholes)
        try:
            return self.forward(*args, **kwargs)
        finally:
            dict.update(parameters, locals_)


def ordinary_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before `take_apart`."""
    return type(module).__bases__[0] if parts_of(module) else type(module)


def put_together(module: nn.Module, wholes: Mapping[str, nn.Parameter]) -> None:
    """Undo `take_apart`; `wholes` are the DTensors."""
    module.__class__ = ordinary_class(module)
    leave_out(vars(module))
    for name, whole in wholes.items():
        module._parameters[name] = whole


def leave_out(attributes: dict[str, Any]) -> None:
    """Take what `take_apart` has added out of a module's attributes."""
    attributes.pop(_PARTS, None)
    if isinstance(forward := attributes.get("forward"), _WholesInForward):
        attributes["forward"] = forward.forward


def parts_of(module: nn.Module) -> Mapping[str, LocalPart]:
    """Return the local parts that a module has, by name."""
    found: Mapping[str, LocalPart] = vars(module).get(_PARTS, {})
    return found


def named_parts(root: nn.Module) -> dict[str, LocalPart]:
    """Return all local parts that a model has, by name."""
    found = root.named_modules(remove_duplicate=False)
    return {f"{path}.{name}".lstrip("."): part for path, module in found for name, part in parts_of(module).items()}


def over_stages(
    state: Mapping[str, Any], parts: Mapping[str, LocalPart], ranks: Ranks, *, label: str
) -> dict[str, Any]:
    """Return what all pipeline stages have of a state: each has the local part that this rank would have.

    Raises:
        RankError: a rank did not come.
    """
    found = ranks.over_stages(
        {key: getattr(value, "_local_tensor", value) for key, value in state.items()}, label=label
    )
    return {key: shown(parts[key], value) if key in parts else value for key, value in found.items()}


def _shown(name: str) -> property:
    def read(module: nn.Module) -> Any:
        value = module._parameters[name]  # which is noticed
        # What `torch.func.functional_call` gives in its place is what the caller made it.
        return (
            parts_of(module)[name].whole(value) if isinstance(value, nn.Parameter) and not is_dtensor(value) else value
        )

    return property(read)
