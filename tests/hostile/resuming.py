"""Saving, loading and resuming in orders that torch allows, with gradients, graphs and schedules in between."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch.optim import lr_scheduler

from tests.hostile.harness import Raises, User, script
from tests.hostile.models import ConvNet, LanguageModel, Net


def saved(user: User, opt: Any = None) -> tuple[Any, Any]:
    """Copies of weights and states."""
    opt = user.opt if opt is None else opt
    return copy.deepcopy(user.state_dict()), copy.deepcopy(opt.state_dict())


@script()
def states_loaded_before_weights(user: User) -> None:
    user.train(0, 1)
    weights, states = saved(user)
    user.train(2, 3)
    user.opt.load_state_dict(states)
    user.model.load_state_dict(weights)
    user.train(4)


@script()
def weights_loaded_between_backward_and_step(user: User) -> None:
    """The gradients of the other weights are used for the loaded ones."""
    user.train(0)
    weights, _ = saved(user)
    user.train(1)
    user.backward(user.loss(2))
    user.model.load_state_dict(weights)
    user.update()
    user.train(3)


@script()
def states_loaded_between_backward_and_step(user: User) -> None:
    user.train(0)
    _, states = saved(user)
    user.train(1)
    user.backward(user.loss(2))
    user.opt.load_state_dict(states)
    user.update()
    user.train(3)


@script()
def saved_between_backward_and_step(user: User) -> None:
    """What is saved is from before the step, whatever has been computed ahead of it."""
    user.train(0, 1)
    user.backward(user.loss(2))
    weights, states = saved(user)
    user.update()
    user.record(weights, [states["state"][key] for key in sorted(states["state"])])
    user.train(3)


@script()
def saved_between_micro_batches(user: User) -> None:
    user.train(0)
    for seed in range(2):
        user.backward(user.loss(2 * seed + 1))
        weights, states = saved(user)
        user.backward(user.loss(2 * seed + 2))
        user.update()
        user.record(weights["head.weight"], states["state"][0]["exp_avg"])


@script()
def saved_between_forward_and_backward(user: User) -> None:
    user.train(0)
    loss = user.loss(1)
    weights, states = saved(user)
    user.backward(loss)
    user.update()
    user.record(weights, states["state"][1]["exp_avg_sq"])
    user.train(2)


@script(expect=Raises("RuntimeError"))
def weights_loaded_between_forward_and_backward(user: User) -> None:
    """Autograd notices by the version counter."""
    user.train(0)
    weights, _ = saved(user)
    loss = user.loss(1)
    user.model.load_state_dict(weights)
    loss.backward()


@script()
def states_loaded_into_a_new_optimizer(user: User) -> None:
    user.train(0, 1)
    _, states = saved(user)
    second = user.adamw(lr=0.5)
    user.optimizers.remove(user.opt)
    second.load_state_dict(states)
    for seed in range(2):
        user.backward(user.loss(seed + 2))
        second.step()
        second.zero_grad()


@script()
def states_of_no_step_loaded_after_some(user: User) -> None:
    """Training begins again: steps count from 1."""
    weights, states = saved(user)
    user.train(0, 1)
    user.model.load_state_dict(weights)
    user.opt.load_state_dict(states)
    user.train(0, 1)


@script()
def states_loaded_twice(user: User) -> None:
    """From copies: plain PyTorch writes its updates to the tensors that it was given."""
    user.train(0, 1)
    _, states = saved(user)
    for _ in range(2):
        user.opt.load_state_dict(copy.deepcopy(states))
        user.train(2)


@script()
def states_of_some_parameters_only(user: User) -> None:
    """Entries without a state start at 0."""
    user.train(0, 1)
    _, states = saved(user)
    for key in list(states["state"])[::2]:
        del states["state"][key]
    user.opt.load_state_dict(states)
    user.train(2, 3)


@script(expect=Raises("ValueError"))
def states_of_fewer_groups(user: User) -> None:
    user.train(0)
    groups = [{"params": user.params[:4]}, {"params": user.params[4:]}]
    second = user.adamw(groups)
    second.load_state_dict(user.opt.state_dict())


@script()
def groups_in_another_order(user: User) -> None:
    """States go by place, as in torch: those of the same shape may change owners."""
    user.train(0, 1)
    _, states = saved(user)
    second = user.adamw([{"params": [p]} for p in user.params])
    groups = states["param_groups"][0]
    states["param_groups"] = [{**groups, "params": [i]} for i in groups["params"]]
    second.load_state_dict(states)
    user.optimizers.remove(user.opt)
    user.backward(user.loss(2))
    second.step()
    second.zero_grad()


@script()
def learning_rate_loaded_with_the_states(user: User) -> None:
    user.train(0)
    _, states = saved(user)
    states["param_groups"][0].update(lr=3e-3, weight_decay=0.2, betas=(0.5, 0.6), eps=1e-6)
    user.opt.load_state_dict(states)
    user.train(1, 2)
    user.record(user.opt.param_groups[0]["lr"], list(user.opt.param_groups[0]["betas"]))


@script()
def weights_loaded_in_part(user: User) -> None:
    user.train(0, 1)
    weights, _ = saved(user)
    user.train(2)
    some = {k: v for k, v in weights.items() if k.startswith("blocks.1")}
    found = user.model.load_state_dict(some, strict=False)
    user.record(sorted(found.missing_keys), list(found.unexpected_keys))
    user.train(3)


@script(expect=Raises("RuntimeError"))
def weights_of_another_shape(user: User) -> None:
    user.train(0)
    weights, _ = saved(user)
    weights["head.weight"] = torch.zeros(5, 16)
    user.model.load_state_dict(weights)


@script()
def weights_loaded_into_a_submodule(user: User) -> None:
    user.train(0)
    weights = {k: v.clone() for k, v in user.model.blocks[0].state_dict().items()}
    user.train(1)
    user.model.blocks[1].load_state_dict(weights)
    user.model.blocks[2].load_state_dict({k: v.double() for k, v in weights.items()})
    user.train(2)


@script()
def saved_by_torch_and_loaded_by_torch(user: User) -> None:
    user.train(0, 1)
    scheduler = lr_scheduler.OneCycleLR(user.opt, max_lr=1e-2, total_steps=9)
    file = io.BytesIO()
    torch.save({"model": user.state_dict(), "opt": user.opt.state_dict(), "lr": scheduler.state_dict()}, file)
    user.train(2)
    scheduler.step()
    file.seek(0)
    read = torch.load(file, weights_only=True)
    scheduler.load_state_dict(read["lr"])
    user.opt.load_state_dict(read["opt"])
    user.model.load_state_dict(read["model"])
    for seed in range(2):
        user.step(seed)
        scheduler.step()
        user.record(scheduler.get_last_lr())


@script(model=LanguageModel)
def tied_weights_loaded(user: User) -> None:
    opt = user.adamw()
    for seed in range(2):
        user.backward(user.model(user.tokens(seed)).square().mean())
        opt.step()
        opt.zero_grad()
        weights, states = saved(user, opt)
        user.model.load_state_dict({k: v * 0.9 for k, v in weights.items()})
        opt.load_state_dict(states)
    user.record(user.model.head.weight is user.model.embed.weight)


@script(model=ConvNet)
def buffers_loaded(user: User) -> None:
    opt = user.adamw()

    def step(seed: int) -> None:
        user.backward(user.model(user.batch(seed, 4, 3, 5, 5)).square().mean())
        opt.step()
        opt.zero_grad()

    step(0)
    weights, _ = saved(user, opt)
    step(1)
    user.model.load_state_dict(weights)
    step(2)
    user.record(user.model.norm.running_var, user.model.norm.num_batches_tracked)


@script()
def hooks_of_saving_and_loading(user: User) -> None:
    """Prefixes added and removed, as wrappers of models do."""
    model = user.model
    model.register_state_dict_post_hook(lambda m, sd, prefix, meta: sd.update({"extra": torch.ones(2)}))
    model.register_load_state_dict_pre_hook(lambda m, sd, *rest: sd.pop("extra", None))
    user.train(0)
    weights = copy.deepcopy(model.state_dict())
    user.record(sorted(weights), weights)
    user.train(1)
    model.load_state_dict(weights)
    user.train(2)


@script()
def hooks_of_the_optimizers_state(user: User) -> None:
    user.train(0)
    user.opt.register_state_dict_post_hook(lambda opt, sd: {**sd, "mine": 3})
    user.opt.register_load_state_dict_pre_hook(lambda opt, sd: {k: v for k, v in sd.items() if k != "mine"})
    states = copy.deepcopy(user.opt.state_dict())
    user.record(states["mine"])
    user.train(1)
    user.opt.load_state_dict(states)
    user.train(2)


@script(model=None)
def weights_of_one_model_into_another(user: User) -> None:
    first, second = user.build(Net), user.build(Net)
    opts = [user.adamw(first.parameters()), user.adamw(second.parameters())]
    for seed in range(2):
        user.backward(user.loss(seed, first))
        opts[0].step()
        opts[0].zero_grad()
        second.load_state_dict(first.state_dict())
        opts[1].load_state_dict(copy.deepcopy(opts[0].state_dict()))
        user.backward(user.loss(seed + 5, second))
        opts[1].step()
        opts[1].zero_grad()


@script()
def evaluated_with_other_weights(user: User) -> None:
    """The best weights so far are put in for an evaluation, and the newest back."""
    user.train(0)
    best = copy.deepcopy(user.state_dict())
    for seed in range(1, 3):
        user.step(seed)
        newest = copy.deepcopy(user.state_dict())
        user.model.load_state_dict(best)
        user.model.eval()
        with torch.no_grad():
            user.record(user.loss(9).item())
        user.model.train()
        user.model.load_state_dict(newest)
