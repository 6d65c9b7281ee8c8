"""Calls that all ranks have to make, made by one; and calls that one rank may make alone."""

from __future__ import annotations

import io
import tempfile

import torch

from tests.hostile.models import Tower
from tests.hostile_ranks.harness import DIVERGED, Either, Leaves, Refused, User, script


@script(expect=DIVERGED)
def state_dict_on_the_first_rank(user: User) -> None:
    user.train(0, 1)
    if user.rank == 0:
        user.state_dict()
    user.train(2)


@script(expect=DIVERGED)
def state_dict_on_another_rank_at_the_end(user: User) -> None:
    user.train(0)
    if user.rank == 1:
        user.state_dict()


@script(expect=DIVERGED)
def the_state_dict_of_the_model_on_the_first_rank(user: User) -> None:
    """The habit of every training loop: `if rank == 0: torch.save(model.state_dict(), path)`."""
    user.train(0, 1)
    if user.rank == 0:
        torch.save(user.model.state_dict(), io.BytesIO())
    user.train(2)


@script(expect=DIVERGED)
def optimizer_state_dict_on_the_first_rank(user: User) -> None:
    user.train(0, 1)
    if user.rank == 0:
        user.opt.state_dict()
    user.train(2)


@script(expect=DIVERGED)
def states_of_parameters_read_on_the_first_rank(user: User) -> None:
    user.train(0, 1)
    if user.rank == 0:
        for param in user.params:
            user.opt.state[param]["exp_avg"].norm()
    user.train(2)


@script(expect=DIVERGED)
def clipped_on_the_first_rank(user: User) -> None:
    for step in range(3):
        user.backward(user.loss(step))
        if user.rank == 0:
            user.clip(0.1)
        user.update()


@script(expect=DIVERGED)
def gathered_on_the_first_rank(user: User) -> None:
    user.train(0, 1)
    if user.rank == 0:
        with user.gathered():
            user.record(user.model.head.weight.norm())
    user.train(2)


@script(expect=DIVERGED)
def other_parameters_gathered_on_another_rank(user: User) -> None:
    user.train(0, 1)
    with user.gathered(user.model.blocks[user.rank % 2]):
        pass
    user.train(2)


@script(expect=DIVERGED)
def gradients_gathered_on_the_first_rank(user: User) -> None:
    for step in range(3):
        user.backward(user.loss(step))
        if user.rank == 0 and user.manager is not None:
            with user.manager.gather(grads=True):
                pass
        user.update()


@script(expect=Refused("RankError|StateError", "rank 0|rank 1|all ranks"))
def loaded_on_the_first_rank_only(user: User) -> None:
    """As it is done before DistributedDataParallel broadcasts: here every rank has to load."""
    user.train(0)
    state = {key: torch.zeros_like(value) for key, value in user.state_dict().items()}
    if user.rank == 0:
        user.load_state_dict(state)
    user.train(1)


@script(expect=Refused("RankError|StateError", "rank 0|rank 1|all ranks"))
def optimizer_state_loaded_on_the_first_rank_only(user: User) -> None:
    user.train(0, 1)
    state = user.opt.state_dict()
    user.train(2)
    if user.rank == 0:
        user.opt.load_state_dict(state)
    user.train(3)


@script(expect=DIVERGED)
def the_optimizer_steps_on_the_first_rank_only(user: User) -> None:
    for step in range(3):
        user.backward(user.loss(step))
        if user.rank == 0:
            user.opt.step()
        user.opt.zero_grad()


@script(expect=DIVERGED)
def the_optimizer_is_made_on_the_first_rank_only(user: User) -> None:
    if user.rank == 0:
        _ = user.opt
    for step in range(2):
        user.backward(user.loss(step))
        if user.rank == 0:
            user.update()


@script(expect=Either("RankError|StateError", "rank 0|rank 1|all ranks"))
def gradients_dropped_on_one_rank(user: User) -> None:
    """In plain PyTorch that rank then adds zeros."""
    for step in range(3):
        user.backward(user.loss(step))
        if (step, user.rank) == (1, 1):
            user.model.zero_grad()
        user.update()


@script(expect=Either("RankError|StateError", "rank 0|rank 1|all ranks"))
def micro_batches_declared_on_one_rank(user: User) -> None:
    if user.manager is not None and user.rank == 0:
        user.manager.accumulate(2)
    for step in range(3):
        for micro in range(2):
            user.backward(user.loss(10 * step + micro))
        user.update()


@script(expect=Either("RankError|StateError", "rank 0|rank 1|all ranks"))
def the_last_micro_batch_declared_on_one_rank(user: User) -> None:
    _ = user.opt
    for step in range(3):
        for micro in range(2):
            keys = {"last": micro == 1} if user.rank == 1 and user.manager is not None else {}
            user.backward(user.loss(10 * step + micro), **keys)
        user.update()


@script(expect=DIVERGED)
def a_second_model_on_the_first_rank(user: User) -> None:
    user.train(0)
    if user.rank == 0:
        user.build(Tower)
    user.train(1)


@script(expect=Leaves(1, "StateError"))
def closed_on_one_rank(user: User) -> None:
    user.train(0)
    if user.rank == 1 and user.manager is not None:
        user.manager.close()
    user.train(1)


# What one rank may do.


@script()
def looked_at_on_the_first_rank(user: User) -> None:
    for step in range(3):
        user.step(step)
        if user.rank == 0:
            assert "Linear" in repr(user.model)
            assert sum(param.numel() for param in user.params) > 0
            if user.manager is not None:
                assert "DEVICE" in str(user.manager.memory()).upper()
                user.manager.timeline()
                assert user.manager.loss_scale == 1.0


@script()
def recorded_on_the_first_rank(user: User) -> None:
    user.train(0, 1, 2, 3, 4)
    if user.rank == 0 and user.manager is not None:
        with tempfile.TemporaryDirectory() as folder:
            user.manager.record(folder)
    user.train(5)


@script()
def learning_rates_logged_on_the_first_rank(user: User) -> None:
    for step in range(3):
        user.step(step)
        if user.rank == 0:
            user.record([group["lr"] for group in user.opt.param_groups])


@script()
def saved_on_the_first_rank_of_what_all_have(user: User) -> None:
    user.train(0, 1)
    weights, states = user.state_dict(), user.opt.state_dict()
    if user.rank == 0:
        torch.save({"model": weights, "optimizer": states}, io.BytesIO())
    user.train(2)


@script()
def a_barrier_of_the_user(user: User) -> None:
    """The default group is the user's: what is done over it does not mix with chunks."""
    for step in range(3):
        user.step(step)
        torch.distributed.barrier()
        total = torch.tensor([float(user.rank)])
        torch.distributed.all_reduce(total)
        user.record(total)


@script()
def losses_averaged_by_the_user_between_forward_and_backward(user: User) -> None:
    _ = user.opt
    for step in range(3):
        loss = user.loss(step)
        shown = loss.detach().clone()
        torch.distributed.all_reduce(shown)
        user.backward(loss)
        user.update()
        user.record(shown)
