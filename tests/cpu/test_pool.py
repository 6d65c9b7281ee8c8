"""Slabs given out and taken back: exact bytes, and a cache that keeps its limits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkmem.data.types import Tier
from chunkmem.runtime.arena import HostArena
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.ledger import CACHE, Ledger
from chunkmem.runtime.pool import DevicePool, Slab, SlabPool

SLAB = 256
PARAM, GRAD = "param", "grad"


def ledger(tier: Tier, slabs: int) -> Ledger:
    return Ledger(tier, slabs * SLAB, slabs * SLAB)


def device_pool(*, slabs: int, capacity: int = 2) -> DevicePool:
    return DevicePool(ledger(Tier.DEVICE, slabs), ComputeDevice.default(), capacity=capacity)


@pytest.fixture
def arena() -> Iterator[HostArena]:
    arena = HostArena(ledger(Tier.HOST, 1000), ComputeDevice.default())
    yield arena
    arena.close()


def by_role(pool: SlabPool) -> dict[str, int]:
    """Slabs by role, those of zero left out."""
    return {role: nbytes // SLAB for role, nbytes in pool.ledger.now.items() if nbytes}


def test_a_ledger_refuses_to_pass_its_cap_or_to_give_back_what_was_not_taken() -> None:
    book = ledger(Tier.DEVICE, 2)
    book.charge(PARAM, 2 * SLAB)
    with pytest.raises(AssertionError, match="device over its cap"):
        book.charge(GRAD, 1)
    with pytest.raises(AssertionError, match="grad gives back more than it took on device"):
        book.release(GRAD, 1)
    assert (book.total_nbytes, book.free_nbytes, book.now) == (2 * SLAB, 0, {PARAM: 2 * SLAB})


def test_a_ledger_remembers_peaks() -> None:
    book = ledger(Tier.DEVICE, 4)
    book.charge(PARAM, 3 * SLAB)
    book.charge(GRAD, SLAB)
    book.release(PARAM, 2 * SLAB)
    book.charge(GRAD, SLAB)
    assert book.peak == {PARAM: 3 * SLAB, GRAD: 2 * SLAB}
    assert (book.peak_nbytes, book.total_nbytes) == (4 * SLAB, 3 * SLAB)


def test_a_freed_slab_is_kept_and_serves_the_next_request() -> None:
    pool = device_pool(slabs=2)
    slab = pool.alloc(PARAM, SLAB)
    pool.free(PARAM, slab)
    assert by_role(pool) == {CACHE: 1}
    assert pool.alloc(GRAD, SLAB) is slab
    assert by_role(pool) == {GRAD: 1}


def test_the_cache_keeps_no_more_than_its_capacity_and_lets_go_of_the_oldest() -> None:
    pool = device_pool(slabs=4, capacity=2)
    slabs = [pool.alloc(PARAM, SLAB) for _ in range(4)]
    for slab in slabs:
        pool.free(PARAM, slab)
    assert by_role(pool) == {CACHE: 2}
    assert {pool.alloc(PARAM, SLAB), pool.alloc(PARAM, SLAB)} == {slabs[2], slabs[3]}


@pytest.mark.parametrize("capacity", [0, 1])
def test_while_a_plan_is_followed_kept_slabs_take_what_a_moment_leaves(capacity: int) -> None:
    """Its room is 3 of the 9 slabs of the cap: a new size is allocated in the place of the one freed first."""
    pool = device_pool(slabs=9, capacity=capacity)
    pool.room_nbytes = 3 * SLAB
    slabs = [pool.alloc(PARAM, SLAB) for _ in range(3)]
    for slab in slabs[:2]:
        pool.free(PARAM, slab)
    assert by_role(pool) == {PARAM: 1, CACHE: 2}, "no capacity counts"
    pool.alloc(GRAD, SLAB // 2)
    assert pool.ledger.now == {PARAM: SLAB, CACHE: SLAB, GRAD: SLAB // 2}
    assert pool.alloc(PARAM, SLAB) is slabs[1]
    pool.room_nbytes = 2 * SLAB
    pool.free(PARAM, slabs[1])
    assert pool.ledger.now[CACHE] == SLAB, "what a moment's actions have freed may serve the next of them"
    pool.trim()
    assert pool.ledger.now == {PARAM: SLAB, CACHE: 0, GRAD: SLAB // 2}


def test_of_the_kept_slabs_the_one_freed_last_is_served_first() -> None:
    """Its bytes are the likeliest to be in a processor's cache still."""
    pool = device_pool(slabs=2)
    slabs = [pool.alloc(PARAM, SLAB) for _ in range(2)]
    for slab in slabs:
        pool.free(PARAM, slab)
    assert pool.alloc(GRAD, SLAB) is slabs[1]


