"""The ranks of a process group: what they have to agree on, and the numbers they add up.

What happens when one of them is missing: [Note: Roll call] in `chunkmem.comm.roll`.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from chunkmem.comm.roll import Answer, call_roll, hang_up, named
from chunkmem.errors import ConfigError, RankError, StateError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_T = TypeVar("_T")
_MAX_ROLL_CALL_S = 10.0
_ROLL_CALL_SHARE = 0.25
"""Of the timeout; the rest is what an exchange may take."""
_LINGER_SHARE = 0.1
"""Of the roll call."""


class Ranks:
    """The processes that train one model together; without a process group, one.

    In RAM they talk over gloo groups of their own, one for chunks and one for numbers: what a thread does with one of
    them can neither be mistaken for what another does, or the user, nor wait behind it. Messages call a rank by its
    number in the whole job, as the output of torchrun does.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, timeout_s: float) -> None:
        """Open the groups. Every rank of `process_group` has to, as often as the others.

        Args:
            process_group: None is the default one; if torch.distributed is not initialised, this process alone.
            timeout_s: after this much waiting, the roll call included, a rank counts as lost. The same on all ranks.

        Raises:
            ConfigError: `process_group` was given but torch.distributed is not initialised, or this process is not one
                of its ranks.
            RankError: a rank did not come.
        """
        group = _group_of(process_group)
        self.rank = 0 if group is None else dist.get_rank(group)
        """Among these ranks, counted from 0."""
        self.size = 1 if group is None else dist.get_world_size(group)
        if self.rank < 0:
            raise ConfigError("this process is not one of the ranks of process_group; pass it on its ranks only")
        self.num_local = 1
        """Ranks on this machine, this one included."""
        self.timeout_s = timeout_s
        self._given = group
        self._chunks: dist.ProcessGroup | None = None
        self._numbers: dist.ProcessGroup | None = None
        self._store: Store | None = None
        self._names: tuple[int, ...] = (0,)
        self._lock = threading.Lock()
        self._failure: RankError | None = None
        if group is not None and self.size > 1:
            self._open(group)
            here = socket.gethostname().encode()
            self.num_local = self._all_bytes(here, "looking for ranks on the same machine").count(here)

    def _open(self, group: dist.ProcessGroup) -> None:
        self._names = tuple(dist.get_process_group_ranks(group))
        met_in = group.get_group_store()
        # Not `new_group`: it names groups by what each process has opened before, which may differ between ranks, and
        # gives a name again when its group was closed. gloo then waits for the addresses that it finds under it.
        count = met_in.add(f"chunkmem opened by rank {self.rank}", 1)
        self._store = _within(met_in, f"chunkmem {count} roll call")
        with self.waiting("opening the process groups"):
            self._chunks = self._gloo(_within(met_in, f"chunkmem {count} chunks"))
            self._numbers = self._gloo(_within(met_in, f"chunkmem {count} numbers"))

    def _gloo(self, store: Store) -> dist.ProcessGroup:
        timeout = timedelta(seconds=self.timeout_s - self._roll_call_s)
        # By itself, not as part of a group of several backends; it is used in the same way.
        return cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, self.rank, self.size, timeout))

    @property
    def _roll_call_s(self) -> float:
        return min(_MAX_ROLL_CALL_S, _ROLL_CALL_SHARE * self.timeout_s)

    def group(self, device: torch.device) -> dist.ProcessGroup:
        """Return the group to exchange chunks over that are on a device; all ranks issue the same on it, in one order.

        In RAM it is one that nobody else uses; elsewhere the one that was given, or the default one.

        Raises:
            StateError: this is one rank alone, or `close` was called.
        """
        group = self._chunks if device.type == "cpu" else self._given
        if group is None or self._chunks is None:
            raise StateError("there is no process group to exchange chunks over: this is one rank alone, or was closed")
        return group

    def close(self) -> None:
        """Give the groups back. The second time, do nothing."""
        self._chunks = self._numbers = self._given = None

    # Values.

    def agree(self, name: str, digest: str) -> None:
        """Check that all ranks have the same of something.

        Args:
            name: what it is, as a sentence may begin: ``"the layout of the chunks"``.
            digest: the same text on two ranks means that they have the same.

        Raises:
            ConfigError: they have not; on every rank, in the same words.
            RankError: a rank did not come.
        """
        ranks_of: dict[str, list[int]] = {}
        for rank, text in enumerate(self._all_bytes(digest.encode(), f"comparing {name}")):
            ranks_of.setdefault(text.decode(), []).append(rank)
        if len(ranks_of) > 1:
            found = ", ".join(f"{text} on {named(ranks, self._names)}" for text, ranks in ranks_of.items())
            raise ConfigError(f"{name} differs between ranks: {found}; start all ranks with the same of it")

    def sum_over(self, values: Sequence[float], *, label: str = "summing numbers") -> tuple[float, ...]:
        """Return the sums over ranks, in float64 and in the order of the ranks: the same bits on all of them.

        Args:
            values: as many on every rank.
            label: what for, for messages.

        Raises:
            RankError: a rank did not come.
        """
        first, *others = self._all_values(values, label)
        for row in others:
            first += row
        return tuple(first.tolist())

    def max_over(self, values: Sequence[float], *, label: str = "comparing numbers") -> tuple[float, ...]:
        """Return the largest over ranks, NaN if one is NaN. Arguments and errors are those of `sum_over`."""
        return tuple(torch.stack(self._all_values(values, label)).amax(dim=0).tolist())

    def broadcast_object(self, value: _T, *, label: str = "sending an object", source: int = 0) -> _T:
        """Return what rank `source` passes, as `pickle` copies it; that rank's is the one it passed.

        Raises:
            RankError: a rank did not come.
        """
        sent = pickle.dumps(value) if self.rank == source else b""
        lengths = torch.tensor([len(sent)], dtype=torch.int64, device="cpu")
        length = int(self._broadcast(lengths, source, label))
        memory = bytearray(sent or bytes(length))
        self._broadcast(torch.frombuffer(memory, dtype=torch.uint8), source, label)
        return value if self.rank == source else cast(_T, pickle.loads(memory))

    def _broadcast(self, tensor: torch.Tensor, source: int, label: str) -> torch.Tensor:
        if self.size > 1:
            options = dist.BroadcastOptions()
            options.rootRank = source
            with self.waiting(label):
                if self._numbers is None:
                    raise StateError(f"{label}: the ranks were closed")
                self._numbers.broadcast([tensor], options).wait()
        return tensor

    def barrier(self, *, label: str) -> None:
        """Return once every rank has come.

        Raises:
            RankError: a rank did not come.
        """
        self._all_values((0.0,), label)

    def _all_values(self, values: Sequence[float], label: str) -> list[torch.Tensor]:
        return self._all_tensors(torch.tensor(values, dtype=torch.float64, device="cpu"), label)

    def _all_bytes(self, data: bytes, label: str) -> list[bytes]:
        lengths = [int(row[0]) for row in self._all_values((len(data),), label)]
        padded = torch.tensor([*data.ljust(max(1, *lengths), b"\0")], dtype=torch.uint8, device="cpu")
        rows = zip(self._all_tensors(padded, label), lengths, strict=True)
        return [bytes(row[:length].tolist()) for row, length in rows]

    def _all_tensors(self, mine: torch.Tensor, label: str) -> list[torch.Tensor]:
        if self.size == 1:
            return [mine]
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        with self.waiting(label):
            if self._numbers is None:
                raise StateError(f"{label}: the ranks were closed")
            self._numbers.allgather([rows], [mine]).wait()
        return rows

    # Failures.

    @contextlib.contextmanager
    def waiting(self, label: str) -> Iterator[None]:
        """Turn what torch.distributed raises inside into an error that names ranks: [Note: Roll call].

        Args:
            label: what is waited for; the messages of other ranks may have it too.

        Raises:
            RankError: it failed, or something before it did.
        """
        if self._failure is not None:
            raise RankError(f"{label}: no more exchanges, as one failed before: {self._failure}", self._failure.ranks)
        started_s = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise self._give_up(label, time.monotonic() - started_s, error) from error

    def _give_up(self, label: str, waited_s: float, error: RuntimeError) -> RankError:
        # Several threads may be waiting when a rank is lost: the first of them calls the roll for all.
        with self._lock:
            if self._failure is None:
                assert self._store is not None
                linger_s = _LINGER_SHARE * self._roll_call_s
                time.sleep(linger_s)
                groups = [group for group in (self._chunks, self._numbers) if group is not None]
                closed = {peer for group in groups for peer in hang_up(group, self.rank, self.size)}
                answer = Answer(label, waited_s, sorted(closed))
                # Stores may take longer to run out of time than they are told.
                limit_s = min(self._roll_call_s, self.timeout_s - waited_s) - linger_s
                self._failure = call_roll(self._store, self.rank, self._names, answer, limit_s=limit_s, error=error)
            return self._failure


def _group_of(process_group: Any) -> dist.ProcessGroup | None:
    """Return the group that is meant; None is this process alone.

    Raises:
        ConfigError: a group was given, but torch.distributed is not initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None:
            raise ConfigError("process_group was given, but torch.distributed is not initialised")
        return None
    return process_group if process_group is not None else dist.group.WORLD


def _within(store: Store, name: str) -> Store:
    inner: Store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    return inner
