"""Parameters bound to their chunks: a slot view while the chunk is on DEVICE, a NaN placeholder while it is away."""

from __future__ import annotations

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false

from chunkmem.errors import StateError
from chunkmem.layout.spec import Slot
from chunkmem.runtime.pool import Slab
from chunkmem.runtime.storage import ChunkStorage


class ManagedParameter:
    """A Parameter the user made, and where its values are. The Parameter object itself is never replaced."""

    __slots__ = ("bound", "gradient_hook", "group", "name", "param", "placeholder", "position",
                 "shape", "slot", "stride", "version", "view")  # fmt: skip

    def __init__(self, param: torch.nn.Parameter, name: str, slot: Slot, position: int, bound: BoundChunk) -> None:
        self.param = param
        self.name = name
        self.slot = slot
        self.position = position
        """Index among the slots of its group."""
        self.group = slot.group
        self.bound = bound
        self.shape = param.shape
        self.stride = dense_stride(param)
        self.view: torch.Tensor | None = None
        """The slot on DEVICE in the parameter's shape; made once, valid while the chunk is attached."""
        self.placeholder = _placeholder(param, bound.device)
        self.version = param._version
        self.gradient_hook: torch.utils.hooks.RemovableHandle | None = None


class BoundChunk:
    """The DEVICE side of a PARAM chunk: its storage and the parameters that are views into it."""

    def __init__(self, storage: ChunkStorage, *, device: torch.device) -> None:
        self.device = device
        self._storage = storage
        self._slab: Slab | None = None
        self.parameters: list[ManagedParameter] = []
        self.is_bound = False
        self._singles: list[ManagedParameter] = []
        """Parameters of one element, whose placeholders cannot refuse a write."""

    @property
    def storage_id(self) -> int:
        """Identity of the chunk's storage, the same for life."""
        return int(self._storage.storage._cdata)

    def add(self, managed: ManagedParameter) -> None:
        """Take a parameter in, in the order of the group's slots."""
        self.parameters.append(managed)
        if managed.shape.numel() == 1:
            self._singles.append(managed)

    def attach(self, slab: Slab) -> torch.Tensor:
        """Take the slab's memory; see `ChunkHome`."""
        self._storage.attach(slab.bytes.untyped_storage())
        self._slab = slab
        return self._storage.flat

    def bind(self) -> None:
        """Point the parameters at their slots."""
        if self.is_bound:
            return
        flat = self._storage.flat
        for managed in self.parameters:
            if managed.view is None:
                managed.view = torch.as_strided(flat, managed.shape, managed.stride, managed.slot.offset)
            managed.param.data = managed.view
            managed.version = managed.param._version
        self.is_bound = True

    def detach(self) -> None:
        """Point the parameters at their placeholders and give the memory back to its slab."""
        for managed in self.parameters if self.is_bound else ():
            managed.param.data = managed.placeholder
            managed.version = managed.param._version
        self.is_bound = False
        assert self._slab is not None
        self._storage.detach()
        self._slab = None

    def take_written(self) -> bool:
        """Tell, once, whether a bound parameter was written to: autograd's version counter moved."""
        written = False
        if self.is_bound:
            for managed in self.parameters:
                version = managed.param._version
                if version != managed.version:
                    managed.version = version
                    written = True
        return written

    def take_written_away(self) -> list[tuple[int, torch.Tensor]]:
        """Return, once, (position in the group, value) of what was written to placeholders of one element."""
        if self.is_bound or not self._singles:
            return []
        written = []
        for managed in self._singles:
            if managed.param._version != managed.version:
                managed.version = managed.param._version
                written.append((managed.position, managed.placeholder.clone()))
                managed.placeholder.fill_(float("nan") if managed.placeholder.is_floating_point() else 0)
        return written

    def check(self) -> None:
        """Raise if a parameter no longer stands on its slot or its placeholder.

        Raises:
            StateError: something outside chunkmem gave a parameter other memory.
        """
        for managed in self.parameters:
            own = managed.view if self.is_bound else managed.placeholder
            assert own is not None
            if managed.param.data_ptr() != own.data_ptr():
                raise StateError(
                    f"parameter {managed.name} {tuple(managed.shape)} was given other memory after it was packed (by "
                    "assigning .data, or by .to() on the parameter itself); write to it in place inside "
                    "manager.gather(), or load values with manager.load_state_dict()"
                )


def dense_stride(param: torch.Tensor) -> tuple[int, ...]:
    """Return the strides a parameter has in its slot.

    Keep the memory order (channels_last, say) of a dense parameter: torch's kernels choose by it."""
    if param.is_contiguous() or not is_non_overlapping_and_dense_or_false(param):
        return torch.empty(param.shape, device="meta").stride()
    return param.stride()


def _placeholder(param: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the parameter's shape that takes one element, reads as NaN and refuses writes.

    It refuses them because all its elements are one. A parameter of a single element has nothing to overlap with:
    what is written to its placeholder is carried over to the chunk (`BoundChunk.take_written_away`).
    """
    fill = float("nan") if param.is_floating_point() or param.is_complex() else 0
    with torch.inference_mode(False), torch.no_grad():
        return torch.full((), fill, dtype=param.dtype, device=device).expand(param.shape)
