"""How many bytes do our plans move, next to the least that any plan could and beside what demand paging moves?

What is moved is arithmetic; only which plan is fastest depends on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

if not __package__:  # Run as a file: find the other modules where `python -m` finds them.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import chunkmem
from benchmarks.program import BenchmarkError, carry_out, command, parse, surroundings
from benchmarks.traffic.policies import POLICIES, page
from benchmarks.traffic.uses import device_budgets
from chunkmem.data.errors import CapacityError
from chunkmem.data.trace import Trace
from chunkmem.data.types import Role, Tier
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.candidates import candidates
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import Plan
from chunkmem.plan.planner import make_plan
from chunkmem.plan.simulate import simulate
from chunkmem.report.bound import traffic_bound
from tests.helpers.training import AMPLE_NBYTES, VARIANTS, Chunked, Trainer, Variant, capped, variants_of
from tests.helpers.zoo import ZOO, ZooModel

CAP_PERCENTS = (30, 50, 70)
STEPS = ("plain", "micro_batches", "half_frozen", "checkpoint")
"""Variants of training whose steps differ in what they use and how often."""
FASTEST_AIM, LEAST_AIM = 1.05, 1.02
HEADER = ("model", "step", "cap", "groups updated on DEVICE", "bound, KiB", "certain", "if steps repeat")


def record(case: ZooModel, variant: Variant) -> tuple[Trace, Machine]:
    """Train two steps with everything resident; return what was recorded, and the machine as plans see it."""
    with chunkmem.ChunkManager(capped(case, AMPLE_NBYTES)) as manager:
        trainer = Trainer(case, variant, Chunked(manager))
        trainer.step()
        trainer.step()
        trace, plan = manager.trace, manager.plan
    if trace is None or plan is None:
        raise BenchmarkError(f"{case.name}, {variant.name}: two steps left no trace or no plan")
    return trace, plan.machine


def moved_nbytes(plan: Plan, trace: Trace) -> int:
    """Return what the simulator says an iteration moves, on both links."""
    return sum(simulate(plan, trace).moved_nbytes.values())


def against_bound(trace: Trace, plan: Plan, nbytes: int) -> dict[str, Any]:
    """Return a plan's traffic and the least that is possible with its caps and its tiers of updates."""
    bound = traffic_bound(trace, plan.machine, plan.update_tiers)
    if nbytes < bound.nbytes:
        raise BenchmarkError(f"plan {plan.name} moves {nbytes} bytes, the bound is {bound.nbytes}")
    return {
        "name": plan.name,
        "groups_updated_on_device": sum(tier is Tier.DEVICE for tier in plan.update_tiers.values()),
        "groups_updated": len(plan.update_tiers),
        "nbytes": nbytes,
        "relaxed_nbytes": bound.relaxed_nbytes,
        "bound_nbytes": bound.nbytes,
        "certain_nbytes": bound.certain_nbytes,
    }


def paging(trace: Trace, plan: Plan) -> dict[str, dict[str, float]]:
    """Return what each policy moves with the caps and the tiers of updates of `plan`."""
    machine = plan.machine
    budgets = device_budgets(trace, machine.device_nbytes, charges_non_model=machine.charges_non_model)
    return {name: asdict(page(trace, budgets, plan.update_tiers, policy)) for name, policy in POLICIES.items()}


def fitted(trace: Trace, machine: Machine) -> tuple[Plan, Machine]:
    """Return the fastest plan, and the machine with its cap raised to the smallest that works if it was below."""
    try:
        return make_plan(trace, machine, options=PlanOptions()), machine
    except CapacityError as error:
        machine = replace(machine, device_nbytes=error.needed_nbytes)
        return make_plan(trace, machine, options=PlanOptions()), machine


def measure(case: ZooModel, variant: Variant) -> Iterator[dict[str, Any]]:
    """Record a model's step and plan it for every cap; yield the rows of the table, in bytes."""
    trace, machine = record(case, variant)
    for percent in CAP_PERCENTS:
        row = compare(trace, machine, percent=percent)
        yield {"model": case.name, "step": variant.name, **row, "machine": machine.to_dict()}


