"""What one of 8 to 1 024 ranks says to the others and asks of the store: nothing grows faster than log2 of the ranks.

The code of the package runs over the store and the groups of `tests/helpers/simulated_ranks.py`, in virtual time.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from chunkmem.config import environment
from chunkmem.data.errors import RankError
from chunkmem.ranks import connection
from chunkmem.ranks.agreement import farther, over_ranks
from chunkmem.ranks.connection import Connection
from chunkmem.ranks.failure_detector import hang_up, listener_of
from chunkmem.ranks.ranks import Ranks, open_ranks
from tests.helpers.simulated_ranks import Simulation, late_rendezvous, rendezvous
from tests.helpers.simulated_training import TIMEOUT_S, failed, trained

SIZES = (8, 64, 512, 1024)
SLACK = 1.05
"""Numbers of ranks have more digits."""
ROUNDS = {"start": 21, "step": 3, "save": 33}
"""Times that all ranks hear of each other until a model is there, in a step that follows a plan, and in a save.

In a step: the gather of all units, which stay, the reduction, and the step's options with a hash of which gradients
there are.
"""
START_S = 10.0
MOST_REQUESTS = 160
"""Most of them ask, every 20 ms, who has answered; more ranks ask less often."""
MOST_NBYTES = 100
GROWING = {
    ("start", "gloo_requests"): "of gloo's full mesh, 128 addresses at a time",
    ("start", "gloo_nbytes"): "of gloo's full mesh",
    ("start", "connections"): "of gloo's full mesh",
    ("save", "nbytes"): "plans of all ranks, on their way to the first and back",
    ("save", "seconds"): "those bytes",
}
"""What does grow with the ranks, on each of them, and why."""


def talk(ranks: Ranks) -> list[Any]:
    """Say one of everything; each rank says the same."""
    first = [10 * other for other in range(ranks.size)] if ranks.rank == 0 else None
    ranks.agree_on_all({"this": "a", "that": "b"}, label="comparing both")
    return [
        ranks.sum_over([1.0, 0.5]),
        ranks.max_over([2.0]),
        ranks.any_over([True, False], label="flags"),
        ranks.any_text("", label="problems"),
        ranks.any_text("disk full", label="problems"),
        ranks.values_of_all("a", label="texts")[0],
        ranks.gather_to_first("row", label="rows"),
        ranks.scatter_from_first(first, label="parts"),
        ranks.from_first("name", label="names"),
        ranks.num_local,
    ]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_mirrored_rank_counts_what_ranks_do_that_talk_to_each_other(size: int) -> None:
    together, alone = Simulation(size), Simulation(size, mirrored=0)
    said = together.run(lambda _: talk(open_ranks(timeout_s=TIMEOUT_S)))
    assert said[0] == alone.run(lambda _: talk(open_ranks(timeout_s=TIMEOUT_S)))[0]
    assert said[-1] == [*said[0][:6], None, 10 * (size - 1), "name", size]
    real, mirrored = together.ranks[0].counts, alone.ranks[0].counts
    assert (real.messages, real.nbytes) == (mirrored.messages, mirrored.nbytes)
    assert (real.gloo_requests, real.gloo_nbytes) == (mirrored.gloo_requests, mirrored.gloo_nbytes)
    for rank in together.ranks:
        assert rank.counts.messages <= mirrored.messages
        assert rank.counts.nbytes <= mirrored.nbytes
        assert rank.counts.requests <= mirrored.requests, "the mirrored one is the last to come, which asks for more"
        assert rank.now_s <= alone.ranks[0].now_s


def test_each_rank_hears_what_each_has_said() -> None:
    """Rows go from rank to rank in rounds, which is no concern of a rank that all others are like."""

    def program(rank: int) -> list[Any]:
        ranks = open_ranks(timeout_s=TIMEOUT_S)
        text = "x" * rank
        return [
            ranks.values_of_all(text, label="texts")[0],
            ranks.sum_over([float(10**rank)]),
            ranks.any_text(text if rank > 2 else "", label="problems"),
            ranks.gather_to_first(text, label="rows"),
        ]

    for size in (2, 5, 8):
        texts = ["x" * rank for rank in range(size)]
        for rank, found in enumerate(Simulation(size).run(program)):
            assert found == [
                texts,
                (float("1" * size),),
                "xxx" if size > 3 else "",
                texts if rank == 0 else None,
            ], f"rank {rank} of {size}"


def test_nothing_grows_faster_than_log2_of_the_ranks(tmp_path: Path) -> None:
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    for size in SIZES:
        for (who, phase), (counts, passed_s) in trained(size, tmp_path / str(size)).items():
            for term, value in [*asdict(counts).items(), ("seconds", passed_s)]:
                found.setdefault((who, phase, term), {})[size] = value
    table = "\n".join(f"{' '.join(key):>32}: {values}" for key, values in found.items() if any(values.values()))
    for (who, phase, term), values in found.items():
        if (phase, term) == ("start", "seconds") or term == "exchanges":
            continue  # see below, and ranks/methods.py
        is_linear = (phase, term) in GROWING
        least = values[SIZES[0]]
        for size, value in values.items():
            more = (size - 1) / (SIZES[0] - 1) if is_linear else math.log2(size) / math.log2(SIZES[0])
            assert value <= least * more * SLACK, f"{term} of {who}, {phase}, at {size} ranks, in:\n{table}"
    for size in SIZES:
        for phase, rounds in ROUNDS.items():
            assert found["others", phase, "messages"][size] <= rounds * math.log2(size), table
        assert found["rank 0", "start", "seconds"][size] <= START_S, table


@pytest.mark.parametrize(
    ("size", "hangs"),
    [
        (4, False),
        (4, True),
        (64, False),
        (64, True),
        *(pytest.param(1024, hangs, marks=pytest.mark.full) for hangs in (False, True)),
    ],
)
def test_a_dead_rank_is_named_by_all_others_in_time(size: int, hangs: bool) -> None:
    for rank, error, counts, passed_s in failed(size, hangs=hangs):
        assert error.ranks == (size // 2,), f"on rank {rank}: {error}"
        assert passed_s <= TIMEOUT_S
        assert counts.requests <= MOST_REQUESTS, "one of a few is the request for the bits of 62 ranks"
        assert counts.answered_nbytes <= MOST_NBYTES


def test_ranks_that_wait_for_each_other_say_where_all_of_them_are() -> None:
    size = 8

    def program(rank: int) -> None:
        ranks = Connection(timeout_s=TIMEOUT_S)
        group = ranks.part("chunks", range(size), None).group(torch.device("cpu"))
        with ranks.waiting(f"unit {rank % 2}"):
            group.recv([torch.empty(1)], size - 1 - rank, 0).wait()

    for error in Simulation(size).run(program):
        assert isinstance(error, RankError)
        assert error.ranks == ()
        assert all(f"rank {rank} for 9.0 s in 'unit {rank % 2}'" in str(error) for rank in range(size)), error


# What the simulation takes for granted of gloo.


class CountedStore(dist.Store):
    """Values, by key; counts what is asked for, and the bytes that are answered."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._written = threading.Condition()
        self.asked: Counter[str] = Counter()
        self.nbytes = 0

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        with self._written:
            self._values[key] = value
            self._written.notify_all()
        self.asked["set"] += 1

    def _found(self, asked: str, keys: Sequence[str]) -> list[bytes]:
        with self._written:
            assert self._written.wait_for(lambda: all(key in self._values for key in keys), TIMEOUT_S)
            self.asked[asked] += 1
            return [self._values[key] for key in keys]

    def check(self, keys: Sequence[str]) -> bool:  # type: ignore[override]
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], _: timedelta | None = None) -> None:  # type: ignore[override]
        self._found("wait", keys)

    def get(self, key: str) -> bytes:
        (found,) = self._found("get", [key])
        self.nbytes += len(found)
        return found

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:  # type: ignore[override]
        found = self._found("multi_get", keys)
        self.nbytes += sum(map(len, found))
        return found


