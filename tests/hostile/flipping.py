"""What is trained, clipped and counted changes from step to step, and in the middle of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel

from tests.hostile.harness import Raises, User, script
from tests.hostile.models import WIDTH, Net


@script()
def frozen_between_backward_and_step(user: User) -> None:
    """The gradient is there, so torch's optimizers update what no longer requires one."""
    user.train(0)
    user.backward(user.loss(1))
    user.model.blocks[0].requires_grad_(False)
    user.update()
    user.train(2)
    user.model.blocks[0].requires_grad_(True)
    user.train(3)


@script()
def frozen_between_forward_and_backward(user: User) -> None:
    user.train(0)
    loss = user.loss(1)
    user.model.blocks[0].requires_grad_(False)
    try:
        user.backward(loss)
        user.record([p.grad is None for p in user.params])
    except RuntimeError:
        user.record("refused")
    user.opt.zero_grad()
    user.model.blocks[0].requires_grad_(True)
    user.train(3)


@script()
def unfrozen_between_forward_and_backward(user: User) -> None:
    user.train(0)
    user.model.blocks[0].requires_grad_(False)
    loss = user.loss(1)
    user.model.blocks[0].requires_grad_(True)
    user.backward(loss)
    user.record([p.grad is None for p in user.params])
    user.update()
    user.train(3)


@script()
def unfrozen_between_backward_and_step(user: User) -> None:
    user.train(0)
    user.model.stem.requires_grad_(False)
    user.backward(user.loss(1))
    user.model.stem.requires_grad_(True)
    user.update()
    user.train(2)


@script()
def frozen_between_micro_batches(user: User) -> None:
    for seed in range(3):
        user.backward(user.loss(seed))
        user.model.blocks[1].requires_grad_(False)
        user.backward(user.loss(seed + 10))
        user.model.blocks[1].requires_grad_(True)
        user.update()


@script()
def one_weight_of_a_layer_flips(user: User) -> None:
    for seed in range(5):
        user.model.head.bias.requires_grad = seed % 2 == 0
        user.model.blocks[seed % 3].norm.weight.requires_grad_(seed != 3)
        user.step(seed)


@script()
def all_frozen_for_a_step(user: User) -> None:
    user.train(0)
    user.model.requires_grad_(False)
    x = user.batch(1).requires_grad_()
    user.model(x).square().mean().backward()
    user.record(x.grad)
    user.model.requires_grad_(True)
    user.train(2)


@script()
def clipped_by_every_norm(user: User) -> None:
    for seed, kind in enumerate((1.0, 2.0, 3.0, 0.5, float("inf"), 2)):
        user.backward(user.loss(seed))
        user.record(clip_grad_norm_(user.params, 0.1, norm_type=kind))
        user.update()


@script()
def clipped_by_generators_and_single_tensors(user: User) -> None:
    for seed in range(3):
        user.backward(user.loss(seed))
        user.record(clip_grad_norm_(user.model.parameters(), 0.2))
        user.record(clip_grad_norm_(user.model.head.weight, 0.05))
        user.record(clip_grad_norm_((p for p in user.params[:3]), 0.05, foreach=True))
        clip_grad_value_(user.model.stem.weight, 1e-3)
        clip_grad_value_(user.model.parameters(), 5e-3, foreach=False)
        clip_grad_value_(user.model.blocks[0].parameters(), 2e-3, foreach=True)
        user.update()


@script()
def clipped_more_than_once(user: User) -> None:
    for seed in range(3):
        user.backward(user.loss(seed))
        for limit in (1.0, 0.3, 0.01):
            user.record(clip_grad_norm_(user.params, limit))
        user.update()


@script()
def clipped_between_micro_batches(user: User) -> None:
    for seed in range(3):
        user.backward(user.loss(seed))
        user.record(clip_grad_norm_(user.params, 0.05))
        user.backward(user.loss(seed + 10))
        user.record(clip_grad_norm_(user.params, 0.1))
        user.update()


@script()
def clipped_in_two_calls(user: User) -> None:
    for seed in range(2):
        user.backward(user.loss(seed))
        grads = [p.grad for p in user.params]
        norm = get_total_norm(grads, norm_type=1.0, error_if_nonfinite=True, foreach=False)
        clip_grads_with_norm_(user.params, 0.1, norm, foreach=False)
        user.record(norm, get_total_norm([p.grad for p in user.params], norm_type=float("inf")))
        user.update()


@script()
def norm_that_is_not_finite(user: User) -> None:
    """The step is refused by torch; the batch is dropped."""
    user.train(0)
    user.backward(user.loss(1) * float("inf"))
    try:
        clip_grad_norm_(user.params, 1.0, error_if_nonfinite=True)
    except RuntimeError:
        user.record("not finite")
    user.opt.zero_grad()
    user.train(2)


