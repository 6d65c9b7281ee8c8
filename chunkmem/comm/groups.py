"""The gloo groups of a rank, which nothing else uses, and parts of the ranks as groups of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from chunkmem.comm.failure_detector import hang_up
from chunkmem.errors import StateError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True, eq=False)
class _Opened:
    group: dist.ProcessGroup
    members: Sequence[int]
    """Their ranks among all that are connected."""


class GlooGroups:
    """Groups over some or all of the ranks that met in one store."""

    def __init__(self, met_in: Store, rank: int, *, timeout_s: float) -> None:
        """Begin with none.

        Args:
            met_in: used for these groups alone.
            rank: this one, among all.
            timeout_s: of every exchange.
        """
        self._met_in = met_in
        self._rank = rank
        self._timeout = timedelta(seconds=timeout_s)
        self._opened: list[_Opened] = []

    def open(self, name: str, members: Sequence[int]) -> dist.ProcessGroup:
        """Return a new group over `members`, who all call it.

        Raises:
            RuntimeError: a rank did not come.
        """
        store: Store = dist.PrefixStore(name, self._met_in)  # type: ignore[attr-defined]
        group = dist.ProcessGroupGloo(store, members.index(self._rank), len(members), self._timeout)
        # By itself, not as part of a group of several backends; it is used in the same way.
        self._opened.append(_Opened(cast(dist.ProcessGroup, group), members))
        return self._opened[-1].group

    def hang_up(self) -> set[int]:
        """Close this rank's connections; return the ranks whose connections to it were closed before."""
        closed = set()
        for opened in self._opened:
            peers = hang_up(opened.group, opened.members.index(self._rank), len(opened.members))
            closed |= {opened.members[peer] for peer in peers}
        return closed


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
