"""How long does an estimate take, and how much memory? The README beside this file tells the method."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

if not __package__:  # Run as a file: find the other modules where `python -m` finds them.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.program import BenchmarkError, Results, carry_out, command, parse, surroundings

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """A question, and the seconds it may take."""

    words: tuple[str, ...]
    aim_s: float | None = None


CASES = (
    Case(("gpt:1.3b", "--precision", "bf16", "--device", "8GiB")),
    Case(("gpt:7b", "--precision", "bf16", "--device", "24GiB"), 5),
    Case(("gpt:175b", "--precision", "bf16", "--checkpointing", "--hardware", "h200"), 10),
    Case(("gpt:1t", "--precision", "bf16", "--checkpointing", "--world", "1024", "--host", "256GiB"), 60),
    Case(("gpt:7b", "--precision", "bf16", "--device", "8GiB", "--batch", "8")),
)
AIM_NBYTES = 1 << 30


def ask(case: Case) -> tuple[float, int, Any]:
    """Run the command; return its seconds, the peak of its largest process in bytes, and its answer.

    Raises:
        BenchmarkError: it did not answer.
    """
    start_s = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "chunkmem", "estimate", *case.words, "--json"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    elapsed_s = time.perf_counter() - start_s
    if process.returncode not in (0, 1):
        raise BenchmarkError(f"chunkmem estimate {' '.join(case.words)} ended with {process.returncode}")
    return elapsed_s, 1024 * usage.ru_maxrss, json.loads(text)


def measure(cases: Sequence[Case], *, repeats: int) -> list[Results]:
    """Ask all questions in turns; return a row for each."""
    asked = [(case, ask(case)) for _ in range(repeats) for case in tqdm(cases, unit="question", disable=None)]
    rows = []
    for case in cases:
        answers = [answer for other, answer in asked if other is case]
        _, _, said = answers[0]
        rows.append(
            {
                "words": list(case.words),
                "aim_s": case.aim_s,
                "seconds": [elapsed_s for elapsed_s, _, _ in answers],
                "peak_nbytes": max(nbytes for _, nbytes, _ in answers),
                "fits": said["fits"],
            }
        )
    return rows


def table(results: Results) -> str:
    """Return the Markdown of the rows."""
    hardware, versions = results["hardware"], results["versions"]
    lines = [
        f"`{results['command']}`",
        "",
        f"{hardware['cpu']}, {hardware['num_cpus']} cores, {hardware['memory_nbytes'] / 2**30:.0f} GiB; torch "
        f"{versions['torch']}, Python {versions['python']}. Load average before and after: "
        f"{', '.join(f'{load:.1f}' for load in results['load_average_1min'])}.",
        "",
        "| `chunkmem estimate …` | answer | median s | fastest – slowest | aim | peak of a process, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        seconds = row["seconds"]
        aim = "" if row["aim_s"] is None else f"≤ {row['aim_s']} s"
        lines.append(
            f"| `{' '.join(row['words'])}` | {'fits' if row['fits'] else 'does not fit'} | "
            f"{statistics.median(seconds):.1f} | {min(seconds):.1f} – {max(seconds):.1f} | {aim} | "
            f"{row['peak_nbytes'] / 2**20:.0f} |"
        )
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> Results:
    """Measure what the command line asks for and return it with all that is needed to repeat it."""
    before = os.getloadavg()[0]
    rows = measure(CASES, repeats=arguments.repeats)
    loads = [before, os.getloadavg()[0]]
    return {"command": command("estimate"), **surroundings(), "load_average_1min": loads, "rows": rows}


def main() -> int:
    """Run, save and show; return the exit status."""
    parser = argparse.ArgumentParser(description="Time and memory of chunkmem estimate.")
    parser.add_argument("--repeats", type=int, default=5, help="of each question (default: %(default)s)")
    return carry_out(parse(parser), run, table, readme=HERE / "README.md")


if __name__ == "__main__":
    sys.exit(main())
