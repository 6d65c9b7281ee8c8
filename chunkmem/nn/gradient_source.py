"""Where the values of one parameter's gradient are, and whether there are any."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Protocol

import torch

from chunkmem.errors import StateError
from chunkmem.nn.binding import ManagedParameter
from chunkmem.runtime.device import runtime_mode


class GradientState(Enum):
    """What `.grad` stands for. Memory for values exists in LIVE alone."""

    NONE = "none"
    """There is no gradient: before the first backward, or after `zero_grad()`."""
    LIVE = "live"
    """It is in its slot; over ranks it may have gone into a mean."""
    CONSUMED = "consumed"
    """`step()` has used it up. Plain PyTorch would still have it."""
    OVERDUE = "overdue"
    """CONSUMED, and a backward has added to it: plain PyTorch would have the sum, and here it cannot be known."""
    ZEROED = "zeroed"
    """CONSUMED, and set to zero."""


class GradientOwner(Protocol):
    """The owner of the slots."""

    def locate(self, source: GradientSource, *, writing: bool, overwriting: bool = False) -> list[torch.Tensor]:
        """Return the slot where it is; with `writing`, on every tier that has it, the newest first.

        With `overwriting`, values that were consumed are not missed.

        Raises:
            StateError: there are no values.
        """
        ...

    @property
    def may_page_out(self) -> bool:
        """Tell whether locating one gradient may move others out of memory, to DISK."""
        ...

    def staying(self, source: GradientSource) -> AbstractContextManager[None]:
        """Inside, a gradient stays where it was located."""
        ...

    shows_means: bool
    """`.grad` stands for the mean over ranks, as it does below `DistributedDataParallel`."""

    is_of_stage: bool
    """Other ranks have the gradients of other pipeline stages."""

    def norm_over_ranks(self, source: GradientSource, order: float) -> float:
        """Return the norm of the mean over ranks; all of them ask for it."""
        ...

    def slots_over_ranks(self, sources: Sequence[GradientSource], factor: float) -> list[list[torch.Tensor]]:
        """Return for each gradient where its mean is on this rank; all ranks multiply by `factor`."""
        ...

    def accumulate(self, source: GradientSource, grad: torch.Tensor) -> None:
        """Add what autograd has found."""
        ...

    def zero(self, source: GradientSource) -> None:
        """Set the gradient to zero."""
        ...

    def require_present(self, tensor: torch.Tensor) -> None:
        """Raise if `tensor` is a managed parameter whose chunk is away.

        Raises:
            StateError: what is written to it would be lost.
        """
        ...


class GradientSource:
    """One parameter's gradient. It refers to no parameter: Python does not see the cycle through `.grad`."""

    __slots__ = (
        "_owner", "device", "dtype", "group", "life", "name", "position", "shape", "state", "stride"
    )  # fmt: skip

    def __init__(self, managed: ManagedParameter, owner: GradientOwner) -> None:
        self._owner = weakref.ref(owner)
        self.name = managed.name
        self.group = managed.group
        self.position = managed.position
        self.shape = managed.shape
        self.stride = managed.stride
        self.dtype = managed.placeholder.dtype
        self.device = managed.placeholder.device
        self.state = GradientState.NONE
        self.life = 0
        """Number of the gradient that `.grad` shows; what shows an earlier one has lost its values."""

    @property
    def owner(self) -> GradientOwner:
        """The owner of the slot.

        Raises:
            StateError: there is nobody any more.
        """
        owner = self._owner()
        if owner is None:
            raise StateError(f"the gradient of {self.name}: its manager is gone; keep the manager, or clone() before")
        return owner

    def zeros(self) -> torch.Tensor:
        """Return an ordinary gradient of zeros."""
        with runtime_mode():
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()

    def require_current(self, life: int) -> None:
        """Raise if the gradient that was number `life` is gone.

        Raises:
            StateError: another one has taken its place.
        """
        if life != self.life:
            raise StateError(
                f"this gradient of {self.name} is an earlier one: zero_grad() or an assignment to .grad, and another "
                "backward, have taken its memory; keep a copy, p.grad.clone(), to have it longer"
            )

    def lacks_values(self) -> StateError:
        """Return the error for what needs the values of a gradient that is not there."""
        if self.state is GradientState.CONSUMED:
            return StateError(
                f"the gradient of {self.name} was consumed by step(), or inside backward by an optimizer with "
                "in_backward=True, and has no values any more; read it, or take p.grad.clone(), between backward and "
                "step(), and call optimizer.zero_grad() before the next backward"
            )
        if self.state is GradientState.OVERDUE:
            return self.is_overdue()
        return StateError(
            f"the gradient of {self.name} was discarded by zero_grad() or by an assignment to .grad; keep a copy, "
            "p.grad.clone(), to have it longer"
        )

    def is_overdue(self) -> StateError:
        """Return the error for a loop without `zero_grad()`."""
        return StateError(
            f"the gradient of {self.name} was consumed by step(), and a backward has added another since without "
            "zero_grad() in between: plain PyTorch would have the sum of both, and the first is gone. Call "
            "optimizer.zero_grad() after each step(); to accumulate, call step() after the last backward"
        )
