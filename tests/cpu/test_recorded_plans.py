"""Plans of recorded runs have one meaning: in the report, in the simulator, and where a departed step goes on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chunkmem
from tests.helpers.overlapped import WIDTH, Block
from tests.helpers.twins import cpu_only
from tests.unit.test_report_replay import assert_one_meaning


@pytest.mark.few(3)
@cpu_only
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_recorded_run_has_one_meaning(precision: str, hybrid: bool, overlap: bool) -> None:
    """Two micro-batches of five blocks, with updates on DEVICE, on HOST, and ahead of the step."""
    values = {
        "precision": precision,
        "default_chunk_size": 2500,
        "memory": {"device": 96 << 10, "host": 1 << 20},
        "optimizer": {"params": {"use_hybrid_adam": hybrid}},
        "client": {"opts": {"overlap_optimizer": overlap, "undo_log_ratio": 0.5}},
    }
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(values)) as manager:
        with manager.init():
            model = nn.Sequential(*(Block(WIDTH) for _ in range(5)))
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        for _ in range(2):
            for _ in range(2):
                model(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert manager.trace is not None
        assert manager.plan is not None
        assert_one_meaning(manager.plan, manager.trace)
