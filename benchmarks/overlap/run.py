"""How much of the optimizer's update hides behind backward? The README beside this file tells the method."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

if not __package__:  # Run as a file: find the other modules where `python -m` finds them.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import chunkmem
from benchmarks.program import BenchmarkError, carry_out, command, parse, surroundings
from benchmarks.stats import MedianInterval, median_interval
from chunkmem.plan.model import Lane

HERE = Path(__file__).parent
AIM = 0.85
VARIANTS = ("waits", "waits again", "overlapped with backward")
PRECISIONS = ("fp32", "bf16")
MAX_NORM = 1e9
"""Clipping is on, and no gradient comes near it."""
LEARNED = 6
"""Steps until plans are followed and their durations are known."""


class Wait(torch.autograd.Function):
    """Passes its input on; backward waits without a core, and has a gradient ready."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: WaitingLayer) -> Tensor:
        ctx.layer, ctx.dtype = layer, weight.dtype  # a read of its weight in backward would hold the chunk
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.layer.wait_s)
        return grad, ctx.layer.gradient.to(ctx.dtype), None


class WaitingLayer(nn.Module):
    """Weights whose gradient takes `wait_s` to compute, on something that is not this processor."""

    def __init__(self, gradient: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros_like(gradient))
        self.gradient = gradient
        self.wait_s = 0.0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Wait.apply(x, self.weight, self)
        return result


class Variant:
    """One model with its manager and optimizer."""

    def __init__(self, name: str, precision: str, *, num_layers: int, layer_numel: int, gradient: Tensor) -> None:
        self.name = name
        nbytes = num_layers * layer_numel * 4
        overlap = name == "overlapped with backward"
        opts = {"overlap_optimizer": overlap, "undo_log_ratio": 0.5}
        config = {
            "precision": precision,
            "default_chunk_size": layer_numel,
            "gradient_clipping": MAX_NORM,
            "memory": {"device": 4 * layer_numel * 4, "host": 8 * nbytes},
            "optimizer": {"params": {"use_hybrid_adam": False}},
            "client": {"opts": opts},
        }
        self.manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(config))
        with self.manager.init():
            self.model = nn.Sequential(*(WaitingLayer(gradient) for _ in range(num_layers)))
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=self.manager, lr=1e-3)
        self.num_layers = num_layers

    def wait(self, seconds: float) -> None:
        """Let backward take so long, over all layers."""
        for layer in self.model:
            layer.wait_s = seconds / self.num_layers  # type: ignore[assignment]

    def step(self) -> dict[str, float]:
        """Train one step; return the seconds of forward and backward, and of the optimizer's step."""
        started_s = time.perf_counter()
        self.manager.backward(self.model(torch.ones(1, requires_grad=True)).sum())
        computed_s = time.perf_counter()
        self.optimizer.step()
        times = {"backward_s": computed_s - started_s, "update_s": time.perf_counter() - computed_s}
        self.optimizer.zero_grad()
        return times

    def check(self) -> None:
        """Check that updates were where they should be.

        Raises:
            BenchmarkError: they were not, so the times mean nothing.
        """
        timeline = self.manager.timeline()
        spans = () if timeline is None else timeline.spans
        ahead = sum(span.lane is Lane.HOST_UPDATE for span in spans)
        wanted = self.num_layers if self.name == "overlapped with backward" else 0
        if ahead != wanted:
            raise BenchmarkError(f"{self.name}: {ahead} of {wanted} updates were begun overlapped with backward")


