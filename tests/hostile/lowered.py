"""Mixed precision: the same habits, where parameters are bf16 or fp16 and fp32 master weights are behind them.

Small caps are compared with ample room, bit for bit; what holds in plain PyTorch is checked as such.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from tests.hostile.harness import User, script
from tests.hostile.outputs import Body, Normalises


def masters(user: User) -> dict[str, Any]:
    """The fp32 weights by name."""
    return {name: value for name, value in user.state_dict().items() if value.is_floating_point()}


def is_within(user: User, bound: float) -> bool:
    """Whether no master weight rounds to more than a bound: the others keep the bits that bf16 does not have."""
    return all(value.abs().max() <= bound * (1 + 2**-8) for value in masters(user).values())


def bf16(run: Callable[[User], Any]) -> Callable[[User], Any]:
    return script(precision="bf16")(run)


def fp16(run: Callable[[User], Any]) -> Callable[[User], Any]:
    return script(precision="fp16")(run)


@bf16
def bf16_training(user: User) -> None:
    user.train(0, 1, 2)
    user.check(all(value.dtype is torch.float32 for value in masters(user).values()), "masters are fp32")


@bf16
def bf16_norms_logged(user: User) -> None:
    for seed in range(3):
        user.step(seed)
        user.record([p.norm() for p in user.params], [p.dtype for p in user.params])
        for p, value in zip(user.params, masters(user).values(), strict=True):
            user.check(torch.equal(p, value.to(p.dtype)), "parameters are their masters, rounded")


@bf16
def bf16_weight_clamp(user: User) -> None:
    for seed in range(3):
        user.step(seed)
        with torch.no_grad():
            for p in user.params:
                p.clamp_(-0.125, 0.125)
        user.check(is_within(user, 0.125), "masters are clamped")


@bf16
def bf16_weight_clamp_by_data(user: User) -> None:
    for seed in range(3):
        user.step(seed)
        for p in user.params:
            p.data.clamp_(-0.125, 0.125)
        user.check(is_within(user, 0.125), "masters are clamped")


@script(precision="bf16", model=lambda: Body(Normalises, lambda layer, x: layer(x)))
def bf16_weight_written_inside_of_forward(user: User) -> None:
    """Nothing tells of such a write; its chunk has to leave a small DEVICE all the same."""
    user.train(0, 1, 2)


@bf16
def bf16_values_untouched_keep_their_bits(user: User) -> None:
    """A write to one parameter leaves the masters of its neighbours as they are."""
    user.train(0)
    before = masters(user)
    with torch.no_grad():
        user.model.head.bias.zero_()
    after = masters(user)
    user.check(not after["head.bias"].any(), "the write has reached the master")
    user.check(all(torch.equal(before[n], after[n]) for n in before if n != "head.bias"), "others keep their bits")
    user.train(1)


@bf16
def bf16_ema(user: User) -> None:
    average = [p.detach().float().clone() for p in user.params]
    for seed in range(3):
        user.step(seed)
        for old, p in zip(average, user.params, strict=True):
            old.lerp_(p.detach().float(), 0.1)
    user.record(average)


@bf16
def bf16_l2_in_the_loss(user: User) -> None:
    for seed in range(3):
        loss = user.loss(seed) + 1e-2 * sum(p.float().square().sum() for p in user.params)
        user.backward(loss)
        user.update()
        user.record(loss.item())


@bf16
def bf16_clipped(user: User) -> None:
    for seed in range(3):
        user.backward(user.loss(seed) * 10)
        norm = clip_grad_norm_(user.params, 0.5)
        user.record(norm)
        user.check(norm > 1, "there are gradients")
        user.update()


@bf16
def bf16_gradients_read_and_scaled(user: User) -> None:
    for seed in range(2):
        user.backward(user.loss(seed))
        user.record([p.grad.norm() for p in user.params])
        for p in user.params:
            p.grad.mul_(0.5)
        user.update()


@bf16
def bf16_head_reset(user: User) -> None:
    user.train(0)
    user.model.head.reset_parameters()
    with torch.no_grad():
        user.model.head.weight.fill_(0.5)
    user.check((masters(user)["head.weight"] == 0.5).all(), "the write has reached the master")
    user.train(1)


@bf16
def bf16_states_read(user: User) -> None:
    user.train(0)
    for p in user.params:
        state = user.opt.state[p]
        user.record(state["exp_avg"].norm(), state["exp_avg"].dtype, float(state["step"]))


@bf16
def bf16_saved_and_loaded(user: User) -> None:
    user.train(0, 1)
    weights, states = copy.deepcopy(user.state_dict()), copy.deepcopy(user.opt.state_dict())
    first = user.step(2)
    user.model.load_state_dict(weights)
    user.opt.load_state_dict(states)
    user.check(user.step(2) == first, "a resumed step repeats the first one")


@bf16
def bf16_noise_added_and_removed(user: User) -> None:
    user.train(0)
    before = masters(user)
    clean = [p.detach().clone() for p in user.params]
    with torch.no_grad():
        for p in user.params:
            p.add_(torch.randn_like(p))
        user.record(user.loss(5).item())
        for p, old in zip(user.params, clean, strict=True):
            p.copy_(old)
    after = masters(user)
    for name, value in after.items():
        user.check(torch.allclose(value, before[name], rtol=1e-2, atol=1e-4), f"{name} is back within bf16")
    user.train(1)


@bf16
def bf16_copied_between_models(user: User) -> None:
    second = user.build(type(user.model))
    user.train(0)
    with torch.no_grad():
        for p, q in zip(user.model.parameters(), second.parameters(), strict=True):
            q.copy_(p)
        user.check(torch.equal(user.model(user.batch(3)), second(user.batch(3))), "both give the same")


@bf16
def bf16_alias_written(user: User) -> None:
    row = user.model.head.bias.data
    row.zero_()
    user.check(not masters(user)["head.bias"].any(), "the write has reached the master")
    user.train(0)


@fp16
def fp16_training(user: User) -> None:
    user.train(0, 1, 2)


@fp16
def fp16_clipped(user: User) -> None:
    for seed in range(3):
        user.backward(user.loss(seed) * 10)
        user.record(user.clip(0.5))
        user.update()


@fp16
def fp16_weight_clamp(user: User) -> None:
    for seed in range(3):
        user.step(seed)
        for p in user.params:
            p.data.clamp_(-0.125, 0.125)
        user.check(is_within(user, 0.125), "masters are clamped")


@fp16
def fp16_norms_logged(user: User) -> None:
    for seed in range(2):
        user.step(seed)
        user.record([p.float().norm() for p in user.params])


@fp16
def fp16_overflow_is_skipped(user: User) -> None:
    user.train(0)
    before = masters(user)
    user.backward(user.loss(1) * 1e30)
    user.update()
    after = masters(user)
    user.check(all(torch.equal(before[n], after[n]) for n in before), "a step that overflowed changes nothing")
    user.train(2)
