"""Steps before those that are measured: until nothing is planned any more, and two take as long."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from benchmarks.gpu.work import Training

CLOSE = 0.1
"""Two steps that differ by less, as a share of the longer one, take as long."""
MOST_S = 15.0
"""From the end of the second step, none is begun after this long: the first is recorded, the second planned."""


@dataclass
class WarmUp:
    """What the steps before have been."""

    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    """By the host, each from its beginning until its loss is there, planning included."""
    has_settled: bool = False
    """It was over as steps were alike, and not because of its limits."""


def warm_up(
    training: Training,
    steps: list[list[Tensor]],
    *,
    least: int,
    most: int,
    passed: Callable[[WarmUp], object] = lambda so_far: None,
) -> WarmUp:
    """Train until the training has settled and two steps have taken as long.

    Args:
        training: what trains.
        steps: micro-batches, which are repeated.
        least, most: so many steps at least, and at most.
        passed: is told after each.
    """
    found, limit_s = WarmUp(), float("inf")
    while len(found.step_s) < most and time.perf_counter() < limit_s:
        began_s = time.perf_counter()
        found.losses.append(float(training.step(steps[len(found.step_s) % len(steps)])))
        ended_s = time.perf_counter()
        found.step_s.append(ended_s - began_s)
        if len(found.step_s) == 2:
            limit_s = ended_s + MOST_S
        passed(found)
        found.has_settled = training.has_settled() and _are_alike(found.step_s[-2:])
        if found.has_settled and len(found.step_s) >= least:
            break
    return found


def _are_alike(step_s: list[float]) -> bool:
    return len(step_s) == 2 and max(step_s) - min(step_s) < CLOSE * max(step_s)