def groups_over(store: dist.Store, size: int) -> list[dist.ProcessGroup]:
    """Return a group over gloo as each of its ranks has it."""
    found: dict[int, Any] = {}

    def open_one(rank: int) -> None:
        found[rank] = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=TIMEOUT_S))  # type: ignore[arg-type]

    threads = [threading.Thread(target=open_one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(size)]


@pytest.mark.parametrize("is_told", [False, True], ids=["by itself", "told to ask seldom"])
def test_gloo_asks_the_store_as_simulated(is_told: bool) -> None:
    size, store = 6, CountedStore()
    with connection._few_requests(store, timedelta(seconds=TIMEOUT_S)) if is_told else nullcontext():
        groups_over(store, size)
        expected = rendezvous(size, host=socket.gethostname())
    assert sum(store.asked.values()) == size * sum(count for count, _, _ in expected)
    assert store.nbytes == size * sum(count * nbytes for count, _, nbytes in expected)


def test_gloo_connects_late_as_simulated() -> None:
    size, store = 6, CountedStore()
    with environment(TORCH_GLOO_LAZY_INIT="1"):
        groups = groups_over(store, size)
    assert store.asked == {"set": size}
    zero = torch.zeros(1)
    threads = [threading.Thread(target=over_ranks, args=(groups[i], i, size, zero, torch.maximum)) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    connected = sum(len(farther(rank, size)) for rank in range(size))
    answers = late_rendezvous(host=socket.gethostname())
    assert sum(store.asked.values()) == size + connected * len(answers)
    assert store.nbytes == connected * sum(answers)


def test_connections_are_closed_without_waiting_for_each() -> None:
    """gloo's thread sleeps for 10 ms, and each connection that is closed waits for it."""
    size = 16
    store = dist.PrefixStore("hanging up", dist.HashStore())  # type: ignore[attr-defined]
    groups = groups_over(store, size)
    failed: list[int] = []

    def wait_for_first(rank: int) -> None:
        with pytest.raises(RuntimeError):
            groups[rank].recv([torch.empty(1)], 0, 0).wait()
        failed.append(rank)

    threads = [threading.Thread(target=wait_for_first, args=(rank,)) for rank in range(3, size)]
    for thread in threads:
        thread.start()
    slow_s = hang_up_s(groups, 1, None)
    quick_s = [hang_up_s(groups, 0, listener_of(store, 0))]
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert sorted(failed) == list(range(3, size))
    for rank in range(2, size - 1):  # one by one, as the machine may have more to do meanwhile
        quick_s.append(hang_up_s(groups, rank, listener_of(store, rank)))
        time.sleep(0.05)  # a moment in which the machine may have less to do
    assert slow_s > 0.005, "without a listener, a connection takes what is avoided"
    assert min(quick_s) < slow_s / 2


def hang_up_s(groups: Sequence[dist.ProcessGroup], rank: int, listener: tuple[str, int] | None) -> float:
    """Return the seconds that it takes for each connection; before, those of the ranks below this one were closed."""
    start_s = time.perf_counter()
    closed = hang_up(groups[rank], [peer for peer in range(len(groups)) if peer != rank], listener)
    return (time.perf_counter() - start_s) / (len(groups) - 1 - len(closed))
