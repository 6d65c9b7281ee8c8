"""Fragments of HTML for notebooks, with everything in them: tables, and bars over time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

_WIDTH: Final = 900
"""Pixels that a picture is wide."""
_LABEL_WIDTH: Final = 110
_ROW_HEIGHT: Final = 18
_TABLE: Final = "border-collapse:collapse;font:12px sans-serif"
_CELL: Final = "padding:2px 10px;border-bottom:1px solid #d0d5db;text-align:"


@dataclass(frozen=True)
class Bar:
    """Something that took time, in a row of a picture."""

    start_s: float
    end_s: float
    told: str
    """Shown where the pointer is."""
    color: str


def table_html(header: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "", num_left: int = 1) -> str:
    """Return a table; the first `num_left` columns are aligned to the left, the others to the right."""

    def line(cells: Sequence[str], kind: str) -> str:
        sides = ["left"] * num_left + ["right"] * (len(cells) - num_left)
        inner = (
            f'<{kind} style="{_CELL}{side}">{escape(cell)}</{kind}>' for cell, side in zip(cells, sides, strict=True)
        )
        return f"<tr>{''.join(inner)}</tr>"

    said = f'<caption style="caption-side:bottom;text-align:left">{_lines(caption)}</caption>' if caption else ""
    body = "".join(line(cells, "td") for cells in rows)
    return f'<table style="{_TABLE}">{said}<thead>{line(header, "th")}</thead><tbody>{body}</tbody></table>'


def bars_html(rows: Sequence[tuple[str, Sequence[Bar]]], *, end_s: float, caption: str) -> str:
    """Return rows of bars on one axis of time, from 0 to `end_s`; of bars thinner than a pixel there is one a pixel."""
    height = _ROW_HEIGHT * len(rows) + 20
    scale = (_WIDTH - _LABEL_WIDTH) / end_s if end_s > 0 else 0.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}" '
        f'role="img" style="font:12px sans-serif;background:#fff">'
    ]
    for index, (name, bars) in enumerate(rows):
        top = _ROW_HEIGHT * index
        parts.append(f'<text x="0" y="{top + 13}" fill="#1a1f26">{escape(name)}</text>')
        for bar in _drawn(bars, 1 / scale if scale else 0.0):
            left, width = _LABEL_WIDTH + scale * bar.start_s, max(1.0, scale * (bar.end_s - bar.start_s))
            parts.append(
                f'<rect x="{left:.1f}" y="{top + 2}" width="{width:.1f}" height="{_ROW_HEIGHT - 4}" fill="{bar.color}">'
                f"<title>{escape(bar.told)}</title></rect>"
            )
    for share in (0.0, 0.5, 1.0):
        anchor = {0.0: "start", 0.5: "middle", 1.0: "end"}[share]
        x = _LABEL_WIDTH + share * (_WIDTH - _LABEL_WIDTH)
        parts.append(f'<text x="{x:.0f}" y="{height - 5}" text-anchor="{anchor}">{1e3 * share * end_s:.1f} ms</text>')
    parts.append("</svg>")
    return f'<div style="font:12px sans-serif">{"".join(parts)}<div>{_lines(caption)}</div></div>'


def _drawn(bars: Iterable[Bar], pixel_s: float) -> list[Bar]:
    """Return bars in the order of time, with those that are thinner than a pixel put together where they touch."""
    found: list[Bar] = []
    counts: list[int] = []
    for bar in sorted(bars, key=lambda bar: bar.start_s):
        last = found[-1] if found else None
        is_thin = bar.end_s - bar.start_s < pixel_s
        if last is not None and is_thin and bar.color == last.color and bar.end_s - last.start_s < pixel_s:
            counts[-1] += 1
            found[-1] = Bar(last.start_s, max(last.end_s, bar.end_s), f"{counts[-1]} at a time", bar.color)
        else:
            found.append(bar)
            counts.append(1)
    return found


def _lines(text: str) -> str:
    return "<br/>".join(map(escape, text.splitlines()))
