"""Parameters of chunks lent to the initialisers of modules, as ordinary tensors, one call at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chunkmem.errors import LayoutError
from chunkmem.layout.pack import SLAB_FLOOR_NBYTES
from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.initialisers import Initialisation
from chunkmem.runtime.device import give_back_freed_ram


@dataclass(eq=False, slots=True)
class _Loan:
    """What stands in for a parameter while an initialiser runs."""

    managed: ManagedParameter | None
    """None: another pipeline stage has it."""
    tensor: nn.Parameter
    version: int
    """The tensor's, before anybody has written to it."""
    is_kept: bool
    """What it is given becomes the parameter's value."""


class LentParameters(dict[str, nn.Parameter | None]):
    """A module's `_parameters`, which lends what is looked up."""

    __slots__ = ("_lend", "_module", "_replace")

    def __init__(
        self,
        module: nn.Module,
        lend: Callable[[nn.Module, nn.Parameter], nn.Parameter],
        replace: Callable[[nn.Module, nn.Parameter, nn.Parameter | None], bool],
    ) -> None:
        super().__init__(module._parameters)
        self._module, self._lend, self._replace = module, lend, replace

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = dict.__getitem__(self, name)
        return None if param is None else self._lend(self._module, param)

    def get(self, name: str, default: Any = None) -> Any:
        param = dict.get(self, name, default)
        return self._lend(self._module, param) if isinstance(param, nn.Parameter) else param

    def items(self) -> Iterator[tuple[str, nn.Parameter | None]]:  # type: ignore[override]
        return ((name, self[name]) for name in list(self))

    def values(self) -> Iterator[nn.Parameter | None]:  # type: ignore[override]
        return (self[name] for name in list(self))

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        param = dict.get(self, name)
        if param is None or not self._replace(self._module, param, value):
            dict.__setitem__(self, name, value)


