"""How short-lived may a temporary be and still be seen? The README beside this file tells the method."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

if not __package__:  # Run as a file: find the other modules where `python -m` finds them.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import chunkmem
from benchmarks.program import BenchmarkError, carry_out, command, parse, surroundings
from benchmarks.sampling.operators import KINDS, Caller, Operator
from chunkmem.trace.model import Kind, Trace

HERE = Path(__file__).parent
LIVES_MS = (1, 2, 3, 5, 10, 20, 50, 100)
AIM = 0.95
"""Share of a temporary that is to be seen."""
CAP_NBYTES = 1 << 20
"""Above the whole model."""
HEADER = (
    "temporary; operator",
    "lives, ms",
    "made in, ms",
    "boundary probe sees",
    "sampling thread sees, median",
    "worst",
    "≥ 95 % in",
    "longest interval, median ms",
    "worst",
)


def record_step(operator: Operator) -> Trace:
    """Train one step of a fresh model under both probes, and return its trace."""
    memory = {"device": CAP_NBYTES, "host": CAP_NBYTES}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": memory})) as manager:
        with manager.init():
            model = Caller(operator)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        batch = torch.ones(4, 64)
        manager.backward(model(batch).sum())
        optimizer.step()
        with torch.no_grad():
            model(batch, calls=False)  # The training step is over for good when something else begins.
        trace = manager.trace
    if trace is None:
        raise BenchmarkError("a step left no trace")
    return trace


def look(operator: Operator, life_s: float) -> dict[str, float]:
    """Record one step with a temporary that lives `life_s`; return the shares of it that each probe saw, and times.

    Raises:
        BenchmarkError: the operator ran elsewhere than thought, or the thread missed what it is sure to see.
    """
    operator.life_s = life_s
    trace = record_step(operator)
    # The operator runs when the first layer has let its chunk go, until the second one takes it.
    layer, call = trace.moments[:2]
    if (layer.kind, call.kind) != (Kind.HOLD, Kind.RELEASE) or call.duration_s < operator.lived_s:
        raise BenchmarkError(f"the operator did not run in moment 1, {call} of {call.duration_s} s")
    nbytes = operator.kind.nbytes
    row = {
        "probe_share": (call.non_model_peak_nbytes - layer.non_model_peak_nbytes) / nbytes,
        "thread_share": (call.sampled_peak_nbytes - layer.sampled_peak_nbytes) / nbytes,
        "made_s": operator.made_s,
        "lived_s": operator.lived_s,
        "interval_s": trace.sampling_interval_s,
    }
    if row["lived_s"] >= row["interval_s"] and row["thread_share"] < AIM:
        raise BenchmarkError(f"it lived longer than the longest interval and was not seen: {row}")
    return row


def measure(lives_ms: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Return a row for each kind and lifetime with what was seen in every repeat; kinds and lifetimes take turns."""
    operators = [Operator(kind) for kind in KINDS]
    rows = [{"kind": op.kind.name, "life_ms": ms, "repeats": []} for op in operators for ms in lives_ms]
    for operator in operators:
        look(operator, 0.01)  # Whatever is slow, or takes memory, the first time.
    for _ in tqdm(range(repeats), unit="round", disable=None):
        turns = iter(rows)
        for operator in operators:
            for life_ms in lives_ms:
                repeats_of: list[dict[str, float]] = next(turns)["repeats"]  # type: ignore[assignment]
                repeats_of.append(look(operator, life_ms / 1e3))
    return rows


def table(results: Mapping[str, Any]) -> str:
    """Return the Markdown of `results`: surroundings, a row for each kind and lifetime, and the intervals summed up."""
    hardware, versions = results["hardware"], results["versions"]
    lines = [
        f"`{results['command']}`",
        "",
        f"{hardware['cpu']}, {hardware['num_cpus']} cores; {results['threads']} threads compute; torch "
        f"{versions['torch']}, Python {versions['python']}, {versions['os']}. {results['num_repeats']} repeats. Load "
        f"average before and after: {', '.join(f'{load:.1f}' for load in results['load_average_1min'])}.",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|---|" + "---:|" * (len(HEADER) - 1),
        *("| " + " | ".join(_cells(row)) + " |" for row in results["rows"]),
        "",
    ]
    for kind in KINDS:
        found = [seen for row in results["rows"] if row["kind"] == kind.name for seen in row["repeats"]]
        missed = [seen["lived_s"] for seen in found if seen["thread_share"] < AIM]
        longest = f"the longest-lived one missed lived {1e3 * max(missed):.1f} ms" if missed else "none was missed"
        interval = statistics.median(seen["interval_s"] for seen in found)
        lines.append(f"- {kind.title}: of {len(found)} temporaries {longest}; longest interval of a step, median "
                     f"{1e3 * interval:.1f} ms.")  # fmt: skip
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    def column(key: str) -> list[float]:
        return [seen[key] for seen in row["repeats"]]

    title = next(kind.title for kind in KINDS if kind.name == row["kind"])
    shares, intervals = column("thread_share"), column("interval_s")
    return [
        title,
        f"{row['life_ms']}",
        f"{1e3 * statistics.median(column('made_s')):.1f}",
        f"{100 * max(column('probe_share')):.1f} %",
        f"{100 * statistics.median(shares):.1f} %",
        f"{100 * min(shares):.1f} %",
        f"{sum(share >= AIM for share in shares)} of {len(shares)}",
        f"{1e3 * statistics.median(intervals):.1f}",
        f"{1e3 * max(intervals):.1f}",
    ]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Share of a temporary within an operator that each probe sees.")
    parser.add_argument("--repeats", type=int, default=20, help="steps of each row (default: %(default)s)")
    parser.add_argument("--lives", type=int, nargs="+", default=LIVES_MS, metavar="MS", help="lifetimes to try")
    arguments = parse(parser)
    if arguments.repeats < 1 or min(arguments.lives) < 1:
        parser.error("--repeats and --lives must be at least 1")
    return arguments


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what the command line asks for and return it with all that is needed to repeat it."""
    before = os.getloadavg()[0]
    rows = measure(arguments.lives, arguments.repeats)
    return {
        "command": command("sampling"),
        **surroundings(),
        "threads": torch.get_num_threads(),
        "load_average_1min": [before, os.getloadavg()[0]],
        "num_repeats": arguments.repeats,
        "rows": rows,
    }


def main() -> int:
    """Run, save and show; return the exit status."""
    return carry_out(parse_arguments(), run, table, readme=HERE / "README.md")


if __name__ == "__main__":
    sys.exit(main())
