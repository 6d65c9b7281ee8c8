"""Steps over ranks that follow a plan: they do what was predicted, and exchange and hold what the formulas say."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.data.types import Tier
from chunkmem.plan.model import Lane
from chunkmem.ranks.connection import Connection
from chunkmem.ranks.exchange import Exchange, Shard, Traffic, Work
from chunkmem.ranks.prefetch import PrefetchSchedule
from chunkmem.ranks.shards import ShardStore
from chunkmem.runtime.device import ComputeDevice
from tests.helpers.audit import assert_as_predicted, audit
from tests.helpers.late_exchange import LateExchange
from tests.helpers.ranks import Team
from tests.helpers.shared_training import (
    MODELS,
    Block,
    Task,
    batch_of,
    loss_of,
    make_config,
    open_manager,
    serial,
    train,
)

ALL = (2, 3, 4)
SIZES = [pytest.param(size, marks=[] if size == 2 else [pytest.mark.full]) for size in ALL]
STEADY = sorted(set(MODELS) - {"routed"})
"""Models whose ranks do the same in every step."""
MEMORY_SAVING = {"client": {"opts": {"with_mem_saving_comm": True}}}
GROUPED = {"client": {"opts": {"with_mem_saving_comm": False}}}


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, Team]]:
    made = {size: Team(size) for size in ALL}
    yield made
    for team in made.values():
        team.close()


@contextmanager
def trained(
    rank: int, task: Task, *, before: Callable[[chunkmem.ChunkManager], None] = lambda manager: None
) -> Iterator[chunkmem.ChunkManager]:
    """Train on one rank; `before` the first step, the manager can be changed."""
    torch.set_num_threads(1)
    with open_manager(rank, task) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = MODELS[task.model]()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        before(manager)
        for step in range(task.steps):
            manager.backward(loss_of(model, batch_of(task, step, 0, rank)))
            optimizer.step()
            optimizer.zero_grad()
        yield manager


def is_overlapped(manager: chunkmem.ChunkManager) -> bool:
    """Whether gathers are begun ahead."""
    prefetch = manager.runtime.sharding.units.prefetch
    assert prefetch is not None
    return prefetch.has_room


def follow(rank: int, task: Task) -> bool:
    """Train; assert that the last step did what was predicted; tell whether gathers are begun ahead."""
    with trained(rank, task) as manager:
        audit(manager)
        assert_as_predicted(manager)
        return is_overlapped(manager)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "config", [{}, *(pytest.param(config, marks=pytest.mark.full) for config in (GROUPED, MEMORY_SAVING))]
)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model", STEADY)
def test_a_step_does_what_was_predicted(teams: dict[int, Team], model: str, size: int, config: dict[str, Any]) -> None:
    task = Task(model, steps=6, config=config, device_nbytes=100 << 10)
    assert teams[size].run(follow, task) == [True] * size


def test_steps_that_overflow_are_none_of_the_first_ones(teams: dict[int, Team]) -> None:
    """The loss scale is found in the first steps, all of which are skipped; after it three more lead to a plan."""
    config = {"precision": "fp16", "fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}
    assert teams[2].run(follow, Task(steps=24, config=config, device_nbytes=100 << 10)) == [True] * 2


def train_at(rank: int, host_nbytes: int) -> bool:
    """Train; tell whether gathers are begun ahead."""
    device_nbytes = 56 << 10
    config = {"memory": {"device": device_nbytes, "host": host_nbytes}}
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # without gathering ahead there is no plan either: accesses are served on demand
        with trained(rank, Task("tied", steps=7, config=config, device_nbytes=device_nbytes)) as manager:
            return is_overlapped(manager)


def test_what_is_gathered_ahead_has_to_fit_both_tiers(teams: dict[int, Team]) -> None:
    assert teams[2].run(train_at, 60_000) == [True, True]
    assert teams[2].run(train_at, 19_200) == [False, False], "DEVICE has room, HOST has not"


def disagree(rank: int) -> bool:
    """Follow plans where rank 0 finds none for steps that gather ahead; rank 1 does not know."""
    asked = []

    def pretend(manager: chunkmem.ChunkManager) -> None:
        can_plan = manager.runtime.controller.known.can_plan

        def pretended() -> bool:
            asked.append(can_plan())
            return rank != 0

        manager.runtime.controller.known.can_plan = pretended  # type: ignore[method-assign]

    with trained(rank, Task(steps=7, device_nbytes=100 << 10), before=pretend) as manager:
        assert asked == [True]
        assert_as_predicted(manager)
        return is_overlapped(manager)


def test_no_rank_gathers_ahead_where_one_has_no_plan_for_that(teams: dict[int, Team]) -> None:
    assert teams[2].run(disagree) == [False, False]


OVERLAP = {
    "optimizer": {"params": {"use_hybrid_adam": False}},
    "client": {"opts": {"overlap_optimizer": True, "undo_log_ratio": 0.5}},
}


def train_ahead(rank: int, task: Task) -> tuple[dict[str, Tensor], int]:
    """Weights, and the updates of the last step that were begun beside its backward."""
    with trained(rank, task) as manager:
        timeline = manager.timeline()
        assert timeline is not None
        return manager.state_dict(), sum(span.lane is Lane.HOST_UPDATE for span in timeline.spans)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("size", SIZES)
def test_updates_go_ahead_once_their_gradients_are_means(teams: dict[int, Team], size: int, seed: int | None) -> None:
    task = Task(steps=8, config=OVERLAP, device_nbytes=26 << 10, adversarial=seed)
    _, weights, _ = serial(task, size)
    outcomes = teams[size].run(train_ahead, task)
    for found, _ in outcomes:
        assert all(torch.equal(value, found[key]) for key, value in weights.items())
    assert sum(num_ahead for _, num_ahead in outcomes) > 0


@pytest.mark.parametrize("size", SIZES)
def test_where_there_is_room_for_one_unit_nothing_is_gathered_ahead(teams: dict[int, Team], size: int) -> None:
    assert teams[size].run(follow, Task(steps=6, device_nbytes=26 << 10)) == [False] * size


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", [pytest.param(s, marks=[] if s < 1 else [pytest.mark.full]) for s in range(20)])
@pytest.mark.parametrize("device_nbytes", [32 << 10, 100 << 10])
@pytest.mark.parametrize("model", ["tied", "four segments", "reused"])
def test_no_order_of_copies_and_exchanges_shows(
    teams: dict[int, Team], model: str, device_nbytes: int, seed: int
) -> None:
    task = Task(model, device_nbytes=device_nbytes, adversarial=seed)
    _, weights, states = serial(task, 2)
    for outcome in teams[2].run(train, task):
        assert all(torch.equal(value, outcome.weights[key]) for key, value in weights.items())
        for index, state in states.items():
            assert all(torch.equal(value, outcome.states[index][key]) for key, value in state.items())


def read_too_early(rank: int) -> list[float]:
    """Return what is in the memory of a gather before and after it is waited for."""
    with chunkmem.ChunkManager(make_config(Task())) as manager:
        torch.manual_seed(0)
        with manager.init():
            block = Block()
        shards = manager.runtime.sharding.shards
        assert shards is not None
        late = LateExchange(shards.exchange, rank=rank, seed=0)
        shards.exchange = late
        shards.hold([0], reader="test")
        shards.send([0], reader="test")
        flat = next(iter(manager.runtime.memory.store.chunks.values())).replicas[Tier.DEVICE].flat
        before = float(flat[0])
        assert late.num_late == 1
        shards.arrive([0], reader="test")
        after = float(flat[0])
        shards.release([0])
        assert block.training
        return [before, after]


def test_the_late_exchange_shows_who_reads_too_early(teams: dict[int, Team]) -> None:
    (owner_before, owner_after), (other_before, other_after) = teams[2].run(read_too_early)
    assert owner_before == owner_after == other_after
    assert other_before != other_before, "NaN"


class Clock:
    """Time as it passes with exchanges that are slow: on a busy machine, others may take longer than those."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def time_s(self, work: Callable[[], object]) -> float:
        """Return the seconds that `work` takes."""
        began_s = self.now_s
        work()
        return self.now_s - began_s


