"""Activations of blocks as chunks: kept or offloaded, bit for bit what plain PyTorch gives, within the caps."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import chunkmem
from chunkmem.data.activations import activation_contents
from chunkmem.data.types import Role
from chunkmem.modules.binding import BoundChunk
from chunkmem.plan.model import Lane
from chunkmem.runtime.store import Chunk
from tests.cpu.test_precision import LOWERED
from tests.helpers.lanes import adversarial
from tests.helpers.low_precision import LowPlain
from tests.helpers.training import (
    HOST_NBYTES,
    VARIANTS,
    Chunked,
    Outcome,
    Trainer,
    Variant,
    assert_same,
    repeats,
    train_plain,
    variants_of,
)
from tests.helpers.twins import cpu_only
from tests.helpers.zoo import ZOO, ZooModel

pytestmark = cpu_only

CASES = {case.name: case for case in ZOO}
AMPLE_NBYTES = 32 << 20
STEPS = 6


def config(case: ZooModel, device_nbytes: int, policy: str, precision: str = "fp32") -> chunkmem.Config:
    numel = case.chunk_numel if precision == "fp32" else 2 * case.chunk_numel
    return chunkmem.Config.from_dict(
        {
            "memory": {"device": device_nbytes, "host": HOST_NBYTES},
            "default_chunk_size": numel,
            "activations": {"policy": policy},
            **({} if precision == "fp32" else {"precision": precision}),
        }
    )


@functools.cache
def smallest_nbytes(case: ZooModel, variant: Variant, policy: str, precision: str = "fp32") -> int:
    """The smallest cap, as a run with ample memory reports it."""
    with chunkmem.ChunkManager(config(case, AMPLE_NBYTES, policy, precision)) as manager:
        Trainer(case, variant, Chunked(manager)).run(STEPS)
        if variant.early_stop is None:  # else the checkpoint saves nothing in blocks
            assert manager.runtime.tiers.device.peak[Role.ACTIVATION] > 0
        required_nbytes = manager.memory().device.required_nbytes
    # Where steps are of other experts each time, what auto chose by one is not what another needs least for.
    return required_nbytes + (case.slab_nbytes if policy == "auto" and not repeats(case) else 0)


def train(
    case: ZooModel, variant: Variant, policy: str, device_nbytes: int, seed: int | None, precision: str = "fp32"
) -> Outcome:
    lanes = None if seed is None else adversarial(seed)
    with chunkmem.ChunkManager(config(case, device_nbytes, policy, precision), make_lanes=lanes) as manager:
        trainer = Trainer(case, variant, Chunked(manager, follows=repeats(case)))
        manager.runtime.tiers.device_pool.poison = manager.runtime.tiers.host_pool.poison = True
        return trainer.run(STEPS)


FEW = {
    "keep": [("gpt", "plain")],
    "offload": [("cnn", "evaluation"), ("lstm", "plain"), ("t5", "half_frozen")],
    "recompute": [("gpt", "micro_batches"), ("direct", "plain")],
    "auto": [("cnn", "scheduler"), ("vit", "plain"), ("moe", "plain"), ("inplace", "plain"), ("reused", "plain")],
}
"""By policy: what an ordinary run has of the matrix."""


def matrix() -> list[Any]:
    """Every model, in every variant that makes sense for it, by every policy."""
    return [
        pytest.param(
            policy,
            case.name,
            variant.name,
            id=f"{policy}-{case.name}-{variant.name}",
            marks=() if (case.name, variant.name) in FEW[policy] else pytest.mark.full,
        )
        for policy in FEW
        for case in ZOO
        for variant in variants_of(case)
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize(("policy", "model", "way"), matrix())
def test_the_numbers_are_those_of_plain_pytorch(policy: str, model: str, way: str) -> None:
    case, variant = CASES[model], {variant.name: variant for variant in VARIANTS}[way]
    expected = train_plain(case, variant, STEPS)
    least = smallest_nbytes(case, variant, policy)
    for device_nbytes, seed in ((least, None), (least, 1), (least + least // 3, 2), (AMPLE_NBYTES, 3)):
        assert_same(train(case, variant, policy, device_nbytes, seed), expected)


FEW_IN_BF16 = {("keep", "lstm"), ("offload", "cnn"), ("recompute", "vit"), ("auto", "gpt")}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("policy", "case"),
    [
        pytest.param(
            policy,
            case,
            id=f"{policy}-{case.name}",
            marks=() if (policy, case.name) in FEW_IN_BF16 else pytest.mark.full,
        )
        for policy in FEW
        for case in LOWERED
    ],
)
def test_in_bf16_the_numbers_are_those_of_plain_pytorch_with_master_weights(policy: str, case: ZooModel) -> None:
    variant = VARIANTS[0]
    expected = Trainer(case, variant, LowPlain(torch.bfloat16)).run(STEPS)
    least = smallest_nbytes(case, variant, policy, "bf16")
    for device_nbytes, seed in ((least, None), (least, 1), (least + least // 3, 2), (AMPLE_NBYTES, 3)):
        assert_same(train(case, variant, policy, device_nbytes, seed, "bf16"), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", FEW)
def test_the_smallest_cap_is_as_reported(policy: str) -> None:
    """One byte less is too little."""
    case, variant = CASES["gpt"], VARIANTS[0]
    least = smallest_nbytes(case, variant, policy)
    train(case, variant, policy, least, None)
    with pytest.raises(chunkmem.CapacityError):
        train(case, variant, policy, least - 1, None)


OUTSIDE: dict[str, tuple[str, ...]] = {"gpt": (), "cnn": ("scales.0", "scales.1", "scales.2")}
"""By model: weights that the model itself reads between blocks, and autograd has saved there."""


@pytest.mark.few(2)
@pytest.mark.parametrize("policy", FEW)
@pytest.mark.parametrize("model", OUTSIDE)
def test_the_smallest_cap_is_what_the_backward_of_a_block_takes(model: str, policy: str) -> None:
    """Activations, the weights of one layer that still wait for their gradients, and one chunk of gradients.

    Activations are those of all blocks if they are kept, of one if they are offloaded; of one that is recomputed, with
    its inputs. The first step of `auto` recomputes all.
    """
    case = CASES[model]
    with chunkmem.ChunkManager(config(case, AMPLE_NBYTES, "recompute" if policy == "auto" else policy)) as manager:
        trainer = Trainer(case, VARIANTS[0], Chunked(manager))
        trainer.run(2)
        assert manager.trace is not None
        sizes = Counter[str]()
        for chunk, held in activation_contents(manager.trace).items():
            sizes[held.region] += manager.trace.chunk_nbytes[chunk]
        chunks = manager.runtime.memory.store.chunks.values()
        found = {name: chunk for chunk in chunks for name in names_in(chunk)}
        homes = {name: found[name] for name, _ in trainer.model.named_parameters()}
    nbytes = {block: most_nbytes(homes, block, OUTSIDE[model]) for block in blocks_of(homes)}
    assert sizes.keys() == nbytes.keys()
    if policy == "keep":
        expected = sizes.total() + nbytes[max(nbytes)]
    else:
        expected = max(sizes[block] + nbytes[block] for block in nbytes)
    assert smallest_nbytes(case, VARIANTS[0], policy) == expected


def names_in(chunk: Chunk) -> list[str]:
    """The parameters whose values a chunk has."""
    if chunk.id.role is not Role.PARAM:
        return []
    assert isinstance(chunk.home, BoundChunk)
    return [managed.name for managed in chunk.home.parameters]


def blocks_of(homes: dict[str, Chunk]) -> list[str]:
    return sorted({".".join(name.split(".")[:2]) for name in homes if name.startswith("blocks.")})


def most_nbytes(homes: dict[str, Chunk], block: str, outside: tuple[str, ...]) -> int:
    """What backward has of weights and gradients at most, gradients coming in the reverse order of parameters."""
    layers: dict[str, list[str]] = {}
    for name in homes:
        if name.startswith(f"{block}."):
            layers.setdefault(name.rpartition(".")[0], []).append(name)
    return max(
        sum(chunk.nbytes for chunk in {homes[name] for name in (*waiting, *outside)}) + homes[waiting[-1]].nbytes
        for names in layers.values()
        for waiting in (names[: at + 1] for at in range(len(names)))
    )


def activation_copies(manager: chunkmem.ChunkManager) -> dict[Lane, list[int]]:
    """The bytes of each copy of activations in the last step, by link."""
    timeline = manager.timeline()
    assert timeline is not None
    found: dict[Lane, list[int]] = {Lane.D2H: [], Lane.H2D: []}
    for span in timeline.spans:
        if span.nbytes and span.chunk is not None and span.chunk.role is Role.ACTIVATION:
            found[span.lane].append(span.nbytes)
    return found


def test_offloading_moves_each_byte_once_each_way_and_nothing_where_all_fits() -> None:
    case, variant = CASES["gpt"], VARIANTS[0]
    least = smallest_nbytes(case, variant, "offload")
    for device_nbytes in (least, AMPLE_NBYTES):
        with chunkmem.ChunkManager(config(case, device_nbytes, "offload")) as manager:
            Trainer(case, variant, Chunked(manager, follows=True)).run(STEPS)
            copies = activation_copies(manager)
            assert sorted(copies[Lane.D2H]) == sorted(copies[Lane.H2D])
            assert bool(copies[Lane.D2H]) is (device_nbytes == least)
            blocks = [c.nbytes for c in manager.runtime.memory.store.chunks.values() if c.id.role is Role.ACTIVATION]
            assert len(copies[Lane.D2H]) <= len(blocks)


def test_a_last_batch_that_is_smaller_follows_the_plan() -> None:
    case = CASES["gpt"]
    least = smallest_nbytes(case, VARIANTS[0], "offload")
    with chunkmem.ChunkManager(config(case, 2 * least, "offload")) as manager:
        trainer = Trainer(case, VARIANTS[0], Chunked(manager))
        trainer.run(STEPS)
        whole = trainer.case.batch
        trainer.case = replace(case, batch=lambda seed: tuple(part[:2] for part in whole(seed)))
        trainer.step()
        timeline = manager.timeline()
        assert timeline is not None
        assert timeline.plan_misses == 0
        trainer.case = case
        trainer.step()
        timeline = manager.timeline()
        assert timeline is not None
        assert timeline.plan_misses == 0


def test_a_step_while_an_exception_is_handled_has_inputs_in_the_ledger() -> None:
    """What a call is recomputed from was left out: the call seemed to have been interrupted."""
    case = CASES["gpt"]
    with chunkmem.ChunkManager(config(case, AMPLE_NBYTES, "recompute")) as manager:
        trainer = Trainer(case, VARIANTS[0], Chunked(manager))
        try:
            raise ValueError
        except ValueError:
            outcome = trainer.run(3)
        chunks = manager.runtime.memory.store.chunks.values()
        assert any(chunk.label.startswith("inputs of") for chunk in chunks)
    assert_same(outcome, train_plain(case, VARIANTS[0], 3))


def test_a_block_that_is_called_several_times_is_kept_where_there_is_room() -> None:
    """Its weights stay held from one call's backward to the next, so recomputing most calls has no events."""
    case = CASES["reused"]
    with chunkmem.ChunkManager(config(case, AMPLE_NBYTES, "auto")) as manager:
        Trainer(case, VARIANTS[0], Chunked(manager, follows=True)).run(STEPS)
        assert manager.trace is not None
        assert [region.recomputed for region in manager.trace.regions] == [None] * 5
