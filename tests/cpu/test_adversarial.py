"""Plans followed by lanes that are as late as they may be, or as slow: bit for bit what plain PyTorch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import chunkmem
from chunkmem.data.trace import Trace
from chunkmem.plan.model import Lane, Plan
from tests.helpers.audit import assert_as_predicted, audit, copies_of
from tests.helpers.lanes import MakeLanes, adversarial, lanes_by_name_fixture  # noqa: F401
from tests.helpers.rehearsal import cap_nbytes, plans, rehearsed
from tests.helpers.training import (
    HOST_NBYTES,
    STEPS,
    VARIANTS,
    Chunked,
    Outcome,
    Trainer,
    Variant,
    assert_same,
    capped,
    repeats,
    train_plain,
    variants_of,
)
from tests.helpers.zoo import ZOO, ZooModel

CASES = {case.name: case for case in ZOO}
MODELS = ("gpt", "cnn", "lstm", "moe", "t5", "reused", "loose")
WAYS = {variant.name: variant for variant in VARIANTS}
SHARES = (0.4, 1.6)
"""Caps, as shares of the PARAM bytes: 40 % of those, and 40 % of the model data."""
MANY = [("loose", "evaluation")]
MANY_IN_FULL = [("cnn", "plain"), ("gpt", "plain"), ("lstm", "micro_batches"), ("reused", "checkpoint")]
FEW = {"gpt": "checkpoint", "cnn": "half_frozen", "lstm": "plain", "moe": "evaluation", "t5": "scheduler",
       "reused": "plain", "loose": "half_frozen"}  # fmt: skip
"""Every model once in an ordinary run."""
SEEDS = 50
FEW_SEEDS = 5


class Checked(Chunked):
    """Every step is as its plan predicts. An audit waits for all copies, so only every other training has them."""

    def __init__(self, manager: chunkmem.ChunkManager, *, follows: bool, audits: bool) -> None:
        super().__init__(manager, follows=follows)
        self.audits = audits
        self.adopted: tuple[Trace, Plan] | None = None

    def after_step(self) -> None:
        if self.follows and self.manager.plan is not None:
            assert_as_predicted(self.manager)
        if self.audits:
            audit(self.manager)
        if self.adopted is not None:
            (self.manager.trace, self.manager.plan), self.adopted = self.adopted, None


def train(case: ZooModel, variant: Variant, seed: int) -> Outcome:
    """Train under late copies; most seeds by one of the many plans there are, the others by what the manager makes."""
    device_nbytes = cap_nbytes(case, variant, SHARES[seed % 2])
    config = capped(case, device_nbytes)
    if seed % 5 == 0 or not repeats(case):
        with chunkmem.ChunkManager(config, make_lanes=adversarial(seed)) as manager:
            return run(manager, case, variant, Checked(manager, follows=repeats(case), audits=seed % 3 == 0))
    choice = plans(case, variant, device_nbytes)
    plan = choice[seed // 2 % len(choice)]
    with chunkmem.ChunkManager(config, machine=plan.machine, make_lanes=adversarial(seed)) as manager:
        side = Checked(manager, follows=True, audits=seed % 3 == 0)
        # After the first step, which has made the optimizer states that the plan has to know of.
        side.adopted = rehearsed(case, variant, device_nbytes), plan
        outcome = run(manager, case, variant, side)
        assert manager.plan is plan
        return outcome


def run(manager: chunkmem.ChunkManager, case: ZooModel, variant: Variant, side: Chunked) -> Outcome:
    trainer = Trainer(case, variant, side)
    manager.runtime.tiers.device_pool.poison = manager.runtime.tiers.host_pool.poison = True
    return trainer.run()


def many() -> list[Any]:
    """Pairs under many seeds, the longer ones not by default."""
    pairs = [(pair, ()) for pair in MANY] + [(pair, pytest.mark.full) for pair in MANY_IN_FULL]
    return [pytest.param(*pair, id="-".join(pair), marks=marks) for pair, marks in pairs]


@pytest.mark.full
@pytest.mark.parametrize(("model", "way"), many())
def test_many_seeds(model: str, way: str) -> None:
    case, variant = CASES[model], WAYS[way]
    expected = train_plain(case, variant)
    for seed in range(SEEDS):
        assert_same(train(case, variant, seed), expected)


def matrix() -> list[Any]:
    """Every model in every variant that makes sense for it, some seeds each; by default a few of those."""
    cases = []
    for model in MODELS:
        for variant in variants_of(CASES[model]):
            for seed in range(FEW_SEEDS):
                marks = () if FEW[model] == variant.name and seed < 2 else pytest.mark.full
                cases.append(pytest.param(model, variant.name, seed, id=f"{model}-{variant.name}-{seed}", marks=marks))
    return cases


@pytest.mark.few(1)
@pytest.mark.parametrize(("model", "way", "seed"), matrix())
def test_late_copies_never_show(model: str, way: str, seed: int) -> None:
    case, variant = CASES[model], WAYS[way]
    expected = train_plain(case, variant)
    assert_same(train(case, variant, seed), expected)


def moved(case: ZooModel, variant: Variant, make_lanes: MakeLanes | None, *, is_async: bool) -> list[Any]:
    """Train by the first plan; what each step moved, and over each link. The outcome is that of plain PyTorch."""
    device_nbytes = cap_nbytes(case, variant, SHARES[0])
    plan = plans(case, variant, device_nbytes)[0]
    config = chunkmem.Config.from_dict(
        {
            "memory": {"device": device_nbytes, "host": HOST_NBYTES},
            "default_chunk_size": case.chunk_numel,
            "client": {"opts": {"with_async_move": is_async}},
        }
    )
    with chunkmem.ChunkManager(config, machine=plan.machine, make_lanes=make_lanes) as manager:
        side = Checked(manager, follows=True, audits=False)
        side.adopted = rehearsed(case, variant, device_nbytes), plan
        trainer = Trainer(case, variant, side)
        steps = []
        for _ in range(STEPS):
            trainer.step()
            timeline = manager.timeline()
            assert timeline is not None
            steps.append((copies_of(timeline), timeline.moved_nbytes))
        expected = train_plain(case, variant)
        assert_same(trainer.outcome(), expected)
        return steps


LIKE = [("gpt", "plain"), ("loose", "micro_batches")]


@pytest.mark.few(1)
@pytest.mark.parametrize(("model", "way"), LIKE)
def test_blocking_and_slow_copies_are_the_same_copies(
    model: str, way: str, lanes_by_name: Callable[..., MakeLanes]
) -> None:
    """`with_async_move: false`, threads, and a link of 200 MB/s: the same bits, and the same copies in each step."""
    case, variant = CASES[model], WAYS[way]
    train_plain(case, variant)
    threads = moved(case, variant, None, is_async=True)
    blocking = moved(case, variant, None, is_async=False)
    throttled = moved(case, variant, lanes_by_name("throttled", 2e8), is_async=True)
    assert threads == blocking == throttled
    assert all(nbytes[Lane.H2D] > 0 and nbytes[Lane.D2H] > 0 for _, nbytes in threads[1:])


def test_copies_are_late_in_these_tests() -> None:
    """Not every copy is over when its step is: lanes were behind, which is what the other tests are about."""
    case, variant = CASES["cnn"], WAYS["plain"]
    device_nbytes = cap_nbytes(case, variant, SHARES[0])  # with the other one no plan has a copy under way by then
    with chunkmem.ChunkManager(capped(case, device_nbytes), make_lanes=adversarial(1)) as manager:
        trainer = Trainer(case, variant, Checked(manager, follows=True, audits=False))
        behind = 0
        for _ in range(STEPS):
            trainer.step()
            behind += sum(map(len, manager.runtime.tiers.lanes._queues.values()))
        assert behind > 0