class Slow:
    """An exchange that takes a while to gather, and to reduce."""

    def __init__(self, inner: Exchange, gather_s: float, reduce_s: float, clock: Clock) -> None:
        self.inner = inner
        self.gather_s = gather_s
        self.reduce_s = reduce_s
        self.clock = clock

    @property
    def traffic(self) -> Traffic:
        return self.inner.traffic

    def gather(self, shards: Sequence[Shard], *, label: str) -> Work:
        self.clock.now_s += self.gather_s
        return self.inner.gather(shards, label=label)

    def reduce(self, shards: Sequence[Shard], *, label: str) -> Work:
        self.clock.now_s += self.reduce_s
        return self.inner.reduce(shards, label=label)


def choose(rank: int, slow: int, slow_to: str) -> tuple[int, float, float]:
    """Which of two exchanges is used after a step, if one is slow, on this rank at least; and the speeds found."""
    task, clock = Task(config=MEMORY_SAVING), Clock()
    with (
        patch.object(ComputeDevice, "time_s", lambda _device, work: clock.time_s(work)),
        chunkmem.ChunkManager(make_config(task)) as manager,
    ):
        torch.manual_seed(0)
        with manager.init():
            model = MODELS["tied"]()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        shards = manager.runtime.sharding.shards
        assert shards is not None
        ways = []
        for index in range(2):
            is_slow = index == slow and rank == 1
            gather_s, reduce_s = (0.05 if is_slow and slow_to == which else 0.01 for which in ("gather", "reduce"))
            ways.append(Slow(shards.exchange, gather_s, 2 * reduce_s, clock))
        shards.exchanges, shards.exchange = ways, ways[0]
        for step in range(2):
            manager.backward(loss_of(model, batch_of(task, step, 0, rank)))
            optimizer.step()
            optimizer.zero_grad()
        links = manager.runtime.links
        return [way is shards.exchange for way in ways].index(True), links.exchange_Bps, links.reduce_Bps


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("slow_to", ["gather", "reduce"])
def test_all_ranks_use_what_is_fastest_on_the_slowest_of_them(teams: dict[int, Team], slow: int, slow_to: str) -> None:
    (chosen, gather_Bps, reduce_Bps), other = teams[2].run(choose, slow, slow_to)
    assert (chosen, gather_Bps, reduce_Bps) == other
    assert chosen == 1 - slow
    assert gather_Bps == pytest.approx(2 * reduce_Bps)


