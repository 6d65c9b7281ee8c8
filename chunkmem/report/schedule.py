"""A pipeline's steps as a picture: devices over time. matplotlib (extra ``plot``) is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from chunkmem.plan.pipeline_schedule import PipelineStep
from chunkmem.plan.timeline import StageCall, StageWork
from chunkmem.report.figure import new_figure, png_of
from chunkmem.report.text import format_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours; a device's later stages are paler.
_COLORS = {StageWork.FORWARD: "#56B4E9", StageWork.BACKWARD: "#E69F00"}
_BUBBLE_COLOR = "#EEEEEE"
_PALEST = 0.45
_CHARACTERS = 160
"""Digits that have room side by side."""


def schedule_picture(steps: Sequence[PipelineStep]) -> bytes:
    """Return a PNG with a panel for each step, a row for each device and a box for each call, on one time axis.

    Boxes have the numbers of micro-batches, where there is room. What is grey is the bubble.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to install it.
    """
    heights = [0.5 + 0.3 * step.num_devices for step in steps]
    figure, panels = new_figure("schedules", heights, margin=1.0)
    longest_s = max(step.step_s for step in steps)
    scale = 1.0 if longest_s >= 1 else 1e3
    for axes, step in zip(panels, steps, strict=True):
        _draw(axes, step, scale=scale, longest_s=longest_s)
    panels[-1].set_xlabel("seconds" if scale == 1 else "milliseconds", fontsize=11)
    from matplotlib.patches import Patch

    patches = [Patch(color=color, label=work.value) for work, color in _COLORS.items()]
    patches.append(Patch(color=_BUBBLE_COLOR, label="bubble"))
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)
    return png_of(figure)


def _draw(axes: Axes, step: PipelineStep, *, scale: float, longest_s: float) -> None:
    devices = range(step.num_devices)
    axes.barh(devices, scale * step.step_s, height=0.8, color=_BUBBLE_COLOR)
    for work, color in _COLORS.items():
        calls = [call for call in step.calls if call.work is work]
        axes.barh(
            [step.device_of(call) for call in calls],
            [scale * (call.end_s - call.start_s) for call in calls],
            left=[scale * call.start_s for call in calls],
            height=0.8,
            color=[(color, _strength(call, step)) for call in calls],
            edgecolor="white",
            linewidth=0.5,
        )
    for call in step.calls:
        text = str(call.micro_batch)
        if (call.end_s - call.start_s) * _CHARACTERS >= len(text) * longest_s:
            place = scale * (call.start_s + call.end_s) / 2, step.device_of(call)
            axes.text(*place, text, ha="center", va="center", fontsize=7, color="black")
    of_stages = "" if step.num_stages == step.num_devices else f", {step.num_stages} stages"
    axes.set_title(
        f"{step.schedule.value}{of_stages}: {format_s(step.step_s)}, bubble {100 * step.bubble:.0f} %", fontsize=11
    )
    axes.set_xlim(0, scale * longest_s)
    axes.set_ylim(step.num_devices - 0.5, -0.5)
    axes.set_yticks(devices, [f"device {device}" for device in devices])
    axes.tick_params(labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _strength(call: StageCall, step: PipelineStep) -> float:
    """Return the opacity of a call: 1 in the first stage of its device."""
    loops = step.num_stages // step.num_devices
    return 1.0 - (1.0 - _PALEST) * (call.stage // step.num_devices) / max(1, loops - 1)
