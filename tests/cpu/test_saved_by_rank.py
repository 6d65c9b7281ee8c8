"""What each rank has of its own is saved as such: modules in `exclude(reduce=False)`, their states, and `extra=`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import chunkmem
from chunkmem.checkpoints.converting import Format, convert
from tests.helpers.ranks import Team
from tests.helpers.saved_files import contents
from tests.helpers.saved_training import assert_same

WIDTH = 16


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, Team]]:
    found = {size: Team(size) for size in (2, 4)}
    yield found
    for team in found.values():
        team.close()


class Experts(nn.Module):
    """A rank's own, by a number, and one that all have; with running statistics."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(at): nn.Linear(WIDTH, WIDTH) for at in (0, number)})
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.relu(layer(x))
        result: Tensor = self.norm(x)
        return result


class Model(nn.Module):
    def __init__(self, manager: chunkmem.ChunkManager, number: int) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        with manager.exclude():
            self.common = nn.Linear(WIDTH, WIDTH)
        with manager.exclude(reduce=False):
            self.own = Experts(number)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.own(self.common(self.body(x)))
        return result


class Training:
    """One whose ranks have other experts, in a parameter group of their own."""

    def __init__(self, rank: int, *, stages: bool = False, differ: bool = True, average: bool = True) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        mesh = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))} if stages else {}
        config = {"memory": {"device": 1 << 20, "host": 8 << 20}, "default_chunk_size": 1024}
        self.manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(config), **mesh)
        with self.manager.init():
            torch.manual_seed(0)
            self.model = Model(self.manager, 1 + rank if differ else 1)
        self.pipe: Any = None
        if stages:
            self.pipe = self.manager.pipeline(
                [self.model.common, self.model.own], first=self.model.body, loss_fn=loss, micro_batches=1
            )
        shared = [*self.model.body.parameters(), *self.model.common.parameters()]
        groups = [{"params": shared}, {"params": self.model.own.parameters(), "lr": 2e-2}]
        self.optimizer = chunkmem.AdamW(groups, manager=self.manager, lr=1e-2)
        self.ema = chunkmem.EMA(self.manager, decay=0.5) if average else None

    def run(self, steps: int, seed: int = 1) -> None:
        draw = torch.Generator().manual_seed(seed + self.rank % 2)  # the stages of a pipeline have one batch
        for _ in range(steps):
            x = torch.randn(8, WIDTH, generator=draw)
            if self.pipe is None:
                self.manager.backward(loss(self.model(x), x))
            else:
                self.pipe.step(x, x)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.ema is not None:
                self.ema.update()

    def state(self) -> dict[str, Tensor]:
        """Of this rank."""
        found = {f"model.{name}": value for name, value in self.manager.state_dict().items()}
        state = self.optimizer.state_dict()
        found |= {f"states.{i}.{k}": v.clone() for i, row in state["state"].items() for k, v in row.items()}
        found |= {f"lr.{i}": torch.tensor(group["lr"]) for i, group in enumerate(state["param_groups"])}
        if self.ema is not None:
            found |= {f"ema.{name}": value for name, value in self.ema.state_dict().items()}
        return found


def loss(output: Tensor, _target: Tensor) -> Tensor:
    return output.square().mean()


