"""Packing tensors into chunks of a given slab size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkmem.data.errors import LayoutError
from chunkmem.data.layout import Layout, TensorSpec
from chunkmem.data.layout_pack import LOOK_BACK, dealt, pack, search_slab_nbytes
from tests.helpers.layouts import ITEMSIZES, check_layout, paint, tensor_lists, tensors_of

WIDE = 4096


def places(layout: Layout) -> list[tuple[int, int]]:
    """List group and offset, in bytes, of every tensor in order."""
    itemsizes = [spec.itemsize for spec in layout.tensors]
    return [(slot.group, slot.offset * size) for slot, size in zip(layout.slots, itemsizes, strict=True)]


slabs = st.integers(1, 12).map(lambda lines: 64 * lines)


@given(tensors=tensor_lists(), slab_nbytes=slabs, first_group=st.integers(0, 3))
def test_any_layout_keeps_every_promise(tensors: list[TensorSpec], slab_nbytes: int, first_group: int) -> None:
    layout = pack(tensors, slab_nbytes=slab_nbytes, first_group=first_group)
    check_layout(layout, tensors, slab_nbytes=slab_nbytes, first_group=first_group)
    assert pack(tensors, slab_nbytes=slab_nbytes, first_group=first_group) == layout


@given(tensors=tensor_lists(), slab_nbytes=slabs, first_group=st.integers(0, 3), num_ranks=st.integers(1, 5))
def test_no_rank_has_more_than_a_group_above_another(
    tensors: list[TensorSpec], slab_nbytes: int, first_group: int, num_ranks: int
) -> None:
    layout = pack(tensors, slab_nbytes=slab_nbytes, first_group=first_group, num_ranks=num_ranks)
    alone = pack(tensors, slab_nbytes=slab_nbytes, first_group=first_group)
    assert dealt(layout, num_ranks=1) == alone
    assert dealt(alone, num_ranks=num_ranks) == layout
    for is_on_host in (False, True):
        kept = [0] * num_ranks
        groups = [group for group in layout.groups if group.is_on_host is is_on_host]
        for group in groups:
            kept[group.owner] += group.nbytes + 12 * group.numel * (not tensors[group.slots[0].tensor].is_frozen)
        assert max(kept) - min(kept) <= max((group.nbytes + 12 * group.numel for group in groups), default=0)


def test_groups_of_one_size_are_dealt_out_in_turn() -> None:
    layout = pack(tensors_of(*[16 * 4] * 5), slab_nbytes=64, first_group=4, num_ranks=3)
    assert [group.owner for group in layout.groups] == [1, 2, 0, 1, 2]


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_ranks_keep_about_as_much_of_a_language_model(num_ranks: int) -> None:
    """In turn, the fullest of 8 ranks had 1.3 times the mean."""
    block = [[3 * WIDE, WIDE], [WIDE, WIDE], [4 * WIDE, WIDE], [WIDE, 4 * WIDE], *[[WIDE]] * 6]
    shapes = [[50257, WIDE], *block * 24, [WIDE]]
    tensors = [TensorSpec(f"{at}", tuple(shape), "float32", 4) for at, shape in enumerate(shapes)]
    layout = pack(tensors, slab_nbytes=8 << 20, num_ranks=num_ranks)
    kept = [0] * num_ranks
    for group in layout.groups:
        kept[group.owner] += group.nbytes
    assert max(kept) <= 1.05 * sum(kept) / num_ranks


@given(tensors=tensor_lists(), slab_nbytes=slabs)
def test_pads_are_exactly_what_no_tensor_owns(tensors: list[TensorSpec], slab_nbytes: int) -> None:
    layout = pack(tensors, slab_nbytes=slab_nbytes)
    for group in layout.groups:
        padded = [element for start, stop in group.pads for element in range(start, stop)]
        assert padded == [element for element, owner in enumerate(paint(group)) if owner is None]


@given(tensors=tensor_lists(), slab_nbytes=slabs)
def test_a_group_is_opened_only_if_the_one_before_has_no_room(tensors: list[TensorSpec], slab_nbytes: int) -> None:
    layout = pack(tensors, slab_nbytes=slab_nbytes)
    for dtype, itemsize in ITEMSIZES.items():
        shared = [group for group in layout.groups if group.dtype == dtype and group.num_slabs == 1]
        for before, opened in pairwise(shared):
            filled = sum(-(-slot.numel * itemsize // 64) * 64 for slot in before.slots)
            assert filled + opened.slots[0].numel * itemsize > slab_nbytes


def test_neighbours_share_a_chunk_and_start_on_a_cache_line() -> None:
    # bytes    0        100  128      192  200   256
    # group 0  |aaaaaaaa|....|bbbbbbbb|c...|.....|
    # group 1  |dddddddddddddddddddd|............|
    layout = pack(tensors_of(100, 64, 8, 160), slab_nbytes=256)
    assert places(layout) == [(0, 0), (0, 128), (0, 192), (1, 0)]
    assert [group.pads for group in layout.groups] == [((25, 32), (50, 64)), ((40, 64),)]


def test_a_small_tensor_fills_the_newest_gap_that_holds_it() -> None:
    # bytes    0             128       192    256
    # group 0  |aaaaaaaaaaaaa|dddddddd|eeeeeee|     d: 128 are left here, only 64 in group 1
    # group 1  |bbbbbbbbbbbbbbbbbbbbbbb|cccccc|     c: goes to the newer one
    layout = pack(tensors_of(128, 192, 64, 64, 64), slab_nbytes=256)
    assert places(layout) == [(0, 0), (1, 0), (1, 192), (0, 128), (0, 192)]
    assert layout.padding_nbytes == 0


def test_a_gap_far_behind_is_left_alone() -> None:
    # LOOK_BACK + 1 groups with 64 bytes left in each, then as many tensors of 64 bytes: the oldest gap stays open.
    layout = pack(tensors_of(*[192] * (LOOK_BACK + 1), *[64] * (LOOK_BACK + 1)), slab_nbytes=256)
    late = places(layout)[LOOK_BACK + 1 :]
    assert late == [*((group, 192) for group in range(LOOK_BACK, 0, -1)), (LOOK_BACK + 1, 0)]


def test_full_groups_do_not_push_a_gap_out_of_sight() -> None:
    layout = pack(tensors_of(192, *[256] * (LOOK_BACK + 1), 64), slab_nbytes=256)
    assert places(layout)[-1] == (0, 192)


def test_a_tensor_larger_than_a_slab_has_its_slabs_for_itself() -> None:
    # bytes    0            256           512           768
    # group 0  |aaaaa|eeeee|
    # group 1  |bbbbbbbbbbbbb|bbbbbbbbbbbbb|bbb..........|    e would fit here, and would pin three slabs
    # group 2  |cccccccccccccc|                               exactly one slab is not larger than one
    # group 3  |dddddddddddddd|dddddddddddddd|
    tensors = tensors_of(128, 576, 256, 512, 128)
    layout = pack(tensors, slab_nbytes=256)
    check_layout(layout, tensors, slab_nbytes=256)
    assert places(layout) == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 128)]
    assert [group.num_slabs for group in layout.groups] == [1, 3, 1, 2]
    assert [group.pads for group in layout.groups] == [(), ((144, 192),), (), ()]


def test_dtypes_never_share_a_group() -> None:
    tensors = [
        TensorSpec("w", (64 // ITEMSIZES[dtype],), dtype, ITEMSIZES[dtype])
        for dtype in ("float32", "int8", "float32", "float64", "int8")
    ]
    layout = pack(tensors, slab_nbytes=256)
    assert places(layout) == [(0, 0), (1, 0), (0, 64), (2, 0), (1, 64)]
    assert [(group.dtype, group.numel) for group in layout.groups] == [("float32", 64), ("int8", 256), ("float64", 32)]


def test_tensors_without_elements_take_no_room() -> None:
    layout = pack(tensors_of(0, 256, 0), slab_nbytes=256)
    assert [(slot.group, slot.offset, slot.numel) for slot in layout.slots] == [(0, 0, 0), (0, 0, 64), (0, 64, 0)]
    assert layout.groups[0].pads == ()


def test_group_ids_start_where_told() -> None:
    layout = pack(tensors_of(256, 256), slab_nbytes=256, first_group=5)
    assert [group.id for group in layout.groups] == [5, 6]
    assert [slot.group for slot in layout.slots] == [5, 6]


def test_nothing_packs_into_nothing() -> None:
    assert pack([], slab_nbytes=64) == Layout(64, (), ())


@pytest.mark.parametrize("slab_nbytes", [0, -64, 63, 100])
def test_a_slab_is_a_positive_multiple_of_the_alignment(slab_nbytes: int) -> None:
    with pytest.raises(LayoutError, match=rf"a slab of {slab_nbytes} bytes .* multiple of 64 bytes; use (64|128)$"):
        pack(tensors_of(4), slab_nbytes=slab_nbytes)


BAD_TENSORS = [
    (TensorSpec("blocks.0.w", (2,), "odd", 3), r"blocks\.0\.w: elements of 3 bytes .* alignment of 64"),
    (TensorSpec("blocks.0.w", (2,), "odd", 0), r"blocks\.0\.w: elements of 0 bytes"),
    (TensorSpec("blocks.0.w", (2, -1), "float32", 4), r"blocks\.0\.w: shape \(2, -1\) has a negative extent"),
    (TensorSpec("blocks.0.w", (2,), "float32", 2), r"blocks\.0\.w: float32 elements of 2 bytes, but 4 bytes"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_TENSORS)
def test_a_tensor_that_cannot_be_packed_is_named(bad: TensorSpec, message: str) -> None:
    tensors = [*tensors_of(4), bad]
    with pytest.raises(LayoutError, match=message):
        pack(tensors, slab_nbytes=64)
    with pytest.raises(LayoutError, match=message):
        search_slab_nbytes(tensors, device_cap_nbytes=1 << 30)


def test_group_ids_are_not_negative() -> None:
    with pytest.raises(LayoutError, match="first_group is -1"):
        pack(tensors_of(4), slab_nbytes=64, first_group=-1)


def _move(layout: Layout, index: int, **fields: int) -> Layout:
    groups = [
        dataclasses.replace(
            group,
            slots=tuple(dataclasses.replace(slot, **fields) if slot.tensor == index else slot for slot in group.slots),
        )
        for group in layout.groups
    ]
    return dataclasses.replace(layout, groups=tuple(groups))


def _regroup(layout: Layout, index: int, **fields: object) -> Layout:
    groups = list(layout.groups)
    groups[index] = dataclasses.replace(groups[index], **fields)  # type: ignore[arg-type]
    return dataclasses.replace(layout, groups=tuple(groups))


# Each makes the right layout of 128, 64 and 576 bytes in slabs of 256 wrong in one way.
MUTANTS: dict[str, Callable[[Layout], Layout]] = {
    "overlap": lambda layout: _move(layout, 1, offset=16),
    "misaligned": lambda layout: _move(layout, 1, offset=33),
    "overflow": lambda layout: _move(layout, 1, offset=64),
    "too short": lambda layout: _move(layout, 1, numel=15),
    "twice": lambda layout: _move(layout, 1, tensor=0),
    "wrong group": lambda layout: _move(layout, 1, group=1),
    "lost": lambda layout: _regroup(layout, 0, slots=layout.groups[0].slots[:1]),
    "wrong dtype": lambda layout: _regroup(layout, 0, dtype="int32"),
    "wrong size": lambda layout: _regroup(layout, 0, numel=32),
    "a slab too many": lambda layout: _regroup(layout, 1, num_slabs=4, numel=256),
    "out of order": lambda layout: _regroup(layout, 0, slots=layout.groups[0].slots[::-1]),
    "other ids": lambda layout: _regroup(layout, 1, id=2),
}


@pytest.mark.parametrize("mutate", MUTANTS.values(), ids=MUTANTS.keys())
def test_the_checker_rejects_every_mutant(mutate: Callable[[Layout], Layout]) -> None:
    tensors = tensors_of(128, 64, 576)
    layout = pack(tensors, slab_nbytes=256)
    check_layout(layout, tensors, slab_nbytes=256)
    with pytest.raises(AssertionError):
        check_layout(mutate(layout), tensors, slab_nbytes=256)


def test_frozen_and_trainable_tensors_share_no_group() -> None:
    """Adapters beside frozen weights: a group with an adapter would have optimizer states for all that is in it."""
    tensors = [
        dataclasses.replace(tensor, is_frozen=tensor.numel == 64) for tensor in tensors_of(256, 64, 256, 64, 256, 64)
    ]
    layout = pack(tensors, slab_nbytes=512)
    #  w0 w2 | w1 w3 w5 | w4
    assert places(layout) == [(0, 0), (1, 0), (0, 256), (1, 64), (2, 0), (1, 128)]
    mixed = pack(tensors_of(256, 64, 256, 64, 256, 64), slab_nbytes=512)
    assert places(mixed) == [(0, 0), (0, 256), (1, 0), (1, 256), (2, 0), (2, 256)]