def first_gradients(rank: int, config: dict[str, Any]) -> dict[str, Tensor]:
    task = Task(config=config)
    with chunkmem.ChunkManager(make_config(task)) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = MODELS["tied"]()
        chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        manager.backward(loss_of(model, batch_of(task, 0, 0, rank)))
        with manager.gather(grads=True):
            return {key: param.grad.clone() for key, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("config", [GROUPED, MEMORY_SAVING], ids=["grouped", "memory-saving"])
def test_the_library_comes_within_a_millionth_of_a_gradient(
    teams: dict[int, Team], size: int, config: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = MODELS["tied"]()
    total: dict[str, Tensor] = {}
    for rank in range(size):
        model.zero_grad()
        loss_of(model, batch_of(Task(), 0, 0, rank)).backward()
        for key, param in model.named_parameters():
            assert param.grad is not None
            total[key] = total.get(key, torch.zeros_like(param)) + param.grad
    found = teams[size].run(first_gradients, config)
    for key, value in total.items():
        mean = value / size
        assert all(torch.equal(grads[key], found[0][key]) for grads in found)
        assert torch.linalg.vector_norm(found[0][key] - mean) <= 1e-6 * torch.linalg.vector_norm(mean)


# Formulas. One block is one chunk, and one unit.

NUM_BLOCKS = 6
BLOCK_NUMEL = 1104
CHUNK_NBYTES = 4 * BLOCK_NUMEL


@dataclass
class Measured:
    """What one rank did in its last step, and what it keeps after it."""

    is_overlapped: bool
    num_agreements: int
    num_gathers: int
    num_reductions: int
    sent_nbytes: int
    received_nbytes: int
    device: dict[str, tuple[int, int]]
    host: dict[str, tuple[int, int]]
    exchange: tuple[int, int]


def stack(rank: int, size: int, device_nbytes: int, micro_batches: int) -> Measured:
    """Train a stack of blocks; the exchanges of a step with so many backwards, and the memory of it."""
    torch.set_num_threads(1)
    values = {"default_chunk_size": BLOCK_NUMEL, "memory": {"device": device_nbytes, "host": 8 << 20}}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(values)) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        manager.accumulate(micro_batches)
        assert manager.runtime.sharding.shards is not None
        traffic = manager.runtime.sharding.shards.exchange.traffic
        agreed = patch.object(Connection, "_agreed", autospec=True, side_effect=Connection._agreed)
        before: tuple[int, ...] = ()
        for step in range(6):
            before = (traffic.num_gathers, traffic.num_reductions, traffic.sent_nbytes, traffic.received_nbytes)
            agreements = agreed.start()
            for _ in range(micro_batches):
                x: Tensor = torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * step + rank))
                manager.backward(model(x).square().mean())
            optimizer.step()
            agreed.stop()
            optimizer.zero_grad()
        assert_as_predicted(manager)
        after = (traffic.num_gathers, traffic.num_reductions, traffic.sent_nbytes, traffic.received_nbytes)
        memory = manager.memory()
        counts = [now - then for now, then in zip(after, before, strict=True)]
        timeline = manager.timeline()
        assert timeline is not None
        peaks: dict[Tier, dict[str, tuple[int, int]]] = {}
        for tier, report in ((Tier.DEVICE, memory.device), (Tier.HOST, memory.host)):
            peaks[tier] = {
                role: (report.by_role.get(role, (0, 0))[0], timeline.role_peak_nbytes.get((tier, role), 0))
                for role in ("param", "grad", "exp_avg", "exp_avg_sq")
            }
        return Measured(
            is_overlapped(manager),
            agreements.call_count,
            *counts,
            peaks[Tier.DEVICE],
            peaks[Tier.HOST],
            memory.exchange_nbytes,
        )


