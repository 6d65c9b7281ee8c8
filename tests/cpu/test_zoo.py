"""Every model of the zoo, trained every way, under every cap: bit for bit what plain PyTorch gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import pytest
import torch

import chunkmem
from tests.helpers.excluded import partly_excluded
from tests.helpers.ranks import RankFailure, Team
from tests.helpers.training import (
    AMPLE_NBYTES,
    STEPS,
    VARIANTS,
    Chunked,
    Outcome,
    Plain,
    Trainer,
    Variant,
    assert_same,
    capped,
    compute_device,
    footprint,
    train_chunked,
    train_plain,
    variants_of,
)
from tests.helpers.zoo import ZOO, ZooModel

CAPS = ("all", "60% of model data", "50% of PARAM", "smallest")
PLAIN = VARIANTS[0]
ALL_ON_HOST: dict[str, Any] = {"optimizer": {"params": {"use_hybrid_adam": False}}}
"""Keys of a configuration under which no update runs on DEVICE."""
CHECKPOINTED = ("plain", "checkpoint", "checkpoint_to_the_end")


def matrix() -> list[Any]:
    """Every case; by default each model plainly under the smallest cap, and in one other variant under the next one."""
    cases = []
    for index, case in enumerate(ZOO):
        variants = variants_of(case)
        chosen = {"smallest": PLAIN, "50% of PARAM": variants[1 + index % (len(variants) - 1)]}
        for variant in variants:
            for cap in CAPS:
                marks = () if chosen.get(cap) is variant else pytest.mark.full
                cases.append(pytest.param(case, variant, cap, id=f"{case.name}-{variant.name}-{cap}", marks=marks))
    return cases


@pytest.mark.few(2)
@pytest.mark.parametrize(("case", "variant", "cap"), matrix())
def test_training_is_plain_pytorch_bit_for_bit(case: ZooModel, variant: Variant, cap: str) -> None:
    sizes = footprint(case, variant)
    if cap == "all":
        assert_same(sizes.outcome, train_plain(case, variant))
        return
    share = {"60% of model data": 0.6 * 4, "50% of PARAM": 0.5, "smallest": 0.0}[cap]
    device_nbytes = max(sizes.required_nbytes, int(share * sizes.param_nbytes))
    assert device_nbytes < 4 * sizes.param_nbytes
    assert_same(train_chunked(case, variant, STEPS, capped(case, device_nbytes)), train_plain(case, variant))


class AnyClass(Chunked):
    """`chunkmem.Optimizer` in place of `chunkmem.AdamW`."""

    def optimizer(self, params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
        return chunkmem.Optimizer(torch.optim.AdamW, params, manager=self.manager, fused=True, **options)


class Excluding(Chunked):
    """Some modules stay ordinary ones."""

    def building(self) -> AbstractContextManager[Any]:
        return partly_excluded(self.manager)


FEATURES: dict[str, Callable[[chunkmem.ChunkManager], Chunked]] = {
    "in backward": lambda manager: Chunked(manager, in_backward=True),
    "any class": AnyClass,
    "excluded": Excluding,
}


def with_features() -> list[Any]:
    cases = []
    for case in ZOO:
        for variant in variants_of(case):
            for feature in FEATURES:
                if variant.micro_batches == 1 or feature != "in backward":
                    marks = () if variant.name in ("plain", "checkpoint") else pytest.mark.full
                    name = f"{case.name}-{variant.name}-{feature}"
                    cases.append(pytest.param(case, variant, feature, id=name, marks=marks))
    return cases


@pytest.mark.few(2)
@pytest.mark.parametrize(("case", "variant", "feature"), with_features())
def test_features_have_the_same_bits(case: ZooModel, variant: Variant, feature: str) -> None:
    """With room for all, and in as little of DEVICE as training without them needs.

    A class is a series of torch's operators, whose last bits are not the same on an accelerator and on its host: there,
    all is updated on HOST, and so it is in plain PyTorch.
    """
    on_host = feature == "any class" and compute_device().type != "cpu"
    keys = ALL_ON_HOST if on_host else {}
    sizes, expected = footprint(case, variant), train_plain(case, variant, updates_on_host=on_host)
    for cap_nbytes in (4 * sizes.param_nbytes, sizes.required_nbytes):
        with chunkmem.ChunkManager(capped(case, cap_nbytes, **keys)) as manager:
            assert_same(Trainer(case, variant, FEATURES[feature](manager)).run(), expected)


@pytest.mark.few(1)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_states_in_8_bits_do_not_depend_on_room(case: ZooModel, variant: Variant) -> None:
    outcomes = []
    for cap_nbytes in (AMPLE_NBYTES, footprint(case, variant).required_nbytes):
        config = {**capped(case, cap_nbytes).to_dict(), "optimizer": {"params": {"states": "8bit"}}}
        outcomes.append(train_chunked(case, variant, STEPS, chunkmem.Config.from_dict(config)))
    assert_same(*outcomes)


def on_a_rank(_: int, name: str, variant: Variant) -> Outcome:
    case = next(case for case in ZOO if case.name == name)
    with chunkmem.ChunkManager(capped(case, AMPLE_NBYTES)) as manager:
        return Trainer(case, variant, Chunked(manager)).run()


@pytest.mark.few(1)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("case", [case for case in ZOO if case.name != "loose"], ids=lambda case: case.name)
def test_two_ranks_with_the_same_batches_are_as_one(case: ZooModel, variant: Variant, pair: Team) -> None:
    """The mean of two equal gradients is each of them."""
    for outcome in pair.run(on_a_rank, case.name, variant):
        assert_same(outcome, train_plain(case, variant))


@pytest.mark.few(1)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_two_ranks_refuse_a_loss_that_reads_parameters(variant: Variant, pair: Team) -> None:
    """Only their owner has what is read outside of all modules."""
    with pytest.raises(RankFailure, match=r"prototypes \(10, 32\) is used by cdist outside of its unit's forward"):
        pair.run(on_a_rank, "loose", variant)


def below_smallest() -> list[Any]:
    cases = []
    for case in ZOO:
        for variant in variants_of(case):
            marks = () if variant is PLAIN else pytest.mark.full
            cases.append(pytest.param(case, variant, id=f"{case.name}-{variant.name}", marks=marks))
    return cases


@pytest.mark.few(5)
@pytest.mark.parametrize(("case", "variant"), below_smallest())
def test_one_slab_below_the_smallest_is_a_capacity_error(case: ZooModel, variant: Variant) -> None:
    """It names both numbers, and leaves the training state of the last whole step."""
    sizes = footprint(case, variant)
    cap_nbytes = sizes.required_nbytes - case.slab_nbytes
    with chunkmem.ChunkManager(capped(case, cap_nbytes)) as manager:
        trainer = Trainer(case, variant, Chunked(manager))
        completed = 0
        with pytest.raises(chunkmem.CapacityError) as raised:
            while completed < STEPS:
                trainer.step()
                completed += 1
        assert raised.value.cap_nbytes == cap_nbytes
        assert cap_nbytes < raised.value.needed_nbytes <= sizes.required_nbytes
        trainer.optimizer.zero_grad()
        weights = manager.state_dict(trainer.model)
    expected = Trainer(case, variant, Plain())
    for _ in range(completed):
        expected.step()
    parameters = dict(expected.model.named_parameters(remove_duplicate=False))
    assert [name for name, value in parameters.items() if not torch.equal(weights[name], value.cpu())] == []


@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_the_zoo_is_repeatable_and_every_parameter_learns(case: ZooModel) -> None:
    """Plain PyTorch twice: what the other tests compare with is not noise, and no parameter is there for show."""
    trainer = Trainer(case, PLAIN, Plain())
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    assert_same(trainer.run(), train_plain(case, PLAIN))
    for (name, parameter), old in zip(trainer.model.named_parameters(), before, strict=True):
        assert not torch.equal(parameter, old), name
    assert 50_000 <= sum(parameter.nbytes for parameter in before) <= 400_000


def test_moe_routes_differently_in_every_step() -> None:
    """Some expert has no gradient in a step, and it is not always the same one."""
    case = next(case for case in ZOO if case.name == "moe")
    trainer = Trainer(case, PLAIN, Plain())
    unused = []
    for _ in range(STEPS):
        trainer.loss().backward()
        unused.append({name for name, parameter in trainer.model.named_parameters() if parameter.grad is None})
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    assert all(unused)
    assert all(before != after for before, after in pairwise(unused))


def recomputed(case: ZooModel, variant: Variant) -> tuple[int, int]:
    """Modules entered and left inside backward, in one step."""
    counts = {"entered": 0, "left": 0}

    def count(key: str) -> None:
        counts[key] += torch._C._current_graph_task_id() != -1

    trainer = Trainer(case, variant, Plain())
    for module in trainer.model.modules():
        module.register_forward_pre_hook(lambda *_: count("entered"))
        module.register_forward_hook(lambda *_: count("left"))
    trainer.step()
    return counts["entered"], counts["left"]


@pytest.mark.parametrize("case", [case for case in ZOO if case.has_blocks], ids=lambda case: case.name)
def test_checkpointing_recomputes(case: ZooModel) -> None:
    """The checkpointed variants do what their names say: blocks run again, and early stop leaves them half way."""
    plain, stopped, ended = (recomputed(case, variant) for variant in VARIANTS if variant.name in CHECKPOINTED)
    assert plain == (0, 0)
    assert stopped[0] > stopped[1]
    assert ended[0] == ended[1] > 0
