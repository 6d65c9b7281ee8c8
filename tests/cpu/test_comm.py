"""Exchanges between real processes over gloo: what arrives, which bits means have, and what is said of a lost rank."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import reduce
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from chunkmem.data.errors import ConfigError, RankError, StateError
from chunkmem.ranks import agreement, connection
from chunkmem.ranks.exchange import Shard, mean_in_order
from chunkmem.ranks.methods import Chunkwise, Grouped, PointToPoint, possible_exchanges
from chunkmem.ranks.ranks import Ranks, open_ranks
from chunkmem.runtime.device import ComputeDevice
from tests.helpers.ranks import Team

MEMBERS = {1: (2,), 2: (1, 3), 3: (0, 1, 3), 4: (0, 1, 2, 3)}
"""The processes that make up a group of that many ranks: their numbers in the job are not those in the group."""
WAYS: dict[str, type[Grouped | Chunkwise | PointToPoint]] = {
    "grouped": Grouped,
    "chunkwise": Chunkwise,
    "point to point": PointToPoint,
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NUMEL = 70_000
"""More than the elements of a mean that are worked out at a time, and no multiple of them."""
TIMEOUT_S = 60.0
PATIENCE_S = 8.0
"""The timeout where a rank is waited for in vain."""
DETECTION_S = 2.0
"""How long the others wait for the answer of one that is lost."""
SIZE = 8 << 20
"""Elements that no connection takes on before somebody receives them."""


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with Team(4) as team:
        yield team


# In each process.


def opened(rank: int, world: int, timeout_s: float = TIMEOUT_S) -> Ranks | None:
    """The ranks of a group, on those processes that belong to it."""
    members = MEMBERS[world]
    group = dist.new_group(list(members))
    if rank not in members:
        return None
    ranks = open_ranks(group, timeout_s=timeout_s)
    assert (ranks.rank, ranks.size) == (members.index(rank), world)
    return ranks


def content(index: int, rank: int, dtype: torch.dtype = torch.float32, numel: int = NUMEL) -> torch.Tensor:
    """What a rank has in a chunk: of very different sizes, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(1000 * index + rank)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    return (values * 10 ** torch.empty_like(values).uniform_(-3, 3, generator=generator)).to(dtype)


