"""Pipelines that fit run as a plain loop, and by layer again before anything else is done.

That their numbers are plain PyTorch's is tested wherever pipelines with room for all take five steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import chunkmem
from chunkmem.data.types import Role
from chunkmem.pipeline.call_times import CallTimes
from tests.cpu.test_pipeline_hostile import DrawsMore, Twins, managed, simple
from tests.helpers.audit import audit
from tests.helpers.pipelined import WIDTH, Chain, Residual, features
from tests.helpers.twins import cpu_only

pytestmark = cpu_only
STEPS = 5
"""Until nothing is heard of a step."""


class Noisy(nn.Module):
    """Draws numbers, writes to what it is given, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.out(self.norm(x)), 0.2, self.training).mul_(x)


class Order(nn.Module):
    """Writes down when it is called in forward."""

    def __init__(self, calls: list[nn.Module]) -> None:
        super().__init__()
        self.out, self.calls = nn.Linear(WIDTH, WIDTH), (calls,)

    def forward(self, x: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() == -1:
            self.calls[0].append(self)
        return self.out(x)


class Shares(nn.Module):
    """Multiplies by the weight of another block, of which nobody can tell by its parameters."""

    def __init__(self, other: Callable[[], nn.Linear]) -> None:
        super().__init__()
        self.other, self.out = other, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.linear(x, self.other().weight))


def is_unheard(twins: Twins) -> bool:
    return twins.manager.runtime.controller.residence.is_on


def more(step: int) -> tuple[Tensor, Tensor]:
    """A batch of another size."""
    inputs, target = features(step)
    return torch.cat([inputs, inputs]), torch.cat([target, target])


@pytest.mark.few(1)
@pytest.mark.parametrize("checkpoint", ["never", "always", "except_last", "auto"])
def test_numbers_are_those_of_a_plain_loop(checkpoint: str) -> None:
    with managed() as manager:
        twins = Twins(manager, simple(Noisy, Residual, Noisy), checkpoint=checkpoint)
        for step in range(STEPS + 3):
            twins.backward(*features(step))
            twins.update()
            audit(manager)
        assert is_unheard(twins)


def test_micro_batches_run_one_after_the_other() -> None:
    calls = list[nn.Module]()
    with managed() as manager:
        block = partial(Order, calls)
        twins = Twins(manager, simple(block, block), checkpoint="never")
        first, second = twins.model.blocks
        for expected in ([first] * 3 + [second] * 3, [first, second] * 3):
            twins.run(steps=3)
            assert [call for call in calls if call in (first, second)][-6:] == expected


def test_other_shapes_run_by_layer() -> None:
    """Also in the middle of a step."""
    with managed() as manager:
        twins = Twins(manager, simple(Noisy, Residual))
        twins.run(steps=STEPS + 1)
        for batch, is_resident in ((features(6), True), (more(7), False), (features(8), False)):
            twins.backward(*batch)
            assert is_unheard(twins) == is_resident
        twins.update()
        twins.run()
        assert is_unheard(twins)


def test_an_evaluation_comes_between() -> None:
    with managed() as manager:
        twins = Twins(manager, simple(Noisy, Residual))
        for _ in range(3):
            twins.run()
            for model in (twins.plain, twins.model):
                model.eval()
            with torch.no_grad():
                expected = twins.loss(twins.plain(features(9)[0]), features(9)[1])
            torch.testing.assert_close(twins.pipe.evaluate(*features(9)), expected)
            torch.testing.assert_close(twins.loss(twins.model(features(9)[0]), features(9)[1]), expected)
            for model in (twins.plain, twins.model):
                model.train()


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_weight_that_blocks_share_gets_gradients_by_layer(checkpoint: str) -> None:
    with managed() as manager:
        with manager.init():
            block = nn.Linear(WIDTH, WIDTH)
            model = Chain(None, [block, Shares(lambda: block)], nn.Linear(WIDTH, 10))
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        pipe = manager.pipeline(
            model.blocks, last=model.last, loss_fn=F.cross_entropy, micro_batches=3, checkpoint=checkpoint
        )
        for step in range(STEPS + 2):
            pipe.step(*features(step))
            optimizer.step()
            optimizer.zero_grad()
            assert not manager.runtime.controller.residence.is_on


def test_activations_have_to_fit_twice() -> None:
    with managed() as manager:
        twins = Twins(manager, simple(Noisy, Residual))
        twins.run(steps=STEPS + 1)
        assert is_unheard(twins)
        chunks = manager.runtime.memory.store.chunks
        needed_nbytes = sum(chunk.nbytes * (1 + key.role.kind.is_of_step) for key, chunk in chunks.items())
        assert any(key.role is Role.ACTIVATION for key in chunks)
    for nbytes in (needed_nbytes, needed_nbytes - 1):
        with managed(nbytes) as manager:
            twins = Twins(manager, simple(Noisy, Residual))
            twins.run(steps=STEPS + 1)
            assert is_unheard(twins) == (nbytes == needed_nbytes)


def test_who_times_blocks_hears_of_them() -> None:
    class Times(CallTimes):
        """As the base class."""

    with managed() as manager:
        twins = Twins(manager, simple(Noisy, Residual))
        twins.pipe.times = Times()
        twins.run(steps=STEPS + 2)
        assert not is_unheard(twins)


def test_amounts_of_random_numbers_may_change() -> None:
    """In the order of a plain loop they are right anyway."""
    with managed() as manager:
        twins = Twins(manager, simple(DrawsMore, Residual, DrawsMore))
        twins.run(steps=STEPS + 1)
        for model in (twins.plain, twins.model):
            model.blocks[0].is_on = model.blocks[2].is_on = True
        twins.run()
        assert is_unheard(twins)


def test_a_weight_is_frozen_and_trained_again() -> None:
    with managed() as manager:
        twins = Twins(manager, simple(Noisy, Residual))
        for requires_grad in (True, False, True):
            for model in (twins.plain, twins.model):
                model.first.requires_grad_(requires_grad)
                model.blocks[0].out.weight.requires_grad_(requires_grad)
            twins.run(steps=STEPS + 1)
            assert is_unheard(twins)
