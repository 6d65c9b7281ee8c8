"""How long is a training step whose optimizer states are all on DISK? `step.md` in this folder tells the method."""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import chunkmem
from benchmarks.pipeline.models import NUM_BATCHES, Workload, loss_of
from benchmarks.program import BenchmarkError, carry_out, parse, surroundings
from benchmarks.stats import median_interval, paired_ratios
from benchmarks.worker import Worker
from chunkmem.data.types import Tier
from chunkmem.plan.machine import links_below
from chunkmem.plan.model import Lane
from chunkmem.plan.simulate import simulate
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.measure import cached_machine
from chunkmem.runtime.tiers import TierCaps
from tests.helpers.faulty_disk import ThrottledDisk

HERE = Path(__file__).parent
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
WORK = Workload(num_layers=16, width=512, num_heads=8, num_sequences=4, num_tokens=64)
QUICK = replace(WORK, num_layers=3, width=64, num_heads=4, num_tokens=16)
LOADS = (0.5, 1.0, 2.0)
"""Seconds of DISK for each second of computing."""
DEVICE_SHARE = 0.35
"""The cap on DEVICE, of the bytes of the weights."""
NUM_WARMUP_STEPS = 12
"""The first is recorded; then plans get better. All variants train as many, so that they end with the same bits."""
TURN_STEPS = 3
"""That are timed in a turn, one after the other."""
PLAIN, RESIDENT, TIERED, AGAIN = "plain", "resident", "disk", "disk-again"
TITLES = {
    PLAIN: "plain PyTorch",
    RESIDENT: "chunkmem, all of HOST it wants, no DISK",
    TIERED: "chunkmem, all states on DISK",
    AGAIN: "the same again (A/A)",
}
AIM = "≤ 1.10"
MB = 1e6


@dataclass(frozen=True)
class Setting:
    """What a variant is started with."""

    work: Workload
    chunk_numel: int
    host_nbytes: int
    """The cap on HOST of those that have DISK."""
    folder: str = ""
    disk_Bps: float = 0.0
    """In each direction, both at once; 0: there is no DISK; infinite: as fast as it is."""


@dataclass(frozen=True)
class Step:
    """One training step as it was measured."""

    step_s: float
    cpu_s: float
    """Of all threads of the process."""
    read_nbytes: int = 0
    written_nbytes: int = 0
    plan_misses: int = 0


@dataclass(frozen=True)
class Summary:
    """How training ended."""

    weights: str
    """Digest of the weights."""
    predicted_s: float | None = None
    """The step, as the plan was simulated."""
    host_peak_nbytes: int | None = None
    plan: str | None = None


