"""Who is missing when an exchange between ranks fails.

When a rank dies, gloo tells it, by a network address, to those that were just talking with it; all others wait until
their time is up. When one hangs, the time of all others is up. So a rank that sees an exchange fail

1. lingers: lets messages arrive that are on their way, as gloo forgets to tell a receiver of a connection that is
   closed in the middle of one, and it would wait until its time is up;
2. hangs up: closes its own connections, so that ranks that wait for it fail too, and do the same;
3. writes into the store that the ranks met in where it was, and which connections of ranks that keep silent were
   closed before it hung up;
4. reads for a while who has written: a bit of each rank. Who writes nothing is dead, hangs, or has not noticed. If some
   of the silent have closed connections, it is those that are named: the kernel closes those of a dead process, and who
   hangs up does not keep silent. If nobody is silent, each reads where all have been.

Ranks that have hung up are of no more use to each other.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from chunkmem.data.errors import RankError, said

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_POLL_S = 0.02
_MOST_POLLING = 32
"""Ranks that ask the store as often as that; of more, each asks the less."""
_BITS = 62
"""Ranks that a counter of the store has a bit of."""
_STORE_GRACE_S = 0.5
"""Seconds that an answer of the store may take."""
_CALL_S = 1.0
"""Seconds that a connection of a rank to itself may take."""
_UNSENT_TAG = 1 << 30
"""Tag of a message that is never sent."""
_NEXT = "see the output of every rank for the first error, then start all of them again"


@dataclass(frozen=True)
class RankStatus:
    """What a rank says of itself when ranks are asked."""

    label: str
    """Operation in which the rank waited."""
    waited_s: float
    error: str
    """Text of the error that made the rank give up."""


@dataclass
class _Statuses:
    """What is known of the ranks, filled in by a thread."""

    closed: set[int]
    """The ranks whose connections were closed before somebody hung up."""
    answers: dict[int, RankStatus]
    """By rank: this one's; those of all if all have answered."""
    answered: set[int] = field(default_factory=set)
    raised: dict[int, str] = field(default_factory=dict)
    """By rank: the error it raised since its last common operation."""
    complete: threading.Event = field(default_factory=threading.Event)
    """All there is to know is known; otherwise the store was lost or is silent."""

    def read(self, store: Store, rank: int, size: int, own: RankStatus, limit_s: float) -> None:
        """Write this rank's answer, and read who else has: a few requests, and a bit of each rank."""
        deadline_s = time.monotonic() + limit_s
        # Without the store there is no more to read; that it was lost shows in `complete`.
        with contextlib.suppress(RuntimeError):
            self.answered = {rank}
            num_answers = tell_status(store, rank, own)
            self.raised = read_raised(store)
            closed, listed = _List(store, "closed"), set[int]()
            before, is_over = 0, False
            while not is_over:
                is_over = time.monotonic() > deadline_s
                is_quiet = num_answers == before
                if is_over or not is_quiet:  # the store may be lost at any time: what it knows is read as it comes
                    self.answered = self._read_answered(store, size)
                    missing = set(range(size)) - self.answered
                    listed |= set(map(int, closed.new()))
                    self.closed |= listed
                    is_over = is_over or missing <= self.raised.keys()
                if is_over or is_quiet:  # else connections are closed of ranks that are about to answer
                    for other in (self.closed & missing) - listed:
                        closed.append(str(other))
                    listed |= self.closed
                if not is_over:
                    time.sleep(min(poll_s(size), max(_POLL_S, deadline_s - time.monotonic())))
                    before, num_answers = num_answers, store.add("answers", 0)
            if not missing:
                texts = _values(store, [f"answer {other}" for other in range(size)])
                self.answers = {other: RankStatus(**json.loads(text)) for other, text in enumerate(texts)}
            self.complete.set()

    @staticmethod
    def _read_answered(store: Store, size: int) -> set[int]:
        bits = [store.add(f"answered {at}", 0) for at in range(-(-size // _BITS))]
        return {other for other in range(size) if bits[other // _BITS] >> other % _BITS & 1}


class _List:
    """Texts that ranks append to a list in the store, and what of it this rank has not read yet."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._num_read = 0

    def append(self, text: str) -> None:
        """Add a text at the end."""
        self._store.set(f"{self._name} {self._store.add(self._name, 1)}", text)

    def new(self) -> list[str]:
        """Return what others have appended since, and this rank."""
        keys = [f"{self._name} {n}" for n in range(self._num_read + 1, self._store.add(self._name, 0) + 1)]
        if not keys:
            return []
        if not self._store.check(keys):  # somebody has counted and not written yet, and may have died in between
            keys = list(takewhile(lambda key: self._store.check([key]), keys))
        self._num_read += len(keys)
        return _values(self._store, keys)


def tell_status(store: Store, rank: int, status: RankStatus) -> int:
    """Have other ranks know where this one was; return how many of them have said so."""
    store.set(f"answer {rank}", json.dumps(asdict(status)))
    store.add(f"answered {rank // _BITS}", 1 << rank % _BITS)
    return store.add("answers", 1)


def _values(store: Store, keys: Sequence[str]) -> list[str]:
    """Return what the store has under keys that it has."""
    if not keys:
        return []
    is_extended = store.has_extended_api()  # type: ignore[attr-defined]
    found = store.multi_get(list(keys)) if is_extended else [store.get(key) for key in keys]
    return [value.decode() for value in found]


def poll_s(size: int) -> float:
    """Return how long each of so many ranks waits before it asks the store again."""
    return _POLL_S * max(1.0, size / _MOST_POLLING)


def tell_raised(store: Store, rank: int, text: str) -> None:
    """Have other ranks know what this one raised; "" if it has gone on since."""
    is_first = not store.check([f"raised {rank}"])
    store.set(f"raised {rank}", text)
    if is_first:
        _List(store, "raiser").append(str(rank))


def read_raised(store: Store) -> dict[int, str]:
    """Return, by rank, what those raised that have done nothing together with the others since."""
    ranks = [int(rank) for rank in _List(store, "raiser").new()]
    errors = _values(store, [f"raised {rank}" for rank in ranks])
    return {rank: error for rank, error in zip(ranks, errors, strict=True) if error}


def listener_of(store: Store, rank: int) -> tuple[str, int] | None:
    """Return the address at which a rank listens for others of a group over gloo, as it has told them in `store`.

    None: it has not, or in another form than gloo's over TCP.
    """
    key = f"0/{rank}"
    told = store.get(key) if store.check([key]) else b""
    at = 16 + int.from_bytes(told[:8], sys.byteorder)  # the name of the host, with its length; that of a sockaddr
    family, port = told[at : at + 2], int.from_bytes(told[at + 2 : at + 4], "big")
    where = {socket.AF_INET: told[at + 4 : at + 8], socket.AF_INET6: told[at + 8 : at + 24]}
    for each, host in where.items():
        if family == each.to_bytes(2, sys.byteorder):
            return socket.inet_ntop(each, host), port
    return None


def hang_up(group: dist.ProcessGroup, peers: Iterable[int], listener: tuple[str, int] | None) -> set[int]:
    """Close a rank's connections over gloo; return the ranks whose connections to it were closed before.

    Args:
        group: over gloo.
        peers: the other ranks that this one has been connected to.
        listener: see `listener_of`.
    """
    closed, unsent = set(), []
    memory = [torch.empty(1, device="cpu")]
    for peer in peers:
        try:
            unsent.append(group.recv(memory, peer, _UNSENT_TAG))
        except RuntimeError:
            closed.add(peer)
    with _waking(listener) if listener else contextlib.nullcontext():
        for work in unsent:
            # It is meant to fail: when a receive runs out of time, gloo closes all connections.
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(milliseconds=1))
    return closed


@contextlib.contextmanager
def _waking(listener: tuple[str, int]) -> Iterator[None]:
    """Keep a thread of gloo's awake: each connection that is closed waits for it, and it sleeps for 10 ms at a time."""
    over = threading.Event()

    def call() -> None:
        with contextlib.suppress(OSError):  # then it takes longer
            while not over.is_set():
                with socket.create_connection(listener, _CALL_S) as one:
                    # No trace of it stays in the kernel's tables.
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    thread = threading.Thread(target=call, name="chunkmem hangs up", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def collect_statuses(
    store: Store, rank: int, numbers: Sequence[int], answer: RankStatus, *, closed: Collection[int], limit_s: float
) -> RankError:
    """Return the error to raise on this rank, within `limit_s`.

    Args:
        store: of these ranks and this purpose alone.
        rank: this one, counted from 0.
        numbers: what messages call each rank.
        answer: this rank's.
        closed: the ranks whose connections to this one were closed before it hung up.
        limit_s: how long others may take to answer.
    """
    statuses = _Statuses(set(closed), {rank: answer})
    limit_s = max(0.0, limit_s - _STORE_GRACE_S)
    # In a thread of its own, as a TCPStore in a stopped process never answers, whatever timeout it is given.
    reader = threading.Thread(
        target=statuses.read,
        args=(store, rank, len(numbers), answer, limit_s),
        name="chunkmem failure detection",
        daemon=True,
    )
    reader.start()
    reader.join(limit_s + _STORE_GRACE_S)
    answered = statuses.answered | {rank}
    start = f"{answer.label}: after {answer.waited_s:.1f} s"
    if not statuses.complete.is_set() and 0 not in (numbers[other] for other in answered):
        lost = "the store that the ranks met in does not answer, which is in rank 0 unless torchrun keeps it"
        return RankError(f"{start} {lost}: rank 0 died, left, or is stuck; {_NEXT}", (0,))
    silent = [other for other in range(len(numbers)) if other not in answered]
    raised = {other: error for other, error in statuses.raised.items() if other in silent}
    if raised:
        errors = "; ".join(f"rank {numbers[other]} raised {error}" for other, error in sorted(raised.items()))
        return RankError(f"{start} {errors}", tuple(numbers[other] for other in sorted(raised)))
    # In this order, as step 4 of the module's docstring says.
    suspects = [other for other in silent if other in statuses.closed] or silent
    if not suspects:
        return RankError(f"{start} {_disagreement(statuses.answers, numbers)}", ())
    who = f"{named(suspects, numbers)} {_do(suspects)} not answer"
    return RankError(
        f"{start} {who}, {named(sorted(answered), numbers)} {_do(answered)}: died, left, or stuck elsewhere; {_NEXT}",
        tuple(numbers[other] for other in suspects),
    )


def _do(ranks: Sized) -> str:
    return "do" if len(ranks) > 1 else "does"


def named(ranks: Sequence[int], numbers: Sequence[int]) -> str:
    """Return ``"rank 3"``, or ``"ranks 0, 2 and 3"``, by their numbers."""
    words = [str(numbers[rank]) for rank in ranks]
    return f"rank {words[0]}" if len(words) == 1 else f"ranks {', '.join(words[:-1])} and {words[-1]}"


def by_text(texts: Mapping[int, str], numbers: Sequence[int]) -> dict[str, str]:
    """Return, by text, which ranks have it, by their numbers."""
    found: dict[str, list[int]] = {}
    for rank, text in texts.items():
        found.setdefault(text, []).append(rank)
    return {text: named(ranks, numbers) for text, ranks in found.items()}


def said_by_torch(error: Exception) -> str:
    """Return what an error says in one line; torch's own are RuntimeErrors, which goes without saying."""
    return said(error).removeprefix("RuntimeError: ")


def _disagreement(answers: Mapping[int, RankStatus], numbers: Sequence[int]) -> str:
    """Say what may be wrong when nobody is missing."""
    if len({answer.label for answer in answers.values()}) > 1:
        where = ", ".join(
            f"rank {numbers[rank]} for {answer.waited_s:.1f} s in '{answer.label}'" for rank, answer in answers.items()
        )
        return f"the ranks wait for each other: {where}; all have to run the same modules in the same order"
    times = ", ".join(
        f"rank {numbers[rank]} after {answer.waited_s:.1f} s ({answer.error})" for rank, answer in answers.items()
    )
    return f"no rank is missing, but all gave up: {times}; if one only came late, allow more with distributed.timeout_s"
