"""Lanes, and work in RAM that waits its turn in the queue of one, with a thread that does it."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import torch

from chunkmem.data.errors import StateError
from chunkmem.data.types import Link
from chunkmem.plan.model import LANE_LINKS, LINK_LANES, Lane
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.events import (
    COPY_LANES,
    DoneEvent,
    Event,
    Piece,
    copy_error,
    host_waits,
    named_range,
    require_copyable,
)
from chunkmem.runtime.timestamps import Clock, HostClock, Interval

Move = Callable[[int, int, int], object]
"""Copies bytes in RAM: target address, source address, number of bytes."""


@dataclass(eq=False, slots=True)
class HostTask:
    """What the thread of a lane does in RAM, and the event of that."""

    lane: Lane
    label: str
    work: Callable[[], object] | None
    after: tuple[Event, ...]
    targets: Sequence[tuple[int, int]] = ()
    """Memory that it fills: addresses and bytes."""
    link: Link | None = None
    """That it copies over; None: that of its lane, or none."""
    started_s: float = field(default=0.0, init=False)
    ended_s: float = field(default=0.0, init=False)
    over: threading.Event = field(default_factory=threading.Event, init=False)
    failure: BaseException | None = field(default=None, init=False)
    pid: int = field(default_factory=os.getpid, init=False)
    """The process that has its thread."""

    def run(self) -> None:
        """Do it in this thread."""
        assert self.work is not None
        self.started_s = time.perf_counter()
        try:
            with runtime_mode(), named_range(self.lane, self.label):
                self.work()
        except Exception as error:
            if self.lane in COPY_LANES:
                raise copy_error(self.label, *(self.link or LANE_LINKS[self.lane]), error) from error
            raise
        finally:
            self.ended_s = time.perf_counter()

    def done(self) -> bool:
        return self.over.is_set()

    def wait(self) -> None:
        if not self.over.is_set():
            if os.getpid() != self.pid:
                raise StateError(f"{self.label}: it was left to process {self.pid}, this is a fork of it")
            self.over.wait()
        if self.failure is not None:
            raise _for_who_waits(self.failure)

    def finish(self, failure: BaseException | None) -> None:
        """Be done, or failed. It forgets the memory, and what it came after: else each would keep all before alive."""
        self.failure = failure
        self.after = ()
        self.work = None
        self.over.set()


class Worker:
    """The thread of one lane. It knows of no lanes, so that those can be collected while it runs."""

    def __init__(self, lane: Lane) -> None:
        self.queue: SimpleQueue[HostTask | None] = SimpleQueue()
        self.last: HostTask | None = None
        """The newest one issued since the last drain."""
        self.failure: BaseException | None = None
        self._pid = os.getpid()
        # The interpreter would end the thread in the middle of torch's code, and that aborts the process.
        atexit.register(self._end)
        self.thread = threading.Thread(target=self._work, name=f"chunkmem {lane.value}", daemon=True)
        self.thread.start()

    def issue(self, task: HostTask) -> HostTask:
        """Have a task done after all before it; return it, which is its event."""
        # A profile shows the thread that started it, and others only if asked to: the range of the task itself would
        # be missing, so the one who issues it opens one too.
        with named_range(task.lane, task.label):
            self.queue.put(task)
        self.last = task  # only now: who waits for what was never queued waits for ever
        return task

    def drain(self) -> BaseException | None:
        """Wait until everything issued is over; return, once, what failed of it. What comes from now on runs again."""
        if self.last is not None:
            self.last.over.wait()
        failure, self.last, self.failure = self.failure, None, None
        return failure

    def stop(self) -> None:
        """End the thread once it has done what was issued."""
        self.queue.put(None)

    def _end(self) -> None:
        """The interpreter is about to end: let the thread end before."""
        if os.getpid() == self._pid:
            self.stop()
            self.thread.join()

    def _work(self) -> None:
        while (task := self.queue.get()) is not None:
            try:
                if self.failure is None:
                    for event in task.after:
                        event.wait()
                    task.run()
            except BaseException as error:  # its own, or that of one it comes after
                self.failure = error
            task.finish(self.failure)
            # While this thread waits for the next, it keeps nothing of the last.
            del task
        atexit.unregister(self._end)


def _for_who_waits(failure: BaseException) -> BaseException:
    """Return an exception like one that an event has, and will have as long as somebody looks at the event.

    When one is raised, it gets the frames of who waits, and what is in them: the call of a model, with what it saved.
    """
    kind = type(failure)
    builtin = next(base for base in kind.__mro__ if base.__module__ == "builtins")  # arguments of others are their own
    made: BaseException = builtin.__new__(kind, *failure.args)
    made.__dict__.update(failure.__dict__)
    made.__cause__, made.__suppress_context__ = failure.__cause__, failure.__suppress_context__
    return made.with_traceback(failure.__traceback__)


class Lanes:
    """Copies run one after the other on each lane; between lanes nothing is ordered but by events.

    Here copies are within RAM, and what is computed is over when a copy is issued. Each lane has a thread, started by
    what it does first, which copies with one core and without Python's lock. Threads are of this process alone.
    """

    def __init__(self, clock: Clock | None = None, *, move: Move = ctypes.memmove) -> None:
        """Open them; `clock` is of what computes, None: of the host."""
        self._clock = clock or HostClock()
        self._move = move
        self._closed = False
        self._workers: dict[Lane, Worker] = {}
        self._pid = os.getpid()

    def copy(self, lane: Lane, pieces: Sequence[Piece], *, after: Sequence[Event], label: str) -> Event:
        """Issue copies, one after the other and as one, after everything issued on `lane` before, and after `after`.

        Args:
            lane: one of `COPY_LANES`.
            pieces: targets and sources, 1-D, contiguous, of equal nbytes; see `runtime/events.py` for their memory.
            after: events of these lanes.
            label: what is copied, for messages and profiles.

        Raises:
            StateError: the lanes are closed, or `lane` or the tensors are not as above.
        """
        with runtime_mode():
            require_copyable(lane, pieces, label)
            for target, source in pieces:
                if not (target.is_cpu and source.is_cpu):
                    raise StateError(f"{label}: from {source.device} to {target.device} is not a copy within RAM")
            addresses = [(target.data_ptr(), source.data_ptr(), target.nbytes) for target, source in pieces]
        targets = [(target, nbytes) for target, _, nbytes in addresses]
        return self._take(HostTask(lane, label, partial(_move_all, self._move, addresses, pieces), (*after,), targets))

    def work(
        self,
        work: Callable[[], object],
        *,
        after: Sequence[Event],
        label: str,
        link: Link | None = None,
        target: torch.Tensor | None = None,
    ) -> Event:
        """Call `work` on HOST_UPDATE, or on a link's lane, after everything issued there before and after `after`.

        Its result is dropped. Where lanes have threads it runs in one of its own, so it must not touch what the caller
        may touch meanwhile.

        Args:
            work: an update, or what reads or writes a chunk on DISK.
            after: events of these lanes.
            label: see `copy`.
            link: to or from DISK, if it copies.
            target: memory on HOST that it fills.

        Raises:
            StateError: the lanes are closed.
        """
        with runtime_mode():
            targets = () if target is None else ((target.data_ptr(), target.nbytes),)
        lane = Lane.HOST_UPDATE if link is None else LINK_LANES[link]
        return self._take(HostTask(lane, label, work, (*after,), targets, link))

    def compute_event(self) -> Event:
        """Return the end of everything issued on COMPUTE so far: by this thread, or on its current stream."""
        return DoneEvent.now()

    def compute_waits(self, event: Event) -> Interval | None:
        """Have what is computed from now on come after `event`.

        Returns:
            From when COMPUTE had nothing else to do until it was over, to be asked for later; None: it is over already.
        """
        return host_waits(event, self._clock)

    @property
    def _own_workers(self) -> Collection[Worker]:
        """Those of this process: in a fork of it there are none."""
        return self._workers.values() if os.getpid() == self._pid else ()

    def drain(self) -> None:
        """Block until everything is done; raise what some of it raised since the last call."""
        failures = [failure for worker in self._own_workers if (failure := worker.drain()) is not None]
        if failures:
            raise _for_who_waits(failures[0])

    def close(self) -> None:
        """Finish what was issued and give threads and streams back. The second time, do nothing."""
        self._closed = True
        for worker in self._own_workers:
            worker.stop()
        for worker in self._own_workers:
            worker.thread.join()
        self._workers = {}

    def _issue(self, task: HostTask) -> Event:
        """Have a task done after all before it on its lane."""
        if os.getpid() != self._pid:
            raise StateError(
                f"{task.label}: the lanes belong to process {self._pid}, and threads do not outlive a fork"
            )
        worker = self._workers.get(task.lane)
        if worker is None:
            worker = self._workers[task.lane] = Worker(task.lane)
            weakref.finalize(self, worker.stop)
        return worker.issue(task)

    def _take(self, task: HostTask) -> Event:
        self._require_open(task.label)
        return self._issue(task)

    def _require_open(self, label: str) -> None:
        if self._closed:
            raise StateError(f"{label}: the lanes are closed; nothing can be copied any more")


def _move_all(move: Move, addresses: Sequence[tuple[int, int, int]], held: object) -> None:
    """Copy in RAM, by addresses; the tensors are only held."""
    for target, source, nbytes in addresses:
        move(target, source, nbytes)
