"""How many stages a pipeline gets, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from chunkmem.contrib.elastic.widths import (
    CallCost,
    Division,
    WidthMachine,
    WidthTask,
    choose_width,
    num_calls,
    predicted_s,
    trained_nbytes,
)
from chunkmem.plan.balance import Block
from chunkmem.plan.pipeline_schedule import Schedule

MIB = 1 << 20
ROOMY = WidthMachine(4, device_nbytes=1 << 30, cap_nbytes=1 << 31)


def task(frozen: Sequence[int] = (), *, num: int = 8, prefix: int = 0, **options: Any) -> WidthTask:
    """Blocks that take 1 s forward and 2 s backward on one rank; those of a prefix have none, other frozen ones 1 s."""
    blocks = []
    for at in range(num):
        is_frozen = at < prefix or at in frozen
        backward_s = 0.0 if at < prefix else 2.0 - is_frozen
        blocks.append(Block(f"b{at}", 1.0, backward_s, MIB if is_frozen else 4 * MIB, weight_nbytes=MIB))
    exchanged = [MIB if at < prefix else 2 * MIB if at in frozen else 3 * MIB for at in range(num)]
    given = {
        "held_nbytes": [2 * MIB] * num,
        "num_samples": 16,
        "micro_batches": 4,
        "schedules": {1: (Schedule.BY_LAYER, 1), 2: (Schedule.ONE_F_ONE_B, 1), 4: (Schedule.ONE_F_ONE_B, 1)},
    }
    return WidthTask(blocks, exchanged, **(given | options))


FOUR = Division(4, 1, (2, 2, 2, 2), Schedule.ONE_F_ONE_B)


def test_without_the_cost_of_exchanges_data_parallelism_has_no_bubble() -> None:
    choice = choose_width(task(), FOUR, ROOMY)
    # 1F1B of 4 equal stages over 4 micro-batches: (4 + 3) slots of 6 / 4 s; by layer 24 s of work over 4 ranks.
    assert choice.now.step_s == pytest.approx(7 * 6 / 4)
    assert (choice.best.num_ranks, choice.best.width) == (1, 4)
    assert choice.best.step_s == pytest.approx(24 / 4)
    assert choice.reason.startswith("1 x 4, a step of 6 s in place of 10.5 s by 4 x 1 (stages x data-parallel")
    assert "2 x 2 would take" in choice.reason


def test_exchanges_decide_how_many_stages_are_left() -> None:
    """8 blocks of 3 MiB each: at 1 x 4 a rank exchanges 24 MiB, at 2 x 2 12 MiB, of stages that are fast again."""
    by_speed = {Bps: choose_width(task(), FOUR, replace(ROOMY, exchange_Bps=Bps * MIB)).best for Bps in (24, 7, 1)}
    #         work  bubble  exchange
    # 1 x 4    6      0       24 / B
    # 2 x 2    6      1.5     12 / B
    # 4 x 1    6      4.5      0
    assert [(each.num_ranks, each.width) for each in by_speed.values()] == [(1, 4), (2, 2), (4, 1)]
    assert by_speed[24].step_s == pytest.approx(7)
    assert by_speed[7].step_s == pytest.approx(7.5 + 12 / 7)
    assert by_speed[1].step_s == pytest.approx(10.5)


@pytest.mark.parametrize(
    ("frozen", "work_s", "exchanged"), [({"prefix": 6}, 8 + 4, 6 + 6), ({"frozen": range(0, 8, 2)}, 8 + 12, 8 + 12)]
)
def test_what_is_frozen_computes_and_exchanges_less(frozen: Any, work_s: float, exchanged: int) -> None:
    choice = choose_width(task(**frozen), FOUR, replace(ROOMY, exchange_Bps=24 * MIB))
    assert choice.best.num_ranks == 1
    assert choice.best.step_s == pytest.approx(work_s / 4 + exchanged / 24)


def test_a_prefix_that_has_no_backward_leaves_half_of_the_ranks_without_work() -> None:
    """Wide blocks, which cannot be cut: two stages are a frozen block and a trained one, half of the ranks idle."""
    given, pair = task(num=2, prefix=1), replace(ROOMY, num_ranks=2, exchange_Bps=4 * MIB)
    only = {number: schedule for number, schedule in given.schedules.items() if number < 4}
    two = Division(2, 1, (1, 1), Schedule.ONE_F_ONE_B)
    # Two equal stages: 5 slots of 3 / 4 s, or 6 / 2 s of work and 6 MiB exchanged.
    assert choose_width(replace(task(num=2), schedules=only), two, pair).best.num_ranks == 2
    # (1 + 3) / 2 s of work and 4 MiB exchanged; or 1 / 4 s until the other rank begins, and its 3 s.
    choice = choose_width(replace(given, schedules=only), two, pair)
    assert choice.now.step_s == pytest.approx(3.25)
    assert choice.best.step_s == pytest.approx(3)
    assert choice.best.num_ranks == 1


def test_what_does_not_fit_is_not_chosen_and_said() -> None:
    choice = choose_width(task(), FOUR, replace(ROOMY, device_nbytes=2 * MIB - 1))
    assert choice.best is choice.now
    assert "1 x 4 is not possible: data-parallel ranks hold 2.00 MiB of a block together" in choice.reason
    # Fewer stages never need more of all tiers together, but uneven ones do: 4 + 4 x 4 MiB on one rank of four.
    wide = [*task(num=4).blocks, Block("wide", 0.1, 0.1, 40 * MIB, weight_nbytes=MIB)]
    given = replace(task(num=5), blocks=wide)
    small = replace(ROOMY, cap_nbytes=20 * MIB)
    choice = choose_width(given, Division(2, 2, (4, 1), Schedule.ONE_F_ONE_B), small)
    assert "4 x 1 is not possible: 4 stages: the largest one needs 40.00 MiB" in choice.reason


def test_a_batch_that_cannot_be_divided_is_left_with_its_stages() -> None:
    choice = choose_width(task(num_samples=6), FOUR, ROOMY)
    assert (choice.best.num_ranks, choice.best.width) == (2, 2)
    assert "1 x 4 is not possible: a global batch of 6 samples cannot be divided by 4 ranks" in choice.reason


def test_fewer_samples_than_micro_batches_are_fewer_parts() -> None:
    # At 2 x 2 a batch has 2 samples: 2 parts, 3 slots of 12 / 2 / 2 s.
    only = {2: (Schedule.ONE_F_ONE_B, 1)}
    choice = choose_width(task(num_samples=4, schedules=only), Division(2, 2, (4, 4), Schedule.ONE_F_ONE_B), ROOMY)
    assert choice.now.step_s == pytest.approx(3 * 12 / 2 / 2)


def test_a_gain_of_five_percent_is_needed() -> None:
    """The prefix of 6 has no backward: 6 + 6 blocks' work, where the stages were 4 and 8."""
    only = {2: (Schedule.ONE_F_ONE_B, 1)}
    pair = replace(ROOMY, num_ranks=2)
    choice = choose_width(task(prefix=6, schedules=only), Division(2, 1, (4, 4), Schedule.ONE_F_ONE_B), pair)
    assert choice.best.num_blocks == (6, 2)
    assert choice.best.step_s < choice.now.step_s / 1.05
    assert choice.reason.startswith("2 x 1 of 6, 2 blocks, a step of")
    # Stages of 12.4 and 11.6 s could be of 12 s each.
    seconds = [3, 3, 3, 3, 0.4, 3, 3, 3, 2.6]
    blocks = [Block(str(at), each / 3, 2 * each / 3, MIB, weight_nbytes=MIB) for at, each in enumerate(seconds)]
    near = replace(task(num=9, schedules=only), blocks=blocks)
    choice = choose_width(near, Division(2, 1, (5, 4), Schedule.ONE_F_ONE_B), pair)
    assert choice.best is choice.now
    assert choice.reason.startswith("2 x 1 of 5, 4 blocks stays, a step of 15.1 s")
    assert "2 x 1 of 4, 5 blocks would take 15 s" in choice.reason