def measure(precision: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the times of all variants in one precision; they take turns."""
    layer_numel = arguments.numel // arguments.layers
    gradient = torch.full((layer_numel,), 1e-3)
    variants = [
        Variant(name, precision, num_layers=arguments.layers, layer_numel=layer_numel, gradient=gradient)
        for name in VARIANTS
    ]
    for _ in range(LEARNED):
        for variant in variants:
            variant.step()
    alone_s = statistics.median([variant.step()["update_s"] for variant in variants for _ in range(5)][:5])
    draw = random.Random(0)
    for variant in variants:
        variant.wait(arguments.backward * alone_s)
        for _ in range(LEARNED):
            variant.step()
        variant.check()
    times: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for _ in tqdm(range(arguments.rounds), desc=precision, unit="round", disable=None):
        for variant in draw.sample(variants, len(variants)):
            times[variant.name].append(variant.step())
            variant.check()
    same = [variant.manager.state_dict() for variant in variants]
    if not all(torch.equal(value, other[key]) for other in same[1:] for key, value in same[0].items()):
        raise BenchmarkError("the variants have trained to different weights")
    for variant in variants:
        variant.manager.close()
    return {"precision": precision, "wait_s": arguments.backward * alone_s, "times": times}


def hidden_shares(times: Mapping[str, Sequence[Mapping[str, float]]], variant: str) -> list[float]:
    """Return, by round, what part of an update a variant's step does not show: 1 - (T_both - T_backward) / T_update."""
    return [
        1 - (both["backward_s"] + both["update_s"] - alone["backward_s"]) / alone["update_s"]
        for alone, both in zip(times["waits"], times[variant], strict=True)
    ]


def table(results: Mapping[str, Any]) -> str:
    """Return the Markdown of `results`."""
    hardware, versions = results["hardware"], results["versions"]
    lines = [
        f"`{results['command']}`",
        "",
        f"{hardware['cpu']}, {hardware['num_cpus']} cores; {results['threads']} threads; torch {versions['torch']}, "
        f"Python {versions['python']}, {versions['os']}. {results['numel']:,} parameters in "
        f"{results['layers']} chunks, {results['rounds']} rounds. Load average before and after: "
        f"{', '.join(f'{load:.1f}' for load in results['load_average_1min'])}.",
        "",
        "| precision | updates | backward, ms | step(), ms | both, ms | hidden, median (95 % interval) |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in results["rows"]:
        for name in VARIANTS:
            seen = row["times"][name]
            median_ms = [1e3 * statistics.median(one[key] for one in seen) for key in ("backward_s", "update_s")]
            both_ms = 1e3 * statistics.median(one["backward_s"] + one["update_s"] for one in seen)
            shown = "" if name == "waits" else _shown(median_interval(hidden_shares(row["times"], name)))
            lines.append(
                f"| {row['precision']} | {name} | {median_ms[0]:.1f} | {median_ms[1]:.1f} | {both_ms:.1f} | {shown} |"
            )
    return "\n".join(lines)


def _shown(interval: MedianInterval) -> str:
    return f"{100 * interval.median:.1f} % ({100 * interval.low:.1f} to {100 * interval.high:.1f})"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Share of the optimizer's update that hides behind backward.")
    parser.add_argument("--rounds", type=int, default=30, help="steps of each variant (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=16, help="chunks of weights (default: %(default)s)")
    parser.add_argument("--numel", type=int, default=1 << 26, help="parameters (default: %(default)s)")
    parser.add_argument(
        "--backward", type=float, default=2.0, help="its wait, in times of an update (default: %(default)s)"
    )
    arguments = parse(parser)
    if min(arguments.rounds, arguments.layers, arguments.numel // max(1, arguments.layers)) < 1:
        parser.error("--rounds, --layers and the parameters of a layer must be at least 1")
    return arguments


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what the command line asks for and return it with all that is needed to repeat it."""
    before = os.getloadavg()[0]
    rows = [measure(precision, arguments) for precision in PRECISIONS]
    return {
        "command": command("overlap"),
        **surroundings(),
        "threads": torch.get_num_threads(),
        "load_average_1min": [before, os.getloadavg()[0]],
        "numel": arguments.numel,
        "layers": arguments.layers,
        "rounds": arguments.rounds,
        "rows": rows,
    }


def main() -> int:
    """Run, save and show; return the exit status."""
    return carry_out(parse_arguments(), run, table, readme=HERE / "README.md")


if __name__ == "__main__":
    sys.exit(main())
