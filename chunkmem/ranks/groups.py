"""Ranks that exchange chunks with each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from chunkmem.data.errors import StateError


class RankGroup:
    """The ranks that exchange with each other: all of them, or some; what fails among them, all ranks fail with."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        in_ram: dist.ProcessGroup | None,
        elsewhere: dist.ProcessGroup | None,
        waiting: Callable[..., AbstractContextManager[None]],
    ) -> None:
        """Exchange in RAM over one group, and on accelerators over another.

        Args:
            rank: this one, among them.
            size: of the group.
            in_ram: which nothing else uses; None: this is one rank alone.
            elsewhere: the user's, or one of a mesh.
            waiting: see `Connection.waiting`.
        """
        self.rank = rank
        self.size = size
        self.waiting = waiting
        self._in_ram = in_ram
        self._elsewhere = elsewhere

    def group(self, device: torch.device) -> dist.ProcessGroup:
        """Return the group to exchange chunks on a device over; all ranks issue the same on it, in one order.

        Raises:
            StateError: this is one rank alone, or `close` was called.
        """
        group = self._in_ram if device.type == "cpu" else self._elsewhere
        if group is None or self._in_ram is None:
            raise StateError("there is no process group to exchange chunks over: this is one rank alone, or was closed")
        return group

    def close(self) -> None:
        """Give the groups back."""
        self._in_ram = self._elsewhere = None
