"""Depth of freezing, memory and time of a step, epoch by epoch, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

MIB = 1 << 20
_SHOWN = {
    "whole": ("nothing frozen", "#8a8f98"),
    "frozen": ("manager.freeze", "#d9822b"),
    "all": ("all of it", "#1f6f8b"),
}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Write a PNG of what `benchmarks.freezing.training` has measured.

    Raises:
        ImportError: there is no matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = results["variants"]
    figure = Figure(figsize=(9.6, 5.4), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    (depth, memory), (seconds, loss) = axes
    epochs = range(1, len(rows["whole"]) + 1)

    frozen = [epoch["num_frozen"] for epoch in rows["all"]]
    stages = [epoch["num_stages"] for epoch in rows["all"]]
    depth.bar(epochs, frozen, color="#9cc5d3", label="frozen blocks")
    depth.bar(epochs, [results["num_layers"] - num for num in frozen], bottom=frozen, color="#1f6f8b", label="trained")
    for epoch, num in zip(epochs, stages, strict=True):
        depth.text(epoch, results["num_layers"], f"{num}", ha="center", va="bottom", fontsize=8)
    depth.set_ylim(0, results["num_layers"] * 1.12)
    depth.set_title("blocks; above, the number of stages", fontsize=9)
    depth.legend(fontsize=8, loc="lower right")
    for axis, title, value in (
        (memory, "weights, gradients and states on both ranks, MiB", lambda epoch: epoch["model_nbytes"] / MIB),
        (seconds, "seconds of a step", lambda epoch: epoch["train_s"] / results["steps"]),
        (loss, "validation loss", lambda epoch: epoch["validation_loss"]),
    ):
        for name, (label, color) in _SHOWN.items():
            axis.plot(epochs, list(map(value, rows[name])), marker="o", markersize=3, color=color, label=label)
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
    memory.set_ylim(bottom=0)
    seconds.set_ylim(bottom=0)
    memory.legend(fontsize=8)
    for axis in (seconds, loss):
        axis.set_xlabel("epoch", fontsize=9)
    figure.suptitle("Freezing a third of what is left, after each epoch", fontsize=11)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=120)