def save_and_go_on(rank: int, path: Path, asynchronous: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    training = Training(rank)
    training.run(2)
    state, extra = training.state(), {"rank": rank, "draws": torch.arange(rank + 1)}
    training.manager.save(path, training.optimizer, ema=training.ema, extra=extra, asynchronous=asynchronous).wait()
    training.run(2, seed=9)
    return state, training.state()


def load_and_go_on(rank: int, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    training = Training(rank)
    training.run(1, seed=5)
    extra = training.manager.load(path, training.optimizer, ema=training.ema)
    state = training.state()
    training.run(2, seed=9)
    return state, training.state(), extra


@pytest.mark.few(1)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_rank_gets_back_its_own(asynchronous: bool, teams: dict[int, Team], tmp_path: Path) -> None:
    path = tmp_path / "saved"
    saved = teams[2].run(save_and_go_on, path, asynchronous)
    assert not torch.equal(saved[0][0]["model.own.layers.0.weight"], saved[1][0]["model.own.layers.0.weight"])
    for rank, (before, after, extra) in enumerate(teams[2].run(load_and_go_on, path)):
        assert_same(saved[rank][0], before)
        assert_same(saved[rank][1], after)
        assert extra["rank"] == rank
        assert torch.equal(extra["draws"], torch.arange(rank + 1))
    assert "own.layers.0.weight" not in contents(path)["model"]
    convert(path, tmp_path / "all.pt", Format.TORCH, max_shard_nbytes=1 << 20)
    convert(tmp_path / "all.pt", tmp_path / "again", Format.DCP, max_shard_nbytes=1 << 20)
    for rank, (before, _, extra) in enumerate(teams[2].run(load_and_go_on, tmp_path / "again")):
        assert_same(saved[rank][0], before)
        assert extra["rank"] == rank
    assert convert(path, tmp_path / "weights", Format.SAFETENSORS, max_shard_nbytes=1 << 20).left_out == (
        "ema", "extra", "optimizer", "ranks",
    )  # fmt: skip


def refuse_to_load(rank: int, path: Path, num: int) -> None:
    training = Training(rank)
    state = training.state()
    with pytest.raises(
        chunkmem.CheckpointError,
        match=rf"own\.layers\.0\.weight of each of the 2 ranks .* {num} here: load it on 2 ranks",
    ):
        training.manager.load(path, training.optimizer)
    assert_same(state, training.state())


def test_another_number_of_ranks_is_refused(teams: dict[int, Team], tmp_path: Path) -> None:
    teams[2].run(save_and_go_on, tmp_path / "saved", False)
    refuse_to_load(0, tmp_path / "saved", 1)
    teams[4].run(refuse_to_load, tmp_path / "saved", 4)


def load_in_common(rank: int, path: Path) -> None:
    manager = chunkmem.ChunkManager()
    with manager.init():
        model = Model.__new__(Model)
        nn.Module.__init__(model)
        model.body = nn.Linear(WIDTH, WIDTH)
        with manager.exclude():
            model.common, model.own = nn.Linear(WIDTH, WIDTH), Experts(1)
    with pytest.raises(chunkmem.CheckpointError, match=r"own\.\S+ of each rank, and here all ranks have it in common"):
        manager.load(path)


def save_alike(rank: int, path: Path) -> None:
    training = Training(rank, differ=False)
    training.run(1)
    training.manager.save(path, training.optimizer, extra={"step": 1} if rank == 0 else None)
    assert training.manager.load(path, training.optimizer) == {"step": 1}  # who passes nothing gets the first one's
    training.manager.save(path, training.optimizer, extra={"step": 1})
    assert training.manager.load(path, training.optimizer) == {"step": 1}


@pytest.mark.full
def test_modules_that_are_in_common_here(teams: dict[int, Team], tmp_path: Path) -> None:
    teams[2].run(save_alike, tmp_path / "saved")
    assert "extra" not in contents(tmp_path / "saved", "ranks")["ranks"]["1"]  # it was the first one's
    teams[2].run(load_in_common, tmp_path / "saved")


def load_one_process(rank: int, path: Path) -> dict[str, Tensor]:
    training = Training(rank, differ=False)
    training.manager.load(path, training.optimizer, ema=training.ema)
    return training.state()


@pytest.mark.full
def test_what_one_process_has_saved_goes_to_all(teams: dict[int, Team], tmp_path: Path) -> None:
    alone = Training(0, differ=False)
    alone.run(1)
    alone.manager.save(tmp_path / "saved", alone.optimizer, ema=alone.ema)
    assert "ranks" not in contents(tmp_path / "saved", "ranks")
    for state in teams[2].run(load_one_process, tmp_path / "saved"):
        assert_same(alone.state(), state)


def save_stages(rank: int, path: Path) -> dict[str, Tensor]:
    training = Training(rank, stages=True, average=False)
    training.run(2)
    training.manager.save(path, training.optimizer, extra={"rank": rank})
    return own_state(training)


def own_state(training: Training) -> dict[str, Tensor]:
    """Of the experts, where they are."""
    if training.rank < 2:
        return {}
    rows = training.optimizer.lazy_state_dict()["state"]
    names = [name for name, _ in training.model.named_parameters()]
    found = {name: value.detach().clone() for name, value in training.model.own.state_dict().items()}
    return found | {f"{names[i]}.{key}": v.clone() for i, row in rows.items() for key, v in row.items() if i > 3}


def load_stages(rank: int, path: Path) -> tuple[dict[str, Tensor], Any]:
    training = Training(rank, stages=True, average=False)
    extra = training.manager.load(path, training.optimizer)
    return own_state(training), extra


@pytest.mark.full
def test_over_stages(teams: dict[int, Team], tmp_path: Path) -> None:
    saved = teams[4].run(save_stages, tmp_path / "saved")
    assert not torch.equal(saved[2]["layers.0.weight"], saved[3]["layers.0.weight"])
    for rank, (state, extra) in enumerate(teams[4].run(load_stages, tmp_path / "saved")):
        assert_same(saved[rank], state)
        assert extra == {"rank": rank}
