"""Tiled layers over ranks: the numbers of one process, and checkpoints of any number of ranks, tiled or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem import TiledLinear
from chunkmem.packing.tiling import tile_linears
from tests.cpu.test_ranks import assert_equal
from tests.helpers import shared_training
from tests.helpers.ranks import Team
from tests.helpers.shared_training import WIDTH, Net, Task, batch_of, loss_of, open_manager, serial, train

MAX_NUMEL = 130
"""An eighth of the widest weights of `Net`: each is tiled, but for the tied head."""


class TiledNet(Net):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            tile_linears(block, max_numel=MAX_NUMEL)
            assert isinstance(block.up, TiledLinear)


MODELS = {"untiled": Net, "tiled": TiledNet}


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, Team]]:
    found = {size: Team(size) for size in (2, 3)}
    yield found
    for team in found.values():
        team.close()


def train_tiled(rank: int, task: Task) -> shared_training.Outcome:
    shared_training.MODELS["tiled net"] = TiledNet
    return train(rank, task)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("adversarial", [None, 0, 1])
@pytest.mark.parametrize("whole", [False, True])
def test_ten_steps_are_those_of_one_process(
    teams: dict[int, Team], size: int, adversarial: int | None, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Built over ranks, or whole and then released; at caps down to the smallest."""
    monkeypatch.setitem(shared_training.MODELS, "tiled net", TiledNet)
    task = Task("tiled net", steps=10, config={"release_after_init": whole}, adversarial=adversarial)
    losses, weights, states = serial(task, size)
    for _ in range(2):
        outcomes = teams[size].run(train_tiled, task)
        for rank, outcome in enumerate(outcomes):
            assert outcome.losses == losses[rank]
            assert_equal(outcome, weights, states)
        least_nbytes = max(outcome.memory.device.required_nbytes for outcome in outcomes)
        task = Task(**{**vars(task), "device_nbytes": least_nbytes})


def build(rank: int, how: str, keys: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor, list[str]]:
    with chunkmem.ChunkManager(shared_training.make_config(Task(config=keys))) as manager:
        torch.manual_seed(3)
        if how == "wrap":
            model = Net()
            manager.tile(model, max_numel=MAX_NUMEL)
            manager.wrap(model)
        else:
            with manager.init():
                model = Net()
                if how == "tile":
                    manager.tile(model, max_numel=MAX_NUMEL)
        tiled = [name for name, module in model.named_modules() if isinstance(module, TiledLinear)]
        return manager.state_dict(), torch.rand(1), tiled


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:linear layers left untiled")
@pytest.mark.parametrize("how", ["tile", "wrap", "key"])
@pytest.mark.parametrize("keys", [{}, {"precision": "bf16"}, {"release_after_init": True}])
def test_weights_have_the_bits_of_one_process(teams: dict[int, Team], how: str, keys: dict[str, Any]) -> None:
    torch.manual_seed(3)
    plain, drawn = Net().state_dict(), torch.rand(1)
    keys = keys | ({"with_tiling_linear": MAX_NUMEL} if how == "key" else {})
    for weights, drawn_too, tiled in teams[2].run(build, how, keys):
        assert torch.equal(drawn_too, drawn)
        assert len(tiled) == 8
        assert list(weights) == list(plain)
        assert [key for key, value in plain.items() if not torch.equal(weights[key], value)] == []


# Checkpoints.


def resume(rank: int, model_name: str, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    torch.set_num_threads(1)
    with open_manager(rank, Task()) as manager:
        with manager.init():
            model = MODELS[model_name]()
        manager.load_state_dict(state)
        loss = loss_of(model, batch_of(Task(), 0, 0, 0)).item()
        return manager.state_dict(), loss


@pytest.mark.few(2)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("target", MODELS)
@pytest.mark.parametrize("source", MODELS)
def test_checkpoints_move(teams: dict[int, Team], source: str, target: str, size: int) -> None:
    """From one process or several, with tiles or without, to several."""
    torch.manual_seed(8)
    model = MODELS[source]()
    state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    expected = loss_of(model, batch_of(Task(), 0, 0, 0)).item()
    for weights, loss in teams[size].run(resume, target, state):
        assert [key for key, value in state.items() if not torch.equal(weights[key], value)] == []
        assert loss == pytest.approx(expected, rel=1e-6)
    untiled = Net()
    untiled.load_state_dict(weights)


def states_of(rank: int, state: dict[str, Any] | None, weights: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """Three steps, from states of an optimizer or without any."""
    torch.set_num_threads(1)
    task = Task()
    with open_manager(rank, task) as manager:
        with manager.init():
            model = TiledNet()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        manager.load_state_dict(weights)
        if state is not None:
            optimizer.load_state_dict(state)
        for step in range(3):
            manager.backward(loss_of(model, batch_of(task, step, 0, 0)))
            optimizer.step()
            optimizer.zero_grad()
        return optimizer.state_dict(), manager.state_dict()


def test_states_of_the_optimizer_move_between_one_process_and_ranks(teams: dict[int, Team]) -> None:
    torch.manual_seed(8)
    weights = {key: value.detach().clone() for key, value in TiledNet().state_dict().items()}
    first = teams[2].run(states_of, None, weights)[0]
    expected = teams[2].run(states_of, *first)[0]
    model = TiledNet()
    model.load_state_dict(first[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    optimizer.load_state_dict(first[0])
    for step in range(3):
        # Both ranks have the same batch, so the mean of their gradients is each.
        loss_of(model, batch_of(Task(), step, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(value, expected[1][key]) for key, value in model.state_dict().items())


# Units of exchange.


class Alone(nn.Module):
    """A wide layer that is in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = TiledLinear(WIDTH, 8 * WIDTH, out_splits=4)
        self.last = nn.Linear(8 * WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.relu(self.wide(x)))
        return result


def units_of(rank: int, marks: str) -> tuple[int, int, float]:
    """Return units, the bytes that DEVICE has to hold at least, and the sum of weights after two steps."""
    torch.set_num_threads(1)
    settings = {"default_chunk_size": 32 * WIDTH, "memory": {"device": 1 << 20, "host": 8 << 20}}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(settings)) as manager:
        torch.manual_seed(1)
        with manager.init():
            model = Alone()
            for module in {"none": [], "layer": [model.wide], "tiles": list(model.wide.children())}[marks]:
                manager.unit(module)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for seed in range(4):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))
            manager.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        units = {unit for users in manager.runtime.sharding.units._users.values() for unit in users}
        total = sum(value.double().sum().item() for value in manager.state_dict().values())
        return len(units), manager.memory().device.required_nbytes, total


def test_a_layer_is_part_of_one_unit_unless_its_tiles_are_marked(teams: dict[int, Team]) -> None:
    found = {marks: teams[2].run(units_of, marks)[0] for marks in ("none", "layer", "tiles")}
    assert {marks: units for marks, (units, _, _) in found.items()} == {"none": 1, "layer": 2, "tiles": 5}
    assert len({total for _, _, total in found.values()}) == 1
    assert found["tiles"][1] < found["none"][1]
