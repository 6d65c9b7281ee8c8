"""One picture for each model: step time over caps, a line for each way to train."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.activations.variants import AUTO, CHECKPOINT, KEEP, OFFLOAD, ON_CPU, PLAIN, RECOMPUTE

MIB = 2**20
# Okabe and Ito's colours, which keep apart for colour-blind eyes; lines also differ in their marks.
STYLES = {
    KEEP.name: ("#0072B2", "o"),
    OFFLOAD.name: ("#E69F00", "s"),
    RECOMPUTE.name: ("#009E73", "^"),
    AUTO.name: ("#D55E00", "D"),
    CHECKPOINT.name: ("#777777", "v"),
    ON_CPU.name: ("#CC79A7", "x"),
}


def draw_all(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw every picture into `folder`, and return their paths."""
    paths = []
    for model in results["models"].values():
        path = folder / f"activations-{model['name']}.png"
        _draw(model).savefig(path, dpi=120)
        paths.append(path)
    return paths


def _draw(model: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(5.5 * len(model["links"]), 4.2), layout="constrained")
    figure.suptitle(f"{model['title']}: step under caps on DEVICE")
    panels = figure.subplots(1, len(model["links"]), squeeze=False)[0]
    for axes, (name, link) in zip(panels, model["links"].items(), strict=True):
        for variant, (color, mark) in STYLES.items():
            caps = [cap for cap in link["caps"] if variant in cap["variants"]]
            times = [_times_plain(cap["variants"], variant) for cap in caps]
            axes.plot([cap["cap_nbytes"] / MIB for cap in caps], times, color=color, marker=mark, label=variant)
        axes.set_title("links as fast as memory" if name == "memory" else "throttled links")
        axes.set_xlabel("memory.device, MiB")
        axes.set_ylabel("step / plain PyTorch's")
        axes.set_ylim(bottom=0.9)
        axes.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize="small")
    return figure


def _times_plain(rows: Mapping[str, Any], name: str) -> float:
    pairs = zip(rows[name]["step_s"], rows[PLAIN.name]["step_s"], strict=True)
    return statistics.median(one / plain for one, plain in pairs)
