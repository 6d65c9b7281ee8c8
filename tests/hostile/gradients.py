"""Looking at and changing gradients between backward and step."""

from __future__ import annotations

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.hostile.harness import User, script


@script()
def clipped_by_norm(user: User) -> None:
    for seed in range(3):
        user.backward(user.loss(seed) * 10)
        user.record(clip_grad_norm_(user.model.parameters(), 0.5))
        user.update()


@script()
def clipped_by_infinity_norm(user: User) -> None:
    for seed in range(3):
        user.backward(user.loss(seed) * 10)
        user.record(clip_grad_norm_(user.model.parameters(), 0.1, norm_type=float("inf")))
        user.update()


@script()
def clipped_without_foreach(user: User) -> None:
    for seed in range(3):
        user.backward(user.loss(seed) * 10)
        user.record(clip_grad_norm_(user.params, 0.5, foreach=False, error_if_nonfinite=True))
        user.update()


@script()
def clipped_by_value(user: User) -> None:
    for seed in range(3):
        user.backward(user.loss(seed) * 10)
        clip_grad_value_(user.model.parameters(), 0.01)
        user.update()


@script()
def clipped_by_the_optimizer(user: User) -> None:
    for seed in range(3):
        user.backward(user.loss(seed) * 10)
        user.record(user.clip(0.5))
        user.update()


@script()
def clipped_layer_by_layer(user: User) -> None:
    for seed in range(3):
        user.backward(user.loss(seed) * 10)
        for block in user.model.blocks:
            user.record(clip_grad_norm_(block.parameters(), 0.05))
        user.update()


@script()
def total_norm_by_hand(user: User) -> None:
    for seed in range(3):
        user.backward(user.loss(seed))
        total = 0.0
        for p in user.model.parameters():
            if p.grad is not None:
                total += p.grad.data.norm(2).item() ** 2
        user.record(total**0.5)
        user.update()


@script()
def norms_in_one_stack(user: User) -> None:
    for seed in range(2):
        user.backward(user.loss(seed))
        user.record(torch.norm(torch.stack([torch.norm(p.grad.detach(), 2.0) for p in user.params]), 2.0))
        user.update()


@script()
def clipped_by_hand(user: User) -> None:
    for seed in range(3):
        user.backward(user.loss(seed) * 10)
        norm = torch.sqrt(sum(p.grad.pow(2).sum() for p in user.params))
        scale = 0.5 / (norm + 1e-6)
        if scale < 1:
            for p in user.params:
                p.grad.mul_(scale)
        user.update()


@script()
def scaled_in_place(user: User) -> None:
    for seed in range(2):
        user.backward(user.loss(seed))
        for p in user.params:
            p.grad *= 0.5
        user.model.head.weight.grad.data.div_(2)
        user.update()


@script()
def noise_added(user: User) -> None:
    for seed in range(2):
        user.backward(user.loss(seed))
        for p in user.params:
            p.grad.add_(torch.randn_like(p) * 0.01)
        user.update()


@script()
def noise_like_the_gradient(user: User) -> None:
    for seed in range(2):
        user.backward(user.loss(seed))
        for p in user.params:
            p.grad.add_(0.01 * torch.randn_like(p.grad))
        user.update()


@script()
def centralised(user: User) -> None:
    for seed in range(2):
        user.backward(user.loss(seed))
        for p in user.params:
            if p.grad.dim() > 1:
                p.grad.data.add_(-p.grad.mean(dim=tuple(range(1, p.grad.dim())), keepdim=True))
        user.update()


@script()
def replaced_by_signs(user: User) -> None:
    for seed in range(2):
        user.backward(user.loss(seed))
        for p in user.params:
            p.grad.sign_()
        user.update()


@script()
def assigned(user: User) -> None:
    for seed in range(2):
        user.backward(user.loss(seed))
        for p in user.params:
            p.grad = p.grad.sign() * 0.1
        user.update()


@script()
def assigned_from_autograd_grad(user: User) -> None:
    for seed in range(2):
        grads = torch.autograd.grad(user.loss(seed), user.params)
        for p, g in zip(user.params, grads, strict=True):
            p.grad = g
        user.update()


