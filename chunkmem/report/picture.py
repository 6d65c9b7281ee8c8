"""The memory of one step as a picture, by moments. matplotlib (extra ``plot``) is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from math import isnan, nan
from typing import TYPE_CHECKING, Any

from chunkmem.data.sizes import format_nbytes
from chunkmem.data.types import Role, Tier
from chunkmem.report.clock import AGAIN, phases, recomputations
from chunkmem.report.figure import new_figure, png_of
from chunkmem.report.replay import role_nbytes
from chunkmem.report.run import Run
from chunkmem.report.summary import PlainPyTorch
from chunkmem.report.text import plan_misses

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours keep apart for colour-blind eyes; neighbours in the stack also differ in lightness, for print.
_COLORS = {Role.PARAM: "#0072B2", Role.MASTER: "#F0E442", Role.GRAD: "#E69F00", Role.ACTIVATION: "#8C510A"}
_OTHER_COLORS = ("#56B4E9", "#009E73")
_NON_MODEL_COLOR = "#DDDDDD"
_CAP_COLOR = "#D55E00"
_MEASURED_COLOR = "#CC79A7"
_AGAIN_COLOR = "#999999"
_NON_MODEL = "non-model data"
_PREDICTED, _MEASURED, _SAMPLED = "chunks, as planned", "chunks, as measured", "non-model data, as sampled"
_SCALES = (("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40))


class _Columns:
    """What is drawn, in bytes by moment."""

    def __init__(self, run: Run) -> None:
        machine = run.plan.machine
        self.roles = {tier: role_nbytes(run.histories, run.trace, tier) for tier in machine.tiers}
        self.non_model = [moment.non_model_peak_nbytes for moment in run.trace.moments]
        self.sampled = [moment.sampled_peak_nbytes for moment in run.trace.moments]
        self.predicted = run.predicted.device_nbytes
        self.measured = run.measured_nbytes
        self.caps = machine.cap_nbytes
        self.is_charged = machine.charges_non_model
        """The cap on DEVICE covers non-model data, too."""
        found, others = {role for roles in self.roles.values() for role in roles}, cycle(_OTHER_COLORS)
        stack = sorted(found, key=lambda role: (role.kind.is_of_step, role.order))
        self.colors = {role: _COLORS.get(role) or next(others) for role in stack}
        """By role, in the order they are stacked: what comes and goes lies on what stays."""

    def peak(self, tier: Tier) -> int:
        """Return the highest sum over roles."""
        columns = self.roles[tier].values()
        return max((sum(column) for column in zip(*columns, strict=True)), default=0)


class _Panel:
    """One part of the picture, with a scale of its own."""

    def __init__(self, axes: Axes, name: str, top_nbytes: float) -> None:
        self.axes = axes
        self._top_nbytes = top_nbytes
        unit, self._scale = [(unit, scale) for unit, scale in _SCALES if scale <= max(top_nbytes, 1)][-1]
        axes.set_ylabel(f"{name}, {unit}", fontsize=11)
        axes.set_ylim(0, top_nbytes / self._scale)

    def stack(self, nbytes: Sequence[float], text: str, color: str, *, on: Sequence[float] = ()) -> list[float]:
        """Draw an area above another one; return its upper edge."""
        above = [low + more for low, more in zip(on or [0.0] * len(nbytes), nbytes, strict=True)]
        low, high = self._held(on or [0.0] * len(nbytes)), self._held(above)
        self.axes.fill_between(range(len(low)), low, high, step="post", color=color, linewidth=0, label=text)
        return above

    def roles(self, columns: _Columns, tier: Tier) -> list[float]:
        """Stack the roles; return the stack's upper edge."""
        edge = [0.0] * len(columns.non_model)
        for role in (role for role in columns.colors if role in columns.roles[tier]):
            edge = self.stack(columns.roles[tier][role], role.label, columns.colors[role], on=edge)
        return edge

    def line(self, nbytes: Sequence[float], **look: Any) -> None:
        """Draw a line."""
        values = self._held(nbytes)
        self.axes.step(range(len(values)), values, where="post", **look)

    def cap(self, nbytes: int) -> None:
        """Draw the cap; one far above what is used would flatten everything below it."""
        if nbytes > 2 * self._top_nbytes:
            self.note(f"cap {format_nbytes(nbytes)}, far above")
            return
        height = nbytes / self._scale
        self.axes.set_ylim(0, max(self._top_nbytes / self._scale, 1.15 * height))
        self.axes.axhline(height, color=_CAP_COLOR, linewidth=2)
        self.axes.annotate(
            f"cap {format_nbytes(nbytes)}",
            (0.995, height),
            xycoords=self.axes.get_yaxis_transform(),
            xytext=(0, 4),
            textcoords="offset points",
            color=_CAP_COLOR,
            ha="right",
            fontsize=11,
            fontweight="bold",
        )

    def note(self, text: str, *, x: float = 0.995, ha: str = "right") -> None:
        """Write something into a corner."""
        box = {"facecolor": "white", "alpha": 0.8, "pad": 1, "linewidth": 0}
        self.axes.text(x, 0.97, text, transform=self.axes.transAxes, ha=ha, va="top", fontsize=10, bbox=box)

    def _held(self, nbytes: Sequence[float]) -> list[float]:
        """Draw the last moment as long as the others: each value holds until the next."""
        return [value / self._scale for value in (*nbytes, nbytes[-1])]