class Sharding:
    """Chunks dealt out to ranks in turn; as many as there are ranks go together."""

    def __init__(self, num_chunks: int, world: int) -> None:
        self.num_chunks, self.world = num_chunks, world
        self.num_groups = -(-num_chunks // world)

    def owner(self, index: int) -> int:
        return index % self.world

    def members(self, group: int) -> range:
        return range(group * self.world, min((group + 1) * self.world, self.num_chunks))

    def owned_nbytes(self, rank: int, nbytes: Sequence[int]) -> int:
        return sum(nbytes[rank :: self.world])

    def taken_nbytes(self, rank: int, nbytes: Sequence[int]) -> int:
        """What a rank takes in when every chunk is gathered once, and gives away when all are reduced."""
        return sum(nbytes) - self.owned_nbytes(rank, nbytes)

    def given_nbytes(self, rank: int, nbytes: Sequence[int]) -> int:
        """What it gives away when every chunk is gathered once, and takes in when all are reduced."""
        return (self.world - 1) * self.owned_nbytes(rank, nbytes)


def shards_of(ranks: Ranks, indices: Sequence[int], dtype: torch.dtype, numel: int = NUMEL) -> list[Shard]:
    sharding = Sharding(max(indices) + 1, ranks.size)
    return [Shard(i, sharding.owner(i), content(i, ranks.rank, dtype, numel)) for i in indices]


def serial_mean(index: int, world: int, dtype: torch.dtype, numel: int = NUMEL) -> torch.Tensor:
    """The mean as one process works it out: added up in fp32 in the order of the ranks, divided once, rounded once."""
    parts = [content(index, rank, dtype, numel).float() for rank in range(world)]
    return (reduce(torch.add, parts) / world).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def gather_all(rank: int, way: str, world: int, num_chunks: int, dtype: torch.dtype) -> None:
    ranks = opened(rank, world)
    if ranks is None:
        return
    exchange = WAYS[way](ranks.shard)
    sharding = Sharding(num_chunks, world)
    for group in range(sharding.num_groups):
        shards = shards_of(ranks, sharding.members(group), dtype)
        work = exchange.gather(shards, label=f"gather {group}")
        work.wait()
        assert work.done()
        for shard in shards:
            assert same_bits(shard.flat, content(shard.index, shard.owner, dtype)), shard.index
    nbytes = [NUMEL * dtype.itemsize] * num_chunks
    assert exchange.traffic.num_gathers == sharding.num_groups
    assert exchange.traffic.received_nbytes == sharding.taken_nbytes(ranks.rank, nbytes)
    assert exchange.traffic.sent_nbytes == sharding.given_nbytes(ranks.rank, nbytes)
    ranks.close()


def reduce_all(rank: int, way: str, world: int, num_chunks: int, dtype: torch.dtype) -> None:
    ranks = opened(rank, world)
    if ranks is None:
        return
    exchange = WAYS[way](ranks.shard)
    sharding = Sharding(num_chunks, world)
    for group in range(sharding.num_groups):
        shards = shards_of(ranks, sharding.members(group), dtype)
        exchange.reduce(shards, label=f"reduce {group}").wait()
        for shard in shards:
            if shard.owner == ranks.rank:
                check_mean(shard, way, world)
    assert exchange.traffic.num_reductions == sharding.num_groups
    wire = dtype.itemsize if way == "point to point" or world == 1 else 4
    nbytes = [NUMEL * wire] * num_chunks
    assert exchange.traffic.sent_nbytes == sharding.taken_nbytes(ranks.rank, nbytes)
    assert exchange.traffic.received_nbytes == sharding.given_nbytes(ranks.rank, nbytes)
    ranks.close()


def check_mean(shard: Shard, way: str, world: int) -> None:
    dtype = shard.flat.dtype
    expected = serial_mean(shard.index, world, dtype)
    if way == "point to point" or world <= 2:
        # Two numbers have one sum, whichever comes first.
        assert same_bits(shard.flat, expected)
        return
    # Sums of the same numbers in fp32, in another order: they differ by roundings of the partial sums. Then both are
    # rounded to the dtype, and one may be rounded up and the other down.
    typical = torch.stack([content(shard.index, rank, dtype).double().abs() for rank in range(world)]).mean(dim=0)
    slack = 1e-6 * typical + (torch.finfo(dtype).eps * expected.double().abs() if dtype != torch.float32 else 0)
    assert bool(((shard.flat.double() - expected.double()).abs() <= slack).all())


CASES = [
    # With a last group that is short where that is possible, and with none.
    pytest.param(way, world, num_chunks, dtype, id=f"{way}-{world}-{num_chunks}-{name}", marks=marks)
    for way in WAYS
    for world in MEMBERS
    for num_chunks in sorted({world, world + 1, 2 * world - 1})
    for name, dtype in DTYPES.items()
    for marks in [[] if num_chunks != world and name == ("fp32" if world % 2 else "bf16") else [pytest.mark.full]]
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("way", "world", "num_chunks", "dtype"), CASES)
def test_after_a_gather_every_rank_has_the_owners_bits(
    team: Team, way: str, world: int, num_chunks: int, dtype: torch.dtype
) -> None:
    team.run(gather_all, way, world, num_chunks, dtype)


@pytest.mark.few(7)
@pytest.mark.parametrize(("way", "world", "num_chunks", "dtype"), CASES)
def test_after_a_reduction_the_owner_has_the_mean(
    team: Team, way: str, world: int, num_chunks: int, dtype: torch.dtype
) -> None:
    team.run(reduce_all, way, world, num_chunks, dtype)


def reduce_in_bf16(rank: int, way: str, dtype: torch.dtype) -> None:
    members = MEMBERS[2]
    group = dist.new_group(list(members))
    if rank not in members:
        return
    ranks = open_ranks(group, timeout_s=TIMEOUT_S)
    exchange = WAYS[way](ranks.shard)
    exchange.reduce_dtype = torch.bfloat16
    shards = shards_of(ranks, range(3), dtype)
    expected = [shard.flat.to(torch.bfloat16, copy=True) for shard in shards]
    exchange.reduce(shards, label="reduce").wait()
    for shard, total in zip(shards, expected, strict=True):
        dist.all_reduce(total, group=group)
        if shard.owner == ranks.rank:
            assert same_bits(shard.flat, (total / 2).to(dtype)), "torch's own sum of bf16 tensors"
    owned = len([shard for shard in shards if shard.owner == ranks.rank])
    assert exchange.traffic.sent_nbytes == (3 - owned) * NUMEL * 2
    assert exchange.traffic.received_nbytes == owned * NUMEL * 2
    copies = 0 if dtype == torch.bfloat16 else 3
    received = owned if way == "point to point" else 0
    assert exchange.traffic.peak_buffered_nbytes == (copies + received) * NUMEL * 2
    assert exchange.traffic.buffered_nbytes == 0
    ranks.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_summed_in_bf16_where_asked_for(team: Team, way: str, dtype: torch.dtype) -> None:
    team.run(reduce_in_bf16, way, dtype)


# Several at once.


def many_in_flight(rank: int, way: str) -> None:
    ranks = opened(rank, 4)
    assert ranks is not None
    exchange = WAYS[way](ranks.shard)
    gathered = [shards_of(ranks, range(first, first + 4), torch.float32) for first in (0, 4, 8)]
    reduced = [shards_of(ranks, range(first, first + 4), torch.float32) for first in (0, 4)]
    # The chunks of the last are those of the first: as weights and moments of one group may be.
    gathered.append(shards_of(ranks, range(4), torch.float32))
    works = [exchange.gather(shards, label="gather") for shards in gathered[:2]]
    works += [exchange.reduce(shards, label="reduce") for shards in reduced]
    works += [exchange.gather(shards, label="gather") for shards in gathered[2:]]
    # Each rank begins elsewhere, and the odd ones go backwards.
    turned = works[rank:] + works[:rank]
    for work in turned if rank % 2 else reversed(turned):
        work.wait()
    assert all(work.done() for work in works)
    for shards in gathered:
        assert all(same_bits(s.flat, content(s.index, s.owner)) for s in shards)
    for shards in reduced:
        check_mean(shards[ranks.rank], way, 4)
    works[0].wait()
    ranks.close()


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS)
def test_several_exchanges_are_waited_for_in_any_order(team: Team, way: str) -> None:
    team.run(many_in_flight, way)


