"""How long is a step whose optimizer states are on DISK, next to DeepSpeed's NVMe offload? See `peers.md`."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks.disk.step import ADAMW, MB, NUM_WARMUP_STEPS, QUICK, TURN_STEPS, WORK, Setting, Trainee
from benchmarks.pipeline.models import NUM_BATCHES, loss_of
from benchmarks.program import BenchmarkError, carry_out, parse, surroundings
from benchmarks.stats import median_interval, paired_ratios
from benchmarks.worker import Worker

HERE = Path(__file__).parent
OURS, AGAIN = "chunkmem", "chunkmem-again"
AIM = "≥ 1.3"
LOSS_TOLERANCE = 0.1
"""Relative, after the first steps: both train the same model on the same batches, but round otherwise."""


@dataclass(frozen=True)
class Variant:
    """A way to train."""

    name: str
    title: str
    sub_group_layers: float | None = None
    """What DeepSpeed updates at a time, in layers; None: this is chunkmem."""
    is_pipelined: bool = True
    """DeepSpeed reads the next and writes the last while it updates one."""


VARIANTS = (
    Variant(OURS, "chunkmem"),
    Variant(AGAIN, "the same again (A/A)"),
    Variant("deepspeed-1", "DeepSpeed, groups of a layer, pipelined", 1.0),
    Variant("deepspeed-4", "DeepSpeed, groups of 4 layers, pipelined", 4.0),
    Variant("deepspeed-4-plain", "DeepSpeed, groups of 4 layers, not pipelined", 4.0, is_pipelined=False),
)


class OurTrainee(Trainee):
    """chunkmem; tells losses."""

    def __init__(self) -> None:
        super().__init__(OURS)

    def seconds(self) -> float:
        """Train a turn; return what one of its timed steps took."""
        return self.turn().step_s

    def loss(self) -> float:
        """Return the loss of the first batch."""
        with torch.no_grad():
            batch = self._batches[0]
            return float(loss_of(self._model(batch[:, :-1]), batch[:, 1:]))


class DeepSpeedTrainee:
    """ZeRO stage 3 with optimizer states on NVMe, in a process of its own."""

    def __init__(self, variant: Variant, port: int) -> None:
        os.environ.update(
            DS_ACCELERATOR="cpu",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            RANK="0",
            WORLD_SIZE="1",
            LOCAL_RANK="0",
        )
        self._variant = variant

    def start(self, setting: Setting) -> None:
        """Build the model and train the first steps."""
        import deepspeed

        work = setting.work
        layers = self._variant.sub_group_layers
        assert layers is not None
        options = {
            "train_micro_batch_size_per_gpu": work.num_sequences,
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "sub_group_size": int(layers * 12.1 * work.width**2),
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": setting.folder,
                    "pin_memory": False,
                    "buffer_count": 14,  # fewer than an update touches, times three, and it fails
                    "pipeline_read": self._variant.is_pipelined,
                    "pipeline_write": self._variant.is_pipelined,
                },
            },
            # What its documentation recommends for one disk.
            "aio": {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1, "overlap_events": True},
            "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
        }
        deepspeed.init_distributed("gloo")
        model = work.build()
        self._engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=options)[0]
        self._batches, self._num_steps = work.batches(), 0
        for _ in range(NUM_WARMUP_STEPS):
            self._step()

    def _step(self) -> None:
        batch = self._batches[self._num_steps % NUM_BATCHES]
        self._num_steps += 1
        self._engine.backward(loss_of(self._engine(batch[:, :-1]), batch[:, 1:]))
        self._engine.step()

    def seconds(self) -> float:
        """Train as many steps as a turn of chunkmem has; return what one of those that are timed took."""
        self._step()
        began_s = time.perf_counter()
        for _ in range(TURN_STEPS):
            self._step()
        return (time.perf_counter() - began_s) / TURN_STEPS

    def loss(self) -> float:
        """Return the loss of the first batch."""
        with torch.no_grad():
            batch = self._batches[0]
            return float(loss_of(self._engine(batch[:, :-1]), batch[:, 1:]))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Let all variants take turns.

    Raises:
        BenchmarkError: DeepSpeed is not there, a process failed, or losses differ by more than rounding makes of them.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise BenchmarkError("DeepSpeed is not installed: pip install deepspeed, and libaio's headers")
    work = QUICK if arguments.quick else WORK
    draw = random.Random(0)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.folder))
        workers = []
        for number, variant in enumerate(VARIANTS):
            maker = (
                (OurTrainee,)
                if variant.sub_group_layers is None
                else (DeepSpeedTrainee, variant, arguments.port + number)
            )
            workers.append(Worker(variant.name, *maker, stack=stack))
        chunk_numel = 4 * work.width * work.width + 24 * work.width
        for worker in tqdm(workers, desc="first steps", disable=None):
            own = Path(folder, worker.name)
            own.mkdir()
            worker.ask("start", Setting(work, chunk_numel, int(arguments.host * work.param_nbytes), str(own), math.inf))
        losses = {worker.name: worker.ask("loss") for worker in workers}
        for name, loss in losses.items():
            if abs(loss - losses[OURS]) > LOSS_TOLERANCE * losses[OURS]:
                raise BenchmarkError(
                    f"{name}: the loss is {loss:.4f} after the first steps, that of chunkmem {losses[OURS]:.4f}"
                )
        step_s: dict[str, list[float]] = {worker.name: [] for worker in workers}
        for _ in tqdm(range(arguments.steps), desc="turns", disable=None):
            for worker in draw.sample(workers, len(workers)):
                step_s[worker.name].append(worker.ask("seconds"))
    return {
        "command": shlex.join(["python", "-m", "benchmarks.disk.peers", *sys.argv[1:]]),
        **surroundings(),
        **asdict(work),
        "param_nbytes": work.param_nbytes,
        "host_nbytes": int(arguments.host * work.param_nbytes),
        "step_s": step_s,
        "losses": losses,
        "deepspeed": _version(),
        "load_average": os.getloadavg()[0],
    }


def _version() -> str:
    from importlib.metadata import version

    return version("deepspeed")


def table(results: Mapping[str, Any]) -> str:
    """Return the Markdown of `results`."""
    hardware, step_s = results["hardware"], results["step_s"]
    lines = [
        f"`{results['command']}`\n",
        f"{hardware['cpu']}, {hardware['num_cpus']} cores, 1 thread to compute; torch {results['versions']['torch']}, "
        f"DeepSpeed {results['deepspeed']}; {results['param_nbytes'] / MB:.0f} MB of weights; HOST of chunkmem has "
        f"{results['host_nbytes'] / MB:.0f} MB. Load average at the end: {results['load_average']:.1f}.\n",
        f"| variant | seconds of a step | x chunkmem's, aim {AIM} | loss after the first steps |",
        "|---|---|---|---|",
    ]
    for variant in VARIANTS:
        ratio = median_interval(paired_ratios(step_s[variant.name], step_s[OURS]))
        lines.append(
            f"| {variant.title} | {statistics.median(step_s[variant.name]):.2f} | {_interval(ratio)} | "
            f"{results['losses'][variant.name]:.4f} |"
        )
    return "\n".join(lines)


def _interval(ratio: Any) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f} – {ratio.high:.2f})"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="A step with optimizer states on DISK, next to DeepSpeed's NVMe offload."
    )
    parser.add_argument("--steps", type=int, default=8, help="turns of each variant (default: %(default)s)")
    parser.add_argument(
        "--host", type=float, default=2.2, help="chunkmem's cap on HOST, x weights (default: %(default)s)"
    )
    parser.add_argument("--folder", type=Path, default=HERE.parents[1], help="on a fast disk (default: here)")
    parser.add_argument(
        "--port", type=int, default=29611, help="first of those DeepSpeed listens on (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a small model: tries the harness, measures nothing")
    arguments = parse(parser)
    if arguments.steps < 1 or arguments.host <= 0:
        parser.error("--steps must be at least 1, --host above 0")
    if arguments.quick:
        arguments.steps = 2
    return arguments


if __name__ == "__main__":
    sys.exit(carry_out(parse_arguments(), measure, table, readme=HERE / "peers.md"))
