"""The memory of one step as a picture, by moments. matplotlib (extra ``plot``) is imported when one is drawn."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from typing import TYPE_CHECKING

from chunkmem.report.clock import AGAIN, phases, recomputations
from chunkmem.report.replay import replay, role_nbytes
from chunkmem.report.run import Run, measured_nbytes
from chunkmem.report.summary import PlainPyTorch
from chunkmem.report.text import plan_misses
from chunkmem.sizes import format_nbytes
from chunkmem.types import Role, Tier

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


@dataclass(frozen=True)
class _Columns:
    """What is drawn, in bytes by moment."""

    roles: Mapping[Tier, Mapping[Role, Sequence[int]]]
    non_model: Sequence[int]
    sampled: Sequence[int]
    predicted: Sequence[int]
    measured: Mapping[int, int]
    caps: Mapping[Tier, int]
    is_charged: bool
    """The cap on DEVICE covers non-model data, too."""

    @cached_property
    def colors(self) -> dict[Role, str]:
        """By role, in the order they are stacked: what comes and goes lies on what stays."""
        found, others = {role for roles in self.roles.values() for role in roles}, cycle(_OTHER_COLORS)
        stack = sorted(found, key=lambda role: (role.kind.is_of_step, role.order))
        return {role: _COLORS.get(role) or next(others) for role in stack}

    @classmethod
    def of(cls, run: Run) -> _Columns:
        histories, machine = replay(run.plan, run.trace), run.plan.machine
        return cls(
            roles={tier: role_nbytes(histories, run.trace, tier) for tier in machine.tiers},
            non_model=[moment.non_model_peak_nbytes for moment in run.trace.moments],
            sampled=[moment.sampled_peak_nbytes for moment in run.trace.moments],
            predicted=run.predicted.device_nbytes,
            measured=measured_nbytes(run),
            caps=machine.cap_nbytes,
            is_charged=machine.charges_non_model,
        )

    def peak(self, tier: Tier) -> int:
        """Return the highest sum over roles."""
        columns = self.roles[tier].values()
        return max((sum(column) for column in zip(*columns, strict=True)), default=0)


def memory_picture(run: Run) -> bytes:
    """Return a PNG of the bytes by role on DEVICE, and on the tiers below, over the moments of a step.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to install it.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            'matplotlib is missing, which draws memory.png; pip install -e ".[plot]" brings it'
        ) from None
    columns = _Columns.of(run)
    # Non-model data that the cap does not cover may be many times as much as chunks, and gets a scale of its own.
    room = max(columns.caps[Tier.DEVICE], columns.peak(Tier.DEVICE))
    is_apart = not columns.is_charged and max(columns.non_model) > room
    below = [tier for tier, roles in columns.roles.items() if roles and tier is not Tier.DEVICE]
    heights = [3.6, *([2.4] * len(below)), *([1.2] if is_apart else [])]
    figure = Figure(figsize=(11, 1.4 + sum(heights)), layout="constrained")
    panels = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
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
    order = [
        *(role.label for role in columns.colors),
        _NON_MODEL,
        _PREDICTED,
        _MEASURED,
        _SAMPLED,
        AGAIN,
    ]
    texts = [text for text in order if text in patches]
    figure.legend([patches[text] for text in texts], texts, loc="outside lower center", ncols=4, frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    return content.getvalue()


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
        if stop - start > 0.12 * num_moments:
            panels[0].text((start + stop) / 2, 1.02, phase, transform=above, ha="center", fontsize=11)
        elif stop == num_moments:
            panels[0].text(stop, 1.02, phase, transform=above, ha="right", fontsize=11)


def _draw_device(axes: Axes, columns: _Columns, *, is_apart: bool) -> None:
    cap, chunk_peak = columns.caps[Tier.DEVICE], columns.peak(Tier.DEVICE)
    total = max(a + b for a, b in zip(columns.predicted, columns.non_model, strict=True))
    top = 1.08 * (chunk_peak if is_apart else max(total, chunk_peak))
    # A cap far above what is used would flatten everything below it.
    show_cap = cap <= 2 * top
    unit, scale = _scale(max(top, 1))
    x = range(len(columns.non_model) + 1)
    bottom = _draw_roles(axes, columns, Tier.DEVICE, scale)
    if not is_apart:
        above = [low + nbytes / scale for low, nbytes in zip(bottom, _held(columns.non_model), strict=True)]
        axes.fill_between(x, bottom, above, step="post", color=_NON_MODEL_COLOR, linewidth=0, label=_NON_MODEL)
    if columns.measured:
        measured = [columns.measured.get(moment, float("nan")) / scale for moment in range(len(columns.non_model))]
        axes.step(x, _held(measured), where="post", color=_MEASURED_COLOR, linewidth=2.4, label=_MEASURED)
    # Above the measured one, and thinner: where they agree both are seen.
    predicted = [nbytes / scale for nbytes in columns.predicted]
    axes.step(x, _held(predicted), where="post", color="black", linewidth=0.7, label=_PREDICTED)
    if show_cap:
        _draw_cap(axes, cap, scale)
        top = max(top, 1.12 * cap)
    else:
        _note(axes, f"cap {format_nbytes(cap)}, far above")
    if not columns.is_charged and not is_apart and any(columns.non_model):
        text = f"the cap does not cover {_NON_MODEL}"
        axes.text(0.005, 0.97, text, transform=axes.transAxes, va="top", fontsize=10)
    axes.set_ylim(0, top / scale)
    axes.set_ylabel(f"DEVICE, {unit}", fontsize=11)


def _draw_non_model(axes: Axes, columns: _Columns) -> None:
    """Draw non-model data on a scale of its own."""
    unit, scale = _scale(max(*columns.non_model, *columns.sampled, 1))
    x = range(len(columns.non_model) + 1)
    non_model = [nbytes / scale for nbytes in columns.non_model]
    axes.fill_between(x, 0, _held(non_model), step="post", color=_NON_MODEL_COLOR, linewidth=0, label=_NON_MODEL)
    axes.step(x, _held(non_model), where="post", color="#666666", linewidth=0.8)
    if any(columns.sampled):
        sampled = [nbytes / scale for nbytes in columns.sampled]
        axes.step(x, _held(sampled), where="post", color="black", linewidth=1, linestyle="--", label=_SAMPLED)
    _note(
        axes, f"activations and temporaries, up to {format_nbytes(max(columns.non_model))}: the cap does not cover them"
    )
    axes.set_ylim(0, 1.45 * max(*columns.non_model, *columns.sampled, 1) / scale)
    axes.set_ylabel(f"non-model, {unit}", fontsize=11)


def _draw_below(axes: Axes, columns: _Columns, tier: Tier) -> None:
    cap, peak = columns.caps[tier], columns.peak(tier)
    unit, scale = _scale(max(peak, 1))
    _draw_roles(axes, columns, tier, scale)
    if cap <= 2 * peak:
        _draw_cap(axes, cap, scale)
        axes.set_ylim(0, 1.18 * max(cap, peak) / scale)
    else:
        axes.set_ylim(0, 1.25 * peak / scale)
        _note(axes, f"cap {format_nbytes(cap)}, far above")
    axes.set_ylabel(f"{tier.name}, {unit}", fontsize=11)


def _draw_roles(axes: Axes, columns: _Columns, tier: Tier, scale: int) -> list[float]:
    """Stack the roles; return the stack's upper edge."""
    x = range(len(columns.non_model) + 1)
    bottom = [0.0] * len(x)
    for role in (role for role in columns.colors if role in columns.roles[tier]):
        nbytes = columns.roles[tier][role]
        above = [low + height / scale for low, height in zip(bottom, _held(nbytes), strict=True)]
        axes.fill_between(x, bottom, above, step="post", color=columns.colors[role], linewidth=0, label=role.label)
        bottom = above
    return bottom


def _draw_cap(axes: Axes, cap_nbytes: int, scale: int) -> None:
    axes.axhline(cap_nbytes / scale, color=_CAP_COLOR, linewidth=2)
    axes.annotate(
        f"cap {format_nbytes(cap_nbytes)}",
        (0.995, cap_nbytes / scale),
        xycoords=axes.get_yaxis_transform(),
        xytext=(0, 4),
        textcoords="offset points",
        color=_CAP_COLOR,
        ha="right",
        fontsize=11,
        fontweight="bold",
    )


def _note(axes: Axes, text: str) -> None:
    box = {"facecolor": "white", "alpha": 0.8, "pad": 1, "linewidth": 0}
    axes.text(0.995, 0.97, text, transform=axes.transAxes, ha="right", va="top", fontsize=10, bbox=box)


def _held(values: Sequence[float]) -> list[float]:
    """Draw the last moment as long as the others: each value holds until the next."""
    return [*values, values[-1]]


def _scale(nbytes: float) -> tuple[str, int]:
    return [(unit, scale) for unit, scale in _SCALES if scale <= nbytes][-1]


def _plain(name: str) -> str:
    """Return a name as matplotlib can draw it: short, of letters its font has, and not read as a formula."""
    name = "".join(c if c.isprintable() and ord(c) < 0x250 else "?" for c in name)
    return (name if len(name) <= 40 else f"{name[:37]}...").replace("$", r"\$")
