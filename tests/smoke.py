"""What an installed package has to do at least; `tests/matrix.py` runs it in a folder that has nothing else.

It takes seconds: training in fp32 as in plain PyTorch, bit for bit, and in bf16; a checkpoint; the commands.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import chunkmem

STEPS = 4


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def check_training() -> None:
    """fp32: the bits of plain PyTorch, through a checkpoint."""
    plain = build()
    train(plain, torch.optim.AdamW(plain.parameters(), fused=True), STEPS)
    config = chunkmem.Config.from_dict({"memory": {"device": "64KiB", "host": "8MiB"}, "default_chunk_size": 4200})
    with tempfile.TemporaryDirectory() as folder:
        for steps in (STEPS // 2, STEPS):
            with chunkmem.ChunkManager(config) as manager:
                model = manager.wrap(build())
                optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
                if steps == STEPS:
                    manager.load(f"{folder}/half", optimizer)
                    for step in range(STEPS // 2, STEPS):
                        torch.manual_seed(step)
                        model(torch.randn(4, 64)).square().mean().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    weights = manager.state_dict()
                    assert all(torch.equal(value, weights[name]) for name, value in plain.state_dict().items())
                else:
                    train(model, optimizer, steps)
                    manager.save(f"{folder}/half", optimizer)


def check_low_precision() -> None:
    """bf16: master weights, the native kernels, plans."""
    config = chunkmem.Config.from_dict({"precision": "bf16", "memory": {"device": "64KiB", "host": "8MiB"}})
    with chunkmem.ChunkManager(config) as manager:
        model = manager.wrap(build())
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        train(model, optimizer, STEPS + 2)
        timeline: Any = manager.timeline()
        assert timeline.plan_misses == 0


def main() -> None:
    installed = Path(chunkmem.__file__).resolve()
    assert "site-packages" in installed.parts, f"{installed} is a checkout"
    check_training()
    check_low_precision()
    command = [sys.executable, "-m", "chunkmem"]
    info = json.loads(subprocess.run([*command, "info", "--json"], capture_output=True, check=True).stdout)
    assert info
    subprocess.run([*command, "estimate", "gpt:124m", "--device", "24GiB"], capture_output=True, check=True)
    print(f"chunkmem {chunkmem.__version__} on Python {platform.python_version()} with torch {torch.__version__}: ok")


if __name__ == "__main__":
    main()
