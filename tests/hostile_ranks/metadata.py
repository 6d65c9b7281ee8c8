"""Parameters of all ranks looked at from outside: what they are is free, what they hold is not."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.hostile.models import LanguageModel
from tests.hostile_ranks.harness import DIVERGED, NOT_OWNED, Either, Leaves, User, script


@script()
def shapes_and_dtypes(user: User) -> None:
    for step in range(2):
        for name, param in user.model.named_parameters():
            user.record(name, tuple(param.shape), str(param.dtype), param.device.type, param.numel(), param.dim())
            user.record(param.ndim, param.nbytes, param.element_size(), param.is_leaf, param.requires_grad, len(param))
        user.step(step)


@script()
def counts_and_names(user: User) -> None:
    user.train(0)
    user.record(sum(p.numel() for p in user.model.parameters()), len(list(user.model.buffers())))
    user.record([name for name, _ in user.model.named_parameters()], [name for name, _ in user.model.named_modules()])
    user.record(sum(p.numel() * p.element_size() for p in user.params if p.requires_grad))


@script()
def strides_and_memory_order(user: User) -> None:
    user.train(0)
    for param in user.params:
        user.record(param.is_contiguous(), list(param.stride()), param.storage_offset() >= 0)
        user.record(isinstance(param, nn.Parameter), isinstance(param, torch.Tensor), param.is_floating_point())


@script()
def tensors_of_the_same_shape(user: User) -> None:
    user.train(0)
    for param in user.params:
        user.record(torch.zeros_like(param), torch.ones_like(param), param.new_zeros(3))
        user.check(torch.empty_like(param).shape == param.shape, "the shape")


@script()
def printed_models(user: User) -> None:
    user.record(repr(user.model))
    user.train(0)
    user.record(repr(user.model), str(user.model.blocks[1]))


@script(expect=NOT_OWNED)
def printed_parameters(user: User) -> None:
    user.train(0)
    for param in user.params:
        repr(param)


@script()
def grad_is_none(user: User) -> None:
    for step in range(3):
        user.record([param.grad is None for param in user.params])
        user.backward(user.loss(step))
        user.record([param.grad is None for param in user.params])
        user.record([tuple(param.grad.shape) for param in user.params])
        user.opt.step()
        user.opt.zero_grad()
        user.record([param.grad is None for param in user.params])


@script()
def hooks_on_all_parameters(user: User) -> None:
    """They run on every rank, with that rank's own gradient."""
    calls: dict[str, int] = {}

    def count(name: str) -> Any:
        return lambda _: calls.update({name: calls.get(name, 0) + 1})

    for name, param in user.model.named_parameters():
        param.register_hook(count(name))
    user.train(0, 1, 2)
    user.record(dict(sorted(calls.items())))


@script()
def hooks_after_accumulation(user: User) -> None:
    calls: dict[str, int] = {}

    def count(name: str) -> Any:
        return lambda _: calls.update({name: calls.get(name, 0) + 1})

    for name, param in user.model.named_parameters():
        param.register_post_accumulate_grad_hook(count(name))
    user.train(0, 1)
    user.record(dict(sorted(calls.items())))


@script()
def groups_by_dimensions(user: User) -> None:
    """Weight decay for matrices only, as GPT recipes do."""
    matrices = [param for param in user.params if param.dim() >= 2]
    vectors = [param for param in user.params if param.dim() < 2]
    opt = user.adamw([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}])
    for step in range(3):
        user.backward(user.loss(step))
        opt.step()
        opt.zero_grad()


@script(model=LanguageModel)
def groups_by_names(user: User) -> None:
    named = dict(user.model.named_parameters())
    slow = [param for name, param in named.items() if "embed" in name or "norm" in name]
    fast = [param for param in named.values() if not any(param is other for other in slow)]
    opt = user.adamw([{"params": slow, "lr": 1e-3}, {"params": fast, "lr": 1e-2}])
    for step in range(3):
        user.backward(user.model(user.tokens(step)).square().mean())
        opt.step()
        opt.zero_grad()


@script()
def parameters_in_sets_and_dicts(user: User) -> None:
    known = {param: name for name, param in user.model.named_parameters()}
    user.train(0)
    user.record([known[param] for param in user.params], len(set(user.params)))
    user.record([id(param) for param in user.params] == [id(param) for param in known])


@script()
def trainable_parameters_to_the_optimizer(user: User) -> None:
    user.model.stem.requires_grad_(False)
    opt = user.adamw(filter(lambda param: param.requires_grad, user.model.parameters()))
    for step in range(2):
        user.backward(user.loss(step))
        opt.step()
        opt.zero_grad()


