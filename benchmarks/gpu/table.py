"""From the rows of a part to Markdown: what it ran on, a table, what is missing and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

DRY = (
    "**no GPU**: a dry run on the CPU at toy sizes. It shows that the harness works; no figure of it says anything "
    "about a GPU."
)
Rows = Mapping[str, Mapping[str, Any]]
"""Keys to rows as plain data."""
Cells = Callable[[str, Mapping[str, Any], Rows], Sequence[str]]
"""From a row's key, its figures and all rows to the cells after the first."""


def page(content: Mapping[str, Any], header: Sequence[str], cells: Cells) -> str:
    """Return the Markdown of a file of rows."""
    rows: Rows = content["rows"]
    lines = [*_head(content), "", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for key, row in rows.items():
        found = _cells(key, row, rows, cells, len(header) - 1)
        lines.append("| " + " | ".join([key, *found]) + " |")
    if not rows:
        lines.append("| nothing yet |" + " |" * (len(header) - 1))
    left = content.get("left") or []
    if left:
        lines += ["", f"Not measured yet: {'; '.join(left)}."]
    return "\n".join(lines)


def _cells(key: str, row: Mapping[str, Any], rows: Rows, cells: Cells, num: int) -> list[str]:
    if "why_not" in row:
        why = str(row["why_not"]).replace("|", "/")
        return [f"{row['reason']}: {why}" if why != "no GPU" else why, *["–"] * (num - 1)]
    return [str(cell) for cell in cells(key, row["figures"], rows)]


def _head(content: Mapping[str, Any]) -> list[str]:
    hardware, versions = content["hardware"], content["versions"]
    card = hardware["card"]
    told = DRY if card is None else (
        f"{card['name']}, {card['nbytes'] / 2**30:.0f} GiB (driver {card['driver']}, CUDA {versions['cuda']})"
    )  # fmt: skip
    days = sorted({row["at"][:10] for row in content["rows"].values()} - {""})
    when = "" if not days else f" {days[0]}." if len(days) == 1 else f" {days[0]} to {days[-1]}."
    return [
        f"`{content['command']}`",
        "",
        f"{told}{'' if card is None else '.'} {hardware['cpu']}, {hardware['num_cpus']} cores, "
        f"{hardware['usable_ram_nbytes'] / 2**30:.0f} GiB; torch {versions['torch']}, Python {versions['python']}."
        f"{when}",
    ]


def by_number(rates: Mapping[str, float], unit: float, digits: int = 1) -> str:
    """Return ``1: 3.4, 2: 6.7`` for rates by a number, in units of `unit`."""
    return ", ".join(f"{number}: {rate / unit:.{digits}f}" for number, rate in rates.items()) or "–"


def gib(nbytes: float | None) -> str:
    """Return GiB with one digit; a dash for None."""
    return "–" if nbytes is None else f"{nbytes / 2**30:.1f}"


def joined(parts: Iterable[str | None]) -> str:
    """Return the parts that are there, with semicolons."""
    return "; ".join(part for part in parts if part)
