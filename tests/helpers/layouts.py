"""Tensors to pack, and a checker that derives again, from the tensors alone, what a right layout is."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from chunkmem.data.layout import Group, Layout, TensorSpec

CACHE_LINE = 64

ITEMSIZES = {"float64": 8, "float32": 4, "float16": 2, "int8": 1}


def tensors_of(*sizes: int) -> list[TensorSpec]:
    """Make float32 tensors of so many bytes each."""
    return [TensorSpec(f"w{index}", (nbytes // 4,), "float32", 4) for index, nbytes in enumerate(sizes)]


@st.composite
def tensor_lists(draw: st.DrawFn) -> list[TensorSpec]:
    """Draw up to 40 tensors of mixed dtypes and up to two dimensions, scalars and empty ones included."""
    dtypes = st.sampled_from(sorted(ITEMSIZES))
    shape = st.lists(st.integers(0, 24), max_size=2).map(tuple)
    drawn = draw(st.lists(st.tuples(dtypes, shape), max_size=40))
    return [TensorSpec(f"w{i}", extents, dtype, ITEMSIZES[dtype]) for i, (dtype, extents) in enumerate(drawn)]


def check_layout(layout: Layout, tensors: Sequence[TensorSpec], *, slab_nbytes: int, first_group: int = 0) -> None:
    """Assert every promise a layout makes; looks at plain fields only, never at a derived property of the layout."""
    assert layout.slab_nbytes == slab_nbytes
    assert list(layout.tensors) == list(tensors)
    placed = [slot.tensor for group in layout.groups for slot in group.slots]
    assert sorted(placed) == list(range(len(tensors))), "not every tensor has exactly one slot"
    assert [group.id for group in layout.groups] == [first_group + i for i in range(len(layout.groups))]
    firsts = [min(slot.tensor for slot in group.slots) for group in layout.groups]
    assert firsts == sorted(firsts), "groups are not in order of their first tensor"
    for group in layout.groups:
        _check_group(group, tensors, slab_nbytes)


def _check_group(group: Group, tensors: Sequence[TensorSpec], slab_nbytes: int) -> None:
    assert group.slots, f"group {group.id} holds nothing"
    assert group.numel * group.itemsize == group.num_slabs * slab_nbytes
    end_nbytes = 0
    for slot in group.slots:
        tensor = tensors[slot.tensor]
        numel = 1
        for extent in tensor.shape:
            numel *= extent
        start_nbytes = slot.offset * tensor.itemsize
        assert slot.group == group.id, f"{tensor.name} says group {slot.group}, is in {group.id}"
        assert (tensor.dtype, tensor.itemsize) == (group.dtype, group.itemsize), f"{tensor.name} is of another dtype"
        assert slot.numel == numel, f"{tensor.name} has {numel} elements, its slot {slot.numel}"
        assert start_nbytes % CACHE_LINE == 0, f"{tensor.name} starts at byte {start_nbytes}"
        assert start_nbytes >= end_nbytes, f"{tensor.name} begins inside its predecessor, or out of order"
        end_nbytes = start_nbytes + numel * tensor.itemsize
    assert end_nbytes <= group.num_slabs * slab_nbytes, f"group {group.id} overflows"
    needed = max(1, -(-end_nbytes // slab_nbytes))
    assert group.num_slabs == needed, f"group {group.id} takes {group.num_slabs} slabs, needs {needed}"
    assert group.num_slabs == 1 or len(group.slots) == 1, f"group {group.id} shares several slabs"


def paint(group: Group) -> list[int | None]:
    """Write into every element of a chunk the tensor that owns it, None where none does; fails if two do."""
    owners: list[int | None] = [None] * group.numel
    for slot in group.slots:
        for element in range(slot.offset, slot.offset + slot.numel):
            assert owners[element] is None, f"element {element} belongs to {owners[element]} and {slot.tensor}"
            owners[element] = slot.tensor
    return owners
