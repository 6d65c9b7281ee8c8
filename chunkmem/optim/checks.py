"""Whether the options of a parameter group can be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from chunkmem.errors import ConfigError


def check_available(group: Mapping[str, Any], refused: Sequence[str]) -> None:
    """Check that a parameter group has none of the options that there is no counterpart of.

    Raises:
        ConfigError: it has one.
    """
    for option in refused:
        if group.get(option):
            raise ConfigError(f"{option}=True is not available; use torch.optim over an unmanaged model for it")


def check_number(name: str, value: object, *, below: float | None = None) -> None:
    """Check that `value` is a number, or a tensor of one, of at least 0 and `below` a bound.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not value >= 0 or (below is not None and value >= below):  # type: ignore[operator]
        raise ConfigError(
            f"{name} = {value} has to be a number of at least 0" + ("" if below is None else f" and below {below}")
        )
