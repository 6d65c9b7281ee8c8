"""Frozen integer and boolean parameters, as tables and masks are, over ranks: they are gathered as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.ranks.exchange import Shard
from chunkmem.ranks.methods import PointToPoint
from tests.helpers.ranks import Team

DTYPES = (torch.int8, torch.bool, torch.int64, torch.uint8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.tables = nn.ParameterList(
            nn.Parameter(torch.arange(64).reshape(8, 8).remainder(3).to(dtype), requires_grad=False) for dtype in DTYPES
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for table in self.tables:
            x = x @ table.to(x.dtype)
        return x


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    found = Team(2)
    yield found
    found.close()


def train(rank: int, saved: Path, options: dict[str, bool]) -> dict[str, Tensor]:
    """What there is after some steps, of which those after the second one come after a restart."""
    for _ in range(2):
        config = {"memory": {"device": "1MB", "host": "8MB"}, "default_chunk_size": 512, "client": {"opts": options}}
        manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(config))
        with manager.init():
            torch.manual_seed(0)
            model = Net()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=0.1)
        if saved.exists():
            manager.load(saved, optimizer)
        for _ in range(2):
            manager.backward(model(torch.ones(4, 8)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        manager.save(saved, optimizer)
    state = manager.state_dict(model)
    assert [state[f"tables.{at}"].dtype for at in range(len(DTYPES))] == list(DTYPES)
    return dict(state)


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"with_mem_saving_comm": True}, {"with_mem_saving_comm": False}])
def test_they_are_what_they_are_on_one_rank(options: dict[str, bool], team: Team, tmp_path: Path) -> None:
    alone = train(0, tmp_path / "alone", {})
    for state in team.run(train, tmp_path / "saved", options):
        assert state.keys() == alone.keys()
        for name, value in state.items():
            assert torch.equal(value, alone[name]) or "first" in name, name
        torch.testing.assert_close(state["first.weight"], alone["first.weight"])


def exchange(rank: int, dtype: torch.dtype) -> list[str]:
    """What is said of copying values, and of their mean."""
    manager = chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": {"device": "1MB", "host": "8MB"}}))
    said, method = [], PointToPoint(manager.runtime.ranks.shard)
    for call in (method.gather, method.reduce):
        try:
            call([Shard(0, 0, torch.ones(4).to(dtype))], label="a test").wait()
            said.append("")
        except chunkmem.StateError as error:
            said.append(str(error))
    return said


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bfloat16])
def test_means_are_those_of_floats(dtype: torch.dtype, team: Team) -> None:
    for copied, mean in team.run(exchange, dtype):
        assert (not copied) is (dtype is not torch.complex64)
        assert (not mean) is (dtype is torch.bfloat16)
        assert not mean or mean.startswith(f"a test: chunk 0 is a {dtype} tensor of shape [4], stride [1]; only 1-D")
