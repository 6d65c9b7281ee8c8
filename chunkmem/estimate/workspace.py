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


def with_workspace(operator: Any, *args: Any, **options: Any) -> Any:
    """Call an operator under fake tensors; its result has the workspace that the real one would have.

    Only oneDNN knows how much a recurrent layer on the CPU keeps, so a short one of the same width is run.
    """
    result = operator(*args, **options)
    if operator is not _RNN_LAYER or not torch.is_grad_enabled():  # without a backward nothing is kept
        return result
    length_at = 1 if args[14] else 0

    def measured_nbytes(length: int) -> int:
        given, *others = (tuple(tensor.shape) for tensor in args[:7])
        given = (*given[:length_at], length, *given[length_at + 1 :])
        with runtime_mode(), torch.enable_grad():  # else it would keep nothing
            tensors = [torch.zeros(shape, device="cpu") for shape in (given, *others)]
            return int(_RNN_LAYER(*tensors, *args[7:])[_WORKSPACE].nbytes)

    length = args[0].shape[length_at]
    nbytes = measured_nbytes(min(length, _LONG))
    if length > _LONG:
        nbytes += (nbytes - measured_nbytes(_SHORT)) * (length - _LONG) // (_LONG - _SHORT)
    workspace = torch.empty(nbytes, dtype=torch.uint8, device=args[0].device)
    return (*result[:_WORKSPACE], workspace, *result[_WORKSPACE + 1 :])
