"""Tensors to chunks: where each one goes, and how large a slab should be. Plain arithmetic, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from typing import NamedTuple

from chunkmem.data.errors import LayoutError
from chunkmem.data.layout import ALIGN_NBYTES, EACH, Group, Layout, Slot, TensorSpec

LOOK_BACK = 4
"""How many recently opened groups with room a tensor may join: enough to fill gaps, too few to couple far layers."""

SLAB_FLOOR_NBYTES = 8 << 20
"""From about this size on, copies between tiers run at full bandwidth."""
SLABS_PER_CAP = 64
"""Under a small cap slabs may be this much smaller than it, so that there are enough to choose victims from."""
MAX_PADDING_SHARE = 0.05
"""Above this the search also looks at slabs below the floor."""
TIE_PADDING_SHARE = 0.01
"""At most so much more padding may buy finer chunks: less to pin and to move at a time."""
CHUNK_WEIGHT = 0.15
"""What a chunk's share of the model counts for, against padding: a cap leaves part of a chunk unused on average."""

_FP32_NBYTES = 4
_TRAINED_NBYTES = 3 * _FP32_NBYTES
"""Of an element that Adam updates, beside its weight: two states, and a gradient or master weight."""

# Bounds on the search: about 80 packings, whatever the model; some 230 if it has to look below the floor.
_PROBES_PER_OCTAVE = 12
_SIZES_PER_OCTAVE = 24
_OCTAVES_BELOW_FLOOR = 4
_NUM_HEAVY = 64
_MAX_PARTS = 64

_Item = tuple[str, int]
"""`TensorSpec.kind`, bytes rounded up to `ALIGN_NBYTES`"""


@dataclass(frozen=True, slots=True)
class SlabCandidate:
    """What a slab size would cost."""

    slab_nbytes: int
    padding_share: float
    """Share of the chunks' bytes that no tensor uses, in [0, 1]."""
    num_groups: int
    tensors_per_group: float
    """Mean over groups."""


class _Placement(NamedTuple):
    homes: list[tuple[int, int]]
    """For each item its group and its offset there, in bytes."""
    num_slabs: list[int]
    """For each group."""
    fill_nbytes: list[int]
    """For each group the bytes up to the end of its last item."""


