"""A gradient in its chunk as a tensor: what `.grad` of a managed parameter is once it has landed."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch

from chunkmem.errors import StateError
from chunkmem.nn.frames import in_backward
from chunkmem.nn.lazy_operators import run_operator
from chunkmem.nn.slot_tensor import SlotTensor

_aten = torch.ops.aten


class NoMemoryError(StateError, NotImplementedError):
    """The memory of a lazy gradient was asked for. Torch's own tensors without memory raise the latter."""


class LazyGradient(SlotTensor):
    """A view of one gradient, by default of all of it: shape, strides, a dtype and a device, and no memory (ADR 15).

    Operators that get one are run on its slot, wherever that is, and in-place ones change the slot; views of it are
    lazy too. What they return otherwise is an ordinary tensor. So `torch.nn.utils.clip_grad_norm_` works, and a
    gradient on HOST stays there.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.add_.Tensor and _is_accumulation(args, kwargs):
            lazy = args[0]
            lazy.source.require_current(lazy.life)
            lazy.source.owner.accumulate(lazy.source, args[1])
            return lazy
        return run_operator(func, args, kwargs or {})

    # Methods of torch's that look at memory without an operator.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        try:
            return repr(self.whole())
        except StateError as error:
            return f"LazyGradient({tuple(self.shape)}, dtype={self.dtype}: {error})"

    def __format__(self, spec: str) -> str:
        return format(self.whole(), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.whole())  # type: ignore[no-any-return]

    def __copy__(self) -> torch.Tensor:
        return self.detach()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.whole().__reduce_ex__(protocol)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
        return np.asarray(self.numpy(), *args, **kwargs)

    def numpy(self, *, force: bool = False) -> np.ndarray[Any, Any]:
        """Return a copy that cannot be written to: the gradient would not change with it."""
        copied = self.whole().numpy(force=force)
        copied.setflags(write=False)
        return copied

    def is_shared(self) -> bool:
        """Tell that no other process has its memory."""
        return False

    def tolist(self) -> Any:
        """Return the values."""
        return self.whole().tolist()

    @property
    def data(self) -> torch.Tensor:
        """The same gradient; what is assigned to it is copied."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape or value.dtype is not self.dtype:
            raise StateError(
                f"the gradient of {self.source.name} is {tuple(self.shape)} in {self.dtype} and cannot become "
                f"{tuple(value.shape)} in {value.dtype}; assign to .grad of the parameter what it can be"
            )
        if not (isinstance(value, LazyGradient) and value.life == self.life and value.is_all_of(self.source)):
            with torch.no_grad():
                self.copy_(value)

    def _no_memory(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NoMemoryError(
            f"the gradient of {self.source.name} is in a chunk that moves and has no address; use a copy, "
            "p.grad.clone(), or the real one inside manager.gather(p, grads=True)"
        )

    data_ptr = const_data_ptr = untyped_storage = storage = _typed_storage = _no_memory
    share_memory_ = __dlpack__ = apply_ = map_ = map2_ = as_subclass = _no_memory


def _is_accumulation(args: Any, kwargs: Any) -> bool:
    """Tell whether autograd adds a gradient to the one that is there: that has to land like the first one."""
    return (
        not kwargs
        and in_backward()
        and not torch.is_grad_enabled()
        and isinstance(args[0], LazyGradient)
        and isinstance(args[1], torch.Tensor)
        and args[1].shape == args[0].shape
        and args[0].is_all_of(args[0].source)
    )
