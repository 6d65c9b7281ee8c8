"""Parameter groups, schedulers, and what is built around an optimizer."""

from __future__ import annotations

import copy

import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.hostile.harness import User, script
from tests.hostile.models import ConvNet, Net


@script()
def groups_without_decay(user: User) -> None:
    decay = [p for n, p in user.model.named_parameters() if n.endswith("weight") and "norm" not in n]
    rest = [p for n, p in user.model.named_parameters() if not (n.endswith("weight") and "norm" not in n)]
    opt = user.adamw([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])
    for seed in range(3):
        user.backward(user.loss(seed))
        opt.step()
        opt.zero_grad()


@script()
def layerwise_learning_rates(user: User) -> None:
    """Lower layers learn more slowly: a group for each block."""
    layers = [user.model.stem, *user.model.blocks, user.model.head]
    groups = [{"params": layer.parameters(), "lr": 1e-2 * 0.8 ** (5 - i)} for i, layer in enumerate(layers)]
    opt = user.adamw(groups)
    for seed in range(3):
        user.backward(user.loss(seed))
        opt.step()
        opt.zero_grad()


@script()
def groups_added_later(user: User) -> None:
    """Unfreezing from the top, a layer at a time."""
    user.model.requires_grad_(False)
    user.model.head.requires_grad_(True)
    opt = user.adamw(user.model.head.parameters())
    for seed, block in enumerate(reversed(user.model.blocks)):
        loss = user.loss(seed)
        user.backward(loss)
        opt.step()
        opt.zero_grad()
        block.requires_grad_(True)
        opt.add_param_group({"params": list(block.parameters()), "lr": 1e-3})
        user.record(loss.item())
    user.record(len(opt.param_groups))


@script()
def cosine_with_warm_restarts(user: User) -> None:
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(user.opt, T_0=2)
    for seed in range(4):
        user.step(seed)
        scheduler.step()
        user.record(scheduler.get_last_lr())


@script()
def one_cycle(user: User) -> None:
    """It cycles the betas too."""
    scheduler = lr_scheduler.OneCycleLR(user.opt, max_lr=1e-2, total_steps=5)
    for seed in range(4):
        user.step(seed)
        scheduler.step()
        user.record([list(group["betas"]) for group in user.opt.param_groups])


@script()
def on_plateau(user: User) -> None:
    scheduler = lr_scheduler.ReduceLROnPlateau(user.opt, patience=0, factor=0.5)
    for seed in range(4):
        scheduler.step(user.step(seed))


@script()
def sequential_schedulers_saved_and_loaded(user: User) -> None:
    def schedule() -> lr_scheduler.SequentialLR:
        warm = lr_scheduler.LinearLR(user.opt, 0.1, total_iters=2)
        return lr_scheduler.SequentialLR(user.opt, [warm, lr_scheduler.ExponentialLR(user.opt, 0.9)], milestones=[2])

    scheduler = schedule()
    for seed in range(3):
        user.step(seed)
        scheduler.step()
    state = copy.deepcopy(scheduler.state_dict())
    scheduler.load_state_dict(state)
    user.train(3)


@script()
def learning_rate_set_by_hand(user: User) -> None:
    for seed in range(3):
        for group in user.opt.param_groups:
            group["lr"] = 1e-2 / (seed + 1)
            group["weight_decay"] = 0.1 * seed
        user.step(seed)


@script()
def lookahead(user: User) -> None:
    slow = [p.detach().clone() for p in user.params]
    for seed in range(4):
        user.step(seed)
        if seed % 2:
            for s, p in zip(slow, user.params, strict=True):
                s += 0.5 * (p.data - s)
                p.data.copy_(s)


@script()
def sharpness_aware_minimisation(user: User) -> None:
    """SAM: up the gradient, a second backward there, back, and the step with the second gradient."""
    for seed in range(3):
        user.backward(user.loss(seed))
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in user.params]), p=2)
        moves = []
        with torch.no_grad():
            for p in user.params:
                move = p.grad * (0.05 / (norm + 1e-12))
                p.add_(move)
                moves.append(move)
        user.opt.zero_grad()
        user.backward(user.loss(seed))
        with torch.no_grad():
            for p, move in zip(user.params, moves, strict=True):
                p.sub_(move)
        user.update()
        user.record(norm)


@script()
def sgd_by_hand(user: User) -> None:
    """No optimizer at all."""
    for seed in range(3):
        loss = user.loss(seed)
        user.backward(loss)
        with torch.no_grad():
            for p in user.model.parameters():
                p -= 0.1 * p.grad
                p.grad.zero_()
        user.record(loss.item())


@script()
def averaged_model_of_torch(user: User) -> None:
    """SWA by torch's own class: it deep-copies the model."""
    user.train(0)
    average = AveragedModel(user.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for seed in range(1, 4):
        user.step(seed)
        average.update_parameters(user.model)
    user.record([p.clone() for p in average.module.parameters()])


@script()
def averaged_by_swa_into_a_plain_model(user: User) -> None:
    average = AveragedModel(Net().requires_grad_(False), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for seed in range(3):
        user.step(seed)
        average.update_parameters(user.model)
    user.record([p.clone() for p in average.module.parameters()])


@script(model=ConvNet)
def batch_norm_statistics_updated(user: User) -> None:
    opt = user.adamw()
    user.backward(user.model(user.batch(0, 4, 3, 5, 5)).square().mean())
    opt.step()
    opt.zero_grad()
    update_bn([user.batch(seed, 4, 3, 5, 5) for seed in range(3)], user.model)
    user.record(user.model.norm.running_mean, user.model.norm.running_var)
