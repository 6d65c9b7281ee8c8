"""A module's `_parameters`, which reports lookups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from torch import nn

from chunkmem.data.errors import StateError
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.transforms import unwrapped, wrapped_error

IN_UNIT = "_is_in_compiled_unit"
"""An attribute of modules with managed parameters whose mapping is a plain dict: see `CompiledCall`."""


def is_managed(module: nn.Module) -> bool:
    """Tell whether parameters that a module owns have been packed."""
    return isinstance(module._parameters, ParameterReads) or IN_UNIT in vars(module)


def own_parameters(modules: Iterable[nn.Module]) -> set[int]:
    """Return the identities of the parameters that modules have themselves; this is no read of them."""
    return {id(param) for module in modules for param in module._parameters.values() if param is not None}


def check_own(parameters: Mapping[str, object], managed: Mapping[str, ManagedParameter]) -> None:
    """Raise if something stands in for a managed parameter among a module's.

    Raises:
        StateError: it was put there, and not by `torch.func.functional_call`, which puts the parameter back.
    """
    for name in managed:
        if dict.get(parameters, name) is not managed[name].param:  # type: ignore[call-overload]
            raise StateError(
                f"parameter {managed[name].name} was replaced by a tensor in its module's _parameters; put it "
                "back, and write to it in place"
            )


class NotPicklable:
    """What a managed module refers to, so that `pickle` and `torch.save` of it fail."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise StateError(
            "a managed model cannot be pickled: its parameters live in chunks. Take manager.state_dict() and load it "
            "into a model built again, or pickle copy.deepcopy(model), which is an ordinary model"
        )


class ParameterReads(NotPicklable, dict[str, nn.Parameter | None]):
    """A module's `_parameters`, reporting reads and refusing replacements of managed parameters.

    Modules read parameters of others (attention reads its output projection, a head the embedding), so hooks on owners
    would miss reads (ADR 2). `module.weight` passes through here; `module.parameters()` and `state_dict()` do not.

    For a while, as `torch.func.functional_call` does, a tensor that is no Parameter may stand in for one.
    """

    __slots__ = ("_managed", "_on_read")

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter | None],
        managed: Mapping[str, ManagedParameter],
        on_read: Callable[[ManagedParameter], None],
    ) -> None:
        super().__init__(parameters)
        self._managed = managed
        self._on_read = on_read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        value = dict.__getitem__(self, name)
        if name in self._managed and value is self._managed[name].param:
            self._on_read(self._managed[name])
        return value

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        managed = self._managed.get(name)
        if managed is not None and (value is None or (isinstance(value, nn.Parameter) and value is not managed.param)):
            raise StateError(
                f"parameter {managed.name} was packed into a chunk and cannot be replaced; write to it in place, load "
                "values with manager.load_state_dict(), give torch.func.functional_call tensors (.detach()), or export "
                "and quantize copy.deepcopy(model), an ordinary model"
            )
        if managed is not None and value is not None and unwrapped(value) is not value:
            for given in self._managed.values():
                if unwrapped(value) is given.param:
                    raise wrapped_error(given.name)
        for other in self._managed.values() if managed is None and value is not None else ():
            if other.param is value:
                raise StateError(
                    f"parameter {other.name} was packed into a chunk and cannot get the name {name} too; do that "
                    "before manager.wrap() or inside manager.init()"
                )
        dict.__setitem__(self, name, value)

    def __delitem__(self, name: str) -> None:
        if name in self._managed:
            raise StateError(f"parameter {self._managed[name].name} was packed into a chunk and cannot be removed")
        dict.__delitem__(self, name)


class QuietReads(ParameterReads):
    """The class of one while nothing can come of a read: all parameters stay on DEVICE."""

    __slots__ = ()
    __getitem__ = dict.__getitem__
