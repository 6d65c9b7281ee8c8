"""Is more memory never slower: one model under caps from 8 GiB to the whole card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.gpu import speed
from benchmarks.gpu.harness import Task
from benchmarks.gpu.model import preset
from benchmarks.gpu.rows import Store
from benchmarks.gpu.setting import Cap, Setting
from benchmarks.gpu.table import page
from benchmarks.gpu.work import toy_cap_nbytes

NAME = "monotone"
SUMMARY = "tokens/s of one model over caps from 8 GiB to the whole card"
MODEL, TOKENS = "2.7b", 4096
GIB_CAPS = (8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 112)
TOY_SHARES = (1.0, 2.0)
TOLERANCE = 0.03
"""A cap may be so much slower than a smaller one before it counts: the same cap twice differs by as much."""


def tasks(setting: Setting, _store: Store) -> Iterator[Task]:
    """Yield a row for each cap, the ends first, so that a part that is cut short has both."""
    rates = speed.probed(setting)
    if setting.dry:
        toy = preset(MODEL, dry=True)
        for share in TOY_SHARES:
            cap = Cap(f"{share:g} × toy cap", None)
            # Two caps in RAM of the same toy.
            keys = {"memory": {"device": int(share * toy_cap_nbytes(toy))}}
            yield speed.task(setting, "chunkmem", "toy", 64, cap, rates, options=keys)
        return
    caps = setting.caps(*GIB_CAPS)
    for cap in (caps[0], caps[-1], *caps[1:-1]):
        yield speed.task(setting, "chunkmem", MODEL, TOKENS, cap, rates)
    # The same again: what two equal rows differ by is noise.
    again = speed.task(setting, "chunkmem", MODEL, TOKENS, caps[0], rates)
    yield replace(again, key=f"{again.key}, again")


def table(content: Mapping[str, Any]) -> str:
    """Return the Markdown of a file of rows and the verdict."""
    rows = dict(sorted(content["rows"].items(), key=lambda item: _cap_nbytes(item[1])))
    return f"{page({**content, 'rows': rows}, speed.HEADER, speed.cells)}\n\n{verdict(rows)}"


def _cap_nbytes(row: Mapping[str, Any]) -> float:
    figures = row.get("figures") or {}
    return float(figures.get("cap_nbytes") or 0)


def verdict(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Say whether any cap is slower than a smaller one by more than the tolerance; `rows` are in order of caps."""
    best, best_key, worse = 0.0, "", []
    found = [(key, row["figures"]["tokens_per_s"]) for key, row in rows.items() if row.get("figures")]
    for key, rate in found:
        if rate < (1 - TOLERANCE) * best:
            worse.append(f"{key} reaches {rate / best:.1%} of {best_key}")
        if rate > best:
            best, best_key = rate, key
    if len(found) < 2:
        return "Fewer than two caps have figures, so there is no order to check."
    return "; ".join(worse) + "." if worse else f"No cap is slower than a smaller one by more than {TOLERANCE:.0%}."
