"""Who is named when an exchange fails, and what it costs: up to 1 024 ranks that meet in a store that counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pytest

from chunkmem.data.errors import RankError
from chunkmem.ranks import failure_detector
from chunkmem.ranks.failure_detector import RankStatus, collect_statuses, tell_raised

STATUS = RankStatus("unit blocks.0: gather", 3.0, "Connection closed by peer")


class CountedStore:
    """Keys and values as in a `torch.distributed.Store`; counts what is asked of it, and the bytes that it answers."""

    def __init__(self, *, is_extended: bool = True) -> None:
        self.values: dict[str, bytes] = {}
        self.counts: Counter[str] = Counter()
        self.requests: Counter[int] = Counter()
        self.answered_nbytes: Counter[int] = Counter()
        self.asking = 0
        """The rank that asks."""
        self.is_extended = is_extended

    def has_extended_api(self) -> bool:
        return self.is_extended

    def set(self, key: str, value: str) -> None:
        self.requests[self.asking] += 1
        self.values[key] = value.encode()

    def add(self, key: str, amount: int) -> int:
        self.requests[self.asking] += 1
        self.counts[key] += amount
        return self.counts[key]

    def check(self, keys: Sequence[str]) -> bool:
        self.requests[self.asking] += 1
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        self.requests[self.asking] += 1
        self.answered_nbytes[self.asking] += len(self.values[key])
        return self.values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.requests[self.asking] += 1
        found = [self.values[key] for key in keys]
        self.answered_nbytes[self.asking] += sum(map(len, found))
        return found


def ask(store: CountedStore, rank: int, size: int, closed: Sequence[int] = ()) -> RankError:
    store.asking = rank
    return collect_statuses(cast(Any, store), rank, range(size), STATUS, closed=closed, limit_s=0.5)


@pytest.mark.parametrize("is_extended", [True, False])
@pytest.mark.parametrize("size", [2, 8, 64, 1024])
def test_the_last_to_ask_names_the_dead_rank_in_a_few_requests(size: int, is_extended: bool) -> None:
    """Each rank sees the connections closed of the dead one, and of all that have hung up before."""
    store = CountedStore(is_extended=is_extended)
    dead = size // 2
    living = [rank for rank in range(size) if rank != dead]
    for rank in living[:-1]:
        store.asking = rank
        written(store, rank)
    error = ask(store, living[-1], size, closed=[rank for rank in range(size) if rank != living[-1]])
    assert error.ranks == (dead,)
    assert f"rank {dead} does not answer" in str(error)
    assert store.requests[living[-1]] <= 40, "polls and the bits of 62 ranks each included"
    assert store.answered_nbytes[living[-1]] <= 4, "what has answered is not told again"
    assert failure_detector._List(cast(Any, store), "closed").new() == [str(dead)]


def written(store: CountedStore, rank: int) -> None:
    """Have a rank's answer in the store as it writes it, without the time that it waits for others."""
    failure_detector.tell_status(cast(Any, store), rank, STATUS)


def test_what_a_silent_rank_raised_is_told() -> None:
    store = CountedStore()
    tell_raised(cast(Any, store), 2, "ValueError: a bad batch")
    tell_raised(cast(Any, store), 3, "ValueError: another")
    tell_raised(cast(Any, store), 3, "")  # and went on
    tell_raised(cast(Any, store), 2, "KeyError: 'x'")
    written(store, 3)
    written(store, 0)
    error = ask(store, 1, 4)
    assert error.ranks == (2,)
    assert str(error).endswith("rank 2 raised KeyError: 'x'")


def test_a_rank_that_dies_while_it_writes_is_silent() -> None:
    store = CountedStore()
    store.set("answer 0", "{}")  # a text, and not counted
    assert ask(store, 1, 3).ranks == (0, 2)
