"""Whether the options of a parameter group, or a saved state, can be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from chunkmem.errors import CheckpointError, ConfigError
from chunkmem.optim.entries import TensorForm
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
    weights_of: Callable[[torch.Tensor], TensorForm],
) -> None:
    """Compare a saved optimizer state with the parameter groups it is to be loaded into.

    Args:
        state_dict: the state.
        groups: of the optimizer.
        rule: of the optimizer.
        name_of: returns what a parameter of a number is called.
        weights_of: returns what an update sees of a parameter.

    Raises:
        CheckpointError: groups or shapes differ, or it was made with an option there is no counterpart of.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise CheckpointError("not an optimizer state: it needs the keys 'state' and 'param_groups'")
    saved = state_dict["param_groups"]
    ours, theirs = ([len(group["params"]) for group in each] for each in (groups, saved))
    if ours != theirs:
        raise CheckpointError(f"the state has parameter groups of {theirs} parameters, this optimizer of {ours}")
    wrong = []
    for group, own in zip(saved, groups, strict=True):
        name, options = rule.required(own)
        if missing := [option for option in options if option not in group]:
            raise CheckpointError(f"the state is of another optimizer than {name}: it has no {', '.join(missing)}")
        try:
            rule.check(group)
            hyper = rule.hyper({**own, **group, "params": own["params"]})
            for index, param in zip(group["params"], own["params"], strict=True):
                if not (saved_state := state_dict["state"].get(index)):
                    continue
                form = rule.form(hyper, weights_of(param), name=name_of(param, index))
                problems = form.problems(rule.to_load(saved_state), is_whole=True)
                wrong += [f"{name_of(param, index)} {problem}" for problem in problems]
        except ConfigError as error:
            raise CheckpointError(f"the state cannot be loaded: {error}") from None
    if wrong:
        raise CheckpointError(f"the state does not fit the parameters ({'; '.join(wrong)}); nothing was loaded")
