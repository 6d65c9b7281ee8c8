"""Which operators of a rehearsed step run on HOST: what they make takes nothing of DEVICE, and its speed is HOST's."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


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