def own(size: int, rank: int) -> list[int]:
    return [group for group in range(NUM_BLOCKS) if group % size == rank]


def room(size: int, num_staying: int) -> int:
    """The smallest cap on DEVICE under which so many last units stay: for weights and states of the rank that owns
    most, for all gradients, for two units that come and go, for those that stay, and for a gradient that lands."""
    return (3 * len(own(size, 0)) + NUM_BLOCKS + 2 + num_staying + 1) * CHUNK_NBYTES


@pytest.mark.few(1)
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("num_staying", [NUM_BLOCKS, 3, 0])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_exchanged_is_as_the_formulas_say(
    teams: dict[int, Team], size: int, num_staying: int, micro_batches: int
) -> None:
    """Units are gathered for forward and backward, but where one follows the other, and those that stay once a step;
    gradients are reduced once."""
    gathers = dict.fromkeys(range(NUM_BLOCKS), 2 * micro_batches)
    gathers[NUM_BLOCKS - 1] -= micro_batches  # backward begins where forward ends
    gathers[0] -= micro_batches - 1  # and the other way round
    gathers |= dict.fromkeys(range(NUM_BLOCKS - num_staying, NUM_BLOCKS), 1)
    # While a unit computes, all that follow and stay begin together, and the one before them: at most one of each rank
    # in an exchange.
    num_ahead = min(num_staying + 1, NUM_BLOCKS) if num_staying else 0
    num_reductions = 1 if num_staying else NUM_BLOCKS  # with room for all gradients, small ones are reduced together
    for rank, found in enumerate(teams[size].run(stack, size, room(size, num_staying), micro_batches)):
        num_own = len(own(size, rank))
        num_sent = sum(gathers[group] for group in own(size, rank))
        num_received = sum(gathers.values()) - num_sent
        assert found.is_overlapped
        assert found.num_gathers == sum(gathers.values()) - num_ahead + math.ceil(num_ahead / size)
        assert found.num_reductions == (math.ceil(NUM_BLOCKS / size) if num_staying else NUM_BLOCKS)
        # On each gather, on all that begin together, on each reduction, and on the step.
        assert found.num_agreements == sum(gathers.values()) - num_ahead + bool(num_ahead) + num_reductions + 1
        assert found.sent_nbytes == (num_sent * (size - 1) + NUM_BLOCKS - num_own) * CHUNK_NBYTES
        assert found.received_nbytes == (num_received + num_own * (size - 1)) * CHUNK_NBYTES
        # The owner of a gradient receives the others' beside it: of all that are reduced together.
        assert found.exchange == (0, (size - 1) * CHUNK_NBYTES * (num_own if num_staying else 1))


def num_exchanged(shards: ShardStore) -> int:
    """The chunks that this one of two ranks has sent or received: each that is gathered or reduced is one of them."""
    traffic = shards.exchange.traffic
    return (traffic.sent_nbytes + traffic.received_nbytes) // CHUNK_NBYTES


def train_short_of_room(rank: int, until: int, is_ahead: bool) -> tuple[dict[str, Tensor], list[int]]:
    """Train a stack of blocks whose units stay; in step 3, rank 1 has no room for one of them in forward.

    Args:
        rank: this one.
        until: which unit; -1: none.
        is_ahead: units are gathered ahead.

    Returns:
        The weights, and how many groups were gathered in each step.
    """
    values = {"default_chunk_size": BLOCK_NUMEL, "memory": {"device": 1 << 20, "host": 8 << 20}}
    with ExitStack() as stack:
        manager = stack.enter_context(chunkmem.ChunkManager(chunkmem.Config.from_dict(values)))
        torch.manual_seed(0)
        with manager.init():
            model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        manager.accumulate(1)
        shards = manager.runtime.sharding.shards
        assert shards is not None
        hold, failures = shards.hold, []

        def short(groups: Iterable[int], *, reader: object) -> None:
            if step == 3 and rank == 1 and tuple(groups) == (until,) and shards._holds[0]:
                failures.append(reader)
                raise chunkmem.CapacityError(
                    "no room", needed_nbytes=2, cap_nbytes=1, enough_nbytes=2, tier=Tier.DEVICE
                )
            hold(groups, reader=reader)

        shards.hold = short  # type: ignore[method-assign]
        if not is_ahead:
            stack.enter_context(patch.object(PrefetchSchedule, "_following", return_value=[]))
        counts = []
        for step in range(7):
            before = num_exchanged(shards)
            x: Tensor = torch.randn(3, 16, generator=torch.Generator().manual_seed(10 * step + rank))
            manager.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            counts.append(num_exchanged(shards) - before - NUM_BLOCKS)
        assert len(failures) == (until > 0 and rank == 1)
        return manager.state_dict(), counts


@pytest.mark.few(1)
@pytest.mark.parametrize("is_ahead", [True, False])
def test_a_rank_that_finds_no_room_has_all_units_come_and_go(teams: dict[int, Team], *, is_ahead: bool) -> None:
    (expected, counts), _ = teams[2].run(train_short_of_room, -1, is_ahead)
    assert counts[1:] == [NUM_BLOCKS] * 6
    for weights, counts in teams[2].run(train_short_of_room, 3, is_ahead):
        assert [key for key, value in expected.items() if not torch.equal(value, weights[key])] == []
        assert counts[1:3] == [NUM_BLOCKS] * 2
        # Gathered ahead, the last unit of forward is still there where backward begins.
        assert counts[4:] == [2 * NUM_BLOCKS - is_ahead] * 3


