"""What others wrap around a model to train it over ranks."""

from __future__ import annotations

import contextlib

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import chunkmem
from tests.hostile.models import Net
from tests.hostile_ranks.harness import Refused, User, script

NOT_NEEDED = "chunkmem exchanges parameters and gradients itself; use the model as it is"


class Outer(nn.Module):
    """A model with a loss, around a managed one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


@script(expect=Refused("StateError", rf"^DistributedDataParallel .*{NOT_NEEDED}"))
def distributed_data_parallel(user: User) -> None:
    DistributedDataParallel(user.model)


@script(expect=Refused("StateError", rf"^DistributedDataParallel .*{NOT_NEEDED}"))
def distributed_data_parallel_that_finds_unused_parameters(user: User) -> None:
    user.train(0)
    DistributedDataParallel(user.model, find_unused_parameters=True, init_sync=False)


@script(expect=Refused("StateError", rf"^DistributedDataParallel .*{NOT_NEEDED}"))
def distributed_data_parallel_around_a_model_with_managed_parts(user: User) -> None:
    DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), Outer(user.model)))


@script(expect=Refused("StateError", rf"^fully_shard .*{NOT_NEEDED}"))
def fully_sharded(user: User) -> None:
    fully_shard(user.model)


@script(expect=Refused("StateError", rf"^fully_shard .*{NOT_NEEDED}"))
def blocks_fully_sharded(user: User) -> None:
    user.train(0)
    for block in user.model.blocks:
        fully_shard(block)


@script()
def refused_and_used_as_it_is(user: User) -> None:
    """What was refused has changed nothing."""
    user.train(0)
    if user.manager is not None:
        with contextlib.suppress(chunkmem.StateError):
            DistributedDataParallel(user.model)
    user.train(1)


@script()
def another_model_in_distributed_data_parallel(user: User) -> None:
    """A model that is not managed may have it."""
    other = DistributedDataParallel(Net())
    user.train(0)
    other(user.batch(0)).sum().backward()
    user.train(1)
