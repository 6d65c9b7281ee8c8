"""Freezing over two ranks: each gives back its share, bits are those of `requires_grad_(False)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from tests.helpers.audit import assert_as_predicted, audit, kind_of_step
from tests.helpers.ranks import RankFailure, Team
from tests.helpers.spread import spread
from tests.helpers.twins import AMPLE_NBYTES, SEED, WIDTH, Blocks, config, copied, features

NUM_STEPS = 5


@dataclass
class Found:
    """What one rank ends with."""

    weights: dict[str, Tensor]
    states: dict[int, Any]
    freed_nbytes: int


def train(rank: int, by_manager: bool, precision: str, device_nbytes: int) -> Found:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    freed_nbytes = 0
    with chunkmem.ChunkManager(config(device_nbytes, precision=precision)) as manager:
        with manager.init():
            model = Blocks(num_blocks=6)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)

        def steps(first: int) -> None:
            for step in range(first, first + NUM_STEPS):
                loss = model(features(10 * step + rank)).square().mean()
                manager.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                audit(manager)

        steps(0)
        modules = [model.inner, *model.blocks[:4]]
        if by_manager:
            freed_nbytes = manager.freeze(modules, keep_states=precision == "bf16").freed_nbytes
        else:
            for param in (param for module in modules for param in module.parameters()):
                param.requires_grad_(False)
                if precision == "fp32":
                    del optimizer.state[param]
        steps(10)
        if by_manager:
            manager.unfreeze(model)
        else:
            model.requires_grad_(True)
        steps(20)
        weights, states = copied(manager.state_dict()), copied(optimizer.state_dict()["state"])
    return Found(weights, states, freed_nbytes)


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device_nbytes", [24 << 10, pytest.param(AMPLE_NBYTES, marks=pytest.mark.full)])
def test_the_numbers_are_those_without_the_manager(precision: str, device_nbytes: int, pair: Team) -> None:
    ours = pair.run(train, True, precision, device_nbytes)
    theirs = pair.run(train, False, precision, device_nbytes)
    for found in (*ours[1:], *theirs):
        assert found.weights.keys() == ours[0].weights.keys()
        assert all(torch.equal(value, found.weights[name]) for name, value in ours[0].weights.items())
    assert sorted(ours[0].states) == sorted(theirs[0].states)
    for index, state in ours[0].states.items():
        assert all(torch.equal(value, theirs[0].states[index][key]) for key, value in state.items())
    frozen_numel = 16 * 16 + 16 + 4 * 2 * (16 * 16 + 16)
    if precision == "fp32":
        assert all(found.freed_nbytes > 0 for found in ours)
        assert sum(found.freed_nbytes for found in ours) >= 8 * frozen_numel - 2 * 2 * 1024


@dataclass
class Followed:
    """What steps after `freeze` and `unfreeze` have done on one rank."""

    kinds: list[str]
    digests: list[str]
    sent_nbytes: list[int]


def follow(rank: int, device_nbytes: int, policy: str | None, every_second: bool) -> Followed:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    keys = {} if policy is None else {"activations": {"policy": policy}}
    found = Followed([], [], [])
    with chunkmem.ChunkManager(config(device_nbytes, **keys)) as manager:
        with manager.init():
            model = Blocks(num_blocks=6)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        shards = manager.runtime.sharding.shards
        assert shards is not None

        def sent_nbytes() -> int:
            return sum(exchange.traffic.sent_nbytes for exchange in shards.exchanges)

        def step(num: int) -> None:
            for _ in range(num):
                before = sent_nbytes()
                model(features(rank)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                audit(manager)
                found.kinds.append(kind_of_step(manager))
            assert manager.trace is not None
            found.digests.append(manager.trace.digest)
            found.sent_nbytes.append(sent_nbytes() - before)

        step(8)
        manager.freeze(model.blocks[1::2] if every_second else [model.inner, *model.blocks[:4]])
        step(4)
        assert_as_predicted(manager)
        manager.unfreeze(model)
        step(1)
    return found


@spread(
    policy=(None, "keep", "offload", "auto", "recompute"),
    device_nbytes=(24 << 10, AMPLE_NBYTES),
    every_second=(False, True),
)
@pytest.mark.few(1)
def test_steps_with_a_new_kind_are_recorded_once_on_all_ranks(
    policy: str | None, device_nbytes: int, every_second: bool, pair: Team
) -> None:
    """Also if frozen blocks lie between trained ones."""
    ours = pair.run(follow, device_nbytes, policy, every_second)
    assert ours[0].kinds == ours[1].kinds
    for found in ours:
        after = found.kinds[8:]
        first = after.index("recorded")
        # Where gathers are begun ahead, the first step shows what is exchanged.
        assert after == ["on demand"] * first + ["recorded"] + ["planned"] * (4 - first)
        assert first <= 1
        assert found.digests[0] == found.digests[2] != found.digests[1]
        assert found.sent_nbytes[0] == found.sent_nbytes[2] > found.sent_nbytes[1]


def freeze_between_micro_batches(rank: int) -> list[str]:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    kinds = []
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        with manager.init():
            model = Blocks(num_blocks=3)
            model.blocks.insert(0, nn.Linear(WIDTH, WIDTH))
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(10):
            if step == 6:
                manager.freeze([model.inner, model.blocks[0]])
            for _ in range(2):
                model(features(rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kinds.append(kind_of_step(manager))
    return kinds[5:]


def test_with_micro_batches_too(pair: Team) -> None:
    for found in pair.run(freeze_between_micro_batches):
        assert found == ["planned", "on demand", "recorded", "planned", "planned"]


def freeze_something_else(rank: int) -> str:
    torch.manual_seed(SEED)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        with manager.init():
            model = Blocks(num_blocks=6)
        with pytest.raises(chunkmem.ConfigError) as caught:
            manager.freeze(model.blocks[rank])
        assert all(param.requires_grad for param in model.parameters())
        return str(caught.value)


def test_ranks_freeze_the_same(pair: Team) -> None:
    said = pair.run(freeze_something_else)
    assert said[0] == said[1]
    assert "what is frozen" in said[0]
    assert "blocks.0" in said[0]
    assert "blocks.1" in said[0]


def freeze_on_one(rank: int) -> None:
    torch.manual_seed(SEED)
    values = {**config(AMPLE_NBYTES).to_dict(), "distributed": {"timeout_s": 5.0}}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(values)) as manager:
        with manager.init():
            model = Blocks(num_blocks=6)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        if rank == 0:
            manager.freeze(model.blocks[0])
        model(features(rank)).square().mean().backward()
        optimizer.step()


def freeze_one_by_hand(rank: int) -> tuple[int, str]:
    torch.manual_seed(SEED)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        with manager.init():
            model = Blocks(num_blocks=3)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(8):
            if step == 6 and rank == 1:
                model.blocks[1].requires_grad_(False)
            try:
                model(features(rank)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            except chunkmem.RankError as error:
                return step, str(error)
    return 8, ""


def test_a_parameter_frozen_by_hand_on_one_rank_is_named_on_all_within_a_step(pair: Team) -> None:
    """Also while a plan is followed."""
    for step, said in pair.run(freeze_one_by_hand):
        assert step == 6
        assert "parameter blocks.1.0.bias (16,) is frozen on rank 1 and not on rank 0 (and 3 more)" in said


def test_freezing_on_one_rank_alone_is_an_error_at_once(pair: Team) -> None:
    with pytest.raises(RankFailure, match="freeze"):
        pair.run(freeze_on_one)