def beside_the_users(rank: int) -> None:
    ranks = opened(rank, 4)
    assert ranks is not None
    exchange = Grouped(ranks.shard)
    shards = shards_of(ranks, range(4), torch.float32)
    users = torch.tensor([float(rank)])
    # A lane of its own issues exchanges when it can, so that they come before the user's on some ranks only.
    if rank % 2:
        dist.all_reduce(users)
    work = exchange.gather(shards, label="gather")
    if not rank % 2:
        dist.all_reduce(users)
    work.wait()
    assert users.item() == 6.0
    assert all(same_bits(s.flat, content(s.index, s.owner)) for s in shards)
    ranks.close()


def test_exchanges_are_not_taken_for_the_users_own(team: Team) -> None:
    team.run(beside_the_users)


def poll(rank: int, way: str, operation: str) -> tuple[bool, bool]:
    ranks = opened(rank, 4)
    assert ranks is not None
    shards = shards_of(ranks, range(4), torch.float32)
    if rank == 3:
        ranks.barrier(label="the others have begun")
    work = getattr(WAYS[way](ranks.shard), operation)(shards, label=operation)
    before = rank != 3 and work.done()
    if rank != 3:
        ranks.barrier(label="the others have begun")
    deadline_s = time.monotonic() + TIMEOUT_S / 2
    while not work.done():
        assert time.monotonic() < deadline_s
    work.wait()
    ranks.close()
    return before, work.done()


@pytest.mark.parametrize(
    ("way", "operation"), [("grouped", "gather"), ("chunkwise", "gather"), ("chunkwise", "reduce")]
)
def test_an_exchange_is_done_when_all_ranks_have_come_and_not_before(team: Team, way: str, operation: str) -> None:
    assert team.run(poll, way, operation) == [(False, True)] * 4


# Opening.


def open_often(rank: int) -> None:
    # Rank 0 is in a group of its own with rank 1, so that ranks know of different numbers of groups.
    pair = dist.new_group([0, 1])
    if rank < 2:
        beside = open_ranks(pair, timeout_s=TIMEOUT_S)
    for _ in range(3):
        first, second = open_ranks(timeout_s=TIMEOUT_S), open_ranks(timeout_s=TIMEOUT_S)
        assert first.sum_over([float(rank)]) == second.sum_over([float(rank)]) == (6.0,)
        first.close()
        assert second.sum_over([1.0]) == (4.0,)
        second.close()
        second.close()
    if rank < 2:
        assert beside.sum_over([1.0]) == (2.0,)
        beside.close()
    with pytest.raises(StateError, match="adding: the ranks were closed"):
        first.sum_over([1.0], label="adding")
    with pytest.raises(StateError, match="there is no process group"):
        PointToPoint(first.shard).gather(shards_of(first, range(4), torch.float32), label="gather")


def test_ranks_are_opened_and_closed_as_often_as_one_likes(team: Team) -> None:
    team.run(open_often)


def refuse(rank: int) -> None:
    only_zero = dist.new_group([0])
    if rank == 0:
        assert open_ranks(only_zero, timeout_s=TIMEOUT_S).size == 1
    else:
        with pytest.raises(ConfigError, match="this process is not one of the ranks of process_group"):
            open_ranks(only_zero, timeout_s=TIMEOUT_S)


def test_groups_that_do_not_fit(team: Team) -> None:
    team.run(refuse)


def come_not(rank: int) -> tuple[str, tuple[int, ...]]:
    if rank == 2:
        threading.Event().wait()
    started_s = time.monotonic()
    with pytest.raises(RankError) as caught:
        open_ranks(timeout_s=PATIENCE_S)
    assert time.monotonic() - started_s < PATIENCE_S
    return str(caught.value), caught.value.ranks


@pytest.mark.full
def test_a_rank_that_does_not_open_is_named(team: Team) -> None:
    for answer in [a for a in team.run(come_not, lost=[2]) if a is not None]:
        assert "comparing versions of chunkmem (an older one does not answer): after" in answer[0]
        assert "rank 2 does not answer, ranks 0, 1 and 3 do" in answer[0]
        assert answer[1] == (2,)


def be_another_version(rank: int) -> tuple[str, tuple[int, ...]]:
    digest = "another one" if rank == 2 else "one"
    with patch.object(agreement, "code_digest", lambda: digest), pytest.raises(RankError) as caught:
        open_ranks(timeout_s=TIMEOUT_S)
    open_ranks(timeout_s=TIMEOUT_S).close()
    return str(caught.value), caught.value.ranks


def test_a_rank_of_another_version_is_named(team: Team) -> None:
    """Messages had other sizes, and gloo aborted the process."""
    for said, ranks in team.run(be_another_version):
        assert (
            "run different versions of chunkmem (digests of its source files: one on ranks 0, 1, 3; another one" in said
        )
        assert "another one on rank 2; this rank has" in said
        assert ranks == (2,)


def be_many(rank: int) -> tuple[list[str], list[str]]:
    """Open groups as one of many ranks does."""
    with patch.object(connection, "_MANY", 2):
        ranks = open_ranks(timeout_s=TIMEOUT_S)
    found, _ = ranks.values_of_all(str(rank), label="who is there")
    ranks.close()
    return found, [name for name in os.environ if name.startswith("GLOO_ENABLE")]


def test_groups_of_many_ranks_are_opened_with_few_requests(team: Team) -> None:
    assert team.run(be_many) == [(["0", "1", "2", "3"], [])] * 4


# Numbers.


def numbers(rank: int) -> tuple[tuple[float, ...], ...]:
    ranks = opened(rank, 4)
    assert ranks is not None
    assert ranks.broadcast_object({"from": rank, "text": "ä" * rank}) == {"from": 0, "text": ""}
    mine = {"rank": rank}
    assert (ranks.broadcast_object(mine) is mine) == (rank == 0)
    largest = ranks.max_over([float(-rank), math.nan if rank == 2 else 0.0, math.inf if rank == 1 else -math.inf])
    assert largest[0] == 0.0
    assert math.isnan(largest[1])
    assert largest[2] == math.inf
    assert ranks.sum_over([]) == ()
    sums = ranks.sum_over([0.1 * 10**rank, 1e16 if rank == 0 else 1.0 if rank < 3 else -1e16])
    ranks.close()
    return sums, largest[:1]


