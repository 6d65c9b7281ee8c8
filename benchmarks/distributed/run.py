"""How long is a training step over ranks, and what does a rank keep? The README beside this file tells the method."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

if not __package__:  # Run as a file: find the other modules where `python -m` finds them.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.checkout import add_option
from benchmarks.distributed.variants import NUM_RANKS, VARIANTS, Failure, Missing, Variant, serve
from benchmarks.overhead.variants import FULL, QUICK, Shape, num_params
from benchmarks.program import BenchmarkError, carry_out, command, parse, surroundings
from benchmarks.stats import median_interval, paired_ratios

HERE = Path(__file__).parent
DDP = VARIANTS[0]
TOLERANCE = 1e-3
"""How far a loss may be from DDP's."""
FSDP2_AIM = 1.5
"""How many times as long as point to point FSDP2 is to take."""
GRACE_S = 2.0
"""How long the other ranks may take to answer after one has failed."""
HEADER = (
    "variant",
    "step, median s",
    "× DDP",
    "95 % interval",
    "CPU seconds, × DDP",
    "aim",
    "largest difference of a loss",
    "kept after a step, MiB",
    "peak in a step, MiB",
    "process peak, MiB",
)


Turn = dict[str, list[tuple[float, float, float]]]
"""A variant's name to the seconds, the loss and the CPU seconds of each rank."""


