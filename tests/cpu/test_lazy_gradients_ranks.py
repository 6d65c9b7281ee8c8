"""`.grad` over ranks: there is one where plain PyTorch has one, it can be discarded, and it has no values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import chunkmem
from tests.helpers.ranks import Team
from tests.helpers.shared_training import Net, Task, batch_of, loss_of, make_config


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def drop_micro_batches(rank: int, how: str) -> tuple[list[str], dict[str, Tensor]]:
    """Train; each step drops a micro-batch, whose mean over ranks was formed already, and in part another one."""
    said: list[str] = []
    task = Task()
    with chunkmem.ChunkManager(make_config(task)) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Net()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(5):
            manager.backward(loss_of(model, batch_of(task, step, 7, rank)), last=True)
            for key, param in model.named_parameters():
                assert param.grad is not None, key
                assert (param.grad.shape, param.grad.dtype) == (param.shape, param.dtype)
            try:
                model.blocks[0].up.weight.grad.norm()
            except chunkmem.StateError as error:
                said.append(str(error))
            if how == "none":
                model.zero_grad()
            elif how == "zero":
                model.zero_grad(set_to_none=False)
            else:
                optimizer.zero_grad()
            manager.backward(loss_of(model, batch_of(task, step, 0, rank)), last=step % 2 == 0)
            for param in model.blocks[1].parameters():
                param.grad = None
            manager.backward(loss_of(model, batch_of(task, step, 1, rank)), last=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        return said, manager.state_dict()


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["none", "zero", "optimizer"])
def test_a_mean_that_was_formed_is_discarded_too(pair: Team, how: str) -> None:
    task = Task()
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(5):
        total: dict[str, Tensor] = {}
        for micro in range(2):
            for rank in range(2):
                optimizer.zero_grad()
                loss_of(model, batch_of(task, step, micro, rank)).backward()
                for key, param in model.named_parameters():
                    if param.grad is not None and not (micro == 0 and key.startswith("blocks.1.")):
                        total[key] = total.get(key, torch.zeros_like(param)) + param.grad / 2
        for key, param in model.named_parameters():
            param.grad = total.get(key)
        optimizer.step()
    (said, weights), (_, others) = pair.run(drop_micro_batches, how)
    assert all("optimizer.clip_grad_norm_()" in text and "blocks.0.up.weight" in text for text in said)
    assert len(said) == 5
    for key, value in model.state_dict().items():
        assert torch.equal(weights[key], others[key])
        # Means are added up in another order: (a + b) / 2 + (c + d) / 2.
        assert torch.allclose(weights[key], value, atol=1e-5), key


def forget_zero_grad(rank: int) -> list[str]:
    said: list[str] = []
    task = Task()
    with chunkmem.ChunkManager(make_config(task)) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Net()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(2):
            manager.backward(loss_of(model, batch_of(task, step, 0, rank)))
            try:
                optimizer.step()
            except chunkmem.StateError as error:
                said.append(str(error))
        optimizer.zero_grad()
        manager.backward(loss_of(model, batch_of(task, 2, 0, rank)))
        optimizer.step()
    return said


def test_every_rank_is_told_of_a_loop_without_zero_grad(pair: Team) -> None:
    for said in pair.run(forget_zero_grad):
        assert len(said) == 1
        assert "optimizer.zero_grad()" in said[0]
