"""What a step costs in loops whose steps are not all alike, beside one whose steps are."""

from __future__ import annotations

import random
import statistics
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tests.helpers.loops import LOOPS, Side

NAMES = ("steady", "GAN", "second optimizer 1:2", "LayerDrop", "experts", "max_norm", "LoRA")
NUM_CHUNKS = 5.5
"""On DEVICE, each a layer's; a model has six, its gradients and its optimizer's states."""
ROWS = {"0.3 ms": 4, "5 ms": 4096}
"""Of a batch: how long a step computes."""
_WARMUP = 24
"""Steps until every loop has settled."""


class _Running:
    def __init__(self, name: str, *, rows: int, is_plain: bool) -> None:
        self.side = Side(None if is_plain else NUM_CHUNKS)
        self.side.rows = rows
        self._loop = LOOPS[name](self.side)
        self.cpu_s: list[float] = []
        self.num_plan_misses = self.num_left_out = self.num_recorded = 0
        torch.manual_seed(0)
        next(self._loop)  # builds the model

    def step(self, *, is_measured: bool) -> None:
        began_s = time.process_time()
        next(self._loop)
        if is_measured:
            self.cpu_s.append(time.process_time() - began_s)
        if is_measured and self.side.manager is not None:
            now = self.side.manager.runtime.controller.now
            plan_executor = now.plan_executor
            if plan_executor is None:
                self.num_recorded += now.recorder is not None
            else:
                self.num_plan_misses += plan_executor.step_log.plan_misses
                self.num_left_out += bool(plan_executor.left_out.spans)


def measure(num_steps: int) -> list[dict[str, Any]]:
    """Run every loop both ways, a step of each in random order; return a row for each."""
    draw = random.Random(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = []
    try:
        for title, num_rows in ROWS.items():
            running = {
                (name, plain): _Running(name, rows=num_rows, is_plain=plain)
                for name in NAMES
                for plain in (True, False)
            }
            for step in range(_WARMUP + num_steps):
                for key in draw.sample(sorted(running), len(running)):
                    with warnings.catch_warnings():
                        warnings.simplefilter("error")
                        running[key].step(is_measured=step >= _WARMUP)
            rows += [_row(title, name, running[name, True], running[name, False]) for name in NAMES]
    finally:
        torch.set_num_threads(threads)
    return rows


def _row(title: str, name: str, plain: _Running, ours: _Running) -> dict[str, Any]:
    assert ours.side.manager is not None
    ours.side.manager.close()
    return {
        "steps": title,
        "loop": name,
        "plain_cpu_s": plain.cpu_s,
        "cpu_s": ours.cpu_s,
        "ratio": statistics.mean(ours.cpu_s) / statistics.mean(plain.cpu_s),
        "plan_misses": ours.num_plan_misses,
        "recorded": ours.num_recorded,
        "left_out": ours.num_left_out,
        "are_losses_equal": plain.side.losses == ours.side.losses,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield (
        "| loop | a plain step | plain, processor ms | chunkmem, processor ms | ratio | to the steady loop's | "
        "plan misses | recorded | steps that left something out |"
    )
    yield "|---" * 9 + "|"
    steady = {row["steps"]: row["ratio"] for row in rows if row["loop"] == "steady"}
    for row in rows:
        times = " | ".join(f"{1e3 * statistics.mean(row[key]):.2f}" for key in ("plain_cpu_s", "cpu_s"))
        counts = " | ".join(str(row[key]) for key in ("plan_misses", "recorded", "left_out"))
        ratios = f"{row['ratio']:.2f} | {row['ratio'] / steady[row['steps']]:.2f}"
        yield f"| {row['loop']} | {row['steps']} | {times} | {ratios} | {counts} |"
