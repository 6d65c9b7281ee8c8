"""Messages between neighbouring pipeline stages.

In RAM they are sent and received here, over a gloo group that nothing else uses. What an accelerator computes torch's
schedules send, who know how to order sends and receives of NCCL.

A tensor that is being sent is kept until its work was waited for: gloo does not tell otherwise. So a rank that has as
many messages under way as there are ranks waits for the oldest before it sends another one. No rank waits for itself by
that: schedules are made by going through the actions of all ranks, and put the receive of a message where its send is.
A wait for a message depends only on what comes before its send in that order.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from chunkmem.ranks.ranks import Ranks

Waiting = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Message:
    """What is sent from one stage to another."""

    peer: int
    """Rank of the other stage, numbered in the pipeline."""
    tag: int
    """The same where it is sent and where it is received, and of no other message that is under way."""
    label: str
    """Name of the message in errors."""


class Neighbours:
    """Sends to and receives from other stages."""

    def __init__(self, ranks: Ranks, device: torch.device, *, waiting: Waiting = contextlib.nullcontext) -> None:
        """Exchange tensors on `device` with `ranks`, one of each stage; `waiting` surrounds waits for them."""
        self._waiting = waiting
        self._ranks = ranks
        self._device = device
        self._in_ram = device.type == "cpu"
        self._sent: deque[tuple[list[dist.Work], str, Callable[[], None]]] = deque()
        """Messages in flight, the oldest first, each with a callable for when it has been sent."""
        self._received: dict[int, tuple[list[dist.Work], str]] = {}
        """By tag: the receives that are waited for, with a label."""

    def send(
        self, tensors: Sequence[torch.Tensor], message: Message, *, done: Callable[[], None] = lambda: None
    ) -> list[dist.P2POp]:
        """Send tensors, or return what a schedule has to do so.

        `done` is called when they are not kept here any more.

        Raises:
            RankError: the peer is missing.
        """
        if not self._in_ram:
            operations = self._operations(dist.isend, tensors, message)
            done()  # from here on they are the schedule's
            return operations
        self.wait_until_sent(up_to=self._ranks.size - 1)
        with self._ranks.connection.waiting(message.label):
            group = self._ranks.all_ranks.group(self._device)
            works = [group.send([tensor.contiguous()], message.peer, message.tag) for tensor in tensors]
        self._sent.append((works, message.label, done))
        return []

    def receive(self, tensors: Sequence[torch.Tensor], message: Message) -> list[dist.P2POp]:
        """Begin to fill tensors; they may be used after `wait`. Returns and raises what `send` does."""
        if not self._in_ram:
            return self._operations(dist.irecv, tensors, message)
        with self._ranks.connection.waiting(message.label):
            group = self._ranks.all_ranks.group(self._device)
            works = [group.recv([tensor], message.peer, message.tag) for tensor in tensors]
        self._received[message.tag] = works, message.label
        return []

    def wait(self, tag: int) -> None:
        """Wait for what was to be received under a tag. Raises what `send` does."""
        self._wait(*self._received.pop(tag, ([], "")))

    def wait_until_sent(self, *, up_to: int = 0) -> None:
        """Wait until no more than so many messages are under way. Raises what `send` does."""
        while len(self._sent) > up_to:
            works, label, done = self._sent.popleft()
            self._wait(works, label)
            done()

    def _wait(self, works: list[dist.Work], label: str) -> None:
        while works:
            with self._ranks.connection.waiting(label), self._waiting():
                works.pop(0).wait()

    def _operations(
        self, kind: Callable[..., Any], tensors: Sequence[torch.Tensor], message: Message
    ) -> list[dist.P2POp]:
        group, peer = self._ranks.connection.process_group, self._ranks.name(message.peer)
        return [dist.P2POp(kind, tensor.contiguous(), peer, group, message.tag) for tensor in tensors]
