"""Figures of panels under each other. matplotlib (extra ``plot``) is imported when one is drawn."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(what: str, heights: Sequence[float], *, margin: float) -> tuple[Figure, list[Axes]]:
    """Return a figure, and its panels of these heights, in inches, which have their horizontal axis in common.

    Args:
        what: is drawn, in the error.
        heights: of the panels.
        margin: height of all else.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to install it.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f'matplotlib is missing, which draws {what}; pip install -e ".[plot]" brings it'
        ) from None
    figure = Figure(figsize=(11, margin + sum(heights)), layout="constrained")
    return figure, list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])


def png_of(figure: Figure) -> bytes:
    """Return a figure as a PNG."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    return content.getvalue()
