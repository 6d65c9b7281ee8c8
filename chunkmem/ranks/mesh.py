"""Ranks as a mesh: each row has a replica of the weights, sharded over the row; a column has the same shard of each.

With pipeline stages each stage has rows and columns of its own. So has each rank of a tensor-parallel group: the others
of it have other parts of the same parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from chunkmem.data.errors import ConfigError

_DATA_PARALLEL = ("replicate", "shard")
_DIMENSIONS = ("stage", *_DATA_PARALLEL)
_TENSOR_PARALLEL = "tp"
_NEXT = (
    'pass a mesh with the dimensions "replicate" and "shard", or one of them, as init_device_mesh("cuda", (2, 4), '
    'mesh_dim_names=("replicate", "shard")) returns; of a larger mesh, that is mesh["replicate", "shard"]. A dimension '
    '"stage" in addition, or alone, has a pipeline stage on each index, and "tp" is that of tensor parallelism'
)


@dataclass(frozen=True, eq=False)
class Mesh:
    """The ranks that train a model together, by replica and shard; with pipeline stages, those of this rank's stage."""

    rows: tuple[tuple[int, ...], ...]
    """By replica: the ranks it is sharded over, numbered in the job."""
    shard_group: dist.ProcessGroup | None = None
    """Group of this rank's row; None: the row is this rank alone."""
    replicate_group: dist.ProcessGroup | None = None
    """Group of this rank's column; None: the column is this rank alone."""
    stage_group: dist.ProcessGroup | None = None
    """Of the ranks, one of each pipeline stage, that exchange activations with this one; None without stages."""
    part_group: dist.ProcessGroup | None = None
    """Of the ranks that have the other parts of this one's parameters; None without tensor parallelism."""


def mesh_of(given: object, *, process_group: object = None) -> Mesh | None:
    """Return what a `torch.distributed.device_mesh.DeviceMesh` says; without names, dimensions are those of FSDP2.

    Args:
        given: None is no mesh.
        process_group: says what the ranks are in place of a mesh.

    Raises:
        ConfigError: it is no mesh, has other dimensions, or this process is not part of it; or both were given.
    """
    if given is None:
        return None
    if process_group is not None:
        raise ConfigError("process_group and mesh were given, which both say what the ranks are; pass one of them")
    if not isinstance(given, DeviceMesh):
        raise ConfigError(f"mesh is a {type(given).__name__}; pass a torch.distributed.device_mesh.DeviceMesh")
    names = _names(given)
    if len(names) != given.ndim or not set(names) <= {*_DIMENSIONS, _TENSOR_PARALLEL}:
        named = "without names" if given.mesh_dim_names is None else ", ".join(names)
        raise ConfigError(f"mesh has {given.ndim} dimensions, {named}; {_NEXT}")
    coordinate = given.get_coordinate()
    if coordinate is None:
        raise ConfigError("this process is not one of the ranks of mesh; pass it on its ranks only")
    own = dict(zip(names, coordinate, strict=True))
    table = _table(given)
    rows = table[own.get("stage", 0)].tolist()
    stages = table[:, own.get("replicate", 0), own.get("shard", 0)].tolist()
    # Process groups count their ranks in ascending order, whatever a mesh says.
    for members in (*rows, *map(list, zip(*rows, strict=True)), stages):
        if members != sorted(members):
            raise ConfigError(f"mesh has ranks {members} in one dimension; list them in ascending order")
    groups = {name: given.get_group(index) for index, name in enumerate(names) if given.size(index) > 1}
    return Mesh(
        tuple(map(tuple, rows)), *(groups.get(name) for name in ("shard", "replicate", "stage", _TENSOR_PARALLEL))
    )


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or _DATA_PARALLEL[-mesh.ndim :]


def _table(mesh: DeviceMesh) -> torch.Tensor:
    """Return the ranks of a mesh by stage, replica and shard: those with this rank's part of the parameters."""
    names, ranks, own = list(_names(mesh)), mesh.mesh, mesh.get_coordinate()
    if _TENSOR_PARALLEL in names:
        at = names.index(_TENSOR_PARALLEL)
        ranks = ranks.select(at, 0 if own is None else own[at])
        names.remove(_TENSOR_PARALLEL)
    sizes = dict(zip(names, ranks.shape, strict=True))
    order = sorted(range(len(names)), key=lambda index: _DIMENSIONS.index(names[index]))
    return ranks.permute(order).reshape([sizes.get(name, 1) for name in _DIMENSIONS])


def ranks_by_stage(given: object, num_stages: int) -> torch.Tensor:
    """Return the ranks of a mesh, divided into another number of pipeline stages.

    Replicas keep their ranks. Those of each are divided in ascending order, so that a stage gets neighbours.

    Args:
        given: what `mesh_of` takes.
        num_stages: at least 1.

    Returns:
        Ranks by stage, replica and shard.

    Raises:
        ConfigError: there is no mesh, some ranks of the job are not in it, or they cannot be divided so.
    """
    if not isinstance(given, DeviceMesh):
        raise ConfigError(
            "only the ranks of a mesh can be divided into another number of stages: make the manager with "
            "ChunkManager(config, mesh=init_device_mesh(...)), with the dimensions " + ", ".join(_DIMENSIONS)
        )
    if _TENSOR_PARALLEL in _names(given):
        raise ConfigError("with tensor parallelism, stages keep their number: the mesh has the dimension tp")
    table = _table(given)
    stages, replicas, shards = table.shape
    width = stages * shards
    if width % num_stages:
        possible = ", ".join(str(number) for number in range(1, width + 1) if width % number == 0)
        raise ConfigError(
            f"{stages} x {shards} ranks (stages x shards) cannot become {num_stages} stages: {width} ranks divide into "
            f"{possible}"
        )
    if given.mesh.numel() != dist.get_world_size():
        raise ConfigError(
            f"the mesh has {given.mesh.numel()} of {dist.get_world_size()} ranks; only all ranks of a job together can "
            "be divided into another number of stages"
        )
    by_replica = table.permute(1, 0, 2).reshape(replicas, width).sort(dim=1).values
    return by_replica.reshape(replicas, num_stages, width // num_stages).permute(1, 0, 2).contiguous()


def with_stages(given: object, num_stages: int) -> DeviceMesh:
    """Return a mesh of the same ranks with another number of pipeline stages, which all ranks of the job make.

    Raises what `ranks_by_stage` does.
    """
    table = ranks_by_stage(given, num_stages)
    assert isinstance(given, DeviceMesh)
    return DeviceMesh(given.device_type, table, mesh_dim_names=_DIMENSIONS)


def groups_of(mesh: object) -> list[dist.ProcessGroup]:
    """Return the process groups that were made for a mesh, which torch keeps, with threads, until `end_groups`."""
    assert isinstance(mesh, DeviceMesh)
    found = [mesh.get_group(index) for index in range(mesh.ndim)]
    return [group for group in found if group is not dist.group.WORLD]


def end_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """End process groups that nothing uses any more. All of their ranks call it."""
    for group in groups:
        with contextlib.suppress(ValueError):  # the user has ended all of them
            dist.destroy_process_group(group)
