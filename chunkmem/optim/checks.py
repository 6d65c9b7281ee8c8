"""Whether the options of a parameter group, or a saved state, can be used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from chunkmem.errors import CheckpointError, ConfigError
from chunkmem.optim.rule import UpdateRule


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


def check_state(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    rule: UpdateRule[Any],
    *,
    name_of: Callable[[torch.Tensor, int], str],
) -> None:
    """Compare a saved optimizer state with the parameter groups it is to be loaded into.

    Raises:
        CheckpointError: groups or shapes differ, or it was made with an option there is no counterpart of.
    """
    saved = saved_groups(state_dict, groups)
    for group in saved:
        if missing := [option for option in rule.options if option not in group]:
            raise CheckpointError(f"the state is of another optimizer than {rule.name}: it has no {', '.join(missing)}")
        try:
            rule.check(group)
        except ConfigError as error:
            raise CheckpointError(f"the state cannot be loaded: {error}") from None
    wrong = []
    for group, own in zip(saved, groups, strict=True):
        for index, param in zip(group["params"], own["params"], strict=True):
            state = state_dict["state"].get(index, {})
            has = [key for key in rule.keys if state.get(key) is not None]
            # Where updates are counted, a state is whole or not there.
            keys = rule.keys if state and rule.counts_steps else has
            wrong += [f"{name_of(param, index)} {problem}" for problem in state_problems(state, param, rule, keys=keys)]
    require_fit(wrong)


def saved_groups(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the parameter groups of a saved optimizer state, which are as large as those it is to be loaded into.

    Raises:
        CheckpointError: they are not, or it is no such state.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise CheckpointError("not an optimizer state: it needs the keys 'state' and 'param_groups'")
    saved: Sequence[Mapping[str, Any]] = state_dict["param_groups"]
    ours = [len(group["params"]) for group in groups]
    theirs = [len(group["params"]) for group in saved]
    if ours != theirs:
        raise CheckpointError(f"the state has parameter groups of {theirs} parameters, this optimizer of {ours}")
    return saved


def require_fit(wrong: Sequence[str]) -> None:
    """Raise a `CheckpointError` if there are states that do not fit their parameters: what is wrong with each."""
    if wrong:
        raise CheckpointError(f"the state does not fit the parameters ({'; '.join(wrong)}); nothing was loaded")


def state_problems(
    state: Mapping[str, Any], param: torch.Tensor, rule: UpdateRule[Any], *, keys: Collection[str]
) -> list[str]:
    """Return what is wrong with the values of `keys` in a parameter's state, in words that follow its name."""
    found = []
    for spec in rule.all_states:
        key, shape = spec.role.value, spec.shape_for(param)
        value = state.get(key)
        if key not in keys:
            continue
        if not isinstance(value, torch.Tensor):
            found.append(f"{key} is missing" if value is None else f"{key} is a {type(value).__name__}, not a tensor")
        elif value.shape != shape:
            found.append(f"{key} is {tuple(value.shape)} instead of {tuple(shape)}")
    step = state.get("step")
    is_number = isinstance(step, (int, float)) or (isinstance(step, torch.Tensor) and step.numel() == 1)
    if "step" in keys and not is_number:
        found.append("step is not a number")
    return found
