"""Paired ratios and the interval of their median: the arithmetic every benchmark here reports with."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MedianInterval:
    """A sample's median and the bounds that a bootstrap gives it, in the sample's own unit."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the least and the most of a sample: what is kept where no table pairs its values."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def paired_ratios(times: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Divide each time by the baseline's time of the same turn.

    Noise that hits a whole turn (a neighbour on the machine, a clock change) is in both and cancels, which it does not
    in the ratio of two medians.

    Raises:
        ValueError: the two differ in length, are empty, or a time is not a positive finite number.
    """
    if len(times) != len(baseline) or not times:
        raise ValueError(f"pairs need two equally long, non-empty samples, got {len(times)} and {len(baseline)} times")
    for time in (*times, *baseline):
        if not (math.isfinite(time) and time > 0):
            raise ValueError(f"a time must be a positive finite number, got {time}")
    return [time / base for time, base in zip(times, baseline, strict=True)]


def median_interval(
    values: Sequence[float], *, level: float = 0.95, num_resamples: int = 10_000, seed: int = 0
) -> MedianInterval:
    """Bound the median of `values` by the percentile bootstrap; the same seed gives the same interval.

    The values are taken as independent. Noise that outlasts a turn makes the interval somewhat too narrow, so report an
    A/A row beside it: where that one's interval misses 1, no interval of the run is better than its distance from 1.

    Raises:
        ValueError: `values` is empty, or `level` is outside (0, 1), or `num_resamples` is not positive.
    Source: Efron, Annals of Statistics 7(1), 1979.
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    if num_resamples < 1:
        raise ValueError(f"num_resamples must be at least 1, got {num_resamples}")
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(num_resamples))
    num_cut = math.floor(num_resamples * (1 - level) / 2)
    return MedianInterval(statistics.median(values), medians[num_cut], medians[num_resamples - 1 - num_cut])


def rows_of_times(rows: Mapping[str, Mapping[str, Any]], clocks: Sequence[str]) -> list[str]:
    """Return Markdown: a row's title, then by each of its clocks the median, and that of ratios to its baseline's."""
    lines = []
    for row in rows.values():
        cells = [row["title"]]
        for clock in clocks:
            interval = median_interval(paired_ratios(row[clock], rows[row["baseline"]][clock]))
            cells += [f"{statistics.median(row[clock]):.3f}", f"{interval.median:.3f}"]
            cells.append(f"{interval.low:.3f} – {interval.high:.3f}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines
