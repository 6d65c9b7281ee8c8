"""A training script in plain PyTorch, with all that such scripts have, of which three lines change.

Its loop is that of nanoGPT: the model makes its optimizer, the learning rate is set by hand, micro-batches add up, a
GradScaler is always there, gradients are clipped by torch, and checkpoints are one file.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from tests.helpers.training import compute_device
from tests.helpers.twins import Blocks, assert_equal, config, copied, cpu_only, features

CAP_NBYTES = 12_000
MICRO_BATCHES = 3
MAX_NORM = 0.2


class Model(Blocks):
    """A table that can be cut after loading, and an optimizer of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.places[: len(x)])

    def crop(self, num_places: int) -> None:
        self.places = nn.Parameter(self.places[:num_places])

    def configure_optimizers(self, lr: float) -> torch.optim.Optimizer:
        params = [param for param in self.parameters() if param.requires_grad]
        groups = [
            {"params": [param for param in params if param.dim() >= 2], "weight_decay": 0.1},
            {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def script(
    manager: chunkmem.ChunkManager | None, file: Path, *, steps: range, precision: torch.dtype, scale: float | None
) -> Any:
    """Train; losses and norms, and what is left. It resumes where the steps begin later, and saves in the end."""
    torch.manual_seed(3)
    model = Model()
    model.crop(4)
    saved = torch.load(file, weights_only=False) if steps.start else None
    if saved is not None:
        model.load_state_dict(saved["model"])
    if manager is None:
        model.to(compute_device())
    else:
        model = manager.wrap(model)  # in place of model.to(device)
    optimizer: Any = model.configure_optimizers(1e-2)
    if manager is not None:
        optimizer = manager.optimizer(optimizer)
    scaler = torch.amp.GradScaler(
        compute_device().type, enabled=scale is not None, init_scale=scale or 1.0, growth_interval=2
    )
    if saved is not None:
        optimizer.load_state_dict(saved["optimizer"])
    seen = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 + math.cos(step))
        for micro in range(MICRO_BATCHES):
            with torch.autocast(compute_device().type, dtype=precision, enabled=precision is not torch.float32):
                loss = model(features(MICRO_BATCHES * step + micro)).float().square().mean() / MICRO_BATCHES
            if step == 2 and scale is not None:
                loss = loss * math.inf  # this step is left out, and the scale halved
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        seen += [loss.item(), norm.item(), scaler.get_scale()]
        if step % 2:
            model.eval()
            with torch.no_grad():
                seen.append(model(features(100 + step)).sum().item())
            model.train()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return copied([str(seen), dict(model.state_dict()), optimizer.state_dict()["state"]])


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:.*autocast.*:UserWarning")
@pytest.mark.parametrize(
    ("precision", "scale"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, 2.0**12), (torch.float16, 2.0**12)],
    ids=["fp32", "autocast", "scaled", "fp16"],
)
def test_a_loop_with_all_that_loops_have(precision: torch.dtype, scale: float | None, tmp_path: Path) -> None:
    options = {"steps": range(6), "precision": precision, "scale": scale}
    expected = script(None, tmp_path / "plain.pt", **options)
    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        assert_equal(script(manager, tmp_path / "ours.pt", **options), expected)


@cpu_only
@pytest.mark.parametrize("first", [True, False], ids=["from chunks", "from plain PyTorch"])
def test_its_checkpoint_is_resumed_by_either(first: bool, tmp_path: Path) -> None:
    def half(in_chunks: bool, steps: range) -> Any:
        with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
            own = manager if in_chunks else None
            return script(own, tmp_path / "half.pt", steps=steps, precision=torch.float32, scale=None)

    half(False, range(6))
    expected = half(False, range(6, 9))
    half(first, range(6))
    assert_equal(half(not first, range(6, 9)), expected)
