"""A configuration and what a script says itself: "auto" is filled from it, and contradictions are found. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from chunkmem.data.errors import ConfigError
from chunkmem.data.sizes import shown

AUTO: Final = "auto"
_ARGUMENTS: Final = MappingProxyType(
    {
        "lr": ("learning_rate",),
        "betas": ("adam_beta1", "adam_beta2"),
        "eps": ("adam_epsilon",),
        "weight_decay": ("weight_decay",),
    }
)
"""Keys of `optimizer.params`, and the arguments of Trainer that are meant by "auto"."""


def filled(values: Mapping[str, Any], args: Any = None) -> dict[str, Any]:
    """Return a configuration with a value for each "auto", which is what a script itself says.

    Args:
        values: as plain data.
        args: transformers' `TrainingArguments`; None: there are none, and the keys are left out.

    Raises:
        ConfigError: these arguments contradict the configuration.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"a configuration is an object with keys, not {shown(values)}")
    found = copy.deepcopy(dict(values))
    params = _params_in(found)
    for key in [key for key, value in params.items() if value == AUTO and key in _ARGUMENTS]:
        said = [getattr(args, name, None) for name in _ARGUMENTS[key]]
        params[key] = said if len(said) > 1 else said[0]
        if None in said:
            del params[key]
    if found.get("precision") == AUTO:
        found["precision"] = "fp32"  # of weights: autocast is the script's
    clipping = found.get("gradient_clipping", AUTO)
    if args is not None and clipping not in (AUTO, args.max_grad_norm):
        raise ConfigError(
            f"gradient_clipping is {shown(clipping)} in the configuration, and max_grad_norm is {args.max_grad_norm} "
            f"in TrainingArguments, by which Trainer clips: make one of them the other, or gradient_clipping {AUTO!r}"
        )
    if args is not None or clipping == AUTO:
        found.pop("gradient_clipping", None)  # the script clips
    return found


def check_options(values: Mapping[str, Any], groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise if a configuration asks for another optimizer than the script makes.

    Args:
        values: the configuration as plain data.
        groups: of parameters, with the options of the script's optimizer.

    Raises:
        ConfigError: names both.
    """
    for key, value in _params_in(values).items():
        wanted = tuple(value) if isinstance(value, list) else value
        found = {group[key] for group in groups if key in group} if key in _ARGUMENTS and value != AUTO else set()
        if found and wanted not in found:
            raise ConfigError(
                f"optimizer.params.{key} is {shown(value)} in the configuration, and {key} is {shown(found.pop())} in "
                f"the script: make one of them the other, or leave {key} out of the configuration"
            )


def check_precision(precision: str, autocast: str, said_by: str) -> None:
    """Raise if a script computes in one low precision over chunks in another.

    Args:
        precision: the configuration's.
        autocast: the script's; "no": none.
        said_by: where the script says so.

    Raises:
        ConfigError: names both.
    """
    if precision != "fp32" and autocast != "no":
        raise ConfigError(
            f'precision is "{precision}" in the configuration, and {said_by} asks for autocast in {autocast}: leave '
            f'that out, or make precision "{AUTO}", for autocast over weights in fp32'
        )


def _params_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `optimizer.params`, or nothing where there is no such section."""
    optimizer = values.get("optimizer")
    params = optimizer.get("params") if isinstance(optimizer, dict) else None
    return params if isinstance(params, dict) else {}
