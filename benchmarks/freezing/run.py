"""How much shorter is a step when half of the blocks are frozen, and what is given back? See `README.md`."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import chunkmem
from benchmarks.pipeline.models import NUM_BATCHES, Workload, loss_of
from benchmarks.program import BenchmarkError, carry_out, command, parse, surroundings
from benchmarks.stats import median_interval, paired_ratios
from benchmarks.worker import Worker

README = Path(__file__).with_name("README.md")
WORK = Workload(num_layers=12, width=512, num_heads=8, num_sequences=8, num_tokens=64)
QUICK = replace(WORK, num_layers=4, width=64, num_heads=4, num_tokens=16)
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
NUM_EPOCHS_BEFORE = 3
"""Of `NUM_BATCHES` steps each, with nothing frozen: plans settle."""
NUM_EPOCHS_AFTER = 2
"""Of those that are not timed, with what is frozen; the cache is filled by the first."""
MIB = 1 << 20


@dataclass(frozen=True)
class Variant:
    """A way to train."""

    name: str
    title: str
    is_plain: bool = False
    is_frozen: bool = False
    is_cached: bool = False
    of: str = "chunkmem"
    """Whose step its own is divided by."""
    aim: str = ""


VARIANTS = (
    Variant("plain", "plain PyTorch", is_plain=True, of="plain"),
    Variant("plain-frozen", "plain PyTorch, half frozen", is_plain=True, is_frozen=True, of="plain"),
    Variant("chunkmem", "chunkmem"),
    Variant("again", "the same again (A/A)"),
    Variant("frozen", "chunkmem, half frozen", is_frozen=True, aim="≤ 0.70"),
    Variant("cached", "chunkmem, half frozen, with the cache", is_frozen=True, is_cached=True, aim="≤ 0.55"),
)


class Trainee:
    """A model under training, in a process of its own."""

    def __init__(self, variant: Variant, work: Workload, device_share: float) -> None:
        self._variant, self._work = variant, work
        self._frozen: list[nn.Module] = []
        self._cache: chunkmem.FrozenCache | None = None
        self._manager: chunkmem.ChunkManager | None = None
        self._losses: list[float] = []
        self._batches = work.batches()
        if variant.is_plain:
            self._model = work.build()
            self._optimizer: Any = torch.optim.AdamW(self._model.parameters(), fused=True, **ADAMW)
            return
        memory = {"device": int(device_share * work.param_nbytes), "host": 8 * work.param_nbytes}
        config = {"memory": memory, "default_chunk_size": 4 * work.width * work.width + 24 * work.width}
        self._manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(config))
        with self._manager.init():
            self._model = work.build()
        self._optimizer = chunkmem.AdamW(self._model.parameters(), manager=self._manager, **ADAMW)

    def start(self) -> dict[str, int]:
        """Train the first epochs, and freeze then; return bytes before and after it, if chunkmem has them."""
        for _ in range(NUM_EPOCHS_BEFORE):
            self.epoch()
        found = {"before_nbytes": self._model_nbytes()}
        if self._variant.is_frozen:
            self._freeze()
        found["after_nbytes"] = self._model_nbytes()
        for _ in range(NUM_EPOCHS_AFTER):
            self.epoch()
        return found

    def _freeze(self) -> None:
        blocks = self._model.blocks
        self._frozen = [self._model.embeddings, *blocks[: len(blocks) // 2]]
        if self._manager is None:
            for module in self._frozen:
                module.requires_grad_(False)
            return
        self._manager.freeze(self._frozen)
        if self._variant.is_cached:
            work = self._work
            value_nbytes = 4 * work.num_tokens * work.width
            room_nbytes = NUM_BATCHES * work.num_sequences * value_nbytes
            self._cache = chunkmem.FrozenCache(self._manager, host=room_nbytes)

    def _model_nbytes(self) -> int:
        if self._manager is None:
            return 0
        memory = self._manager.memory()
        roles = {**memory.device.by_role}
        on_device = sum(now for role, (now, _) in roles.items() if role != "cache")
        return on_device + sum(now for role, (now, _) in memory.host.by_role.items() if role != "frozen_cache")

    def epoch(self) -> float:
        """Train a step on each batch; return the seconds of one."""
        began_s = time.perf_counter()
        for number, batch in enumerate(self._batches):
            loss = loss_of(self._forward(number, batch[:, :-1]), batch[:, 1:])
            if self._manager is None:
                loss.backward()
            else:
                self._manager.backward(loss)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._losses.append(loss.item())
        return (time.perf_counter() - began_s) / len(self._batches)

    def _forward(self, number: int, tokens: Tensor) -> Tensor:
        if self._cache is None:
            return self._model(tokens)
        first = number * self._work.num_sequences
        x = self._cache(self._frozen, tokens, range(first, first + self._work.num_sequences))
        for block in self._model.blocks[len(self._frozen) - 1 :]:
            x = block(x)
        return self._model.head(x)

    def summary(self) -> dict[str, Any]:
        """Tell how it went."""
        found: dict[str, Any] = {"losses": self._losses}
        if self._manager is not None:
            memory = self._manager.memory()
            found |= {"step_peak_nbytes": memory.device.step_peak_nbytes, "moved": str(self._manager.timeline())}
            found["host_nbytes"] = memory.host.now_nbytes
        return found


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Let all variants take turns, an epoch each, in an order drawn again every turn.

    Raises:
        BenchmarkError: a process failed, or two variants have not computed the same.
    """
    work = QUICK if arguments.quick else WORK
    draw = random.Random(0)
    with ExitStack() as stack:
        workers = [Worker(v.name, Trainee, v, work, arguments.device, stack=stack) for v in VARIANTS]
        started = {worker.name: worker.ask("start") for worker in tqdm(workers, desc="first epochs", disable=None)}
        step_s: dict[str, list[float]] = {worker.name: [] for worker in workers}
        for _ in tqdm(range(arguments.epochs), desc="epochs", disable=None):
            for worker in draw.sample(workers, len(workers)):
                step_s[worker.name].append(worker.ask("epoch"))
        rows = {w.name: {"step_s": step_s[w.name], **started[w.name], **w.ask("summary")} for w in workers}
    losses = {name: row.pop("losses") for name, row in rows.items()}
    for name, other in (("again", "chunkmem"), ("chunkmem", "plain"), ("cached", "frozen")):
        if losses[name] != losses[other]:
            raise BenchmarkError(f"{name}: losses are not those of {other}, to the bit")
    return {
        "command": command("freezing"),
        **surroundings(),
        **asdict(work),
        "param_nbytes": work.param_nbytes,
        "device_share": arguments.device,
        "variants": rows,
        "load_average": os.getloadavg()[0],
    }