def test_numbers_over_ranks(team: Team) -> None:
    # 1e16 + 1 is 1e16 in float64: with the ones first it would be 2.
    expected = ((((0.1 + 1.0) + 10.0) + 100.0, 0.0), (0.0,))
    assert team.run(numbers) == [expected] * 4


def disagree(rank: int, digests: tuple[str, ...]) -> str:
    ranks = opened(rank, 4)
    assert ranks is not None
    ranks.agree("the model", "the same")
    with pytest.raises(ConfigError) as caught:
        ranks.agree("the layout of the chunks", digests[rank])
    # It was only a comparison: the ranks can go on.
    assert ranks.sum_over([1.0]) == (4.0,)
    ranks.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("digests", "found"),
    [
        (("3 chunks", "3 chunks", "4 chunks", "3 chunks"), "3 chunks on ranks 0, 1 and 3, 4 chunks on rank 2"),
        (("ä", "b", "", "b"), "ä on rank 0, b on ranks 1 and 3,  on rank 2"),
    ],
)
def test_every_rank_hears_the_same_of_what_differs(team: Team, digests: tuple[str, ...], found: str) -> None:
    sentence = f"the layout of the chunks differs between ranks: {found}; start all ranks with the same of it"
    assert team.run(disagree, digests) == [sentence] * 4


def disagree_in_a_group(rank: int) -> str | None:
    ranks = opened(rank, 2)
    if ranks is None:
        return None
    with pytest.raises(ConfigError) as caught:
        ranks.agree("it", str(rank > 2))
    ranks.close()
    return str(caught.value)


def test_ranks_have_their_numbers_in_the_job(team: Team) -> None:
    answers = team.run(disagree_in_a_group)
    assert answers[0] is answers[2] is None
    assert answers[1] == answers[3]
    assert "False on rank 1, True on rank 3" in answers[1]


# Ranks that are lost.


def timeout_and_limit_s(how: str) -> tuple[float, float]:
    """The timeout where a rank is lost, and how long its loss may take to be noticed, however busy the machine is.

    Of a process that ended most of the others hear long before the timeout, but gloo may not tell all of them: a rank
    that waits for one that has heard of it already waits for the timeout, as where a process hangs.
    """
    timeout_s = PATIENCE_S if how in ("hangs", "stops") else TIMEOUT_S / 2
    return timeout_s, 2 * timeout_s


@patch.object(connection, "_MAX_DETECTION_S", DETECTION_S)
def lose(rank: int, way: str, operation: str, how: str) -> tuple[str, tuple[int, ...], str]:
    """Lose rank 1 in an exchange; return what is said of it."""
    timeout_s, limit_s = timeout_and_limit_s(how)
    ranks = opened(rank, 4, timeout_s)
    assert ranks is not None
    exchange = WAYS[way](ranks.shard)
    shards = shards_of(ranks, range(4), torch.float32, SIZE)
    getattr(exchange, operation)(shards, label="one that everybody comes to").wait()
    if rank == 1:
        vanish(how)
    started_s = time.monotonic()
    with pytest.raises(RankError) as caught:
        getattr(exchange, operation)(shards, label=f"{operation} of chunks 0 to 3").wait()
    assert time.monotonic() - started_s < limit_s
    with pytest.raises(RankError) as again:
        ranks.sum_over([1.0], label="the norm")
    assert again.value.ranks == caught.value.ranks
    return str(caught.value), caught.value.ranks, str(again.value)


def vanish(how: str) -> None:
    if how == "hangs":
        threading.Event().wait()
    if how == "leaves":
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)


ORDINARY = ("dies", "gather", "point to point")
LOSSES = [
    pytest.param(
        way,
        operation,
        how,
        id=f"{how}-{operation}-{way}",
        marks=[] if (how, operation, way) == ORDINARY else [pytest.mark.full],
    )
    for how in ("dies", "hangs", "leaves", "stops")
    for operation in ("reduce", "gather")
    for way in WAYS
]


