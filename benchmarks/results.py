"""How results are kept: JSON that is read by eye and in a diff, with as many digits as a measurement has."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

NUM_DIGITS = 8
"""Of a measured number. More than repeat: with six, some tables of three decimals would read otherwise."""
WIDTH = 120
"""Characters of a line that several values of an object share; a list of numbers is one line, however long."""
ROW_WIDTH = 500
"""Characters up to which an object of objects or lists is one line: a row of a table."""


def rounded(value: Any) -> Any:
    """Return what reading the JSON of `value` gives: keys are strings, tuples lists, and floats have eight digits.

    Whole numbers stay exact, whether they came as integers or as floats (bytes are often divided by steps).
    """
    if isinstance(value, dict):
        return {key if isinstance(key, str) else json.dumps(key): rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    return int(value) if value.is_integer() and abs(value) >= 10**NUM_DIGITS else float(f"{value:.{NUM_DIGITS}g}")


def write(path: Path, results: Any) -> None:
    """Write `results`, rounded, to the file at `path`."""
    path.write_text(_text(rounded(results), "") + "\n", encoding="utf-8")


def _text(value: Any, indent: str) -> str:
    """Return JSON: an object or list that has only values, or is short, is one line; values of others share lines."""
    short = json.dumps(value)
    if not isinstance(value, dict | list) or _is_flat(value) or len(short) <= ROW_WIDTH:
        return short
    inner = indent + " "
    if isinstance(value, list):
        return "[\n" + ",\n".join(inner + _text(item, inner) for item in value) + f"\n{indent}]"
    lines: list[str] = []
    shares_line = False
    for key, item in value.items():
        member = f"{json.dumps(key)}: {_text(item, inner)}"
        fits = shares_line and "\n" not in member and len(lines[-1]) + 2 + len(member) <= WIDTH
        if fits:
            lines[-1] += f", {member}"
        else:
            lines.append(inner + member)
        shares_line = "\n" not in member
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _is_flat(value: dict[str, Any] | list[Any]) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return not any(isinstance(item, dict | list) for item in items)
