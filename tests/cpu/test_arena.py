"""The host arena: mapped exactly, never overlapping, merging what is freed, absent from forked children."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkmem.data.errors import CapacityError
from chunkmem.data.types import Tier
from chunkmem.runtime import arena as arena_module
from chunkmem.runtime.arena import HostArena
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.ledger import Ledger
from chunkmem.runtime.pool import Slab
from chunkmem.runtime.shadow import ShadowBuffers

SLAB = 256
PARAM = "param"


def new_arena(slabs: int = 1000) -> HostArena:
    return HostArena(Ledger(Tier.HOST, slabs * SLAB, slabs * SLAB), ComputeDevice.default())


@pytest.fixture
def arena() -> Iterator[HostArena]:
    arena = new_arena()
    yield arena
    arena.close()


def starts(slabs: list[Slab]) -> list[tuple[int, int]]:
    """Segment and offset of each, in slabs."""
    return [(slab.segment, slab.start // SLAB) for slab in slabs]


def test_the_arena_maps_exactly_what_was_announced(arena: HostArena, monkeypatch: pytest.MonkeyPatch) -> None:
    # announced 10 slabs, mapped in pieces of at most 4:   |0 1 2 3|4 5 6 7|8 9|
    monkeypatch.setattr(arena_module, "_SEGMENT_NBYTES", 4 * SLAB + SLAB // 2)
    arena.expect(10 * SLAB)
    assert arena.reserved_nbytes == 0
    slabs = [arena.alloc(PARAM, SLAB) for _ in range(10)]
    assert starts(slabs) == [(i // 4, i % 4) for i in range(10)]
    assert arena.reserved_nbytes == arena.ledger.total_nbytes == 10 * SLAB


def test_a_piece_is_mapped_when_it_is_first_needed(arena: HostArena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_SEGMENT_NBYTES", 4 * SLAB)
    arena.expect(8 * SLAB)
    reserved = [(arena.alloc(PARAM, SLAB), arena.reserved_nbytes // SLAB)[1] for _ in range(8)]
    assert reserved == [4, 4, 4, 4, 8, 8, 8, 8]


def test_what_was_not_announced_is_mapped_as_it_is_asked_for(arena: HostArena) -> None:
    arena.alloc(PARAM, SLAB)
    arena.alloc(PARAM, 3 * SLAB)
    assert arena.reserved_nbytes == arena.ledger.total_nbytes == 4 * SLAB


def test_slabs_that_are_asked_for_together_are_mapped_together(
    arena: HostArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a slab that is free, then ten new ones in pieces of at most 4:   |f| |0 1 2 3|4 5 6 7|8 9|
    monkeypatch.setattr(arena_module, "_SEGMENT_NBYTES", 4 * SLAB)
    arena.free(PARAM, arena.alloc(PARAM, SLAB))
    slabs = [arena.alloc(PARAM, SLAB, num=num) for num in range(11, 0, -1)]
    assert starts(slabs) == [(0, 0), *((1 + i // 4, i % 4) for i in range(10))]
    assert arena.reserved_nbytes == arena.ledger.total_nbytes == 11 * SLAB
    # Asked for together, with room for some of them only.
    arena = new_arena(3)
    arena.alloc(PARAM, SLAB, num=10)
    assert arena.reserved_nbytes == 3 * SLAB
    arena.close()


def test_shadow_buffers_are_mapped_in_few_pieces(arena: HostArena) -> None:
    """Each piece is zeroed by all cores, and pinned by one call, which for thousands of slabs takes seconds."""
    buffers = ShadowBuffers(arena)
    buffers.reserve({SLAB: 30, 2 * SLAB: 50})
    assert len(arena._segments) == 2
    buffers.reserve({SLAB: 40, 2 * SLAB: 45})
    assert buffers.counts == {SLAB: 40, 2 * SLAB: 45}
    assert arena.reserved_nbytes == 130 * SLAB, "what is given back serves other sizes"
    assert arena.ledger.total_nbytes == 130 * SLAB


def test_shadow_buffers_stop_where_the_cap_is() -> None:
    arena = new_arena(5)
    buffers = ShadowBuffers(arena)
    buffers.reserve({2 * SLAB: 4})
    assert buffers.counts == {2 * SLAB: 2}
    assert arena.reserved_nbytes == arena.ledger.total_nbytes == 4 * SLAB
    arena.close()


def test_a_slab_larger_than_a_segment_gets_one_of_its_own(arena: HostArena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_SEGMENT_NBYTES", 2 * SLAB)
    arena.expect(7 * SLAB)
    assert starts([arena.alloc(PARAM, 5 * SLAB), arena.alloc(PARAM, SLAB), arena.alloc(PARAM, SLAB)]) == [
        (0, 0),
        (1, 0),
        (1, 1),
    ]
    assert arena.reserved_nbytes == 7 * SLAB


def test_no_more_than_the_cap_is_mapped_ahead() -> None:
    """Of a model larger than the HOST cap a part goes to DEVICE; its bytes were announced all the same."""
    arena = new_arena(3)
    arena.expect(10 * SLAB)
    for _ in range(3):
        arena.alloc(PARAM, SLAB)
        assert arena.reserved_nbytes == 3 * SLAB


def test_the_arena_gives_out_the_slab_freed_last_then_the_first_run_that_fits(arena: HostArena) -> None:
    # |a|b|c|d|e|  free b, c and e
    arena.expect(5 * SLAB)
    slabs = [arena.alloc(PARAM, SLAB) for _ in range(5)]
    for index in (4, 1, 2):
        arena.free(PARAM, slabs[index])
    assert arena.alloc(PARAM, SLAB) is slabs[2]
    arena.free(PARAM, slabs[2])
    assert starts([arena.alloc(PARAM, 2 * SLAB)]) == [(0, 1)]  # b and c have become a run
    assert starts([arena.alloc(PARAM, SLAB)]) == [(0, 4)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_neighbours_merge_in_whatever_order_they_are_freed(arena: HostArena, order: tuple[int, ...]) -> None:
    arena.expect(4 * SLAB)
    slabs = [arena.alloc(PARAM, SLAB) for _ in range(4)]
    for index in order:
        arena.free(PARAM, slabs[index])
    assert starts([arena.alloc(PARAM, 3 * SLAB)]) == [(0, 0)]
    assert arena.reserved_nbytes == 4 * SLAB


def test_runs_of_two_segments_do_not_merge(arena: HostArena) -> None:
    slabs = [arena.alloc(PARAM, SLAB), arena.alloc(PARAM, SLAB)]
    for slab in slabs:
        arena.free(PARAM, slab)
    assert starts([arena.alloc(PARAM, 2 * SLAB)]) == [(2, 0)]


def test_a_closed_arena_holds_nothing(arena: HostArena) -> None:
    slab = arena.alloc(PARAM, SLAB)
    slab.bytes.fill_(7)
    view = slab.bytes
    arena.free(PARAM, slab)
    arena.close()
    assert arena.reserved_nbytes == arena.ledger.total_nbytes == 0
    assert (view == 7).all()  # a view someone kept still has memory under it


def check_arena(arena: HostArena, live: list[tuple[int, Slab]]) -> None:
    """No two slabs overlap, contents are their own, and free runs, freed and live slabs fill the segments exactly."""
    freed = [slab for slabs in arena._idle.values() for slab in slabs]
    for index, segment in enumerate(arena._segments):
        slabs = [*(slab for _, slab in live), *freed]
        runs = [(slab.start, slab.nbytes) for slab in slabs if slab.segment == index]
        at = 0
        for start, nbytes in sorted([*runs, *segment.free._runs]):
            assert start == at
            at += nbytes
        assert at == len(segment.region)
        ends = {run.end for run in segment.free._runs}
        assert ends.isdisjoint(run.start for run in segment.free._runs), "two free runs side by side were not merged"
    for mark, slab in live:
        assert (slab.bytes == mark).all(), "another slab was written over this one"
    assert arena.ledger.total_nbytes == sum(slab.nbytes for _, slab in live)


def run_arena(actions: list[tuple[int, bool, int]], announced: int) -> None:
    arena = new_arena()
    arena.expect(announced * SLAB)
    live: list[tuple[int, Slab]] = []
    for mark, (slabs, takes, which) in enumerate(actions):
        if takes or not live:
            slab = arena.alloc(PARAM, slabs * SLAB)
            slab.bytes.fill_(mark)
            live.append((mark, slab))
        else:
            arena.free(PARAM, live.pop(which % len(live))[1])
        check_arena(arena, live)
    while live:
        arena.free(PARAM, live.pop()[1])
    arena._join_idle()
    assert all(segment.is_free for segment in arena._segments)
    assert arena.ledger.total_nbytes == 0


arena_actions = st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.integers(0, 99)), max_size=40)


@given(actions=arena_actions, announced=st.integers(0, 20))
def test_arena_never_overlaps_and_everything_merges_back(actions: list[tuple[int, bool, int]], announced: int) -> None:
    run_arena(actions, announced)


@pytest.mark.full
@given(actions=st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.integers(0, 99)), max_size=200))
@settings(max_examples=500, deadline=None)
def test_arena_never_overlaps_at_length(actions: list[tuple[int, bool, int]]) -> None:
    run_arena(actions, announced=50)


def mapped(address: int) -> bool:
    """Whether this process has memory at an address."""
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps]
    return any(int(first, 16) <= address < int(last, 16) for first, last in ranges)


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="the system has no MADV_DONTFORK")
def test_a_forked_child_has_none_of_the_arena(arena: HostArena) -> None:
    arena.expect(64 * SLAB)
    slab = arena.alloc(PARAM, 64 * SLAB)
    slab.bytes.fill_(1)
    address = slab.bytes.data_ptr()
    assert mapped(address)
    child = os.fork()
    if child == 0:
        # Straight out, whatever happens: nothing of the test session may run twice.
        try:
            os._exit(10 if mapped(address) else 0)
        finally:
            os._exit(11)
    _, status = os.waitpid(child, 0)
    assert os.WIFEXITED(status)
    assert os.WEXITSTATUS(status) == 0
    assert (slab.bytes == 1).all()


def test_holes_of_one_size_make_room_for_another() -> None:
    """bf16 weights, packed in turn with their fp32 masters, leave for DEVICE: states took RAM beyond memory.host."""
    # |w|w|w|w|m m|m m|m m|m m|      and not |w|m m|w|m m|w|m m|w|m m|
    arena = new_arena(12)
    arena.expect(12 * SLAB)
    weights = [(arena.alloc(PARAM, SLAB), arena.alloc(PARAM, 2 * SLAB))[0] for _ in range(4)]
    for slab in weights:
        arena.free(PARAM, slab)
    states = [arena.alloc(PARAM, 2 * SLAB) for _ in range(2)]
    assert sorted(starts(states)) == [(0, 0), (0, 2)]
    assert arena.reserved_nbytes == arena.ledger.total_nbytes == 12 * SLAB


def test_what_was_never_given_out_does_not_count_as_kept() -> None:
    # |1|.|.|.|.|2 2|2 2|      freed, and a hole at each end is used again
    arena = new_arena(9)
    arena.expect(9 * SLAB)
    slabs = [arena.alloc(PARAM, nbytes * SLAB) for nbytes in (1, 2, 2)]
    assert sorted(starts(slabs)) == [(0, 0), (0, 5), (0, 7)]
    assert arena.kept_nbytes == 0
    for slab in slabs[:2]:
        arena.free(PARAM, slab)
    assert arena.kept_nbytes == 3 * SLAB
    arena.alloc(PARAM, 2 * SLAB)
    assert arena.kept_nbytes == SLAB


def test_segments_that_are_free_go_back_before_more_than_the_cap_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_SEGMENT_NBYTES", SLAB)
    arena = new_arena(4)
    slabs = [arena.alloc(PARAM, SLAB) for _ in range(4)]
    kept = slabs.pop()
    kept.bytes.fill_(7)
    for slab in slabs:
        arena.free(PARAM, slab)
    assert starts([arena.alloc(PARAM, 3 * SLAB)]) == [(4, 0)]
    assert arena.reserved_nbytes == 4 * SLAB
    assert (kept.bytes == 7).all()
    assert arena.kept_nbytes == 0


@given(
    actions=st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.booleans(), st.integers(0, 99)), max_size=60),
    announced=st.integers(0, 40),
)
def test_slabs_of_several_sizes_stay_aligned_and_apart(actions: list[tuple[int, bool, int]], announced: int) -> None:
    arena = new_arena(17)
    arena.expect(announced * SLAB + SLAB // 2)
    live: list[tuple[int, Slab]] = []
    for mark, (slabs, takes, which) in enumerate(actions):
        if takes and arena.ledger.free_nbytes >= slabs * SLAB:
            live.append((mark, arena.alloc(PARAM, slabs * SLAB)))
            live[-1][1].bytes.fill_(mark)
        elif live:
            arena.free(PARAM, live.pop(which % len(live))[1])
        check_arena(arena, live)
        assert all(slab.start % SLAB == 0 for _, slab in live)
    arena.close()


def test_a_system_without_room_is_said_and_nothing_is_lost(arena: HostArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """memory.host may be more than a system gives, which only shows when it is asked."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    slab = arena.alloc(PARAM, SLAB)
    slab.bytes.fill_(7)
    with monkeypatch.context() as patch:
        patch.setattr(arena_module, "_Region", refuse)
        with pytest.raises(
            CapacityError, match=r"no 768 B of RAM left.*256 B of 250.00 KiB.*lower memory.host"
        ) as error:
            arena.alloc(PARAM, 3 * SLAB)
    assert (error.value.needed_nbytes, error.value.cap_nbytes) == (4 * SLAB, 1000 * SLAB)
    assert arena.ledger.total_nbytes == arena.reserved_nbytes == SLAB
    assert arena.alloc(PARAM, 3 * SLAB).nbytes == 3 * SLAB
    assert (slab.bytes == 7).all()