def compare(trace: Trace, machine: Machine, *, percent: int) -> dict[str, Any]:
    """Plan for a cap of `percent` of PARAM; return what the plans and the policies move, and the bounds, in bytes."""
    param_nbytes = sum(nbytes for chunk, nbytes in trace.chunk_nbytes.items() if chunk.role is Role.PARAM)
    plan, machine = fitted(trace, replace(machine, device_nbytes=param_nbytes * percent // 100))
    least = min(candidates(trace, machine, options=PlanOptions()), key=lambda candidate: candidate.nbytes)
    return {
        "num_moments": len(trace.moments),
        "num_chunks": len(trace.chunk_nbytes),
        "param_nbytes": param_nbytes,
        "percent": percent,
        "cap_nbytes": machine.device_nbytes,
        "fastest": against_bound(trace, plan, moved_nbytes(plan, trace)),
        "least": against_bound(trace, least.plan, least.nbytes),
        "policies": paging(trace, plan),
    }


def ratios(row: Mapping[str, Any]) -> dict[str, float]:
    """Return everything that moves in a row over the bound: the two plans over their own, paging over the fastest's."""
    bound = row["fastest"]["relaxed_nbytes"]
    moved = {name: traffic["h2d_nbytes"] + traffic["d2h_nbytes"] for name, traffic in row["policies"].items()}
    return {
        "fastest": _over(row["fastest"]["nbytes"], bound),
        "least traffic": _over(row["least"]["nbytes"], row["least"]["relaxed_nbytes"]),
        **{name: _over(nbytes, bound) for name, nbytes in moved.items()},
    }


def _over(nbytes: float, bound: float) -> float:
    """Nothing over nothing is as good as can be."""
    return nbytes / bound if bound else (1.0 if nbytes == 0 else float("inf"))


def table(results: Mapping[str, Any]) -> str:
    """Return the Markdown of `results`: surroundings, a row for each model and cap, and the columns summed up."""
    rows: Sequence[Mapping[str, Any]] = results["rows"]
    names = [*HEADER, *ratios(rows[0])]
    hardware, versions = results["hardware"], results["versions"]
    lines = [
        f"`{results['command']}`",
        "",
        f"{hardware['cpu']}, {hardware['num_cpus']} cores; torch {versions['torch']}, "
        f"Python {versions['python']}, {versions['os']}.",
        "",
        "| " + " | ".join(names) + " |",
        "|---|---|---" + "|---:" * (len(names) - 3) + "|",
    ]
    for row in rows:
        fastest = row["fastest"]
        share = 100 * row["cap_nbytes"] / row["param_nbytes"]
        cells = [
            row["model"],
            row["step"],
            f"{row['percent']} %" if row["percent"] >= int(share) else f"{row['percent']} % → {share:.0f} %",
            f"{fastest['groups_updated_on_device']} of {fastest['groups_updated']}",
            f"{fastest['relaxed_nbytes'] / 1024:.1f}",
            f"{_over(fastest['certain_nbytes'], fastest['relaxed_nbytes']):.3f}",
            f"{_over(fastest['bound_nbytes'], fastest['relaxed_nbytes']):.3f}",
            *(f"{ratio:.3f}" for ratio in ratios(row).values()),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *_summary(rows)])


def _summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of each column's median and worst by step, and how many rows meet the aims."""
    names = list(ratios(rows[0]))
    aims = {"fastest": FASTEST_AIM, "least traffic": LEAST_AIM}
    titles = [f"{name} (≤ {aims[name]:.2f} in)" if name in aims else name for name in names]
    lines = ["| median / worst | rows | " + " | ".join(titles) + " |", "|---|" + "---:|" * (len(names) + 1)]
    for step in dict.fromkeys(row["step"] for row in rows):
        of_step = [ratios(row) for row in rows if row["step"] == step]
        cells = [step, str(len(of_step))]
        for name in names:
            values = [row[name] for row in of_step]
            met = f" ({sum(value <= aims[name] for value in values)})" if name in aims else ""
            cells.append(f"{statistics.median(values):.3f} / {max(values):.3f}{met}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Traffic of plans against the least possible and demand paging.")
    names = [case.name for case in ZOO]
    parser.add_argument("--models", nargs="+", choices=names, default=names, metavar="NAME", help="of the zoo")
    steps = [variant.name for variant in VARIANTS]
    parser.add_argument("--steps", nargs="+", choices=steps, default=STEPS, metavar="NAME", help="variants")
    return parse(parser, has_table=False)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Record, plan and bound what the command line asks for; return it with all that is needed to repeat it."""
    around = surroundings()
    rows: list[dict[str, Any]] = []
    chosen = [(case, variant) for case in ZOO if case.name in arguments.models for variant in variants_of(case)]
    bar = tqdm([pair for pair in chosen if pair[1].name in arguments.steps], unit="trace", disable=None)
    for case, variant in bar:
        bar.set_postfix_str(f"{case.name} {variant.name}")
        rows += measure(case, variant)
    return {
        "command": command("traffic"),
        **around,
        "rows": rows,
    }


def main() -> int:
    """Run, save and show; return the exit status."""
    return carry_out(parse_arguments(), run, table, readme=Path(__file__).with_name("README.md"))


if __name__ == "__main__":
    sys.exit(main())
