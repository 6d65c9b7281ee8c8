"""Parameters bound to their chunks: a slot view while the chunk is on DEVICE, a NaN placeholder while it is away."""

from __future__ import annotations

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false

from chunkmem.errors import StateError
from chunkmem.layout.spec import Slot
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.pool import Slab
from chunkmem.runtime.storage import ChunkStorage


class ManagedParameter:
    """A Parameter the user made, and where its values are. The Parameter object itself is never replaced."""

    __slots__ = ("_blank", "bound", "built_dtype", "gradient_hook", "group", "name", "param", "placeholder", "position",
                 "shape", "slot", "stride", "version", "view")  # fmt: skip

    def __init__(
        self,
        param: torch.nn.Parameter,
        name: str,
        slot: Slot,
        position: int,
        bound: BoundChunk,
        *,
        stride: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Describe a parameter in `position` of its group; None: its strides and its dtype are what it has now."""
        self.param = param
        self.name = name
        self.slot = slot
        self.position = position
        """Index among the slots of its group."""
        self.group = slot.group
        self.bound = bound
        self.built_dtype = param.dtype
        """What `state_dict` has it in."""
        self.shape = param.shape
        self.stride = dense_stride(param) if stride is None else stride
        self.view: torch.Tensor | None = None
        """The slot on DEVICE in the parameter's shape; made once, valid while the chunk is attached."""
        self._blank = blank(param.dtype if dtype is None else dtype, bound.device)
        self.placeholder = self._blank.expand(param.shape)
        """Reads as NaN and refuses most writes: all its elements are one. What it lets through, `clear` notices."""
        self.version = param._version
        self.gradient_hook: torch.utils.hooks.RemovableHandle | None = None

    def point(self, target: torch.Tensor, *, at: torch.Tensor) -> None:
        """Move the parameter from `at` to `target`; one that stands elsewhere is left for `BoundChunk.check`."""
        if self.param.is_set_to(at):
            self.param.data = target
            self.version = self.param._version

    def clear(self) -> torch.Tensor | None:
        """Make the placeholder NaN again; return what was written to it while the parameter was away, None if nothing.

        Autograd's version counter tells. Writes through `.data` and numpy pass it by, so the value is looked at too;
        not on an accelerator, where that would be to wait for it.
        """
        if self.param._version == self.version and (self._blank.device.type != "cpu" or _is_blank(self._blank)):
            return None
        written = self._blank.clone()
        self._blank.fill_(_blank_value(self._blank))
        self.version = self.param._version
        return written


class BoundChunk:
    """The DEVICE side of a PARAM chunk: its storage and the parameters that are views into it."""

    def __init__(self, storage: ChunkStorage, *, device: torch.device) -> None:
        self.device = device
        self._storage = storage
        self._slab: Slab | None = None
        self.parameters: list[ManagedParameter] = []
        self.is_bound = False
        self._carried: list[tuple[int, torch.Tensor]] = []
        """(position, value) of what parameters of one element were set to while they were away."""
        self._lost: dict[str, None] = {}
        """Names of parameters that were written to while they were away in a way that cannot be carried over."""

    @property
    def storage_id(self) -> int:
        """Identity of the chunk's storage, the same for life."""
        return int(self._storage.storage._cdata)

    def add(self, managed: ManagedParameter) -> None:
        """Take a parameter in, in the order of the group's slots."""
        self.parameters.append(managed)

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
            managed.point(managed.view, at=managed.placeholder)
        self.is_bound = True

    def detach(self) -> None:
        """Point the parameters at their placeholders and give the memory back to its slab."""
        for managed in self.parameters if self.is_bound else ():
            assert managed.view is not None
            managed.point(managed.placeholder, at=managed.view)
        self.is_bound = False
        assert self._slab is not None
        self._storage.detach()
        self._slab = None

    def is_held(self, *, besides: int) -> bool:
        """Tell whether a graph, or a tensor that is not ours, may go on using the memory of the bound parameters.

        A graph holds a parameter itself or a view of it; everything else (`detach()`, numpy) holds the storage.
        `besides` is the number of views that the caller knows of.
        """
        ours = 2 + len(self.parameters) + sum(managed.view is not None for managed in self.parameters) + besides
        held = torch._C._storage_Use_Count(self.storage_id) > ours
        return held or any(managed.param._use_count() > 1 for managed in self.parameters)  # type: ignore[attr-defined]

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
        """Return, once, (position in the group, value) of what parameters of one element were set to while away."""
        self._look_over_placeholders()
        carried, self._carried = self._carried, []
        return carried

    def _look_over_placeholders(self) -> None:
        if self.is_bound:
            return
        with runtime_mode():
            for managed in self.parameters:
                written = managed.clear()
                if written is None or managed.shape.numel() == 0:
                    continue
                if managed.shape.numel() == 1 and _is_number(written):
                    self._carried.append((managed.position, written.reshape(managed.shape)))
                else:
                    # `p[0] = 1` leaves the same in a placeholder as `p.fill_(1)`, and `p.add_(1)` leaves it NaN.
                    self._lost[f"{managed.name} {tuple(managed.shape)}"] = None

    def check(self) -> None:
        """Raise, once, if a parameter no longer stands on its slot or its placeholder, or was written to while away.

        It is put back before that, with the values it had.

        Raises:
            StateError: something outside chunkmem gave a parameter other memory, or values that had nowhere to go.
        """
        self._look_over_placeholders()
        strayed = []
        for managed in self.parameters:
            own = managed.view if self.is_bound else managed.placeholder
            assert own is not None
            if not managed.param.is_set_to(own):
                with runtime_mode():
                    managed.param.data = own
                managed.version = managed.param._version
                strayed.append(f"{managed.name} {tuple(managed.shape)}")
        lost, self._lost = list(self._lost), {}
        if strayed:
            raise _not_kept(
                strayed,
                "given other memory after it was packed (by assigning .data, or by .to() on the parameter itself)",
            )
        if lost:
            raise _not_kept(lost, "written to while it was not on DEVICE, and the values are lost")


def _not_kept(names: list[str], deed: str) -> StateError:
    others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return StateError(
        f"parameter {names[0]}{others} was {deed}; write to it in place inside manager.gather(), or load values with "
        "manager.load_state_dict()"
    )


def dense_stride(param: torch.Tensor) -> tuple[int, ...]:
    """Return the strides a parameter has in its slot.

    Keep the memory order (channels_last, say) of a dense parameter: torch's kernels choose by it."""
    if param.is_contiguous() or not is_non_overlapping_and_dense_or_false(param):
        return torch.empty(param.shape, device="meta").stride()
    return param.stride()


def blank(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the one element of a placeholder: NaN, or 0 of what has none."""
    with runtime_mode():
        element = torch.empty((), dtype=dtype, device=device)
        return element.fill_(_blank_value(element))


def _blank_value(blank: torch.Tensor) -> float:
    return float("nan") if blank.is_floating_point() or blank.is_complex() else 0


def _is_blank(blank: torch.Tensor) -> bool:
    return not _is_number(blank) if blank.is_floating_point() or blank.is_complex() else not blank.item()


def _is_number(element: torch.Tensor) -> bool:
    """Tell whether a value was set as such; one computed from the placeholder is NaN, which integers cannot show."""
    value = element.item()
    return (element.is_floating_point() or element.is_complex()) and bool(value == value)
