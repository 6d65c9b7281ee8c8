"""Forward passes and losses out of the ordinary: several backwards, higher order, recomputation, functional calls."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.hostile.harness import User, script
from tests.hostile.models import WIDTH, Net, Tower


@script()
def gradient_penalty(user: User) -> None:
    """WGAN-GP: the gradient with respect to the input is part of the loss."""
    for seed in range(3):
        x = user.batch(seed).requires_grad_()
        out = user.model(x).sum()
        (g,) = torch.autograd.grad(out, x, create_graph=True)
        loss = (g.norm(dim=1) - 1).square().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def saliency(user: User) -> None:
    user.train(0)
    x = user.batch(3).requires_grad_()
    (g,) = torch.autograd.grad(user.model(x).sum(), x)
    user.record(g)
    user.train(1)


@script()
def adversarial_inputs(user: User) -> None:
    """FGSM: a backward for the input's gradient, then one for the weights'."""
    for seed in range(2):
        x = user.batch(seed).requires_grad_()
        (g,) = torch.autograd.grad(user.model(x).square().mean(), x)
        loss = user.model((x + 0.1 * g.sign()).detach()).square().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def retained_graph(user: User) -> None:
    for seed in range(2):
        out = user.model(user.batch(seed))
        user.backward(out[:, :2].square().mean(), retain_graph=True)
        user.backward(out[:, 2:].square().mean())
        user.update()


@script()
def several_losses_of_one_forward(user: User) -> None:
    for seed in range(2):
        out = user.model(user.batch(seed))
        losses = [out[:, i].square().mean() for i in range(4)]
        for i, loss in enumerate(losses):
            user.backward(loss, retain_graph=i < 3)
        user.update()


@script()
def backward_from_a_gradient(user: User) -> None:
    """`tensor.backward(gradient=...)` of an output that is no scalar."""
    for seed in range(2):
        out = user.model(user.batch(seed))
        out.backward(torch.ones_like(out) / 16)
        user.update()


@script()
def two_forwards_one_backward(user: User) -> None:
    for seed in range(2):
        a, b = user.model(user.batch(seed)), user.model(user.batch(seed + 10))
        user.backward(F.mse_loss(a, b) + a.square().mean())
        user.update()


@script()
def backward_in_another_order(user: User) -> None:
    for seed in range(2):
        losses = [user.loss(10 * seed + i) for i in range(3)]
        for loss in losses:
            user.backward(loss)
        user.update()


@script()
def checkpointed_blocks(user: User) -> None:
    model = user.model
    for seed in range(3):
        x = model.stem(user.batch(seed))
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        user.backward(model.head(x).square().mean())
        user.update()


@script()
def checkpointed_reentrantly(user: User) -> None:
    model = user.model
    for seed in range(3):
        x = model.stem(user.batch(seed))
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        user.backward(model.head(x).square().mean())
        user.update()


@script(model=Tower)
def checkpointed_sequence(user: User) -> None:
    for seed in range(3):
        x = user.batch(seed).requires_grad_()
        user.backward(checkpoint_sequential(user.model.layers, 2, x, use_reentrant=False).square().mean())
        user.update()


@script()
def checkpointed_lambda_with_a_weight(user: User) -> None:
    """What is recomputed reads a weight by itself."""
    model = user.model
    for seed in range(3):
        x = model.stem(user.batch(seed))
        x = checkpoint(lambda t: torch.tanh(t @ model.blocks[0].down.weight), x, use_reentrant=False)
        loss = x.square().mean() + model.head(x[:, :WIDTH]).square().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def saved_tensors_packed_by_hooks(user: User) -> None:
    """Saved tensors are converted on the way in and back."""
    for seed in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
            loss = user.loss(seed)
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def saved_tensors_on_the_cpu(user: User) -> None:
    for seed in range(3):
        with torch.autograd.graph.save_on_cpu():
            loss = user.loss(seed)
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script(model=Net)
def temperature_outside_of_any_module(user: User) -> None:
    """The last bias serves as a temperature in the loss."""
    for seed in range(3):
        logits = user.model(user.batch(seed)) / user.model.head.bias.exp().mean()
        loss = F.cross_entropy(logits, torch.arange(4))
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def early_exit(user: User) -> None:
    model = user.model
    for seed in range(4):
        x, loss = model.stem(user.batch(seed)), torch.zeros(())
        for depth, block in enumerate(model.blocks):
            x = block(x)
            loss = loss + model.head(x).square().mean()
            if depth == seed % 3:
                break
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def loss_without_some_outputs(user: User) -> None:
    for seed in range(3):
        outs = [user.model(user.batch(10 * seed + i)) for i in range(3)]
        user.backward(outs[seed].square().mean())
        user.update()


@script()
def anomaly_mode(user: User) -> None:
    with torch.autograd.detect_anomaly(check_nan=False):
        user.train(0, 1)
