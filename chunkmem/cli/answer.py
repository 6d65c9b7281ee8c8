"""What a command answers: data for programs, text for people, and the exit status that goes with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from chunkmem.data.errors import PlanError

BAD_INPUT: Final = 2
"""The exit status when what was asked makes no sense."""


@dataclass(frozen=True)
class CommandResult:
    """What a command found: data, text and exit status."""

    data: Mapping[str, Any]
    """JSON-serialisable: what `--json` prints, as one object."""
    text: str
    """What is printed otherwise."""
    fits: bool = True
    """False makes the exit status 1: the question was understood, and the answer is that it does not fit or differs."""


def does_not_fit(asked: Mapping[str, Any], error: PlanError) -> CommandResult:
    """Return the answer that what is asked does not fit."""
    reason = str(error)
    data = {**asked, "fits": False, "needed_nbytes": getattr(error, "needed_nbytes", None), "reason": reason}
    return CommandResult(data, f"does not fit: {' '.join(reason.split())}", fits=False)


def counted(number: int, what: str, ending: str = "s") -> str:
    """Return a number of things in words; `ending` makes them several."""
    return f"{number} {what}{ending if number > 1 else ''}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return lines of aligned columns: the first to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(_aligned(line, widths) for line in lines)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    columns = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
    return "  ".join(columns).rstrip()