def memory_picture(run: Run) -> bytes:
    """Return a PNG of the bytes by role on DEVICE, and on the tiers below, over the moments of a step.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to install it.
    """
    columns = _Columns(run)
    # Non-model data that the cap does not cover may be many times as much as chunks, and gets a scale of its own.
    room = max(columns.caps[Tier.DEVICE], columns.peak(Tier.DEVICE))
    is_apart = not columns.is_charged and max(columns.non_model) > room
    below = [tier for tier, roles in columns.roles.items() if roles and tier is not Tier.DEVICE]
    heights = [3.6, *([2.4] * len(below)), *([1.2] if is_apart else [])]
    figure, panels = new_figure("memory.png", heights, margin=1.4)
    figure.suptitle(_title(run), fontsize=13)
    rest = iter(panels)
    _draw_device(next(rest), columns, is_apart=is_apart)
    for tier in below:
        _draw_below(next(rest), columns, tier)
    if is_apart:
        _draw_non_model(next(rest), columns)
    _draw_phases(panels, run)
    departed = f"; {times} the step missed its plan" if (times := plan_misses(run.happened.plan_misses)) else ""
    panels[-1].set_xlabel(f"moments of the step, in order{departed}", fontsize=11)
    for axes in panels:
        axes.set_xlim(0, len(columns.non_model))
        axes.tick_params(labelsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    # One entry each, in the order they are stacked; a panel may lack some.
    patches = {text: patch for axes in panels for patch, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    order = [*(role.label for role in columns.colors), _NON_MODEL, _PREDICTED, _MEASURED, _SAMPLED, AGAIN]
    texts = [text for text in order if text in patches]
    figure.legend([patches[text] for text in texts], texts, loc="outside lower center", ncols=4, frameon=False)
    return png_of(figure)


def _title(run: Run) -> str:
    plain = PlainPyTorch.of(run.trace)
    whole = f"{format_nbytes(sum(run.trace.chunk_nbytes.values()) - plain.activation_nbytes)} of model data"
    more = f" and {format_nbytes(plain.activation_nbytes)} of activations" if plain.activation_nbytes else ""
    peak = format_nbytes(max(timeline.peak_nbytes[Tier.DEVICE] for timeline in (run.predicted, run.happened)))
    on_device = f"at most {peak} of {'them' if more else 'it'} on DEVICE at a time"
    return f"{_plain(run.name)}: one step over {whole}{more},{chr(10) if more else ' '}{on_device}"


def _draw_phases(panels: Sequence[Axes], run: Run) -> None:
    num_moments, above = len(run.trace.moments), panels[0].get_xaxis_transform()
    for start, stop in recomputations(run.trace):
        panels[0].axvspan(start, stop, ymin=0.98, color=_AGAIN_COLOR, linewidth=0, label=AGAIN)
    for phase, start, stop in phases(run.trace):
        for axes in panels:
            axes.axvline(start, color="black", linewidth=0.8, linestyle=":")
        # A name wider than its phase would run into the next one's; but left of the last there is room.
        is_wide = stop - start > 0.12 * num_moments
        if is_wide or stop == num_moments:
            x, ha = ((start + stop) / 2, "center") if is_wide else (stop, "right")
            panels[0].text(x, 1.02, phase, transform=above, ha=ha, fontsize=11)


def _draw_device(axes: Axes, columns: _Columns, *, is_apart: bool) -> None:
    chunk_peak = columns.peak(Tier.DEVICE)
    total = max(a + b for a, b in zip(columns.predicted, columns.non_model, strict=True))
    panel = _Panel(axes, "DEVICE", 1.08 * (chunk_peak if is_apart else max(total, chunk_peak)))
    edge = panel.roles(columns, Tier.DEVICE)
    if not is_apart:
        panel.stack(columns.non_model, _NON_MODEL, _NON_MODEL_COLOR, on=edge)
    measured = [nan if nbytes is None else nbytes for nbytes in columns.measured]
    if not all(map(isnan, measured)):
        panel.line(measured, color=_MEASURED_COLOR, linewidth=2.4, label=_MEASURED)
    # Above the measured one, and thinner: where they agree both are seen.
    panel.line(columns.predicted, color="black", linewidth=0.7, label=_PREDICTED)
    panel.cap(columns.caps[Tier.DEVICE])
    if not columns.is_charged and not is_apart and any(columns.non_model):
        panel.note(f"the cap does not cover {_NON_MODEL}", x=0.005, ha="left")


def _draw_non_model(axes: Axes, columns: _Columns) -> None:
    """Draw non-model data on a scale of its own."""
    panel = _Panel(axes, "non-model", 1.45 * max(*columns.non_model, *columns.sampled))
    panel.stack(columns.non_model, _NON_MODEL, _NON_MODEL_COLOR)
    panel.line(columns.non_model, color="#666666", linewidth=0.8)
    if any(columns.sampled):
        panel.line(columns.sampled, color="black", linewidth=1, linestyle="--", label=_SAMPLED)
    highest = format_nbytes(max(columns.non_model))
    panel.note(f"activations and temporaries, up to {highest}: the cap does not cover them")


def _draw_below(axes: Axes, columns: _Columns, tier: Tier) -> None:
    panel = _Panel(axes, tier.name, 1.25 * columns.peak(tier))
    panel.roles(columns, tier)
    panel.cap(columns.caps[tier])


def _plain(name: str) -> str:
    """Return a name as matplotlib can draw it: short, of letters its font has, and not read as a formula."""
    name = "".join(c if c.isprintable() and ord(c) < 0x250 else "?" for c in name)
    return (name if len(name) <= 40 else f"{name[:37]}...").replace("$", r"\$")
