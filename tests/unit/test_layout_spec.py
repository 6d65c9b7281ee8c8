"""Slots, groups and layouts as plain data: what they derive from their fields."""

from __future__ import annotations

import dataclasses

import pytest

from chunkmem.data.layout import Group, Layout, Slot, TensorSpec


def a_group(*slots: tuple[int, int], numel: int = 32, num_slabs: int = 1) -> Group:
    """Make a float32 group from (offset, numel) of its slots."""
    placed = tuple(Slot(index, 0, offset, size) for index, (offset, size) in enumerate(slots))
    return Group(0, "float32", 4, num_slabs, numel, placed)


@pytest.mark.parametrize(
    ("shape", "itemsize", "numel", "nbytes"),
    [((3, 5), 4, 15, 60), ((), 8, 1, 8), ((7, 0, 2), 4, 0, 0), ((50257, 768), 2, 38597376, 77194752)],
)
def test_size_of_a_tensor(shape: tuple[int, ...], itemsize: int, numel: int, nbytes: int) -> None:
    tensor = TensorSpec("w", shape, "any", itemsize)
    assert (tensor.numel, tensor.nbytes) == (numel, nbytes)


def test_a_slot_ends_after_its_last_element() -> None:
    assert Slot(tensor=3, group=1, offset=16, numel=5).end == 21


def test_pads_are_the_gaps_and_the_tail() -> None:
    # element  0        10      16   21      32
    #          |aaaaaaaa|.......|bbbb|.......|
    assert a_group((0, 10), (16, 5)).pads == ((10, 16), (21, 32))


def test_pads_before_the_first_slot() -> None:
    assert a_group((16, 16)).pads == ((0, 16),)


def test_a_full_chunk_has_no_pads() -> None:
    assert a_group((0, 16), (16, 16)).pads == ()


def test_an_empty_slot_does_not_split_a_pad() -> None:
    # element  0        10      16            32
    #          |aaaaaaaa|.......b.............|     b has no elements
    assert a_group((0, 10), (16, 0)).pads == ((10, 16), (16, 32))
    assert a_group((0, 32), (32, 0)).pads == ()


def test_slots_of_a_layout_are_in_order_of_the_tensors() -> None:
    tensors = tuple(TensorSpec(name, (8,), dtype, 4) for name, dtype in [("a", "f"), ("b", "g"), ("c", "f")])
    of_f = Group(7, "f", 4, 1, 32, (Slot(0, 7, 0, 8), Slot(2, 7, 16, 8)))
    of_g = Group(8, "g", 4, 1, 32, (Slot(1, 8, 0, 8),))
    layout = Layout(128, tensors, (of_f, of_g))
    assert [(slot.tensor, slot.group, slot.offset) for slot in layout.slots] == [(0, 7, 0), (1, 8, 0), (2, 7, 16)]


def test_bytes_of_a_layout() -> None:
    tensors = (TensorSpec("a", (10,), "f", 4), TensorSpec("b", (40,), "f", 4))
    groups = (
        Group(0, "f", 4, 1, 32, (Slot(0, 0, 0, 10),)),
        Group(1, "f", 4, 2, 64, (Slot(1, 1, 0, 40),)),
    )
    layout = Layout(128, tensors, groups)
    assert [group.nbytes for group in groups] == [128, 256]
    assert (layout.payload_nbytes, layout.chunk_nbytes, layout.padding_nbytes) == (200, 384, 184)


def test_an_empty_layout_has_no_bytes() -> None:
    layout = Layout(64, (), ())
    assert (layout.slots, layout.payload_nbytes, layout.chunk_nbytes, layout.padding_nbytes) == ((), 0, 0, 0)


@pytest.mark.parametrize(
    ("frozen", "field"),
    [
        (TensorSpec("a", (1,), "f", 4), "shape"),
        (Slot(0, 0, 0, 1), "offset"),
        (a_group((0, 1)), "numel"),
        (Layout(64, (), ()), "groups"),
    ],
)
def test_layout_data_cannot_be_changed(frozen: object, field: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(frozen, field, None)
