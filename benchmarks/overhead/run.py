"""How much longer is a training step when chunkmem holds the model? The README beside this file tells the method."""

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

from benchmarks.checkout import add_option
from benchmarks.overhead.table import table
from benchmarks.overhead.variants import FULL, QUICK, VARIANTS, Account, Failure, Shape, Variant, num_params, serve
from benchmarks.program import BenchmarkError, carry_out, command, parse, surroundings

HERE = Path(__file__).parent
NUM_WARMUP_STEPS = 3
PLAIN = VARIANTS[0]


class Worker:
    """A variant in a process of its own, which works only while it is asked to."""

    def __init__(self, variant: Variant, shape: Shape) -> None:
        context = multiprocessing.get_context("spawn")
        self.variant = variant
        self._connection, far_end = context.Pipe()
        self._process = context.Process(target=serve, args=(far_end, variant, shape), daemon=True)
        self._process.start()
        far_end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    def answer(self) -> Any:
        """Wait for the process's next message.

        Raises:
            BenchmarkError: it ended, on an exception or otherwise.
        """
        try:
            answer = self._connection.recv()
        except EOFError:
            self._process.join()
            raise BenchmarkError(f"{self.variant.name}: process ended with {self._process.exitcode}") from None
        if isinstance(answer, Failure):
            raise BenchmarkError(f"{self.variant.name} failed:\n{answer.traceback}")
        return answer

    def ask(self, request: int | str) -> Any:
        """Send a request and wait for its answer."""
        self._connection.send(request)
        return self.answer()


def take_turns(workers: Sequence[Worker], step: int, *, draw: random.Random, bar: tqdm[Any]) -> dict[str, float]:
    """Let every variant train step number `step`, one after the other in random order; return seconds by name.

    Raises:
        BenchmarkError: a variant's loss is not, bit for bit, that of plain PyTorch in its precision.
    """
    times: dict[str, float] = {}
    losses: dict[str, float] = {}
    for worker in draw.sample(workers, len(workers)):
        bar.set_postfix_str(worker.variant.name)
        times[worker.variant.name], losses[worker.variant.name] = worker.ask(step)
        bar.update()
    for variant in (worker.variant for worker in workers):
        loss, expected = losses[variant.name], losses[variant.baseline]
        if loss != expected:
            raise BenchmarkError(f"step {step}: {variant.name} has loss {loss!r}, {variant.baseline} {expected!r}")
    return times


def check_weights(workers: Sequence[Worker]) -> None:
    """Raise BenchmarkError unless every variant ended with its baseline's weights, bit for bit."""
    digests = {worker.variant.name: worker.ask("weights") for worker in workers}
    variants = [worker.variant for worker in workers]
    wrong = [variant.name for variant in variants if digests[variant.name] != digests[variant.baseline]]
    if wrong:
        raise BenchmarkError(f"weights differ from plain PyTorch's after the last step: {', '.join(wrong)}")


def measure(variants: Sequence[Variant], shape: Shape, *, rounds: int, steps_per_round: int) -> dict[str, Any]:
    """Train all variants in turns; return the threads, the load average after each round, and a row for each variant.

    Raises:
        BenchmarkError: a variant failed, or its losses or final weights are not its baseline's.
    """
    draw = random.Random(0)
    num_timed = rounds * steps_per_round
    turns: list[dict[str, float]] = []
    loads: list[float] = []
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(variant, shape)) for variant in variants]
        threads = [worker.answer() for worker in workers]
        bar = stack.enter_context(tqdm(total=(NUM_WARMUP_STEPS + num_timed) * len(workers), unit="step", disable=None))
        for step in range(NUM_WARMUP_STEPS):
            take_turns(workers, step, draw=draw, bar=bar)
        before = [worker.ask("account") for worker in workers]
        for step in range(num_timed):
            turns.append(take_turns(workers, NUM_WARMUP_STEPS + step, draw=draw, bar=bar))
            if len(turns) % steps_per_round == 0:
                loads.append(os.getloadavg()[0])
                tqdm.write(f"round {len(loads)} of {rounds} done, load average {loads[-1]:.1f}", file=sys.stderr)
        after = [worker.ask("account") for worker in workers]
        check_weights(workers)
    rows = {}
    for variant, first, last in zip(variants, before, after, strict=True):
        step_s = [turn[variant.name] for turn in turns]
        rows[variant.name] = {
            "title": variant.title,
            "baseline": variant.baseline,
            "aim": variant.aim,
            "cap_nbytes": variant.cap_nbytes(num_params(shape)),
            **bytes_used(first, last, num_steps=num_timed),
            "step_s": [step_s[start : start + steps_per_round] for start in range(0, num_timed, steps_per_round)],
        }
    return {"threads": threads[0], "load_average_1min": loads, "variants": rows}


def bytes_used(first: Account, last: Account, *, num_steps: int) -> dict[str, float | None]:
    """Return the traffic per step between two accounts, and the peaks up to the second."""

    def per_step(begin: int | None, end: int | None) -> float | None:
        return None if begin is None or end is None else (end - begin) / num_steps

    return {
        "h2d_nbytes_per_step": per_step(first.h2d_nbytes, last.h2d_nbytes),
        "d2h_nbytes_per_step": per_step(first.d2h_nbytes, last.d2h_nbytes),
        "device_peak_nbytes": last.device_peak_nbytes,
        "process_peak_nbytes": last.process_peak_nbytes,
    }


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Step time of chunkmem against plain PyTorch and FSDP2, on CPU.")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of timed steps (default: %(default)s)")
    parser.add_argument("--steps-per-round", type=int, default=12, help="steps in each (default: %(default)s)")
    names = [variant.name for variant in VARIANTS if variant is not PLAIN]
    told = f"beside plain, and what they are compared to: {', '.join(names)} (default: all)"
    parser.add_argument("--variants", nargs="+", choices=names, default=names, metavar="NAME", help=told)
    add_option(parser)
    parser.add_argument("--quick", action="store_true", help="a small model: tries the harness, measures nothing")
    arguments = parse(parser)
    if arguments.rounds < 1 or arguments.steps_per_round < 2:
        parser.error("--rounds must be at least 1 and --steps-per-round at least 2")
    return arguments


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what the command line asks for and return it with all that is needed to repeat it."""
    shape = QUICK if arguments.quick else FULL
    wanted = {PLAIN.name, *arguments.variants}
    wanted |= {variant.baseline for variant in VARIANTS if variant.name in wanted}
    variants = [variant for variant in VARIANTS if variant.name in wanted]
    if arguments.before:
        variants += [variant.before(arguments.before) for variant in variants if variant.trainer == "chunkmem"]
    return {
        "command": command("overhead"),
        **surroundings(),
        "shape": {**asdict(shape), "num_params": num_params(shape)},
        "num_warmup_steps": NUM_WARMUP_STEPS,
        **measure(variants, shape, rounds=arguments.rounds, steps_per_round=arguments.steps_per_round),
    }


def main() -> int:
    """Run, save and show; return the exit status."""
    return carry_out(parse_arguments(), run, table, readme=HERE / "README.md")


if __name__ == "__main__":
    sys.exit(main())
