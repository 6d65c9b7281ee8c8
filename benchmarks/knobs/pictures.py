"""One picture for each knob, from the rows of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, NullLocator

Row = Mapping[str, Any]

# Okabe and Ito's colours, which keep apart for colour-blind eyes; lines also differ in their marks.
BLUE, ORANGE, GREEN, VERMILION, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#777777"
STYLES = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"))
MIB = 2**20
STEP = "step / forward + backward"
MOVED = "moved a step, MiB"


def draw_all(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw every picture into `folder`, and return their paths."""
    rows: Mapping[str, Sequence[Row]] = {
        knob: [row for row in results["rows"] if row["knob"] == knob]
        for knob in ("cap", "margin", "link", "static", "size")
    }
    compute_s = results["compute_s"]
    return [
        _save(_draw_cap(rows["cap"], compute_s), folder / "knob-device-cap.png"),
        _save(_draw_margin(rows["margin"], compute_s), folder / "knob-margin-use-ratio.png"),
        _save(_draw_link(rows["link"], compute_s), folder / "knob-link.png"),
        _save(_draw_static(rows["static"], compute_s), folder / "knob-static-partition.png"),
        _save(_draw_size(rows["size"], compute_s), folder / "knob-chunk-size.png"),
    ]


def by_cap(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Return the rows of each cap."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row["cap_nbytes"], []).append(row)
    return found


def _draw_cap(rows: Sequence[Row], compute_s: float) -> Figure:
    figure, (step, moved, peak) = _panels("Simulated GPT step under device caps", 3)
    caps = [row["cap_nbytes"] / MIB for row in rows]
    step.plot(caps, [row["step_s"] / compute_s for row in rows], "-o", color=BLUE, label="as planned")
    step.plot(caps, [row["in_a_row_s"] / compute_s for row in rows], "--s", color=VERMILION, label="copies block")
    _finish(step, "memory.device, MiB", STEP, bottom=1.0)
    fetched = [row["h2d_nbytes"] / MIB for row in rows]
    both = [(row["h2d_nbytes"] + row["d2h_nbytes"]) / MIB for row in rows]
    moved.fill_between(caps, fetched, color=BLUE, linewidth=0, label="to DEVICE")
    moved.fill_between(caps, fetched, both, color=ORANGE, linewidth=0, label="to HOST")
    _finish(moved, "memory.device, MiB", MOVED, bottom=0.0)
    peak.plot(caps, caps, color=VERMILION, label="the cap")
    peak.plot(caps, [row["peak_nbytes"] / MIB for row in rows], "-o", color=BLUE, label="chunks + activations")
    peak.plot(caps, [row["chunk_peak_nbytes"] / MIB for row in rows], "--^", color=GREEN, label="chunks alone")
    _finish(peak, "memory.device, MiB", "peak, MiB", bottom=0.0)
    return figure


def _draw_margin(rows: Sequence[Row], compute_s: float) -> Figure:
    figure, (step, moved, groups) = _panels("Optimizer states on DEVICE: how much of the room left at the peak", 3)
    for (cap, own), (color, mark) in zip(by_cap(rows).items(), STYLES, strict=True):
        ratios = [row["position"] for row in own]
        style: dict[str, Any] = {"color": color, "marker": mark, "label": f"cap {cap / MIB:.0f} MiB"}
        step.plot(ratios, [row["step_s"] / compute_s for row in own], **style)
        moved.plot(ratios, [(row["h2d_nbytes"] + row["d2h_nbytes"]) / MIB for row in own], **style)
        groups.plot(ratios, [row["groups_updated_on_device"] for row in own], **style)
    _finish(step, "margin_use_ratio", STEP, bottom=1.0)
    _finish(moved, "margin_use_ratio", MOVED, bottom=0.0)
    _finish(groups, "margin_use_ratio", f"groups updated there, of {rows[0]['groups_updated']}", bottom=0.0)
    groups.yaxis.set_major_locator(MaxNLocator(integer=True))
    _common_legend(figure, (step, moved, groups))
    return figure


def _draw_link(rows: Sequence[Row], compute_s: float) -> Figure:
    figure, panels = _panels("with_async_move: the link against computing", 2)
    for axes, (cap, own) in zip(panels, by_cap(rows).items(), strict=True):
        speeds = [row["position"] for row in own]
        axes.plot(speeds, [row["step_s"] / compute_s for row in own], "-o", color=BLUE, label="on: beside computing")
        axes.plot(speeds, [row["in_a_row_s"] / compute_s for row in own], "--s", color=VERMILION, label="off: blocking")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(f"cap {cap / MIB:.0f} MiB", fontsize=10)
        _finish(axes, "speed of the link, × the base", STEP)
        _plain_ticks(axes, x=[1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8], y=[1, 1.5, 2, 3, 5, 8])
    return figure


def _draw_static(rows: Sequence[Row], compute_s: float) -> Figure:
    figure, (step, moved) = _panels("with_static_partition: a fixed share for chunks", 2)
    for (cap, (free, *own)), (color, mark) in zip(by_cap(rows).items(), STYLES, strict=False):
        shares = [row["position"] for row in own]
        style: dict[str, Any] = {"color": color, "marker": mark, "label": f"cap {cap / MIB:.0f} MiB"}
        step.plot(shares, [row["step_s"] / compute_s for row in own], **style)
        moved.plot(shares, [(row["h2d_nbytes"] + row["d2h_nbytes"]) / MIB for row in own], **style)
        without: dict[str, Any] = {"color": color, "linestyle": ":", "linewidth": 2}
        without["label"] = f"{cap / MIB:.0f} MiB, no static partition"
        step.axhline(free["step_s"] / compute_s, **without)
        moved.axhline((free["h2d_nbytes"] + free["d2h_nbytes"]) / MIB, **without)
    _finish(step, "warmup_gpu_chunk_mem_ratio", STEP, bottom=1.0)
    _finish(moved, "warmup_gpu_chunk_mem_ratio", MOVED, bottom=0.0)
    _common_legend(figure, (step, moved))
    return figure


def _draw_size(rows: Sequence[Row], compute_s: float) -> Figure:
    cap_nbytes = rows[0]["cap_nbytes"]
    figure, (least, padding, moved, step) = _panels(f"Chunk sizes of one model, cap {cap_nbytes / MIB:.0f} MiB", 4)
    sizes = [row["position"] for row in rows]
    least.plot(sizes, [row["least_cap_nbytes"] / MIB for row in rows], "-o", color=BLUE)
    least.axhline(cap_nbytes / MIB, color=VERMILION, label="the cap")
    padding.plot(sizes, [100 * max(0.0, row["padding_share"]) for row in rows], "o", color=BLUE)
    fit = [row for row in rows if row["fits"]]
    fitting, unfit = ([row["position"] for row in rows if row["fits"] is fits] for fits in (True, False))
    moved.plot(fitting, [(row["h2d_nbytes"] + row["d2h_nbytes"]) / MIB for row in fit], "o", color=BLUE)
    step.plot(fitting, [row["step_s"] / compute_s for row in fit], "o", color=BLUE)
    titles = {least: "smallest cap that works, MiB", padding: "padding, %", moved: MOVED, step: STEP}
    for axes, title in titles.items():
        bottom = 1.0 if axes is step else 0.0
        if axes in (moved, step):
            axes.plot(unfit, [bottom] * len(unfit), "X", color=VERMILION, label="does not fit", clip_on=False)
        axes.axvline(rows[0]["auto_numel"], color=GREY, linestyle=":", linewidth=2, label='"auto"')
        axes.set_xscale("log")
        _finish(axes, "default_chunk_size, elements", title, bottom=bottom)
        _plain_ticks(axes, x=[1e5, 3e5, 1e6, 3e6], names=["100k", "300k", "1M", "3M"])
    return figure


def _panels(title: str, number: int) -> tuple[Figure, Sequence[Axes]]:
    num_rows, num_columns = (2, 2) if number == 4 else (1, number)
    figure = Figure(figsize=(3.4 * num_columns, 3.2 * num_rows), layout="constrained")
    figure.suptitle(title, fontsize=12)
    panels: Sequence[Axes] = figure.subplots(num_rows, num_columns).flatten()
    return figure, panels


def _finish(axes: Axes, x: str, y: str, *, bottom: float | None = None) -> None:
    axes.set_xlabel(x, fontsize=10)
    axes.set_ylabel(y, fontsize=10)
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    if bottom is not None:
        axes.set_ylim(bottom=bottom)
    axes.legend(frameon=False, fontsize=8)
    for line in axes.lines:
        line.set_markersize(min(line.get_markersize(), 4.5))


def _common_legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """Put one legend below panels that share it, in place of one in each."""
    handles, labels = panels[0].get_legend_handles_labels()
    for axes in panels:
        axes.legend().remove()
    columns = 2 if len(labels) == 4 else 3
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def _plain_ticks(
    axes: Axes, *, x: Sequence[float], y: Sequence[float] | None = None, names: Sequence[str] | None = None
) -> None:
    """Label a logarithmic axis with plain numbers."""
    axes.set_xticks(x, names or [f"{value:g}" for value in x])
    axes.xaxis.set_minor_locator(NullLocator())
    if y is not None:
        axes.set_yticks(y, [f"{value:g}" for value in y])
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_minor_locator(NullLocator())


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=100)
    return path
