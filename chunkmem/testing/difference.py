"""The first thing that is not the same after two trainings, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from chunkmem.testing.training import TrainingResult


@dataclass(frozen=True)
class Difference:
    """The first step and tensor that are not the same, and by how much. `str()` is one line."""

    step: int
    """Counted from 0."""
    kind: str
    """``loss``, ``buffer``, ``weight`` or ``optimizer state``."""
    name: str
    """Of the tensor, such as ``exp_avg of blocks.0.weight``; of a loss, empty."""
    detail: str
    """Both values of a loss; of other tensors, how many elements differ, and by how much at most."""
    is_nan: bool
    """The second side has NaN where the first one has numbers."""
    num_others: int = 0
    """Tensors besides this one that differ after the same step."""

    def __str__(self) -> str:
        others = f"; {self.num_others} other tensors differ after that step" if self.num_others else ""
        return f"step {self.step}, {self.kind}{f' {self.name}' if self.name else ''}: {self.detail}{others}"


Train = Callable[[int], TrainingResult]
"""Trains so many steps from the start."""


def first_difference(first: TrainingResult, second: TrainingResult, *, names: tuple[str, str]) -> Difference | None:
    """Compare losses, then what was left after the last step; None if all bits are equal.

    `names` are what the two sides are called.
    """
    for step, (left, right) in enumerate(zip(first.losses, second.losses, strict=True)):
        if not same_bits(left, right):
            detail = f"{left.item()} in {names[0]}, {right.item()} in {names[1]}"
            return Difference(step, "loss", "", detail, is_nan=_turned_nan(left, right))
    found = list(_differing(first, second))
    if not found:
        return None
    kind, name, one, other = found[0]
    return Difference(
        len(first.losses) - 1,
        kind,
        name,
        _detail(one, other, names),
        is_nan=one is not None and other is not None and _turned_nan(one, other),
        num_others=len(found) - 1,
    )


def located(found: Difference, first: Train, second: Train, *, steps: int, names: tuple[str, str]) -> Difference:
    """Return where two trainings of `steps` steps begin to differ; `found` is what is known of them.

    What a training leaves is looked at only when it is over: reading the weights of a model in chunks waits for all
    copies, which would hide that one of them is not waited for. So shorter ones are run until one differs.
    """
    for num in range(1, found.step + 1 if found.kind == "loss" else steps):
        earlier = first_difference(first(num), second(num), names=names)
        if earlier is not None:
            return earlier
    return found


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Tell whether two tensors have the same dtype, shape and bits; one NaN is as good as another."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return not bool(_unequal(left, right).any())


def _unequal(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return which elements differ, one flag each."""
    as_bytes = [tensor.contiguous().reshape(-1, 1).view(torch.uint8) for tensor in (left, right)]
    unequal = (as_bytes[0] != as_bytes[1]).any(1)
    if left.is_floating_point() or left.is_complex():
        unequal &= ~(left.isnan() & right.isnan()).reshape(-1)
    return unequal


def _turned_nan(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return bool((right.isnan() & ~left.isnan()).any())


def _differing(
    first: TrainingResult, second: TrainingResult
) -> Iterator[tuple[str, str, torch.Tensor | None, torch.Tensor | None]]:
    tensors: tuple[tuple[str, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], ...] = (
        ("buffer", first.buffers, second.buffers),
        ("weight", first.weights, second.weights),
        ("optimizer state", first.states, second.states),
    )
    for kind, lefts, rights in tensors:
        for name in dict.fromkeys((*lefts, *rights)):
            left, right = lefts.get(name), rights.get(name)
            if left is None or right is None or not same_bits(left, right):
                yield kind, name, left, right


def _detail(one: torch.Tensor | None, other: torch.Tensor | None, names: tuple[str, str]) -> str:
    if one is None or other is None:
        return f"only {names[one is None]} has it"
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        forms = [f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (one, other)]
        return f"{forms[0]} in {names[0]}, {forms[1]} in {names[1]}"
    num = f"{int(_unequal(one, other).sum())} of {one.numel()} elements differ"
    if _turned_nan(one, other):
        return f"{num}, and some are nan in {names[1]}"
    wide = torch.complex128 if one.is_complex() else torch.float64
    gap = (one.to(wide) - other.to(wide)).abs().nan_to_num(0.0).max().item()
    return f"{num}, by up to {gap:.3g}"
