"""A rank's connection to the others: what they agree on before they begin it, and what happens when one is missing.

See `chunkmem.ranks.agreement` and `chunkmem.ranks.failure_detector`.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from chunkmem.config import environment
from chunkmem.data.errors import ChunkmemError, ConfigError, RankError, StateError, said
from chunkmem.ranks.agreement import (
    Operation,
    Verdict,
    difference,
    farther,
    numbers_of,
    over_ranks,
    require_same_code,
    row_from_first,
    rows_of_ranks,
    rows_to_first,
    stated,
    verdict,
)
from chunkmem.ranks.failure_detector import (
    RankStatus,
    collect_statuses,
    hang_up,
    listener_of,
    said_by_torch,
    tell_raised,
)
from chunkmem.ranks.groups import RankGroup

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_T = TypeVar("_T")
_MAX_DETECTION_S = 10.0
_DETECTION_SHARE = 0.25
"""Share of the timeout for failure detection; an exchange may take the rest."""
_LINGER_SHARE = 0.1
"""Share of the failure detection for lingering."""
_MANY = 32
"""Ranks of a group above which gloo is told to ask the store seldom."""


class Connection:
    """What a rank says to the others, and hears of them.

    In RAM ranks talk over gloo groups of their own, one for chunks and one for numbers: what a thread does with one of
    them can neither be mistaken for what another does, or the user, nor wait behind it. Messages call a rank by its
    number in the whole job, as the output of torchrun does.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        members: tuple[int, ...] | None = None,
        timeout_s: float,
    ) -> None:
        """Open the groups. Every rank has to, as often as the others.

        Args:
            process_group: None is the default one; if torch.distributed is not initialised, this process alone.
            members: the ranks of `process_group` that are meant, by their number in the whole job; None: all of them.
            timeout_s: after this much waiting, the failure detection included, a rank counts as lost. The same on all
                ranks.

        Raises:
            ConfigError: `process_group` was given but torch.distributed is not initialised, or this process is not one
                of its ranks.
            RankError: a rank did not come.
        """
        group = group_of(process_group)
        own = 0 if group is None else dist.get_rank()
        self.names: tuple[int, ...] = members or ((0,) if group is None else tuple(dist.get_process_group_ranks(group)))
        if own not in self.names:
            raise ConfigError("this process is not one of the ranks of process_group; pass it on its ranks only")
        self.rank = self.names.index(own)
        """Among these ranks, counted from 0."""
        self.size = len(self.names)
        self.timeout_s = timeout_s
        self.process_group = group
        """The given process group, or the default one; None: this process alone, or `close` was called."""
        self._numbers: dist.ProcessGroup | None = None
        self._opened: list[tuple[dist.ProcessGroup, dict[int, int], tuple[str, int] | None]] = []
        """Groups over gloo that nothing else uses, whom this rank talks to in each, by their number there, and where it
        listens for them."""
        self._store: Store | None = None
        self._lock = threading.Lock()
        self._failure: RankError | None = None
        self._facts: frozenset[str] = frozenset()
        self._facts_digest = ""
        self._raised = ""
        """Error, as text, that this rank has raised since its last common operation; empty: none."""
        self._has_joined = False
        """This rank has joined operations of others since the last step."""
        self._most = 0
        """The most backwards of a rank in this step."""
        self.is_alike = False
        """All ranks were in the same state when they last had waited for each other."""
        self._complete: int | None = None
        """If a rank has joined others: the first rank that has not; None: none has joined."""
        if group is not None and self.size > 1:
            self._open(group)

    def _open(self, group: dist.ProcessGroup) -> None:
        met_in = within(group.get_group_store(), f"chunkmem {self.names}")
        # Not `new_group`: it names groups by what each process has opened before, which may differ between ranks, and
        # gives a name again when its group was closed. gloo then waits for the addresses that it finds under it.
        count = met_in.add(f"chunkmem opened by rank {self.rank}", 1)
        self._store = within(met_in, f"chunkmem {count}")
        timeout_s = self.timeout_s - self._detection_s
        with self.waiting("comparing versions of chunkmem (an older one does not answer)"):
            require_same_code(self._store, self.rank, self.names, timeout_s=timeout_s)
        self._numbers = self._gloo("numbers", range(self.size), is_late=True)

    def _gloo(self, name: str, members: Sequence[int], *, is_late: bool = False) -> dist.ProcessGroup:
        """Return a new group over `members`, who all call it.

        Args:
            name: of the group.
            members: their ranks among these.
            is_late: they are connected when they first talk, those of `over_ranks` now: to hang up on these closes the
                others, too. A rank that first talks to one which has hung up waits in vain.
        """
        assert self._store is not None
        timeout = timedelta(seconds=self.timeout_s - self._detection_s)
        store, rank, size = within(self._store, name), members.index(self.rank), len(members)
        asks = _few_requests(store, timeout) if size > _MANY and not is_late else contextlib.nullcontext()
        connects = environment(TORCH_GLOO_LAZY_INIT="1") if is_late else contextlib.nullcontext()
        with self.waiting("opening the process groups"), asks, connects:
            # By itself, not as part of a group of several backends; it is used in the same way.
            group = cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, rank, size, timeout))
            peers = farther(rank, size) if is_late else [peer for peer in range(size) if peer != rank]
            self._opened.append((group, {peer: members[peer] for peer in peers}, listener_of(store, rank)))
        if is_late:
            with self.waiting("connecting to ranks"):
                over_ranks(group, rank, size, torch.zeros(1, device="cpu"), torch.maximum)
        return group

    def part(
        self, name: str, members: Sequence[int], elsewhere: dist.ProcessGroup | None, *, is_rare: bool = False
    ) -> RankGroup:
        """Return some of these ranks, this one included, as a group of their own; all of them call it.

        Args:
            name: what for; the same members may have several.
            members: their ranks among these.
            elsewhere: the group to exchange chunks over that are on accelerators.
            is_rare: they exchange little among all of them, and are connected when they do.

        Raises:
            RankError: a rank did not come.
        """
        in_ram = self._gloo(f"{name} of {members}", members, is_late=is_rare) if len(members) > 1 else None
        rank, size = members.index(self.rank), len(members)
        return RankGroup(rank, size, in_ram=in_ram, elsewhere=elsewhere, waiting=self.waiting)

    @property
    def is_lost(self) -> bool:
        """Whether an exchange with other ranks has failed, so that there are no more."""
        return self._failure is not None

    @property
    def _detection_s(self) -> float:
        return min(_MAX_DETECTION_S, _DETECTION_SHARE * self.timeout_s)

    def close(self) -> None:
        """Give the groups back. The second time, do nothing."""
        self._numbers = self.process_group = None
        self._opened = []

    # Agreement: see the note in `chunkmem.ranks.agreement`.

    def know(self, facts: frozenset[str]) -> None:
        """Say what has to be the same on all ranks in what they do together from now on, each as a sentence begins."""
        if facts != self._facts:
            self._facts = facts
            self._facts_digest = hashlib.sha256("\n".join(sorted(facts)).encode()).hexdigest()

    def begin(self, operation: Operation) -> bool:
        """Return once all ranks are about to do the same, and whether all of them can.

        Raises:
            RankError: a rank is missing; or the ranks differ in what they are about to do, or in what they `know`: then
                on every rank, in the same words.
        """
        if self.size == 1:
            return operation.can
        found = self._agreed(operation)
        if found.one_waits and found.all_can:
            self.send_object(operation.joinable, operation.label, found.source)
        return found.all_can

    def least(self, label: str, count: int) -> int:
        """Return the smallest number that a rank passes, below 2**31, once all are here; raises what `begin` does."""
        return self._agreed(Operation(label, count=count)).least

    def are_alike(self, label: str, state: bytes) -> bool:
        """Tell whether all ranks pass the same, once all are here; raises what `begin` does."""
        return self._agreed(Operation(label, state=state)).is_alike

    def wait_for_others(self, label: str, *, count: int = 0, state: bytes = b"") -> Any:
        """Return what the others are about to do, which this rank has to join in; None if they all wait here, too.

        Args:
            label: where they wait.
            count: of the rank's backwards since the last step; `end_step` returns the largest over ranks.
            state: of this rank; if all wait, `is_alike` tells whether it is that of all.

        Raises what `begin` does.
        """
        if self.size == 1:
            return None
        operation = Operation(label, waits=True, count=count, state=state)
        found = self._agreed(operation)
        while not found.all_can:  # then nothing is begun, and there is nothing to join in
            found = self._agreed(operation)
        if not found.all_wait:
            self._has_joined = True
            return self.send_object(None, label, found.source)
        self._most, self.is_alike = found.most, found.is_alike
        if found.least < found.most:
            self._complete = found.fullest
        elif found.one_joined:  # all have, if they took turns
            self._complete = found.complete if found.complete < self.size else 0
        return None

    def end_step(self) -> tuple[int | None, int]:
        """The step is over on all ranks. Return the first rank that had all of it, if others had less or joined in what
        others did, and the most backwards of a rank."""
        found = self._complete, self._most
        self._complete, self._most, self._has_joined = None, 0, False
        return found

    def note_error(self, error: BaseException) -> None:
        """Have the others say what this rank raises, if it does not take part in what they do next."""
        if self.size == 1 or self._failure is not None or isinstance(error, RankError):
            return
        self._set_raised(said(error))

    def _set_raised(self, text: str) -> None:
        self._raised = text
        assert self._store is not None
        with contextlib.suppress(RuntimeError):  # the store is lost: the others will say so
            tell_raised(self._store, self.rank, text)

    def _agreed(self, operation: Operation) -> Verdict:
        values = numbers_of(operation, self.rank, facts=self._facts_digest, has_joined=self._has_joined)
        mine = torch.tensor(values, dtype=torch.int64, device="cpu")
        found = verdict(self.over_ranks(mine, torch.minimum, operation.label).tolist())
        if not found.is_same:
            raise self._disagreement(operation)
        if self._raised:  # and has gone on
            self._set_raised("")
        return found

    def _disagreement(self, operation: Operation) -> RankError:
        statements = self.of_all(stated(operation, self._raised, self._facts), operation.label)
        message, ranks = difference(statements, self.names)
        self._failure = RankError(message, ranks)
        return self._failure

    # Failures.

    @contextlib.contextmanager
    def waiting(self, label: str, *, is_own: bool = False) -> Iterator[None]:
        """Turn what an exchange raises inside into an error that names ranks; see `chunkmem.ranks.failure_detector`.

        Args:
            label: what is waited for; the messages of other ranks may have it too.
            is_own: nothing inside depends on other ranks: what is raised is this rank's failure, which others are told.

        Raises:
            RankError: it failed, or something before it did.
        """
        if self._failure is not None:
            raise RankError(f"{label}: no more exchanges, as one failed before: {self._failure}", self._failure.ranks)
        started_s = time.monotonic()
        try:
            yield
        except ChunkmemError:
            raise
        except Exception as error:
            if is_own or not isinstance(error, RuntimeError):  # gloo and NCCL raise those
                raise self._leave(label, error) from error
            raise self._give_up(label, time.monotonic() - started_s, error) from error

    def leave(self, label: str, error: Exception, *, where: str = "") -> None:
        """Have the others hear at once what this rank raises: nothing can be done together any more.

        Args:
            label: of what it did.
            error: a `RankError` is one that it has heard of from ranks that are not among these.
            where: is put after the error.
        """
        if self.size > 1:
            self._leave(label, error, where)

    def _leave(self, label: str, error: Exception, where: str = "") -> RankError:
        """Have the others hear at once what this rank raises, who may be waiting for it."""
        with self._lock:
            if self._failure is None:
                self._set_raised(said(error) + where)
                self._hang_up()
                number = self.names[self.rank]
                self._failure = RankError(f"{label}: rank {number} raised {self._raised}", (number,))
            return self._failure

    def _hang_up(self) -> set[int]:
        """Close this rank's connections; return the ranks whose connections to it were closed before."""
        time.sleep(_LINGER_SHARE * self._detection_s)
        closed = set()
        for group, peers, listener in self._opened:
            closed |= {peers[peer] for peer in hang_up(group, peers, listener)}
        return closed

    def _give_up(self, label: str, waited_s: float, error: Exception) -> RankError:
        # Several threads may be waiting when a rank is lost: the first of them asks for all.
        with self._lock:
            if self._failure is None:
                assert self._store is not None
                closed = self._hang_up()
                answer = RankStatus(label, waited_s, said_by_torch(error))
                # Stores may take longer to run out of time than they are told.
                limit_s = min(self._detection_s, self.timeout_s - waited_s) - _LINGER_SHARE * self._detection_s
                self._failure = collect_statuses(
                    self._store, self.rank, self.names, answer, closed=closed, limit_s=limit_s
                )
            return self._failure

    # Bytes, once all have agreed.

    def send_object(self, value: _T, label: str, source: int) -> _T:
        sent = pickle.dumps(value) if self.rank == source else b""
        lengths = torch.tensor([len(sent)], dtype=torch.int64, device="cpu")
        length = int(self.broadcast(lengths, source, label))
        memory = bytearray(sent or bytes(length))
        self.broadcast(torch.frombuffer(memory, dtype=torch.uint8), source, label)
        return value if self.rank == source else cast(_T, pickle.loads(memory))

    def broadcast(self, tensor: torch.Tensor, source: int, label: str) -> torch.Tensor:
        if self.size > 1:
            options = dist.BroadcastOptions()
            options.rootRank = source
            with self.waiting(label):
                self._open_numbers(label).broadcast([tensor], options).wait()
        return tensor

    def of_all(self, value: _T, label: str) -> list[_T]:
        """Return what each rank passes, as `pickle` copies it."""
        return list(map(_value, self.exchange(self._row(value, label), label)))

    def _row(self, value: object, label: str) -> torch.Tensor:
        """Return a value as bytes, on all ranks as many as the longest takes."""
        data = pickle.dumps(value)
        return _padded(data, int(self.over_ranks(torch.tensor(len(data), device="cpu"), torch.maximum, label)))

    def count_alike(self, text: str, label: str) -> int:
        """Return how many ranks pass this text; a rank calls it once for a label."""
        key = f"{label}: {text}"
        assert self._store is not None
        with self.waiting(label):
            self._store.add(key, 1)
        self.begin(Operation(label))
        with self.waiting(label):
            return self._store.add(key, 0)

    def gather(self, value: _T, label: str) -> list[_T]:
        """Return what each rank passes, on rank 0; elsewhere nothing."""
        mine, numbers = self._row(value, label), self._open_numbers(label)
        with self.waiting(label):
            return list(map(_value, rows_to_first(numbers, self.rank, self.size, mine)))

    def scatter(self, values: Sequence[_T], label: str) -> _T:
        """Return this rank's part of what rank 0 passes."""
        parts = list(map(pickle.dumps, values))
        length = int(self.broadcast(torch.tensor(max(map(len, parts), default=0), device="cpu"), 0, label))
        rows, mine = [_padded(part, length) for part in parts], torch.empty(length, dtype=torch.uint8, device="cpu")
        numbers = self._open_numbers(label)
        with self.waiting(label):
            row_from_first(numbers, self.rank, self.size, rows, mine)
        found: _T = _value(mine)
        return found

    def over_ranks(
        self, mine: torch.Tensor, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], label: str
    ) -> torch.Tensor:
        """Return what the tensors of all ranks make together; see `chunkmem.ranks.agreement.over_ranks`."""
        if self.size == 1:
            return mine
        numbers = self._open_numbers(label)
        with self.waiting(label):
            return over_ranks(numbers, self.rank, self.size, mine, combine)

    def exchange(self, mine: torch.Tensor, label: str) -> list[torch.Tensor]:
        if self.size == 1:
            return [mine]
        numbers = self._open_numbers(label)
        with self.waiting(label):
            return rows_of_ranks(numbers, self.rank, self.size, mine)

    def _open_numbers(self, label: str) -> dist.ProcessGroup:
        if self._numbers is None:
            raise StateError(f"{label}: the ranks were closed")
        return self._numbers