class Trainee:
    """A model under training, in a process of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._manager: chunkmem.ChunkManager | None = None

    def start(self, setting: Setting) -> None:
        """Build the model and train the first steps."""
        if self._manager is not None:
            self._manager.close()
        self._batches, self._num_steps = setting.work.batches(), 0
        if self._name == PLAIN:
            self._model = setting.work.build()
            self._optimizer: Any = torch.optim.AdamW(self._model.parameters(), fused=True, **ADAMW)
        else:
            self._manager = self._open(setting)
            with self._manager.init():
                self._model = setting.work.build()
            self._optimizer = chunkmem.AdamW(self._model.parameters(), manager=self._manager, **ADAMW)
        for _ in range(NUM_WARMUP_STEPS):
            self.step()

    def _open(self, setting: Setting) -> chunkmem.ChunkManager:
        param_nbytes = setting.work.param_nbytes
        device_nbytes = int(DEVICE_SHARE * param_nbytes)
        memory: dict[str, Any] = {"device": device_nbytes, "host": 16 * param_nbytes}
        options: dict[str, Any] = {}
        if setting.disk_Bps:
            disk = {"path": setting.folder, "capacity": 16 * param_nbytes}
            memory |= {"host": setting.host_nbytes, "disk": disk}
        if 0 < setting.disk_Bps < math.inf:
            caps = TierCaps(device_nbytes, setting.host_nbytes, shared=False)
            machine = cached_machine(ComputeDevice(torch.device("cpu")), caps)
            links = links_below(Tier.HOST, Tier.DISK, read_Bps=setting.disk_Bps, write_Bps=setting.disk_Bps)
            options["machine"] = replace(machine, links={**machine.links, **links})
            options["disk_calls"] = ThrottledDisk(setting.disk_Bps, setting.disk_Bps)
        values = {
            "memory": memory,
            "default_chunk_size": setting.chunk_numel,
            "client": {"opts": {"overlap_optimizer": True}},
        }
        return chunkmem.ChunkManager(chunkmem.Config.from_dict(values), **options)

    def turn(self) -> Step:
        """Train one step to begin with, and then some that are timed; return what one of those took.

        The updates of a step, and what DISK has to do for them, overlap with the next step. Nothing is under way when
        this returns: another process has its turn.
        """
        self.step()
        found = [self.step() for _ in range(TURN_STEPS)]
        if self._manager is not None:
            self._manager.runtime.memory.pager.policy.drain()
        step_s, cpu_s = sum(step.step_s for step in found), sum(step.cpu_s for step in found)
        num_misses = sum(step.plan_misses for step in found)
        return replace(found[-1], step_s=step_s / TURN_STEPS, cpu_s=cpu_s / TURN_STEPS, plan_misses=num_misses)

    def step(self) -> Step:
        """Train one step."""
        batch = self._batches[self._num_steps % NUM_BATCHES]
        self._num_steps += 1
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        loss = loss_of(self._model(batch[:, :-1]), batch[:, 1:])
        if self._manager is None:
            loss.backward()
        else:
            self._manager.backward(loss)
        self._optimizer.step()
        self._optimizer.zero_grad()
        step_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_began_s
        if self._manager is None:
            return Step(step_s, cpu_s)
        timeline = self._manager.timeline()
        moved = timeline.moved_nbytes
        return Step(step_s, cpu_s, moved.get(Lane.DISK_READ, 0), moved.get(Lane.DISK_WRITE, 0), timeline.plan_misses)

    def summary(self) -> Summary:
        """Tell how it ended; training stops here."""
        manager = self._manager
        state = self._model.state_dict() if manager is None else manager.state_dict()
        digest = hashlib.sha256()
        for tensor in state.values():
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        if manager is None:
            return Summary(digest.hexdigest())
        assert manager.plan is not None
        assert manager.trace is not None
        predicted_s = simulate(manager.plan, manager.trace).step_s
        host_peak_nbytes = manager.memory().host.peak_nbytes
        return Summary(digest.hexdigest(), predicted_s, host_peak_nbytes, manager.plan.name)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time a step without DISK, and then one with DISK at each speed.

    Raises:
        BenchmarkError: a process failed, or two variants have not computed the same.
    """
    work = QUICK if arguments.quick else WORK
    param_nbytes = work.param_nbytes
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.folder))
        workers = {name: Worker(name, Trainee, name, stack=stack) for name in TITLES}
        # A third of a block, and biases: little of a chunk is padding.
        chunk_numel = 4 * work.width * work.width + 24 * work.width
        setting = Setting(work, chunk_numel, int(arguments.host * param_nbytes), folder)
        first = in_turns([workers[PLAIN], workers[RESIDENT]], setting, "no DISK", steps=arguments.steps)
        compute_s = statistics.median(first[RESIDENT]["step_s"])
        settings = {}
        for load in arguments.loads:
            disk_Bps = 2 * param_nbytes / (load * compute_s)
            throttled = replace(setting, disk_Bps=disk_Bps)
            rows = in_turns(list(workers.values()), throttled, f"DISK {load:g} x", steps=arguments.steps)
            settings[f"{load:g}"] = {"disk_Bps": disk_Bps, "variants": rows}
    return {
        "command": shlex.join(["python", "-m", "benchmarks.disk.step", *sys.argv[1:]]),
        **surroundings(),
        **asdict(work),
        "param_nbytes": param_nbytes,
        "host_nbytes": setting.host_nbytes,
        "compute_s": compute_s,
        "settings": settings,
        "load_average": os.getloadavg()[0],
    }


