"""Where optimizer states are made in the first step, before there is a plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.data.types import Tier
from chunkmem.optim.kernels import load_kernels
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.lanes import BlockingLanes
from tests.helpers.simulated import SimulatedAccelerator
from tests.helpers.twins import cpu_only

MakeLanes = Callable[[ComputeDevice], BlockingLanes]
SLAB_NBYTES = 17_000
"""A little more than one of the six groups takes in one role: 64 x 64 weights and 64 biases in fp32."""


def tiers_after_a_step(
    device_nbytes: int, *, hybrid: bool = True, ratio: float = 1.0, make_lanes: MakeLanes | None = None
) -> list[Tier | None]:
    """Return the tier of each state after one step."""
    values = {
        "memory": {"device": device_nbytes, "host": 1 << 22},
        "default_chunk_size": 64 * 64 + 64,
        "optimizer": {"type": "AdamW", "params": {"use_hybrid_adam": hybrid}},
        "client": {"mem_tracer": {"margin_use_ratio": ratio}},
    }
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(values), make_lanes=make_lanes) as manager:
        with manager.init():
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        manager.backward(model(torch.ones(2, 64)).square().mean())
        optimizer.step()
        chunks = manager.runtime.memory.store.chunks.values()
        return [chunk.newest_tier() for chunk in chunks if chunk.id.role.is_state]


@cpu_only
@pytest.mark.parametrize(
    ("num_slabs", "options", "num_on_device"),
    [
        (6 * 4 + 2, {}, 12),
        (3 * 4 + 5, {}, 6),  # three groups with all they have, and five slabs for those that pass
        (6 * 4 + 2, {"hybrid": False}, 0),
    ],
    ids=["ample", "tight", "not hybrid"],
)
def test_states_are_made_where_there_is_room(num_slabs: int, options: dict[str, bool], num_on_device: int) -> None:
    tiers = tiers_after_a_step(num_slabs * SLAB_NBYTES, **options)
    assert len(tiers) == 12
    assert tiers.count(Tier.DEVICE) == num_on_device


@cpu_only
def test_on_an_accelerator_states_take_what_activations_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were made within the warm-up share, a tenth of the cap, and the first plan moved them to DEVICE."""
    monkeypatch.setattr(ComputeDevice, "default", lambda index=None: SimulatedAccelerator())
    monkeypatch.setattr("chunkmem.assembly.parts.load_kernels", lambda **_: load_kernels())

    def on_cpu(_: ComputeDevice) -> BlockingLanes:
        return BlockingLanes(ComputeDevice(torch.device("cpu")))

    tiers = tiers_after_a_step((6 * 4 + 2) * SLAB_NBYTES, make_lanes=on_cpu)
    assert tiers.count(Tier.DEVICE) == 12
