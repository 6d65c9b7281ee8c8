"""What the first steps of a model of many small layers cost: one is recorded, and after it plans are made."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import chunkmem
from chunkmem.manager import ChunkManager

NUM_FIRST, NUM_LATER = 5, 10
"""Recorded; planned; planned again with better durations up to three times. The rest of a plan's candidates may be
tried beside later ones."""
NUM_ROLES = 4
"""Weights, gradients, and two states of Adam."""


@dataclass(frozen=True)
class ManyLayers:
    """Linear layers in a row on a DEVICE that holds a share of their model data."""

    title: str
    layers_per_chunk: int
    num_layers: int = 1500
    width: int = 32
    device_share: float = 0.4


CASES = (
    ManyLayers("1 500 Linears, a chunk for each", 1),
    ManyLayers("1 500 Linears, a chunk for 4", 4),
    ManyLayers("1 500 Linears, a chunk for 12", 12),
    ManyLayers("1 500 Linears of width 64, a chunk for each", 1, width=64),
)


def measure_first_steps(case: ManyLayers) -> dict[str, Any]:
    """Train `case` from its first step on; return the seconds of each, by the processor's clock and by the wall's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer_numel = case.width * case.width + case.width
    model_data_nbytes = NUM_ROLES * 4 * layer_numel * case.num_layers
    memory = {"device": int(case.device_share * model_data_nbytes), "host": 1 << 31}
    values = {"memory": memory, "default_chunk_size": case.layers_per_chunk * layer_numel}
    manager = ChunkManager(chunkmem.Config.from_dict(values))
    with manager.init():
        model = nn.Sequential(*(nn.Linear(case.width, case.width) for _ in range(case.num_layers)))
    optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-3)
    batch = torch.randn(4, case.width)
    wall_s, cpu_s = [], []
    for _ in range(NUM_FIRST + NUM_LATER):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        manager.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        wall_s.append(time.perf_counter() - began_s)
        cpu_s.append(time.process_time() - began_cpu_s)
    assert manager.trace is not None
    num_moments = len(manager.trace.moments)
    manager.close()
    torch.set_num_threads(threads)
    return {**asdict(case), "num_moments": num_moments, "wall_s": wall_s, "cpu_s": cpu_s}
