"""Optimizers: groups, schedulers, states, closures, several of them, and those of others."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp

from tests.hostile.harness import Refused, User, script
from tests.hostile.models import Tower


@script()
def states_read(user: User) -> None:
    """Moments by parameter, as logging of Adam's effective learning rate reads them."""
    for seed in range(2):
        user.step(seed)
        for p in user.params:
            state = user.opt.state[p]
            user.record(sorted(state), float(state["step"]), state["exp_avg"].norm(), state["exp_avg_sq"].sqrt().mean())


@script()
def states_counted(user: User) -> None:
    user.record(len(user.opt.state))
    user.train(0)
    user.record(len(user.opt.state), all(p in user.opt.state for p in user.params))
    user.record(sum(v["exp_avg"].numel() for v in user.opt.state.values()))


@script()
def states_assigned(user: User) -> None:
    """Moments of the head are forgotten after it has been reset."""
    user.train(0, 1)
    for p in user.model.head.parameters():
        user.opt.state[p]["exp_avg"] = torch.zeros_like(p)
        user.opt.state[p]["exp_avg_sq"] = torch.zeros_like(p)
    user.train(2)


@script(expect=Refused("StateError", "assign"))
def states_written_in_place(user: User) -> None:
    """What is read is a copy: a write to it would be lost."""
    user.train(0, 1)
    for p in user.model.head.parameters():
        user.opt.state[p]["exp_avg"].zero_()
    user.train(2)


@script()
def a_state_removed(user: User) -> None:
    user.train(0, 1)
    for p in user.model.head.parameters():
        del user.opt.state[p]
    user.train(2)


@script()
def closure(user: User) -> None:
    def evaluate() -> torch.Tensor:
        user.opt.zero_grad()
        loss = user.loss(3)
        user.backward(loss)
        return loss

    for _ in range(3):
        user.record(user.opt.step(evaluate).item())


@script(expect=Refused("StateError", "zero_grad"))
def zero_grad_forgotten(user: User) -> None:
    """In plain PyTorch gradients pile up over steps; here a step uses them up, and the next backward says so."""
    for seed in range(3):
        loss = user.loss(seed)
        user.backward(loss)
        user.opt.step()
        user.record(loss.item())


@script()
def step_without_backward(user: User) -> None:
    """In plain PyTorch nothing happens: there are no gradients."""
    user.train(0)
    user.refused("StateError", "gradient", lambda: user.opt.step())
    user.train(1)


@script(expect=Refused("StateError", r"torch\.optim|optimizer"))
def sgd_of_torch(user: User) -> None:
    opt = torch.optim.SGD(user.model.parameters(), lr=0.1, momentum=0.9)
    for seed in range(3):
        user.backward(user.loss(seed))
        opt.step()
        opt.zero_grad()
    user.record([p.clone() for p in user.params])


@script(expect=Refused("StateError", r"torch\.optim|optimizer"))
def adamw_of_torch(user: User) -> None:
    opt = torch.optim.AdamW(user.model.parameters(), lr=0.1)
    for seed in range(3):
        opt.zero_grad()
        loss = user.loss(seed)
        loss.backward()
        opt.step()


@script()
def saved_and_loaded(user: User) -> None:
    user.train(0, 1)
    state, weights = copy.deepcopy(user.opt.state_dict()), copy.deepcopy(user.state_dict())
    user.train(2, 3)
    user.model.load_state_dict(weights)
    user.opt.load_state_dict(state)
    user.train(2)


@script()
def checkpoint_of_torch_distributed(user: User) -> None:
    user.train(0, 1)
    weights, states = dcp.get_state_dict(user.model, user.opt)
    weights, states = copy.deepcopy(weights), copy.deepcopy(states)
    user.record(sorted(weights), sorted(states["state"]))
    user.train(2)
    dcp.set_state_dict(user.model, user.opt, model_state_dict=weights, optim_state_dict=states)
    user.train(3)


@script()
def two_optimizers_over_one_model(user: User) -> None:
    matrices = user.adamw([p for p in user.params if p.ndim > 1])
    rest = user.adam([p for p in user.params if p.ndim < 2], lr=1e-3)
    for seed in range(3):
        loss = user.loss(seed)
        user.backward(loss)
        matrices.step()
        rest.step()
        matrices.zero_grad()
        rest.zero_grad()
        user.record(loss.item())


@script()
def two_optimizers_in_turn(user: User) -> None:
    """Only one of the two steps, in turn; the gradients of the other are dropped."""
    opts = [user.adamw(user.model.blocks.parameters()), user.adamw(user.model.head.parameters())]
    for seed in range(4):
        user.backward(user.loss(seed))
        opts[seed % 2].step()
        for opt in opts:
            opt.zero_grad()
        user.model.stem.zero_grad()


@script(model=None)
def generative_adversarial_training(user: User) -> None:
    generator, critic = user.build(Tower), user.build(lambda: Tower(outputs=1))
    opt_g, opt_c = user.adam(generator.parameters()), user.adam(critic.parameters())
    for seed in range(3):
        fake = generator(user.batch(seed))
        loss_c = critic(fake.detach()).mean() - critic(user.batch(seed + 50)).mean()
        opt_c.zero_grad()
        user.backward(loss_c)
        opt_c.step()
        for p in critic.parameters():
            p.data.clamp_(-0.1, 0.1)
        opt_g.zero_grad()
        loss_g = -critic(generator(user.batch(seed))).mean()
        user.backward(loss_g)
        opt_g.step()
        user.record(loss_c.item(), loss_g.item())


@script()
def optimizer_made_again(user: User) -> None:
    """A new optimizer for the second phase: its moments start at 0."""
    user.train(0, 1)
    second = user.adamw(lr=1e-3)
    user.optimizers.remove(user.opt)
    for seed in range(2):
        user.backward(user.loss(seed))
        second.step()
        second.zero_grad()


@script()
def hooks_of_the_optimizer(user: User) -> None:
    norms = []
    user.opt.register_step_pre_hook(lambda *_: norms.append(user.model.head.weight.norm().item()))
    user.opt.register_step_post_hook(lambda *_: norms.append(user.model.head.weight.norm().item()))
    user.train(0, 1)
    user.record(norms)


@script()
def frozen_parameters_left_out(user: User) -> None:
    for name, p in user.model.named_parameters():
        p.requires_grad = "blocks" not in name
    opt = user.adamw(filter(lambda p: p.requires_grad, user.model.parameters()))
    for seed in range(3):
        loss = user.loss(seed)
        user.backward(loss)
        opt.step()
        opt.zero_grad()
        user.record(loss.item())


@script()
def options_without_a_counterpart_set_later(user: User) -> None:
    """`amsgrad` and `maximize` of a group: refused by the step that meets them, not passed over."""
    user.train(0)
    group = user.opt.param_groups[0]
    for option in ("amsgrad", "maximize"):
        user.backward(user.loss(1))
        group[option] = user.manager is not None
        user.refused("ConfigError", option, user.opt.step)
        group[option] = False
        user.update()


@script()
def copying_the_optimizer(user: User) -> None:
    user.train(0)
    user.refused("StateError", "state_dict", lambda: copy.deepcopy(user.opt))
    user.train(1)


@script()
def parameters_that_no_manager_knows(user: User) -> None:
    """A loose parameter beside the model: temperature of a contrastive loss."""
    loose = nn.Parameter(torch.tensor(1.0))
    user.refused("StateError", "managed", lambda: user.adamw([*user.params, loose]))
    user.train(0)
