"""Parameters of chunks lent to the initialisers of modules, as ordinary tensors, one call at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chunkmem.errors import LayoutError
from chunkmem.nn.binding import ManagedParameter, blank_value
from chunkmem.nn.surface import ModuleSurface
from chunkmem.packing.built import FreedRam
from chunkmem.packing.initialisers import Initialisation


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

    __slots__ = ("_lender", "_module")

    def __init__(self, module: nn.Module, lender: ParameterLender) -> None:
        super().__init__(module._parameters)
        self._module, self._lender = module, lender

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = dict.__getitem__(self, name)
        loan = self._lender.lend(self._module, param)
        return param if loan is None else loan.tensor

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if dict.__contains__(self, name) else default

    def items(self) -> Iterator[tuple[str, nn.Parameter | None]]:  # type: ignore[override]
        return ((name, self[name]) for name in list(self))

    def values(self) -> Iterator[nn.Parameter | None]:  # type: ignore[override]
        return (self[name] for name in list(self))

    def __setitem__(self, name: str, value: nn.Parameter | None) -> None:
        """Take the values of what is assigned in the place of a parameter that is lent."""
        param = dict.get(self, name)
        loan = self._lender.lend(self._module, param)
        if param is None or loan is None:
            dict.__setitem__(self, name, value)
        elif value is None or value.shape != param.shape or value.is_meta:
            form = "None" if value is None else f"one of {tuple(value.shape)} on {value.device}"
            raise LayoutError(
                f"parameter {loan.managed or tuple(param.shape)} of a model on the meta device was replaced by {form} "
                "while it was initialised; write to it in place"
            )
        else:
            loan.tensor, loan.version = value, -1


class ParameterLender:
    """Has initialisers write to parameters that are in chunks.

    While one runs, a parameter that it looks up, in whatever module, is in memory as a whole; then its slot has the
    values, over ranks that of its owner. So what one call looks up is in memory at a time.
    """

    def __init__(
        self,
        root: nn.Module,
        managed: Mapping[int, ManagedParameter],
        without_values: Collection[int],
        surface: ModuleSurface,
        *,
        keeps: bool,
    ) -> None:
        """Lend nothing yet.

        Args:
            root: the model.
            managed: its parameters that are in chunks, by the identity of each.
            without_values: those that get values; others have theirs, and keep them.
            surface: reads a parameter's values as it was built, which all ranks do, and writes those of this rank.
            keeps: false: what initialisers write to parameters is thrown away.
        """
        self._root = root
        self._managed = managed
        self._surface = surface
        self._taking = frozenset(without_values if keeps else ())
        self._blank = set(without_values)
        """Those whose slots have no values yet."""
        self.incomplete = set(self._taking)
        """Those of which elements have got none yet."""
        self._first: dict[int, nn.Module] = {}
        """By parameter, the module that is visited first."""
        self._loans: dict[object, _Loan] = {}
        self._is_tied = False
        self._freed = FreedRam()

    @contextmanager
    def lending(self) -> Iterator[None]:
        """Have modules lend their parameters to those who look them up."""
        found = {module: module._parameters for module in self._root.modules()}
        for module in found:
            vars(module)["_parameters"] = LentParameters(module, self)
        try:
            yield
        finally:
            for module, params in found.items():
                params.update(dict.items(module._parameters))  # what was registered meanwhile; lends nothing
                vars(module)["_parameters"] = params

    def run(self, call: Initialisation) -> None:
        """Run an initialiser, and keep what it has written.

        Raises:
            LayoutError: it has given a parameter another shape.
        """
        self._is_tied = call.is_tied
        try:
            call.run()
            for loan in self._loans.values():
                if loan.managed is not None and loan.is_kept:
                    self._keep(loan.managed, loan)
        finally:
            nbytes = sum(loan.tensor.nbytes for loan in self._loans.values())
            self._loans.clear()
            self._freed.add(nbytes)

    def lend(self, module: nn.Module, param: nn.Parameter | None) -> _Loan | None:
        """Return what stands in for a parameter of a module until the call is over; None if it has memory itself."""
        managed = self._managed.get(id(param))
        if param is None or (managed is None and not param.is_meta):
            return None
        # Who is not visited first of those that share a parameter writes to one that is thrown away.
        is_first = self._first.setdefault(id(param), module) is module or self._is_tied
        key = id(param) if is_first else (id(param), id(module))
        if key not in self._loans:
            if managed is None or id(param) in self._blank:
                values = blank_like(param, managed)
            else:
                values = self._surface.read(managed)
            tensor = nn.Parameter(values, requires_grad=param.requires_grad)
            vars(tensor).update(vars(param))
            self._loans[key] = _Loan(managed, tensor, tensor._version, is_first and id(param) in self._taking)
        return self._loans[key]

    def _keep(self, managed: ManagedParameter, loan: _Loan) -> None:
        key, values = id(managed.param), loan.tensor.detach()
        vars(managed.param).update(vars(loan.tensor))
        self._blank.discard(key)
        if not has_gaps(values, has_moved=loan.tensor._version != loan.version):
            self.incomplete.discard(key)
        self._surface.write(managed, values)


def blank_like(param: torch.Tensor, managed: ManagedParameter | None = None) -> torch.Tensor:
    """Return a CPU tensor of the same shape and dtype without values: NaN, or 0 of what has none."""
    dtype = param.dtype if managed is None else managed.built_dtype
    values = torch.empty(param.shape, dtype=dtype, device="cpu")
    return values.fill_(blank_value(values))


def has_gaps(values: torch.Tensor, *, has_moved: bool) -> bool:
    """Tell whether elements of what was `blank_like` have no values yet; `has_moved` is its version."""
    if blank_value(values) == 0:
        return not has_moved and values.numel() > 0
    # Its sum is NaN then; adding is cheaper, in memory, too, than asking each.
    return bool(torch.isnan(values.sum())) and bool(torch.isnan(values).any())
