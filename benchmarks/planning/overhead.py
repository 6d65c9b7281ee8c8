"""What following a plan costs in each moment, beside serving accesses on demand. Nothing is moved in either."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch
from torch import nn

import chunkmem
from chunkmem.manager import ChunkManager

WIDTH, NUM_LAYERS = 8, 100
CHUNK_NUMEL = WIDTH * WIDTH + WIDTH
NUM_WARMUP_STEPS = 5


class Loop:
    """A model so small that Python is all its time, wholly on DEVICE; a chunk for each layer."""

    def __init__(self, *, follows: bool) -> None:
        torch.manual_seed(0)
        memory = {"device": 64 * CHUNK_NUMEL * NUM_LAYERS, "host": 1 << 30}
        self.manager = ChunkManager(chunkmem.Config.from_dict({"memory": memory, "default_chunk_size": CHUNK_NUMEL}))
        # Where all fits, nobody listens by itself: [Note: Resident models] in chunkmem/modules/hooks.py.
        self.manager.runtime.memory.pager.events.has_inner_hooks.append(lambda: True)
        with self.manager.init():
            self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=self.manager, lr=1e-3)
        self.batch = torch.randn(4, WIDTH)
        for _ in range(NUM_WARMUP_STEPS):
            self.step()
        self.num_moments = len(self.manager.trace.moments)  # type: ignore[union-attr]
        if not follows:
            _stop_listening(self.manager)

    def step(self) -> float:
        """Train one step and return its seconds."""
        began_s = time.perf_counter()
        loss = self.model(self.batch).square().mean()
        self.manager.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began_s


def _stop_listening(manager: ChunkManager) -> None:
    """Leave the plan for good: from here on nobody hears of events, and no iteration begins or ends."""
    controller = manager.runtime.controller
    controller.close()
    controller.now.mode = None
    controller.begin_root = lambda root, **_: None  # type: ignore[method-assign]


def measure(num_steps: int) -> dict[str, Any]:
    """Take turns between the two, one step each in random order; return all times and the difference a moment."""
    draw = random.Random(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        loops = {"plan followed": Loop(follows=True), "no listener": Loop(follows=False)}
        times_s: dict[str, list[float]] = {name: [] for name in loops}
        for _ in range(num_steps):
            for name in draw.sample(sorted(loops), len(loops)):
                times_s[name].append(loops[name].step())
    finally:
        torch.set_num_threads(threads)
    followed = loops["plan followed"]
    timeline = followed.manager.timeline()
    assert timeline is not None
    assert timeline.plan_misses == 0
    assert not any(timeline.moved_nbytes.values())
    differences = [a - b for a, b in zip(times_s["plan followed"], times_s["no listener"], strict=True)]
    for loop in loops.values():
        loop.manager.close()
    return {
        "num_moments": followed.num_moments,
        "step_s": times_s,
        "us_per_moment": [1e6 * difference / followed.num_moments for difference in differences],
        "median_us_per_moment": 1e6 * statistics.median(differences) / followed.num_moments,
    }
