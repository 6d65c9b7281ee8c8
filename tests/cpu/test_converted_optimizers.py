"""An optimizer of torch's, as a model's own `configure_optimizers` makes it, taken over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import chunkmem
from tests.helpers.training import compute_device
from tests.helpers.twins import Blocks, assert_equal, config, copied, features

CAP_NBYTES = 12_000
MADE = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, fused=True),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, fused=True),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2, foreach=False),
    "amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True, foreach=False),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True, foreach=False),
}


def groups_of(model: Any) -> list[dict[str, Any]]:
    """Two, as nanoGPT has them: matrices decay."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]


def train(model: Any, optimizer: Any, *seeds: int) -> None:
    for seed in seeds:
        model(features(seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("is_before", [True, False], ids=["made before", "made after"])
def test_it_has_the_groups_options_and_states(kind: str, is_before: bool) -> None:
    """Also when it has trained already, before the model was wrapped."""

    def scenario(manager: chunkmem.ChunkManager | None) -> Any:
        torch.manual_seed(3)
        model = Blocks().to(compute_device())
        optimizer: Any = None
        if is_before:
            optimizer = MADE[kind](groups_of(model))
            train(model, optimizer, 7, 8)
        if manager is not None:
            model = manager.wrap(model)
        if not is_before:
            optimizer = MADE[kind](groups_of(model))
        if manager is not None:
            optimizer = manager.optimizer(optimizer)
            assert type(optimizer) is getattr(chunkmem, kind, chunkmem.Optimizer)
        train(model, optimizer, 0, 1, 2)
        return copied([dict(model.state_dict()), optimizer.state_dict()["state"]])

    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        assert_equal(scenario(manager), scenario(None))


def test_a_class_that_needs_all_parameters_at_once_is_refused() -> None:
    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        model = manager.wrap(Blocks())
        with pytest.raises(chunkmem.ConfigError, match="LBFGS"):
            manager.optimizer(torch.optim.LBFGS(model.parameters()))


def test_one_of_ours_is_returned_to_the_user() -> None:
    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        optimizer = chunkmem.AdamW(manager.wrap(Blocks()).parameters(), manager=manager)
        with pytest.raises(chunkmem.StateError, match=r"given a chunkmem\.AdamW: use it as it is"):
            manager.optimizer(optimizer)
