"""Scripts that libraries ship, unchanged, in plain PyTorch and by `chunkmem run`: equal numbers, and in what memory?

Each trains four steps of a small model, twice: as Python runs it and in chunks, under a cap that holds a part of them.
Compared are all lines that it logs (losses, norms, rates, rewards) and the weights that it saves, to the bit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

from benchmarks.program import BenchmarkError, Results, carry_out, parse, surroundings
from chunkmem.data.sizes import format_nbytes
from chunkmem.data.types import Tier
from chunkmem.report.run import load_run
from chunkmem.report.summary import PlainPyTorch
from tests.helpers.upstream_scripts import SCRIPTS, prepare, run

PACKAGES = ("trl", "transformers", "accelerate", "peft", "torch")
CONFIG = {"memory": {"device": "64KiB"}, "default_chunk_size": 2304}


def measure(arguments: argparse.Namespace) -> Results:
    """Run all scripts both ways.

    Raises:
        BenchmarkError: what one logs or saves differs.
    """
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        prepare(folder)
        (folder / "chunkmem.json").write_text(json.dumps(CONFIG))
        for name, (file, *words) in SCRIPTS.items():
            lines, weights = run(name, folder)
            launcher = ("-m", "chunkmem", "run", "--record", name, "chunkmem.json")
            ours, ours_weights = run(name, folder, launcher)
            is_equal = weights.keys() == ours_weights.keys() and all(
                torch.equal(value, ours_weights[key]) for key, value in weights.items()
            )
            if lines != ours or not is_equal or not weights:
                raise BenchmarkError(f"{name}: what {file} logs or saves in chunks is not what it is in plain PyTorch")
            recorded = load_run(folder / name)
            rows.append(
                {
                    "name": name,
                    "file": file,
                    "arguments": words,
                    "num_lines": len(lines),
                    "num_tensors": len(weights),
                    "model_nbytes": PlainPyTorch.of(recorded.trace).model_nbytes,
                    "device_nbytes": recorded.happened.peak_nbytes[Tier.DEVICE],
                    "plan_misses": recorded.happened.plan_misses,
                }
            )
    found = surroundings()
    versions = {package: version(package) for package in PACKAGES}
    return {**found, "versions": {**found["versions"], **versions}, "config": CONFIG, "rows": rows}


def table(results: Results) -> str:
    """Return a row a script."""
    lines = [
        ", ".join(f"{package} {results['versions'][package]}" for package in PACKAGES),
        "",
        "| script | lines edited | lines logged | tensors saved | weights, gradients and states | of those on DEVICE |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in results["rows"]:
        lines.append(
            f"| {row['name']}: `{row['file']}` | 0 | {row['num_lines']}, equal | {row['num_tensors']}, equal "
            f"| {format_nbytes(row['model_nbytes'])} | {format_nbytes(row['device_nbytes'])} |"
        )
    return "\n".join(lines)


def main() -> int:
    arguments = parse(argparse.ArgumentParser(description=__doc__))
    return carry_out(arguments, measure, table, readme=Path(__file__).parent / "README.md")


if __name__ == "__main__":
    raise SystemExit(main())
