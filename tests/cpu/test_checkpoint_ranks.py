"""`manager.save` over ranks: who is lost is named in time, who is slow is not, and groups of users carry nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import chunkmem
from chunkmem.checkpoints import files
from tests.helpers.ranks import Team
from tests.helpers.saved_files import contents
from tests.helpers.saved_training import Saved

TIMEOUT_S = 4.0


@pytest.fixture
def teams() -> Iterator[dict[int, Team]]:
    found = {size: Team(size) for size in (2, 4)}
    yield found
    for team in found.values():
        team.close()


def end(how: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)


def save_and_lose_the_last(rank: int, how: Saved, path: Path, fate: str, where: str) -> tuple[str, float]:
    """What is raised, and after how long."""
    training = how.open(timeout_s=TIMEOUT_S)
    training.manager.save(path, training.optimizer, extra={"step": 1})
    is_last = rank == dist.get_world_size() - 1
    owner: Any = files if where == "writing" else files.ChunkPlanner
    patched = mock.patch.object(owner, "_write_item" if where == "writing" else "create_local_plan")
    begun_s = time.monotonic()
    with pytest.raises(chunkmem.RankError) as caught:
        if is_last:
            with patched as called:
                called.side_effect = lambda *args, **kwargs: end(fate)
                training.manager.save(path, training.optimizer, extra={"step": 2})
        else:
            training.manager.save(path, training.optimizer, extra={"step": 2})
    return str(caught.value), time.monotonic() - begun_s


CASES = [
    ("dies", "writing", (2,)),
    ("stops", "writing", (2,)),
    ("dies", "writing", (2, 2)),
    ("dies", "planning", (2,)),
    ("stops", "planning", (2, 2)),
    ("stops", "writing", (2, 2)),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("fate", "where", "sizes"), CASES)
def test_a_rank_that_is_lost_is_named(
    fate: str, where: str, sizes: tuple[int, ...], teams: dict[int, Team], tmp_path: Path
) -> None:
    size = 2 if sizes == (2,) else 4
    last = size - 1
    found = teams[size].run(save_and_lose_the_last, Saved(sizes=sizes), tmp_path / "saved", fate, where, lost=[last])
    for message, took_s in found[:last]:
        assert f"rank {last}" in message
        assert took_s < 2 * TIMEOUT_S + 2 * len(sizes)
    assert contents(tmp_path / "saved")["extra"] == {"step": 1}


def save_slowly(rank: int, path: Path) -> dict[str, Any]:
    """One rank takes longer than a rank that says nothing may take."""
    training = Saved(sizes=(2,)).open(timeout_s=TIMEOUT_S)
    real = files._write_item

    def write(*args: Any) -> Any:
        time.sleep(TIMEOUT_S / 3 * rank)
        return real(*args)

    with mock.patch.object(files, "_write_item", write):
        begun_s = time.monotonic()
        training.manager.save(path, training.optimizer, extra={"step": 1})
        assert time.monotonic() - begun_s > TIMEOUT_S
    return training.manager.load(path, training.optimizer)


@pytest.mark.full
def test_a_rank_that_is_slow_is_not_lost(teams: dict[int, Team], tmp_path: Path) -> None:
    assert teams[2].run(save_slowly, tmp_path / "saved") == [{"step": 1}] * 2


def save_without_the_users_group(rank: int, path: Path, sizes: tuple[int, ...]) -> dict[str, Any]:
    training = Saved(sizes=sizes).open()
    training.run(1)
    names = [name for name in dir(dist.distributed_c10d) if name.endswith(("er_object", "_object_list"))]
    names += ["all_gather", "gather", "scatter", "broadcast", "all_reduce", "reduce_scatter", "barrier", "send", "recv"]
    refused = {name: mock.Mock(side_effect=AssertionError(name)) for name in names}
    with mock.patch.multiple(dist.distributed_c10d, **refused), mock.patch.multiple(dist, **refused):
        training.manager.save(path, training.optimizer, extra={"step": 1})
        training.manager.save(path, training.optimizer, extra={"step": 2}, asynchronous=True).wait()
        return training.manager.load(path, training.optimizer)


@pytest.mark.few(1)
@pytest.mark.parametrize("sizes", [(2, 2), (2,)])
def test_groups_of_the_user_carry_nothing(sizes: tuple[int, ...], teams: dict[int, Team], tmp_path: Path) -> None:
    team = teams[4 if sizes == (2, 2) else 2]
    found = team.run(save_without_the_users_group, tmp_path / "saved", sizes)
    assert found == [{"step": 2}] * team.size
