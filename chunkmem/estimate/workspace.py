"""Memory that an operator keeps for its backward and that torch's fake kernels leave out."""

from __future__ import annotations

from typing import Any

import torch

from chunkmem.runtime.device import runtime_mode

_RNN_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
_WORKSPACE = 3
"""Which of the layer's results it is; fake kernels return it empty."""
_SHORT, _LONG = 8, 16
"""Sequence lengths that are really run: from there on the workspace grows by the same bytes with each position."""


def with_workspace(operator: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Return an operator's fake result with the workspace that the real one would have.

    Only oneDNN knows how much a recurrent layer on the CPU keeps, so a short one of the same width is run.
    """
    if operator is not _RNN_LAYER or not torch.is_grad_enabled():  # without a backward nothing is kept
        return result
    given = args[0]
    options, batch_first = args[7:], args[14]
    length_at = 1 if batch_first else 0
    shapes = tuple(tuple(t.shape) for t in args[:7])
    nbytes = _workspace_nbytes(shapes, options, length_at, given.shape[length_at])
    workspace = torch.empty(nbytes, dtype=torch.uint8, device=given.device)
    return (*result[:_WORKSPACE], workspace, *result[_WORKSPACE + 1 :])


def _workspace_nbytes(
    shapes: tuple[tuple[int, ...], ...], options: tuple[Any, ...], length_at: int, length: int
) -> int:
    if length <= _LONG:
        return _measured_nbytes(shapes, options, length_at, length)
    short, long = (_measured_nbytes(shapes, options, length_at, n) for n in (_SHORT, _LONG))
    return long + (long - short) * (length - _LONG) // (_LONG - _SHORT)


def _measured_nbytes(shapes: tuple[tuple[int, ...], ...], options: tuple[Any, ...], length_at: int, length: int) -> int:
    given, *others = shapes
    given = (*given[:length_at], length, *given[length_at + 1 :])
    with runtime_mode(), torch.enable_grad():  # else it would keep nothing
        tensors = [torch.zeros(shape, device="cpu") for shape in (given, *others)]
        return int(_RNN_LAYER(*tensors, *options)[_WORKSPACE].nbytes)
