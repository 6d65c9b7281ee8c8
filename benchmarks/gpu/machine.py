"""Look at the machine that is measured, and at the rates that an earlier probe has found on it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.setting import Card, Setting
from benchmarks.program import Results, surroundings
from chunkmem.runtime.device import ram_nbytes


def find_setting(folder: Path, *, host_nbytes: int | None = None) -> Setting:
    """Look at this machine; a card is looked at in another process, which leaves no context behind on it.

    Raises:
        OSError: there is a card that cannot be used.
    """
    card = None
    if torch.cuda.is_available():
        code = "from benchmarks.gpu import machine; machine.print_card()"
        root = Path(__file__).resolve().parents[2]
        told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
        if told.returncode != 0:
            why = (told.stderr.strip().splitlines() or ["no word of why"])[-1]
            raise OSError(f"there is a CUDA device, but it cannot be used: {why}")
        card = Card(**json.loads(told.stdout.splitlines()[-1]))
    return Setting(card, ram_nbytes(), num_cpus(), folder, host_nbytes)


def print_card() -> None:
    """Print the current CUDA device as JSON."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    free_nbytes, total_nbytes = torch.cuda.mem_get_info()
    card = Card(
        name=properties.name,
        nbytes=total_nbytes,
        free_nbytes=free_nbytes,
        capability=f"{properties.major}.{properties.minor}",
        num_multiprocessors=properties.multi_processor_count,
        l2_nbytes=properties.L2_cache_size,
        driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    )
    print(json.dumps(asdict(card)))


def num_cpus() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def identity(setting: Setting) -> Results:
    """Return what all rows of a file have in common."""
    return {
        "gpu": "none" if setting.card is None else setting.card.name,
        "num_cpus": setting.num_cpus,
        "torch": torch.__version__,
    }


def described(setting: Setting) -> Results:
    """Return the machine, the versions and the settings that figures depend on."""
    found = surroundings()
    found["hardware"] = {**found["hardware"], "usable_ram_nbytes": setting.ram_nbytes, "hardware": setting.hardware,
                         "host_nbytes": setting.host_nbytes}  # fmt: skip
    found["hardware"]["card"] = None if setting.card is None else asdict(setting.card)
    found["versions"]["cuda"] = torch.version.cuda
    found["versions"]["nvcc"] = _output("nvcc", "--version").splitlines()[-1:] if shutil.which("nvcc") else None
    prefixes = ("PYTORCH_", "CUDA_", "NCCL_", "TORCH_")
    found["environment"] |= {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}
    return found


def _output(*command: str) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    return "?"


def speeds(probe: Mapping[str, Any] | None, *, hardware: str) -> dict[str, Any]:
    """Return the rates that lower bounds are worked out with: those of a probe's rows as far as it has them, else
    assumed.

    Args:
        probe: the rows of ``probe.json`` as plain data, or None.
        hardware: a name in `chunkmem.estimate.hardware`.
    """
    from chunkmem.estimate.hardware import HARDWARE

    assumed = HARDWARE[hardware]
    found: dict[str, Any] = {
        "link_Bps": assumed.link_Bps,
        "host_memory_Bps": assumed.host_memory_Bps,
        "flop_per_s": assumed.flop_per_s,
        "memory_Bps": assumed.memory_Bps,
    }
    figures = {key: row.get("figures") or {} for key, row in (probe or {}).items()}
    measured = {
        "link_Bps": _best_link(figures.get("copies, pinned", {})),
        "host_memory_Bps": max(figures.get("host memory", {}).get("triad_Bps", {}).values(), default=None),
        "flop_per_s": figures.get("matmul, bf16", {}).get("best_flop_per_s"),
        "memory_Bps": figures.get("device copy", {}).get("best_Bps"),
    }
    known = {name: value for name, value in measured.items() if value}
    return {**found, **known, "assumed": sorted(found.keys() - known.keys()), "hardware": hardware}


def _best_link(figures: Mapping[str, Any]) -> float | None:
    rates = [max(figures[way].values()) for way in ("h2d_Bps", "d2h_Bps") if figures.get(way)]
    return min(rates, default=None)
