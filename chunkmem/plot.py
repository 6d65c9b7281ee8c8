"""The memory of a few steps as a picture. matplotlib (extra ``plot``) is imported when one is drawn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from chunkmem.memory import MemoryHistory
from chunkmem.types import Tier
from chunkmem.units import format_nbytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours keep apart for colour-blind eyes; neighbours in the stack also differ in lightness, for print.
# In the order they are stacked, from the bottom.
_COLORS = {
    "param": "#0072B2",
    "master": "#F0E442",
    "exp_avg": "#56B4E9",
    "exp_avg_sq": "#009E73",
    "grad": "#E69F00",
    "cache": "#BBBBBB",
}
_OTHER_COLOR = "#CC79A7"
_CAP_COLOR = "#D55E00"
_NAMES = {"param": "weights", "master": "master weights", "grad": "gradients", "cache": "free, kept for reuse"}
_PHASE_NAMES = {"step": "optimizer step"}
_PREDICTED = "as planned"
_SCALES = (("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40))


def save_memory_picture(history: MemoryHistory, path: str | os.PathLike[str]) -> None:
    """Draw the bytes by role on DEVICE, and below it on HOST, over the changes that `history` recorded.

    Where a plan was followed, a line shows the bytes that it had predicted for DEVICE.

    Args:
        history: what `manager.memory_history()` gave, best of one whole step.
        path: the file to write; its suffix says the format: png, svg or pdf.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to install it.
        ValueError: the history has no samples.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            'matplotlib is missing, which draws pictures; pip install -e ".[plot]" brings it'
        ) from None
    if not history.samples:
        raise ValueError("the history has no samples, so there is nothing to draw")
    tiers = [tier for tier in (Tier.DEVICE, Tier.HOST) if tier is Tier.DEVICE or _peak(history, tier) > 0]
    figure = Figure(figsize=(9, 3 + 1.5 * len(tiers)), layout="constrained")
    peak, cap = format_nbytes(_peak(history, Tier.DEVICE)), format_nbytes(history.caps[Tier.DEVICE])
    rest = "; HOST keeps the rest of the model" if Tier.HOST in tiers else ""
    figure.suptitle(f"DEVICE holds at most {peak} under its cap of {cap}{rest}", fontsize=13)
    panels = figure.subplots(len(tiers), 1, sharex=True, squeeze=False, height_ratios=(3, 2)[: len(tiers)])[:, 0]
    for axes, tier in zip(panels, tiers, strict=True):
        _draw_tier(axes, history, tier)
    for phase, start, stop in _phases(history):
        for axes in panels:
            axes.axvline(start, color="black", linewidth=0.8, linestyle=":")
        top = panels[0].get_xaxis_transform()
        panels[0].text((start + stop) / 2, 1.02, phase, transform=top, ha="center", fontsize=11)
    panels[-1].set_xlabel("changes of memory, in order", fontsize=11)
    # One entry a role, in the order they are stacked; a panel may lack some.
    patches = {text: patch for axes in panels for patch, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    texts = [_NAMES.get(role, role) for role in _roles(history, tiers)]
    texts += [_PREDICTED] if _PREDICTED in patches else []
    figure.legend(
        [patches[text] for text in texts],
        texts,
        loc="outside lower center",
        ncols=min(len(texts), 6),
        frameon=False,
        fontsize=11 if len(texts) <= 5 else 10,
        columnspacing=1.2,
        handlelength=1.5,
    )
    figure.savefig(Path(path), dpi=160)


def _draw_tier(axes: Axes, history: MemoryHistory, tier: Tier) -> None:
    columns = [sample.nbytes.get(tier, {}) for sample in history.samples]
    cap = history.caps[tier]
    # A cap far above what is used would flatten everything below it.
    show_cap = cap <= 2 * _peak(history, tier)
    top = cap if show_cap else max(1, _peak(history, tier))
    unit, scale = [(unit, scale) for unit, scale in _SCALES if scale <= top][-1]
    # A sample holds until the next one; the last is drawn as long as one of the others.
    x = range(len(columns) + 1)
    bottom = [0.0] * len(x)
    for role in _roles(history, [tier]):
        heights = [column.get(role, 0) / scale for column in columns]
        above = [low + height for low, height in zip(bottom, [*heights, heights[-1]], strict=True)]
        color = _COLORS.get(role, _OTHER_COLOR)
        axes.fill_between(x, bottom, above, step="post", color=color, linewidth=0, label=_NAMES.get(role, role))
        bottom = above
    if tier is Tier.DEVICE and history.predicted_nbytes:
        _draw_predicted(axes, history, scale)
    if show_cap:
        axes.axhline(cap / scale, color=_CAP_COLOR, linewidth=2)
        axes.text(0, cap / scale, f" cap {format_nbytes(cap)}", color=_CAP_COLOR, va="bottom", fontsize=11)
    else:
        note = f" cap {format_nbytes(cap)}, far above"
        axes.text(0, 0.99, note, transform=axes.transAxes, color=_CAP_COLOR, va="top", fontsize=11)
    axes.set_xlim(0, len(columns))
    axes.set_ylim(0, 1.15 * top / scale)
    axes.set_ylabel(f"{tier.name}, {unit}", fontsize=11)
    axes.tick_params(labelsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_predicted(axes: Axes, history: MemoryHistory, scale: int) -> None:
    """Within a moment the plan's actions come one by one; the line is at what they lead to."""
    levels = [
        float("nan") if sample.moment is None else history.predicted_nbytes[sample.moment] / scale
        for sample in history.samples
    ]
    x = range(len(levels) + 1)
    axes.step(x, [*levels, levels[-1]], where="post", color="black", linewidth=1.2, label=_PREDICTED)


def _roles(history: MemoryHistory, tiers: Sequence[Tier]) -> list[str]:
    """Return the roles with any bytes on `tiers`, in the order they are stacked."""
    columns = [sample.nbytes.get(tier, {}) for sample in history.samples for tier in tiers]
    present = {role for column in columns for role, nbytes in column.items() if nbytes > 0}
    return [role for role in _COLORS if role in present] + sorted(present - _COLORS.keys())


def _peak(history: MemoryHistory, tier: Tier) -> int:
    return max(sum(sample.nbytes.get(tier, {}).values()) for sample in history.samples)


def _phases(history: MemoryHistory) -> list[tuple[str, int, int]]:
    """Return (name, first sample, one past the last) of each phase; changes outside of all belong to the one before."""
    labels: list[str] = []
    for sample in history.samples:
        labels.append(sample.label or (labels[-1] if labels else ""))
    first = next((label for label in labels if label), "")
    labels = [label or first for label in labels]
    found = []
    start = 0
    for label, run in groupby(labels):
        stop = start + len(list(run))
        found.append((_PHASE_NAMES.get(label, label), start, stop))
        start = stop
    return found
