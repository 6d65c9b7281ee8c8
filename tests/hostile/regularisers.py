"""Averages of weights, and penalties on weights in the loss, by hand over all parameters."""

from __future__ import annotations

import torch
from torch import nn

from tests.hostile.harness import User, script


@script()
def ema_by_hand(user: User) -> None:
    """An average of the weights, kept in a list and updated after each step."""
    average = [p.detach().clone() for p in user.params]
    for seed in range(3):
        user.step(seed)
        with torch.no_grad():
            for old, p in zip(average, user.model.parameters(), strict=True):
                old.mul_(0.9).add_(p, alpha=0.1)
    user.record(average)


@script()
def ema_by_name(user: User) -> None:
    shadow = {name: p.data.clone() for name, p in user.model.named_parameters()}
    for seed in range(3):
        user.step(seed)
        for name, p in user.model.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * p.data
    user.record(shadow)


@script()
def ema_weights_swapped_in_for_evaluation(user: User) -> None:
    average = [p.detach().clone() for p in user.params]
    for seed in range(3):
        user.step(seed)
        for old, p in zip(average, user.params, strict=True):
            old.lerp_(p.detach(), 0.1)
    backup = [p.detach().clone() for p in user.params]
    for p, new in zip(user.params, average, strict=True):
        p.data.copy_(new)
    with torch.no_grad():
        user.record(user.loss(9).item())
    for p, old in zip(user.params, backup, strict=True):
        p.data.copy_(old)
    user.step(3)


@script()
def ema_with_foreach(user: User) -> None:
    average = [p.detach().clone() for p in user.params]
    for seed in range(3):
        user.step(seed)
        with torch.no_grad():
            torch._foreach_mul_(average, 0.9)
            torch._foreach_add_(average, user.params, alpha=0.1)
    user.record(average)


@script()
def l2_added_to_the_loss(user: User) -> None:
    for seed in range(3):
        penalty = sum(p.square().sum() for p in user.model.parameters())
        loss = user.loss(seed) + 1e-2 * penalty
        user.backward(loss)
        user.opt.step()
        user.opt.zero_grad()
        user.record(loss.item())


@script()
def l1_of_weights_only(user: User) -> None:
    for seed in range(3):
        loss = user.loss(seed)
        for name, p in user.model.named_parameters():
            if name.endswith("weight"):
                loss = loss + 1e-3 * p.abs().sum()
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def l2_before_the_forward(user: User) -> None:
    """The penalty is computed first: its graph is older than that of the forward."""
    for seed in range(3):
        penalty = torch.stack([p.norm() for p in user.params]).sum()
        loss = user.loss(seed) + 1e-2 * penalty
        user.backward(loss)
        user.update()
        user.record(loss.item(), penalty.item())


@script()
def orthogonal_regularisation(user: User) -> None:
    for seed in range(2):
        loss = user.loss(seed)
        for module in user.model.modules():
            if isinstance(module, nn.Linear):
                w = module.weight
                loss = loss + 1e-3 * (w @ w.t() - torch.eye(w.shape[0])).square().sum()
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def elastic_weight_consolidation(user: User) -> None:
    """EWC: anchors and Fisher values are taken by name, the penalty pulls towards them."""
    user.train(0, 1)
    anchor = {n: p.detach().clone() for n, p in user.model.named_parameters()}
    user.backward(user.loss(2))
    fisher = {n: p.grad.detach().clone().square() for n, p in user.model.named_parameters()}
    user.opt.zero_grad()
    for seed in range(3, 5):
        penalty = sum((fisher[n] * (p - anchor[n]).square()).sum() for n, p in user.model.named_parameters())
        user.backward(user.loss(seed) + 10 * penalty)
        user.update()
        user.record(penalty.item())
