"""How long does an optimizer update take on the host? The README beside this file tells the method."""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

if not __package__:  # Run as a file: find the other modules where `python -m` finds them.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.program import BenchmarkError, carry_out, command, parse, surroundings
from benchmarks.stats import median_interval, paired_ratios
from chunkmem.optim.codes import BLOCK, SIGNED, UNSIGNED
from chunkmem.optim.kernels import Kernels, load_kernels
from chunkmem.optim.segments import HyperParameters, Outputs, SegmentPass, Segments

HERE = Path(__file__).parent
HYPER = HyperParameters([1e-4], [0.9], [0.95], [1e-8], [0.1], [10])
MAX_NORM = 1.0
TORCH_FP32, TORCH_FP32_AGAIN, OURS_FP32 = "torch, fp32", "torch, fp32, again", "chunkmem, fp32"
TORCH_BF16, OURS_BF16 = "torch, bf16 and clipping", "chunkmem, bf16 and clipping"
INTO_FP32, INTO_BF16 = "chunkmem, fp32, into", "chunkmem, bf16 without the norm, into"
OURS_BF16_ONLY, OURS_NORM, COPY = "chunkmem, bf16 without the norm", "chunkmem, norm of bf16", "copy past the caches"
EIGHT_BIT, EIGHT_BIT_AGAIN = "chunkmem, states in 8 bits", "chunkmem, states in 8 bits, again"
EIGHT_BIT_ALONE = "chunkmem, states in 8 bits, no masters"
COPY_EIGHT_BIT, COPY_ALONE = "copy of as many bytes as states in 8 bits", "copy of as many bytes as without masters"
STATE_NBYTES = 1 + 4 / BLOCK
"""A code, and the part of a scale."""
NBYTES = {
    TORCH_FP32: 28,
    TORCH_FP32_AGAIN: 28,
    OURS_FP32: 28,
    TORCH_BF16: 58,
    OURS_BF16: 30,
    OURS_BF16_ONLY: 28,
    INTO_FP32: 28,
    INTO_BF16: 28,
    OURS_NORM: 2,
    COPY: 28,
    EIGHT_BIT: 12 + 4 * STATE_NBYTES,
    EIGHT_BIT_AGAIN: 12 + 4 * STATE_NBYTES,
    EIGHT_BIT_ALONE: 6 + 4 * STATE_NBYTES,
    COPY_EIGHT_BIT: 12 + 4 * STATE_NBYTES,
    COPY_ALONE: 6 + 4 * STATE_NBYTES,
}
"""What is read and written, for a parameter: of an update p, m, v and the gradient, then p, m, v and the output."""
RATIOS = (
    (TORCH_FP32_AGAIN, TORCH_FP32, "A/A"),
    (OURS_FP32, TORCH_FP32, "≤ 1.00"),
    (OURS_FP32, COPY, "≤ 1.11"),
    (TORCH_BF16, OURS_BF16, "≥ 3"),
    (OURS_BF16_ONLY, COPY, "≤ 1.11"),
    (INTO_FP32, OURS_FP32, "≤ 1.15"),
    (INTO_BF16, OURS_BF16_ONLY, "≤ 1.15"),
    (EIGHT_BIT_AGAIN, EIGHT_BIT, "A/A"),
    (EIGHT_BIT, COPY_EIGHT_BIT, "≤ 1.11"),
    (EIGHT_BIT_ALONE, COPY_ALONE, "≤ 1.11"),
)
"""What is divided by what, and the aim. 1.11 is 0.9 times the bytes a second of the copy."""


