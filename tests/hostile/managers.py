"""Several managers, excluded modules, `gather` beside plain reads and writes, and other models' parameters."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tests.hostile.harness import User, manager_for, script
from tests.hostile.models import WIDTH, Net, Tower


def gathered(user: User, what: Any = None, **options: Any) -> Any:
    return nullcontext() if user.manager is None else user.manager.gather(what, **options)


@script()
def written_inside_gather_and_outside(user: User) -> None:
    user.train(0)
    with gathered(user, user.model.head), torch.no_grad():
        user.model.head.weight.mul_(0.5)
    with torch.no_grad():
        user.model.head.weight.add_(0.25)
    user.train(1)


@script()
def alias_from_inside_gather_used_outside(user: User) -> None:
    user.train(0)
    with gathered(user, user.model.head):
        w = user.model.head.weight.detach().clone()
    user.train(1)
    user.record(w)


@script()
def gradients_gathered_and_read(user: User) -> None:
    for seed in range(2):
        user.backward(user.loss(seed))
        norm = user.model.head.weight.grad.norm()
        with gathered(user, user.model.head, grads=True):
            user.record(user.model.head.weight.grad, norm)
            user.model.head.weight.grad.mul_(0.5)
        user.record(user.model.head.weight.grad.norm())
        user.update()


@script()
def error_inside_of_gather(user: User) -> None:
    user.train(0)
    try:
        with gathered(user, user.model.head):
            raise KeyError("mine")
    except KeyError:
        user.record("caught")
    user.train(1)


@script()
def trained_inside_of_gather(user: User) -> None:
    """The head is held on the device for two steps."""
    with gathered(user, user.model.head):
        user.record(user.model.head.weight)
    user.train(0, 1)


class Half(nn.Module):
    """A part that is excluded from chunks, between two that are not."""

    def __init__(self, exclude: Any) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        with exclude():
            self.middle = Tower()
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


@script(model=None)
def excluded_modules(user: User) -> None:
    exclude = nullcontext if user.manager is None else user.manager.exclude
    model = user.build(lambda: Half(exclude))
    opt = user.adamw(model.parameters())
    for seed in range(3):
        loss = user.loss(seed, model)
        user.backward(loss)
        user.record([p.grad.norm() for p in model.parameters()])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)
        user.record(loss.item(), [p.norm() for p in model.parameters()])


@script(model=None)
def parameters_of_another_manager(user: User) -> None:
    """Each manager has an optimizer for its own."""
    model = user.build(Net)
    if user.manager is not None:
        with manager_for(1 << 20) as other:
            with other.init():
                stranger = Net()
            user.refused("StateError", "manager", lambda: user.adamw(stranger.parameters()))
    opt = user.adamw(model.parameters())
    user.backward(user.loss(0, model))
    opt.step()


@script(model=None)
def two_managers_train_in_turn(user: User) -> None:
    """A generator in one manager, a critic in the other; the loss goes through both."""
    generator = user.build(Tower)
    torch.manual_seed(77)
    if user.manager is None:
        critic: Any = Tower(outputs=1)
        opt_c = torch.optim.AdamW(critic.parameters(), lr=1e-2, fused=True)
        _train_in_turn(user, generator, critic, opt_c)
        return
    import chunkmem

    with manager_for(1 << 20, seed=5 if user.bare else None) as other:
        with other.init():
            critic = Tower(outputs=1)
        _train_in_turn(user, generator, critic, chunkmem.AdamW(critic.parameters(), manager=other, lr=1e-2))


def _train_in_turn(user: User, generator: Any, critic: Any, opt_c: Any) -> None:
    opt_g = user.adamw(generator.parameters())
    for seed in range(3):
        loss = critic(generator(user.batch(seed))).square().mean()
        user.backward(loss)
        opt_g.step()
        opt_c.step()
        opt_g.zero_grad()
        opt_c.zero_grad()
        user.record(loss.item(), [p.norm() for p in critic.parameters()])


@script()
def another_model_in_plain_pytorch_in_the_loss(user: User) -> None:
    """A frozen perceptual network beside the managed one."""
    torch.manual_seed(4)
    perceptual = Tower(4, 4).requires_grad_(False).eval()
    for seed in range(3):
        loss = (perceptual(user.model(user.batch(seed))) - perceptual(torch.ones(4, 4))).square().mean()
        user.backward(loss)
        user.update()
        user.record(loss.item())


@script()
def memory_reported_in_between(user: User) -> None:
    for seed in range(3):
        user.step(seed)
        if user.manager is not None:
            report = user.manager.memory()
            user.check(report.device.now_nbytes <= report.device.cap_nbytes, str(report))


@script()
def clipping_set_for_the_optimizer(user: User) -> None:
    """`max_grad_norm` does what `clip_grad_norm_` before each step does."""
    if user.manager is None:
        opt = user.adamw()
    else:
        opt = user.adamw(max_grad_norm=0.05)
    for seed in range(3):
        user.backward(user.loss(seed) * 10)
        if user.manager is None:
            torch.nn.utils.clip_grad_norm_(user.params, 0.05)
        opt.step()
        opt.zero_grad()
