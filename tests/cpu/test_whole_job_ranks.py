"""One of several processes that does not know of the others would train a model of its own, without a word."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import chunkmem
from tests.helpers.ranks import Team
from tests.helpers.twins import cpu_only

pytestmark = cpu_only


def test_a_manager_of_several_processes_needs_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun, where the script forgets `init_process_group`."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(chunkmem.ConfigError, match=r"WORLD_SIZE is 2.*init_process_group\(\) before ChunkManager"):
        chunkmem.ChunkManager()


@pytest.mark.parametrize("said", ["", "1", "many"])
def test_one_process_needs_none(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", said)
    chunkmem.ChunkManager().close()


def test_a_group_that_comes_after_the_manager_comes_too_late(tmp_path: Path) -> None:
    with Team(2, gloo=False) as team:
        said = team.errors(train_then_connect, str(tmp_path / "store"))
    assert all("initialised after this manager was made: each of the 2 ranks" in each for each in said)


def train_then_connect(rank: int, store: str) -> None:
    os.environ.pop("WORLD_SIZE", None)
    with chunkmem.ChunkManager() as manager:
        with manager.init():
            model = nn.Linear(4, 4)
        file = dist.FileStore(store, 2)
        dist.init_process_group("gloo", store=file, rank=rank, world_size=2, timeout=timedelta(seconds=60))
        model(torch.ones(2, 4))