@script()
def moved_to_where_it_is(user: User) -> None:
    user.model.to("cpu").float().train()
    user.train(0, 1)


# Values.


@script(expect=NOT_OWNED)
def a_weight_used_outside(user: User) -> None:
    user.train(0)
    user.model.head.weight.sum()


@script(expect=NOT_OWNED)
def a_weight_used_before_the_first_step(user: User) -> None:
    (user.model.stem.weight @ torch.ones(16)).sum()


@script(expect=NOT_OWNED)
def norms_of_all_weights(user: User) -> None:
    for step in range(2):
        user.step(step)
        torch.stack([param.detach().norm() for param in user.params]).norm()


@script(expect=NOT_OWNED)
def a_penalty_on_weights(user: User) -> None:
    """It is added to the loss outside of all modules."""
    for step in range(2):
        penalty = sum(param.square().sum() for param in user.params)
        user.backward(user.loss(step) + 1e-3 * penalty)
        user.update()


@script()
def weights_copied_for_an_average(user: User) -> None:
    user.train(0)
    before = copy.deepcopy(user.model)
    user.train(1)
    now = copy.deepcopy(user.model.blocks)
    user.record(dict(before.state_dict()), dict(now.state_dict()))


@script(expect=DIVERGED)
def weights_copied_on_one_rank(user: User) -> None:
    user.train(0)
    if user.rank == 0:
        copy.deepcopy(user.model)
    user.train(1)


@script(expect=NOT_OWNED)
def weights_changed_in_place(user: User) -> None:
    user.train(0)
    with torch.no_grad():
        for param in user.params:
            param.mul_(0.5)


@script(expect=NOT_OWNED)
def weights_clamped_through_data(user: User) -> None:
    user.train(0)
    for param in user.params:
        param.data.clamp_(-0.1, 0.1)


@script(expect=NOT_OWNED)
def weights_assigned_through_data(user: User) -> None:
    user.train(0)
    for param in user.params:
        param.data = torch.zeros(param.shape)


@script(expect=NOT_OWNED)
def all_weights_as_a_vector(user: User) -> None:
    user.train(0)
    nn.utils.parameters_to_vector(user.model.parameters())


@script(expect=NOT_OWNED)
def weights_as_arrays(user: User) -> None:
    user.train(0)
    for param in user.params:
        param.detach().cpu().numpy()


@script(expect=NOT_OWNED)
def weights_initialized_after_building(user: User) -> None:
    for param in user.params:
        if param.dim() > 1:
            nn.init.xavier_uniform_(param)


@script(expect=Leaves(0, "StateError"))
def weights_looked_at_on_the_first_rank(user: User) -> None:
    user.train(0)
    if user.rank == 0:
        for param in user.params:
            param.norm()
    user.train(1)


@script(expect=Either("StateError", "belongs to another rank|outside of its unit"))
def shapes_through_data(user: User) -> None:
    for param in user.params:
        user.record(tuple(param.data.shape), param.data.numel())
    user.train(0)


@script(expect=Either("StateError", "another rank|over ranks"))
def norms_of_gradients_logged(user: User) -> None:
    """In plain PyTorch they are those of this rank's batch."""
    for step in range(3):
        user.backward(user.loss(step))
        user.record([param.grad.norm() for param in user.params])
        user.update()


@script(expect=Either("StateError", "another rank|over ranks"))
def clipped_by_the_function_of_torch(user: User) -> None:
    for step in range(3):
        user.backward(user.loss(step))
        nn.utils.clip_grad_norm_(user.model.parameters(), 0.1)
        user.update()


@script()
def weights_used_in_gather(user: User) -> None:
    for step in range(2):
        user.step(step)
        with user.gathered():
            user.record(torch.stack([param.detach().norm() for param in user.params]))
            user.record(nn.utils.parameters_to_vector(user.model.parameters()))


class Penalised(nn.Module):
    """A penalty on weights that is computed where they are: inside of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.second(torch.tanh(self.first(x)))
        return out.square().mean() + 1e-3 * (self.first.weight.square().sum() + self.second.weight.square().sum())


@script(model=Penalised)
def a_penalty_inside_of_the_module(user: User) -> None:
    _ = user.opt
    for step in range(3):
        loss = user.model(user.batch(step))
        user.backward(loss)
        user.update()
        user.record(loss.item())
