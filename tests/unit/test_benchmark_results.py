"""What benchmarks keep: small files that say what was measured."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.results import ROW_WIDTH, WIDTH, rounded, write

KEPT = sorted(
    path for path in (Path(__file__).parents[2] / "benchmarks").rglob("*.json") if path.parent.name != "traces"
)
MOST_LINES = 4_500
"""Of all that is kept; it falls where less is, and does not grow for one more series of raw numbers."""


def test_floats_are_kept_with_eight_digits_and_all_else_is_exact() -> None:
    kept = rounded({1: (0.123456789123, 1e-9 / 3, float("inf")), "nbytes": 105011200.0, "seed": 2**60 + 1, "ok": True})
    assert kept == {"1": [0.12345679, 3.3333333e-10, float("inf")], "nbytes": 105011200, "seed": 2**60 + 1, "ok": True}
    assert isinstance(kept["nbytes"], int)
    assert kept["ok"] is True


def test_series_and_rows_are_a_line_each(tmp_path: Path) -> None:
    rows = [{"name": name, "step_s": [0.5] * 20, "moved": {"h2d": 1, "d2h": 2}} for name in "abcde"]
    write(tmp_path / "results.json", {"command": "python", "load": 2.0, "series": [0.25] * 400, "rows": rows})
    lines = (tmp_path / "results.json").read_text().splitlines()
    assert len(lines) == 3 + len(rows) + 3
    assert lines[1] == ' "command": "python", "load": 2.0,'
    assert all(len(line) <= max(WIDTH, ROW_WIDTH) + 3 for line in lines if "series" not in line)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    draw = random.Random(0)

    def value(depth: int) -> Any:
        kind = draw.randrange(6 if depth else 4)
        if kind == 4:
            return [value(depth - 1) for _ in range(draw.randrange(9))]
        if kind == 5:
            return {f"key {count}": value(depth - 1) for count in range(draw.randrange(9))}
        return (draw.random(), draw.randrange(1 << 40), "a “text”\n, with: marks", None)[kind]

    for _ in range(200):
        made = value(5)
        write(tmp_path / "results.json", made)
        assert json.loads((tmp_path / "results.json").read_text()) == rounded(made)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_is_kept_can_be_read(path: Path) -> None:
    assert json.loads(path.read_text())


def test_what_is_kept_is_small() -> None:
    assert sum(len(path.read_text().splitlines()) for path in KEPT) <= MOST_LINES
