"""What comes and goes in a process many times leaves no descriptor, no thread and no memory map behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import chunkmem
from tests.helpers.ranks import Team
from tests.helpers.repartitioned import Change, Training
from tests.helpers.staged_training import Net, StagedTask, loss_of
from tests.helpers.twins import Blocks, Twin, config, cpu_only

pytestmark = cpu_only

ROUNDS = 3
"""That are looked at, after one that has brought what stays."""
MAPS = 2 * (ROUNDS - 1)
"""What a thread a round would add: it has two. The allocator may have one more or less."""


def owned() -> tuple[int, int, int]:
    """Count the descriptors, threads and memory maps of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("\n")
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), maps


def rounds(once: Callable[[], object]) -> list[tuple[int, int, int]]:
    """Return what the process has after each round but the first."""
    once()
    return [(once(), owned())[1] for _ in range(ROUNDS)]


def assert_flat(found: list[tuple[int, int, int]]) -> None:
    """Check that nothing has grown by one a round: a connection that the other end closes may take a moment to go."""
    files, threads, maps = (last - first for first, last in zip(found[0], found[-1], strict=True))
    assert max(files, threads) < ROUNDS - 1, found
    assert maps < MAPS, found


def repartition(rank: int) -> list[tuple[int, int, int]]:
    task = StagedTask(sizes=(2, 1))
    training = Training(Change(task), task.sizes)
    batches = list(task.batches())[:1]

    def there_and_back() -> None:
        for stages in (1, 2):
            training.pipe = training.pipe.repartition(stages=stages)
            training.steps(batches)

    with training.manager:
        training.steps(batches)
        return rounds(there_and_back)


def close(rank: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return what the process has before a manager whose ranks were divided again, and when it is closed."""
    task = StagedTask(sizes=(2, 1))
    for _ in range(2):
        before = owned()
        training = Training(Change(task), task.sizes)
        mesh: Any = training.manager.runtime.origin.mesh
        with training.manager:
            training.pipe = training.pipe.repartition(stages=1)
        del training
        for index in range(mesh.ndim):  # the user's own
            if (group := mesh.get_group(index)) is not torch.distributed.group.WORLD:
                torch.distributed.destroy_process_group(group)
    return before, owned()


def train(mesh: DeviceMesh | None, **options: Any) -> None:
    task = StagedTask()
    with chunkmem.ChunkManager(task.make_config(), mesh=mesh) as manager:
        with manager.init():
            model = Net()
        pipe: Any = manager.pipeline(
            model.blocks, first=model.words, last=model.head, loss_fn=loss_of, micro_batches=2, **options
        )
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        for x, y in list(task.batches())[:4]:
            if "versions" in options:
                pipe.step(x, y, optimizer=optimizer)
            else:
                pipe.step(x, y)
                optimizer.step()
                optimizer.zero_grad()
        if "versions" in options:
            pipe.flush()


def managers(rank: int, options: dict[str, Any], dimension: str) -> list[tuple[int, int, int]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(dimension,))
    return rounds(lambda: train(mesh, **options))


@pytest.mark.full
def test_pipelines_divided_again_and_again(pair: Team) -> None:
    """Each time left three process groups of torch, with their threads."""
    for found in pair.run(repartition):
        assert_flat(found)


@pytest.mark.full
def test_a_manager_that_is_closed_ends_what_was_made_for_it(pair: Team) -> None:
    for before, after in pair.run(close):
        assert max(after[at] - before[at] for at in range(2)) < 2


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("options", "dimension"),
    [
        ({"schedule": "1f1b"}, "stage"),
        ({"schedule": "async-1f1b", "versions": "stash"}, "stage"),
        ({"schedule": "async-1f1b", "versions": "predict+gap"}, "stage"),
        ({}, "shard"),
    ],
    ids=["1f1b", "stash", "predict+gap", "shared"],
)
def test_managers_over_ranks(pair: Team, options: dict[str, Any], dimension: str) -> None:
    for found in pair.run(managers, options, dimension):
        assert_flat(found)


KEYS: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "overlapped": {"client": {"opts": {"overlap_optimizer": True}}},
    "offloaded": {"activations": {"policy": "offload"}},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("has_disk", [True, False], ids=["disk", "no disk"])
@pytest.mark.parametrize("kind", KEYS)
def test_managers_in_one_process(kind: str, has_disk: bool, tmp_path: Path) -> None:
    keys = dict(KEYS[kind])
    if has_disk:
        keys["memory"] = {"device": 4096, "host": 64 << 10, "disk": {"path": str(tmp_path), "capacity": "8MiB"}}

    def once() -> None:
        with chunkmem.ChunkManager(config(4096, **keys)) as manager:
            Twin(manager, Blocks).steps(0, 1, 2, 3)

    assert_flat(rounds(once))