@script()
def clipped_without_gradients(user: User) -> None:
    user.record(clip_grad_norm_(user.params, 1.0))
    user.train(0)
    user.record(clip_grad_norm_(user.params, 1.0))
    user.train(1)


def scaled_steps(user: User, scaler: Any, bad: set[int], *, unscaled: bool) -> None:
    for seed in range(5):
        loss = user.loss(seed) * (float("inf") if seed in bad else 1.0)
        scaler.scale(loss).backward()
        if unscaled:
            scaler.unscale_(user.opt)
            norm = clip_grad_norm_(user.params, 0.1)
            user.record(norm.isfinite())
        scaler.step(user.opt)
        scaler.update()
        user.opt.zero_grad()
        user.record(scaler.get_scale())


@script()
def scaled_by_torch(user: User) -> None:
    scaled_steps(user, torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2), set(), unscaled=False)


@script()
def scaled_by_torch_and_clipped(user: User) -> None:
    scaled_steps(user, torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2), set(), unscaled=True)


@script()
def scaled_by_torch_with_overflows(user: User) -> None:
    scaled_steps(user, torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2), {1, 3}, unscaled=False)


@script()
def scaled_by_torch_with_overflows_and_clipped(user: User) -> None:
    scaled_steps(user, torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2), {0, 2}, unscaled=True)


@script()
def scaler_switched_off(user: User) -> None:
    scaled_steps(user, torch.amp.GradScaler("cpu", enabled=False), set(), unscaled=True)


@script()
def scaler_saved_and_loaded(user: User) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0, growth_interval=1)
    scaled_steps(user, scaler, {2}, unscaled=False)
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    scaled_steps(user, other, {1}, unscaled=True)


@script()
def scaler_of_two_optimizers(user: User) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    first, second = user.adamw(user.params[:6]), user.adam(user.params[6:])
    for seed in range(4):
        scaler.scale(user.loss(seed) * (float("inf") if seed == 1 else 1.0)).backward()
        scaler.unscale_(first)
        scaler.step(first)
        scaler.step(second)
        scaler.update()
        first.zero_grad()
        second.zero_grad()
        user.record(scaler.get_scale())


@script()
def scaled_micro_batches(user: User) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for seed in range(3):
        for part in range(2):
            scaler.scale(user.loss(2 * seed + part) / 2).backward()
        scaler.unscale_(user.opt)
        user.record(clip_grad_norm_(user.params, 0.5))
        scaler.step(user.opt)
        scaler.update()
        user.opt.zero_grad()


def scheduled(user: User, make: Any, *, with_loss: bool = False) -> None:
    scheduler = make(user.opt)
    for seed in range(5):
        loss = user.step(seed)
        if with_loss:
            scheduler.step(loss)
        else:
            scheduler.step()
        user.record([(float(g["lr"]), [float(b) for b in g["betas"]]) for g in user.opt.param_groups])


@script()
def cyclic_rates_and_momenta(user: User) -> None:
    scheduled(user, lambda opt: lr_scheduler.CyclicLR(opt, 1e-3, 1e-2, step_size_up=2, cycle_momentum=True))


@script()
def one_cycle_in_three_phases(user: User) -> None:
    scheduled(
        user,
        lambda opt: lr_scheduler.OneCycleLR(
            opt, 1e-2, total_steps=6, three_phase=True, anneal_strategy="linear", base_momentum=0.8, max_momentum=0.9
        ),
    )


@script()
def chained_schedules(user: User) -> None:
    scheduled(
        user,
        lambda opt: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(opt, 0.1, total_iters=2), lr_scheduler.ExponentialLR(opt, 0.9)]
        ),
    )


@script()
def multiplied_rates(user: User) -> None:
    scheduled(user, lambda opt: lr_scheduler.MultiplicativeLR(opt, lambda step: 0.5 if step % 2 else 1.7))


@script()
def polynomial_rates(user: User) -> None:
    scheduled(user, lambda opt: lr_scheduler.PolynomialLR(opt, total_iters=3, power=2.0))


@script()
def rates_that_reach_zero(user: User) -> None:
    scheduled(user, lambda opt: lr_scheduler.LambdaLR(opt, lambda step: max(0.0, 1 - step / 2)))


@script()
def swa_rates(user: User) -> None:
    scheduled(user, lambda opt: SWALR(opt, swa_lr=1e-3, anneal_epochs=3))


