"""Exchanges between ranks that tell in what order they are done with everything else; see [Note: Happens before]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chunkmem.ranks.exchange import Shard, Work
from chunkmem.ranks.methods import ExchangeMethod
from tests.helpers.access_order import AccessOrder
from tests.helpers.recorded_group import RecordedGroup
from tests.helpers.vector_clocks import Actor, Clock


@dataclass(eq=False)
class _OrderedWork:
    """An exchange under way on a stream of its own."""

    order: AccessOrder
    inner: Work
    clock: Clock

    def done(self) -> bool:
        return self.order.clocks.knows(self.order.caller, self.clock)

    def wait(self) -> None:
        self.order.clocks.wait(self.order.computing, self.clock)
        self.inner.wait()


def ordered(method: type[ExchangeMethod], order: AccessOrder) -> type[ExchangeMethod]:
    """Return a way to exchange chunks as `method` does, as if it were NCCL's: on a stream that computing waits for."""

    class Ordered(method):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.recorded: RecordedGroup | None = None

        def group(self, device: torch.device) -> Any:
            if self.recorded is None:
                self.recorded = RecordedGroup(super().group(device))
                order.groups.append(self.recorded)
            return self.recorded

        def gather(self, shards: Sequence[Shard], *, label: str) -> Work:
            return self._followed(shards, [shard for shard in shards if not self.owns(shard)], label, super().gather)

        def reduce(self, shards: Sequence[Shard], *, label: str) -> Work:
            return self._followed(shards, shards, label, super().reduce)

        def _followed(self, reads: Sequence[Shard], writes: Sequence[Shard], label: str, issue: type[Work]) -> Work:
            order.clocks.wait(Actor.COLLECTIVE, order.clocks.of(order.computing))
            operation = order.launch(Actor.COLLECTIVE, label)
            for shards, is_write in ((reads, False), (writes, True)):
                order.memory.access(operation, [_span(shard.flat) for shard in shards], writes=is_write)
            with order.copying(Actor.COLLECTIVE):
                work = issue(reads, label=label)
            return _OrderedWork(order, work, order.clocks.now(Actor.COLLECTIVE))

    Ordered.__name__ = f"Ordered{method.__name__}"
    return Ordered


def _span(flat: torch.Tensor) -> tuple[int, int]:
    return flat.data_ptr(), flat.nbytes
