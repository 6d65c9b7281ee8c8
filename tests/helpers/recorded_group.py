"""A process group that is held to what NCCL asks of its users, and records what it was asked for.

NCCL does on each rank what that rank issued, in that order, on a stream of its own: ranks that issue other collectives,
or the same in another order, wait for each other for ever. `wait()` holds back a stream and not the host; and NCCL
keeps no memory alive: who frees what a collective still uses, lets others write there. Here a collective is over when
it is issued, as the checker's rules have it, so that nothing else keeps its memory alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Collective = tuple[str, tuple[tuple[int, torch.dtype], ...], int]
"""What ranks have to agree on: its name, elements and dtypes, and the rank that it comes from or goes to, or -1."""


@dataclass
class RecordedGroup:
    """Offers NCCL's collectives alone; messages in RAM go past it."""

    inner: Any
    collectives: list[Collective] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    """Collectives whose memory was given back before they were waited for."""

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.inner, name)
        if name in ("send", "recv"):
            return call
        assert name in ("broadcast", "reduce", "allgather", "reduce_scatter", "allreduce"), f"NCCL has no {name}"

        def collective(*args: Any) -> RecordedWork:
            *tensors, options = args
            flat = [tensor for given in tensors for tensor in _flat(given)]
            kinds = tuple((tensor.numel(), tensor.dtype) for tensor in flat)
            self.collectives.append((name, kinds, getattr(options, "rootRank", -1)))
            call(*args).wait()
            return RecordedWork(name, [StorageWeakRef(tensor.untyped_storage()) for tensor in flat], self)

        return collective


@dataclass
class RecordedWork:
    """A collective under way. It tells nothing of a result: that is on the stream."""

    name: str
    storages: Sequence[StorageWeakRef]
    group: RecordedGroup

    def wait(self) -> None:
        if any(storage.expired() for storage in self.storages):
            self.group.freed.append(self.name)
        self.storages = ()


def _flat(given: Any) -> list[torch.Tensor]:
    return [given] if isinstance(given, torch.Tensor) else [tensor for each in given for tensor in _flat(each)]
