"""Weights and states saved, loaded, and looked at by all ranks."""

from __future__ import annotations

import copy

import torch

from tests.hostile_ranks.harness import Refused, User, script


@script()
def state_dicts_on_all_ranks(user: User) -> None:
    for step in range(2):
        user.step(step)
        user.record(dict(user.state_dict()), dict(user.model.state_dict()))
    user.train(2)


@script()
def gone_back_to_saved_weights_and_states(user: User) -> None:
    user.train(0, 1)
    weights = {key: value.clone() for key, value in user.state_dict().items()}
    states = copy.deepcopy(user.opt.state_dict())  # in plain PyTorch it holds the tensors themselves
    user.train(2, 3)
    user.load_state_dict(weights)
    user.opt.load_state_dict(states)
    user.train(2, 3)


@script()
def weights_that_another_process_made(user: User) -> None:
    draw = torch.Generator().manual_seed(5)
    state = {key: torch.randn(value.shape, generator=draw) * 0.1 for key, value in user.state_dict().items()}
    user.load_state_dict(state)
    user.train(0, 1)


@script()
def loaded_by_the_model_itself(user: User) -> None:
    state = {key: value.clone() * 0.5 for key, value in user.state_dict().items()}
    user.model.load_state_dict(state)
    user.train(0, 1)


@script(expect=Refused("CheckpointError", r"missing head\.bias"))
def loaded_with_a_key_missing(user: User) -> None:
    state = dict(user.state_dict())
    del state["head.bias"]
    user.load_state_dict(state)


@script()
def gathered_and_written_alike(user: User) -> None:
    user.train(0)
    with user.gathered(), torch.no_grad():
        user.record(*[param.norm() for param in user.params])
        for param in user.params:
            param.mul_(0.5)
    user.train(1)


@script()
def gathered_after_every_step(user: User) -> None:
    for step in range(4):
        user.step(step)
        with user.gathered([user.model.head.weight, user.model.blocks[1]]):
            user.record(user.model.head.weight, *user.model.blocks[1].parameters())


@script()
def averages_kept_from_gathered_weights(user: User) -> None:
    kept = {name: torch.zeros(param.shape) for name, param in user.model.named_parameters()}
    for step in range(3):
        user.step(step)
        with user.gathered(), torch.no_grad():
            for name, param in user.model.named_parameters():
                kept[name].lerp_(param, 0.1)
    user.record(kept)
