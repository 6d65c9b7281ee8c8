"""What does one of many ranks send to the others and ask of the store, and how long does that take?

Simulated: see `tests/helpers/simulated_ranks.py`. Writes `results.json` in this folder and prints the README's table.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.results import write
from tests.helpers.simulated_training import failed, trained

SIZES = (8, 64, 512, 1024)
TIMEOUT_S = 60.0
TERMS = {
    "messages": "messages sent",
    "nbytes": "bytes sent",
    "requests": "requests to the store",
    "gloo_requests": "of gloo",
    "gloo_nbytes": "bytes of addresses read by gloo",
    "connections": "connections of gloo",
    "seconds": "virtual seconds",
}
Row = dict[str, Any]


def measure(size: int) -> list[Row]:
    """Return a row for each thing that a rank does among so many; for a death, the most of each over ranks."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            {"ranks": size, "who": who, "what": what, **asdict(counts), "seconds": passed_s}
            for (who, what), (counts, passed_s) in trained(size, Path(folder)).items()
        ]
    deaths = list(failed(size, timeout_s=TIMEOUT_S))
    assert all(error.ranks == (size // 2,) for _, error, _, _ in deaths)
    costs = [{**asdict(counts), "seconds": passed_s} for _, _, counts, passed_s in deaths]
    most = {term: max(cost[term] for cost in costs) for term in costs[0]}
    return [*rows, {"ranks": size, "who": "others", "what": "death", **most}]


def as_table(rows: list[Row]) -> str:
    """Format the rows as markdown: a line for each thing and term that is not 0, a column for each number of ranks."""
    lines = [f"| of | at | ranks: | {' | '.join(map(str, SIZES))} |", "|---|---|---|" + "---:|" * len(SIZES)]
    for who, what in dict.fromkeys((row["who"], row["what"]) for row in rows):
        if who == "rank 0" and what != "save":
            continue  # as the others
        for term, said in TERMS.items():
            values = [row[term] for row in rows if (row["who"], row["what"]) == (who, what)]
            if any(values):
                cells = " | ".join(f"{value:.4g}" if term == "seconds" else f"{value:,}" for value in values)
                lines.append(f"| {who} | {what} | {said} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    rows = [row for size in SIZES for row in measure(size)]
    write(Path(__file__).with_name("results.json"), rows)
    print(as_table(rows))


if __name__ == "__main__":
    main()