@pytest.mark.full
@pytest.mark.parametrize(("way", "operation", "how"), LOSSES)
def test_a_lost_rank_is_named_on_all_others(team: Team, way: str, operation: str, how: str) -> None:
    answers = team.run(lose, way, operation, how, timeout_s=4 * TIMEOUT_S, lost=[1])
    for rank in (0, 2, 3):
        message, suspects, again = answers[rank]
        assert message.startswith(f"{operation} of chunks 0 to 3: after ")
        assert "rank 1 does not answer, " in message
        assert " do: died, left, or stuck elsewhere;" in message
        assert suspects == (1,)
        assert again == f"the norm: no more exchanges, as one failed before: {message}"


def cross(rank: int) -> str:
    ranks = opened(rank, 2, PATIENCE_S / 2)
    if ranks is None:
        return ""
    exchange = PointToPoint(ranks.shard)
    shards = shards_of(ranks, range(2), torch.float32)
    operation = exchange.gather if rank == 1 else exchange.reduce
    with pytest.raises(RankError) as caught:
        operation(shards, label="weights of layer 3" if rank == 1 else "gradients of layer 4").wait()
    assert caught.value.ranks == ()
    return str(caught.value)


@pytest.mark.full
def test_ranks_in_different_places_are_told_where_the_others_are(team: Team) -> None:
    _, one, _, three = team.run(cross)
    assert one.startswith("weights of layer 3: after ")
    assert three.startswith("gradients of layer 4: after ")
    for message in (one, three):
        assert " s the ranks wait for each other: rank 1 for " in message
        assert " s in 'weights of layer 3', rank 3 for " in message
        assert message.endswith(" s in 'gradients of layer 4'; all have to run the same modules in the same order")


def come_late(rank: int) -> str:
    ranks = opened(rank, 2, PATIENCE_S)
    if ranks is None:
        return ""
    shards = shards_of(ranks, range(2), torch.float32)
    if rank == 3:
        # Until the other one has given up, which ends this connection.
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            ranks.all_ranks.group(torch.device("cpu")).recv([torch.empty(1)], 0, 12345).wait(
                timedelta(seconds=TIMEOUT_S)
            )
    with pytest.raises(RankError) as caught:
        PointToPoint(ranks.shard).reduce(shards, label="gradients").wait()
    return str(caught.value)


@pytest.mark.full
def test_who_comes_late_hears_that_the_others_gave_up(team: Team) -> None:
    _, one, _, three = team.run(come_late)
    assert one.startswith("gradients: after 6.")
    assert "no rank is missing, but all gave up: rank 1 after 6." in one
    assert "Timed out" in one
    assert three.startswith("gradients: after 0.")
    assert "no rank is missing, but all gave up: rank 1 after 6." in three
    assert "rank 3 after 0." in three
    assert "distributed.timeout_s" in three


