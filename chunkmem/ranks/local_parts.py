"""What one rank has of a parameter that is a DTensor."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch


def is_dtensor(tensor: Any) -> TypeGuard[Any]:
    """Tell whether it is one; `torch.distributed.tensor` is imported by those alone who make some."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@dataclass(frozen=True, eq=False)
class LocalPart:
    """What one rank has of a parameter."""

    name: str
    mesh: Any
    """`DeviceMesh` of the ranks that have parts of it."""
    placements: tuple[Any, ...]
    shape: torch.Size
    """Of the whole parameter."""
    stride: tuple[int, ...]
    start: tuple[int, ...]
    """Offsets of the part in it."""
    local_shape: torch.Size
    is_counted: bool
    """Of the ranks with the same part, this one is the first: it counts the part in norms, and saves it."""

    @staticmethod
    def of(param: Any, name: str) -> LocalPart:
        """Describe a DTensor."""
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        mesh, placements = param.device_mesh, param.placements
        _, start = compute_local_shape_and_global_offset(param.shape, mesh, placements)
        at = zip(mesh.get_coordinate(), placements, strict=True)
        is_counted = all(coordinate == 0 for coordinate, placement in at if placement.is_replicate())
        shape = param.to_local().shape
        return LocalPart(name, mesh, placements, param.shape, param.stride(), tuple(start), shape, is_counted)

    def whole(self, local: torch.Tensor) -> Any:
        """Return a DTensor of the local part, which autograd follows."""
        from torch.distributed.tensor import DTensor

        made = (self.mesh, self.placements)
        return DTensor.from_local(local, *made, run_check=False, shape=self.shape, stride=self.stride)

    def local(self, value: Any) -> Any:
        """Return this rank's part of a value of the whole: a DTensor, or a tensor that each rank has whole.

        What is of another shape is returned as it is.
        """
        if not isinstance(value, torch.Tensor) or value.shape != self.shape:
            return value
        if is_dtensor(value):
            if value.device_mesh == self.mesh:
                return value.redistribute(self.mesh, self.placements).to_local()
            value = value.full_tensor()
        ends = (at + size for at, size in zip(self.start, self.local_shape, strict=True))
        return value[tuple(slice(at, end) for at, end in zip(self.start, ends, strict=True))]
