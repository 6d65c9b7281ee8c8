"""How long something takes: medians of repeated runs within a budget, by the host's clock or by the device's events."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

MIN_REPEATS, MAX_REPEATS = 5, 200


def host_median_s(work: Callable[[], object], *, budget_s: float, wait: Callable[[], object] = lambda: None) -> float:
    """Return the median time of `work` by the host's clock; `wait` is called before and after, and counts."""
    work()
    wait()
    found: list[float] = []
    end_s = time.perf_counter() + budget_s
    while len(found) < MIN_REPEATS or (len(found) < MAX_REPEATS and time.perf_counter() < end_s):
        begin_s = time.perf_counter()
        work()
        wait()
        found.append(time.perf_counter() - begin_s)
    return statistics.median(found)


def device_median_s(work: Callable[[], object], *, budget_s: float) -> float:
    """Return the median time of what `work` puts on the current stream, between two events around it."""
    work()
    torch.cuda.synchronize()
    found: list[float] = []
    end_s = time.perf_counter() + budget_s
    while len(found) < MIN_REPEATS or (len(found) < MAX_REPEATS and time.perf_counter() < end_s):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(1e-3 * begin.elapsed_time(end))
    return statistics.median(found)


@contextlib.contextmanager
def full_collections() -> Iterator[list[float]]:
    """Yield the seconds of each full collection of garbage meanwhile: it visits all of a process's objects."""
    found: list[float] = []
    began_s = 0.0

    def called(phase: str, about: dict[str, int]) -> None:
        nonlocal began_s
        if about["generation"] == 2:
            if phase == "start":
                began_s = time.perf_counter()
            else:
                found.append(time.perf_counter() - began_s)

    gc.callbacks.append(called)
    try:
        yield found
    finally:
        gc.callbacks.remove(called)


def per_call_s(call: Callable[[], Any], *, num_calls: int) -> float:
    """Return the time of one call on the host, from the median of rounds of many; nothing is waited for."""

    def many() -> None:
        for _ in range(num_calls):
            call()

    return host_median_s(many, budget_s=0.3) / num_calls