def in_turns(workers: Sequence[Worker], setting: Setting, title: str, *, steps: int) -> dict[str, Any]:
    """Let all variants take turns, a few steps each, in an order drawn again every time."""
    draw = random.Random(0)
    for worker in tqdm(workers, desc=f"{title}: first steps", disable=None):
        has_disk = worker.name in (TIERED, AGAIN)
        worker.ask("start", setting if has_disk else replace(setting, disk_Bps=0.0))
    measured: dict[str, list[Step]] = {worker.name: [] for worker in workers}
    for _ in tqdm(range(steps), desc=f"{title}: turns", disable=None):
        for worker in draw.sample(workers, len(workers)):
            measured[worker.name].append(worker.ask("turn"))
    rows = {}
    for worker in workers:
        found = measured[worker.name]
        summary: Summary = worker.ask("summary")
        rows[worker.name] = {
            "step_s": [step.step_s for step in found],
            "cpu_s": [step.cpu_s for step in found],
            "read_nbytes": found[-1].read_nbytes,
            "written_nbytes": found[-1].written_nbytes,
            "plan_misses": sum(step.plan_misses for step in found),
            **asdict(summary),
        }
        if summary.weights != rows[PLAIN]["weights"]:
            raise BenchmarkError(f"{worker.name}: weights are not those of {PLAIN}, to the bit")
    return rows


def table(results: Mapping[str, Any]) -> str:
    """Return the Markdown of `results`: a table for each speed of DISK."""
    hardware, param_nbytes = results["hardware"], results["param_nbytes"]
    parts = [
        f"`{results['command']}`",
        f"{hardware['cpu']}, {hardware['num_cpus']} cores, 1 thread to compute; torch {results['versions']['torch']}; "
        f"{param_nbytes / MB:.0f} MB of weights, as much of gradients, twice that of states; HOST has "
        f"{results['host_nbytes'] / MB:.0f} MB. Load average at the end: {results['load_average']:.1f}.",
    ]
    for load, setting in results["settings"].items():
        parts.append(f"### DISK {load} x computing: {setting['disk_Bps'] / MB:.0f} MB/s each way, both at once")
        parts.append(_rows(setting, param_nbytes))
    return "\n\n".join(parts)


def _rows(setting: Mapping[str, Any], param_nbytes: int) -> str:
    variants, disk_Bps = setting["variants"], setting["disk_Bps"]
    lines = [
        "| variant | seconds of a step | predicted | seconds of DISK | read, written, x weights | plan misses |"
        f" step / max(computing, DISK), aim {AIM} |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, title in TITLES.items():
        row = variants[name]
        disk_s = max(row["read_nbytes"], row["written_nbytes"]) / disk_Bps
        predicted = "–" if row["predicted_s"] is None else f"{row['predicted_s']:.2f}"
        # Noise of a turn is in both, where computing is what binds.
        bounds = [max(compute_s, disk_s) for compute_s in variants[RESIDENT]["step_s"]]
        ratio = median_interval(paired_ratios(row["step_s"], bounds))
        moved = f"{row['read_nbytes'] / param_nbytes:.2f}, {row['written_nbytes'] / param_nbytes:.2f}"
        lines.append(
            f"| {title} | {statistics.median(row['step_s']):.2f} | {predicted} | {disk_s:.2f} | {moved} | "
            f"{row['plan_misses']} | {ratio.median:.2f} ({ratio.low:.2f} – {ratio.high:.2f}) |"
        )
    again = median_interval(paired_ratios(variants[AGAIN]["step_s"], variants[TIERED]["step_s"]))
    lines.append(f"\nA/A: {again.median:.2f} ({again.low:.2f} – {again.high:.2f}). Plan: {variants[TIERED]['plan']}.")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Seconds of a step with all optimizer states on a throttled disk.")
    parser.add_argument("--steps", type=int, default=8, help="turns of each variant (default: %(default)s)")
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS, help="DISK / computing (default: 0.5 1 2)")
    parser.add_argument("--host", type=float, default=2.2, help="cap on HOST, x weights (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=HERE.parents[1], help="on a fast disk (default: here)")
    parser.add_argument("--quick", action="store_true", help="a small model: tries the harness, measures nothing")
    arguments = parse(parser)
    if arguments.steps < 1 or min(arguments.loads) <= 0 or arguments.host <= 0:
        parser.error("--steps must be at least 1, --loads and --host above 0")
    if arguments.quick:
        arguments.steps = 2
    return arguments


if __name__ == "__main__":
    sys.exit(carry_out(parse_arguments(), measure, table, readme=HERE / "step.md"))
