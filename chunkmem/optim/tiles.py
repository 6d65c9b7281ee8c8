"""An optimizer's state of tiled layers as that of untiled ones, and back; in chunks or in plain PyTorch.

By index, as torch.optim has it, or by names, as torch.distributed.checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from chunkmem.data.errors import CheckpointError, ConfigError
from chunkmem.modules.tiled import TiledLinear
from chunkmem.optim.masters import MASTER_KEY


class TiledWeight(NamedTuple):
    """A weight or bias in tiles."""

    layer_name: str
    """In the model."""
    layer: TiledLinear
    key: str
    """Of the whole in the layer."""
    tiles: Sequence[nn.Parameter]


def tiled_weights(roots: Iterable[nn.Module]) -> Iterator[TiledWeight]:
    """Yield all of some models."""
    for name, module in (found for root in roots for found in root.named_modules()):
        for key, tiles in module.tiles().items() if isinstance(module, TiledLinear) else ():
            yield TiledWeight(name, module, key, tiles)


@dataclass(frozen=True)
class _Row:
    """One parameter of the untiled model: what both states have it under."""

    untiled: Any
    """An index, or a name."""
    tiled: tuple[int, ...]
    whole: TiledWeight | None
    """Whose tiles they are; None: it is an ordinary parameter."""

    def join(self, key: str, values: Mapping[int, Any]) -> Any:
        """Return the value of the whole, given those of tiles by their indices: a copy.

        Raises:
            CheckpointError: it is a number, such as the count of updates, and tiles have several.
        """
        first, *others = (values[index] for index in self.tiled)
        if isinstance(first, torch.Tensor) and first.ndim > 0:
            return (first if self.whole is None else self.whole.layer.join(self.whole.key, [first, *others])).clone()
        if self.whole is not None and (differing := [value for value in others if value != first]):
            raise CheckpointError(
                f"{self.whole.layer_name}.{self.whole.key} is in tiles, whose {key} is {first} and {differing[0]}, and "
                "a checkpoint has one weight: keep or drop the gradients of all its tiles together"
            )
        return first.clone() if isinstance(first, torch.Tensor) else first

    def split(self, value: Any) -> dict[int, Any]:
        """Return the values of tiles by their indices: copies."""
        is_whole = isinstance(value, torch.Tensor) and value.ndim > 0
        if self.whole is None or not is_whole:
            return {index: value.clone() if isinstance(value, torch.Tensor) else value for index in self.tiled}
        return dict(zip(self.tiled, self.whole.layer.split(self.whole.key, value), strict=True))


def require_together(roots: Iterable[nn.Module], groups: Iterable[Mapping[str, Any]]) -> None:
    """Check that tiles of a weight are in one of an optimizer's parameter groups, as a checkpoint has the whole.

    Raises:
        ConfigError: those of one are in several.
    """
    group_of = {id(param): number for number, group in enumerate(groups) for param in group["params"]}
    for whole in tiled_weights(roots):
        found = sorted({group_of[id(tile)] for tile in whole.tiles if id(tile) in group_of})
        if len(found) > 1:
            raise ConfigError(
                f"tiles of {whole.layer_name}.{whole.key} are in parameter groups {' and '.join(map(str, found))}, and "
                "a checkpoint has one weight: put all tiles of a layer into one group, or do not tile it"
            )


def untile_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the `state_dict` that an optimizer would have if no layer of the model were tiled.

    Over several ranks, all have to call it. The model's own `state_dict` is that of the untiled model as it is.

    Args:
        model: that has tiles.
        optimizer: over its parameters.
        state: of the optimizer; None: its `state_dict()`.

    Raises:
        CheckpointError: the parameters of one layer are in several parameter groups, some of them have no state, or
            they were updated a different number of times.
    """
    return _untiled(_rows(model, optimizer), optimizer.state_dict() if state is None else state)


def tile_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a `state_dict` of the untiled model's optimizer as `optimizer.load_state_dict` takes it, over tiles.

    Raises:
        CheckpointError: it is of other parameters, or those of one layer are in several parameter groups.
    """
    groups = _rows(model, optimizer)
    sizes, own = [len(group["params"]) for group in state["param_groups"]], [len(rows) for rows in groups]
    if sizes != own:
        raise CheckpointError(
            f"the state has parameter groups of {sizes} parameters, and the untiled model has {own}: give it the "
            "state of an optimizer over the same parameters, in the same groups"
        )
    return _tiled(groups, state)


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state by the names of the untiled model's parameters.

    Raises:
        CheckpointError: a parameter is none of the model's, or tiles of one layer are in several parameter groups.
    """
    return _untiled(_named_rows(model, optimizer), state)


