"""What operators would take: the time of their arithmetic or of their bytes, whichever is longer; and memory.

The memory is what an operator keeps for its backward and torch's fake kernels leave out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.values import storage_id, tensors_in


class HostOperators:
    """Follows the calls of modules that compute on HOST, and their nodes in backward."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._begun: list[int] = []
        """Of the calls that run: autograd's number of the next node when each began."""
        self._made: list[tuple[int, int]] = []
        """Numbers of the nodes that calls have made: from, to below."""
        for module in modules:  # within the hooks that bring tensors to HOST and back
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end, prepend=True)

    def _begin(self, _module: nn.Module, _args: object) -> None:
        self._begun.append(torch._C._autograd._get_sequence_nr())

    def _end(self, _module: nn.Module, _args: object, _result: object) -> None:
        self._made.append((self._begun.pop(), torch._C._autograd._get_sequence_nr()))

    @property
    def is_running(self) -> bool:
        """The operator that comes now is one of theirs."""
        if self._begun or not self._made:
            return bool(self._begun)
        node = torch._C._current_autograd_node()
        return node is not None and any(first <= node._sequence_nr() < stop for first, stop in self._made)


_aten = torch.ops.aten
# The CPU's attention is counted as the accelerators' is.
_SAME_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}


class OperatorClock:
    """Adds up the time that operators would take on a device of the given speeds.

    torch's own table of formulas says what an operator computes; one without a formula is as fast as its bytes.
    """

    def __init__(self, *, flop_per_s: float, memory_Bps: float) -> None:
        self._flop_per_s = flop_per_s
        self._memory_Bps = memory_Bps
        self._elapsed_s = 0.0
        self.flop = 0
        """Floating-point operations so far."""
        self.exchange_s = 0.0
        """That exchanges of activations have taken so far."""

    def exchange(self, seconds: float) -> None:
        """Count an exchange that computing waits for."""
        self.exchange_s += seconds
        self._elapsed_s += seconds

    def count(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Count one operator that was called."""
        packet = getattr(operator, "_overloadpacket", None)
        formula = None if packet is None else flop_registry.get(_SAME_AS.get(packet, packet))
        flop = 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
        self.flop += flop
        nbytes = _moved_nbytes((args, kwargs), result)
        self._elapsed_s += max(flop / self._flop_per_s, nbytes / self._memory_Bps)

    def take_s(self) -> float:
        """Return the seconds since the last call."""
        elapsed_s, self._elapsed_s = self._elapsed_s, 0.0
        return elapsed_s


def _moved_nbytes(given: Any, result: Any) -> int:
    """Return the bytes an operator reads and writes; 0 for a view, which moves nothing."""
    read = {storage_id(tensor): tensor.nbytes for tensor in tensors_in(given, object_depth=0)}
    written = {storage_id(tensor): tensor.nbytes for tensor in tensors_in(result, object_depth=0)}
    new = sum(nbytes for key, nbytes in written.items() if key not in read)
    return sum(read.values()) + new if new else 0


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
