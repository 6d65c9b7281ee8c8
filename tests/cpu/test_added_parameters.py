"""Parameters added to a model after it was packed, as adapters are: ordinary ones, which chunkmem's optimizer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import chunkmem
from tests.helpers.ranks import Team
from tests.helpers.training import compute_device
from tests.helpers.twins import WIDTH, Blocks, assert_equal, config, copied, features

CAP_NBYTES = 12_000
SIZE = 2


class Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.lora_A = base, nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.lora_A(x).sum()
        return result


def adapted(manager: chunkmem.ChunkManager | None, *, frozen: bool, seed: int = 4) -> Any:
    """A model whose first layer got an adapter once it was in chunks."""
    torch.manual_seed(3)
    model = Blocks() if manager is None else manager.wrap(Blocks())
    model.requires_grad_(not frozen)
    torch.manual_seed(seed)
    model.inner = Adapted(model.inner)
    return model.to(compute_device()) if manager is None else model


def optimizer_of(model: Any, manager: chunkmem.ChunkManager | None, **options: Any) -> Any:
    trained = [param for param in model.parameters() if param.requires_grad]
    if manager is None:
        return torch.optim.AdamW(trained, lr=1e-2, fused=True, **options)
    return chunkmem.AdamW(trained, manager=manager, lr=1e-2, **options)


def train(model: Any, optimizer: Any, *seeds: int) -> list[float]:
    seen = []
    for seed in seeds:
        loss = model(features(seed)).square().mean()
        loss.backward()
        seen += [loss.item(), clip_grad_norm_(model.parameters(), 0.1).item()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen base", "trained base"])
def test_an_adapter_made_after_wrapping_is_trained(frozen: bool) -> None:
    """chunkmem's optimizer refused it: what `get_peft_model(manager.wrap(model))` made could be trained by others only.

    The norm has the bits of one over `model.parameters()`, where the adapter comes in the middle.
    """

    def scenario(manager: chunkmem.ChunkManager | None) -> Any:
        model = adapted(manager, frozen=frozen)
        optimizer = optimizer_of(model, manager)
        seen = train(model, optimizer, 0, 1, 2)
        return copied([seen, dict(model.state_dict()), optimizer.state_dict()["state"]])

    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        assert_equal(scenario(manager), scenario(None))


def test_any_class_trains_an_adapter_alone() -> None:
    """No trial of the class was made, as it has no parameter in chunks: AssertionError in `step()`."""

    def scenario(manager: chunkmem.ChunkManager | None) -> Any:
        model = adapted(manager, frozen=True)
        trained = [param for param in model.parameters() if param.requires_grad]
        kind = torch.optim.RAdam
        optimizer: Any = kind(trained) if manager is None else chunkmem.Optimizer(kind, trained, manager=manager)
        seen = train(model, optimizer, 0, 1, 2)
        return copied([seen, dict(model.state_dict()), optimizer.state_dict()["state"]])

    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        assert_equal(scenario(manager), scenario(None))


def test_the_norm_of_our_own_has_its_place_in_the_order() -> None:
    plain = adapted(None, frozen=False)
    plain(features(0)).square().mean().backward()
    expected = clip_grad_norm_(plain.parameters(), 0.1)
    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        model = adapted(manager, frozen=False)
        optimizer = optimizer_of(model, manager)
        model(features(0)).square().mean().backward()
        assert torch.equal(optimizer.clip_grad_norm_(0.1), expected)


def test_its_values_and_states_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        model = adapted(manager, frozen=True)
        optimizer = optimizer_of(model, manager)
        train(model, optimizer, 0, 1)
        manager.save(tmp_path / "half", optimizer)
        expected = [train(model, optimizer, 2), copied(dict(model.state_dict()))]
    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        model = adapted(manager, frozen=True, seed=5)
        optimizer = optimizer_of(model, manager)
        manager.load(tmp_path / "half", optimizer)
        assert_equal([train(model, optimizer, 2), copied(dict(model.state_dict()))], expected)


def test_what_is_in_no_model_is_refused() -> None:
    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        model = manager.wrap(Blocks())
        around = Adapted(model)
        message = r"^a parameter of shape \(2, 16\) is neither managed nor excluded .*manager\.wrap\(\) first"
        with pytest.raises(chunkmem.StateError, match=message):
            chunkmem.AdamW(around.parameters(), manager=manager)


def test_plans_are_followed_while_torch_trains_the_adapter() -> None:
    """A step of training ends where the next one begins, and its timeline was not kept."""
    with chunkmem.ChunkManager(config(5_000)) as manager:
        model = adapted(manager, frozen=True)
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
        misses = []
        for seed in range(10):
            train(model, optimizer, seed)
            timeline = manager.timeline()
            misses.append(timeline.plan_misses if manager.plan is not None and timeline is not None else None)
        assert misses[4:] == [0] * 6, misses
        timeline = manager.timeline()
        assert timeline is not None
        assert timeline.fetched > 0


def over_ranks(rank: int) -> Any:
    torch.set_num_threads(1)
    with chunkmem.ChunkManager(config(1 << 20)) as manager:
        model = adapted(manager, frozen=False, seed=rank)  # each rank draws another adapter
        optimizer = optimizer_of(model, manager)
        for step in range(2):
            model(features(SIZE * step + rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return copied(manager.state_dict())


def test_over_ranks_it_is_that_of_the_first_one_and_trained_alike() -> None:
    with Team(SIZE) as team:
        found = team.run(over_ranks)
    assert_equal(found[0], found[1])
    model = adapted(None, frozen=False, seed=0)
    optimizer = optimizer_of(model, None)
    for step in range(2):
        for rank in range(SIZE):
            (model(features(SIZE * step + rank)).square().mean() / SIZE).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.allclose(found[0][name], value.cpu(), atol=1e-5), name
