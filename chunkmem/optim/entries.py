"""What an optimizer keeps of one parameter, as `optimizer.state[param]` has it: its form, its record, what fits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._pytree import tree_map_only

from chunkmem.modules.binding import dense_stride
from chunkmem.runtime.device import runtime_mode

Entry = dict[str, Any]
"""What `state[param]` of an optimizer has."""
NO_UPDATES: Final = torch.zeros((), dtype=torch.float32, device="cpu")
FIRST_UPDATE: Final = NO_UPDATES + 1


@dataclass(frozen=True)
class TensorForm:
    """Shape, strides and dtype of a parameter or of a state."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorForm:
        """Return the form of a tensor, or of a dense one in its place."""
        return cls(tuple(tensor.shape), dense_stride(tensor), tensor.dtype)

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """Return a tensor of this form, contents undefined."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class NumberForm:
    """A value of a state that has no elements: a number in a 0-dim tensor, or no tensor."""

    dtype: torch.dtype | None
    """None: it is no tensor."""
    follows: bool
    """It is a tensor on the device of the parameter."""


@dataclass(frozen=True)
class EntryForm:
    """What `state[param]` has after an update."""

    keys: tuple[str, ...]
    """In its order."""
    first_keys: tuple[str, ...]
    """Those that it has after the first one already."""
    tensors: Mapping[str, TensorForm]
    """Those with elements."""
    numbers: Mapping[str, NumberForm]
    """The rest."""
    is_there: bool = True
    """It has an entry at all, if only an empty one."""

    def zeros(self, tensors: Mapping[str, Any], *, device: torch.device | str) -> Entry:
        """Return an entry full of zeros for a parameter on a device; `tensors` are those with elements."""
        entry: Entry = {}
        for key in self.keys:
            number = self.numbers.get(key)
            if number is None:
                entry[key] = tensors[key]
            elif number.dtype is None:
                entry[key] = 0
            else:
                entry[key] = torch.zeros((), dtype=number.dtype, device=device if number.follows else "cpu")
        return entry

    def problems(self, state: Mapping[str, Any], *, is_whole: bool) -> list[str]:
        """Return what is wrong with the values of a parameter's state, in words that follow its name.

        Args:
            state: some of it, or all if it `is_whole`.
            is_whole: keys may be missing, too.
        """
        found = []
        for key in self.first_keys:
            if is_whole and key not in state:
                found.append(f"{key} is not a number" if key in self.numbers else f"{key} is missing")
        for key, value in state.items():
            expected, number = self.tensors.get(key), self.numbers.get(key)
            is_tensor = isinstance(value, torch.Tensor)
            is_number = isinstance(value, int | float) or (is_tensor and value.numel() == 1)
            if expected is not None and not is_tensor:
                found.append(f"{key} is a {type(value).__name__}, not a tensor")
            elif expected is not None and tuple(value.shape) != expected.shape:
                found.append(f"{key} is {tuple(value.shape)} instead of {expected.shape}")
            elif expected is None and is_tensor and value.dim() > 0 and not (number is not None and is_number):
                kept = ", ".join(self.keys) or "none"
                found.append(f"{key} {tuple(value.shape)} is no state of its class, which keeps {kept}")
            elif number is not None and number.dtype is not None and not is_number:
                found.append(f"{key} is not a number")
            elif not is_tensor and not can_be_kept(value):
                found.append(f"{key} is a {type(value).__name__}, which no state of its class is")
        return found

    def number(self, key: str, value: Any) -> Any:
        """Return a value that has no elements as it is kept: on the CPU; as it is if the key is not known."""
        form = self.numbers.get(key)
        if isinstance(value, torch.Tensor):
            return value.item() if form is not None and form.dtype is None else value.to("cpu", copy=True).reshape(())
        return value if form is None or form.dtype is None else torch.tensor(value, dtype=form.dtype, device="cpu")


@dataclass(eq=False)
class Record:
    """The state of one managed parameter, on the rank that owns it."""

    count: torch.Tensor = NO_UPDATES
    """The number of its updates: 0-dim float32, on the CPU."""
    entry: Entry | None = None
    """By key the role of the chunk that has it, or a value without elements, where the last update was. None: it has
    none. The number of updates is not in it."""
    is_new: bool = True
    """The class has not made an entry so far; if there is one, it is there to be loaded into, full of zeros."""

    def become(self, other: Record) -> None:
        """Have what an update has made of the entry."""
        self.entry, self.is_new = other.entry, other.is_new


class BlankEntry(Entry):
    """The same of a parameter outside of chunks: it is there to be loaded into."""


def can_be_kept(value: object) -> bool:
    """Tell whether chunks and records can hold a value of a state."""
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided  # type: ignore[attr-defined]
    return is_plain or value is None or isinstance(value, bool | int | float | str)


def copied_to_cpu(value: Any) -> Any:
    """Return a value with copies on the CPU of the tensors in it."""
    with runtime_mode():
        return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), value)
