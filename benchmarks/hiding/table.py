"""From the JSON of a run to its Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from benchmarks.hiding.variants import BLOCKING, CAPS, HALF, NO_OFFLOAD
from benchmarks.stats import median_interval, paired_ratios

Results = Mapping[str, Any]


def tables(results: Results) -> str:
    """Return the Markdown of `results`: surroundings, what is hidden, the caps, and where stalls are left."""
    names = [variant.name for variant in CAPS if variant.name in results["variants"]]
    parts = [_surroundings(results), _hiding(results), _caps(results, names), _late(results)]
    return "\n\n".join(part for part in parts if part)


def medians(row: Results, field: str) -> float:
    """Return the median of a step's number over all timed steps."""
    return statistics.median(value for turn in row[field] for value in turn)


def turn_medians(row: Results) -> list[float]:
    """Return the median step of each turn, in seconds."""
    return [statistics.median(turn) for turn in row["step_s"]]


def link_s(row: Results, results: Results) -> tuple[float, float]:
    """Return how long the planned bytes take on the link, each way."""
    h2d, d2h = row["predicted_nbytes"]
    return h2d / results["link_Bps"], d2h / results["link_Bps"]


def hidden(row: Results, results: Results) -> float:
    """Return the median share of the time on the link that nothing waited for."""
    return 1 - medians(row, "stall_s") / sum(link_s(row, results))


def _hiding(results: Results) -> str:
    rows = results["variants"]
    if HALF.name not in rows:
        return ""
    compute = turn_medians(rows[NO_OFFLOAD.name])
    header = (
        "at 50 % of PARAM bytes",
        "step, s",
        "predicted, s",
        "on the link, s",
        "stalled, s",
        "hidden",
        "step / max(compute, link)",
        "95 % interval",
    )
    lines = []
    for variant in (HALF, BLOCKING):
        if variant.name in rows:
            row = rows[variant.name]
            longest_s = max(link_s(row, results))
            floor = [max(compute_s, longest_s) for compute_s in compute]
            ratio = median_interval(paired_ratios(turn_medians(row), floor))
            copied_s = sum(link_s(row, results))
            # Copies that block are not counted as stalls: they delay the step by all they take.
            stall_s = copied_s if variant.blocking else medians(row, "stall_s")
            line = (
                "copies block" if variant.blocking else "copies on lanes",
                f"{medians(row, 'step_s'):.3f}",
                # The simulator knows of copies on lanes only.
                "–" if variant.blocking else f"{row['predicted_s']:.3f}",
                f"{copied_s:.3f}",
                f"{stall_s:.3f}",
                f"{1 - stall_s / copied_s:.1%}",
                f"{ratio.median:.3f}",
                f"{ratio.low:.3f} – {ratio.high:.3f}",
            )
            lines.append(line)
    h2d_s, d2h_s = link_s(rows[HALF.name], results)
    compute_s = statistics.median(compute)
    text = (
        f"Computing alone takes {compute_s:.3f} s a step. The link has {results['link_Bps'] / 1e6:.0f} MB/s each way; "
        f"what the plan moves takes {h2d_s:.3f} s in and {d2h_s:.3f} s out, {h2d_s / compute_s:.2f} and "
        f"{d2h_s / compute_s:.2f} of that."
    )
    return f"{_table(header, lines)}\n\n{text}"


def _caps(results: Results, names: list[str]) -> str:
    rows = results["variants"]
    compute = turn_medians(rows[NO_OFFLOAD.name])
    header = (
        "device cap",
        "MiB",
        "step, s",
        "× no offload",
        "95 % interval",
        "predicted, s",
        "in + out, MiB",
        "stalled, s",
        "hidden",
    )
    lines = [(rows[NO_OFFLOAD.name]["title"], "none", f"{statistics.median(compute):.3f}", "1", "", "", "", "", "")]
    for name in names:
        row = rows[name]
        ratio = median_interval(paired_ratios(turn_medians(row), compute))
        h2d, d2h = row["predicted_nbytes"]
        line = (
            row["title"],
            f"{row['cap_nbytes'] / 2**20:.1f}",
            f"{medians(row, 'step_s'):.3f}",
            f"{ratio.median:.3f}",
            f"{ratio.low:.3f} – {ratio.high:.3f}",
            f"{row['predicted_s']:.3f}",
            f"{h2d / 2**20:.1f} + {d2h / 2**20:.1f}",
            f"{medians(row, 'stall_s'):.3f}",
            f"{hidden(row, results):.1%}" if h2d + d2h else "–",
        )
        lines.append(line)
    rises = [
        median_interval(paired_ratios(turn_medians(rows[larger]), turn_medians(rows[smaller])))
        for smaller, larger in pairwise(names)
    ]
    text = ""
    if rises:
        worst = max(rises, key=lambda rise: rise.median)
        text = (
            f"\n\nFrom one cap to the next larger one the step changes by {worst.median - 1:+.1%} at worst "
            f"({worst.low - 1:+.1%} to {worst.high - 1:+.1%})."
        )
    return _table(header, lines) + text


def _late(results: Results) -> str:
    row = results["variants"].get(HALF.name)
    if row is None or not row["late"]:
        return ""
    places = "; ".join(f"{where} {1e3 * stall_s:.1f} ms" for where, stall_s in row["late"][:6])
    return f"The longest stalls of the last step at 50 % of PARAM bytes: {places}."


def _surroundings(results: Results) -> str:
    hardware, versions, shape = results["hardware"], results["versions"], results["shape"]
    turns = results["variants"][NO_OFFLOAD.name]["step_s"]
    loads = ", ".join(f"{load:.1f}" for load in results["load_average_1min"])
    settings = " ".join(f"{name}={value}" for name, value in results["environment"].items())
    return (
        f"`{f'{settings} ' if settings else ''}{results['command']}`\n\n"
        f"{hardware['cpu']} ({hardware['cpu_capability']}), {hardware['num_cpus']} cores, "
        f"{hardware['memory_nbytes'] / 2**30:.0f} GiB; {results['threads']} threads; torch {versions['torch']}, "
        f"Python {versions['python']}, {versions['os']}. {shape['num_params'] / 1e6:.1f} M parameters, "
        f"{shape['num_sequences']} × {shape['num_tokens']} tokens a step; {len(turns)} × {len(turns[0])} timed steps. "
        f"Load average after each round: {loads}."
    )


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])
