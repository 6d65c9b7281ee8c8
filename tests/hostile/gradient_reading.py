"""More of what is read from gradients: logging, checks, hooks, aliases."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from tests.hostile.harness import Refused, User, script


@script()
def gradient_histograms(user: User) -> None:
    for seed in range(2):
        user.backward(user.loss(seed))
        user.record({n: torch.histc(p.grad, bins=8, min=-0.1, max=0.1) for n, p in user.model.named_parameters()})
        user.update()


@script()
def gradient_statistics_by_numpy(user: User) -> None:
    user.backward(user.loss())
    for p in user.params:
        values = p.grad.cpu().numpy()
        user.record(float(values.mean()), float(abs(values).max()))
    user.update()


@script()
def gradient_properties(user: User) -> None:
    user.backward(user.loss())
    g = user.model.head.weight.grad
    user.record(
        list(g.shape), g.dtype, str(g.device), g.requires_grad, g.is_leaf, g.dim(), g.numel(), g.is_contiguous()
    )
    user.record(isinstance(g, Tensor), len(g), g.size(0), g.ndim, g.is_sparse, g.layout)
    user.update()


@script()
def gradient_printed(user: User) -> None:
    user.backward(user.loss())
    user.record(repr(user.model.head.bias.grad), f"{user.model.head.bias.grad.sum():.5f}")
    user.update()


@script()
def gradient_indexed(user: User) -> None:
    user.backward(user.loss())
    g = user.model.stem.weight.grad
    user.record(g[0], g[:, 1], g[g > 0].sum(), g[1, 2].item(), g.tolist()[3], g.max(), g.argmax().item())
    g[0] = 0.0
    g[:, 1].fill_(0.5)
    user.update()


@script()
def gradients_checked_for_nan(user: User) -> None:
    for seed in range(3):
        user.backward(user.loss(seed))
        bad = any(not torch.isfinite(p.grad).all() for p in user.params if p.grad is not None)
        user.record(bad)
        user.update()


@script()
def gradient_arithmetic(user: User) -> None:
    user.backward(user.loss())
    a, b = user.model.blocks[0].up.weight, user.model.blocks[1].up.weight
    user.record(a.grad + b.grad, a.grad * a, 2 * a.grad - 1, -b.grad, a.grad @ b.grad.t(), a.grad.t())
    user.record(torch.cat([a.grad, b.grad]), torch.allclose(a.grad, b.grad), torch.equal(a.grad, a.grad))
    user.update()


@script()
def gradients_as_one_vector(user: User) -> None:
    for seed in range(2):
        user.backward(user.loss(seed))
        flat = torch.cat([p.grad.view(-1) for p in user.params])
        user.record(flat, flat.norm())
        user.update()


@script()
def gradients_with_foreach(user: User) -> None:
    for seed in range(2):
        user.backward(user.loss(seed))
        grads = [p.grad for p in user.params]
        user.record(torch._foreach_norm(grads))
        torch._foreach_mul_(grads, 0.5)
        user.update()


@script()
def gradient_kept_by_reference(user: User) -> None:
    """`g = p.grad`, changed through the other name before the step."""
    for seed in range(2):
        user.backward(user.loss(seed))
        g = user.model.head.weight.grad
        user.record(g.norm())
        g.mul_(0.5)
        user.record(user.model.head.weight.grad.norm())
        user.update()


@script(expect=Refused("StateError", "consumed by step"))
def gradient_read_after_the_step(user: User) -> None:
    """The step has used it up: what it was can be had before only."""
    user.backward(user.loss(0))
    user.opt.step()
    user.record(user.model.head.weight.grad)


@script()
def gradients_copied_to_another_parameter(user: User) -> None:
    for seed in range(2):
        user.backward(user.loss(seed))
        user.model.blocks[0].up.weight.grad.copy_(user.model.blocks[1].up.weight.grad)
        user.model.blocks[2].down.weight.grad = user.model.blocks[1].down.weight.grad.clone()
        user.update()


@script()
def gradients_saved_and_restored(user: User) -> None:
    user.backward(user.loss(0))
    kept = {n: copy.deepcopy(p.grad) for n, p in user.model.named_parameters()}
    user.opt.zero_grad()
    user.step(1)
    for n, p in user.model.named_parameters():
        p.grad = kept[n]
    user.update()


@script()
def smoothed_gradients(user: User) -> None:
    """Grokfast: an average of gradients is added to them."""
    average: dict[str, Tensor] = {}
    for seed in range(3):
        user.backward(user.loss(seed))
        for name, p in user.model.named_parameters():
            if name not in average:
                average[name] = p.grad.detach().clone()
            average[name] = 0.9 * average[name] + 0.1 * p.grad.detach()
            p.grad = p.grad + 2.0 * average[name]
        user.update()


@script()
def tensor_hooks(user: User) -> None:
    norms: list[float] = []
    for p in user.params:
        p.register_hook(lambda grad: norms.append(grad.norm().item()))
    user.train(0, 1)
    user.record(sorted(norms))


@script()
def tensor_hooks_that_change(user: User) -> None:
    for p in user.params:
        p.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
    user.train(0, 1)


@script()
def hooks_that_mask_rows(user: User) -> None:
    """Only some rows of the head are trained."""
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0]).unsqueeze(1)
    handle = user.model.head.weight.register_hook(lambda grad: grad * mask)
    user.train(0, 1)
    handle.remove()
    user.train(2)


@script()
def hooks_after_accumulation(user: User) -> None:
    norms: dict[str, float] = {}
    for name, p in user.model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: norms.__setitem__(name, p.grad.norm().item()))
    for seed in range(2):
        user.step(seed)
        user.record(dict(sorted(norms.items())))


@script()
def hooks_after_accumulation_that_scale(user: User) -> None:
    def shrink(p: Tensor) -> None:
        p.grad.mul_(0.1)

    for p in user.model.head.parameters():
        p.register_post_accumulate_grad_hook(shrink)
    user.train(0, 1)


@script()
def hooks_read_the_parameter(user: User) -> None:
    """Decoupled decay in the hook: the gradient plus a part of the weight."""
    for p in user.params:
        p.register_hook(lambda grad, p=p: grad + 0.01 * p.detach())
    user.train(0, 1)


@script()
def gradient_norm_in_the_loss_of_the_next_step(user: User) -> None:
    previous = torch.tensor(1.0)
    for seed in range(3):
        user.backward(user.loss(seed) / previous.clamp(min=0.1))
        previous = torch.sqrt(sum(p.grad.square().sum() for p in user.params))
        user.record(previous)
        user.update()


@script()
def learning_rate_from_the_gradient_norm(user: User) -> None:
    for seed in range(3):
        user.backward(user.loss(seed))
        norm = math.sqrt(sum(float(p.grad.pow(2).sum()) for p in user.params))
        for group in user.opt.param_groups:
            group["lr"] = 1e-2 / (1 + norm)
        user.update()


@script()
def gradients_frozen_by_requires_grad(user: User) -> None:
    user.model.stem.requires_grad_(False)
    user.backward(user.loss())
    user.record([p.grad is None for p in user.params])
    user.update()
    user.model.stem.requires_grad_(True)
    user.train(1)
