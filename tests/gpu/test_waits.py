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
from tests.helpers.occupied import occupied_nbytes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH, NUM_LAYERS = 512, 8
SLAB_NBYTES = 4 * (WIDTH * WIDTH + WIDTH)
AMPLE = 192 << 20
TIGHT = 14 * SLAB_NBYTES
"""For 20 to 32 slabs of chunks and 2 MiB of activations."""


def waits(device_nbytes: int, *, clips: bool, keys: dict[str, Any], fused: bool = False) -> list[str]:
    """Return what of one planned step waits for the device, `device_nbytes` being for chunks and activations."""
    config = {
        "default_chunk_size": WIDTH * WIDTH + WIDTH,
        "memory": {"device": occupied_nbytes() + device_nbytes, "host": 1 << 30},
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
        timeline = manager.timeline()
        assert timeline is not None
        moves = sum(timeline.moved_nbytes.values()) > 0
        assert moves or device_nbytes == AMPLE, f"all of it fits: {timeline}"
        return [f"{each.filename}:{each.lineno}" for each in found if "synchroniz" in str(each.message)]


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("device_nbytes", [AMPLE, TIGHT], ids=["all fits", "tight"])
@pytest.mark.parametrize(
    "keys",
    [{}, {"precision": "bf16"}, {"precision": "bf16", "optimizer": {"params": {"states": "8bit"}}}],
    ids=["fp32", "bf16", "8 bits"],
)
def test_a_planned_step_waits_for_the_norm_alone(device_nbytes: int, clips: bool, keys: dict[str, Any]) -> None:
    found = waits(device_nbytes, clips=clips, keys=keys)
    assert len(found) <= clips, found


def test_any_class_waits_no_more() -> None:
    found = waits(AMPLE, clips=True, keys={}, fused=True)
    assert len(found) <= 1, found
