"""Building, wrapping, changing, copying, saving and closing, and errors in between."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import torch
from torch import nn

from tests.hostile.harness import User, script
from tests.hostile.models import Net, Tower


@script()
def model_deep_copied(user: User) -> None:
    user.train(0)
    other = copy.deepcopy(user.model)
    user.train(1)
    user.record(other(user.batch(2)), other.state_dict())


@script()
def model_pickled(user: User) -> None:
    user.train(0)
    user.refused("StateError", "state_dict", lambda: pickle.dumps(user.model))
    user.refused("StateError", "state_dict", lambda: torch.save(user.model, io.BytesIO()))
    user.train(1)


@script()
def parameter_pickled(user: User) -> None:
    user.train(0)
    buffer = io.BytesIO()
    torch.save(user.model.head.weight, buffer)
    buffer.seek(0)
    user.record(torch.load(buffer, weights_only=False))
    user.train(1)


@script()
def cast_to_half(user: User) -> None:
    user.train(0)
    user.refused("StateError", "dtype|half", lambda: user.model.half())
    user.refused("StateError", "dtype|double", lambda: user.model.double())
    user.refused("StateError", "dtype|bfloat16", lambda: user.model.to(torch.bfloat16))
    user.train(1)


@script()
def moved_to_the_same_device(user: User) -> None:
    user.train(0)
    user.refused("StateError", "device|manager", lambda: user.model.to("meta"))
    user.train(1)


@script()
def parameter_replaced(user: User) -> None:
    def replace() -> None:
        user.model.head.weight = nn.Parameter(torch.zeros(4, 16))

    user.train(0)
    user.refused("StateError", "head|weight", replace)
    user.train(1)


@script()
def head_replaced_by_another_module(user: User) -> None:
    """Model surgery after packing: no optimizer knows the new head, and it is not managed."""
    user.train(0)
    old = user.model.head
    user.model.head = nn.Linear(16, 2)
    user.train(1)
    user.record(user.model.head.weight.clone())
    user.model.head = old
    user.train(2)


@script()
def block_removed(user: User) -> None:
    """The parameters of a removed block are kept and no longer trained."""
    user.train(0)
    last = user.model.blocks[2]
    user.model.blocks[2] = nn.Identity()
    user.step(1)
    user.model.blocks[2] = last
    user.train(2)


@script()
def wrapped_twice(user: User) -> None:
    user.train(0)
    user.refused("StateError", "managed already", lambda: user.wrap(user.model))
    user.train(1)


@script(model=None)
def wrapped_and_trained(user: User) -> None:
    torch.manual_seed(1)
    model = user.wrap(Net())
    opt = user.adamw(model.parameters())
    for seed in range(3):
        loss = user.loss(seed)
        user.backward(loss)
        opt.step()
        opt.zero_grad()
        user.record(loss.item())


@script(model=None)
def wrapped_with_an_alias_from_before(user: User) -> None:
    """`w` was taken before packing; in plain PyTorch it follows the weight, so a silent copy would be wrong."""
    torch.manual_seed(1)
    model = Net()
    head = model.head.weight
    user.wrap(model)
    user.train(0)
    user.record(head, head is model.head.weight)


@script(model=None)
def second_model_in_the_same_manager(user: User) -> None:
    first, second = user.build(Net), user.build(Tower)
    opts = [user.adamw(first.parameters()), user.adamw(second.parameters())]
    for seed in range(2):
        loss = user.loss(seed, first) + user.loss(seed, second)
        user.backward(loss)
        for opt in opts:
            opt.step()
            opt.zero_grad()


@script()
def evaluated_in_a_thread(user: User) -> None:
    """The training thread waits while another evaluates."""
    user.train(0)
    seen = []

    def evaluate() -> None:
        with torch.no_grad():
            seen.append(user.loss(7).item())

    thread = threading.Thread(target=evaluate)
    thread.start()
    thread.join()
    user.record(seen)
    user.train(1)


@script()
def weights_read_in_a_thread(user: User) -> None:
    user.train(0)
    seen: list[float] = []
    thread = threading.Thread(target=lambda: seen.extend(p.norm().item() for p in user.params))
    thread.start()
    thread.join()
    user.record(seen)
    user.train(1)


@script()
def requires_grad_toggled(user: User) -> None:
    for seed in range(4):
        user.model.blocks.requires_grad_(seed % 2 == 0)
        user.step(seed)


@script()
def train_and_eval_toggled(user: User) -> None:
    for seed in range(3):
        user.model.eval()
        with torch.no_grad():
            user.record(user.loss(seed + 20).item())
        user.model.train()
        user.step(seed)