@script()
def assigned_none_for_some(user: User) -> None:
    """Parameters whose gradient is None are skipped by the step."""
    for seed in range(2):
        user.backward(user.loss(seed))
        for p in user.model.stem.parameters():
            p.grad = None
        user.model.blocks[1].zero_grad()
        user.update()


@script()
def assigned_zeros(user: User) -> None:
    for seed in range(2):
        user.backward(user.loss(seed))
        user.model.stem.weight.grad = torch.zeros_like(user.model.stem.weight)
        user.model.head.bias.grad.zero_()
        user.update()


@script()
def zeroed_by_the_model(user: User) -> None:
    for seed in range(3):
        user.backward(user.loss(seed))
        user.opt.step()
        user.model.zero_grad()


@script()
def zeroed_before_backward_only(user: User) -> None:
    for seed in range(3):
        user.opt.zero_grad()
        loss = user.loss(seed)
        user.backward(loss)
        user.opt.step()
        user.record(loss.item())


@script()
def zeroed_to_zeros(user: User) -> None:
    for seed in range(3):
        user.backward(user.loss(seed))
        user.opt.step()
        user.opt.zero_grad(set_to_none=False)


@script()
def a_bad_batch_is_dropped(user: User) -> None:
    """`zero_grad` in place of `step` when the norm is too large."""
    for seed in range(4):
        user.backward(user.loss(seed) * (100 if seed == 1 else 1))
        norm = clip_grad_norm_(user.params, float("inf"))
        if norm > 10:
            user.model.zero_grad(set_to_none=True)
            continue
        user.update()
        user.record(norm)


@script()
def accumulated_and_divided(user: User) -> None:
    for round_ in range(2):
        for seed in range(3):
            user.backward(user.loss(3 * round_ + seed))
        for p in user.params:
            p.grad.div_(3)
        user.update()


@script()
def looked_at_between_micro_batches(user: User) -> None:
    for round_ in range(2):
        for seed in range(3):
            user.backward(user.loss(3 * round_ + seed) / 3)
            user.record([p.grad.norm() for p in user.params])
        user.update()


@script()
def gradient_noise_scale(user: User) -> None:
    """Norms of the gradients of two micro-batches and of their mean."""
    user.backward(user.loss(0))
    first = [p.grad.clone() for p in user.params]
    user.opt.zero_grad()
    user.backward(user.loss(1))
    cosines = [torch.dot(g.flatten(), p.grad.flatten()) for g, p in zip(first, user.params, strict=True)]
    user.record(cosines)
    user.update()


@script()
def projected_conflicting_gradients(user: User) -> None:
    """PCGrad: two tasks, each gradient projected on the normal plane of the other one."""
    for seed in range(2):
        grads = []
        for task in range(2):
            user.model.zero_grad()
            out = user.model(user.batch(seed))
            user.backward(out[:, 2 * task : 2 * task + 2].square().mean())
            grads.append([p.grad.clone() for p in user.params])
        dot = sum((a * b).sum() for a, b in zip(*grads, strict=True))
        for p, a, b in zip(user.params, *grads, strict=True):
            p.grad = a + b if dot >= 0 else a + b - dot * b / b.norm().clamp(min=1e-3) ** 2 * 1e-3
        user.update()


@script()
def adaptive_clipping(user: User) -> None:
    """AGC: the norm of each gradient against that of its parameter."""
    for seed in range(3):
        user.backward(user.loss(seed) * 10)
        for p in user.params:
            limit = p.detach().norm().clamp(min=1e-3) * 0.01
            norm = p.grad.detach().norm()
            if norm > limit:
                p.grad.detach().mul_(limit / norm.clamp(min=1e-6))
        user.update()


@script()
def unused_parameters_have_none(user: User) -> None:
    for seed in range(2):
        x = user.model.stem(user.batch(seed))
        user.backward(user.model.head(user.model.blocks[seed](x)).square().mean())
        user.record([name for name, p in user.model.named_parameters() if p.grad is None])
        user.record(sum(p.grad is not None for p in user.params))
        user.update()


@script()
def none_before_backward_and_after_zero_grad(user: User) -> None:
    user.record(all(p.grad is None for p in user.params))
    user.backward(user.loss())
    user.record(any(p.grad is None for p in user.params))
    user.update()
    user.record(all(p.grad is None for p in user.params))
