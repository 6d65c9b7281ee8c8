"""Ranks as a mesh: each row has a replica of the model, sharded over the row; a column has the same shard of each."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from chunkmem.errors import ConfigError, StateError

_DIMENSIONS = ("replicate", "shard")
_NEXT = (
    'pass a mesh with the dimensions "replicate" and "shard", or one of them, as init_device_mesh("cuda", (2, 4), '
    'mesh_dim_names=("replicate", "shard")) returns; of a larger mesh, that is mesh["replicate", "shard"]'
)


@dataclass(frozen=True, eq=False)
class Mesh:
    """The ranks that train a model together, by replica and shard."""

    rows: tuple[tuple[int, ...], ...]
    """By replica: the ranks that it is sharded over, by their number in the job."""
    shard_group: dist.ProcessGroup | None
    """Of this rank's row; None where that is this rank alone."""
    replicate_group: dist.ProcessGroup | None
    """Of this rank's column."""


def mesh_of(given: object) -> Mesh:
    """Return what a `torch.distributed.device_mesh.DeviceMesh` says; without names, dimensions are those of FSDP2.

    Raises:
        ConfigError: it is none, has other dimensions, or this process is not part of it.
    """
    if not isinstance(given, DeviceMesh):
        raise ConfigError(f"mesh is a {type(given).__name__}; pass a torch.distributed.device_mesh.DeviceMesh")
    names = given.mesh_dim_names or _DIMENSIONS[-given.ndim :]
    if len(names) != given.ndim or not set(names) <= set(_DIMENSIONS):
        raise ConfigError(f"mesh has {given.ndim} dimensions, {', '.join(names)}; {_NEXT}")
    if given.get_coordinate() is None:
        raise ConfigError("this process is not one of the ranks of mesh; pass it on its ranks only")
    sizes = dict(zip(names, given.mesh.shape, strict=True))
    table = given.mesh if names == _DIMENSIONS[-given.ndim :] else given.mesh.t()
    rows = table.reshape(sizes.get("replicate", 1), sizes.get("shard", 1)).tolist()
    groups = {name: given.get_group(index) for index, name in enumerate(names) if sizes[name] > 1}
    return Mesh(tuple(map(tuple, rows)), groups.get("shard"), groups.get("replicate"))


class Waiting(Protocol):
    """How all ranks wait for an exchange, see `Members`."""

    def __call__(self, label: str, *, is_own: bool = False) -> AbstractContextManager[None]: ...


class RankGroup:
    """Some of the ranks, which exchange with each other; what fails among them, all ranks fail with."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        in_ram: dist.ProcessGroup | None,
        elsewhere: dist.ProcessGroup | None,
        waiting: Waiting,
    ) -> None:
        """Exchange in RAM over one group, and on accelerators over another; see `Members`."""
        self.rank = rank
        self.size = size
        self.waiting = waiting
        self._in_ram = in_ram
        self._elsewhere = elsewhere

    def group(self, device: torch.device) -> dist.ProcessGroup:
        """Return the group to exchange chunks on a device over.

        Raises:
            StateError: this is one rank alone, or `close` was called.
        """
        group = self._in_ram if device.type == "cpu" else self._elsewhere
        if group is None or self._in_ram is None:
            raise StateError("there is no process group to exchange chunks over: this is one rank alone, or was closed")
        return group

    def close(self) -> None:
        """Give the groups back."""
        self._in_ram = self._elsewhere = None