def table(results: Mapping[str, Any]) -> str:
    """Return the Markdown of `results`."""
    hardware, rows = results["hardware"], results["variants"]
    lines = [
        f"`{results['command']}`\n",
        f"{hardware['cpu']}, {hardware['num_cpus']} cores, 1 thread to compute; torch {results['versions']['torch']}; "
        f"{results['num_layers']} blocks, {results['param_nbytes'] / MIB:.0f} MiB of weights, DEVICE has "
        f"{results['device_share']:.0%} of that. Load average at the end: {results['load_average']:.1f}.\n",
        "| variant | seconds of a step | x without freezing | aim | model data after freezing, MiB | peak on DEVICE, "
        "MiB |",
        "|---|---|---|---|---|---|",
    ]
    for variant in VARIANTS:
        row = rows[variant.name]
        ratio = median_interval(paired_ratios(row["step_s"], rows[variant.of]["step_s"]))
        is_plain = variant.is_plain
        model = "" if is_plain else f"{row['after_nbytes'] / MIB:.0f}"
        peak = "" if is_plain else f"{row['step_peak_nbytes'] / MIB:.0f}"
        lines.append(
            f"| {variant.title} | {statistics.median(row['step_s']):.3f} | {ratio.median:.2f} ({ratio.low:.2f} – "
            f"{ratio.high:.2f}) | {variant.aim} | {model} | {peak} |"
        )
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Seconds of a step, and bytes, with half of the blocks frozen.")
    parser.add_argument("--epochs", type=int, default=8, help="that are timed, of each variant (default: %(default)s)")
    parser.add_argument("--device", type=float, default=0.5, help="cap on DEVICE, x weights (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a small model: tries the harness, measures nothing")
    arguments = parse(parser)
    if arguments.epochs < 1 or arguments.device <= 0:
        parser.error("--epochs must be at least 1, --device above 0")
    if arguments.quick:
        arguments.epochs = 2
    return arguments


if __name__ == "__main__":
    sys.exit(carry_out(parse_arguments(), measure, table, readme=README))
