"""Parameters and their memory on devices that torch knows less of than of a CPU or of CUDA."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.modules.binding import move_to, stands_at
from tests.helpers.training import AMPLE_NBYTES, VARIANTS, Chunked, Trainer, capped, train_plain
from tests.helpers.zoo import ZOO

GPT = next(case for case in ZOO if case.name == "gpt")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_same_memory_is_told_from_other(device: str) -> None:
    # Only a CPU and CUDA have an operator for it; elsewhere torch would compare copies, which are never the same.
    memory = torch.empty(64, device=device)
    view = memory[8:24].view(4, 4)
    assert stands_at(nn.Parameter(view), memory[8:24].view(4, 4))
    others = (
        memory[8:24],
        memory[9:25].view(4, 4),
        view.t(),
        memory[8:24].view(2, 8),
        torch.empty(64, device=device)[8:24].view(4, 4),
    )
    assert not any(stands_at(nn.Parameter(view), other) for other in others)


@pytest.fixture
def no_shallow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor may be assigned to another one's `.data`, as between a CPU and a device that torch does not know."""
    monkeypatch.setattr(torch, "_has_compatible_shallow_copy_type", lambda one, other: False)


@pytest.mark.usefixtures("no_shallow_copies")
@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_parameter_gets_memory_that_data_cannot_be_assigned(requires_grad: bool) -> None:
    param, memory = nn.Parameter(torch.zeros(3), requires_grad=requires_grad), torch.ones(3)
    same = param
    move_to(param, memory)
    assert same is param
    assert isinstance(param, nn.Parameter)
    assert param.requires_grad == requires_grad
    assert param.is_leaf
    assert stands_at(param, memory)
    memory.fill_(2)
    assert param.tolist() == [2, 2, 2]
    assert not memory.requires_grad


@pytest.mark.usefixtures("no_shallow_copies")
def test_a_model_of_such_parameters_trains_as_plain_pytorch_does() -> None:
    plain = train_plain(GPT, VARIANTS[0])
    found = Trainer(GPT, VARIANTS[0], Chunked(chunkmem.ChunkManager(capped(GPT, AMPLE_NBYTES)))).run()
    assert found.losses == plain.losses
    assert found.weights.keys() == plain.weights.keys()
    assert all(torch.equal(found.weights[name], plain.weights[name]) for name in plain.weights)
