"""From the JSON of a run to its Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.pipeline.variants import ACCUMULATING, AUTO, BY_LAYER, NUM_WARMUP_STEPS, PLAIN, TORCHGPIPE, VARIANTS
from benchmarks.stats import median_interval, paired_ratios

Results = Mapping[str, Any]
MIB = 2**20
CLOCKS = {"cpu_s": "seconds of CPU", "step_s": "seconds"}


def tables(results: Results) -> str:
    """Return the Markdown of `results`: surroundings, then steps and aims of each setting, then what was counted."""
    parts = [_surroundings(results)]
    for name, setting in results["settings"].items():
        told = f"`{setting['command']}`\n\n{_unplanned(setting['variants'])}"
        parts += [f"### {_title(name, setting, results)}", told.strip(), _steps(setting["variants"])]
        parts.append(_aims(setting["variants"]))
    if results["counted"]:
        parts += ["### Copies", _copies(results["counted"])]
    return "\n\n".join(parts)


def ratio(rows: Results, name: str, baseline: str, clock: str) -> str:
    """Return the median of the paired ratios and its interval; a dash where one of them did not run."""
    if name not in rows or baseline not in rows:
        return "–"
    found = median_interval(paired_ratios(rows[name][clock], rows[baseline][clock]))
    return f"{found.median:.2f} ({found.low:.2f} – {found.high:.2f})"


def _surroundings(results: Results) -> str:
    hardware, versions = results["hardware"], results["versions"]
    loads = [load for setting in results["settings"].values() for load in setting["load_averages"]]
    return (
        f"{hardware['cpu']}, {hardware['num_cpus']} cores, 1 thread; torch "
        f"{versions['torch']}; {results['param_nbytes'] / MIB:.0f} MiB of weights; {results['num_micro_batches']} "
        f"micro-batches, {results['num_sequences']} × {results['num_tokens']} tokens together, with "
        f"{results['activation_nbytes'] / MIB:.1f} MiB of activations each. Load average {min(loads):.1f} to "
        f"{max(loads):.1f}."
    )


def _title(name: str, setting: Results, results: Results) -> str:
    if name == "ample":
        return "All resident"
    speed = f"links throttled to {setting['link_Bps'] / 1e6:.0f} MB/s" if setting["link_Bps"] else "links as memory"
    num = setting["num_resident"]
    activations = "a micro-batch" if num == 1 else f"all {num} micro-batches"
    return f"DEVICE of {100 * setting['param_share']:.0f} % of PARAM and the activations of {activations}, {speed}"


def _unplanned(rows: Results) -> str:
    """Say what was planned again while steps were timed."""
    found = [variant for variant in VARIANTS if (rows.get(variant.name, {}).get("num_planned") or 0) > NUM_WARMUP_STEPS]
    return f"Planned again in timed steps: {', '.join(variant.title for variant in found)}." if found else ""


def _steps(rows: Results) -> str:
    lines = [
        "| variant | seconds of CPU | × plain | seconds | × plain | moved, MiB a step | DEVICE peak, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in VARIANTS:
        row = rows.get(variant.name)
        if row is None:
            why = "not run: not installed" if variant in TORCHGPIPE else "does not fit"
            lines.append(f"| {variant.title} | {why} | | | | | |")
            continue
        cells = []
        for clock in CLOCKS:
            cells += [f"{statistics.median(row[clock]):.2f}", ratio(rows, variant.name, PLAIN.name, clock)]
        moved = "–" if row["traffic"] is None else f"{row['traffic']['moved_nbytes'] / MIB:.0f}"
        peak = "–" if row["device_peak_nbytes"] is None else f"{row['device_peak_nbytes'] / MIB:.0f}"
        recomputed = f", {row['recomputed']} calls recomputed" if variant == AUTO else ""
        lines.append(f"| {variant.title}{recomputed} | {' | '.join(cells)} | {moved} | {peak} |")
    return "\n".join(lines)


def _aims(rows: Results) -> str:
    lines = ["| by layer, × | never | always | auto | aim |", "|---|---|---|---|---|"]
    for title, baseline, aim in (
        ("chunkmem accumulating", ACCUMULATING.name, "≤ 0.70"),
        ("plain PyTorch accumulating", PLAIN.name, "≤ 1.10"),
        ("torchgpipe, `never`", TORCHGPIPE[0].name, "≤ 1.00"),
        ("torchgpipe, `always`", TORCHGPIPE[1].name, ""),
    ):
        for clock, unit in CLOCKS.items():
            cells = " | ".join(ratio(rows, variant.name, baseline, clock) for variant in BY_LAYER)
            lines.append(f"| {title}, {unit} | {cells} | {aim} |")
    return "\n".join(lines)


def _copies(rows: list[Results]) -> str:
    lines = [
        "| | micro-batches | PARAM to DEVICE, copies | GRAD to HOST, copies | activations, MiB | all, MiB | groups |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (row["variant"], row["num_micro_batches"])):
        moved = row["traffic"]
        lines.append(
            f"| {row['variant']} | {row['num_micro_batches']} | {moved['param_copies']} | {moved['grad_copies']} | "
            f"{moved['activation_nbytes'] / MIB:.1f} | {moved['moved_nbytes'] / MIB:.1f} | {row['num_groups']} |"
        )
    return "\n".join(lines)