@contextlib.contextmanager
def _few_requests(store: Store, timeout: timedelta) -> Iterator[None]:
    """Have gloo read the addresses of a group's ranks 128 at a time, and number connections by rank.

    It reads them one by one else, each with a number for every rank: of 1 024 ranks, 2 million requests and 9 GB. It
    waits for several as long as the store does by itself, which is `timeout` meanwhile.
    """
    before: timedelta = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    try:
        with environment(GLOO_ENABLE_STORE_V2_API="1", GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER="1"):
            yield
    finally:
        store.set_timeout(before)


def _padded(data: bytes, length: int) -> torch.Tensor:
    """Return a pickle as a row of so many bytes for `_value`: what follows a pickle is not read."""
    return torch.frombuffer(bytearray(data.ljust(length, b"\0")), dtype=torch.uint8)


def _value(row: torch.Tensor) -> Any:
    return pickle.loads(row.numpy().data)


def group_of(process_group: Any) -> dist.ProcessGroup | None:
    """Return the group that is meant; None is this process alone.

    Raises:
        ConfigError: a group was given, but torch.distributed is not initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None:
            raise ConfigError("process_group was given, but torch.distributed is not initialised")
        return None
    return process_group if process_group is not None else dist.group.WORLD


def within(store: Store, name: str) -> Store:
    inner: Store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    return inner
