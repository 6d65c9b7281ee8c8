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
from benchmarks.stats import spread
from chunkmem.data.trace import Kind, Trace

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


def measure(lives_ms: Sequence[int], repeats: int) -> dict[str, Any]:
    """Return a row for each kind and lifetime, and a summary of each kind; kinds and lifetimes take turns."""
    operators = [Operator(kind) for kind in KINDS]
    seen: dict[tuple[str, int], list[dict[str, float]]] = {
        (op.kind.name, ms): [] for op in operators for ms in lives_ms
    }
    for operator in operators:
        look(operator, 0.01)  # Whatever is slow, or takes memory, the first time.
    for _ in tqdm(range(repeats), unit="round", disable=None):
        for operator in operators:
            for life_ms in lives_ms:
                seen[operator.kind.name, life_ms].append(look(operator, life_ms / 1e3))
    return {
        "rows": [{"kind": name, "life_ms": life_ms, **row_of(found)} for (name, life_ms), found in seen.items()],
        "kinds": {
            kind.name: kind_of([one for (name, _), found in seen.items() if name == kind.name for one in found])
            for kind in KINDS
        },
    }


def row_of(repeats: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Sum up the repeats of one kind and lifetime: of each number the median and its spread."""
    shares = [one["thread_share"] for one in repeats]
    return {
        **{key: spread([one[key] for one in repeats]) for key in repeats[0]},
        "num_seen": sum(share >= AIM for share in shares),
        "num_repeats": len(shares),
    }


def kind_of(repeats: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Sum up all repeats of a kind: how long the longest-lived one missed lived (None: none was), and intervals."""
    return {
        "num_repeats": len(repeats),
        "longest_missed_s": max((one["lived_s"] for one in repeats if one["thread_share"] < AIM), default=None),
        "interval_s": statistics.median(one["interval_s"] for one in repeats),
    }


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
        found = results["kinds"][kind.name]
        missed_s = found["longest_missed_s"]
        lived = "" if missed_s is None else f"the longest-lived one missed lived {1e3 * missed_s:.1f} ms"
        lines.append(f"- {kind.title}: of {found['num_repeats']} temporaries {lived or 'none was missed'}; longest "
                     f"interval of a step, median {1e3 * found['interval_s']:.1f} ms.")  # fmt: skip
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    title = next(kind.title for kind in KINDS if kind.name == row["kind"])
    shares, intervals = row["thread_share"], row["interval_s"]
    return [
        title,
        f"{row['life_ms']}",
        f"{1e3 * row['made_s']['median']:.1f}",
        f"{100 * row['probe_share']['high']:.1f} %",
        f"{100 * shares['median']:.1f} %",
        f"{100 * shares['low']:.1f} %",
        f"{row['num_seen']} of {row['num_repeats']}",
        f"{1e3 * intervals['median']:.1f}",
        f"{1e3 * intervals['high']:.1f}",
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
    measured = measure(arguments.lives, arguments.repeats)
    return {
        "command": command("sampling"),
        **surroundings(),
        "threads": torch.get_num_threads(),
        "load_average_1min": [before, os.getloadavg()[0]],
        "num_repeats": arguments.repeats,
        **measured,
    }


def main() -> int:
    """Run, save and show; return the exit status."""
    return carry_out(parse_arguments(), run, table, readme=HERE / "README.md")


if __name__ == "__main__":
    sys.exit(main())