@script()
def rate_on_plateau_by_gradient_norm(user: User) -> None:
    scheduled(user, lambda opt: lr_scheduler.ReduceLROnPlateau(opt, factor=0.1, patience=1), with_loss=True)


@script()
def a_rate_that_is_a_tensor(user: User) -> None:
    opt = user.adamw(lr=torch.tensor(1e-2))
    scheduler = lr_scheduler.ExponentialLR(opt, 0.5)
    for seed in range(3):
        user.backward(user.loss(seed))
        opt.step()
        opt.zero_grad()
        scheduler.step()
        user.record(float(opt.param_groups[0]["lr"]))


@script()
def a_rate_that_is_a_tensor_written_in_place(user: User) -> None:
    rate = torch.tensor(1e-2)
    opt = user.adamw(lr=rate)
    for seed in range(3):
        user.backward(user.loss(seed))
        rate.mul_(0.5)
        opt.step()
        opt.zero_grad()


@script()
def options_changed_between_backward_and_step(user: User) -> None:
    for seed in range(4):
        user.backward(user.loss(seed))
        group = user.opt.param_groups[0]
        group["lr"], group["betas"] = 1e-2 / (seed + 1), (0.9 - 0.1 * seed, 0.99)
        group["weight_decay"], group["eps"] = 0.1 * seed, 1e-8 * (seed + 1)
        user.update()


@script()
def parameters_moved_between_groups(user: User) -> None:
    opt = user.adamw([{"params": user.params[:5], "lr": 1e-2}, {"params": user.params[5:], "lr": 1e-3}])
    for seed in range(3):
        user.backward(user.loss(seed))
        opt.step()
        opt.zero_grad()
        opt.param_groups[1]["params"].append(opt.param_groups[0]["params"].pop())


@script()
def trained_under_no_grad(user: User) -> None:
    with torch.no_grad():
        for seed in range(3):
            with torch.enable_grad():
                loss = user.loss(seed)
            user.backward(loss)
            clip_grad_norm_(user.params, 0.1)
            user.update()
            user.record(loss.item())


@script(expect=Raises("RuntimeError"))
def loss_made_under_no_grad(user: User) -> None:
    user.train(0)
    with torch.no_grad():
        loss = user.loss(1)
    user.backward(loss)


@script(expect=Raises("RuntimeError"))
def loss_made_in_inference_mode(user: User) -> None:
    user.train(0)
    with torch.inference_mode():
        loss = user.loss(1)
    user.backward(loss)


@script()
def evaluated_between_forward_and_backward(user: User) -> None:
    for seed in range(3):
        loss = user.loss(seed)
        user.model.eval()
        with torch.no_grad():
            user.record(user.loss(seed + 20).item())
        user.model.train()
        user.backward(loss)
        with torch.inference_mode():
            user.record(user.loss(seed + 30).item())
        user.update()


@script()
def batches_of_every_shape(user: User) -> None:
    shapes = ((4, WIDTH), (WIDTH,), (2, 3, WIDTH), (1, 1, 1, WIDTH), (0, WIDTH), (33, WIDTH), (2, 0, WIDTH), (5, WIDTH))
    for seed, shape in enumerate(shapes):
        loss = user.model(user.batch(seed, *shape)).square().sum()
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def swa_over_a_plain_copy(user: User) -> None:
    torch.manual_seed(3)
    average = AveragedModel(Net(), use_buffers=True)
    scheduler = SWALR(user.opt, swa_lr=1e-3)
    for seed in range(4):
        user.step(seed)
        average.update_parameters(user.model)
        scheduler.step()
    user.model.load_state_dict(average.module.state_dict())
    user.train(4)
    user.record(average.n_averaged, [p.detach().clone() for p in average.module.parameters()])


@script()
def label_of_another_step(user: User) -> None:
    """Distillation from the model of a step ago, kept as outputs."""
    before = torch.zeros(4, 4)
    for seed in range(4):
        out = user.model(user.batch(seed))
        loss = F.mse_loss(out, before)
        user.backward(loss)
        user.update()
        before = out.detach()
        user.record(loss.item())


class Counting(nn.Module):
    """Buffers of all kinds, changed in forward: assigned, in place, complex, integer, none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("phase", torch.ones(4, dtype=torch.complex64), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        self.seen += 1
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        self.phase.mul_(1j)
        return out - self.mean + self.phase.real


@script(model=Counting)
def buffers_of_all_kinds(user: User) -> None:
    for seed in range(4):
        user.step(seed)
        user.record(user.model.seen, user.model.mean, user.model.phase)
        if seed == 1:
            user.model.register_buffer("late", torch.full((2,), 3.0))
            user.model.nothing = torch.ones(1)
    user.record(sorted(user.model.state_dict()))