@patch.object(connection, "_MAX_DETECTION_S", DETECTION_S)
def lose_the_first(rank: int, port: int, how: str) -> tuple[str, tuple[int, ...]]:
    store = dist.TCPStore("127.0.0.1", port, 3, rank == 0, timedelta(seconds=TIMEOUT_S), wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    timeout_s, limit_s = timeout_and_limit_s(how)
    ranks = open_ranks(timeout_s=timeout_s)
    ranks.barrier(label="start")
    if rank == 0:
        vanish(how)
    started_s = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.barrier(label="end")
    assert time.monotonic() - started_s < limit_s
    return str(caught.value), caught.value.ranks


@pytest.mark.parametrize("how", ["dies", pytest.param("stops", marks=pytest.mark.full)])
def test_the_rank_that_keeps_the_store_is_named_when_it_is_lost(how: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with Team(3, gloo=False) as team:
        answers = team.run(lose_the_first, port, how, timeout_s=4 * TIMEOUT_S, lost=[0])
    for message, suspects in answers[1:]:
        assert "the store that the ranks met in does not answer, which is in rank 0 unless torchrun keeps it" in message
        assert suspects == (0,)


# One process.


def test_one_process_exchanges_nothing() -> None:
    ranks = open_ranks(timeout_s=TIMEOUT_S)
    assert (ranks.rank, ranks.size) == (0, 1)
    ranks.agree("the model", "any")
    assert ranks.sum_over([1.5, -0.0]) == (1.5, -0.0)
    assert ranks.max_over([1.5, -2.0]) == (1.5, -2.0)
    value = object()
    assert ranks.broadcast_object(value) is value
    ranks.barrier(label="alone")
    for way in WAYS.values():
        exchange = way(ranks.shard)
        flat = content(0, 0)
        for work in (
            exchange.gather([Shard(0, 0, flat)], label="gather"),
            exchange.reduce([Shard(0, 0, flat)], label="reduce"),
            exchange.gather([], label="nothing"),
        ):
            work.wait()
            assert work.done()
        assert same_bits(flat, content(0, 0))
        traffic = exchange.traffic
        assert (traffic.num_gathers, traffic.num_reductions) == (2, 1)
        assert traffic.num_operations == traffic.sent_nbytes == traffic.received_nbytes == 0
    ranks.close()


def test_a_group_without_torch_distributed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"process_group was given, but torch\.distributed is not initialised"):
        open_ranks(object(), timeout_s=TIMEOUT_S)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([Shard(3, 0, torch.ones(2)), Shard(3, 0, torch.ones(2))], r"chunks \[3, 3\] are exchanged together"),
        ([Shard(3, 1, torch.ones(2))], "chunk 3 has owner 1, and there are 1 ranks"),
        ([Shard(3, -2, torch.ones(2))], "chunk 3 has owner -2"),
        ([Shard(3, 0, torch.ones(2, 2))], r"chunk 3 is a torch.float32 tensor of shape \[2, 2\]"),
        ([Shard(3, 0, torch.ones(6)[::2])], r"of shape \[3\], stride \[2\]; only 1-D contiguous"),
        ([Shard(3, 0, torch.ones(2, dtype=torch.complex64))], "chunk 3 is a torch.complex64 tensor"),
    ],
)
def test_what_cannot_be_exchanged_is_refused(shards: list[Shard], message: str) -> None:
    exchange = PointToPoint(open_ranks(timeout_s=TIMEOUT_S).shard)
    for operation in (exchange.gather, exchange.reduce):
        with pytest.raises(StateError, match=f"^layer 3: .*{message}"):
            operation(shards, label="layer 3")
    assert exchange.traffic.num_gathers == exchange.traffic.num_reductions == 0


def test_integers_are_copied_and_have_no_mean() -> None:
    exchange = PointToPoint(open_ranks(timeout_s=TIMEOUT_S).shard)
    shards = [Shard(3, 0, torch.ones(2, dtype=torch.int64))]
    exchange.gather(shards, label="layer 3").wait()
    with pytest.raises(StateError, match=r"^layer 3: chunk 3 is a torch.int64 tensor .*, means of a floating dtype"):
        exchange.reduce(shards, label="layer 3")
    assert (exchange.traffic.num_gathers, exchange.traffic.num_reductions) == (1, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, 1 << 16, NUMEL, 1 << 17])
def test_a_mean_is_summed_in_order_divided_once_and_rounded_once(dtype: torch.dtype, numel: int) -> None:
    parts = [content(7, rank, dtype, numel) for rank in range(5)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = (reduce(torch.add, [part.to(wide) for part in parts]) / 5).to(dtype)
    for owner in (0, 3, 4):
        copies = [part.clone() for part in parts]
        mean_in_order(copies[owner], copies)
        assert same_bits(copies[owner], expected)
        # The others are only read.
        assert all(same_bits(copies[i], parts[i]) for i in range(5) if i != owner)


def test_a_sum_beyond_fp16_has_a_mean() -> None:
    parts = [torch.full((3,), 60000.0, dtype=torch.float16) for _ in range(4)]
    mean_in_order(parts[1], parts)
    assert parts[1].tolist() == [60000.0] * 3


@pytest.mark.parametrize(
    ("device", "memory_saving", "ways"),
    [
        ("cpu", None, [PointToPoint]),
        ("cpu", True, [Chunkwise]),
        ("cpu", False, [Grouped]),
        ("cuda", None, [Grouped, Chunkwise]),
        ("cuda", True, [Chunkwise]),
        ("cuda", False, [Grouped]),
    ],
)
def test_the_ways_that_a_configuration_leaves(device: str, memory_saving: bool | None, ways: list[type]) -> None:
    ranks = open_ranks(timeout_s=TIMEOUT_S)
    overlap = ComputeDevice(torch.device("cpu")).overlap
    found = possible_exchanges(ranks, torch.device(device), memory_saving=memory_saving, overlap=overlap)
    assert [type(way) for way in found] == ways
