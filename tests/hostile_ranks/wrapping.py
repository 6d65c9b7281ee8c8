"""What others wrap around a model to train it over ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision as MixedPrecision
from torch.nn.utils import clip_grad_norm_

import chunkmem
from tests.hostile.models import Net
from tests.hostile_ranks.harness import EQUAL_BUT_FOR_ORDER, Refused, User, script
from tests.hostile_ranks.reference import average_gradients

NOT_NEEDED = "chunkmem exchanges parameters and gradients itself; use the model as it is"


class Outer(nn.Module):
    """A model with a loss, around a managed one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def wrapped(user: User, **options: Any) -> Any:
    """DistributedDataParallel, as a script has it; in plain PyTorch `step()` averages, so there is none."""
    return user.model if user.manager is None else DistributedDataParallel(user.model, **options)


@script()
def distributed_data_parallel(user: User) -> None:
    """It calls the model, and chunkmem exchanges."""
    model, _ = wrapped(user), user.opt
    user.check(isinstance(getattr(model, "module", user.model), Net), "the model is in it")
    for seed in range(3):
        loss = user.loss(seed, model)
        loss.backward()
        user.record(loss.item())
        user.update()
    user.train(3)


@script()
def distributed_data_parallel_that_finds_unused_parameters(user: User) -> None:
    user.train(0)
    model = wrapped(user, find_unused_parameters=True, init_sync=False, static_graph=True)
    user.loss(1, model).backward()
    user.update()


@script()
def micro_batches_under_no_sync(user: User) -> None:
    """What it says of micro-batches is passed on: the sum is that of a plain loop."""
    model, _ = wrapped(user), user.opt
    for step in range(3):
        with contextlib.nullcontext() if user.manager is None else model.no_sync():
            (user.loss(2 * step, model) / 2).backward()
        (user.loss(2 * step + 1, model) / 2).backward()
        user.update()


@script()
def micro_batches_by_the_flag(user: User) -> None:
    """As nanoGPT has it: it sets what `no_sync()` sets."""
    model, _ = wrapped(user), user.opt
    for step in range(3):
        for micro in range(2):
            model.require_backward_grad_sync = micro == 1
            (user.loss(2 * step + micro, model) / 2).backward()
        user.update()


@script(expect=EQUAL_BUT_FOR_ORDER)
def clipped_by_torchs_function(user: User) -> None:
    """Below the wrapper its norms are of the means over ranks, also where nothing is clipped."""
    _ = wrapped(user), user.opt
    for step, max_norm in enumerate((0.01, 1e9, 0.02)):
        user.loss(step).backward()
        if user.manager is None:
            average_gradients(user.params)
        user.record(clip_grad_norm_(user.params, max_norm))
        user.update()


@script(expect=EQUAL_BUT_FOR_ORDER)
def norms_that_are_asked_for_again(user: User) -> None:
    """After another micro-batch, and without a gradient that was discarded: they are others."""
    _ = wrapped(user), user.opt
    for step in range(2):
        for micro in range(2):
            user.loss(2 * step + micro).backward()
            if user.manager is None:
                average_gradients(user.params)
            user.record(clip_grad_norm_(user.params, 1e9))
        user.params[0].grad = None
        user.record(clip_grad_norm_(user.params, 1e9))
        user.update()


@script(expect=EQUAL_BUT_FOR_ORDER)
def a_rate_that_warms_up_from_zero_where_one_rank_owns_all_that_is_trained(user: User) -> None:
    """After clipping, the other ranks took their step for one that only makes states: it was over gradients of zero."""
    for param in user.model.parameters():
        param.requires_grad_(False)
    user.model.head.weight.requires_grad_(True)
    opt = user.adamw([user.model.head.weight], lr=0.0)
    _ = wrapped(user)
    for step in range(3):
        user.loss(step).backward()
        if user.manager is None:
            average_gradients(user.params)
        user.record(clip_grad_norm_([user.model.head.weight], 0.01))
        opt.step()
        opt.zero_grad()
        opt.param_groups[0]["lr"] = 1e-2 * step


@script(expect=Refused("RankError", "clipping of gradients with multiplication of gradients by"))
def clipped_to_another_norm_on_each_rank(user: User) -> None:
    wrapped(user)
    user.loss(0).backward()
    clip_grad_norm_(user.params, 0.01 * (1 + user.rank))


@script(expect=Refused("RankError", "optimizer.step.* gradients multiplied"))
def another_gradient_multiplied_on_each_rank(user: User) -> None:
    wrapped(user)
    user.loss(0).backward()
    list(user.model.parameters())[user.rank].grad.mul_(0.5)
    user.update()


@script(expect=Refused("StateError", "mixed_precision of DistributedDataParallel .*: set"))
def distributed_data_parallel_in_low_precision(user: User) -> None:
    wrapped(user, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))


@script(expect=Refused("StateError", r"register_comm_hook\(\) .*exchange="))
def a_hook_for_its_buckets(user: User) -> None:
    wrapped(user).register_comm_hook(None, lambda state, bucket: None)


@script(expect=Refused("StateError", rf"^DistributedDataParallel .*{NOT_NEEDED}"))
def distributed_data_parallel_around_a_model_with_managed_parts(user: User) -> None:
    DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), Outer(user.model)))


@script()
def the_parameter_that_is_not_known_is_named(user: User) -> None:
    user.train(0)
    if user.manager is not None:
        try:
            wrapped_in = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), user.model))
        except chunkmem.StateError as error:
            user.check("parameter 0.weight is in no chunk" in error.__notes__[0], str(error.__notes__))
        else:
            user.check(False, f"{wrapped_in} was made")
    user.train(1)


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
            DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), user.model))
    user.train(1)


@script()
def another_model_in_distributed_data_parallel(user: User) -> None:
    """A model that is not managed may have it."""
    other = DistributedDataParallel(Net())
    user.train(0)
    other(user.batch(0)).sum().backward()
    user.train(1)
