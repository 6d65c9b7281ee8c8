"""What `manager.save_pretrained` writes, `from_pretrained` loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import chunkmem
from tests.helpers.twins import cpu_only
from tests.integrations.test_families import FAMILIES, builder_of

pytestmark = [pytest.mark.full, cpu_only]


@pytest.mark.parametrize("family", FAMILIES)
def test_from_pretrained_loads_it(family: str, tmp_path: Path) -> None:
    manager = chunkmem.ChunkManager()
    with manager.init():
        model = builder_of(family, torch.float32)()
    manager.save_pretrained(tmp_path, max_shard_size="64KiB")
    again, found = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    weights = manager.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in again.state_dict().items())
    assert again.config.architectures == [type(model).__name__]
    manager.close()
