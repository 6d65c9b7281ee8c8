"""Ranks in one process, over a store and process groups that count, in virtual time: no sockets, no waiting.

The code of `chunkmem.ranks` runs as it is; what it calls of `torch.distributed` and `time` is here. Either all ranks
run, as threads of which one runs at a time, the one whose clock is furthest behind. Or one runs with a mirror: the
others do what it does, so that it receives what it has sent, and a request to the store stands for one of every rank.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar
from unittest.mock import patch

import torch
import torch.distributed

from chunkmem.ranks import connection, failure_detector, notes

T = TypeVar("T")
_AHEAD_S = 2e-3
"""How far one of many ranks may be ahead of the others before they run: threads change places less often."""
_FEW = 64
"""Ranks up to which each asks for every single connection when it hangs up."""


@dataclass(frozen=True)
class Speeds:
    """What things take, in seconds."""

    message_s: float = 50e-6
    """From one rank's Python to another's, over gloo and a network between machines."""
    byte_s: float = 1e-9
    request_s: float = 1 / 62_700
    """That the store's thread takes; measured with checks from several processes."""
    key_s: float = 3e-6
    """For each key of a request of several; measured against requests of one."""
    connect_s: float = 100e-6
    """To open a connection over gloo."""
    close_s: float = 500e-6
    """To close one, with gloo's thread kept awake; else it is 10 ms."""


