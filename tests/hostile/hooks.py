"""Hooks of modules, and calls that pass by them."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.hostile.harness import User, script


@script()
def forward_hooks_that_read_weights(user: User) -> None:
    seen: list[float] = []
    for block in user.model.blocks:
        block.register_forward_pre_hook(lambda m, _: seen.append(m.up.weight.norm().item()))
        block.register_forward_hook(lambda m, _, out: seen.append(m.down.weight.norm().item()))
    user.train(0, 1)
    user.record(seen)


@script()
def backward_hooks_that_read_weights(user: User) -> None:
    seen: list[float] = []
    for block in user.model.blocks:
        block.register_full_backward_hook(lambda m, *_: seen.append(m.up.weight.norm().item()))
        block.register_full_backward_pre_hook(lambda m, *_: seen.append(m.norm.weight.sum().item()))
    user.train(0, 1)
    user.record(seen)


@script()
def backward_hooks_that_change_gradients(user: User) -> None:
    user.model.blocks[1].register_full_backward_hook(lambda m, grads, _: (grads[0] * 0.5,))
    user.train(0, 1)


@script()
def hooks_that_replace_outputs(user: User) -> None:
    user.model.blocks[0].register_forward_hook(lambda m, _, out: out * 2)
    user.model.blocks[1].register_forward_pre_hook(lambda m, args: (args[0] + m.norm.bias,))
    user.train(0, 1)


@script()
def features_collected_by_hooks(user: User) -> None:
    """Activations of the blocks are part of the loss."""
    for seed in range(2):
        features: list[Tensor] = []
        handles = [b.register_forward_hook(lambda m, _, out: features.append(out)) for b in user.model.blocks]  # noqa: B023
        loss = user.loss(seed) + sum(f.abs().mean() for f in features)
        user.backward(loss)
        user.update()
        for handle in handles:
            handle.remove()
        user.record(loss.item())


@script()
def submodules_called_by_themselves(user: User) -> None:
    """The model's own forward is never called."""
    for seed in range(3):
        model = user.model
        x = model.blocks[2](model.blocks[0](model.stem(user.batch(seed))))
        loss = model.head(x).square().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def forward_called_directly(user: User) -> None:
    """`model.forward(x)`, past the hooks of the model itself."""
    for seed in range(2):
        loss = user.model.forward(user.batch(seed)).square().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def every_forward_called_directly(user: User) -> None:
    """No `__call__` at all: no hook of any module runs."""
    model = user.model
    for seed in range(2):
        x = model.stem.forward(user.batch(seed))
        loss = model.head.forward(torch.tanh(x)).square().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def outputs_kept_in_a_list(user: User) -> None:
    """Outputs are appended with their graphs, as a logger that forgot `detach` does."""
    kept = []
    for seed in range(4):
        out = user.model(user.batch(seed))
        kept.append(out)
        user.backward(out.square().mean())
        user.update()
    user.record([out.detach().clone() for out in kept])