def test_several_stages_a_rank() -> None:
    looped = {1: (Schedule.BY_LAYER, 1), 2: (Schedule.LOOPED_BFS, 2)}
    pair = replace(ROOMY, num_ranks=2, exchange_Bps=MIB)
    choice = choose_width(task(schedules=looped), Division(2, 1, (2, 2, 2, 2), Schedule.LOOPED_BFS), pair)
    assert choice.best is choice.now
    assert choice.reason.startswith("2 x 1 stays, a step of")
    assert choice.now.step_s < inf


def test_after_unfreezing_stages_come_back() -> None:
    slow = replace(ROOMY, exchange_Bps=MIB)
    now = Division(1, 4, (8,))
    assert choose_width(task(), now, slow).best.num_ranks == 4


PAIR = replace(ROOMY, num_ranks=2)
TWO, ONE = Division(2, 1, (4, 4), Schedule.ONE_F_ONE_B), Division(1, 2, (8,))
ONLY = {1: (Schedule.BY_LAYER, 1), 2: (Schedule.ONE_F_ONE_B, 1)}


def costly(prefix: int = 0, **cost: Any) -> WidthTask:
    """Blocks of which the first ones are frozen, and whose calls cost something however small they are."""
    costs = [
        CallCost(1 if at < prefix else 2, num_exchanges=1 if at < prefix else 3, trained_nbytes=(at >= prefix) * MIB)
        for at in range(8)
    ]
    return task(prefix=prefix, costs=[replace(each, **cost) for each in costs], schedules=ONLY)


