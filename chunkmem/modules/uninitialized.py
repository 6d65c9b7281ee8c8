"""Parameters and buffers that were packed without values, until they are loaded."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from chunkmem.data.errors import StateError
from chunkmem.modules.binding import ManagedParameter


class UninitializedValues:
    """What has to be loaded before a model can be used."""

    def __init__(self) -> None:
        """Wait for nothing."""
        self._params: dict[ManagedParameter, None] = {}
        self._buffers: list[tuple[str, torch.Tensor, int]] = []
        """With their names, and their versions before anybody has written to them."""

    def expect(self, params: Iterable[ManagedParameter], buffers: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Wait for these, too; buffers come with their names."""
        self._params.update(dict.fromkeys(params))
        self._buffers += [(name, buffer, buffer._version) for name, buffer in buffers]

    def came(self, managed: ManagedParameter) -> None:
        """A parameter was loaded."""
        self._params.pop(managed, None)

    def require(self) -> None:
        """Raise a `StateError` that names what is awaited, if there is something."""
        if not self._params and not self._buffers:
            return
        self._buffers = [each for each in self._buffers if each[1]._version == each[2]]
        found = [f"parameter {managed}" for managed in self._params]
        found += [f"buffer {name} {tuple(buffer.shape)}" for name, buffer, _ in self._buffers]
        if found:
            others = f", nor have {len(found) - 1} others" if len(found) > 1 else ""
            raise StateError(
                f"{found[0]} has no values yet{others}: the model was packed with skip_init=True. Load them with "
                "manager.load(path) or manager.load_state_dict(state)"
            )