class Team:
    """A variant's ranks, each in a process of its own; they work only while they are asked to."""

    def __init__(self, variant: Variant, shape: Shape) -> None:
        self.variant = variant
        self._shape = shape
        self._members: list[tuple[Any, Any]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        context = multiprocessing.get_context("spawn")
        # What is started now ignores Ctrl-C from its first instruction on, not only when it has imported torch.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for rank in range(NUM_RANKS):
                here, there = context.Pipe()
                arguments = (there, self.variant, self._shape, rank, store)
                process = context.Process(target=serve, args=arguments, daemon=True)
                process.start()
                there.close()  # Else the pipe would stay open when the process dies.
                self._members.append((process, here))
        except BaseException:
            self.end()
            raise
        finally:
            signal.signal(signal.SIGINT, before)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill the processes and wait until they are gone."""
        for process, _ in self._members:
            process.kill()
        for process, connection in self._members:
            process.join()
            connection.close()
        self._members = []
        if self._folder is not None:
            self._folder.cleanup()

    def answers(self) -> list[Any]:
        """Wait for the next message of every rank; return them by rank.

        Raises:
            BenchmarkError: a rank ended, on an exception or otherwise.
        """
        found: dict[int, Any] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._members)}
        failures: dict[int, str] = {}
        while waiting and (ready := wait(list(waiting), timeout=GRACE_S if failures else None)):
            for connection in ready:
                rank = waiting.pop(connection)
                found[rank] = self._receive(rank)
                if isinstance(found[rank], Failure):
                    failures[rank] = found[rank].what
        if failures:
            told = "\n".join(f"rank {rank}: {what}" for rank, what in sorted(failures.items()))
            raise BenchmarkError(f"{self.variant.name} failed:\n{told}")
        return [found[rank] for rank in range(NUM_RANKS)]

    def _receive(self, rank: int) -> Any:
        process, connection = self._members[rank]
        try:
            return connection.recv()
        except (EOFError, ConnectionError):
            process.join()
            return Failure(f"its process ended with {process.exitcode}")

    def ask(self, request: int | str) -> list[Any]:
        """Send a request to every rank and wait for their answers."""
        for rank, (_, connection) in enumerate(self._members):
            try:
                connection.send(request)
            except BrokenPipeError:
                raise BenchmarkError(f"{self.variant.name} failed:\nrank {rank}: {self._receive(rank).what}") from None
        return self.answers()


def take_turns(teams: Sequence[Team], step: int, *, draw: random.Random, bar: tqdm[Any]) -> Turn:
    """Let every variant train step number `step`, one after the other in random order; return, by rank, what a
    step is answered with.

    Raises:
        BenchmarkError: the loss of a variant on a rank is further than the tolerance from DDP's.
    """
    turn: Turn = {}
    for team in draw.sample(teams, len(teams)):
        bar.set_postfix_str(team.variant.name)
        turn[team.variant.name] = team.ask(step)
        bar.update()
    for name, answers in turn.items():
        for rank, ((_, loss, _), (_, expected, _)) in enumerate(zip(answers, turn[DDP.name], strict=True)):
            if not abs(loss - expected) <= TOLERANCE:  # Also when it is not a number.
                raise BenchmarkError(f"step {step}, rank {rank}: {name} has loss {loss!r}, {DDP.name} {expected!r}")
    return turn


def measure(variants: Sequence[Variant], shape: Shape, *, warm_up: int, rounds: int) -> dict[str, Any]:
    """Train all variants in turns; return the load average before and after, and a row for each variant.

    Raises:
        BenchmarkError: a variant failed, or its losses are not DDP's.
    """
    draw = random.Random(0)
    load_before = os.getloadavg()[0]
    rows: dict[str, Any] = {variant.name: {"title": variant.title, "aim": variant.aim} for variant in variants}
    with ExitStack() as stack:
        teams = []
        for team in [stack.enter_context(Team(variant, shape)) for variant in variants]:
            missing = [answer for answer in team.answers() if isinstance(answer, Missing)]
            if missing:
                rows[team.variant.name]["missing"] = missing[0].reason
            else:
                teams.append(team)
        bar = stack.enter_context(tqdm(total=(warm_up + rounds) * len(teams), unit="step", disable=None))
        turns = [take_turns(teams, step, draw=draw, bar=bar) for step in range(warm_up + rounds)]
        for team in teams:
            rows[team.variant.name] |= make_row(team.variant.name, turns, warm_up=warm_up)
            rows[team.variant.name]["ranks"] = [asdict(account) for account in team.ask("account")]
    return {"load_average_1min": [load_before, os.getloadavg()[0]], "variants": rows}


def make_row(name: str, turns: Sequence[Turn], *, warm_up: int) -> dict[str, Any]:
    """Return a variant's timed steps, slowest rank and each, and how far a loss of all steps was from DDP's."""
    rank_step_s = [[seconds for seconds, _, _ in turn[name]] for turn in turns[warm_up:]]
    pairs = [pair for turn in turns for pair in zip(turn[name], turn[DDP.name], strict=True)]
    return {
        "step_s": [max(by_rank) for by_rank in rank_step_s],
        "rank_step_s": rank_step_s,
        "cpu_step_s": [sum(cpu_s for _, _, cpu_s in turn[name]) for turn in turns[warm_up:]],
        "loss_difference": max(abs(loss - expected) for (_, loss, _), (_, expected, _) in pairs),
    }


def table(results: Mapping[str, Any]) -> str:
    """Return the Markdown of `results`: surroundings, a row for each variant, what the other aims came to."""
    hardware, versions, shape = results["hardware"], results["versions"], results["shape"]
    rows = results["variants"]
    return "\n".join([
        f"`{results['command']}`",
        "",
        f"{hardware['cpu']} ({hardware['cpu_capability']}), {hardware['num_cpus']} cores, "
        f"{hardware['memory_nbytes'] / 2**30:.0f} GiB; {NUM_RANKS} ranks × 1 thread, gloo; torch {versions['torch']}, "
        f"Python {versions['python']}, {versions['os']}. {shape['num_params'] / 1e6:.1f} M parameters, "
        f"{shape['num_sequences']} × {shape['num_tokens']} tokens a step and rank; {results['num_rounds']} timed steps "
        f"after {results['num_warm_up_steps']} others. Load average before and after: "
        f"{', '.join(f'{load:.1f}' for load in results['load_average_1min'])}.",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|---" * len(HEADER) + "|",
        *("| " + " | ".join([row["title"], *_cells(row, rows[DDP.name])]) + " |" for row in rows.values()),
        "",
        *_other_aims(rows),
    ])  # fmt: skip


def _cells(row: Mapping[str, Any], ddp: Mapping[str, Any]) -> list[str]:
    if "missing" in row:
        return [f"not run: {row['missing']}", *["–"] * (len(HEADER) - 2)]
    interval = median_interval(paired_ratios(row["step_s"], ddp["step_s"]))
    cpu = median_interval(paired_ratios(row["cpu_step_s"], ddp["cpu_step_s"]))
    aim = row["aim"]
    # The aims are for the lower end: a miss is then one that the noise of the machine does not explain.
    verdict = "" if aim is None else f"≤ {aim:.2f}: {'met' if interval.low <= aim else 'missed'}"
    keys = ("kept_nbytes", "peak_nbytes", "process_peak_nbytes")
    return [
        f"{statistics.median(row['step_s']):.3f}",
        f"{interval.median:.3f}",
        f"{interval.low:.3f} – {interval.high:.3f}",
        f"{cpu.median:.3f} ({cpu.low:.3f} – {cpu.high:.3f})",
        verdict,
        f"{row['loss_difference']:.1e}" if row["loss_difference"] else "0",
        *(" / ".join("–" if a[key] is None else f"{a[key] / 2**20:.1f}" for a in row["ranks"]) for key in keys),
    ]


def _other_aims(rows: Mapping[str, Any]) -> list[str]:
    """Return what there is to say of point to point beside FSDP2's time and DDP's memory."""
    ours, lines = rows.get("point-to-point"), []
    if ours is None:
        return []
    if "fsdp2" in rows:
        found = median_interval(paired_ratios(rows["fsdp2"]["step_s"], ours["step_s"]))
        verdict = "met" if found.high >= FSDP2_AIM else "missed"
        times = f"{found.median:.2f} × ({found.low:.2f} – {found.high:.2f})"
        lines.append(f"- FSDP2 takes {times} as long as point to point; aim ≥ {FSDP2_AIM}: {verdict}.")
    for key, when in (("kept_nbytes", "after a step"), ("peak_nbytes", "at the peak of a step")):
        # DDP has all of it all the time.
        share = max(a[key] for a in ours["ranks"]) / max(a["kept_nbytes"] for a in rows[DDP.name]["ranks"])
        lines.append(f"- Of DDP's weights, gradients and states, a rank with point to point has {share:.0%} {when}.")
    return lines


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Step time and memory of training over 2 ranks, on CPU.")
    parser.add_argument("--rounds", type=int, default=30, help="timed steps of each (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before them (default: %(default)s)")
    names = [variant.name for variant in VARIANTS if variant is not DDP]
    told = f"beside {DDP.name}: {', '.join(names)} (default: all)"
    parser.add_argument("--variants", nargs="+", choices=names, default=names, metavar="NAME", help=told)
    add_option(parser)
    parser.add_argument("--quick", action="store_true", help="a small model: tries the harness, measures nothing")
    arguments = parse(parser)
    if arguments.rounds < 1 or arguments.warm_up < 1:
        parser.error("--rounds and --warm-up must be at least 1")
    return arguments


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what the command line asks for and return it with all that is needed to repeat it."""
    shape = QUICK if arguments.quick else FULL
    variants = [variant for variant in VARIANTS if variant.name in {DDP.name, *arguments.variants}]
    if arguments.before:
        variants += [variant.before(arguments.before) for variant in variants if variant.trainer == "chunkmem"]
    return {
        "command": command("distributed"),
        **surroundings(),
        "shape": {**asdict(shape), "num_params": num_params(shape)},
        "num_warm_up_steps": arguments.warm_up,
        "num_rounds": arguments.rounds,
        **measure(variants, shape, warm_up=arguments.warm_up, rounds=arguments.rounds),
    }


def main() -> int:
    """Run, save and show; return the exit status."""
    try:
        return carry_out(parse_arguments(), run, table, readme=HERE / "README.md")
    except KeyboardInterrupt:
        print("stopped; nothing was saved", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
