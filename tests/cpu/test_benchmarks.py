"""Benchmarks can be run: what they have measured is written, and what they keep can be read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from chunkmem.data.trace import Trace
from tests.helpers.programs import run_python

ROOT = Path(__file__).parents[2]
TRACES = sorted((ROOT / "benchmarks" / "knobs" / "traces").glob("chunks-*.json"))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_recorded_traces_are_of_the_format_that_is_read(path: Path) -> None:
    assert Trace.load(path).moments


def test_there_are_recorded_traces() -> None:
    assert TRACES


def test_rows_of_traffic_are_written(tmp_path: Path) -> None:
    """A machine is in each row; its links are keyed by pairs, which JSON has no form for."""
    out = tmp_path / "results.json"
    options = ["--models", "loose", "--steps", "plain", "--out", str(out)]
    done = run_python("-m", "benchmarks.traffic.run", *options, cwd=tmp_path, paths=(ROOT,))
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert rows
    assert all(row["machine"]["links"] for row in rows)


@pytest.mark.full
def test_policies_for_activations_are_compared(tmp_path: Path) -> None:
    """All ways to train that fit compute the same bits, or the run fails."""
    out = tmp_path / "results.json"
    options = ["--quick", "--models", "cnn", "--caps", "2", "--steps", "2", "--out", str(out), "--pictures", "."]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.activations.run", *options]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert (tmp_path / "activations-cnn.png").stat().st_size
    links = json.loads(out.read_text())["models"]["cnn"]["links"]
    assert [len(link["caps"]) for link in links.values()] == [2, 2]
    for link in links.values():
        assert {"auto", "recompute", "checkpoint"} <= set(link["caps"][0]["variants"])


@pytest.mark.full
def test_ways_to_accumulate_are_compared(tmp_path: Path) -> None:
    """All of them compute the same bits, or the run fails; by layer, less moves."""
    out = tmp_path / "results.json"
    options = ["--quick", "--settings", "memory", "--steps", "2", "--no-copies", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.pipeline.run", *options]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    rows = json.loads(out.read_text())["settings"]["memory"]["variants"]
    assert rows["by-layer-always"]["traffic"]["moved_nbytes"] < rows["accumulating"]["traffic"]["moved_nbytes"] / 2


@pytest.mark.full
def test_stages_that_do_not_wait_are_compared_with_1f1b(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    options = ["--quick", "--epochs", "2", "--batches", "3", "--micro-batches", "2", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.pipeline.asynchronous", *options]
    printed = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True).stdout
    rows = json.loads(out.read_text())["variants"]
    assert [len(row["full_s"]) for row in rows.values()] == [2, 2, 2, 2]
    assert len({row["loss"][-1] for row in rows.values()}) == 3, "1F1B twice, and two trainings with a delay"
    assert printed.count("async-1f1b") == 2


@pytest.mark.full
def test_a_disk_is_compared_with_fio(tmp_path: Path) -> None:
    """What is read is what was written, or the run fails. Without fio, its rows say so."""
    out = tmp_path / "results.json"
    sizes = ["--total", "4MiB", "--slab", "1MiB", "--block", "256KiB"]
    options = [*sizes, "--turns", "1", "--folder", str(tmp_path), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.disk.run", *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    results = json.loads(out.read_text())
    assert {"chunkmem", "again", "checks", "busy"} <= set(results["variants"])
    assert ("fio is not installed" in done.stdout) == (results["fio"] is None)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.full
def test_a_step_with_its_states_on_disk_is_timed(tmp_path: Path) -> None:
    """All variants end with the same bits, or the run fails."""
    out = tmp_path / "results.json"
    options = ["--quick", "--loads", "1", "--folder", str(tmp_path), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.disk.step", *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    variants = json.loads(out.read_text())["settings"]["1"]["variants"]
    for name in ("disk", "disk-again"):
        row = variants[name]
        assert row["read_nbytes"] > 0 < row["written_nbytes"]
        assert row["predicted_s"] > 0 == row["plan_misses"]
    assert "aim ≤ 1.10" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