class Bench:
    """The tensors of one large chunk, and everything that is timed on them."""

    def __init__(self, numel: int, kernels: Kernels) -> None:
        self.kernels = kernels
        draw = torch.Generator().manual_seed(0)
        self.grad = torch.randn(numel, generator=draw)
        self.param = torch.randn(numel, generator=draw)
        self.states = [torch.zeros(numel), torch.ones(numel)]
        self.grad_bf16 = self.grad.bfloat16()
        self.cast_grad = torch.empty(numel)
        self.out = torch.empty(numel, dtype=torch.bfloat16)
        # Touched, so that their pages exist; as are those below.
        self.outputs = [torch.ones(numel) for _ in range(3)]
        self.copied = [torch.ones(NBYTES[COPY] // 2 * numel, dtype=torch.uint8) for _ in range(2)]
        self.codes = [torch.zeros(codes.numel_of(numel), dtype=torch.uint8) for codes in (SIGNED, UNSIGNED)]
        self.pool = ThreadPoolExecutor(torch.get_num_threads())
        self.copy_past_caches = load_copy()

    def variants(self) -> dict[str, Callable[[], object]]:
        return {
            TORCH_FP32: lambda: self.torch_adamw_(self.grad),
            TORCH_FP32_AGAIN: lambda: self.torch_adamw_(self.grad),
            OURS_FP32: lambda: self.kernels.adamw_(self.segments(self.grad), HYPER),
            TORCH_BF16: self.torch_chain,
            OURS_BF16: self.ours_clipped,
            OURS_BF16_ONLY: lambda: self.kernels.adamw_(self.segments(self.grad_bf16, self.out), HYPER),
            INTO_FP32: lambda: self.into(self.grad),
            INTO_BF16: lambda: self.into(self.grad_bf16, self.out),
            OURS_NORM: lambda: self.kernels.norm_and_finite([self.grad_bf16]),
            COPY: lambda: self.copy(NBYTES[COPY]),
            EIGHT_BIT: lambda: self.eight_bit(self.param, self.out),
            EIGHT_BIT_AGAIN: lambda: self.eight_bit(self.param, self.out),
            EIGHT_BIT_ALONE: lambda: self.eight_bit(self.out),
            COPY_EIGHT_BIT: lambda: self.copy(NBYTES[COPY_EIGHT_BIT]),
            COPY_ALONE: lambda: self.copy(NBYTES[COPY_ALONE]),
        }

    def segments(self, grad: torch.Tensor, *outs: torch.Tensor) -> Segments:
        return Segments([self.param], [grad], *([state] for state in self.states), list(outs))

    def torch_adamw_(self, grad: torch.Tensor) -> None:
        lists = ([self.param], [grad], *([state] for state in self.states), [], [torch.tensor(float(HYPER.step[0]))])
        torch._fused_adamw_(
            *lists,
            lr=HYPER.lr[0],
            beta1=HYPER.beta1[0],
            beta2=HYPER.beta2[0],
            weight_decay=HYPER.weight_decay[0],
            eps=HYPER.eps[0],
            amsgrad=False,
            maximize=False,
        )

    def torch_chain(self) -> None:
        """Do what one has to write by hand; no call allocates."""
        self.cast_grad.copy_(self.grad_bf16)
        norm = torch.linalg.vector_norm(self.cast_grad)
        self.cast_grad.mul_(torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0))
        self.torch_adamw_(self.cast_grad)
        self.out.copy_(self.param)

    def ours_clipped(self) -> None:
        squares, is_finite = self.kernels.norm_and_finite([self.grad_bf16]).tolist()
        if not is_finite:
            raise BenchmarkError("a gradient is not finite")
        coefficient = min(1.0, MAX_NORM / (squares**0.5 + 1e-6))
        self.kernels.adamw_(self.segments(self.grad_bf16, self.out), HYPER, SegmentPass(clip_coefficient=coefficient))

    def into(self, grad: torch.Tensor, *outs: torch.Tensor) -> None:
        outputs = Outputs(*([output] for output in self.outputs))
        self.kernels.adamw_(self.segments(grad, *outs), HYPER, outputs=outputs)

    def eight_bit(self, weights: torch.Tensor, *outs: torch.Tensor) -> None:
        """Update weights in fp32, also rounded to `outs`, or in bf16; bf16 gradients, stochastic rounding, in place."""
        exp_avgs, exp_avg_sqs = ([codes] for codes in self.codes)
        segments = Segments([weights], [self.grad_bf16], exp_avgs, exp_avg_sqs, list(outs))
        self.kernels.adamw_(segments, HYPER, keys=[1])

    def results(self, name: str) -> list[torch.Tensor]:
        """Return the parameters and states that one run of a variant makes."""
        self.variants()[name]()
        return self.outputs if name in (INTO_FP32, INTO_BF16) else [self.param, *self.states]

    def copy(self, nbytes_per_param: float) -> None:
        """Copy as many bytes as an update reads and writes."""
        source, target = (tensor.data_ptr() for tensor in self.copied)
        nbytes = int(nbytes_per_param / 2 * self.param.numel())
        share = -(-nbytes // torch.get_num_threads())
        bounds = [(begin, min(share, nbytes - begin)) for begin in range(0, nbytes, share)]
        list(self.pool.map(lambda b: self.copy_past_caches(target + b[0], source + b[0], b[1]), bounds))


@functools.cache
def load_copy() -> Callable[[int, int, int], None]:
    """Compile copy.c, which takes addresses and a number of bytes."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "copy.so"
        command_line = ["cc", "-O3", "-shared", "-fPIC", str(HERE / "copy.c"), "-o", str(library)]
        subprocess.run(command_line, check=True)
        function = ctypes.CDLL(str(library)).copy_past_caches
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    function.restype = None
    return function  # type: ignore[no-any-return]


def check(kernels: Kernels) -> None:
    """Compare the results of what is timed, on a small chunk.

    Raises:
        BenchmarkError: they differ.
    """
    pairs = (
        (TORCH_FP32, OURS_FP32, 0.0),
        (TORCH_BF16, OURS_BF16, 1e-5),
        (OURS_FP32, INTO_FP32, 0.0),
        (OURS_BF16_ONLY, INTO_BF16, 0.0),
    )
    for name, other, tolerance in pairs:
        results = [Bench(1 << 16, kernels).results(variant) for variant in (name, other)]
        if not all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(*results, strict=True)):
            raise BenchmarkError(f"{name} and {other} give different parameters or states")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what the command line asks for and return it with all that is needed to repeat it."""
    torch.set_num_threads(arguments.threads)
    kernels = load_kernels()
    if "cpu" not in kernels.native_devices:
        raise BenchmarkError("the native kernels could not be built")
    check(kernels)
    bench = Bench(arguments.numel, kernels)
    variants = bench.variants()
    times_s: dict[str, list[float]] = {name: [] for name in variants}
    before = os.getloadavg()[0]
    draw = random.Random(0)
    clock = time.process_time if arguments.threads == 1 else time.perf_counter
    for turn in tqdm(range(-arguments.warmup, arguments.turns), unit="turn", disable=None):
        for name in draw.sample(list(variants), len(variants)):
            began_s = clock()
            variants[name]()
            if turn >= 0:
                times_s[name].append(clock() - began_s)
    return {
        "command": command("adam"),
        **surroundings(),
        "load_average_1min": [before, os.getloadavg()[0]],
        "numel": arguments.numel,
        "num_threads": arguments.threads,
        "best_level": torch.ops.chunkmem._best_level(),
        "times_s": times_s,
    }


def table(results: Mapping[str, Any]) -> str:
    """Return the Markdown of `results`."""
    hardware, versions, times_s = results["hardware"], results["versions"], results["times_s"]
    lines = [
        f"`{results['command']}`",
        "",
        f"{hardware['cpu']} ({hardware['cpu_capability']}), {hardware['num_cpus']} cores, "
        f"{hardware['memory_nbytes'] / 2**30:.0f} GiB; Python {versions['python']}, torch {versions['torch']}, "
        f"{versions['os']}. {results['numel'] / 2**20:.0f} Mi parameters, {results['num_threads']} threads, "
        f"{len(times_s[COPY])} turns. Load average before and after: "
        f"{', '.join(f'{load:.1f}' for load in results['load_average_1min'])}.",
        "",
        "| | ns a parameter, median | fastest – slowest | bytes a parameter | GB/s |",
        "|---|---|---|---|---|",
    ]
    for name, times in times_s.items():
        low, middle, high = (1e9 * f(times) / results["numel"] for f in (min, statistics.median, max))
        lines.append(
            f"| {name} | {middle:.3f} | {low:.3f} – {high:.3f} | {NBYTES[name]:.4g} | {NBYTES[name] / middle:.1f} |"
        )
    lines += ["", "| ratio of times, in each turn | median | 95 % interval | aim |", "|---|---|---|---|"]
    for name, base, aim in RATIOS:
        if not {name, base} <= times_s.keys():  # an earlier run, before there was this pair
            continue
        interval = median_interval(paired_ratios(times_s[name], times_s[base]))
        lines.append(f"| {name} / {base} | {interval.median:.3f} | {interval.low:.3f} – {interval.high:.3f} | {aim} |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time of an optimizer update on the host, beside torch's and a copy.")
    parser.add_argument("--numel", type=int, default=64 << 20, help="parameters (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=31, help="times everything is run (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="turns that do not count (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads (default: %(default)s)")
    arguments = parse(parser)
    if min(arguments.numel, arguments.turns, arguments.threads) < 1 or arguments.warmup < 0:
        parser.error("--numel, --turns and --threads must be at least 1, --warmup at least 0")
    return arguments


def main() -> int:
    """Run, save and show; return the exit status."""
    return carry_out(parse_arguments(), run, table, readme=HERE / "README.md")


if __name__ == "__main__":
    sys.exit(main())
