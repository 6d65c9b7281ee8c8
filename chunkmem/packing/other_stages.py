"""Parameters of pipeline stages that other ranks have: they keep their shape, and have no memory here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from chunkmem.data.errors import LayoutError, StateError
from chunkmem.modules.binding import blank, move_to
from chunkmem.modules.fitted import FittedModules
from chunkmem.modules.parameter_reads import own_parameters
from chunkmem.packing.built import Built
from chunkmem.packing.initialisers import Initialisers

_OF_SHAPE = frozenset(
    {"__get__", "__set__", "dim", "element_size", "is_complex", "is_floating_point", "ndimension", "nelement", "numel"}
    | {"requires_grad_", "size", "stride", "detach", "__repr__", "__hash__", "is_contiguous", "storage_offset"}
)
"""Functions of torch that need no values, by name; properties are `__get__` and `__set__`."""


class _OtherStagesParameter(nn.Parameter):
    """Base class of such parameters."""


@dataclass
class Unpacked:
    """What was built inside `manager.init()`, before it is known which pipeline stage has which modules."""

    roots: tuple[nn.Module, ...]
    excluded: tuple[nn.Module, ...]
    kept: tuple[nn.Module, ...]
    """Those of them whose gradients are not averaged over ranks."""
    built: Built
    """Where the values are."""
    initialisers: Initialisers
    """Of what is on the meta device."""
    is_packed: bool = False

    def note_packed(self) -> None:
        """Its stages are."""
        self.is_packed = True

    def check(self, stages: Iterable[nn.Module]) -> None:
        """Raise a `LayoutError` if a parameter is in no stage."""
        found = {id(param) for stage in stages for param in stage.parameters()}
        for root in self.roots:
            for name, param in root.named_parameters():
                if id(param) not in found:
                    raise LayoutError(
                        f"parameter {name} {tuple(param.shape)} is in no stage of the pipeline; give its module to "
                        "manager.pipeline() as first=, as last= or as one of the blocks"
                    )


class OtherStages:
    """What only other ranks have of a model."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._plain: list[tuple[nn.Parameter, type[nn.Parameter]]] = []
        """Parameters without memory, each with its class."""
        self._fitted = FittedModules()

    @property
    def params(self) -> list[nn.Parameter]:
        """Parameters without memory."""
        return [param for param, _ in self._plain]

    @property
    def modules(self) -> Iterator[nn.Module]:
        """Modules whose parameters and buffers are not here."""
        return iter(self._fitted)

    def leave(self, stage: nn.Module, own: Collection[nn.Module], *, where: str) -> list[nn.Parameter]:
        """Free what no own module has of a stage that another rank has; return its parameters.

        Args:
            stage: all of its modules.
            own: modules of this rank's stages.
            where: the stage, for messages.
        """
        kept = own_parameters(own)
        kept_buffers = {id(buffer) for module in own for buffer in module._buffers.values()}
        left: dict[int, nn.Parameter] = {}
        for name, module in stage.named_modules():
            if module in own:
                continue
            for key, param in module._parameters.items():
                if param is not None and id(param) not in kept:
                    left[id(param)] = param
                    if not isinstance(param, _OtherStagesParameter):  # in two modules
                        self._plain.append((param, type(param)))
                        move_to(param, torch.empty_like(param, device="meta"))
                        param.__class__ = _class_of(f"{name}.{key}".removeprefix("."), where)
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in kept_buffers:
                    module._buffers[key] = buffer.to("meta")
            self._fitted.set(module, "_save_to_state_dict", partial(_save_nothing, module))
            self._fitted.set(module, "_load_from_state_dict", _load_nothing)
        return list(left.values())

    def come_back(self) -> None:
        """Undo all that `leave` did, but for values: parameters have memory of one element, and buffers have none."""
        for param, plain in self._plain:
            param.__class__ = plain
            move_to(param, blank(param.dtype, torch.device("cpu")).expand(param.shape))
            hook_again(param)
        self._plain.clear()
        self._fitted.undo()


def hook_again(param: nn.Parameter) -> None:
    """Have a parameter whose memory was on another kind of device, and autograd's part with it, have its hooks."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if hooks := getattr(param, name):
            setattr(param, name, hooks)


def _save_nothing(module: nn.Module, destination: dict[str, Any], prefix: str, _keep_vars: bool) -> None:
    """Stand in for `nn.Module._save_to_state_dict`: put tensors without memory where another rank has values."""
    named = {key: value for key, value in module._buffers.items() if key not in module._non_persistent_buffers_set}
    for key, value in {**module._parameters, **named}.items():
        if value is not None:
            destination[prefix + key] = torch.empty(value.shape, dtype=value.dtype, device="meta")


def _load_nothing(*_args: object) -> None:
    """Stand in for `nn.Module._load_from_state_dict`: another rank loads what this module has."""


def _class_of(name: str, where: str) -> type[nn.Parameter]:
    """Return the class of a parameter that another rank has."""

    def refuse(
        _cls: type, function: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = MappingProxyType({})
    ) -> Any:
        if function.__name__ not in _OF_SHAPE:
            raise StateError(
                f"parameter {name} is in {where}: this rank has no values of it. Run the model by pipe.step(), and "
                "read weights from manager.state_dict()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    return type("ParameterElsewhere", (_OtherStagesParameter,), {"__torch_function__": classmethod(refuse)})
