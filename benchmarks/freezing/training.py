"""How long does a training take in which blocks are frozen epoch by epoch, on two ranks? See `README.md`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tqdm import tqdm

import chunkmem
from benchmarks.freezing.fine_tuning import Samples, pretrained
from benchmarks.freezing.picture import draw
from benchmarks.pipeline.models import Workload, loss_of
from benchmarks.program import BenchmarkError, carry_out, parse, surroundings
from benchmarks.worker import Worker

README = Path(__file__).with_name("training.md")
NUM_RANKS = 2
WORK = Workload(num_layers=12, width=192, num_heads=6, num_sequences=32, num_tokens=64)
QUICK = replace(WORK, num_layers=4, width=32, num_heads=2, num_sequences=8, num_tokens=16)
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
ALPHA = 1 / 3
MICRO_BATCHES = 4
PRETRAINING_STEPS = 300
AMPLE_NBYTES = 4 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Variant:
    """A way to train."""

    name: str
    title: str
    is_frozen: bool = False
    is_given_back: bool = False
    """By `manager.freeze`; else by `requires_grad_(False)` alone."""
    is_elastic: bool = False
    is_cached: bool = False
    paper: str = ""
    """How many times as fast as without freezing PipeTransformer is there, by its own breakdown."""
    aim: str = ""


VARIANTS = (
    Variant("whole", "nothing is frozen: 2 stages", paper="1"),
    Variant("again", "the same again (A/A)"),
    Variant("by-hand", "`requires_grad_(False)`: 2 stages", is_frozen=True, paper="0.95"),
    Variant("frozen", "`manager.freeze`: 2 stages", is_frozen=True, is_given_back=True),
    Variant("elastic", '... and `width="auto"`', is_frozen=True, is_given_back=True, is_elastic=True, paper="2.27"),
    Variant(
        "all",
        '... and the cache: `pipeline(..., freeze=, width="auto", cache=)`',
        is_frozen=True,
        is_given_back=True,
        is_elastic=True,
        is_cached=True,
        paper="2.83",
        aim="≤ 0.5",
    ),
)


@dataclass(frozen=True)
class Epoch:
    """One epoch on one rank."""

    train_s: float
    """Of its steps, and of what comes between epochs: freezing, and dividing the ranks again."""
    validation_loss: float
    num_frozen: int
    """Blocks, while it was trained."""
    num_stages: int
    """Likewise."""
    model_nbytes: int
    """Chunks of weights, gradients and states on both tiers at its end; what is on both counts twice."""
    peak_nbytes: int
    """Of DEVICE."""


class Rank:
    """One of two ranks that train together, in a process of its own."""

    def __init__(self, variant: Variant, work: Workload, num_samples: int, rank: int, folder: str) -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder}/{variant.name}", rank=rank, world_size=NUM_RANKS)
        self._variant, self._work = variant, work
        self._samples = Samples.of_manual(work, num_samples)
        mesh = init_device_mesh("cpu", (NUM_RANKS, 1), mesh_dim_names=("stage", "shard"))
        memory = {"device": AMPLE_NBYTES, "host": AMPLE_NBYTES}
        block_numel = 12 * work.width * work.width + 13 * work.width
        config = {"memory": memory, "default_chunk_size": block_numel}
        self._manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(config), mesh=mesh)
        with self._manager.init():
            model = work.build()
            model.load_state_dict(torch.load(f"{folder}/weights.pt"))
        self._schedule = chunkmem.FreezeSchedule(model.blocks, alpha=ALPHA, first=model.embeddings)
        self._cache = None
        if variant.is_cached:
            value_nbytes = 4 * work.num_tokens * work.width
            self._cache = chunkmem.FrozenCache(self._manager, host=2 * num_samples * value_nbytes)
        self._pipe = self._manager.pipeline(
            model.blocks,
            first=model.embeddings,
            last=model.head,
            loss_fn=loss_of,
            micro_batches=MICRO_BATCHES,
            checkpoint="never",
            schedule="1f1b",
            width="auto" if variant.is_elastic else None,
            freeze=self._schedule if variant.is_given_back else None,
            cache=self._cache,
        )
        self._optimizer = chunkmem.AdamW(model.parameters(), manager=self._manager, **ADAMW)
        self._batches = chunkmem.SplitSampler(num_samples, batch_size=work.num_sequences, manager=self._manager)

    def epoch(self) -> Epoch:
        """Train an epoch, and validate."""
        num_frozen, num_stages = self._schedule.prefix, self._num_stages
        began_s = time.perf_counter()
        for ids in self._batches:
            self._step(ids)
        self._batches.set_epoch(self._batches.epoch + 1)
        self._freeze()
        train_s = time.perf_counter() - began_s
        return Epoch(
            train_s,
            self._validate(),
            num_frozen,
            num_stages,
            self._model_nbytes(),
            self._manager.memory().device.step_peak_nbytes,
        )

    @property
    def _num_stages(self) -> int:
        return self._pipe.num_stages if self._variant.is_elastic else NUM_RANKS

    def _step(self, ids: Sequence[int]) -> None:
        batch = self._samples.training[ids]
        named = {} if self._cache is None else {"ids": ids}
        self._pipe.step(batch[:, :-1], batch[:, 1:], **named)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _freeze(self) -> None:
        if self._variant.is_given_back:
            self._pipe.end_epoch()
        elif self._variant.is_frozen:
            for module in self._schedule.step():
                module.requires_grad_(False)

    def _validate(self) -> float:
        losses = []
        for batch in self._samples.validation.split(self._work.num_sequences):
            part = self._pipe.share(batch) if self._variant.is_elastic else batch
            losses.append(self._pipe.evaluate(part[:, :-1], part[:, 1:]).item())
        total = torch.tensor(losses).mean()
        dist.all_reduce(total)
        return total.item() / NUM_RANKS

    def _model_nbytes(self) -> int:
        memory = self._manager.memory()
        roles = [*memory.device.by_role.items(), *memory.host.by_role.items()]
        return sum(now for role, (now, _) in roles if role not in ("cache", "frozen_cache", "activation"))


class Pair:
    """The ranks of a variant."""

    def __init__(self, variant: Variant, work: Workload, num_samples: int, folder: str, stack: ExitStack) -> None:
        self._pool = stack.enter_context(ThreadPoolExecutor(NUM_RANKS))
        self._ranks = [
            Worker(f"{variant.name}, rank {rank}", Rank, variant, work, num_samples, rank, folder, stack=stack)
            for rank in range(NUM_RANKS)
        ]

    def epoch(self) -> dict[str, Any]:
        """Train one on both ranks at once; return what it was, over both."""
        found: list[Epoch] = list(self._pool.map(lambda rank: rank.ask("epoch"), self._ranks))
        return {
            **asdict(found[0]),
            "train_s": max(each.train_s for each in found),
            "model_nbytes": sum(each.model_nbytes for each in found),
            "peak_nbytes": max(each.peak_nbytes for each in found),
        }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train every variant, one after the other.

    Raises:
        BenchmarkError: a process failed, or the A/A run has other losses.
    """
    work = QUICK if arguments.quick else WORK
    num_samples = arguments.steps * work.num_sequences
    rows: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(pretrained(work, 5 if arguments.quick else PRETRAINING_STEPS), f"{folder}/weights.pt")
        for variant in VARIANTS:
            with ExitStack() as stack:
                pair = Pair(variant, work, num_samples, folder, stack)
                epochs = tqdm(range(arguments.epochs), desc=variant.name, disable=None)
                rows[variant.name] = [pair.epoch() for _ in epochs]
    losses = {name: [epoch["validation_loss"] for epoch in row] for name, row in rows.items()}
    for name, other in (("again", "whole"), ("frozen", "by-hand")):
        if losses[name] != losses[other]:
            raise BenchmarkError(f"{name}: losses are not those of {other}, to the bit")
    return {
        "command": shlex.join(["python", "-m", "benchmarks.freezing.training", *sys.argv[1:]]),
        **surroundings(),
        **asdict(work),
        "param_nbytes": work.param_nbytes,
        "alpha": ALPHA,
        "steps": arguments.steps,
        "variants": rows,
        "load_average": os.getloadavg()[0],
    }