def test_with_capacity_zero_nothing_is_kept() -> None:
    pool = device_pool(slabs=1, capacity=0)
    slab = pool.alloc(PARAM, SLAB)
    pool.free(PARAM, slab)
    assert by_role(pool) == {}
    assert pool.alloc(PARAM, SLAB) is not slab


@pytest.mark.parametrize("asked", [1, 3])
def test_a_request_of_another_size_is_never_served_from_the_cache(asked: int) -> None:
    pool = device_pool(slabs=8)
    kept = pool.alloc(PARAM, 2 * SLAB)
    pool.free(PARAM, kept)
    other = pool.alloc(GRAD, asked * SLAB)
    assert other is not kept
    assert other.nbytes == other.bytes.numel() == other.bytes.untyped_storage().nbytes() == asked * SLAB
    assert by_role(pool) == {GRAD: asked, CACHE: 2}


def test_kept_slabs_go_first_when_room_is_needed() -> None:
    # cap 4 | kept 1 | kept 1 | free 2 |     3 are asked for: the older kept one goes, the other stays
    pool = device_pool(slabs=4)
    first, second = pool.alloc(PARAM, SLAB), pool.alloc(PARAM, SLAB)
    pool.free(PARAM, first)
    pool.free(PARAM, second)
    pool.alloc(GRAD, 3 * SLAB)
    assert by_role(pool) == {GRAD: 3, CACHE: 1}
    assert pool.alloc(PARAM, SLAB) is second


def test_the_device_cap_holds() -> None:
    pool = device_pool(slabs=2)
    pool.alloc(PARAM, 2 * SLAB)
    with pytest.raises(AssertionError, match="over its cap"):
        pool.alloc(GRAD, SLAB)
    assert by_role(pool) == {PARAM: 2}


def test_a_failing_allocator_leaves_the_ledger_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    pool = device_pool(slabs=2)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch, "empty", fail)
        pool.alloc(PARAM, SLAB)
    assert by_role(pool) == {}
    assert pool.alloc(PARAM, 2 * SLAB).nbytes == 2 * SLAB


def test_closing_the_pool_gives_the_kept_slabs_back() -> None:
    pool = device_pool(slabs=2)
    pool.free(PARAM, pool.alloc(PARAM, SLAB))
    pool.close()
    assert pool.ledger.total_nbytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_poisoned_slab_is_nan_in_every_dtype(dtype: torch.dtype, arena: HostArena) -> None:
    for pool in (device_pool(slabs=4), arena):
        pool.poison = True
        slab = pool.alloc(PARAM, 2 * SLAB)
        slab.bytes.zero_()
        flat = slab.flat(dtype)
        pool.free(PARAM, slab)
        assert flat.isnan().all()
        assert flat.numel() * flat.element_size() == 2 * SLAB


def test_a_slab_allocated_under_inference_mode_can_be_filled_later(arena: HostArena) -> None:
    for pool in (device_pool(slabs=4), arena):
        with torch.inference_mode():
            slab = pool.alloc(PARAM, SLAB)
        flat = slab.flat(torch.float32)
        assert not flat.is_inference()
        flat.fill_(1.0)


@given(
    actions=st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.integers(0, 9)), max_size=40),
    capacity=st.integers(0, 3),
)
def test_device_pool_accounts_for_every_byte(actions: list[tuple[int, bool, int]], capacity: int) -> None:
    pool = device_pool(slabs=9, capacity=capacity)
    pool.poison = True
    live: list[tuple[str, Slab]] = []
    for slabs, takes, which in actions:
        role = (PARAM, GRAD)[which % 2]
        kept = pool.ledger.now.get(CACHE, 0)
        if takes and pool.ledger.free_nbytes + kept >= slabs * SLAB:
            slab = pool.alloc(role, slabs * SLAB)
            assert all(slab is not other for _, other in live)
            slab.bytes.fill_(len(live))
            live.append((role, slab))
        elif live:
            pool.free(*live.pop(which % len(live)))
        assert sum(slab.nbytes for _, slab in live) + pool.ledger.now.get(CACHE, 0) == pool.ledger.total_nbytes
        assert pool.ledger.total_nbytes <= pool.ledger.cap_nbytes
        for name in (PARAM, GRAD):
            assert pool.ledger.now.get(name, 0) == sum(slab.nbytes for role, slab in live if role == name)
    while live:
        pool.free(*live.pop())
    pool.close()
    assert pool.ledger.total_nbytes == 0
