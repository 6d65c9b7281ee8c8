"""What copies between tiers beside the computing: a thread per lane on a CPU, a stream per lane on CUDA.

[Note: A failed copy] Operations of a lane are in order, so to wait for one is to rely on all before it, and on all they
came after. A copy that fails in a thread therefore fails everything issued behind it on its lane, or `after` it on
another, until `drain` has raised its error.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Self

import torch

from chunkmem.errors import StateError
from chunkmem.plan.model import Lane
from chunkmem.runtime.device import ComputeDevice, runtime_mode
from chunkmem.runtime.events import DoneEvent, Event, Lanes, closed_error, named_range, require_copyable
from chunkmem.runtime.streams import StreamClock, StreamLanes

__all__ = ["BlockingLanes", "Event", "HostCopy", "Lanes", "Move", "StreamLanes", "ThreadLanes", "open_lanes"]

Move = Callable[[int, int, int], object]
"""Copies bytes in RAM: target address, source address, number of bytes."""


def open_lanes(compute: ComputeDevice, *, blocking: bool) -> Lanes:
    """Return the lanes for `compute`; with `blocking`, a copy is done when `copy` returns."""
    if blocking:
        return BlockingLanes(compute)
    return StreamLanes(compute.device) if compute.is_accelerator else ThreadLanes()


@dataclass(eq=False, slots=True)
class HostCopy:
    """A copy in RAM, and the times of its event. It works on the addresses; the tensors are only held."""

    lane: Lane
    label: str
    target: int
    source: int
    nbytes: int
    after: tuple[Event, ...]
    held: tuple[torch.Tensor, ...]
    started_s: float = field(default=0.0, init=False)
    ended_s: float = field(default=0.0, init=False)

    @classmethod
    def of(cls, lane: Lane, target: torch.Tensor, source: torch.Tensor, after: Sequence[Event], label: str) -> Self:
        """Return the copy between the memory that two tensors have now.

        Raises:
            StateError: the tensors cannot be copied, or are not in RAM.
        """
        with runtime_mode():
            require_copyable(lane, target, source, label)
            if not (target.is_cpu and source.is_cpu):
                raise StateError(f"{label}: from {source.device} to {target.device} is not a copy within RAM")
            addresses = target.data_ptr(), source.data_ptr()
            return cls(lane, label, *addresses, target.nbytes, tuple(after), (target, source))

    def run(self, move: Move) -> None:
        """Do it in this thread."""
        self.started_s = time.perf_counter()
        try:
            with named_range(self.lane, self.label):
                move(self.target, self.source, self.nbytes)
        finally:
            self.ended_s = time.perf_counter()

    def let_go(self) -> None:
        """Forget what it came after: else each event would keep all before it alive. And the memory."""
        self.after = ()
        self.held = ()


class BlockingLanes:
    """Copies run in the calling thread (on CUDA, on its current stream) and are done when `copy` returns."""

    def __init__(self, compute: ComputeDevice) -> None:
        self._clock = StreamClock(compute.device) if compute.is_accelerator else None
        self._closed = False

    def copy(
        self, lane: Lane, target: torch.Tensor, source: torch.Tensor, *, after: Sequence[Event], label: str
    ) -> Event:
        if self._closed:
            raise closed_error(label)
        for event in after:
            event.wait()
        started_s = time.perf_counter()
        with runtime_mode(), named_range(lane, label):
            require_copyable(lane, target, source, label)
            target.view(torch.uint8).copy_(source.view(torch.uint8))
        return DoneEvent(started_s, time.perf_counter())

    def compute_event(self) -> Event:
        return DoneEvent.now() if self._clock is None else self._clock.computed()

    def compute_waits(self, event: Event) -> float:
        return _stand_still(event)

    def drain(self) -> None:
        return None

    def close(self) -> None:
        self._closed = True


def _stand_still(event: Event) -> float:
    if event.done():
        event.wait()
        return 0.0
    started_s = time.perf_counter()
    event.wait()
    return time.perf_counter() - started_s


@dataclass(eq=False, slots=True)
class _QueuedCopy(HostCopy):
    """A copy that a thread of process `pid` will do."""

    over: threading.Event = field(default_factory=threading.Event, init=False)
    failure: BaseException | None = field(default=None, init=False)
    pid: int = field(default_factory=os.getpid, init=False)

    def done(self) -> bool:
        return self.over.is_set()

    def wait(self) -> None:
        if not self.over.is_set():
            if os.getpid() != self.pid:
                raise StateError(f"{self.label}: its copy was left to process {self.pid}, this is a fork of it")
            self.over.wait()
        if self.failure is not None:
            raise self.failure

    def attempt(self, move: Move) -> BaseException | None:
        """Do it once `after` is done, in the lane's thread; return what it raised, or what one it came after did."""
        try:
            for event in self.after:
                event.wait()
            self.run(move)
        except BaseException as error:
            return error
        return None

    def finish(self, failure: BaseException | None) -> None:
        """Be done, or failed."""
        self.failure = failure
        self.let_go()
        self.over.set()


