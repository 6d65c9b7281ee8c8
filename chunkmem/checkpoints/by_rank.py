"""What each rank has of its own in a checkpoint: modules in `manager.exclude(reduce=False)`, and its own `extra=`.

It is under the key "ranks", by the number of the rank, nested as it would be on the outside. The rest of a checkpoint
is that of one process.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping
from typing import IO, Any, cast

import torch
from torch import nn

from chunkmem.assembly.runtime import Runtime
from chunkmem.checkpoints.files import EXTRA, RANKS
from chunkmem.checkpoints.reading import CheckpointFiles
from chunkmem.data.errors import CheckpointError
from chunkmem.optim.ema import PREFIX
from chunkmem.optim.masters import MASTER_KEY
from chunkmem.ranks.ranks import Ranks

_COUNT = "count"
"""Under "ranks": how many there were."""


class OwnNames:
    """Names of the parameters and buffers of a model that are each rank's own."""

    def __init__(self, root: nn.Module, runtime: Runtime) -> None:
        """Find those in modules that were built in `manager.exclude(reduce=False)`: they differ between ranks."""
        own = {id(module) for each in runtime.built.kept() for module in each.modules()}
        away = {id(module) for module in runtime.built.elsewhere.modules}  # of other pipeline stages
        named = dict(root.named_modules(remove_duplicate=False))
        self._is_own = {name: id(module) in own for name, module in named.items()}
        """By the name of a module."""
        each_ranks = runtime.registry.each_ranks
        self.in_parts = frozenset(name for name, param in root.named_parameters() if id(param) in each_ranks)
        """Parameters of which each rank has a part of its own, and its own number of updates."""
        self._elsewhere = frozenset(name for name, module in named.items() if id(module) in own & away)

    def elsewhere(self, expected: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a model's state that only ranks of other pipeline stages have: here, nobody reads it."""
        return {name: value for name, value in expected.items() if name.rpartition(".")[0] in self._elsewhere}

    def __contains__(self, name: str) -> bool:
        return self._is_own.get(name.rpartition(".")[0], False)

    def in_common(self, names: Iterable[str]) -> list[str]:
        """Return those that the model has, and which all ranks have in common."""
        return [name for name in names if not self._is_own.get(name.rpartition(".")[0], True)]


def divide(state: dict[str, Any], names: OwnNames, ranks: Ranks) -> dict[str, Any]:
    """Put what is this rank's own under "ranks"; all ranks call it.

    Args:
        state: what is to be saved, of this rank.
        names: that are its own.
        ranks: all that train the model.

    Raises:
        RankError: a rank did not come.
    """
    if ranks.size == 1:
        return state
    shared, own = _divided(state, names)
    found, number = ranks.values_of_all((bool(own), _digest(state.get(EXTRA))), label="comparing extra=")
    first = found[0][1]
    if number > 0 and found[number][1] not in ("", first):
        own[EXTRA] = state[EXTRA]
    if own:
        shared[RANKS] = {str(number): own}
    if number == 0 and any(has_own or digest not in ("", first) for has_own, digest in found):
        shared.setdefault(RANKS, {})[_COUNT] = ranks.size
    return shared


def _divided(state: dict[str, Any], names: OwnNames) -> tuple[dict[str, Any], dict[str, Any]]:
    shared, own = dict(state), dict[str, Any]()
    shared["model"], own["model"] = _split(state["model"], names)
    if "ema" in state:
        shared["ema"], own["ema"] = _split(state["ema"], names, prefix=PREFIX)
    if "optimizer" in state:
        optimizer = shared["optimizer"] = dict(state["optimizer"])
        rows = {}
        for key in (key for key in ("state", MASTER_KEY) if key in optimizer):
            optimizer[key], rows[key] = _split(optimizer[key], names)
        groups = optimizer["param_groups"]
        if any(name in names for group in groups for name in group["params"]):
            own["optimizer"] = {**{key: value for key, value in rows.items() if value}, "param_groups": groups}
            optimizer["param_groups"] = [
                {**group, "params": [name for name in group["params"] if name not in names]} for group in groups
            ]
        for name in names.in_parts.intersection(optimizer.get("state", {})):
            entry = optimizer["state"][name].items()
            numbers = {key: value for key, value in entry if not isinstance(value, torch.Tensor) or not value.ndim}
            own.setdefault("optimizer", {}).setdefault("state", {})[name] = numbers
    return shared, {key: value for key, value in own.items() if value}


def _split(found: Mapping[str, Any], names: OwnNames, *, prefix: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
    own = {key: value for key, value in found.items() if key.removeprefix(prefix) in names}
    return {key: value for key, value in found.items() if key not in own}, own


class _Hashed(io.RawIOBase):
    """A file that is only hashed."""

    def __init__(self) -> None:
        super().__init__()
        self.hash = hashlib.sha256()

    def write(self, content: Any) -> int:
        self.hash.update(content)
        return len(content)


def _digest(extra: Any) -> str:
    """Return a text that tells contents apart; "" for nothing."""
    if not extra:
        return ""
    file = _Hashed()
    try:
        torch.save(extra, cast("IO[bytes]", file))
    except Exception as error:  # what cannot be pickled raises anything, and does so again when it is written
        return f"{type(error).__name__}: {error}"
    return file.hash.hexdigest()


class OwnParts:
    """What a checkpoint has for one rank alone."""

    def __init__(self, files: CheckpointFiles, names: OwnNames, ranks: Ranks) -> None:
        """Read it.

        Args:
            files: of the checkpoint.
            names: that are each rank's own here.
            ranks: all that train the model.

        Raises:
            CheckpointError: the modules of as many ranks as there were have no place here.
        """
        self.files = files
        count = files.nested(RANKS, _COUNT)
        parts: dict[str, Any] = files.nested(RANKS, with_objects=False) or {}
        saved = [name for part in parts.values() for name in part.get("model", ())]
        if saved and count != ranks.size:
            raise CheckpointError(
                f"{files.path} has {saved[0]} of each of the {count} ranks that saved it, in manager.exclude("
                f"reduce=False), and {_are(ranks.size)} here: load it on {count} ranks"
            )
        self._found: dict[str, Any] = {}
        if count == ranks.size:
            self._found = files.nested(RANKS, str(ranks.rank)) or {}
        if wrong := names.in_common(self._found.get("model", ())):
            raise CheckpointError(
                f"{files.path} has {wrong[0]} of each rank, and here all ranks have it in common: build its module in "
                "manager.exclude(reduce=False)"
            )

    def nested(self, key: str) -> Any:
        """Return what is saved under a key, with what is this rank's own; None if there is nothing."""
        shared = self.files.nested(key)
        return _joined(shared, self._found[key]) if key in self._found else shared

    @property
    def extra(self) -> Any:
        """What this rank has passed as `extra=`, if the first one has passed something else; else None."""
        return self._found.get(EXTRA)


def _are(size: int) -> str:
    return "there is 1" if size == 1 else f"there are {size}"


def _joined(shared: Any, own: Any) -> Any:
    if not isinstance(shared, dict) or not isinstance(own, dict):
        return own
    return {**shared, **{key: _joined(shared.get(key), value) for key, value in own.items()}}
