"""A notebook cell that makes a manager and trains, run again and again without `close()`: memory stays flat.

What a rebound name referred to is garbage in cycles (modules, hooks and the manager refer to each other), which Python
collects when it has made enough new objects: far too late for these few that hold tens of MiB.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest

from tests.helpers.programs import run_python
from tests.helpers.twins import cpu_only

CELL = """
manager = chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": {"device": "6MiB", "host": "128MiB"}}))
with manager.init():
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
for step in range(3):
    loss = model(torch.randn(8, 512)).square().mean()
    manager.backward(loss)
    if step == FAILS_AT:
        manager.gather(7).__enter__()
    optimizer.step()
    optimizer.zero_grad()
"""
PROGRAM = """
import gc, json, sys, threading
import psutil, torch, chunkmem

cell, fails = compile(sys.argv[1], "<cell>", "exec"), json.loads(sys.argv[2])
names = {"torch": torch, "chunkmem": chunkmem}
seen = []
for run in range(6):
    names["FAILS_AT"] = 1 if run in fails else -1
    try:
        exec(cell, names)
    except chunkmem.StateError as error:
        sys.last_exc = error  # as Python's prompt and IPython keep it
    num_managers = sum(type(found).__name__ == "Pager" for found in gc.get_objects())
    seen.append([psutil.Process().memory_info().rss, num_managers, threading.active_count()])
print(json.dumps(seen))
"""


def run_cells(*, fails: tuple[int, ...] = ()) -> list[Any]:
    """[RSS in bytes, managers alive, threads] after each of six runs; those of `fails` end with an error."""
    done = run_python("-c", PROGRAM, CELL, json.dumps(fails))
    assert done.returncode == 0, done.stderr
    seen: list[Any] = json.loads(done.stdout)
    return seen


@cpu_only
def test_a_cell_that_is_run_again_takes_no_more_memory() -> None:
    seen = run_cells()
    nbytes = [rss_nbytes for rss_nbytes, _, _ in seen]
    assert statistics.median(nbytes[-3:]) <= 1.05 * nbytes[1], seen
    assert [num_managers for _, num_managers, _ in seen] == [1] * 6
    assert len({num_threads for _, _, num_threads in seen}) == 1


@pytest.mark.full
@cpu_only
@pytest.mark.parametrize(
    "fails", [pytest.param((2,), id="once", marks=pytest.mark.full), pytest.param((1, 2, 3), id="three times")]
)
def test_a_cell_that_fails_leaves_one_manager_with_its_error(fails: tuple[int, ...]) -> None:
    """The traceback refers to it until another error takes its place; the runs after it add nothing."""
    seen = run_cells(fails=fails)
    assert [num_managers for _, num_managers, _ in seen] == [1 + (run > fails[0]) for run in range(6)], seen
    assert len({num_threads for _, num_managers, num_threads in seen if num_managers == 2}) == 1