class _Worker:
    """The thread of one lane. It knows of no `ThreadLanes`, so that those can be collected while it runs."""

    def __init__(self, lane: Lane, move: Move) -> None:
        self.copies: SimpleQueue[_QueuedCopy | None] = SimpleQueue()
        self.last: _QueuedCopy | None = None
        """The newest one issued since the last drain."""
        self.failure: BaseException | None = None
        self._move = move
        self.thread = threading.Thread(target=self._work, name=f"chunkmem {lane.value}", daemon=True)
        self.thread.start()

    def issue(self, copy: _QueuedCopy) -> None:
        self.last = copy
        self.copies.put(copy)

    def stop(self) -> None:
        """End the thread once it has done what was issued."""
        self.copies.put(None)

    def _work(self) -> None:
        while (copy := self.copies.get()) is not None:
            if self.failure is None:
                self.failure = copy.attempt(self._move)
            copy.finish(self.failure)
            # While this thread waits for the next, it keeps nothing of the last.
            del copy


class ThreadLanes:
    """One thread a lane, started by its first copy. Each copies with one core, and without Python's lock."""

    def __init__(self, move: Move = ctypes.memmove) -> None:
        self._move = move
        self._workers: dict[Lane, _Worker] = {}
        self._pid = os.getpid()
        self._closed = False

    def copy(
        self, lane: Lane, target: torch.Tensor, source: torch.Tensor, *, after: Sequence[Event], label: str
    ) -> Event:
        if self._closed:
            raise closed_error(label)
        if os.getpid() != self._pid:
            raise StateError(f"{label}: the lanes belong to process {self._pid}, and threads do not outlive a fork")
        copy = _QueuedCopy.of(lane, target, source, after, label)
        worker = self._workers.get(lane)
        if worker is None:
            worker = self._workers[lane] = _Worker(lane, self._move)
            weakref.finalize(self, worker.stop)
        # A profile shows the thread that started it, and others only if asked to: the range of the copy itself would
        # be missing, so the one who issues it opens one too.
        with named_range(lane, label):
            worker.issue(copy)
        return copy

    def compute_event(self) -> Event:
        return DoneEvent.now()

    def compute_waits(self, event: Event) -> float:
        return _stand_still(event)

    def drain(self) -> None:
        if os.getpid() != self._pid:
            return
        for worker in self._workers.values():
            if worker.last is not None:
                worker.last.over.wait()
        failures = [worker.failure for worker in self._workers.values() if worker.failure is not None]
        for worker in self._workers.values():
            worker.last = worker.failure = None
        if failures:
            raise failures[0]

    def close(self) -> None:
        self._closed = True
        workers, self._workers = self._workers, {}
        if os.getpid() != self._pid:
            return
        for worker in workers.values():
            worker.stop()
        for worker in workers.values():
            worker.thread.join()
