"""How much of the copying does a step hide behind its computing? The README beside this file tells the method."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

if not __package__:  # Run as a file: find the other modules where `python -m` finds them.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.hiding.table import tables
from benchmarks.hiding.variants import FULL, NO_OFFLOAD, QUICK, VARIANTS, Step, Summary, Variant, link_for, serve
from benchmarks.overhead.variants import Failure, Shape, num_params
from benchmarks.program import BenchmarkError, carry_out, command, parse, surroundings
from benchmarks.stats import spread

HERE = Path(__file__).parent
NUM_WARMUP_STEPS = 5
"""The first is recorded, the second follows a plan made from it, and from the third on the plan is the final one."""
NUM_PROBED_STEPS = 8
ANY_LINK_BPS = 1e9
"""For a variant that copies nothing."""


class Worker:
    """A variant in a process of its own, which works only while it is asked to."""

    def __init__(self, variant: Variant, shape: Shape, link_Bps: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.variant = variant
        self._connection, far_end = context.Pipe()
        self._process = context.Process(target=serve, args=(far_end, variant, shape, link_Bps), daemon=True)
        self._process.start()
        far_end.close()
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    def train(self, num_steps: int) -> list[Step]:
        """Train this many steps in a row.

        Raises:
            BenchmarkError: the process ended, on an exception or otherwise.
        """
        self._connection.send(("train", num_steps))
        steps: list[Step] = self._answer()
        return steps

    def summary(self) -> Summary:
        """Return the plan's promises. Raises what `train` does."""
        self._connection.send(("summary",))
        summary: Summary = self._answer()
        return summary

    def _answer(self) -> Any:
        try:
            answer = self._connection.recv()
        except EOFError:
            self._process.join()
            raise BenchmarkError(f"{self.variant.name}: process ended with {self._process.exitcode}") from None
        if isinstance(answer, Failure):
            raise BenchmarkError(f"{self.variant.name} failed:\n{answer.traceback}")
        return answer


def find_link(shape: Shape, load: float) -> float:
    """Measure a step without offload, and return the bytes a second of the link to be throttled to."""
    with Worker(NO_OFFLOAD, shape, ANY_LINK_BPS) as worker:
        worker.train(NUM_WARMUP_STEPS)
        return link_for(worker.train(NUM_PROBED_STEPS), param_nbytes=4 * num_params(shape), load=load)


def measure(
    variants: Sequence[Variant], shape: Shape, *, link_Bps: float, rounds: int, steps_per_turn: int
) -> dict[str, Any]:
    """Train all variants in turns; return the load average after each round, and a row for each variant.

    Raises:
        BenchmarkError: a variant failed, missed its plan, or computed something else than the others.
    """
    draw = random.Random(0)
    loads: list[float] = []
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(variant, shape, link_Bps)) for variant in variants]
        turns: dict[str, list[list[Step]]] = {variant.name: [] for variant in variants}
        bar = stack.enter_context(tqdm(total=(rounds + 1) * len(workers), unit="turn", disable=None))
        for count in range(rounds + 1):
            for worker in draw.sample(workers, len(workers)):
                bar.set_postfix_str(worker.variant.name)
                # The first step of a turn is not timed: its copies had the other variants' turns to arrive in.
                turns[worker.variant.name].append(worker.train(1 + steps_per_turn if count else NUM_WARMUP_STEPS))
                bar.update()
            loads.append(os.getloadavg()[0])
        summaries = {worker.variant.name: worker.summary() for worker in workers}
    check(turns, summaries)
    return {
        "threads": summaries[NO_OFFLOAD.name].threads,
        "load_average_1min": loads,
        "variants": {
            variant.name: {
                "title": variant.title,
                "cap_share": variant.cap_share,
                **{key: value for key, value in asdict(summaries[variant.name]).items() if key != "weights"},
                **times_of([turn[1:] for turn in turns[variant.name][1:]]),
            }
            for variant in variants
        },
    }


def times_of(turns: Sequence[Sequence[Step]]) -> dict[str, Any]:
    """Return by turn how long timed steps took and stalled, in seconds; of the parts of a step, medians and spread."""
    steps = [step for turn in turns for step in turn]
    return {
        **{key: [[getattr(step, key) for step in turn] for turn in turns] for key in ("step_s", "stall_s")},
        **{key: spread([getattr(step, key) for step in steps]) for key in ("forward_s", "backward_s", "update_s")},
    }


def check(turns: dict[str, list[list[Step]]], summaries: dict[str, Summary]) -> None:
    """Raise BenchmarkError unless all variants computed the same, bit for bit, and followed their plans."""
    losses = {name: [step.loss for turn in of for step in turn] for name, of in turns.items()}
    for name, of in turns.items():
        if losses[name] != losses[NO_OFFLOAD.name] or summaries[name].weights != summaries[NO_OFFLOAD.name].weights:
            raise BenchmarkError(f"{name}: losses or weights differ from those without offload")
        for step in (step for turn in of[1:] for step in turn):
            if step.plan_misses:
                raise BenchmarkError(f"{name}: {step.plan_misses} plan misses in a timed step")
            if step.moved_nbytes != summaries[name].predicted_nbytes:
                raise BenchmarkError(
                    f"{name}: {step.moved_nbytes} bytes moved, {summaries[name].predicted_nbytes} planned"
                )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="How much of the copying over a throttled link a step hides.")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each variant (default: %(default)s)")
    parser.add_argument("--steps-per-turn", type=int, default=4, help="timed steps in each (default: %(default)s)")
    parser.add_argument("--load", type=float, default=0.7, help="how busy perfect overlap would keep the link in the "
                        "part of the step that needs it most (default: %(default)s)")  # fmt: skip
    names = [variant.name for variant in VARIANTS if variant is not NO_OFFLOAD]
    parser.add_argument("--variants", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="a small model: tries the harness, measures nothing")
    arguments = parse(parser)
    if arguments.rounds < 1 or arguments.steps_per_turn < 1 or not arguments.load > 0:
        parser.error("--rounds and --steps-per-turn must be at least 1, --load above 0")
    return arguments


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what the command line asks for and return it with all that is needed to repeat it."""
    shape = QUICK if arguments.quick else FULL
    variants = [variant for variant in VARIANTS if variant is NO_OFFLOAD or variant.name in arguments.variants]
    link_Bps = find_link(shape, arguments.load)
    return {
        "command": command("hiding"),
        **surroundings(),
        "shape": {**asdict(shape), "num_params": num_params(shape)},
        "num_warmup_steps": NUM_WARMUP_STEPS,
        "load": arguments.load,
        "link_Bps": link_Bps,
        **measure(variants, shape, link_Bps=link_Bps, rounds=arguments.rounds, steps_per_turn=arguments.steps_per_turn),
    }


def main() -> int:
    """Run, save and show; return the exit status."""
    return carry_out(parse_arguments(), run, tables, readme=HERE / "README.md")


if __name__ == "__main__":
    sys.exit(main())
