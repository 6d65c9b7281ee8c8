"""Does anything grow: up to 500 steps under a cap, with the allocator, streams and threads looked at in between."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

import psutil
import torch

from benchmarks.gpu.harness import Task
from benchmarks.gpu.model import preset
from benchmarks.gpu.rows import Store
from benchmarks.gpu.setting import GIB, Cap, Setting
from benchmarks.gpu.table import Rows, page
from benchmarks.gpu.train import batches_of, hold_to, open_training
from benchmarks.gpu.work import ENVIRONMENT, NUM_BATCHES, Work, compute_device

NAME = "soak"
SUMMARY = "up to 500 steps under a cap: reserved memory, streams and threads stay, no allocation is tried twice"
LIMIT_S, LEAST_S = 480.0, 60.0
MODEL, TOKENS, GIB_CAP = "1.3b", 4096, 8
NUM_STEPS, NUM_TOY_STEPS = 500, 24
WARM_UP = 10
EVERY = 10
HEADER = ("row", "steps", "constant", "reserved, GiB", "streams", "threads", "open files", "RSS, GiB",
          "allocations tried again", "plan_misses", "loss")  # fmt: skip
CONSTANT = ("reserved_nbytes", "streams", "threads", "files")
"""What must be the same at every look after the warm-up. RSS is told, but the C library's heap breathes."""


def tasks(setting: Setting, _store: Store) -> Iterator[Task]:
    """Yield the one row."""
    size = preset(MODEL, dry=setting.dry)
    cap = setting.caps()[0] if setting.dry else min(
        (Cap(f"{GIB_CAP} GiB", GIB_CAP * GIB), setting.caps()[-1]), key=lambda cap: cap.nbytes or 0
    )  # fmt: skip
    batch = 2 if setting.dry else TOKENS // size.seq
    host_nbytes = None if setting.dry else setting.host_nbytes
    work = Work("chunkmem", size, batch=batch, micro_batch=batch, cap_nbytes=cap.nbytes, host_nbytes=host_nbytes)
    num_steps = NUM_TOY_STEPS if setting.dry else NUM_STEPS
    key = f"chunkmem / {MODEL if not setting.dry else 'toy'} / {cap.label}"
    arguments = {"work": asdict(work), "num_steps": num_steps, "every": 4 if setting.dry else EVERY}
    yield Task(
        key,
        "benchmarks.gpu.soak:soak",
        arguments,
        LIMIT_S,
        needs_gpu=False,
        environment=ENVIRONMENT,
        needs_s=10 if setting.dry else LEAST_S,
        is_told=True,
    )


def soak(*, work: Mapping[str, Any], num_steps: int, every: int, limit_s: float) -> dict[str, Any]:
    """Train for a number of steps, or of seconds; return what was held at each look, and whether it stayed.

    Raises:
        TimeoutError: the time was over before anything could be compared.
    """
    end_s = time.monotonic() + limit_s
    asked = Work.of(work)
    device = compute_device()
    hold_to(asked.cap_nbytes)
    looks = []
    plan_misses = 0
    loss = torch.zeros(())
    with closing(open_training(asked)) as training:
        steps = batches_of(asked, device)
        for index in range(num_steps):
            loss = training.step(steps[index % NUM_BATCHES])
            if index + 1 > WARM_UP:
                plan_misses += training.told().get("plan_misses", 0)
                if (index + 1 - WARM_UP) % every == 0:
                    looks.append({"step": index + 1, **holdings(device)})
            if time.monotonic() > end_s:
                break
        if len(looks) < 2:
            raise TimeoutError(f"{index + 1} steps took {limit_s:.0f} s, too few to compare anything")
        final = float(loss)
    if final != final:
        raise ValueError("the loss is not a number")
    return {
        "num_steps": index + 1,
        "num_steps_asked": num_steps,
        "looks": looks,
        "changed": changed(looks),
        "plan_misses": plan_misses,
        "last_loss": final,
    }


def changed(looks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what was not the same at every look, and the allocator's retries if there were any."""
    found = [name for name in CONSTANT if len({look[name] for look in looks}) > 1]
    return [*found, *(["num_alloc_retries"] if looks[-1]["num_alloc_retries"] else [])]


def holdings(device: torch.device) -> dict[str, Any]:
    """Return what the process holds now; None where there is no device."""
    gc.collect()
    found: dict[str, Any] = {
        "threads": threading.active_count(),
        "system_threads": psutil.Process().num_threads(),
        "files": psutil.Process().num_fds(),
        "rss_nbytes": psutil.Process().memory_info().rss,
        "reserved_nbytes": None,
        "allocated_nbytes": None,
        "num_alloc_retries": None,
        "device_wide_nbytes": None,
        "streams": None,
    }
    if device.type == "cuda":
        torch.cuda.synchronize()
        free_nbytes, total_nbytes = torch.cuda.mem_get_info()
        found |= {
            "reserved_nbytes": torch.cuda.memory_reserved(),
            "allocated_nbytes": torch.cuda.memory_allocated(),
            "num_alloc_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
            "device_wide_nbytes": total_nbytes - free_nbytes,
            "streams": sum(isinstance(thing, torch.cuda.Stream) for thing in gc.get_objects()),
        }
    return found


def table(content: Mapping[str, Any]) -> str:
    """Return the Markdown of a file of rows."""
    return page(content, HEADER, _cells)


def _cells(_key: str, figures: Mapping[str, Any], _rows: Rows) -> list[str]:
    def span(name: str, unit: float = 1, digits: int = 0) -> str:
        values = [look[name] for look in figures["looks"]]
        if values[0] is None:
            return "–"
        low, high = (f"{value / unit:.{digits}f}" for value in (min(values), max(values)))
        return low if low == high else f"{low} – {high}"

    return [
        f"{figures['num_steps']} of {figures['num_steps_asked']}",
        f"no: {', '.join(figures['changed'])}" if figures["changed"] else "yes",
        span("reserved_nbytes", GIB, 3),
        span("streams"),
        span("threads"),
        span("files"),
        span("rss_nbytes", GIB, 2),
        span("num_alloc_retries"),
        str(figures["plan_misses"]),
        f"{figures['last_loss']:.3f}",
    ]
