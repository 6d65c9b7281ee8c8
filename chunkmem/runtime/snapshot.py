"""What chunks hold at one moment, read by another thread while training changes them.

[Note: Snapshots] Nothing is copied when a snapshot is taken. Its chunks are *pending*: what they held is in their
newest replicas, wherever a plan moves those. A thread takes one after the other, as a copy in RAM. Who is about to
write to a chunk, or to give up its last replica, calls `before_change`: if the chunk is pending, it is copied there and
then, and handed over to the thread.

    thread     | take 7, write it | take 6, write it | take 5, write it | take 4, write it ...
    training   | forward, backward           | 5: hand over | update 5 | 4: wait | hand over | update 4 ...

So there are two chunks in RAM at most: one that is written, and one that was handed over; the next one waits until that
is taken. What the thread itself reads nobody writes to meanwhile:

1. A copy between tiers fills a replica that counts as newest from when it was issued. Its slab is in use until
   then, and is not read before. The thread waits for no event of a lane.
2. Who gives a replica up waits until the thread has read it.
3. Modules may write to weights where they compute, and no event tells of that before. There the thread reads a chunk
   only while nobody has it pinned, and looks afterwards whether it was written to; who pins it waits. A chunk of which
   such writes are known is copied before it is pinned. The first one to another chunk that is pending makes the
   snapshot fail.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from chunkmem.data.errors import CheckpointError
from chunkmem.data.types import TIERS, Tier
from chunkmem.runtime.chunk import Chunk, Replica, read_slot
from chunkmem.runtime.device import runtime_mode

_POLL_S = 0.002
"""How often the thread looks for a chunk to read while copies are filling all of them, or all are pinned."""
_LOST_S = 10.0
"""A chunk that has been without content for so long is lost: what a failed copy was to save is brought back sooner."""
_PLACES = (Tier.HOST, Tier.DEVICE, *TIERS[2:])
"""Where a chunk is read: the first that has it, HOST before DEVICE, where reading is in the way of computing."""

Read = Callable[[torch.Tensor, torch.Tensor], object]
"""Copies to RAM; called with target and source, both 1-D, of the same dtype and number of elements."""


@dataclass(frozen=True)
class Taken:
    """Slots of a chunk as they were when the snapshot was taken."""

    chunk: Chunk
    slots: Mapping[int, torch.Tensor]
    """By position of a parameter in the group: a copy in RAM, in the parameter's shape, with memory of its own."""