def reached_s(epochs: Sequence[Mapping[str, Any]], loss: float) -> float | None:
    """Return the seconds of training until the validation loss is so small; None: it never is."""
    passed_s = 0.0
    for epoch in epochs:
        passed_s += epoch["train_s"]
        if epoch["validation_loss"] <= loss:
            return passed_s
    return None


def table(results: Mapping[str, Any]) -> str:
    """Return the Markdown of `results`."""
    hardware, rows = results["hardware"], results["variants"]
    whole = rows["whole"]
    whole_s, least = sum(epoch["train_s"] for epoch in whole), min(epoch["validation_loss"] for epoch in whole)
    lines = [
        f"`{results['command']}`\n",
        f"{hardware['cpu']}, {hardware['num_cpus']} cores, 2 ranks of 1 thread; torch {results['versions']['torch']}; "
        f"{results['num_layers']} blocks, {results['param_nbytes'] / MIB:.0f} MiB of weights, {len(whole)} epochs of "
        f"{results['steps']} steps; alpha {results['alpha']:.2f}. Load average at the end: "
        f"{results['load_average']:.1f}.\n",
        "| variant | seconds | x of nothing frozen | aim | times as fast | PipeTransformer's own | smallest validation "
        f"loss | seconds until {least * 1.005:.3f} | model data at the end, MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for variant in VARIANTS:
        epochs = rows[variant.name]
        seconds = sum(epoch["train_s"] for epoch in epochs)
        reached = reached_s(epochs, least * 1.005)
        lines.append(
            f"| {variant.title} | {seconds:.0f} | {seconds / whole_s:.2f} | {variant.aim} | {whole_s / seconds:.2f} | "
            f"{variant.paper} | {min(epoch['validation_loss'] for epoch in epochs):.3f} | "
            f"{'never' if reached is None else f'{reached:.0f}'} | {epochs[-1]['model_nbytes'] / MIB:.0f} |"
        )
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="A training with blocks that are frozen epoch by epoch, on 2 ranks.")
    parser.add_argument("--epochs", type=int, default=10, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="of an epoch (default: %(default)s)")
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw depth, memory and time of a step, by epoch")
    parser.add_argument("--quick", action="store_true", help="a small model: tries the harness, measures nothing")
    arguments = parse(parser)
    if arguments.epochs < 1 or arguments.steps < 1:
        parser.error("--epochs and --steps must be at least 1")
    if arguments.picture and not arguments.picture.parent.is_dir():
        parser.error(f"--picture: there is no folder {arguments.picture.parent}")
    if arguments.quick:
        arguments.epochs, arguments.steps = 4, 2
    return arguments


def main() -> int:
    """Run, save and show; return the exit status."""
    arguments = parse_arguments()

    def then(results: Mapping[str, Any]) -> None:
        if arguments.picture:
            draw(results, arguments.picture)

    return carry_out(arguments, measure, table, readme=README, then=then)


if __name__ == "__main__":
    sys.exit(main())
