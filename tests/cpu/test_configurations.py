"""Every key that this version has, set to something else than its default: the numbers stay the same."""

from __future__ import annotations

from typing import Any

import pytest

import chunkmem
from tests.helpers.audit import audit
from tests.helpers.twins import CHUNK_NUMEL, Blocks, Twin, Weighted, assert_equal, cpu_only, features, same

KEYS: dict[str, dict[str, Any]] = {
    "no cache": {"client": {"opts": {"with_mem_cache": False}}},
    "cache of nothing": {"client": {"opts": {"mem_cache_capacity": 0}}},
    "large cache": {"client": {"opts": {"mem_cache_capacity": 50}}},
    "blocking moves": {"client": {"opts": {"with_async_move": False}}},
    "no overlap": {"client": {"opts": {"overlap_optimizer": False}}},
    "release after init": {"release_after_init": True},
    "states on HOST": {"optimizer": {"params": {"use_hybrid_adam": False}}},
    "small ratios": {"client": {"mem_tracer": {"warmup_gpu_chunk_mem_ratio": 0.01, "margin_use_ratio": 1.0}}},
    "odd chunks": {"default_chunk_size": 1},
    "one chunk": {"default_chunk_size": 1 << 20},
    "searched chunks": {"default_chunk_size": "auto"},
}


@pytest.mark.few(3)
@pytest.mark.parametrize("what", KEYS)
def test_a_key_changes_no_number(what: str) -> None:
    same(lambda: Blocks(Weighted()), Twin.train, keys=KEYS[what])


MEMORY: dict[str, dict[str, Any] | None] = {
    "default": None,
    "one budget": {"host": "64KiB"},
    "device only": {"device": "64KiB"},
    "hardly any host": {"device": "64KiB", "host": 1},
}


@cpu_only
@pytest.mark.parametrize("what", MEMORY)
def test_memory(what: str) -> None:
    """Without a device cap a CPU has one budget, and nothing is copied twice."""
    values = {} if MEMORY[what] is None else {"memory": MEMORY[what], "default_chunk_size": CHUNK_NUMEL}
    plain = Twin(None, Blocks)
    expected = plain.train(), plain.left()
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(values)) as manager:
        twin = Twin(manager, Blocks)
        assert_equal((twin.train(), twin.left()), expected)
        audit(manager)
        moved = manager.memory().moved
        if what in ("default", "one budget"):
            assert (moved.h2d_nbytes, moved.d2h_nbytes) == (0, 0)
            assert manager.memory().host.now_nbytes == 0


@cpu_only
def test_one_budget_that_is_too_small() -> None:
    """Errors speak of `memory.host`, which is the only cap there is."""

    def of(kib: int) -> chunkmem.Config:
        return chunkmem.Config.from_dict({"memory": {"host": f"{kib}KiB"}, "default_chunk_size": CHUNK_NUMEL})

    message = r"^packing: the weights take 8.00 KiB .* raise memory.host from 7.00 KiB to at least 8.00 KiB \(8192"
    with chunkmem.ChunkManager(of(7)) as manager, pytest.raises(chunkmem.CapacityError, match=message):
        manager.wrap(Blocks())
    message = r"^optimizer: .* raise memory.host from 31.00 KiB to at least 32.00 KiB \(32768 bytes\)$"
    with chunkmem.ChunkManager(of(31)) as manager:
        model = manager.wrap(Blocks())
        with pytest.raises(chunkmem.CapacityError, match=message):
            chunkmem.AdamW(model.parameters(), manager=manager)
    with chunkmem.ChunkManager(of(8)) as manager:
        model = manager.wrap(Blocks())
        message = r"gradient: 1.00 KiB more needed .* 0 B of 8.00 KiB RAM is left; raise memory.host .* 9.00 KiB \(9216"
        with pytest.raises(chunkmem.CapacityError, match=message):
            model(features(0)).sum().backward()
    with chunkmem.ChunkManager(of(32)) as manager:
        assert Twin(manager, Blocks).train() == Twin(None, Blocks).train()
