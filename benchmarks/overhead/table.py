"""From the JSON of a run to its Markdown table, and the table into a README."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from itertools import chain
from typing import Any

from benchmarks.stats import median_interval, paired_ratios

HEADER = (
    "variant",
    "step, median s",
    "× plain",
    "95 % interval",
    "aim",
    "copied in + out, MiB a step",
    "device peak / cap, MiB",
    "process peak, MiB",
)


def table(results: Mapping[str, Any]) -> str:
    """Return the Markdown of `results`: surroundings, a row for each variant, plain PyTorch's own spread."""
    rows = results["variants"]
    lines = ["| " + " | ".join(HEADER) + " |", "|---" * len(HEADER) + "|"]
    for row in rows.values():
        # Results from before there were baselines know plain PyTorch in fp32 only.
        baseline = rows[row.get("baseline", "plain")]
        lines.append("| " + " | ".join([row["title"], *_times(row, baseline), *_bytes(row)]) + " |")
    return "\n".join([*_surroundings(results), "", *lines, "", _spread(rows["plain"]["step_s"])])


def _times(row: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[str]:
    step_s, baseline_s = (list(chain.from_iterable(one["step_s"])) for one in (row, baseline))
    interval = median_interval(paired_ratios(step_s, baseline_s))
    aim = row["aim"]
    # The aims are for the lower end: a miss is then one that the noise of the machine does not explain.
    verdict = "" if aim is None else f"≤ {aim:.2f}: {'met' if interval.low <= aim else 'missed'}"
    return [
        f"{statistics.median(step_s):.3f}",
        f"{interval.median:.3f}",
        f"{interval.low:.3f} – {interval.high:.3f}",
        verdict,
    ]


def _bytes(row: Mapping[str, Any]) -> list[str]:
    moved = "–"
    if row["h2d_nbytes_per_step"] is not None:
        moved = f"{_mib(row['h2d_nbytes_per_step'])} + {_mib(row['d2h_nbytes_per_step'])}"
    device = "–"
    if row["device_peak_nbytes"] is not None:
        device = f"{_mib(row['device_peak_nbytes'])} / {_mib(row['cap_nbytes'])}"
    return [moved, device, _mib(row["process_peak_nbytes"])]


def _mib(nbytes: float | None) -> str:
    return "none" if nbytes is None else f"{nbytes / 2**20:.1f}"


def _surroundings(results: Mapping[str, Any]) -> list[str]:
    hardware, versions, shape = results["hardware"], results["versions"], results["shape"]
    num_rounds, steps_per_round = len(results["load_average_1min"]), len(results["variants"]["plain"]["step_s"][0])
    loads = ", ".join(f"{load:.1f}" for load in results["load_average_1min"])
    return [
        f"`{results['command']}`",
        "",
        f"{hardware['cpu']} ({hardware['cpu_capability']}), {hardware['num_cpus']} cores, "
        f"{hardware['memory_nbytes'] / 2**30:.0f} GiB; {results['threads']} threads; torch {versions['torch']}, "
        f"Python {versions['python']}, {versions['os']}. {shape['num_params'] / 1e6:.1f} M parameters, "
        f"{shape['num_sequences']} × {shape['num_tokens']} tokens a step; {num_rounds} × {steps_per_round} timed steps "
        f"after {results['num_warmup_steps']} others. Load average at the end of each round: {loads}.",
    ]


def _spread(rounds_s: list[list[float]]) -> str:
    step_s = list(chain.from_iterable(rounds_s))
    medians = [statistics.median(round_s) for round_s in rounds_s]
    low, median, high = statistics.quantiles(step_s, n=4, method="inclusive")
    return (
        f"Plain PyTorch's own spread: half of its steps took {low:.3f} – {high:.3f} s "
        f"({(low / median - 1) * 100:+.1f} % to {(high / median - 1) * 100:+.1f} % of the median), all of them "
        f"{min(step_s):.3f} – {max(step_s):.3f} s; medians of the rounds {min(medians):.3f} – {max(medians):.3f} s."
    )
