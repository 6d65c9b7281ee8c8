"""Optimizer states by names, as torch.distributed.checkpoint has them, and by index, as torch.optim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from chunkmem.errors import CheckpointError
from chunkmem.optim.masters import MASTER_KEY
from chunkmem.optim.optimizer import RuleOptimizer
from chunkmem.optim.tiles import tile_optimizer_state, untile_optimizer_state, untiled_names

BY_PARAMETER = ("state", MASTER_KEY)
"""What of a state has an entry for each parameter."""


def named_state(model: nn.Module, optimizer: RuleOptimizer) -> dict[str, Any]:
    """Return the state of an optimizer by the names of the untiled model's parameters; its values are lazy.

    Raises:
        CheckpointError: a parameter is none of the model's, or tiles of one layer are in several parameter groups.
    """
    groups = untiled_names(model, optimizer)
    names = [name for group in groups for name in group]
    state = untile_optimizer_state(model, optimizer, optimizer.lazy_state_dict())
    found: dict[str, Any] = {
        key: {names[index]: value for index, value in state[key].items()} for key in BY_PARAMETER if key in state
    }
    rows = zip(state["param_groups"], groups, strict=True)
    others = {key: value for key, value in state.items() if key not in (*BY_PARAMETER, "param_groups")}
    return {**found, **others, "param_groups": [{**group, "params": own} for group, own in rows]}


def indexed_state(model: nn.Module, optimizer: RuleOptimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `named_state` has returned for this model as `optimizer.load_state_dict` takes it.

    Raises:
        CheckpointError: it has other parameters, or they are in other groups.
    """
    groups = untiled_names(model, optimizer)
    ordered = [_group_of(names, saved.get("param_groups", ())) for names in groups]
    index = {name: at for at, name in enumerate(name for group in groups for name in group)}
    found: dict[str, Any] = {key: value for key, value in saved.items() if key != "param_groups"}
    for key in BY_PARAMETER:
        if key in saved or key == "state":
            found[key] = {index[name]: value for name, value in saved.get(key, {}).items() if name in index}
    rows = zip(ordered, groups, strict=True)
    found["param_groups"] = [{**group, "params": [index[name] for name in own]} for group, own in rows]
    return tile_optimizer_state(model, optimizer, found)


def _group_of(names: list[str], saved: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    for group in saved:
        if set(group["params"]) == set(names):
            return group
    sizes = ", ".join(str(len(group["params"])) for group in saved) or "none"
    raise CheckpointError(
        f"the checkpoint has no parameter group of the {len(names)} parameters from {names[0]} on, but groups of "
        f"{sizes}; make the optimizer with the groups it was saved with. Nothing was loaded"
    )
