"""An exchange of the user's own: it trains as the built-in ones do, and what it raises reaches every rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import chunkmem
from chunkmem.ranks.exchange import Shard
from tests.helpers.ranks import Team
from tests.helpers.shared_training import MODELS, Task, batch_of, loss_of, make_config, serial


class Plainly(chunkmem.ExchangeMethod):
    """One all-gather a chunk, of what every rank has in it."""

    def all_gather(self, shards: Sequence[Shard]) -> list[dist.Work]:
        for shard in shards:
            parts = self._parts(shard)
            shard.flat.copy_(parts[shard.owner])
        return []

    def reduce_scatter(self, shards: Sequence[Shard], buffers: Sequence[Tensor]) -> list[dist.Work]:
        for shard in shards:
            first, *others = self._parts(shard)
            for other in others:
                first += other
            if self.owns(shard):
                shard.flat.copy_(first / self.size)
        return []

    def finish(self, shards: Sequence[Shard], buffers: Sequence[Tensor]) -> None:
        pass

    def _parts(self, shard: Shard) -> list[Tensor]:
        parts = [torch.empty_like(shard.flat) for _ in range(self.size)]
        self.group(shard.flat.device).allgather([parts], [shard.flat]).wait()
        return parts


class InTheBackground(chunkmem.ExchangeMethod):
    """All-gathers that are waited for later, with memory that is counted."""

    def all_gather(self, shards: Sequence[Shard]) -> list[dist.Work]:
        options = [dist.BroadcastOptions() for _ in shards]
        for option, shard in zip(options, shards, strict=True):
            option.rootRank = shard.owner
        return [self.group(s.flat.device).broadcast([s.flat], o) for s, o in zip(shards, options, strict=True)]

    def buffers(self, shards: Sequence[Shard]) -> list[Tensor]:
        return [shard.flat.new_empty(self.size, shard.flat.numel()) for shard in shards]

    def reduce_scatter(self, shards: Sequence[Shard], buffers: Sequence[Tensor]) -> list[dist.Work]:
        pairs = zip(shards, buffers, strict=True)
        return [self.group(s.flat.device).allgather([list(rows)], [s.flat]) for s, rows in pairs]

    def finish(self, shards: Sequence[Shard], buffers: Sequence[Tensor]) -> None:
        for shard, rows in zip(shards, buffers, strict=True):
            if self.owns(shard):
                shard.flat.copy_(rows[0])
                for row in rows[1:]:
                    shard.flat.add_(row)
                shard.flat.div_(self.size)


class Failing(Plainly):
    """Raises on rank 1, in a gather in the midst of training."""

    error: Exception = KeyError("no such chunk")

    def all_gather(self, shards: Sequence[Shard]) -> list[dist.Work]:
        if self.rank == 1 and self.traffic.num_gathers > 5:
            raise self.error
        return super().all_gather(shards)


class FailingAsTorchDoes(Failing):
    error = RuntimeError("the switch is on fire")


class FailingLater(InTheBackground):
    """Raises on rank 1 when gradients have arrived."""

    def finish(self, shards: Sequence[Shard], buffers: Sequence[Tensor]) -> None:
        if self.rank == 1:
            raise ValueError("gradients that nobody ordered")
        super().finish(shards, buffers)


def train(rank: int, methods: Sequence[type[chunkmem.ExchangeMethod] | None], task: Task) -> tuple[Any, int, str]:
    """The weights after some steps, the bytes that exchanges buffered at most, and where it was used."""
    torch.set_num_threads(1)
    with chunkmem.ChunkManager(make_config(task), exchange=methods[rank]) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = MODELS[task.model]()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(task.steps):
            manager.backward(loss_of(model, batch_of(task, step, 0, rank)))
            optimizer.step()
            optimizer.zero_grad()
        assert manager.runtime.sharding.shards is not None
        used = type(manager.runtime.sharding.shards.exchange).__name__
        return manager.state_dict(), manager.runtime.sharding.shards.buffered_nbytes[1], used


@pytest.mark.few(1)
@pytest.mark.parametrize("method", [Plainly, InTheBackground])
@pytest.mark.parametrize("model", ["tied", "reused"])
def test_an_exchange_of_ones_own_trains_to_the_bit(
    pair: Team, method: type[chunkmem.ExchangeMethod], model: str
) -> None:
    task = Task(model)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _, weights, _ = serial(task, 2)
    torch.set_num_threads(threads)
    for trained, buffered_nbytes, used in pair.run(train, (method, method), task):
        assert used == method.__name__
        assert (buffered_nbytes > 0) == (method is InTheBackground)
        assert [key for key, value in weights.items() if not torch.equal(value, trained[key])] == []


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("method", "words"),
    [
        (Failing, "rank 1 raised KeyError: 'no such chunk'"),
        (FailingLater, "rank 1 raised ValueError: gradients that nobody ordered"),
        (FailingAsTorchDoes, "rank 1 after … s (the switch is on fire)"),
    ],
)
def test_what_one_rank_raises_in_it_is_raised_on_all(
    pair: Team, method: type[chunkmem.ExchangeMethod], words: str
) -> None:
    for line in pair.errors(train, (method, method), Task()):
        assert line.startswith("chunkmem.data.errors.RankError: ")
        assert words in re.sub(r"after \d+\.\d s", "after … s", line)


def test_ranks_with_different_exchanges_stop_alike(pair: Team) -> None:
    said = pair.errors(train, (Plainly, None), Task())
    assert said[0] == said[1]
    assert (
        "the exchange method differs between ranks: tests.cpu.test_own_exchange.Plainly on rank 0, chunkmem's on rank 1"
    ) in said[0]


def test_what_is_no_exchange_is_refused() -> None:
    with pytest.raises(chunkmem.ConfigError, match=r"exchange is <class 'int'>; pass a subclass of"):
        chunkmem.ChunkManager(chunkmem.Config(), exchange=int)  # type: ignore[arg-type]