class ParameterLender:
    """Has initialisers write to parameters that are in chunks.

    While one runs, a parameter that it looks up, in whatever module, is in memory as a whole; then its slot has the
    values, over ranks that of its owner. So what one call looks up is in memory at a time.
    """

    def __init__(
        self,
        root: nn.Module,
        managed: Mapping[int, ManagedParameter],
        without_values: Iterable[int],
        *,
        read: Callable[[ManagedParameter], torch.Tensor],
        write: Callable[[ManagedParameter, torch.Tensor], None],
        keeps: bool = True,
    ) -> None:
        """Lend nothing yet.

        Args:
            root: the model.
            managed: its parameters that are in chunks, by the identity of each.
            without_values: those that get values; others have theirs, and keep them.
            read: returns a CPU copy of a parameter's values, as it was built. All ranks call it.
            write: sets them, where they belong to this rank.
            keeps: false: what initialisers write to parameters is thrown away.
        """
        self._root = root
        self._managed = managed
        self._read, self._write = read, write
        self._without_values = frozenset(without_values)
        self._taking = self._without_values if keeps else frozenset()
        self.blank = set(self._without_values)
        """Those that have got no values yet."""
        self.incomplete = set(self._taking)
        """Those of which elements have got none yet."""
        self._first: dict[int, nn.Module] = {}
        """By parameter, the module that is visited first."""
        self._loans: dict[object, _Loan] = {}
        self._is_tied = False
        self._freed_nbytes = 0

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Have modules lend their parameters to those who look them up."""
        found = {module: module._parameters for module in self._root.modules()}
        for module in found:
            vars(module)["_parameters"] = LentParameters(module, self._lend, self._replace)
        try:
            yield
        finally:
            for module, params in found.items():
                lent = vars(module)["_parameters"]
                vars(module)["_parameters"] = params
                for name in lent:  # what was registered meanwhile
                    if dict.__getitem__(lent, name) is not params.get(name):
                        params[name] = dict.__getitem__(lent, name)

    def run(self, call: Initialisation) -> None:
        """Run an initialiser, and keep what it has written.

        Raises:
            LayoutError: it has given a parameter another shape.
        """
        self._is_tied = call.is_tied
        try:
            call.run()
            for loan in self._loans.values():
                if loan.is_kept:
                    self._keep(loan)
            self._freed_nbytes += sum(loan.tensor.nbytes for loan in self._loans.values())
        finally:
            self._loans.clear()
        if self._freed_nbytes >= SLAB_FLOOR_NBYTES:
            give_back_freed_ram()
            self._freed_nbytes = 0

    def _key(self, module: nn.Module, param: nn.Parameter) -> object:
        is_first = self._first.setdefault(id(param), module) is module
        return id(param) if is_first or self._is_tied else (id(param), id(module))

    def _lend(self, module: nn.Module, param: nn.Parameter) -> nn.Parameter:
        managed = self._managed.get(id(param))
        if managed is None and not param.is_meta:
            return param
        key = self._key(module, param)
        loan = self._loans.get(key)
        if loan is None:
            is_kept = managed is not None and id(param) in self._taking and not isinstance(key, tuple)
            has_values = id(param) not in (self.blank if is_kept else self._without_values)
            values = self._read(managed) if managed is not None and has_values else blank_like(param, managed)
            tensor = nn.Parameter(values, requires_grad=param.requires_grad)
            vars(tensor).update(vars(param))
            loan = self._loans[key] = _Loan(managed, tensor, tensor._version, is_kept)
        return loan.tensor

    def _replace(self, module: nn.Module, param: nn.Parameter, value: nn.Parameter | None) -> bool:
        """An initialiser assigns another parameter: take its values. Tell whether `param` was lent."""
        managed = self._managed.get(id(param))
        if managed is None and not param.is_meta:
            return False
        self._lend(module, param)
        loan = self._loans[self._key(module, param)]
        if value is None or value.shape != param.shape or value.is_meta:
            form = "None" if value is None else f"one of {tuple(value.shape)} on {value.device}"
            raise LayoutError(
                f"parameter {managed or tuple(param.shape)} of a model on the meta device was replaced by {form} while "
                "it was initialised; write to it in place"
            )
        loan.tensor, loan.version = value, -1
        return True

    def _keep(self, loan: _Loan) -> None:
        managed, values = loan.managed, loan.tensor.detach()
        assert managed is not None
        key = id(managed.param)
        vars(managed.param).update(vars(loan.tensor))
        was_blank = key in self.blank
        if was_blank and is_untouched(values, has_moved=loan.tensor._version != loan.version):
            return
        self.blank.discard(key)
        if not has_gaps(values, has_moved=not was_blank or loan.tensor._version != loan.version):
            self.incomplete.discard(key)
        self._write(managed, values)


def blank_like(param: torch.Tensor, managed: ManagedParameter | None = None) -> torch.Tensor:
    """Return a CPU tensor of the same shape and dtype without values: NaN, or 0 of what has none."""
    dtype = param.dtype if managed is None else managed.built_dtype
    values = torch.empty(param.shape, dtype=dtype, device="cpu")
    return values.fill_(float("nan") if has_nan(values) else 0)


def has_nan(values: torch.Tensor) -> bool:
    """Tell whether elements can be NaN."""
    return values.is_floating_point() or values.is_complex()


def has_gaps(values: torch.Tensor, *, has_moved: bool) -> bool:
    """Tell whether elements of what was `blank_like` have no values yet; `has_moved` is its version."""
    if not has_nan(values):
        return not has_moved and values.numel() > 0
    # Its sum is NaN then; adding is cheaper, in memory, too, than asking each.
    return bool(torch.isnan(values.sum())) and bool(torch.isnan(values).any())


def is_untouched(values: torch.Tensor, *, has_moved: bool) -> bool:
    """Tell whether nothing of what was `blank_like` has got values."""
    if values.numel() == 0:
        return False
    if not has_nan(values):
        return not has_moved
    first = values.reshape(-1)[0]
    return bool(torch.isnan(first)) and bool(torch.isnan(values).all())
