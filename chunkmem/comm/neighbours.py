"""Messages between neighbouring pipeline stages.

In RAM they are sent and received here, over a gloo group that nothing else uses. What an accelerator computes torch's
schedules send, who know how to order sends and receives of NCCL.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from chunkmem.comm.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Message:
    """What is sent from one stage to another."""

    peer: int
    """Rank, counted among those of the pipeline."""
    tag: int
    """The same where it is sent and where it is received, and of no other message that is under way."""
    label: str
    """What it is, for messages."""


class Neighbours:
    """Sends to and receives from other stages."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        """Exchange tensors on `device` with `ranks`, one of each stage."""
        self._ranks = ranks
        self._device = device
        self._in_ram = device.type == "cpu"
        self._sent: deque[tuple[dist.Work, str]] = deque()
        self._received: dict[int, tuple[list[dist.Work], str]] = {}
        """By tag: what is waited for."""

    @property
    def num_sending(self) -> int:
        """Tensors that are kept because they are still being sent."""
        self._prune()
        return len(self._sent)

    def send(self, tensors: Sequence[torch.Tensor], message: Message) -> list[dist.P2POp]:
        """Send tensors, or return what a schedule has to do so.

        Raises:
            RankError: the peer is missing.
        """
        if not self._in_ram:
            return self._operations(dist.isend, tensors, message)
        self._prune()
        with self._ranks.waiting(message.label):
            group = self._ranks.group(self._device)
            for tensor in tensors:
                work = group.send([tensor.contiguous()], message.peer, message.tag)
                self._sent.append((work, message.label))
        return []

    def receive(self, tensors: Sequence[torch.Tensor], message: Message) -> list[dist.P2POp]:
        """Begin to fill tensors; they may be used after `wait`. Returns and raises what `send` does."""
        if not self._in_ram:
            return self._operations(dist.irecv, tensors, message)
        with self._ranks.waiting(message.label):
            group = self._ranks.group(self._device)
            works = [group.recv([tensor], message.peer, message.tag) for tensor in tensors]
        self._received[message.tag] = works, message.label
        return []

    def wait(self, tag: int) -> None:
        """Wait for what was to be received under a tag. Raises what `send` does."""
        works, label = self._received.pop(tag, ([], ""))
        for work in works:
            with self._ranks.waiting(label):
                work.wait()

    def settle(self) -> None:
        """Wait until all has been sent. Raises what `send` does."""
        while self._sent:
            work, label = self._sent.popleft()
            with self._ranks.waiting(label):
                work.wait()

    def _prune(self) -> None:
        """Let go of tensors that have been sent."""
        self._sent = deque(each for each in self._sent if not each[0].is_completed())

    def _operations(
        self, kind: Callable[..., Any], tensors: Sequence[torch.Tensor], message: Message
    ) -> list[dist.P2POp]:
        group, peer = self._ranks.process_group, self._ranks.name(message.peer)
        return [dist.P2POp(kind, tensor.contiguous(), peer, group, message.tag) for tensor in tensors]
