"""How long does planning take, and following a plan? The README beside this file tells the method."""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

if not __package__:  # Run as a file: find the other modules where `python -m` finds them.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.planning.first_steps import CASES as FIRST_STEPS
from benchmarks.planning.first_steps import NUM_FIRST, measure_first_steps
from benchmarks.planning.loops import measure as measure_loops
from benchmarks.planning.loops import table as table_of_loops
from benchmarks.planning.overhead import measure as measure_overhead
from benchmarks.program import carry_out, command, parse, surroundings
from benchmarks.stats import median_interval
from chunkmem.data.trace import Trace
from chunkmem.data.types import Link, Role
from chunkmem.plan.machine import LinkSpeed, Machine, host_links
from chunkmem.plan.planner import Planner, make_plan
from chunkmem.steps.planning import WORK_A_STEP
from tests.helpers.traces import random_trace, training_trace

HERE = Path(__file__).parent
CHUNK_NBYTES = 1 << 20
LINK_BPS = 1e9
"""A block's forward takes 1 ms and its chunk 1 ms on the link: copies take about half of the computing."""
SIZES = (10, 100, 1_000, 10_000, 100_000)
UNEVEN_LINK_S = 0.05
"""All weights take so long on the link of cases with `num_uses`; 100 uses compute for about as long."""
FROZEN_SHARES = (0.0, 0.25, 0.5, 0.8)
"""Chances of a group to be frozen, of which such a case draws one."""
MOMENT_WORK = 80
"""Most units of a piece for each of its moments: a candidate whose updates begin early in two ways."""
MOMENTS_A_BLOCK = 7
"""HOLD and RELEASE forward; HOLD, CREATE and RELEASE backward; UPDATE and CONSUME."""


def _links(Bps: float) -> Mapping[Link, LinkSpeed]:
    return host_links(h2d_Bps=Bps, d2h_Bps=Bps)


@dataclass(frozen=True)
class Case:
    """A model, and the machine to plan it for."""

    title: str
    num_groups: int
    modules_per_group: int = 1
    cap_share: float = 0.5
    """Of the PARAM bytes."""
    link_Bps: float = LINK_BPS

    num_uses: int | None = None
    """Uses of groups in any order, repeated ones included, some groups frozen; None: a model of blocks in a row."""
    seed: int = 0

    def trace(self) -> Trace:
        if self.num_uses is not None:
            rng = random.Random(self.seed)
            frozen_share = rng.choice(FROZEN_SHARES)
            return random_trace(
                rng,
                num_groups=self.num_groups,
                uniform=self.seed % 2 == 0,
                num_uses=self.num_uses,
                frozen_share=frozen_share,
            )
        return training_trace(self.num_groups, CHUNK_NBYTES, modules_per_group=self.modules_per_group)

    def machine(self, trace: Trace) -> Machine:
        if self.num_uses is not None:
            weights = sum(nbytes for chunk, nbytes in trace.chunk_nbytes.items() if chunk.role is Role.PARAM)
            cap = max(5 * max(trace.chunk_nbytes.values()), int(self.cap_share * weights))
            return Machine(cap, 1 << 50, _links(weights / UNEVEN_LINK_S))
        chunks = max(2, int(self.cap_share * self.num_groups))  # weights and gradients of one block have to fit
        return Machine(chunks * CHUNK_NBYTES, 1 << 50, _links(self.link_Bps))


def of_size(num_moments: int, title: str, **options: float) -> Case:
    """A chunk for each block."""
    return Case(title, max(1, round(num_moments / MOMENTS_A_BLOCK)), **options)  # type: ignore[arg-type]


