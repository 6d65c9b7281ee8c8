"""A schedule is chosen by simulated time, from what the modules weigh."""

from __future__ import annotations

import pytest
from torch import nn

from chunkmem.data.errors import ConfigError
from chunkmem.pipeline.options import PipelineOptions
from chunkmem.pipeline.schedules import choose


def linears(num: int) -> list[nn.Module]:
    return [nn.Linear(8, 8) for _ in range(num)]


def chosen(
    blocks: list[nn.Module], *, first: nn.Module | None = None, micro_batches: int = 8, device_nbytes: int = 1 << 30
) -> tuple[PipelineOptions, str]:
    options = PipelineOptions(
        tuple(blocks), first, None, nn.functional.mse_loss, micro_batches, "auto", "auto", None, False
    )
    return choose(options, num_ranks=2, num_shards=1, device_nbytes=device_nbytes)


def test_several_stages_a_rank_leave_a_smaller_bubble() -> None:
    found, reason = chosen(linears(16))
    assert (found.schedule, found.stages_per_rank) == ("interleaved", 4)
    assert reason.startswith("interleaved, 4 of 8 stages on each rank, bubble ")


def test_one_block_for_each_rank_leaves_one_stage() -> None:
    assert chosen(linears(2))[0].stages_per_rank == 1


def test_where_weights_are_fetched_it_is_no_schedule_that_fetches_for_each_micro_batch() -> None:
    """A micro-batch of 1F1B needs a whole stage, for which DEVICE has no room; one of 8 is fetched for all of them."""
    weights = sum(param.nbytes for param in nn.Linear(8, 8).parameters())
    found, _ = chosen(linears(16), device_nbytes=3 * weights)
    assert found.stages_per_rank > 1


def test_an_embedding_takes_no_time() -> None:
    embedding = nn.Embedding(10_000, 8)
    assert chosen(linears(8), first=embedding)[1] == chosen(linears(8))[1]


def test_fewer_blocks_than_ranks() -> None:
    with pytest.raises(ConfigError):
        chosen(linears(1))