def pack(tensors: Sequence[TensorSpec], *, slab_nbytes: int, first_group: int = 0, num_ranks: int = 1) -> Layout:
    """Give every tensor one slot, in chunks of whole slabs.

    Tensors go in order into the newest group of their kind (dtype, master copy, frozen or not) that has room, of the
    last `LOOK_BACK` such groups; so neighbours stay together. One larger than a slab gets consecutive slabs of its own:
    whatever shared their tail would pin and move all of them.

    Args:
        tensors: in construction order, which is roughly the order of use.
        slab_nbytes: a multiple of `ALIGN_NBYTES`.
        first_group: id of the first group; the others follow in order of their first tensor.
        num_ranks: that share the groups; see `dealt`.

    Raises:
        LayoutError: the slab size, `first_group` or a tensor is not one that can be packed.
    """
    _check_slab(slab_nbytes)
    if first_group < 0:
        raise LayoutError(f"first_group is {first_group}; group ids count from 0, pass 0 or more")
    homes, num_slabs, _ = _place(_items(tensors), slab_nbytes)
    slots: list[list[Slot]] = [[] for _ in num_slabs]
    for index, (tensor, (group, offset_nbytes)) in enumerate(zip(tensors, homes, strict=True)):
        slots[group].append(Slot(index, first_group + group, offset_nbytes // tensor.itemsize, tensor.numel))
    groups = []
    for group, members in enumerate(slots):
        first = tensors[members[0].tensor]
        numel = num_slabs[group] * slab_nbytes // first.itemsize
        at = first_group + group
        groups.append(
            Group(
                at,
                first.dtype,
                first.itemsize,
                num_slabs[group],
                numel,
                tuple(members),
                master=first.master,
                is_on_host=first.is_on_host,
            )
        )
    return dealt(Layout(slab_nbytes, tuple(tensors), tuple(groups)), num_ranks=num_ranks)


def dealt(layout: Layout, *, num_ranks: int) -> Layout:
    """Return a layout whose groups belong to so many ranks: each keeps about as many bytes as the others.

    The largest group goes first, each to the rank that has least so far. Groups of one size are dealt out in turn, so
    that those that are used together belong to as many ranks as possible. Those that modules compute with on HOST are
    dealt out for themselves: they take nothing of DEVICE.
    """
    kept_nbytes = {group: _kept_nbytes(group, layout.tensors[group.slots[0].tensor]) for group in layout.groups}
    # By place. Of ranks that have as much, the next one comes first: not every small layout begins with rank 0.
    ranks = {is_on_host: [(0, at) for at in range(num_ranks)] for is_on_host in (False, True)}
    owned = []
    for group in sorted(layout.groups, key=lambda group: (-kept_nbytes[group], group.id)):
        if layout.tensors[group.slots[0].tensor].is_each_ranks and num_ranks > 1:
            owned.append(replace(group, owner=EACH))
            continue
        nbytes, at = ranks[group.is_on_host][0]
        owned.append(replace(group, owner=(layout.groups[0].id + at) % num_ranks))
        heapreplace(ranks[group.is_on_host], (nbytes + kept_nbytes[group], at))
    return replace(layout, groups=tuple(sorted(owned, key=lambda group: group.id)))


def _kept_nbytes(group: Group, tensor: TensorSpec) -> int:
    """Return about how many bytes a rank has of a group because it owns it."""
    return group.nbytes if tensor.is_frozen else group.nbytes + _TRAINED_NBYTES * group.numel


def choose_slab_nbytes(
    tensors: Sequence[TensorSpec], *, chunk_numel: int | None, device_cap_nbytes: int, num_ranks: int = 1
) -> int:
    """Return the slab size that a configuration means: that of `default_chunk_size` elements, or the searched one.

    A chunk never exceeds the bytes of the largest dtype class.

    Args:
        tensors: what is to be packed.
        chunk_numel: `default_chunk_size`; None searches.
        device_cap_nbytes: see `search_slab_nbytes`.
        num_ranks: that share the chunks: a searched size is small enough that each gets about as many bytes.

    Raises:
        LayoutError: see `search_slab_nbytes`.
    """
    if num_ranks > 1:  # the search looks at slabs of 1/64 of this at least: an eighth of a rank's share
        device_cap_nbytes = min(device_cap_nbytes, 8 * sum(tensor.nbytes for tensor in tensors) // num_ranks)
    if chunk_numel is None:
        return search_slab_nbytes(tensors, device_cap_nbytes=device_cap_nbytes)
    by_kind = Counter[str]()
    for kind, nbytes in _items(tensors):
        by_kind[kind] += nbytes
    if not by_kind:
        return ALIGN_NBYTES
    largest, nbytes = by_kind.most_common(1)[0]
    itemsize = next(tensor.itemsize for tensor in tensors if tensor.kind == largest)
    return min(_align(chunk_numel * min(itemsize, _FP32_NBYTES)), max(ALIGN_NBYTES, nbytes))


def search_slab_nbytes(tensors: Sequence[TensorSpec], *, device_cap_nbytes: int) -> int:
    """Choose the slab size that wastes least for these tensors; of nearly equal ones the finest.

    Finest means more groups, each a smaller share of the model, and not just a smaller slab: where every tensor is
    larger than a slab, a smaller one changes nothing but the padding. `slab_candidates` says which sizes are looked at.

    Raises:
        LayoutError: the cap is not positive, or a tensor cannot be packed.
    """
    candidates = slab_candidates(tensors, device_cap_nbytes=device_cap_nbytes)
    least = min(candidate.padding_share for candidate in candidates)
    # A tie must not turn a size that keeps the promise into one that breaks it.
    bar = min(least + TIE_PADDING_SHARE, max(least, MAX_PADDING_SHARE))

    def score(candidate: SlabCandidate) -> tuple[float, int]:
        return candidate.padding_share + CHUNK_WEIGHT / max(candidate.num_groups, 1), candidate.slab_nbytes

    return min((candidate for candidate in candidates if candidate.padding_share <= bar), key=score).slab_nbytes


def slab_candidates(tensors: Sequence[TensorSpec], *, device_cap_nbytes: int) -> list[SlabCandidate]:
    """List the slab sizes worth a look, smallest first, with what each would cost.

    They lie between the floor, ``min(SLAB_FLOOR_NBYTES, device_cap_nbytes / SLABS_PER_CAP)``, and four times that, and
    never exceed the bytes of the largest dtype class: a model below the floor gets exactly one chunk for that class. If
    all of them waste more than `MAX_PADDING_SHARE`, sizes below the floor follow, octave by octave, until one does not.

    Raises:
        LayoutError: the cap is not positive, or a tensor cannot be packed.
    """
    if device_cap_nbytes <= 0:
        raise LayoutError(f"the device cap is {device_cap_nbytes} bytes; give it at least 1 byte")
    items = _items(tensors)
    payload_nbytes = sum(tensor.nbytes for tensor in tensors)
    class_nbytes: Counter[str] = Counter()
    for kind, nbytes in items:
        class_nbytes[kind] += nbytes
    largest = max(class_nbytes.values(), default=0) or ALIGN_NBYTES
    floor = min(SLAB_FLOOR_NBYTES, _align(-(-device_cap_nbytes // SLABS_PER_CAP)), largest)
    found: dict[int, SlabCandidate] = {}
    for low, high in _octaves(floor, largest):
        if low < floor and min(candidate.padding_share for candidate in found.values()) <= MAX_PADDING_SHARE:
            break
        for size in _promising_sizes(items, low, high):
            found[size] = _cost(items, size, payload_nbytes=payload_nbytes)
    return [found[size] for size in sorted(found)]


def _octaves(floor: int, largest: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of sizes to search: two octaves up from `floor`, then, as a fallback, down from it."""
    for low in (floor, 2 * floor):
        if low <= largest:
            yield low, min(2 * low, largest)
    if floor == largest:
        return
    for shift in range(1, _OCTAVES_BELOW_FLOOR + 1):
        if floor >> shift >= ALIGN_NBYTES:
            yield _align(floor >> shift), _align(floor >> shift - 1)


def _promising_sizes(items: Sequence[_Item], low: int, high: int) -> list[int]:
    """Propose a bounded number of slab sizes in ``[low, high]``, ends included.

    A good size is an even part of a large tensor, so that its last slab is full, or the bytes that groups packed with a
    slightly larger slab end up with, so that the same packing has no tail. Both are ranked by a lower bound on the
    waste, since packing all of them would take too long.
    """
    heavy = Counter[int]()
    for _, nbytes in items:
        heavy[nbytes] += nbytes
    heaviest = [(nbytes, total // nbytes) for nbytes, total in heavy.most_common(_NUM_HEAVY) if nbytes]
    sizes = set()
    for nbytes, _ in heaviest:
        for parts in range(-(-nbytes // high), min(nbytes // low, _MAX_PARTS) + 1):
            sizes.add(_align(-(-nbytes // parts)))
    steps = [probe / (_PROBES_PER_OCTAVE - 1) for probe in range(_PROBES_PER_OCTAVE)]
    for probe_nbytes in sorted({_align(int(low * (high / low) ** step)) for step in steps}):
        fills = Counter(_place(items, probe_nbytes).fill_nbytes)
        sizes.update(fill for fill, _ in fills.most_common(_SIZES_PER_OCTAVE))
    light_nbytes = sum(heavy.values()) - sum(nbytes * count for nbytes, count in heaviest)

    def least_nbytes(size: int) -> int:
        large = sum(-(-nbytes // size) * count for nbytes, count in heaviest if nbytes > size)
        small = sum(nbytes * count for nbytes, count in heaviest if nbytes <= size)
        return (large + -(-(small + light_nbytes) // size)) * size

    ranked = sorted((size for size in sizes if low <= size <= high), key=lambda size: (least_nbytes(size), size))
    return [*{low, high, *ranked[:_SIZES_PER_OCTAVE]}]


def _cost(items: Sequence[_Item], slab_nbytes: int, *, payload_nbytes: int) -> SlabCandidate:
    num_slabs = _place(items, slab_nbytes).num_slabs
    chunk_nbytes = sum(num_slabs) * slab_nbytes
    return SlabCandidate(
        slab_nbytes=slab_nbytes,
        padding_share=(chunk_nbytes - payload_nbytes) / chunk_nbytes if chunk_nbytes else 0.0,
        num_groups=len(num_slabs),
        tensors_per_group=len(items) / len(num_slabs) if num_slabs else 0.0,
    )


def _place(items: Sequence[_Item], slab_nbytes: int) -> _Placement:
    """Decide group and offset of every item; the only place where that is decided."""
    homes: list[tuple[int, int]] = []
    num_slabs: list[int] = []
    fill_nbytes: list[int] = []
    windows: dict[str, list[int]] = {}  # kind -> groups that may still be joined, newest first
    for kind, nbytes in items:
        if nbytes > slab_nbytes:
            homes.append((len(fill_nbytes), 0))
            num_slabs.append(-(-nbytes // slab_nbytes))
            fill_nbytes.append(nbytes)
            continue
        window = windows.setdefault(kind, [])
        for group in window:
            if fill_nbytes[group] + nbytes <= slab_nbytes:
                break
        else:
            group = len(fill_nbytes)
            # Full groups leave first: a run of tensors of exactly one slab must not push out those with gaps.
            roomy = [other for other in window if fill_nbytes[other] < slab_nbytes]
            window[:] = [group, *roomy[: LOOK_BACK - 1]]
            num_slabs.append(1)
            fill_nbytes.append(0)
        homes.append((group, fill_nbytes[group]))
        fill_nbytes[group] += nbytes
    return _Placement(homes, num_slabs, fill_nbytes)


def _items(tensors: Sequence[TensorSpec]) -> list[_Item]:
    """Reduce tensors to what placing needs, refusing those that cannot be packed."""
    itemsizes: dict[str, int] = {}
    for tensor in tensors:
        if tensor.itemsize <= 0 or ALIGN_NBYTES % tensor.itemsize:
            raise LayoutError(
                f"{tensor.name}: elements of {tensor.itemsize} bytes do not divide the alignment of {ALIGN_NBYTES} "
                f"bytes; convert it to another dtype or keep it out of the chunks"
            )
        if any(extent < 0 for extent in tensor.shape):
            raise LayoutError(f"{tensor.name}: shape {tensor.shape} has a negative extent; give its real shape")
        known = itemsizes.setdefault(tensor.dtype, tensor.itemsize)
        if known != tensor.itemsize:
            raise LayoutError(
                f"{tensor.name}: {tensor.dtype} elements of {tensor.itemsize} bytes, but {known} bytes in tensors "
                f"before it; give one size for each dtype"
            )
    return [(tensor.kind, _align(tensor.nbytes)) for tensor in tensors]


def _check_slab(slab_nbytes: int) -> None:
    if slab_nbytes <= 0 or slab_nbytes % ALIGN_NBYTES:
        raise LayoutError(
            f"a slab of {slab_nbytes} bytes is not a positive multiple of {ALIGN_NBYTES} bytes; "
            f"use {max(ALIGN_NBYTES, _align(slab_nbytes))}"
        )


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES
