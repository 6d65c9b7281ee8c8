"""A planned step makes the host wait for the device once, for the norm, where it clips; else never.

torch reports each call that does: copies from and to pageable memory, `.item()`, `nonzero`. What waits for an event, as
for the end of a copy, is no such call, and is told by `manager.timeline()`.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import chunkmem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH, NUM_LAYERS = 512, 8
SLAB_NBYTES = 4 * (WIDTH * WIDTH + WIDTH)


def num_waits(device_nbytes: int, *, clips: bool, keys: dict[str, Any], fused: bool = False) -> int:
    """Return how many calls of one planned step wait for the device."""
    config = {
        "default_chunk_size": WIDTH * WIDTH + WIDTH,
        "memory": {"device": device_nbytes, "host": 1 << 30},
        **keys,
    }
    torch.manual_seed(0)
    batch = torch.randn(32, WIDTH, device="cuda")
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(config)) as manager:
        with manager.init():
            model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)))
        if fused:
            optimizer: Any = chunkmem.Optimizer(torch.optim.AdamW, model.parameters(), manager=manager, fused=True)
        else:
            optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        for step in range(6):
            torch.cuda.synchronize()
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn" if step == 5 else "default")
                try:
                    manager.backward(model(batch).float().square().mean())
                    if clips:
                        optimizer.clip_grad_norm_(1e-3)
                    optimizer.step()
                    optimizer.zero_grad()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
        return sum("synchroniz" in str(each.message) for each in found)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("device_nbytes", [256 << 20, 14 * SLAB_NBYTES + (32 << 20)], ids=["all fits", "tight"])
@pytest.mark.parametrize(
    "keys",
    [{}, {"precision": "bf16"}, {"precision": "bf16", "optimizer": {"params": {"states": "8bit"}}}],
    ids=["fp32", "bf16", "8 bits"],
)
def test_a_planned_step_waits_for_the_norm_alone(device_nbytes: int, clips: bool, keys: dict[str, Any]) -> None:
    assert num_waits(device_nbytes, clips=clips, keys=keys) <= clips


def test_any_class_waits_no_more() -> None:
    assert num_waits(256 << 20, clips=True, keys={}, fused=True) <= 1
