"""Functional calls, transforms, custom autograd functions, and derivatives of higher order."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from tests.hostile.harness import User, script
from tests.hostile.models import WIDTH


@script()
def gradient_of_parameters_by_autograd_grad(user: User) -> None:
    user.train(0)
    grads = torch.autograd.grad(user.loss(1), user.params)
    user.record(grads)
    user.train(2)


@script()
def gradient_of_some_parameters(user: User) -> None:
    user.train(0)
    loss = user.loss(1)
    user.record(torch.autograd.grad(loss, list(user.model.head.parameters()), retain_graph=True))
    user.record(torch.autograd.grad(loss, [user.model.blocks[0].up.weight]))
    user.train(2)


@script()
def hessian_vector_product(user: User) -> None:
    """Double backward through the parameters."""
    user.train(0)
    grads = torch.autograd.grad(user.loss(1), user.params, create_graph=True)
    dot = sum((g * g.detach()).sum() for g in grads)
    user.record(torch.autograd.grad(dot, user.params))
    user.train(2)


@script()
def gradient_norm_as_a_loss(user: User) -> None:
    for seed in range(2):
        loss = user.loss(seed)
        grads = torch.autograd.grad(loss, user.params, create_graph=True)
        penalty = sum(g.square().sum() for g in grads)
        user.backward(loss + 0.01 * penalty)
        user.update()
        user.record(penalty.item())


@script()
def functional_call_with_own_parameters(user: User) -> None:
    user.train(0)
    params = {n: p.detach() * 0.9 for n, p in user.model.named_parameters()}
    user.record(functional_call(user.model, params, (user.batch(1),)))
    user.train(1)


@script()
def one_step_ahead_by_functional_call(user: User) -> None:
    """MAML: an inner step with `create_graph`, the outer loss through it."""
    for seed in range(2):
        params = dict(user.model.named_parameters())
        grads = torch.autograd.grad(user.loss(seed), list(params.values()), create_graph=True)
        fast = {n: p - 0.1 * g for (n, p), g in zip(params.items(), grads, strict=True)}
        loss = functional_call(user.model, fast, (user.batch(seed + 10),)).square().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def gradients_by_example(user: User) -> None:
    """`torch.func`: `vmap(grad(...))` over a dict of detached parameters."""
    user.train(0)
    params = {n: p.detach() for n, p in user.model.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(user.model, params, (x.unsqueeze(0),)).square().mean()

    grads = vmap(grad(loss), in_dims=(None, 0))(params, user.batch(1))
    user.record({n: g.flatten(1).norm(dim=1) for n, g in grads.items()})
    user.train(1)


class Straight(torch.autograd.Function):
    """Rounds the weight that it is given; saves it for backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ (w * 8).round().div(8).t()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


@script()
def custom_function_given_a_parameter(user: User) -> None:
    for seed in range(3):
        x = user.model.stem(user.batch(seed))
        x = torch.tanh(Straight.apply(x, user.model.blocks[0].up.weight))
        loss = Straight.apply(x, user.model.blocks[0].down.weight).square().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item())


class Attribute(torch.autograd.Function):
    """Keeps the weight as an attribute, and not by `save_for_backward`."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, w: Tensor) -> Tensor:
        ctx.x, ctx.w = x, w
        return x @ w.t()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad @ ctx.w, grad.t() @ ctx.x


class Kept(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Attribute.apply(x, self.weight) + self.bias


@script(model=lambda: nn.Sequential(*(m for _ in range(4) for m in (Kept(WIDTH, WIDTH), nn.Tanh())), Kept(WIDTH, 4)))
def custom_function_that_keeps_the_weight(user: User) -> None:
    user.train(0, 1, 2)


@script()
def jacobian_of_the_output(user: User) -> None:
    user.train(0)
    user.record(torch.autograd.functional.jacobian(user.model, user.batch(1)))
    user.train(1)