def indexed_state(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `named_state` has returned for this model as `optimizer.load_state_dict` takes it.

    Raises:
        CheckpointError: it has other parameters, or they are in other groups.
    """
    groups = _named_rows(model, optimizer)
    names = [[row.untiled for row in rows] for rows in groups]
    ordered = [{**_group_of(own, saved.get("param_groups", ())), "params": own} for own in names]
    return _tiled(groups, {"state": {}, **saved, "param_groups": ordered})


def _group_of(names: list[str], saved: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    for group in saved:
        if set(group["params"]) == set(names):
            return group
    sizes = ", ".join(str(len(group["params"])) for group in saved) or "none"
    raise CheckpointError(
        f"the checkpoint has no parameter group of the {len(names)} parameters from {names[0]} on, but groups of "
        f"{sizes}; make the optimizer with the groups it was saved with. Nothing was loaded"
    )


def _untiled(groups: Sequence[Sequence[_Row]], state: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[Any, Any] = {}
    for row in (row for rows in groups for row in rows):
        states = {index: state["state"][index] for index in row.tiled if index in state["state"]}
        if row.whole is not None and 0 < len(states) < len(row.tiled):
            raise CheckpointError(
                f"{row.whole.key} of a tiled layer has states for {len(states)} of {len(row.tiled)} tiles: train or "
                "freeze the layer as a whole"
            )
        for key in next(iter(states.values()), {}):
            found.setdefault(row.untiled, {})[key] = row.join(key, {index: states[index][key] for index in states})
    untiled = {**state, "state": found, "param_groups": _with_params(state, [[r.untiled for r in g] for g in groups])}
    if masters := state.get(MASTER_KEY):
        rows = [row for rows in groups for row in rows if row.tiled[0] in masters]
        untiled[MASTER_KEY] = {row.untiled: row.join(MASTER_KEY, masters) for row in rows}
    return untiled


def _tiled(groups: Sequence[Sequence[_Row]], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `_untiled` undoes, of a state whose groups have as many parameters as these."""
    found: dict[int, dict[str, Any]] = {}
    masters: dict[int, Any] = {}
    for rows, group in zip(groups, state["param_groups"], strict=True):
        for row, at in zip(rows, group["params"], strict=True):
            for key, value in state["state"].get(at, {}).items():
                for index, part in row.split(value).items():
                    found.setdefault(index, {})[key] = part
            if at in state.get(MASTER_KEY, {}):
                masters |= row.split(state[MASTER_KEY][at])
    params = [[index for row in rows for index in row.tiled] for rows in groups]
    tiled = {**state, "state": found, "param_groups": _with_params(state, [sorted(group) for group in params])}
    return tiled | ({MASTER_KEY: masters} if MASTER_KEY in state else {})


def _with_params(state: Mapping[str, Any], params: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Return the parameter groups of a state with other indices; names of parameters are those of tiles, and go."""
    return [
        {key: value for key, value in group.items() if key != "param_names"} | {"params": list(own)}
        for group, own in zip(state["param_groups"], params, strict=True)
    ]


def _rows(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[_Row]]:
    """Return the untiled parameters of each parameter group, in its order; a whole stands where its first tile does."""
    whole_of = {id(tile): whole for whole in tiled_weights([model]) for tile in whole.tiles}
    groups: list[list[_Row]] = []
    at = num_rows = 0
    for group in optimizer.param_groups:
        index = {id(param): at + position for position, param in enumerate(group["params"])}
        at += len(index)
        rows, seen = [], set[int]()
        for key in index:
            if key in seen:
                continue
            whole = whole_of.get(key)
            keys = [key] if whole is None else list(map(id, whole.tiles))
            if whole is not None and not index.keys() >= set(keys):
                raise CheckpointError(
                    f"{whole.key} of a tiled layer is in several parameter groups: put all tiles into one"
                )
            seen.update(keys)
            rows.append(_Row(num_rows, tuple(map(index.__getitem__, keys)), whole))
            num_rows += 1
        groups.append(rows)
    return groups


def _named_rows(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[_Row]]:
    """Return `_rows` by the names that parameters have in the untiled model.

    Raises:
        CheckpointError: a parameter is none of the model's.
    """
    names = {id(param): name for name, param in reversed(list(model.named_parameters(remove_duplicate=False)))}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if lacking := [tuple(param.shape) for param in params if id(param) not in names]:
        raise CheckpointError(
            f"the optimizer has {len(lacking)} parameters that are not the model's, one of shape {lacking[0]}; name "
            "the model whose parameters it has: model=..."
        )

    def named(row: _Row) -> _Row:
        name = names[id(params[row.tiled[0]])]
        return replace(row, untiled=name if row.whole is None else f"{name.rsplit('.tile_', 1)[0]}.{row.whole.key}")

    return [list(map(named, rows)) for rows in _rows(model, optimizer)]
