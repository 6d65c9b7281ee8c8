"""Whether the options of a parameter group can be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from chunkmem.data.errors import ConfigError


def check_available(group: Mapping[str, Any], refused: Sequence[str]) -> None:
    """Check that a parameter group has none of the options that there is no counterpart of.

    Raises:
        ConfigError: it has one.
    """
    for option in refused:
        if group.get(option):
            raise ConfigError(f"{option}=True is not available; use torch.optim over an unmanaged model for it")


def number(name: str, value: object) -> float:
    """Return an option that is a number, or a tensor of one element.

    Raises:
        ConfigError: it is neither.
    """
    found = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if isinstance(found, bool) or not isinstance(found, Real):
        raise ConfigError(f"{name} = {value} has to be a number, such as 0.1, or a tensor of one element")
    return float(found)


def check_number(name: str, value: object, *, below: float | None = None) -> None:
    """Check that `value` is a number, or a tensor of one, of at least 0 and `below` a bound.

    Raises:
        ConfigError: it is not.
    """
    found = number(name, value)
    if not found >= 0 or (below is not None and found >= below):
        raise ConfigError(
            f"{name} = {value} has to be a number of at least 0" + ("" if below is None else f" and below {below}")
        )


def flag(name: str, value: object) -> bool:
    """Return an option that is True or False; None is False, as in torch.

    Raises:
        ConfigError: it is none of them.
    """
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} = {value!r} has to be True or False")
    return bool(value)
