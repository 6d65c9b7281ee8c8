"""A batch in parts of about equal size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from chunkmem.data.errors import StateError


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What the first block and the loss function are given for a part of the batch."""

    inputs: Any
    target: Any
    divisor: float | None
    """Its mean loss divided by this adds up, over all parts, to the mean over the batch; None: no loss is wanted."""
    form: tuple[object, ...]
    """Shapes and dtypes of its tensors, and its other values."""
    num_samples: int
    is_last: bool
    """This is the batch's last micro-batch."""


def split(inputs: Any, target: Any, *, num: int) -> list[MicroBatch]:
    """Split the tensors of a batch along their first dimension; see `lengths` for how.

    Numbers, strings and tensors without dimensions are given to each part as they are.

    Args:
        inputs: a tensor, or tuples, lists and dicts of tensors.
        target: likewise; None: there is none.
        num: how many parts there are, if there are as many samples.

    Raises:
        StateError: tensors have first dimensions that differ, there is nothing to be split, or an array of numpy.
    """
    keyed, spec = tree_flatten_with_path((inputs, target))
    for path, leaf in keyed:
        if isinstance(leaf, np.ndarray):
            raise StateError(f"pipe.step(): {_named(path)} is a numpy.ndarray; give torch.from_numpy() of it")
    sizes = {_named(path): leaf.shape[0] for path, leaf in keyed if isinstance(leaf, torch.Tensor) and leaf.ndim}
    if not sizes or not next(iter(sizes.values())):
        raise StateError("pipe.step() was given no tensor with samples along its first dimension to split")
    first, num_samples = next(iter(sizes.items()))
    for name, size in sizes.items():
        if size != num_samples:
            raise StateError(
                f"pipe.step() splits all tensors along their first dimension: {name} has {size} samples, and {first} "
                f"{num_samples}; give what is the same for each sample to the model itself"
            )
    return list(_parts([leaf for _, leaf in keyed], spec, sizes=lengths(num_samples, num)))


def lengths(num_samples: int, num: int) -> list[int]:
    """Return the samples of each micro-batch: as `torch.chunk` has them, if that makes `num` parts.

    Of 9 samples it makes 3 parts where 4 are asked for. Then they are as `torch.tensor_split` has them: 3, 2, 2, 2.
    There are fewer than `num` only if there are fewer samples.
    """
    longest = -(-num_samples // num)
    found = [min(longest, num_samples - start) for start in range(0, num_samples, longest)]
    num = min(num, num_samples)
    return found if len(found) == num else [num_samples // num + (at < num_samples % num) for at in range(num)]


def not_given(num_samples: int, num: int) -> list[MicroBatch]:
    """Return the micro-batches of a batch of which this rank was given nothing."""
    return list(_parts(*tree_flatten((None, None)), sizes=lengths(num_samples, num)))


def loss_of(loss_fn: Callable[..., Any], output: Any, target: Any, divisor: float | None) -> torch.Tensor:
    """Return the part of a batch's loss that a micro-batch has, of which a model returns `output`.

    Raises:
        StateError: `loss_fn` returns something else than one number.
    """
    assert divisor is not None
    loss = loss_fn(output) if target is None else loss_fn(output, target)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise StateError(f"loss_fn returned {what}; it has to return the mean loss of its samples as one number")
    return loss / divisor


def _parts(leaves: list[Any], spec: Any, *, sizes: Sequence[int]) -> Iterator[MicroBatch]:
    num_samples = sum(sizes)
    for length, stop in zip(sizes, accumulate(sizes), strict=True):
        start = stop - length
        part = [
            leaf.narrow(0, start, length) if isinstance(leaf, torch.Tensor) and leaf.ndim else leaf for leaf in leaves
        ]
        form = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in part)
        inputs, target = tree_unflatten(part, spec)
        yield MicroBatch(inputs, target, num_samples / length, form, length, stop == num_samples)


def _named(path: Any) -> str:
    where, *rest = path
    return ("the input" if where.idx == 0 else "the target") + keystr(tuple(rest))
