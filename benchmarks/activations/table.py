"""From the JSON of a run to its Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.activations.variants import (
    AUTO,
    CHECKPOINT,
    ON_CPU,
    PLAIN,
    PLAIN_CHECKPOINT,
    UNIFORM,
    VARIANTS,
)
from benchmarks.stats import median_interval, paired_ratios

Results = Mapping[str, Any]
MIB = 2**20
CLOCKS = {"cpu_s": "seconds of CPU", "step_s": "seconds"}


def tables(results: Results) -> str:
    """Return the Markdown of `results`: surroundings, then steps, aims and the choice of each model and link."""
    parts = [_surroundings(results)]
    for model in results["models"].values():
        for name, link in model["links"].items():
            speed = "as fast as memory" if link["link_Bps"] is None else f"{link['link_Bps'] / 1e6:.0f} MB/s"
            parts.append(f"### {model['title']}, links {'throttled to ' if name == 'throttled' else ''}{speed}")
            for clock in ("cpu_s", "step_s") if name == "memory" else ("step_s",):
                parts.append(_steps(link["caps"], clock))
            parts.append(_aims(link["caps"], "cpu_s" if name == "memory" else "step_s"))
            parts.append(_choices(link["caps"]))
    return "\n\n".join(parts)


def ratio(cap: Results, name: str, baseline: str, clock: str) -> str:
    """Return the median of the paired ratios and its interval; a dash where one of them does not fit."""
    rows = cap["variants"]
    if name not in rows or baseline not in rows:
        return "–"
    found = median_interval(paired_ratios(rows[name][clock], rows[baseline][clock]))
    return f"{found.median:.2f} ({found.low:.2f} – {found.high:.2f})"


def best_uniform(cap: Results, clock: str) -> str | None:
    """Return the uniform policy with the least median step; None if none fits."""
    fitting = [variant.name for variant in UNIFORM if variant.name in cap["variants"]]
    return min(fitting, key=lambda name: statistics.median(cap["variants"][name][clock]), default=None)


def _surroundings(results: Results) -> str:
    hardware, versions = results["hardware"], results["versions"]
    loads = [
        cap["load_average"]
        for model in results["models"].values()
        for link in model["links"].values()
        for cap in link["caps"]
    ]
    sizes = "; ".join(
        f"{model['title']}: {model['activations_nbytes'] / MIB:.0f} MiB of activations in blocks"
        for model in results["models"].values()
    )
    return (
        f"`{results['command']}`\n\n{hardware['cpu']}, {hardware['num_cpus']} cores, 1 thread; torch "
        f"{versions['torch']}; {sizes}. Load average {min(loads):.1f} to {max(loads):.1f}."
    )


def _steps(caps: list[Results], clock: str) -> str:
    head = f"{CLOCKS[clock]}, × plain | " + " | ".join(f"{cap['cap_nbytes'] / MIB:.1f} MiB" for cap in caps)
    lines = [f"| {head} |", "|---" * (len(caps) + 1) + "|"]
    plain = " | ".join(f"{statistics.median(cap['variants'][PLAIN.name][clock]):.3f} s" for cap in caps)
    lines.append(f"| {PLAIN.title} | {plain} |")
    for variant in VARIANTS[1:]:
        cells = " | ".join(ratio(cap, variant.name, PLAIN.name, clock) for cap in caps)
        lines.append(f"| {variant.title} | {cells} |")
    return "\n".join(lines)


def _aims(caps: list[Results], clock: str) -> str:
    head = f"`auto`, {CLOCKS[clock]}, × | " + " | ".join(f"{cap['cap_nbytes'] / MIB:.1f} MiB" for cap in caps)
    lines = [f"| {head} | aim |", "|---" * (len(caps) + 2) + "|"]
    best = [best_uniform(cap, clock) for cap in caps]
    cells = [f"{ratio(cap, AUTO.name, name or '', clock)}, {name}" for cap, name in zip(caps, best, strict=True)]
    lines.append(f"| the best uniform policy | {' | '.join(cells)} | ≤ 1.03 |")
    for title, baseline, aim in (
        ("`save_on_cpu`", ON_CPU.name, "≤ 0.83"),
        ("torch's checkpoint on every block, under chunkmem", CHECKPOINT.name, "≤ 1.00"),
        ("torch's checkpoint on every block, plain", PLAIN_CHECKPOINT.name, ""),
    ):
        cells = [ratio(cap, AUTO.name, baseline, clock) for cap in caps]
        lines.append(f"| {title} | {' | '.join(cells)} | {aim} |")
    return "\n".join(lines)


def _choices(caps: list[Results]) -> str:
    lines = [
        "| cap, MiB | `auto` chose | predicted step, s | measured, median s | second step, s | `recompute`, s |",
        "|---|---|---|---|---|---|",
    ]
    for cap in caps:
        row, other = cap["variants"].get(AUTO.name), cap["variants"].get("recompute")
        if row is None:
            lines.append(f"| {cap['cap_nbytes'] / MIB:.1f} | does not fit | | | | |")
            continue
        chosen = ", ".join(f"{policy} {count}" for policy, count in sorted((row["policies"] or {}).items()))
        second = "–" if other is None else f"{other['second_s']:.2f}"
        lines.append(
            f"| {cap['cap_nbytes'] / MIB:.1f} | {chosen} | {row['predicted_s']:.3f} | "
            f"{statistics.median(row['step_s']):.3f} | {row['second_s']:.2f} | {second} |"
        )
    return "\n".join(lines)