class Snapshot:
    """What some chunks held when it was made; see [Note: Snapshots]."""

    def __init__(self, wanted: Mapping[Chunk, Collection[int]], read: Read) -> None:
        """Make one while no write of a user is unnoticed.

        Args:
            wanted: positions of slots by chunk, in the order in which the thread had better read them.
            read: is called in the thread that calls `take`.
        """
        self._wanted = wanted
        self._read = read
        self._pending = dict.fromkeys(wanted)
        self._state = threading.Condition()
        """Lock of the fields below; hold it to free a replica that the snapshot reads."""
        self._reading: tuple[Chunk, Tier] | None = None
        """Chunk and tier that the saving thread reads now; None: it reads none."""
        self._handed: Taken | None = None
        self._failure: BaseException | None = None
        self._is_training = True
        """Modules may run."""

    # In the thread.

    def take(self) -> Taken | None:
        """Return the next chunk; None if all were taken.

        Raises:
            Exception: one cannot be read any more.
        """
        with self._state:
            found, lost_s = None, 0.0
            while found is None:
                if self._failure is not None:
                    raise self._failure
                if self._handed is not None:
                    taken, self._handed = self._handed, None
                    self._state.notify_all()
                    return taken
                if not self._pending:
                    return None
                found = self._begin_reading()
                if found is None:
                    lost_s = self._look_for_lost(lost_s)
                    self._state.wait(_POLL_S)
        return self._finish_reading(*found)

    def _begin_reading(self) -> tuple[Chunk, Tier, Replica] | None:
        for chunk in self._pending:
            for tier in _PLACES:
                replica = chunk.replicas.get(tier)
                if replica is None or not chunk.ready(tier) or not _is_filled(replica):
                    continue
                # Said first and looked at then, while who pins it looks after pinning: one of the two sees the other.
                self._reading = chunk, tier
                # Modules do not run at the end of Python either, which waits for the thread.
                may_run = self._is_training and threading.main_thread().is_alive()
                if not _is_exposed(chunk, tier) or replica.pins == 0 or not may_run:
                    return chunk, tier, replica
                self._reading = None
        return None

    def _look_for_lost(self, since_s: float) -> float:
        """Return since when a chunk has had no content, 0: all have some. Give up if that is too long."""
        lost = next((chunk for chunk in self._pending if chunk.newest_tier() is None), None)
        now_s = time.monotonic()
        if lost is not None and since_s and now_s - since_s > _LOST_S:
            self.give_up(_lost_error(lost))
        return 0.0 if lost is None else since_s or now_s

    def _finish_reading(self, chunk: Chunk, tier: Tier, replica: Replica) -> Taken:
        try:
            return self._copied(chunk, tier, replica, self._read)
        except Exception as error:
            self.give_up(error)
            raise
        finally:
            with self._state:
                self._reading = None
                self._pending.pop(chunk, None)
                self._state.notify_all()

    def give_up(self, failure: BaseException) -> None:
        """Have nothing more be read: nobody waits to change a chunk."""
        with self._state:
            self._failure = self._failure or failure
            self._pending.clear()
            self._handed = None
            self._state.notify_all()

    # In training.

    @property
    def is_over(self) -> bool:
        """The thread needs no chunk any more."""
        with self._state:
            return not self._pending and self._reading is None

    @contextlib.contextmanager
    def without_training(self) -> Iterator[None]:
        """Surround what waits for the thread: what an interrupted call has left pinned may be read, too."""
        self._is_training = False
        try:
            yield
        finally:
            self._is_training = True

    def read_all(self) -> None:
        """Return when the thread needs no chunk any more."""
        with self.without_training(), self._state:
            while not self.is_over:
                self._state.wait()

    def before_change(self, chunk: Chunk, *, spoilt: Tier | None = None) -> None:
        """Return once a chunk may change: if it is pending, when it has been copied.

        Args:
            chunk: any.
            spoilt: its replica there was written to already.
        """
        if chunk not in self._pending:
            return
        with self._state:
            while chunk in self._pending:
                if self._handed is not None or (self._reading is not None and self._reading[0] is chunk):
                    self._state.wait()
                else:
                    self._hand_over(chunk, spoilt)

    def _hand_over(self, chunk: Chunk, spoilt: Tier | None) -> None:
        try:
            tier = next((tier for tier in _PLACES if tier is not spoilt and chunk.ready(tier)), None)
            if tier is None:
                raise _written_error(chunk) if spoilt else _lost_error(chunk)
            replica = chunk.replicas[tier]
            for event in replica.slab.uses:
                event.wait()
            with runtime_mode():
                self._handed = self._copied(chunk, tier, replica, _copy)
            del self._pending[chunk]
            self._state.notify_all()
        except Exception as error:  # what concerns training, too, it meets by itself
            self.give_up(error)

    def pinned(self, chunk: Chunk, tier: Tier) -> None:
        """A replica was pinned, and may be written to: return when the thread has read it."""
        if tier is chunk.compute_tier and (chunk.is_written_inside or chunk.is_written_past):
            self.before_change(chunk)
        elif self._reading == (chunk, tier):
            with self._state:
                self._wait_for_reading(chunk, tier)

    def noticing(self) -> contextlib.AbstractContextManager[object]:
        """Surround a look for writes of a user, and what follows: the thread must not look in between."""
        return self._state

    def written(self, chunk: Chunk, tier: Tier) -> None:
        """A replica was written to and is about to be the newest, whether or not `before_change` was called."""
        if chunk not in self._pending:
            return
        with self._state:
            if self._reading == (chunk, tier):
                self.give_up(_written_error(chunk))
            self.before_change(chunk, spoilt=tier)

    @contextlib.contextmanager
    def leaving(self, chunk: Chunk, tier: Tier) -> Iterator[None]:
        """Surround what gives a replica up."""
        with self._state:
            if chunk.ready(tier) and chunk.newest_besides(tier) is None:
                self.before_change(chunk)
            self._wait_for_reading(chunk, tier)
            yield

    def _wait_for_reading(self, chunk: Chunk, tier: Tier) -> None:
        while self._reading == (chunk, tier):
            self._state.wait()

    def _copied(self, chunk: Chunk, tier: Tier, replica: Replica, read: Read) -> Taken:
        """Return the wanted slots of a chunk.

        Raises:
            CheckpointError: a user has written to them, unnoticed so far.
        """
        slots = {position: read_slot(chunk, replica, position, read) for position in self._wanted[chunk]}
        if _is_exposed(chunk, tier) and chunk.home is not None and chunk.home.was_written():
            raise _written_error(chunk)
        return Taken(chunk, slots)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def _is_filled(replica: Replica) -> bool:
    """Tell whether no copy is filling a replica, or has failed to."""
    slab, events = replica.slab, replica.slab.events
    # Another copy may be issued while this thread looks, of which it would see one half.
    return not slab.uses and slab.events is events


def _is_exposed(chunk: Chunk, tier: Tier) -> bool:
    """Tell whether modules compute with a replica, and may write to it."""
    return chunk.home is not None and tier is chunk.compute_tier


def _lost_error(chunk: Chunk) -> CheckpointError:
    return CheckpointError(f"{chunk.label} is lost, as the copy or update that was to save it has failed")


def _written_error(chunk: Chunk) -> CheckpointError:
    return CheckpointError(
        f"{chunk.label} was written to inside of a module while it was being saved; save again: from now on such "
        "writes wait until what was there before is saved"
    )
