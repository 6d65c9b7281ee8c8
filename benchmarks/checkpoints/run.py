"""How long does saving take, and how much memory? The README beside this file tells the method."""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from tqdm import tqdm

import chunkmem
from benchmarks.program import BenchmarkError, carry_out, command, parse, surroundings
from benchmarks.worker import Worker
from chunkmem.data.sizes import format_nbytes

HERE = Path(__file__).parent
NUM_LAYERS = 72
NUM_TIMES = 3
"""A process saves and loads so often; the last time counts."""


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    name: str
    title: str
    chunked: bool = True


VARIANTS = (
    Variant("chunkmem", "chunkmem, `manager.save`"),
    Variant("again", "chunkmem, `manager.save`, again (A/A)"),
    Variant("lazy", "chunkmem, `torch.save` of lazy `state_dict`s"),
    Variant("copies", "chunkmem, `torch.save` of `state_dict`s"),
    Variant("plain", "plain PyTorch, `torch.save`", chunked=False),
    Variant("fsdp2", "FSDP2, one rank, torch.distributed.checkpoint", chunked=False),
)


def build(width: int) -> nn.Module:
    """Return a model of 72 square layers."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(NUM_LAYERS)))


def peak_nbytes() -> int:
    """Return the most RAM that this process has had since `restart_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def restart_peak() -> int:
    """Forget the peak so far; return the RAM that the process has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_nbytes()


class Trainee:
    """A training after its first step, which is saved and loaded."""

    def __init__(self, variant: Variant, width: int, folder: str) -> None:
        self._path = Path(folder) / variant.name
        train, self._save, self._load = {
            "chunkmem": self._in_chunks,
            "again": self._in_chunks,
            "lazy": self._lazily,
            "copies": self._copied,
            "plain": self._in_plain,
            "fsdp2": self._in_fsdp2,
        }[variant.name](width)
        train(torch.ones(1, width))

    def _chunked(self, width: int) -> tuple[chunkmem.ChunkManager, Any, Callable[[torch.Tensor], None]]:
        config = {"memory": {"device": 32 * width**2, "host": 20 * NUM_LAYERS * width**2}}
        manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(config))
        with manager.init():
            model = build(width)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)

        def train(x: torch.Tensor) -> None:
            manager.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()

        return manager, optimizer, train

    def _in_chunks(self, width: int) -> Any:
        manager, optimizer, train = self._chunked(width)
        return train, lambda: manager.save(self._path, optimizer), lambda: manager.load(self._path, optimizer)

    def _lazily(self, width: int) -> Any:
        return self._in_one_file(width, lazy=True)

    def _copied(self, width: int) -> Any:
        return self._in_one_file(width, lazy=False)

    def _in_one_file(self, width: int, *, lazy: bool) -> Any:
        manager, optimizer, train = self._chunked(width)

        def save() -> None:
            state = {"model": manager.state_dict(lazy=lazy), "optimizer": optimizer.state_dict(lazy=lazy)}
            torch.save(state, self._path)

        def load() -> None:
            state = torch.load(self._path, mmap=True)
            manager.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

        return train, save, load

    def _in_torch(self, model: nn.Module) -> tuple[torch.optim.Optimizer, Callable[[torch.Tensor], None]]:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def train(x: torch.Tensor) -> None:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return optimizer, train

    def _in_plain(self, width: int) -> Any:
        model = build(width)
        optimizer, train = self._in_torch(model)

        def save() -> None:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, self._path)

        def load() -> None:
            state = torch.load(self._path, mmap=True)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

        return train, save, load

    def _in_fsdp2(self, width: int) -> Any:
        from torch.distributed.fsdp import fully_shard

        store = dist.FileStore(f"{self._path}.store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        model: Any = build(width)
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        optimizer, train = self._in_torch(model)

        def state() -> dict[str, Any]:
            weights, states = get_state_dict(model, optimizer)
            return {"model": weights, "optimizer": states}

        def load() -> None:
            found = state()
            dcp_load(found, checkpoint_id=self._path)
            set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])

        return train, lambda: dcp_save(state(), checkpoint_id=self._path), load

    def time(self, what: str) -> tuple[float, int, int]:
        """Save or load; return seconds, the RAM that it took, and the bytes on disk."""
        before = restart_peak()
        began_s = time.perf_counter()
        (self._save if what == "save" else self._load)()
        if what == "save":
            os.sync()
        taken_s = time.perf_counter() - began_s
        files = [self._path] if self._path.is_file() else list(self._path.iterdir())
        return taken_s, peak_nbytes() - before, sum(file.stat().st_size for file in files)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Let all variants take turns, in an order drawn again every time.

    Raises:
        BenchmarkError: a process failed.
    """
    width = 256 if arguments.quick else 2048
    draw = random.Random(0)
    found: dict[str, dict[str, list[tuple[float, int, int]]]] = {
        variant.name: {"save": [], "load": []} for variant in VARIANTS
    }
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.folder))
        # One after the other: the models of all would not fit RAM.
        for turn in tqdm(range(arguments.turns), unit="turn", disable=None):
            for variant in draw.sample(VARIANTS, len(VARIANTS)):
                with ExitStack() as own:
                    worker = Worker(variant.name, Trainee, variant, width, folder, stack=own)
                    for what in ("save",) * NUM_TIMES + ("load",) * NUM_TIMES:
                        found[variant.name][what].append(worker.ask("time", what))
                path = Path(folder) / variant.name
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                Path(f"{path}.store").unlink(missing_ok=True)
                if turn == 0 and not found[variant.name]["load"]:
                    raise BenchmarkError(f"{variant.name} has not loaded what it saved")
    return {
        "command": command("checkpoints"),
        **surroundings(),
        "num_params": NUM_LAYERS * width**2,
        "load_average": os.getloadavg(),
        "variants": {
            variant.name: {
                **asdict(variant),
                **{
                    what: [{"taken_s": s, "ram_nbytes": ram, "disk_nbytes": disk} for s, ram, disk in rows]
                    for what, rows in found[variant.name].items()
                },
            }
            for variant in VARIANTS
        },
    }


def table(results: dict[str, Any]) -> str:
    """Return the table of the README, of the last save and the last load of each process."""
    hardware, versions, load = results["hardware"], results["versions"], results["load_average"][0]
    lines = [
        f"`{results['command']}`",
        "",
        f"{hardware['cpu']}, {hardware['num_cpus']} cores; torch {versions['torch']}; "
        f"{results['num_params'] / 1e6:.0f} M parameters in fp32; load average at the end: {load:.1f}.",
        "",
        "| variant | save, median s (range) | more RAM | load, median s (range) | more RAM | on disk |",
        "|---|---|---|---|---|---|",
    ]
    for row in results["variants"].values():
        cells = [row["title"]]
        for what in ("save", "load"):
            later = row[what][NUM_TIMES - 1 :: NUM_TIMES]
            times = [each["taken_s"] for each in later]
            ram = max(each["ram_nbytes"] for each in later)
            cells += [f"{statistics.median(times):.1f} ({min(times):.1f} – {max(times):.1f})", format_nbytes(ram)]
        cells.append(format_nbytes(row["save"][-1]["disk_nbytes"]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Seconds and memory of saving and loading, on a CPU.")
    parser.add_argument("--turns", type=int, default=3, help="processes of each variant (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=HERE.parents[1], help="on the disk to write to (default: here)")
    parser.add_argument("--quick", action="store_true", help="a narrow model, to try the harness")
    return parse(parser)


if __name__ == "__main__":
    sys.exit(carry_out(parse_arguments(), measure, table, readme=HERE / "README.md"))
