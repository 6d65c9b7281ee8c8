"""A `torch.optim.Optimizer` class called for some parameters at a time, with states that are kept elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence, Sized
from typing import Any, Final

import torch

from chunkmem.data.errors import ConfigError
from chunkmem.optim.entries import Entry

NOT_OPTIONS = ("params", "param_names")
"""What a parameter group has in addition to options."""


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group."""
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


def require_class(kind: object) -> type[torch.optim.Optimizer]:
    """Return what a user has passed as a class.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
        return kind
    raise ConfigError(
        f"chunkmem.Optimizer takes a class that derives from torch.optim.Optimizer, not {kind!r}; pass the class "
        "itself, and its options apart: chunkmem.Optimizer(torch.optim.Muon, params, manager=manager, lr=0.02)"
    )


_UNKNOWN: Final = "unknown"


class ClassCall:
    """Calls `step()` of copies of one optimizer, which have its attributes, and other parameters and states.

    Each call has a copy of its own, so that several threads may make one. Hooks on the steps of all optimizers of the
    process are not called: they are for the step of the optimizer that the user has made.
    """

    def __init__(self, template: torch.optim.Optimizer) -> None:
        """Take the attributes of an optimizer, but not its groups and states."""
        self._kind = type(template)
        self._attributes = {k: v for k, v in vars(template).items() if k not in ("state", "param_groups")}
        self._step = unhooked_step(template)

    def __call__(
        self,
        leaves: Sequence[torch.Tensor],
        entries: Sequence[Entry | None],
        options: Mapping[str, Any],
        *,
        is_trial: bool = False,
    ) -> list[Entry | None]:
        """Step once over parameters that have their gradients in `.grad`.

        Args:
            leaves: updated in place.
            entries: of `state`, one a parameter; None: it has none yet. Tensors in them are updated in place.
            options: of the parameter group.
            is_trial: look for changes of attributes, too.

        Returns:
            The entries afterwards; None where there is none.

        Raises:
            ConfigError: the class keeps something outside of states.
        """
        optimizer = object.__new__(self._kind)
        vars(optimizer).update(self._attributes)
        group = {**copied(dict(options)), "params": list(leaves)}
        state: defaultdict[torch.Tensor, Entry] = defaultdict(dict)
        for leaf, entry in zip(leaves, entries, strict=True):
            if entry is not None:
                state[leaf] = dict(entry)
        optimizer.param_groups, optimizer.state = [group], state
        before = frozen(options)
        attributes = _numbers_in(vars(optimizer)) if is_trial else {}
        self._step(optimizer)
        if frozen({key: value for key, value in group.items() if key != "params"}) != before:
            changed = [key for key, value in options.items() if frozen(group.get(key)) != frozen(value)]
            raise _needs_all(self._kind, f"changes {', '.join(changed) or 'options'} of its parameter group")
        if is_trial:
            now = _numbers_in(vars(optimizer))
            if changed := [key for key, value in now.items() if attributes.get(key) != value and value != _UNKNOWN]:
                raise _needs_all(self._kind, f"changes its attribute {', '.join(changed)}")
        return [dict(optimizer.state[leaf]) if leaf in optimizer.state else None for leaf in leaves]


def unhooked_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return `step` of an optimizer's class, which does not call hooks on the steps of all optimizers."""
    step: Any = type(optimizer).step
    has_hooks = bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
    found: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) and not has_hooks else step
    return found


def _needs_all(kind: type, what: str) -> ConfigError:
    return ConfigError(
        f"{kind.__name__}.step() {what}: it has to see all parameters at once, and chunkmem.Optimizer steps one chunk "
        "after the other; pass whole=True, where HOST has room for all weights, gradients and states at once"
    )


def _numbers_in(attributes: Mapping[str, Any]) -> dict[str, Hashable]:
    """Return the attributes of an optimizer that count or collect something; flags and texts do not."""
    left_out = ("state", "param_groups", "defaults")
    return {key: _numbers_of(value) for key, value in attributes.items() if key not in left_out}


def _numbers_of(value: Any) -> Hashable:
    if isinstance(value, bool | str):
        return None
    if isinstance(value, torch.Tensor):  # on the meta device it may be a table that was moved there
        return _UNKNOWN if value.is_meta else frozen(value)
    if isinstance(value, Mapping):
        return tuple((str(key), _number(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_number, value))
    if isinstance(value, int | float):
        return value
    return len(value) if isinstance(value, Sized) else None


def _number(value: Any) -> Hashable:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def copied(value: Any) -> Any:
    """Return nested options whose tensors, lists and dicts are copies."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return type(value)(map(copied, value)) if type(value) in (list, tuple) else value


def frozen(value: Any) -> Hashable:
    """Return nested options as what compares by value; what does not is compared by identity."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), id(value) if value.is_meta else str(value.tolist())
    if isinstance(value, Mapping):
        return tuple((str(key), frozen(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return type(value).__name__, *map(frozen, value)
    return (type(value).__name__, value) if isinstance(value, Hashable) else ("object", id(value))