def test_a_rank_that_calls_more_blocks_pays_for_each_call() -> None:
    """Over 4 micro-batches, a call of 8 samples takes 0.25 + 0.1 s forward, one of 4 samples 0.125 + 0.1 s."""
    given = costly(call_s=0.1)
    assert [num_calls(given, division) for division in (TWO, ONE)] == [4 * 4 * 2, 8 * 4 * 2]
    # 1F1B of two equal stages: 5 slots of 4 blocks; by layer: 4 slots of 8 blocks, a call forward and one back each.
    assert predicted_s(given, TWO, PAIR) == pytest.approx(5 * 4 * (0.75 + 0.2))
    assert predicted_s(given, ONE, PAIR) == pytest.approx(4 * 8 * (0.375 + 0.2))
    # There is no bubble by layer, but from 0.125 s a call on two stages are the faster ones: 15 + 40 c and 12 + 64 c.
    assert choose_width(costly(), TWO, PAIR).best.num_ranks == 1
    assert choose_width(costly(call_s=0.35), ONE, PAIR).best.num_ranks == 2


def test_a_frozen_block_is_called_once_for_each_micro_batch() -> None:
    given = costly(prefix=4, call_s=0.1)
    assert [num_calls(given, division) for division in (TWO, ONE)] == [4 * 4 * 2, 4 * 4 + 4 * 4 * 2]
    # The second stage waits for the first one, then computes 4 micro-batches of all that has a backward.
    assert predicted_s(given, TWO, PAIR) == pytest.approx(4 * (0.25 + 0.1) + 4 * 4 * (0.75 + 0.2))
    assert predicted_s(given, ONE, PAIR) == pytest.approx(4 * (4 * (0.125 + 0.1) + 4 * (0.375 + 0.2)))


def test_what_a_cache_has_is_not_called() -> None:
    given = costly(prefix=4, call_s=0.1)
    costs = [CallCost(0, num_exchanges=0) if at < 4 else cost for at, cost in enumerate(given.costs)]
    blocks = [replace(block, forward_s=0.0) if at < 4 else block for at, block in enumerate(given.blocks)]
    cached = replace(given, blocks=blocks, costs=costs)
    assert num_calls(cached, ONE) == num_calls(cached, TWO) == 4 * 4 * 2
    assert predicted_s(cached, TWO, PAIR) == pytest.approx(4 * 4 * (0.75 + 0.2))
    assert choose_width(cached, TWO, PAIR).best.num_ranks == 1, "one rank of two has nothing to do"


def test_each_exchange_takes_some_time_however_small() -> None:
    """8 blocks of 3 exchanges each where ranks share chunks, and none where each has its own stage."""
    slow = replace(PAIR, exchange_s=0.5)
    assert predicted_s(costly(), ONE, slow) == pytest.approx(12 + 8 * 3 * 0.5)
    assert predicted_s(costly(), TWO, slow) == pytest.approx(15)
    assert predicted_s(costly(prefix=4), ONE, slow) == pytest.approx(8 + (4 * 1 + 4 * 3) * 0.5)


def test_updates_are_those_of_the_rank_that_has_most() -> None:
    slow = replace(PAIR, update_Bps=MIB)
    assert [trained_nbytes(costly(), division) for division in (TWO, ONE)] == [4 * MIB, 4 * MIB]
    given = costly(prefix=4)
    assert [trained_nbytes(given, division) for division in (TWO, ONE)] == [4 * MIB, 2 * MIB]
    assert predicted_s(given, TWO, slow) - predicted_s(given, TWO, PAIR) == pytest.approx(4)
    assert predicted_s(given, ONE, slow) - predicted_s(given, ONE, PAIR) == pytest.approx(2)


def test_what_steps_took_longer_than_predicted_counts_for_each_call() -> None:
    given = costly()
    known = replace(PAIR, overheads_s={2: 0.01, 1: 0.2}, overhead_s=9.0)
    assert predicted_s(given, TWO, known) == pytest.approx(15 + 0.01 * 32)
    assert predicted_s(given, ONE, known) == pytest.approx(12 + 0.2 * 64)
    # Two stages are the better ones as long as the other number is known to be slow; where it is not known, it is
    # taken to be like the present one.
    assert choose_width(given, TWO, known).best.num_ranks == 2
    assert choose_width(given, ONE, known).best.num_ranks == 2
    first = replace(PAIR, overheads_s={2: 0.01}, overhead_s=0.01)
    assert choose_width(given, TWO, first).best.step_s == pytest.approx(12 + 0.01 * 64)


def test_exchanges_that_overlap_hide_no_more_than_themselves() -> None:
    fast = replace(PAIR, exchange_Bps=24 * MIB, overheads_s={1: -1.0})
    assert predicted_s(costly(), ONE, fast) == pytest.approx(12)
    assert predicted_s(costly(), ONE, replace(fast, overheads_s={1: -0.5 / 64})) == pytest.approx(12.5)