def train_unevenly(rank: int) -> list[tuple[int, ...]]:
    """Train a stack of blocks whose units stay, with micro-batches that rank 1 alone has; return the schedule."""
    values = {"default_chunk_size": BLOCK_NUMEL, "memory": {"device": 1 << 20, "host": 8 << 20}}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(values)) as manager:
        with manager.init():
            model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for counts in ((1, 1), (1, 1), (0, 3), (1, 2)):  # fewer than there were: nothing is reduced before the step
            for _ in range(counts[rank]):
                manager.backward(model(torch.ones(3, 16)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        prefetch = manager.runtime.sharding.units.prefetch
        assert prefetch is not None
        return prefetch._schedule


def test_ranks_have_one_schedule_whatever_micro_batches_they_have(teams: dict[int, Team]) -> None:
    one, other = teams[2].run(train_unevenly)
    assert one == other


def train_averaged_later(rank: int, device_nbytes: int) -> list[int]:
    """Train a stack of blocks, from step 3 on with averages; return how many groups were gathered in each step."""
    values = {"default_chunk_size": BLOCK_NUMEL, "memory": {"device": device_nbytes, "host": 8 << 20}}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(values)) as manager:
        with manager.init():
            model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        manager.accumulate(1)
        shards, counts = manager.runtime.sharding.shards, []
        assert shards is not None
        for step in range(6):
            if step == 3:
                chunkmem.EMA(manager, 0.9)
            before = num_exchanged(shards)
            manager.backward(model(torch.ones(3, 16)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            counts.append(num_exchanged(shards) - before - NUM_BLOCKS)
        return counts


def test_other_chunks_are_room_that_units_do_not_have(teams: dict[int, Team]) -> None:
    for counts in teams[2].run(train_averaged_later, room(2, NUM_BLOCKS)):
        assert counts[1:3] == [NUM_BLOCKS] * 2
        assert counts[5] > NUM_BLOCKS, "the averages of three blocks take the room"
    for counts in teams[2].run(train_averaged_later, 1 << 20):
        assert counts[1:3] == [NUM_BLOCKS] * 2
        assert counts[5] == NUM_BLOCKS


def most_of_others(size: int, rank: int, *, at_a_time: int) -> int:
    """The most chunks of other ranks among so many blocks that follow each other."""
    windows = [range(start, start + at_a_time) for start in range(NUM_BLOCKS - at_a_time + 1)]
    return max(sum(group % size != rank for group in window) for window in windows)


@pytest.mark.few(1)
@pytest.mark.parametrize("stay", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_what_a_rank_holds_is_as_the_formulas_say(teams: dict[int, Team], size: int, stay: bool) -> None:
    """With room for all: on DEVICE own chunks, and what others own, all of it or of two units; on HOST nothing.

    Where units stay, gradients wait for each other, as there is room for all of them.
    """
    at_a_time = NUM_BLOCKS if stay else 2
    device_nbytes = room(size, NUM_BLOCKS) if stay else room(size, 0)
    for rank, found in enumerate(teams[size].run(stack, size, device_nbytes, 1)):
        own_nbytes = len(own(size, rank)) * CHUNK_NBYTES
        others_nbytes = most_of_others(size, rank, at_a_time=at_a_time) * CHUNK_NBYTES
        assert found.device["param"] == (own_nbytes, own_nbytes + others_nbytes)
        assert found.device["grad"][1] <= (NUM_BLOCKS * CHUNK_NBYTES if stay else own_nbytes + 2 * CHUNK_NBYTES)
        for role in ("exp_avg", "exp_avg_sq"):
            assert found.device[role] == (own_nbytes, own_nbytes)
        assert set(found.host.values()) == {(0, 0)}


@pytest.mark.parametrize("size", SIZES)
def test_what_a_rank_holds_where_room_is_short(teams: dict[int, Team], size: int) -> None:
    """HOST has the own share; DEVICE what is in use: a unit's weights and its gradient."""
    for rank, found in enumerate(teams[size].run(stack, size, 2 * CHUNK_NBYTES, 1)):
        own_nbytes = len(own(size, rank)) * CHUNK_NBYTES
        for role in ("exp_avg", "exp_avg_sq"):
            assert found.host[role] == (own_nbytes, own_nbytes)
        assert max(found.host["param"]) <= own_nbytes
        assert found.host["grad"][1] <= own_nbytes
        assert found.device["param"][1] + found.device["grad"][1] <= 4 * CHUNK_NBYTES