@dataclass
class Counts:
    """What one rank has sent and asked for."""

    messages: int = 0
    """Sent over the group for numbers."""
    nbytes: int = 0
    """Sent over it."""
    requests: int = 0
    """To the store."""
    answered_nbytes: int = 0
    """By the store."""
    gloo_requests: int = 0
    """By gloo to the store, for the addresses of others."""
    gloo_nbytes: int = 0
    """Of these addresses."""
    connections: int = 0
    """Opened by gloo."""
    exchanges: int = 0
    """Messages and collectives of chunks, which take no time here."""

    def since(self, before: Counts) -> Counts:
        """Return what was counted after `before`."""
        return Counts(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


class Died(BaseException):
    """Raised in a rank that dies."""


@dataclass(eq=False)
class _Rank:
    """A thread that runs when it is told to."""

    number: int
    now_s: float = 0.0
    turn: threading.Lock = field(default_factory=lambda: _held())
    num_turns: int = 0
    """A place in the queue that was taken before the last turn is void."""
    counts: Counts = field(default_factory=Counts)
    journal: list[torch.Tensor] = field(default_factory=list)
    """What it has sent to all others, in order."""


def _held() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class Simulation:
    """Some ranks, all of them or one with a mirror, and the clock of each."""

    def __init__(self, size: int, *, mirrored: int | None = None, speeds: Speeds | None = None) -> None:
        """Have `size` ranks. Of these, `mirrored` alone runs; None: all of them do."""
        self.size = size
        self.is_mirror = mirrored is not None
        self.speeds = speeds or Speeds()
        self.ranks = [_Rank(number) for number in (range(size) if mirrored is None else [mirrored])]
        self.store = SimulatedStore(self, _Content())
        self.groups: dict[str, _Meeting] = defaultdict(_Meeting)
        self.first: list[torch.Tensor] = []
        """What rank 0 has sent to all others when it was the mirrored one."""
        self._queue: list[tuple[float, int, int, _Rank]] = []
        self._num_queued = 0
        self._over = _held()
        self._num_running = 0
        self._ahead_s = 0.0 if size <= _FEW else _AHEAD_S
        self._now = self.ranks[0]

    @property
    def rank(self) -> _Rank:
        """The rank whose code is running."""
        return self._now

    def run(self, program: Callable[[int], T]) -> list[T | BaseException]:
        """Return what a program returns or raises on each rank that runs."""
        results: list[Any] = [None] * len(self.ranks)

        def run_one(at: int, rank: _Rank) -> None:
            rank.turn.acquire()
            try:
                results[at] = program(rank.number)
            except BaseException as error:
                results[at] = error
            self._num_running -= 1
            self._give_turn()

        with self._patched():
            if self.is_mirror:
                return [program(self.ranks[0].number)]
            before = threading.stack_size(512 << 10)
            threads = [threading.Thread(target=run_one, args=each, daemon=True) for each in enumerate(self.ranks)]
            self._num_running = len(threads)
            for rank, thread in zip(self.ranks, threads, strict=True):
                thread.start()
                self.wake(rank, rank.now_s)
            threading.stack_size(before)
            self._give_turn()
            self._over.acquire()
        assert self._num_running == 0, "ranks wait for each other for ever"
        return results

    def _patched(self) -> contextlib.ExitStack:
        clock = SimpleNamespace(monotonic=lambda: self.rank.now_s, sleep=lambda s: self.pause(self.rank.now_s + s))
        threads = SimpleNamespace(Thread=_AtOnce, Event=threading.Event)
        stack = contextlib.ExitStack()
        if self.size > _FEW:
            stack.enter_context(patch.object(connection, "hang_up", lambda group, peers, _: group.hang_up() & {*peers}))
        if self.is_mirror:
            for name in ("rows_to_first", "row_from_first"):
                of_group = partial(_of_group, name)
                stack.enter_context(patch.object(connection, name, of_group))
        for module, name, value in (
            (connection, "dist", _Distributed(self)),
            (connection, "time", clock),
            (failure_detector, "time", clock),
            (failure_detector, "threading", threads),
            (notes, "time", clock),
        ):
            stack.enter_context(patch.object(module, name, value))
        return stack

    def pause(self, until_s: float) -> None:
        """Let the ranks run that are behind that time, and go on then."""
        if self._queue and self._queue[0][0] < until_s - self._ahead_s:
            self.wake(self.rank, until_s)
            self.block()
        else:
            self.rank.now_s = until_s

    def wake(self, rank: _Rank, at_s: float) -> None:
        """Have a rank go on at a time, unless it does so before."""
        self._num_queued += 1
        heapq.heappush(self._queue, (at_s, self._num_queued, rank.num_turns, rank))

    def block(self) -> None:
        """Let others run until this rank is woken."""
        rank = self.rank
        assert not self.is_mirror, "nobody will send what is waited for"
        self._give_turn()
        rank.turn.acquire()

    def _give_turn(self) -> None:
        while self._queue:
            at_s, _, num_turns, rank = heapq.heappop(self._queue)
            if num_turns == rank.num_turns:
                rank.num_turns += 1
                rank.now_s = max(rank.now_s, at_s)
                self._now = rank
                rank.turn.release()
                return
        self._over.release()

    def die(self) -> None:
        """End the running rank, as the kernel does: all of its connections are closed."""
        for meeting in self.groups.values():
            if self.rank.number in meeting.members:
                meeting.close(self, self.rank.number)
        raise Died


class _AtOnce:
    """A thread whose work is done before it is waited for: its clock is the rank's."""

    def __init__(self, *, target: Callable[..., None], args: Sequence[Any], **_: Any) -> None:
        self._work = lambda: target(*args)
        self._took_s = 0.0

    def start(self) -> None:
        start_s = failure_detector.time.monotonic()
        self._work()
        self._took_s = failure_detector.time.monotonic() - start_s

    def join(self, timeout_s: float) -> None:
        assert self._took_s <= timeout_s, "it is not waited for any longer"


def _of_group(name: str, group: SimulatedGroup, rank: int, size: int, *tensors: Any) -> Any:
    return getattr(group, name)(*tensors)


class _Distributed:
    """Stands for `torch.distributed`."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        world = SimpleNamespace(get_group_store=lambda: simulation.store)
        self.group = SimpleNamespace(WORLD=world)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    def is_initialized(self) -> bool:
        return True

    def get_rank(self) -> int:
        return self._simulation.rank.number

    def get_process_group_ranks(self, _: object) -> range:
        return range(self._simulation.size)

    @staticmethod
    def PrefixStore(name: str, store: SimulatedStore) -> SimulatedStore:
        return store.within(name)

    def ProcessGroupGloo(self, store: SimulatedStore, rank: int, size: int, timeout: timedelta) -> SimulatedGroup:
        return SimulatedGroup(self._simulation, store, rank, size, timeout.total_seconds())


@dataclass
class _Content:
    """Of a store."""

    values: dict[str, bytes] = field(default_factory=dict)
    waiting: dict[str, list[_Rank]] = field(default_factory=lambda: defaultdict(list))
    """By key: the ranks that wait for it."""
    free_s: float = 0.0
    """When the store has answered all that was asked of it."""


class SimulatedStore:
    """A `torch.distributed.Store` in one thread, which all ranks ask: their requests queue."""

    def __init__(self, simulation: Simulation, content: _Content, prefix: str = "") -> None:
        self.prefix = prefix
        self.timeout = timedelta(minutes=5)
        self._simulation = simulation
        self._content = content

    def within(self, name: str) -> SimulatedStore:
        return SimulatedStore(self._simulation, self._content, f"{self.prefix}{name}/")

    def has_extended_api(self) -> bool:
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def ask(self, *, num_keys: int = 1, answered: int = 0, count: int = 1, is_gloo: bool = False) -> None:
        """Pass the time that so many requests take, of so many keys and bytes that are answered, each."""
        simulation, content, speeds = self._simulation, self._content, self._simulation.speeds
        rank = simulation.rank
        rank.counts.requests += 0 if is_gloo else count
        rank.counts.answered_nbytes += 0 if is_gloo else count * answered
        rank.counts.gloo_requests += count if is_gloo else 0
        rank.counts.gloo_nbytes += count * answered if is_gloo else 0
        simulation.pause(rank.now_s + speeds.message_s)
        if simulation.is_mirror:
            count *= simulation.size
        takes_s = count * (speeds.request_s + speeds.key_s * (num_keys - 1) + speeds.byte_s * answered)
        content.free_s = max(content.free_s, rank.now_s) + takes_s
        rank.now_s = content.free_s + speeds.message_s

    def _put(self, key: str, value: bytes) -> None:
        content = self._content
        content.values[self.prefix + key] = value
        for rank in content.waiting.pop(self.prefix + key, ()):
            self._simulation.wake(rank, self._simulation.rank.now_s)

    def _wait(self, keys: Sequence[str]) -> list[bytes]:
        content = self._content
        for key in (self.prefix + key for key in keys):
            while key not in content.values:
                content.waiting[key].append(self._simulation.rank)
                self._simulation.block()
        return [content.values[self.prefix + key] for key in keys]

    def set(self, key: str, value: str | bytes) -> None:
        self.ask()
        self._put(key, value if isinstance(value, bytes) else value.encode())

    def add(self, key: str, amount: int) -> int:
        self.ask()
        others = self._simulation.size if self._simulation.is_mirror else 1
        total = int(self._content.values.get(self.prefix + key, b"0")) + amount * others
        self._put(key, str(total).encode())
        return total

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        self.ask()
        if self._content.values.get(self.prefix + key, b"").decode() == expected:
            self._put(key, wanted.encode())
        return self._content.values[self.prefix + key]

    def check(self, keys: Sequence[str]) -> bool:
        self.ask(num_keys=len(keys))
        return all(self.prefix + key in self._content.values for key in keys)

    def wait(self, keys: Sequence[str], _: timedelta) -> None:
        self.ask(num_keys=len(keys))
        self._wait(keys)

    def get(self, key: str) -> bytes:
        (found,) = self._wait([key])
        self.ask(answered=len(found))
        return found

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        found = self._wait(keys)
        self.ask(num_keys=len(keys), answered=sum(map(len, found)))
        return found


def rendezvous(size: int, *, host: str = "host-0000") -> list[tuple[int, int, int]]:
    """Return what gloo asks of the store to connect so many ranks: how often, keys and bytes of each.

    `host` is the name of their machines.

    tests/cpu/test_simulated_ranks.py compares it with gloo.
    """
    nbytes = 152 + len(host) + (0 if "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER" in os.environ else 8 * size)
    if "GLOO_ENABLE_STORE_V2_API" in os.environ:
        parts = [min(128, size - start) for start in range(0, size, 128)]
        return [(1, 1, 0), *((1, part, part * nbytes) for part in parts)]
    return [(1, 1, 0), (size, 1, 0), (size, 1, nbytes)]


def late_rendezvous(*, host: str = "host-0000") -> list[int]:
    """Return how many bytes the store answers to each request for one rank that another first talks to."""
    return [0, 152 + len(host)]


@dataclass
class _Meeting:
    """What the ranks of a group over gloo have in common."""

    members: list[int] = field(default_factory=list)
    came: list[_Rank] = field(default_factory=list)
    messages: dict[tuple[int, int, int], deque[tuple[float, torch.Tensor]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    """By sender, receiver and tag: when each arrives, and what it is."""
    waiting: dict[tuple[int, int], _Rank] = field(default_factory=dict)
    """By sender and receiver: that waits."""
    closed: set[int] = field(default_factory=set)

    def close(self, simulation: Simulation, number: int) -> None:
        """Close a rank's connections; who waits for it is woken."""
        me = self.members.index(number)
        self.closed.add(me)
        for (sender, _), rank in list(self.waiting.items()):
            if sender == me:
                simulation.wake(rank, simulation.rank.now_s + simulation.speeds.message_s)


class _Work(Protocol):
    def wait(self, timeout: timedelta | None = None) -> bool: ...


class _Done:
    """What needs no waiting."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Received:
    """A message that is received."""

    def __init__(self, group: SimulatedGroup, into: torch.Tensor, peer: int, tag: int) -> None:
        self._group, self._into, self._peer, self._tag = group, into, peer, tag

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._group.receive(self._into, self._peer, self._tag, timeout)
        return True


class SimulatedGroup:
    """A `torch.distributed.ProcessGroupGloo`: trees for broadcasts, all to one for gathers, as gloo has them."""

    def __init__(self, simulation: Simulation, store: SimulatedStore, rank: int, size: int, timeout_s: float) -> None:
        self._simulation, self._rank, self._size, self._timeout_s = simulation, rank, size, timeout_s
        self._store = store
        self._peers: set[int] = set()
        """Whom it is connected to."""
        self._meeting = simulation.groups[store.prefix]
        self._counted = "numbers" in store.prefix
        self._num_collectives = 0
        self._free_s = 0.0
        """When this rank's link has sent all that was given to it."""
        if "TORCH_GLOO_LAZY_INIT" in os.environ:
            store.ask(is_gloo=True)
        else:
            for count, num_keys, nbytes in rendezvous(size):
                store.ask(count=count, num_keys=num_keys, answered=nbytes, is_gloo=True)
            self._connected(set(range(size)) - {rank})
        self._meeting.members.append(simulation.rank.number)
        self._meeting.came.append(simulation.rank)
        if len(self._meeting.came) == size or simulation.is_mirror:
            self._meeting.members.sort()
            for other in self._meeting.came[:-1]:
                simulation.wake(other, simulation.rank.now_s)
        else:
            simulation.block()

    def _connected(self, peers: set[int]) -> None:
        self._peers |= peers
        self._simulation.rank.now_s += len(peers) * self._simulation.speeds.connect_s
        self._simulation.rank.counts.connections += len(peers)

    def _connect(self, *peers: int) -> None:
        """Connect to those that this rank first talks to."""
        new = set(peers) - self._peers - {self._rank}
        for _ in new:
            for answered in late_rendezvous():
                self._store.ask(answered=answered, is_gloo=True)
        self._connected(new)

    def _count(self, nbytes: int, messages: int = 1) -> None:
        counts = self._simulation.rank.counts
        if self._counted:
            counts.messages += messages
            counts.nbytes += messages * nbytes
        else:
            counts.exchanges += messages

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> _Done:
        simulation, (tensor,) = self._simulation, tensors
        if peer in self._meeting.closed or self._rank in self._meeting.closed:
            raise RuntimeError("Connection closed by peer")
        self._connect(peer)
        self._count(tensor.nbytes)
        now_s = simulation.rank.now_s
        self._free_s = max(self._free_s, now_s) + tensor.nbytes * simulation.speeds.byte_s
        arrival_s = self._free_s + simulation.speeds.message_s
        sender, receiver = (peer, self._rank) if simulation.is_mirror else (self._rank, peer)
        key = (0, 0, tag) if simulation.is_mirror else (sender, receiver, tag)
        if self._counted or not simulation.is_mirror:
            self._meeting.messages[key].append((arrival_s, tensor.clone()))
        if (waiting := self._meeting.waiting.get((sender, receiver))) is not None:
            simulation.wake(waiting, arrival_s)
        return _Done()

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> _Work:
        self._connect(peer)
        if self._simulation.is_mirror and not self._counted:
            self._count(0)
            return _Done()
        if peer in self._meeting.closed and not self._meeting.messages.get((peer, self._rank, tag)):
            raise RuntimeError("Connection closed by peer")
        return _Received(self, tensors[0], peer, tag)

    def receive(self, into: torch.Tensor, peer: int, tag: int, timeout: timedelta | None) -> None:
        """Wait for a message."""
        simulation, meeting, rank = self._simulation, self._meeting, self._simulation.rank
        key = (0, 0, tag) if simulation.is_mirror else (peer, self._rank, tag)
        limit_s = rank.now_s + (self._timeout_s if timeout is None else timeout.total_seconds())
        while not (queue := meeting.messages.get(key)) or queue[0][0] > rank.now_s:
            if queue and simulation.is_mirror:
                rank.now_s = queue[0][0]
                continue
            if not queue and (peer in meeting.closed or self._rank in meeting.closed):
                raise RuntimeError("Connection closed by peer")
            if rank.now_s >= limit_s:
                self._close()
                raise RuntimeError("Timed out waiting for recv operation to complete")
            meeting.waiting[peer, self._rank] = rank
            simulation.wake(rank, queue[0][0] if queue else limit_s)
            simulation.block()
            del meeting.waiting[peer, self._rank]
        into.copy_(queue.popleft()[1].view_as(into))

    def hang_up(self) -> set[int]:
        """Do what `failure_detector.hang_up` does by asking for each connection."""
        closed = self._meeting.closed - {self._rank}
        self._close()
        return closed

    def _close(self) -> None:
        rank = self._simulation.rank
        rank.now_s += self._simulation.speeds.close_s * len(self._peers - self._meeting.closed)
        self._meeting.close(self._simulation, rank.number)

    # Collectives.

    def broadcast(self, tensors: Sequence[torch.Tensor], options: Any) -> _Done:
        (tensor,), root, size, own = tensors, options.rootRank, self._size, self._rank
        tag = self._next_tag()
        me = (own - root) % size
        if self._simulation.is_mirror:
            return self._mirrored(tensor, root, messages=math.ceil(math.log2(size)))
        # Rank i > 0 hears of i without its highest bit, and tells those that have a higher bit in addition.
        if me > 0:
            self.receive(tensor, (me - (1 << me.bit_length() - 1) + root) % size, tag, None)
        for bit in range(me.bit_length(), size.bit_length()):
            if me + (1 << bit) < size:
                self.send([tensor], (me + (1 << bit) + root) % size, tag)
        return _Done()

    def rows_to_first(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Do what the function of `agreement` does where the others are as this rank is."""
        simulation, speeds = self._simulation, self._simulation.speeds
        distance = self._rank & -self._rank or 1 << (self._size - 1).bit_length()
        has = min(distance, self._size - self._rank)
        for bit in range((has - 1).bit_length()):
            self._connect(self._rank + (1 << bit))
            simulation.rank.now_s += speeds.message_s + speeds.byte_s * mine.nbytes * min(1 << bit, has - (1 << bit))
        if self._rank == 0:
            return [mine.clone() for _ in range(self._size)]
        self._connect(self._rank - distance)
        self._count(has * mine.nbytes)
        simulation.rank.now_s += speeds.byte_s * has * mine.nbytes
        return []

    def row_from_first(self, rows: Sequence[torch.Tensor], mine: torch.Tensor) -> None:
        """Do what the function of `agreement` does where the others are as this rank is."""
        simulation, speeds = self._simulation, self._simulation.speeds
        distance = self._rank & -self._rank or 1 << (self._size - 1).bit_length()
        has = min(distance, self._size - self._rank)
        if self._rank:
            simulation.rank.now_s += speeds.message_s + speeds.byte_s * has * mine.nbytes
            mine.copy_(simulation.first.pop(0))
        else:
            mine.copy_(rows[0])
            simulation.rank.journal.append(rows[-1].clone())
        for bit in range((has - 1).bit_length()):
            nbytes = mine.nbytes * min(1 << bit, has - (1 << bit))
            self._count(nbytes)
            simulation.rank.now_s += speeds.byte_s * nbytes

    def _next_tag(self) -> int:
        self._num_collectives += 1
        return -self._num_collectives

    def _mirrored(self, tensor: torch.Tensor, root: int, *, messages: int) -> _Done:
        """Send to all others; or take what rank 0 has sent, when it was the one that ran."""
        simulation = self._simulation
        self._count(tensor.nbytes, messages)
        if self._counted:
            speeds = simulation.speeds
            simulation.rank.now_s += max(1, messages) * speeds.message_s + messages * speeds.byte_s * tensor.nbytes
            if root == self._rank:
                simulation.rank.journal.append(tensor.clone())
            else:
                tensor.copy_(simulation.first.pop(0))
        return _Done()

    def _issued(self, *_: Any) -> _Done:
        """Count a collective of chunks, whose content nobody looks at."""
        self._count(0)
        return _Done()

    allgather = reduce_scatter = reduce = allreduce = _issued


@contextlib.contextmanager
def counted(simulation: Simulation) -> Iterator[Callable[[], tuple[Counts, float]]]:
    """Yield what tells of the running rank what was counted since, and the virtual seconds that passed."""
    rank = simulation.rank
    before, start_s = Counts(*astuple(rank.counts)), rank.now_s
    yield lambda: (rank.counts.since(before), rank.now_s - start_s)
