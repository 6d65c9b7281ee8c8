"""What saving and loading take on each of several ranks: two chunks, and a little more."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import chunkmem
from tests.helpers.peak_memory import IS_COUNTED, MIB, NEEDS_COUNT, increase_nbytes
from tests.helpers.ranks import Team

CHUNK_NBYTES = 4 * MIB


def measure(rank: int, folder: Path) -> list[int]:
    """Return by how many bytes memory grows at the most in `save`, in `load`, and in `load` into an empty model.

    All under another default device: what is read is in RAM all the same.
    """
    values = {"memory": {"device": "8MiB", "host": "2GiB"}, "default_chunk_size": CHUNK_NBYTES // 4}
    config = chunkmem.Config.from_dict(values)
    found: list[int] = []
    for width in (8, 1023):  # what is loaded once
        path = folder / str(width)
        shapes = [(width, width + 1), (width + 1, width)] * 12
        with chunkmem.ChunkManager(config) as manager, torch.device("meta"):
            model = manager.wrap(nn.Sequential(*(nn.Linear(*shape) for shape in shapes)))
            optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
            manager.backward(model(torch.ones(1, width, device="cpu")).sum())
            optimizer.step()
            found = [increase_nbytes(partial(call, path, optimizer)) for call in (manager.save, manager.load)]
        with chunkmem.ChunkManager(config) as manager, torch.device("meta"):
            model = manager.wrap(nn.Sequential(*(nn.Linear(*shape) for shape in shapes)), skip_init=True)
            optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
            before = manager.memory().host.now_nbytes
            increase = increase_nbytes(partial(manager.load, path, optimizer))
            found.append(increase - (manager.memory().host.now_nbytes - before))  # optimizer states are new
    return found


@pytest.mark.skipif(not IS_COUNTED, reason=NEEDS_COUNT)
@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.full)])
def test_two_chunks_and_a_little_more(size: int, tmp_path: Path) -> None:
    """96 MiB of weights and 192 of states."""
    with Team(size) as fresh:
        for increases in fresh.run(measure, tmp_path, timeout_s=120.0):
            assert max(increases) <= 2 * CHUNK_NBYTES + 64 * MIB, [nbytes // MIB for nbytes in increases]
