"""Python's collector waits while plans are made, and goes on after."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.manager import ChunkManager
from chunkmem.plan.garbage import no_collections
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.planner import make_plan
from tests.helpers.traces import training_trace

WIDTH, NUM_LAYERS = 8, 100
LAYER_NBYTES = 4 * (WIDTH * WIDTH + WIDTH)
PYTHONS = 700
"""New objects after which Python collects the youngest, where nothing else is set."""


@contextmanager
def collections_counted(every: int | None = None) -> Iterator[list[int]]:
    """Give the generations that are collected: the youngest after so many new objects; None: after as many as usual."""
    generations: list[int] = []
    before = gc.get_threshold()

    def note(phase: str, about: dict[str, Any]) -> None:
        if phase == "start":
            generations.append(about["generation"])

    gc.callbacks.append(note)
    gc.set_threshold(*(before if every is None else (every,)))
    try:
        yield generations
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)


def make_many_objects() -> list[list[int]]:
    return [[at] for at in range(50_000)]


def test_nothing_is_collected_meanwhile_and_everything_is_as_before_after() -> None:
    with collections_counted() as generations:

        @no_collections()
        def num_meanwhile() -> int:
            before = len(generations)
            make_many_objects()
            return len(generations) - before

        assert num_meanwhile() == num_meanwhile() == 0
        assert gc.isenabled()
        before = len(generations)
        make_many_objects()
        assert len(generations) > before, "so many objects make no collection due: the test shows nothing"


def test_who_has_switched_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with no_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_error_switches_it_on_again() -> None:
    with pytest.raises(ValueError, match="no plan"), no_collections():
        raise ValueError("no plan")
    assert gc.isenabled()


def test_a_plan_that_is_made_at_once_collects_nothing_meanwhile() -> None:
    """As `chunkmem estimate` and `chunkmem plan` make it: collections took almost half of the time."""
    trace = training_trace(100, 1 << 20)
    machine = Machine(50 << 20, 1 << 50, host_links(h2d_Bps=1e9, d2h_Bps=1e9))
    with collections_counted() as generations:
        make_plan(trace, machine)
    assert len(generations) <= 1, "one is due when collections begin again"
    assert gc.isenabled()


def test_a_step_that_plans_collects_hardly_more_than_one_that_does_not() -> None:
    """Planning makes many times the objects of a step: collections took half of its time."""
    torch.manual_seed(0)
    memory = {"device": int(0.4 * 4 * NUM_LAYERS * LAYER_NBYTES), "host": 1 << 30}
    config = chunkmem.Config.from_dict({"memory": memory, "default_chunk_size": LAYER_NBYTES // 4})
    manager = ChunkManager(config)
    with manager.init():
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-3)
    batch = torch.randn(4, WIDTH)
    counts = []
    for _ in range(8):
        with collections_counted(PYTHONS) as generations:
            manager.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        counts.append(len(generations))
    manager.close()
    recorded, planned, *others = counts
    assert planned <= recorded, counts
    assert planned < 3 * max(1, *others[-2:]), counts
