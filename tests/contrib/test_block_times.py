"""What blocks are said to take, from the times of their calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from chunkmem.contrib.elastic.block_times import BlockTimes, LastSteps, SampleCost
from chunkmem.pipeline.micro_batches import MicroBatch, split
from chunkmem.runtime.timestamps import HostTimestamp, Interval


def micro_batches(num: int) -> list[MicroBatch]:
    """Return so many, of two samples each."""
    return split(torch.zeros(2 * num, 1), None, num=num)


class Clock:
    """Shows what it is set to."""

    is_free = True

    def __init__(self) -> None:
        self.now_s = 0.0

    def timestamp(self) -> HostTimestamp:
        return HostTimestamp(self.now_s)


class Timed:
    """Three blocks, of which the first one has two modules."""

    def __init__(self) -> None:
        self.chain = [[nn.Linear(2, 2), nn.Linear(2, 2)], [nn.Linear(2, 2)], [nn.Linear(2, 2)]]
        self.clock = Clock()
        self.times = BlockTimes(self.chain, self.clock)

    def step(self, forward_s: Callable[[int, int], float], backward_s: float, *, num_parts: int = 4) -> None:
        """Time a step: `forward_s` of block and micro-batch, for each module, and backward of the first two blocks."""
        with self.times.step(micro_batches(num_parts)):
            for part in range(num_parts):
                for at, module in ((at, module) for at, modules in enumerate(self.chain) for module in modules):
                    with self.times.forward(module):
                        self.clock.now_s += forward_s(at, part)
                    self.times.returned(module, (torch.zeros(2, 5), {"mask": torch.zeros(2, dtype=torch.uint8)}))
                with self.times.forward(None):
                    self.clock.now_s += 0.5
                with self.times.backward([module for modules in self.chain[:2] for module in modules]):
                    self.clock.now_s += backward_s
                with self.times.backward([*self.chain[2], None]):
                    self.clock.now_s += 2.0


def test_nothing_is_known_before_a_step() -> None:
    timed = Timed()
    assert timed.times.per_sample() == {}
    assert timed.times.num_samples == 0
    with timed.times.forward(timed.chain[0][0]):  # an evaluation
        timed.clock.now_s += 1.0
    assert timed.times.per_sample() == {}


def test_the_median_of_micro_batches_counts() -> None:
    timed = Timed()
    timed.step(lambda at, part: 1.0 + at + 100.0 * (part == 0), 10.0)
    # Of micro-batches of 2 samples, the two modules of block 0 take 2 s, block 1 2 s, and block 2 3 s and the loss.
    # Backward of 10 s: block 0 computes gradients of its weights alone, weight 1, and block 1 of both, weight 2.
    costs = timed.times.per_sample()
    assert [costs[at].forward_s for at in range(3)] == [1.0, 1.0, 1.75]
    assert [costs[at].backward_s for at in range(3)] == pytest.approx([5 / 3, 10 / 3, 1.0])
    assert {cost.output_nbytes for cost in costs.values()} == {4 * 5 + 1}
    assert timed.times.num_samples == 8


def test_backward_is_scaled_to_what_is_frozen_now() -> None:
    timed = Timed()
    timed.step(lambda at, part: 1.0, 9.0)
    before = timed.times.per_sample()
    timed.chain[1][0].requires_grad_(False)
    every_second = timed.times.per_sample()
    assert every_second[0] == before[0]
    assert every_second[1].backward_s == before[1].backward_s / 2  # gradients go through
    assert every_second[2] == before[2]
    for module in timed.chain[0]:
        module.requires_grad_(False)
    prefix = timed.times.per_sample()
    assert [prefix[at].backward_s for at in range(3)] == [0.0, 0.0, before[2].backward_s / 2]
    # A step in which the prefix was frozen says nothing about its backward; forward does.
    timed.step(lambda at, part: 1.0, 0.0)
    assert [timed.times.per_sample()[at] for at in range(2)] == [prefix[at] for at in range(2)]
    for module in (*timed.chain[0], *timed.chain[1]):
        module.requires_grad_(True)
    assert timed.times.per_sample()[1] == SampleCost(0.5, 1.0, 21)


def test_the_last_three_steps_count_and_those_that_raised_do_not() -> None:
    timed = Timed()
    for seconds in (50.0, 1.0, 3.0, 2.0):
        timed.step(lambda at, part, seconds=seconds: seconds, 1.0)
    assert timed.times.per_sample()[1].forward_s == 2.0 / 2
    with pytest.raises(KeyError), timed.times.step(micro_batches(4)):
        raise KeyError
    assert timed.times.per_sample()[1].forward_s == 2.0 / 2


class Hooks:
    spent_s = 0.0


def test_what_hooks_take_is_of_a_call_and_not_of_its_samples() -> None:
    """0.5 s of each forward, and as much of each backward: blocks 0 and 1 take 10 s together, less 2 x 0.5 and 0.5."""
    timed, hooks = Timed(), Hooks()
    timed.times.divided(in_hooks_s=lambda: hooks.spent_s)

    def forward_s(at: int, part: int) -> float:
        hooks.spent_s += 0.5
        return 1.0 + at

    timed.step(forward_s, 10.0)
    costs = timed.times.per_sample()
    assert [costs[at].call_s for at in range(3)] == [1.0, 0.5, 0.5]
    # Less that, block 0 takes 1 s forward for 2 samples, block 1 1.5 s, and block 2 2.5 s and 0.5 s for the loss.
    assert [costs[at].forward_s for at in range(3)] == [0.5, 0.75, 1.5]
    # Gradients of block 0's weights alone, weight 1 of its 0.5 s, and all of block 1, weight 2 of its 0.75 s.
    assert [costs[at].backward_s for at in range(3)] == pytest.approx([8.5 / 2 * 0.5 / 2, 8.5 / 2 * 1.5 / 2, 0.75])


def test_steps_of_other_divisions_are_not_mixed() -> None:
    timed = Timed()
    for seconds in (1.0, 1.0, 1.0):
        timed.step(lambda at, part, seconds=seconds: seconds, 1.0)
    timed.times.divided(width=2)
    assert timed.times.per_sample()[1].forward_s == 1.0 / 2, "until a step was run by these ranks"
    assert timed.times.num_samples == 8
    assert timed.times.last() is None
    timed.step(lambda at, part: 5.0, 1.0)
    assert timed.times.per_sample()[1].forward_s == 5.0 / 2
    assert timed.times.num_samples == 2 * 8


def test_the_shortest_of_the_last_steps_counts() -> None:
    timed = Timed()

    def interval(seconds: float) -> Interval:
        return Interval(HostTimestamp(1.0), HostTimestamp(1.0 + seconds))

    for step_s, update_s in ((2.0, 0.5), (7.0, 0.25), (3.0, 8.0)):
        assert timed.times.last() is None, "three are needed"
        timed.step(lambda at, part: 1.0, 1.0)
        timed.times.took(interval(step_s))
        timed.times.updated([interval(update_s), interval(update_s)])
    trained = timed.times.trained()
    assert trained == (12, 6, 6)
    assert timed.times.last() == LastSteps(2.0, 0.5, trained)
    timed.chain[0][0].requires_grad_(False)
    assert timed.times.last() == LastSteps(2.0, 0.5, trained), "as things were"
    timed.step(lambda at, part: 1.0, 1.0)
    assert timed.times.last() is None
    assert timed.times.trained() == (6, 6, 6)


def test_times_as_they_were() -> None:
    timed = Timed()
    timed.step(lambda at, part: 1.0, 9.0)
    before = timed.times.per_sample()
    timed.chain[1][0].requires_grad_(False)
    assert timed.times.per_sample() != before
    assert timed.times.per_sample(then=True) == before


def test_times_as_they_were_are_those_of_the_shortest_step() -> None:
    timed = Timed()
    for seconds, step_s in ((4.0, 9.0), (3.0, 2.0), (2.0, 5.0), (1.0, 6.0)):
        timed.step(lambda at, part, seconds=seconds: seconds, 1.0)
        timed.times.took(Interval(HostTimestamp(0.0), HostTimestamp(step_s)))
    assert timed.times.per_sample(then=True)[1].forward_s == 3.0 / 2
    assert timed.times.per_sample()[1].forward_s == 2.0 / 2, "the median"
