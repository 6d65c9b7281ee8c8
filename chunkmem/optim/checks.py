"""Whether the options of a parameter group, or a saved state, can be used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from chunkmem.errors import CheckpointError, ConfigError
from chunkmem.types import Role

STATE_ROLES = (Role.EXP_AVG, Role.EXP_AVG_SQ)
STATE_KEYS = tuple(role.value for role in STATE_ROLES)
OPTIONS = ("lr", "betas", "eps", "weight_decay")
"""What every parameter group has to say."""
_REFUSED = ("amsgrad", "maximize")


def check_options(group: Mapping[str, Any]) -> None:
    """Check a parameter group's options.

    Raises:
        ConfigError: one is not a number, out of range, or not available.
    """
    betas = group["betas"]
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ConfigError(f"betas = {betas} has to be two numbers from 0 to below 1")
    for name, value, below in (
        ("lr", group["lr"], None),
        ("eps", group["eps"], None),
        ("betas[0]", betas[0], 1),
        ("betas[1]", betas[1], 1),
        ("weight_decay", group["weight_decay"], None),
    ):
        check_number(name, value, below=below)
    check_available(group)


def check_available(group: Mapping[str, Any]) -> None:
    """Check that a parameter group has no option that there is no counterpart of.

    Raises:
        ConfigError: it has one.
    """
    for option in _REFUSED:
        if group.get(option):
            raise ConfigError(f"{option}=True is not available; use torch.optim over an unmanaged model for it")


def plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group's options with the numbers that tensors and lists have now: they may change in place."""
    numbers = {name: float(group[name]) for name in ("lr", "eps", "weight_decay")}
    return {**group, **numbers, "betas": tuple(map(float, group["betas"]))}


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


def check_state(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], *, name_of: Callable[[torch.Tensor, int], str]
) -> None:
    """Compare a saved optimizer state with the parameter groups it is to be loaded into.

    Raises:
        CheckpointError: groups or shapes differ, or it was made with an option there is no counterpart of.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise CheckpointError("not an optimizer state: it needs the keys 'state' and 'param_groups'")
    saved = state_dict["param_groups"]
    ours = [len(group["params"]) for group in groups]
    theirs = [len(group["params"]) for group in saved]
    if ours != theirs:
        raise CheckpointError(f"the state has parameter groups of {theirs} parameters, this optimizer of {ours}")
    for group in saved:
        if missing := [option for option in OPTIONS if option not in group]:
            raise CheckpointError(f"the state is of another optimizer than Adam: it has no {', '.join(missing)}")
        try:
            check_options(group)
        except ConfigError as error:
            raise CheckpointError(f"the state cannot be loaded: {error}") from None
    wrong = []
    for group, own in zip(saved, groups, strict=True):
        for index, param in zip(group["params"], own["params"], strict=True):
            state = state_dict["state"].get(index)
            wrong += [f"{name_of(param, index)} {problem}" for problem in state_problems(state, param)] if state else []
    if wrong:
        raise CheckpointError(f"the state does not fit the parameters ({'; '.join(wrong)}); nothing was loaded")


def state_problems(
    state: Mapping[str, Any], param: torch.Tensor, *, keys: Collection[str] = (*STATE_KEYS, "step")
) -> list[str]:
    """Return what is wrong with the values of `keys` in a parameter's state, in words that follow its name."""
    found = []
    for key in STATE_KEYS:
        value = state.get(key)
        if key not in keys:
            continue
        if not isinstance(value, torch.Tensor):
            found.append(f"{key} is missing" if value is None else f"{key} is a {type(value).__name__}, not a tensor")
        elif value.shape != param.shape:
            found.append(f"{key} is {tuple(value.shape)} instead of {tuple(param.shape)}")
    step = state.get("step")
    is_number = isinstance(step, (int, float)) or (isinstance(step, torch.Tensor) and step.numel() == 1)
    if "step" in keys and not is_number:
        found.append("step is not a number")
    return found
