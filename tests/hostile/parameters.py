"""Reads and writes of parameters between steps, as training scripts have them, without `gather`."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.hostile.harness import User, script
from tests.hostile.models import ConvNet, LanguageModel, Net


@script()
def foreach_on_the_parameters_themselves(user: User) -> None:
    user.train(0)
    with torch.no_grad():
        torch._foreach_mul_(user.params, 0.99)
        user.record(torch._foreach_norm(user.params))
    user.train(1)


@script()
def weight_clamp(user: User) -> None:
    """What WGAN critics do after each step."""
    for seed in range(3):
        user.step(seed)
        for p in user.model.parameters():
            p.data.clamp_(-0.1, 0.1)


@script()
def weight_clamp_under_no_grad(user: User) -> None:
    for seed in range(3):
        user.step(seed)
        with torch.no_grad():
            for p in user.model.parameters():
                p.clamp_(-0.1, 0.1)


@script()
def max_norm_constraint(user: User) -> None:
    for seed in range(3):
        user.step(seed)
        with torch.no_grad():
            for block in user.model.blocks:
                norm = block.up.weight.norm(dim=1, keepdim=True)
                block.up.weight.mul_(norm.clamp(max=0.5) / norm)


@script()
def weight_decay_by_hand(user: User) -> None:
    for seed in range(3):
        with torch.no_grad():
            for p in user.model.parameters():
                if p.ndim > 1:
                    p.mul_(1 - 1e-2 * 0.1)
        user.step(seed)


@script()
def pruning_masks(user: User) -> None:
    """Magnitude pruning: masks from the weights, applied after each step."""
    user.train(0)
    masks = {n: (p.abs() > p.abs().median()).float() for n, p in user.model.named_parameters() if p.ndim == 2}
    for seed in range(1, 4):
        user.step(seed)
        for n, p in user.model.named_parameters():
            if n in masks:
                p.data.mul_(masks[n])
    user.record([int((p == 0).sum()) for p in user.params])


@script()
def noise_injected_and_removed(user: User) -> None:
    for seed in range(3):
        clean = [p.detach().clone() for p in user.params]
        with torch.no_grad():
            for p in user.params:
                p.add_(torch.randn_like(p) * 0.01)
        user.backward(user.loss(seed))
        with torch.no_grad():
            for p, old in zip(user.params, clean, strict=True):
                p.copy_(old)
        user.update()


@script()
def quantised_and_dequantised_in_place(user: User) -> None:
    for seed in range(2):
        user.step(seed)
        with torch.no_grad():
            for p in user.params:
                scale = p.abs().max() / 127
                p.copy_((p / scale).round().clamp(-127, 127) * scale)


@script()
def initialised_by_apply(user: User) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)

    user.model.apply(init)
    user.train(0, 1)


@script()
def initialised_one_by_one(user: User) -> None:
    for name, p in user.model.named_parameters():
        if p.dim() > 1:
            nn.init.orthogonal_(p)
        elif "norm" not in name:
            nn.init.normal_(p, std=0.02)
    user.train(0, 1)


@script()
def reset_parameters_of_the_head(user: User) -> None:
    user.train(0, 1)
    user.model.head.reset_parameters()
    user.model.blocks[1].norm.reset_parameters()
    user.train(2)


@script()
def parameters_as_one_vector(user: User) -> None:
    user.train(0)
    vector = parameters_to_vector(user.model.parameters())
    user.record(vector, vector.norm())
    vector_to_parameters(vector.detach() * 0.9, user.model.parameters())
    user.train(1)


@script()
def manual_sgd_of_the_head(user: User) -> None:
    """The body by AdamW, the head by hand from `autograd.grad`."""
    body = [p for n, p in user.model.named_parameters() if not n.startswith("head")]
    opt = user.adamw(body)
    head = list(user.model.head.parameters())
    for seed in range(3):
        loss = user.loss(seed)
        user.backward(loss)
        with torch.no_grad():
            for p in head:
                p -= 0.1 * p.grad
                p.grad = None
        opt.step()
        opt.zero_grad()
        user.record(loss.item())


@script()
def random_pseudo_gradients_without_an_optimizer(user: User) -> None:
    """Evolution strategies: no backward at all."""
    for seed in range(2):
        noise = [torch.randn_like(p) for p in user.params]
        losses = []
        with torch.no_grad():
            for sign in (1, -1):
                for p, n in zip(user.params, noise, strict=True):
                    p.add_(n, alpha=0.01 * sign)
                losses.append(user.loss(seed).item())
                for p, n in zip(user.params, noise, strict=True):
                    p.sub_(n, alpha=0.01 * sign)
            for p, n in zip(user.params, noise, strict=True):
                p.sub_(n, alpha=0.1 * (losses[0] - losses[1]))
        user.record(losses)


@script(model=LanguageModel)
def embedding_row_set_to_zero(user: User) -> None:
    """A padding row is cleared after each step; the embedding is tied to the head."""
    for seed in range(3):
        loss = F.cross_entropy(user.model(user.tokens(seed)).flatten(0, 1), user.tokens(seed + 50).flatten())
        user.backward(loss)
        user.update()
        with torch.no_grad():
            user.model.embed.weight[0].zero_()
        user.record(loss.item(), user.model.head.weight[0].abs().sum().item())


@script(model=ConvNet)
def filters_normalised_and_logged(user: User) -> None:
    for seed in range(3):
        loss = user.model(user.batch(seed, 2, 3, 5, 5)).square().mean()
        user.backward(loss)
        user.update()
        with torch.no_grad():
            kernel = user.model.conv.weight
            kernel.div_(kernel.flatten(1).norm(dim=1).view(-1, 1, 1, 1))
        user.record(loss.item(), user.model.conv.weight.flatten(1).norm(dim=1))


@script()
def one_layer_copied_to_another(user: User) -> None:
    user.train(0)
    user.model.blocks[2].up.weight.data.copy_(user.model.blocks[0].up.weight.data)
    with torch.no_grad():
        user.model.blocks[2].down.weight.copy_(user.model.blocks[1].down.weight)
    user.train(1)


@script()
def weights_from_a_plain_copy(user: User) -> None:
    """Pretrained weights, copied by name from a model that no manager knows."""
    torch.manual_seed(5)
    pretrained = Net()
    with torch.no_grad():
        for (_, p), (_, q) in zip(user.model.named_parameters(), pretrained.named_parameters(), strict=True):
            p.copy_(q)
    user.train(0, 1)


@script()
def weights_to_a_plain_copy(user: User) -> None:
    """A target network in plain PyTorch, updated from the managed one."""
    target = copy.deepcopy(Net()).requires_grad_(False)
    for seed in range(3):
        user.step(seed)
        with torch.no_grad():
            for p, q in zip(user.model.parameters(), target.parameters(), strict=True):
                q.data.mul_(0.5).add_(p.data, alpha=0.5)
    user.record([q.clone() for q in target.parameters()])
