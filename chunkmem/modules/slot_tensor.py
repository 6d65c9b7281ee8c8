"""A tensor without memory that shows a gradient's slot, or a view of it."""

from __future__ import annotations

import torch

from chunkmem.modules.gradient_values import GradientSource
from chunkmem.runtime.device import runtime_mode


class SlotTensor(torch.Tensor):
    """Geometry, and where the memory is. What operators do with it is `LazyGradient`'s."""

    source: GradientSource
    life: int
    """Which of the source's gradients it shows."""
    is_whole: bool
    """It shows all of it, in its own order."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        source: GradientSource,
        life: int,
        *,
        form: tuple[torch.Size, tuple[int, ...], int] | None = None,
    ) -> SlotTensor:
        """Make one; `form` is the shape, strides and offset of a view, in the elements of the slot."""
        shape, stride, offset = (source.shape, source.stride, 0) if form is None else form
        made: SlotTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=stride, storage_offset=offset, dtype=source.dtype, device=source.device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)  # else what asks for its address in C++ gets 0
        made.source = source
        made.life = life
        made.is_whole = form is None or form == (source.shape, source.stride, 0)
        return made

    def is_all_of(self, source: GradientSource) -> bool:
        """Tell whether it shows the present gradient of `source`, and not a part of it or another order."""
        return self.is_whole and self.source is source and self.life == source.life

    def slots(self, *, writing: bool, overwriting: bool = False) -> list[torch.Tensor]:
        """Return the memory it shows; see `GradientValues.locate`, which says what is raised, too."""
        self.source.require_current(self.life)
        found = self.source.owner.locate(self.source, writing=writing, overwriting=overwriting and self.is_whole)
        shape, stride, offset = self.shape, self.stride(), self.storage_offset()
        with runtime_mode():
            return [torch.as_strided(slot, shape, stride, slot.storage_offset() + offset) for slot in found]

    def whole(self) -> torch.Tensor:
        """Return an ordinary copy on the parameter's device. Raises what `slots` does."""
        (slot,) = self.slots(writing=False)
        with runtime_mode():
            return slot.to(self.device, copy=True)
