"""Averages of parameters that no chunk holds: of excluded modules, or added to a model after it was packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from chunkmem.errors import StateError

Mix = Callable[[list[torch.Tensor], list[torch.Tensor]], object]
"""Writes to averages, given them and the weights."""


class PlainAverages:
    """Ordinary tensors in the dtype and on the device of their parameters, as optimizer states of these are."""

    def __init__(
        self, params: Mapping[str, torch.Tensor], values: Mapping[torch.Tensor, torch.Tensor] | None = None
    ) -> None:
        """Average these parameters, by name.

        Args:
            params: to be averaged.
            values: averages that there are, by parameter; None: they begin as the weights are.

        Raises:
            StateError: a parameter has no floating dtype.
        """
        for name, param in params.items():
            if not (param.is_floating_point() or param.is_complex()):
                raise StateError(
                    f"parameter {name} is in {param.dtype}, of which there are no averages; give chunkmem.EMA params= "
                    "without it, or none for those that require gradients"
                )
        self.params = dict(params)
        """By name."""
        starts = {name: param.detach() if values is None else values[param] for name, param in params.items()}
        self._values = {name: start.to(params[name].device, copy=True) for name, start in starts.items()}

    def of_parameters(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the averages by parameter; not copies."""
        return {param: self._values[name] for name, param in self.params.items()}

    def average(self, mix: Mix) -> None:
        """Have `mix` write to the averages of each dtype and device."""
        for kind in dict.fromkeys((param.device, param.dtype) for param in self.params.values()):
            names = [name for name, param in self.params.items() if (param.device, param.dtype) == kind]
            mix([self._values[name] for name in names], [self.params[name].detach() for name in names])

    def swap(self) -> None:
        """Exchange averages and weights."""
        for name, param in self.params.items():
            weight = param.detach().clone()
            param.copy_(self._values[name])
            self._values[name].copy_(weight)

    def copies(self) -> dict[str, torch.Tensor]:
        """Return CPU copies by name."""
        return {name: value.to("cpu", copy=True) for name, value in self._values.items()}

    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set all averages, by name."""
        for name, value in self._values.items():
            value.copy_(values[name])
