"""`optimizer.state`: it reads as torch's does, although the moments are in chunks.

Values of managed parameters are copies, made when they are asked for. A write into a copy would be lost, so it is an
error; what is assigned (`optimizer.state[param]["exp_avg"] = tensor`) goes to the chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from chunkmem.data.errors import StateError
from chunkmem.modules.binding import ManagedParameter
from chunkmem.optim.chunk_states import ChunkStates
from chunkmem.runtime.values import storage_id


class StateCopy(torch.Tensor):
    """A copy of one optimizer state: it reads as any tensor, and refuses what would write to it or to views of it.

    Results that have memory of their own (`state.clone()`, `state + 1`) are ordinary tensors.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            copies = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
            before = [(copy._version, storage_id(copy)) for copy in copies]
            result = func(*args, **(kwargs or {}))
            # Autograd's counter knows of every write, whatever the function is called.
            if [(copy._version, storage_id(copy)) for copy in copies] != before:
                raise StateError(
                    "optimizer.state: values of managed parameters are copies of what chunks hold, and a write to one "
                    "would be lost; assign it: optimizer.state[param]['exp_avg'] = tensor, or clone() it to write to"
                )
            if hasattr(result, "setflags"):  # a numpy array of the same memory
                result.setflags(write=False)
            storages = {storage for _, storage in before}
            return tree_map_only(torch.Tensor, lambda t: t.as_subclass(cls) if storage_id(t) in storages else t, result)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


class ParameterState(MutableMapping[str, torch.Tensor]):
    """The state of one managed parameter, as it is when it is looked at; empty while there is none."""

    def __new__(cls, state: Any, managed: ManagedParameter | None = None) -> Any:
        """Make one; from a mapping alone an ordinary dict, as functions that map over collections call the type."""
        return dict(state) if managed is None else super().__new__(cls)

    def __init__(self, states: ChunkStates, managed: ManagedParameter) -> None:
        self._states = states
        self._managed = managed

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self:
            raise KeyError(key)
        value = self._states.read(self._managed, (key,))[key]
        return value.as_subclass(StateCopy) if isinstance(value, torch.Tensor) else value

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in (may := dict.fromkeys((*self._states.form(self._managed).keys, *self))):
            raise StateError(
                f"optimizer.state of parameter {self._managed.name}: {key!r} cannot be kept, its chunks hold "
                f"{', '.join(may)}; keep it in a dict of your own"
            )
        self._states.write(self._managed, {key: value})

    def __delitem__(self, key: str) -> None:
        raise StateError(
            f"optimizer.state of parameter {self._managed.name}: {key!r} cannot be removed alone; remove the whole: "
            "del optimizer.state[param]"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._states.keys_of(self._managed))

    def __contains__(self, key: object) -> bool:
        return key in self._states.keys_of(self._managed)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(self._states.read(self._managed))


class OptimizerState(MutableMapping[Any, Any]):
    """What `optimizer.state` is: by parameter, the entries that torch keeps for it."""

    _states: ChunkStates

    def __init__(self, params: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Begin without any; `params` returns all parameters of the optimizer, in order. See `show`, too."""
        self.excluded: MutableMapping[Any, Any] = defaultdict(dict)
        """Of parameters that no chunk holds, as torch.optim keeps them: real entries, made when they are asked for."""
        self._params = params

    def show(self, states: ChunkStates) -> None:
        """Show these states of managed parameters from now on."""
        self._states = states

    def copies(self, *, lazily: bool) -> dict[Any, dict[str, Any]]:
        """Return ordinary copies of all states on the CPU, or `LazyTensor`s of those in chunks."""
        found = {}
        managed_by_param = {param: self._states.find(param) for param in self}
        lazy = self._states.lazy([one for one in managed_by_param.values() if one is not None]) if lazily else {}
        for param, managed in managed_by_param.items():
            if managed is not None:
                found[param] = lazy[managed] if lazily else self._states.read(managed)
            elif entry := self.excluded[param]:
                found[param] = tree_map_only(torch.Tensor, lambda value: value.to("cpu", copy=True), dict(entry))
        return found

    def __getitem__(self, param: Any) -> Any:
        managed = self._states.find(param)
        return self.excluded[param] if managed is None else ParameterState(self._states, managed)

    def __setitem__(self, param: Any, value: Any) -> None:
        managed = self._states.find(param)
        if managed is None:
            self.excluded[param] = value
        elif not isinstance(value, Mapping):
            raise StateError(
                f"optimizer.state of parameter {managed.name} is a mapping of "
                f"{', '.join(self._states.form(managed).keys)} to tensors, not a {type(value).__name__}"
            )
        else:
            self._states.replace(managed, value)

    def __delitem__(self, param: Any) -> None:
        managed = self._states.find(param)
        if managed is None:
            del self.excluded[param]
        elif managed in self._states:
            self._states.replace(managed, {})
        else:
            raise KeyError(param)

    def __iter__(self) -> Iterator[Any]:
        params = dict.fromkeys(self._params())
        yield from (param for param in params if param in self)
        yield from (key for key in self.excluded if key not in params)

    def __contains__(self, param: object) -> bool:
        managed = self._states.find(param)
        return param in self.excluded if managed is None else managed in self._states

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return len(self._states) > 0 or bool(self.excluded)
