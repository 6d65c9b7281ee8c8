"""Choosing the slab size: how much it wastes on real models, how fine it is, how long it takes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkmem.data import layout_pack as pack_module
from chunkmem.data.errors import LayoutError
from chunkmem.data.layout import Layout, TensorSpec
from chunkmem.data.layout_pack import MAX_PADDING_SHARE, TIE_PADDING_SHARE, pack, search_slab_nbytes, slab_candidates
from tests.helpers import shapes
from tests.helpers.layouts import check_layout, tensor_lists, tensors_of

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def padding_share(layout: Layout) -> float:
    return layout.padding_nbytes / layout.chunk_nbytes if layout.groups else 0.0


def floor_nbytes(cap: int) -> int:
    """Say from where on the contract of `default_chunk_size` lets slabs begin."""
    return min(8 * MIB, cap // 64)


# Counted by others: the papers, and the totals that the reference implementations print.
PUBLISHED = {
    "GPT-2 small": 124_439_808,
    "GPT-2 medium": 354_823_168,
    "GPT-2 xl": 1_557_611_200,
    "Llama 7B": 6_738_415_616,
    "BERT base": 109_482_240,
    "T5 base": 222_903_552,
    "ViT-B/16": 86_567_656,
    "ResNet-50": 25_557_032,
    "Mixtral 8x7B": 46_702_792_704,
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_models_have_their_published_size(model: str) -> None:
    assert sum(spec.numel for spec in shapes.MODELS[model]()) == PUBLISHED[model]


@pytest.mark.parametrize("cap", [16 * MIB, 64 * MIB, 256 * MIB, GIB, 80 * GIB], ids="{:.0e}".format)
@pytest.mark.parametrize("model", shapes.MODELS)
def test_padding_is_at_most_five_percent(model: str, cap: int) -> None:
    tensors = shapes.MODELS[model]()
    slab_nbytes = search_slab_nbytes(tensors, device_cap_nbytes=cap)
    layout = pack(tensors, slab_nbytes=slab_nbytes)
    check_layout(layout, tensors, slab_nbytes=slab_nbytes)
    assert layout.padding_nbytes <= 0.05 * layout.payload_nbytes
    if slab_nbytes < floor_nbytes(cap):
        candidates = slab_candidates(tensors, device_cap_nbytes=cap)
        assert all(it.padding_share > 0.05 for it in candidates if it.slab_nbytes >= floor_nbytes(cap))


def test_below_the_floor_only_where_the_floor_wastes_too_much() -> None:
    """The 2.25 MiB convolutions of a ResNet waste a quarter of three 1 MiB slabs, and little else is there to fill."""
    tensors = shapes.MODELS["ResNet-50"]()
    slab_nbytes = search_slab_nbytes(tensors, device_cap_nbytes=64 * MIB)
    assert MIB / 16 <= slab_nbytes < MIB
    for size in range(MIB, 4 * MIB, 4 * KIB):
        assert padding_share(pack(tensors, slab_nbytes=size)) > 0.05


@pytest.mark.parametrize(
    ("sizes", "cap", "expected"),
    [
        ((), GIB, 64),
        ((0, 0), GIB, 64),
        ((40, 12), GIB, 128),
        ((3 * MIB, 5 * MIB - 64, 4), GIB, 8 * MIB),
        ((100, 900), 1, 64),
    ],
    ids=["nothing", "no elements", "two lines", "exactly the floor", "cap of one byte"],
)
def test_a_slab_is_never_larger_than_the_model(sizes: Sequence[int], cap: int, expected: int) -> None:
    tensors = tensors_of(*sizes)
    slab_nbytes = search_slab_nbytes(tensors, device_cap_nbytes=cap)
    assert slab_nbytes == expected


@pytest.mark.parametrize("cap", [0, -1])
def test_the_cap_is_positive(cap: int) -> None:
    with pytest.raises(LayoutError, match=rf"the device cap is {cap} bytes"):
        search_slab_nbytes(tensors_of(4), device_cap_nbytes=cap)


def test_a_second_dtype_takes_slabs_of_the_same_size() -> None:
    tensors = [*tensors_of(4 * MIB, 4 * MIB), TensorSpec("half", (2 * MIB,), "float16", 2)]
    # 4 MiB suits both classes. With a large cap the floor wins: one chunk of 8 MiB each, one of them half empty.
    assert search_slab_nbytes(tensors, device_cap_nbytes=16 * GIB) == 8 * MIB
    assert search_slab_nbytes(tensors, device_cap_nbytes=256 * MIB) == 4 * MIB


@given(tensors=tensor_lists(), cap=st.integers(1, 1 << 20))
def test_candidates_cost_what_packing_says(tensors: list[TensorSpec], cap: int) -> None:
    largest = max((padded_nbytes(tensors, dtype) for dtype in {spec.dtype for spec in tensors}), default=0)
    candidates = slab_candidates(tensors, device_cap_nbytes=cap)
    sizes = [candidate.slab_nbytes for candidate in candidates]
    assert sizes == sorted(set(sizes))
    for candidate in candidates:
        layout = pack(tensors, slab_nbytes=candidate.slab_nbytes)
        assert candidate.slab_nbytes <= max(largest, 64)
        assert candidate.num_groups == len(layout.groups)
        assert candidate.padding_share == padding_share(layout)
        assert candidate.tensors_per_group * len(layout.groups) == pytest.approx(len(tensors))
    assert search_slab_nbytes(tensors, device_cap_nbytes=cap) in sizes


def padded_nbytes(tensors: Sequence[TensorSpec], dtype: str) -> int:
    return sum(-(-spec.nbytes // 64) * 64 for spec in tensors if spec.dtype == dtype)


SMALL_MODELS = {
    "GPT": shapes.gpt(6, 48, vocab=257, context=32),
    "Llama": shapes.llama(6, 48, 128, vocab=300),
    "MoE": shapes.llama(3, 48, 80, kv_width=16, vocab=200, experts=6),
    "BERT": shapes.bert(4, 36),
    "ViT": shapes.vit(6, 36),
    "T5": shapes.t5(4, 40, 120, 4),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("cap", [256 * KIB, 700 * KIB, 2 * MIB])
@pytest.mark.parametrize("model", SMALL_MODELS)
def test_the_search_misses_little_that_trying_every_size_would_find(model: str, cap: int) -> None:
    tensors = SMALL_MODELS[model]
    chosen = padding_share(pack(tensors, slab_nbytes=search_slab_nbytes(tensors, device_cap_nbytes=cap)))
    least = min(padding_share(pack(tensors, slab_nbytes=size)) for size in range(-(-cap // 4096) * 64, cap // 16, 64))
    # The tie, and half a point for sizes that were not proposed.
    assert chosen <= least + TIE_PADDING_SHARE + 0.005


def test_of_nearly_equal_sizes_the_one_with_more_groups() -> None:
    candidates = slab_candidates(shapes.MODELS["GPT 25M"](), device_cap_nbytes=256 * MIB)
    chosen_nbytes = search_slab_nbytes(shapes.MODELS["GPT 25M"](), device_cap_nbytes=256 * MIB)
    (chosen,) = (candidate for candidate in candidates if candidate.slab_nbytes == chosen_nbytes)
    least = min(candidates, key=lambda candidate: candidate.padding_share)
    assert chosen.num_groups > 2 * least.num_groups
    assert least.padding_share < chosen.padding_share <= least.padding_share + TIE_PADDING_SHARE
    assert chosen.padding_share <= MAX_PADDING_SHARE


def test_a_tie_does_not_break_the_promise() -> None:
    # 1408 bytes make 5 groups for 5.2 % padding, within a point of the least; but 3264 bytes keep it below 5 %.
    tensors = tensors_of(640, 2752, 512, 768, 640, 2752, 512, 768)
    assert padding_share(pack(tensors, slab_nbytes=1408)) > MAX_PADDING_SHARE
    assert search_slab_nbytes(tensors, device_cap_nbytes=64 * KIB) == 3264
    assert padding_share(pack(tensors, slab_nbytes=3264)) <= MAX_PADDING_SHARE


def test_a_smaller_slab_that_makes_no_more_groups_buys_nothing() -> None:
    """Every matrix of a 7 B Llama is larger than a slab here, so only padding tells the sizes apart."""
    tensors = shapes.MODELS["Llama 7B"]()
    candidates = slab_candidates(tensors, device_cap_nbytes=80 * GIB)
    least = min(candidates, key=lambda candidate: candidate.padding_share)
    assert any(
        candidate.slab_nbytes < least.slab_nbytes and candidate.padding_share <= least.padding_share + TIE_PADDING_SHARE
        for candidate in candidates
    )
    assert search_slab_nbytes(tensors, device_cap_nbytes=80 * GIB) == least.slab_nbytes


LARGE_MODELS = {
    "GPT 175B": lambda: shapes.gpt(96, 12288, context=2048),
    "10k tensors": lambda: shapes.llama(48, 2048, 768, experts=64),
}


@pytest.mark.parametrize("model", LARGE_MODELS)
def test_time_is_bounded_by_a_number_of_packings(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = LARGE_MODELS[model]()
    placed = []
    place = pack_module._place

    def counted(items: list[tuple[str, int]], slab_nbytes: int) -> object:
        placed.append(len(items))
        return place(items, slab_nbytes)

    monkeypatch.setattr(pack_module, "_place", counted)
    chosen = search_slab_nbytes(tensors, device_cap_nbytes=GIB)
    assert sum(placed) <= 80 * len(tensors)
    assert padding_share(pack(tensors, slab_nbytes=chosen)) <= 0.01