SERIES = tuple(of_size(size, f"{size}") for size in SIZES)
OTHERS = (
    of_size(10_000, "90 % of PARAM bytes", cap_share=0.9),
    of_size(10_000, "150 % of PARAM bytes", cap_share=1.5),
    of_size(10_000, "90 % of model data", cap_share=3.6),
    of_size(10_000, "a link ten times slower", link_Bps=LINK_BPS / 10),
    of_size(10_000, "a link ten times faster", link_Bps=LINK_BPS * 10),
    Case("16 chunks of 125 blocks each", 16, modules_per_group=125),
)
IN_STEPS = (
    *(
        Case(f"35 groups in 100 uses, step {seed}", 35, cap_share=0.3, num_uses=100, seed=seed)
        for seed in (1, 3, 4, 11)
    ),
    Case("1 500 Linears, a chunk for each", 1500),
    Case("1 500 Linears in 125 chunks", 125, modules_per_group=12),
)
"""Planned as training does it, so much before and after each step; frozen subsets are what alternating loops train."""


def measure_in_steps(case: Case) -> dict[str, Any]:
    """Plan `case` as training does: a bounded amount of work a step. Return every call's seconds of the processor."""
    trace = case.trace()
    planner = Planner(trace, case.machine(trace))
    calls_s: list[float] = []
    names: list[str] = []
    while not planner.is_done:
        began_s, done = time.process_time(), planner.work_done
        names.append(planner.improve(WORK_A_STEP).name)
        calls_s.append(time.process_time() - began_s)
        if len(names) > 1:  # the first call goes on until there is something to choose from
            assert planner.work_done - done < WORK_A_STEP + MOMENT_WORK * len(trace.moments)
    return {
        **asdict(case),
        "num_moments": len(trace.moments),
        "calls_cpu_s": calls_s,
        "work": planner.work_done,
        "first_plan": names[0],
        "plan": names[-1],
    }


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Plan `case` several times for the clocks, and once more under the allocator's eye, which slows it down."""
    trace = case.trace()
    machine = case.machine(trace)
    wall_s, cpu_s = [], []
    for _ in range(repeats):
        fresh = Trace(trace.mode, trace.layout, trace.chunk_nbytes, trace.moments)  # nothing cached
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        plan = make_plan(fresh, machine)
        wall_s.append(time.perf_counter() - began_s)
        cpu_s.append(time.process_time() - began_cpu_s)
    tracemalloc.start()
    make_plan(trace, machine)
    _, peak_nbytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        **asdict(case),
        "num_moments": len(trace.moments),
        "plan": plan.name,
        "num_actions": sum(map(len, plan.actions)),
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "peak_nbytes": peak_nbytes,
    }


def tables(results: Mapping[str, Any]) -> str:
    """Return the Markdown of `results`."""
    hardware, versions, overhead = results["hardware"], results["versions"], results["overhead"]
    interval = median_interval(overhead["us_per_moment"])
    lines = [
        f"`{results['command']}`",
        "",
        f"{hardware['cpu']}, {hardware['num_cpus']} cores, {hardware['memory_nbytes'] / 2**30:.0f} GiB; Python "
        f"{versions['python']}, torch {versions['torch']}, {versions['os']}. Load average before and after: "
        f"{', '.join(f'{load:.1f}' for load in results['load_average_1min'])}.",
        "",
        "| moments | planning, median s | fastest – slowest | processor, s | ns / (n log₂ n) | peak, MiB |",
        "|---" * 6 + "|",
        *("| " + " | ".join([f"{row['num_moments']}", *_numbers(row)]) + " |" for row in results["series"]),
        "",
        "| about 10 000 moments | moments | planning, median s | fastest – slowest | processor, s | ns / (n log₂ n) | "
        "peak, MiB |",
        "|---" * 7 + "|",
        *(
            "| " + " | ".join([row["title"], f"{row['num_moments']}", *_numbers(row)]) + " |"
            for row in results["others"]
        ),
        "",
        "| planned in training | moments | calls | longest call, processor s | all, processor s | million units | "
        "first plan → last |",
        "|---" * 7 + "|",
        *(
            "| " + " | ".join([row["title"], f"{row['num_moments']}", *_calls(row)]) + " |"
            for row in results.get("in_steps", ())  # what an earlier run did not measure has no rows
        ),
        "",
        "| first steps, processor s | moments | recorded | planned | planned again | later: mean | fastest – slowest | "
        "largest / mean |",
        "|---" * 8 + "|",
        *(
            "| " + " | ".join([row["title"], f"{row['num_moments']}", *_first_steps(row)]) + " |"
            for row in results.get("first_steps", ())
        ),
        "",
        f"Following a plan in which nothing moves costs {interval.median:.2f} µs a moment ({interval.low:.2f} – "
        f"{interval.high:.2f}), over {len(overhead['us_per_moment'])} steps of {overhead['num_moments']} moments.",
        *(["", *table_of_loops(results["loops"])] if "loops" in results else []),
    ]
    return "\n".join(lines)


def _numbers(row: Mapping[str, Any]) -> Iterator[str]:
    n = row["num_moments"]
    cpu_s = statistics.median(row["cpu_s"])
    yield f"{statistics.median(row['wall_s']):.4f}"
    yield f"{min(row['wall_s']):.4f} – {max(row['wall_s']):.4f}"
    yield f"{cpu_s:.4f}"
    yield f"{1e9 * cpu_s / (n * math.log2(n)):.0f}"
    yield f"{row['peak_nbytes'] / 2**20:.1f}"


def _calls(row: Mapping[str, Any]) -> Iterator[str]:
    yield f"{len(row['calls_cpu_s'])}"
    yield f"{max(row['calls_cpu_s']):.2f}"
    yield f"{sum(row['calls_cpu_s']):.2f}"
    yield f"{row['work'] / 1e6:.2f}"
    yield f"{row['first_plan']} → {row['plan']}"


def _first_steps(row: Mapping[str, Any]) -> Iterator[str]:
    first, later = row["cpu_s"][:NUM_FIRST], row["cpu_s"][NUM_FIRST:]
    recorded, planned, *again = first
    yield f"{recorded:.2f}"
    yield f"{planned:.2f}"
    yield ", ".join(f"{s:.2f}" for s in again)
    yield f"{statistics.mean(later):.2f}"
    yield f"{min(later):.2f} – {max(later):.2f}"
    yield f"{max(first) / statistics.mean(later):.1f}"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time and memory of planning, and the cost of following a plan.")
    parser.add_argument("--repeats", type=int, default=5, help="plans of each case (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="steps followed (default: %(default)s)")
    parser.add_argument("--max-moments", type=int, default=SIZES[-1], help="leave out longer traces")
    arguments = parse(parser)
    if arguments.repeats < 1 or arguments.steps < 2:
        parser.error("--repeats must be at least 1 and --steps at least 2")
    return arguments


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what the command line asks for and return it with all that is needed to repeat it."""
    limit = 1.1 * arguments.max_moments
    series = [case for case in SERIES if MOMENTS_A_BLOCK * case.num_groups <= limit]
    others = OTHERS if arguments.max_moments >= 10_000 else ()
    before = os.getloadavg()[0]
    overhead = measure_overhead(arguments.steps)
    rows = [measure(case, arguments.repeats) for case in tqdm([*series, *others], unit="case", disable=None)]
    first_steps = [measure_first_steps(case) for case in tqdm(FIRST_STEPS, unit="model", disable=None)]
    in_steps = [measure_in_steps(case) for case in tqdm(IN_STEPS, unit="case", disable=None)]
    return {
        "command": command("planning"),
        **surroundings(),
        "load_average_1min": [before, os.getloadavg()[0]],
        "series": rows[: len(series)],
        "others": rows[len(series) :],
        "in_steps": in_steps,
        "first_steps": first_steps,
        "overhead": overhead,
        "loops": measure_loops(arguments.steps),
    }


def main() -> int:
    """Run, save and show; return the exit status."""
    return carry_out(parse_arguments(), run, tables, readme=HERE / "README.md")


if __name__ == "__main__":
    sys.exit(main())
