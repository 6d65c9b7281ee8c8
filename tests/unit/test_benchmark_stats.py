"""The arithmetic behind every benchmark table, against exact answers."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from benchmarks.overhead.table import table
from benchmarks.stats import MedianInterval, median_interval, paired_ratios


def test_ratios_are_of_the_same_turn() -> None:
    assert paired_ratios([2.0, 6.0, 1.0], [1.0, 2.0, 4.0]) == [2.0, 3.0, 0.25]


def test_noise_of_a_whole_turn_cancels() -> None:
    noise = [1.0, 8.0, 2.0, 0.5]  # Powers of two, so that the products are exact.
    assert paired_ratios([1.5 * factor for factor in noise], noise) == [1.5] * 4


@pytest.mark.parametrize(
    ("times", "baseline", "named"),
    [
        ([1.0], [1.0, 2.0], "1 and 2"),
        ([], [], "0 and 0"),
        ([1.0], [0.0], "0.0"),
        ([-1.0], [1.0], "-1.0"),
        ([math.nan], [1.0], "nan"),
        ([1.0], [math.inf], "inf"),
    ],
)
def test_what_has_no_ratio_is_refused(times: list[float], baseline: list[float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        paired_ratios(times, baseline)


def test_equal_values_leave_no_interval() -> None:
    assert median_interval([1.25] * 7) == MedianInterval(1.25, 1.25, 1.25)


def test_three_values_by_hand() -> None:
    # Of the 27 equally likely resamples of {1, 2, 3}, 7 have median 1, 13 have 2 and 7 have 3: 26 %, 48 %, 26 %.
    # An interval that cuts 2.5 % on each side reaches the outer values, one that cuts 30 % does not.
    assert median_interval([3.0, 1.0, 2.0], level=0.95) == MedianInterval(2.0, 1.0, 3.0)
    assert median_interval([3.0, 1.0, 2.0], level=0.40) == MedianInterval(2.0, 2.0, 2.0)


@pytest.mark.parametrize("num_values", [11, 31, 61])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_bounds_are_those_of_the_binomial_formula(num_values: int, level: float) -> None:
    """The bootstrap's distribution is known for an odd sample: its quantiles need no resampling.

    The median of a resample is at most the k-th smallest value exactly if more than half of its n draws are, and each
    draw is with probability k / n. The resampled quantile may be off by the error of 10 000 draws, no more.
    """

    def at_most(rank: float) -> float:
        share = rank / num_values
        majority = range(num_values // 2 + 1, num_values + 1)
        return sum(math.comb(num_values, hits) * share**hits * (1 - share) ** (num_values - hits) for hits in majority)

    values = [float(rank) for rank in range(1, num_values + 1)]
    random.Random(1).shuffle(values)
    interval = median_interval(values, level=level, num_resamples=10_000)

    tail = (1 - level) / 2
    error = 4 * math.sqrt(tail * (1 - tail) / 10_000)
    assert interval.median == (num_values + 1) / 2
    for rank in (interval.low, num_values + 1 - interval.high):  # The distribution is symmetric.
        assert at_most(rank - 1) < tail + error
        assert at_most(rank) > tail - error


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    draw = random.Random(2)
    num_held = 0
    for seed in range(200):
        sample = [draw.gauss(1.0, 0.1) for _ in range(25)]
        interval = median_interval(sample, level=0.9, num_resamples=200, seed=seed)
        num_held += interval.low <= 1.0 <= interval.high
    # 180 are expected, with a standard deviation of 4.2.
    assert 167 <= num_held <= 193


def test_the_same_seed_gives_the_same_interval() -> None:
    draw = random.Random(3)
    sample = [draw.random() for _ in range(20)]
    intervals = [median_interval(sample, num_resamples=20, seed=seed) for seed in (0, 0, 1)]
    assert intervals[0] == intervals[1] != intervals[2]


@pytest.mark.parametrize(
    ("values", "level", "num_resamples", "named"),
    [([], 0.95, 10, "one value"), ([1.0], 1.0, 10, "1.0"), ([1.0], 0.0, 10, "0.0"), ([1.0], 0.95, 0, "num_resamples")],
)
def test_what_has_no_interval_is_refused(values: list[float], level: float, num_resamples: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        median_interval(values, level=level, num_resamples=num_resamples)


# benchmarks/overhead


def overhead_row(*step_s: float, **keys: Any) -> dict[str, Any]:
    nbytes = dict.fromkeys(("h2d_nbytes_per_step", "device_peak_nbytes", "process_peak_nbytes"))
    return {"title": "-", "aim": None, "step_s": [list(step_s)], **nbytes, **keys}


@pytest.mark.parametrize("names_baselines", [True, False])
def test_a_row_is_paired_with_its_baseline(names_baselines: bool) -> None:
    rows = {
        "plain": overhead_row(1.0, 1.0, baseline="plain"),
        "bf16-plain": overhead_row(2.0, 4.0, baseline="bf16-plain"),
        "bf16-resident": overhead_row(3.0, 6.0, baseline="bf16-plain"),
    }
    if not names_baselines:  # older results: all are paired with plain PyTorch in fp32
        rows = {name: {key: row[key] for key in row.keys() - {"baseline"}} for name, row in rows.items()}
    results = {
        "command": "-",
        "hardware": {"cpu": "-", "cpu_capability": "-", "num_cpus": 2, "memory_nbytes": 2**30},
        "versions": {"torch": "-", "python": "-", "os": "-"},
        "threads": 2,
        "shape": {"num_params": 10, "num_sequences": 1, "num_tokens": 1},
        "num_warmup_steps": 3,
        "load_average_1min": [0.0],
        "variants": rows,
    }
    lines = [line.split(" | ") for line in table(results).splitlines() if line.startswith("| -")]
    assert [line[2] for line in lines] == (
        ["1.000", "1.000", "1.500"] if names_baselines else ["1.000", "3.000", "4.500"]
    )
