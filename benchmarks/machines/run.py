"""What goes over a slow link between two machines, and how long is a step? The README in this folder has it."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.machines.training import NUM_MACHINES, NUM_RANKS_EACH, NUM_WARMUP_STEPS
from benchmarks.program import BenchmarkError, carry_out, command, parse, surroundings

HERE = Path(__file__).parent
VARIANTS = {
    "ddp": "DDP",
    "fsdp2": "FSDP2 over all 4 ranks",
    "all p2p": "chunkmem over all 4 ranks, point to point (`null`)",
    "all grouped": "the same, grouped (`false`)",
    "all saving": "the same, memory-saving (`true`)",
    "fsdp2-hybrid": "FSDP2, hybrid 2 × 2",
    "hybrid p2p": "chunkmem, hybrid 2 × 2, point to point (`null`)",
    "hybrid grouped": "the same, grouped (`false`)",
    "hybrid saving": "the same, memory-saving (`true`)",
}
LIMIT_S = 600.0
"""A training that takes longer than this has failed."""


@contextmanager
def machines(rate: str) -> Iterator[list[str]]:
    """Set up network namespaces that a link of `rate` joins, in both directions; yield the names of two.

    Raises:
        BenchmarkError: this process may not, or has no `ip` and `tc`.
    """
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise BenchmarkError(f"there is no {' and no '.join(missing)}: install iproute2")
    names = [f"cm{os.getpid()}-{at}" for at in range(NUM_MACHINES)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that they go
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run(*f"ip link add nic0 netns {names[0]} type veth peer name nic1 netns {names[1]}".split())
        for at, name in enumerate(names):
            _run(*f"ip -n {name} addr add 10.9.0.{at + 1}/24 dev nic{at}".split())
            _run(*f"ip -n {name} link set nic{at} up".split())
            _run(*f"ip -n {name} link set lo up".split())
            limit = f"tc qdisc add dev nic{at} root tbf rate {rate} burst 128kb latency 100ms"
            _run(*f"ip netns exec {name} {limit}".split())
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise BenchmarkError(f"{' '.join(words)}: {done.stderr.strip()}; network namespaces need root")


def train(variant: str, names: Sequence[str], num_steps: int) -> dict[str, Any]:
    """Train one variant over the machines, and return what rank 0 has measured.

    Raises:
        BenchmarkError: a rank has failed, or takes too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        ranks = []
        for rank in range(NUM_MACHINES * NUM_RANKS_EACH):
            at = rank // NUM_RANKS_EACH
            job = {"RANK": rank, "WORLD_SIZE": NUM_MACHINES * NUM_RANKS_EACH, "MASTER_ADDR": "10.9.0.1"}
            job |= {"LOCAL_RANK": rank % NUM_RANKS_EACH, "LOCAL_WORLD_SIZE": NUM_RANKS_EACH, "MASTER_PORT": 29500}
            job |= {"GLOO_SOCKET_IFNAME": f"nic{at}", "OMP_NUM_THREADS": 1, "TORCH_CPP_LOG_LEVEL": "ERROR"}
            training = [sys.executable, "-m", "benchmarks.machines.training", variant, f"nic{at}", str(num_steps), out]
            environment = os.environ | {name: str(value) for name, value in job.items()}
            said = (Path(folder) / f"{rank}.log").open("w+")
            process = subprocess.Popen(
                ["ip", "netns", "exec", names[at], *training], env=environment, stdout=said, stderr=subprocess.STDOUT
            )
            ranks.append((process, said))
        try:
            for process, _ in ranks:
                process.wait(LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError(f"{VARIANTS[variant]}: not over after {LIMIT_S:.0f} s") from error
        finally:
            for process, _ in ranks:
                process.kill()
        for rank, (process, said) in enumerate(ranks):
            if process.wait():
                said.seek(0)
                raise BenchmarkError(f"{VARIANTS[variant]}, rank {rank}:\n{said.read()[-2000:]}")
        return dict(json.loads(out.read_text(encoding="utf-8")))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train all variants in turn, in several turns."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in VARIANTS}
    with machines(arguments.rate) as names:
        for turn in tqdm(range(arguments.turns), desc="turns", disable=None):
            for variant in found if turn % 2 == 0 else reversed(found):
                found[variant].append(train(variant, names, arguments.steps + NUM_WARMUP_STEPS))
    rows = {name: _row(runs) for name, runs in found.items()}
    for name, row in rows.items():
        if abs(row["loss"] - rows["ddp"]["loss"]) > 1e-4:
            raise BenchmarkError(f"{name} has a loss of {row['loss']}, and DDP one of {rows['ddp']['loss']}")
    return surroundings() | {
        "command": command("machines"),
        "rate": arguments.rate,
        "steps": arguments.steps * arguments.turns,
        "load_average": os.getloadavg(),
        "weights_nbytes": found["ddp"][0]["weights_nbytes"],
        "rows": rows,
    }


def _row(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    steps = [step for run in runs for step in run["steps"]]
    seconds = [step["seconds"] for step in steps]
    row = {
        key: statistics.median(step[key] for step in steps) / runs[0]["weights_nbytes"] for key in ("sent", "received")
    }
    row |= {"seconds": statistics.median(seconds), "low": min(seconds), "high": max(seconds)}
    predicted = [run["predicted_s"] for run in runs if run["predicted_s"] is not None]
    return row | {"predicted_s": statistics.median(predicted) if predicted else None, "loss": steps[-1]["loss"]}


def table(results: Mapping[str, Any]) -> str:
    """Return the README's table."""
    hardware = results["hardware"]
    lines = [
        f"`{results['command']}`",
        "",
        f"{hardware['cpu']}, {hardware['num_cpus']} cores; torch {results['versions']['torch']}; "
        f"{results['weights_nbytes'] / 2**20:.1f} MiB of weights (P), a link of {results['rate']} each way; "
        f"{results['steps']} steps; load average at the end: {results['load_average'][0]:.1f}.",
        "",
        "| | sent to the other machine, × P | received, × P | step, median s | least, most | as planned, s |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in results["rows"].items():
        planned = "" if row["predicted_s"] is None else f"{row['predicted_s']:.2f}"
        lines.append(
            f"| {VARIANTS[name]} | {row['sent']:.2f} | {row['received']:.2f} | {row['seconds']:.2f} "
            f"| {row['low']:.2f}, {row['high']:.2f} | {planned} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", default="200mbit", help="of the link, as `tc` writes it; default: %(default)s")
    parser.add_argument("--steps", type=int, default=8, help="that are measured in each turn; default: %(default)s")
    parser.add_argument("--turns", type=int, default=2, help="of all variants; default: %(default)s")
    return carry_out(parse(parser), measure, table, readme=HERE / "README.md")


if __name__ == "__main__":
    sys.exit(main())
