"""Threads that move the blocks of transfers.

Transfers that are under way at the same time get a block each in turn, so that one of a gigabyte does not hold up what
was asked for after it:

    asked for     A A A A A A A A . . .       a write of many blocks
                        B B                   a read, of two
    moved         A A A B A B A A . . .       by whichever thread is free

A system call runs without Python's lock, so blocks move at the same time. Between two of them a thread needs the lock,
and may wait for it as long as other threads compute in Python: blocks should be large, and threads several.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from chunkmem.errors import StateError

Scratch = TypeVar("Scratch")
"""The private buffer of each thread."""


@dataclass(eq=False, slots=True)
class _Transfer(Generic[Scratch]):
    """Blocks that somebody waits for."""

    move: Callable[[int, Scratch], object]
    num_blocks: int
    num_begun: int = 0
    num_running: int = 0
    failure: BaseException | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> int:
        """Return the block that is next."""
        self.num_begun += 1
        self.num_running += 1
        return self.num_begun - 1

    def end(self, failure: BaseException | None) -> None:
        """A block has been moved, or not: then no more are begun."""
        self.num_running -= 1
        if failure is not None:
            self.failure = self.failure or failure
            self.cancel()
        self.settle()

    def cancel(self) -> None:
        """Begin no more blocks."""
        self.num_blocks = self.num_begun

    def settle(self) -> None:
        """Tell who waits, if nothing runs and nothing is left."""
        if self.num_begun == self.num_blocks and not self.num_running:
            self.over.set()


class TransferThreads(Generic[Scratch]):
    """So many threads, started by the first transfer. They know of nobody who uses them, who can thus be collected."""

    def __init__(self, num_threads: int, make_scratch: Callable[[], Scratch]) -> None:
        self._num_threads = num_threads
        self._make_scratch = make_scratch
        self._changed = threading.Condition()
        """Held while anything below is looked at or changed; told when there is something to do, or no more."""
        self._waiting: deque[_Transfer[Scratch]] = deque()
        """Transfers with blocks that no thread has begun."""
        self._threads: list[threading.Thread] = []
        self._num_serving = 0
        self._then: Callable[[], object] | None = None
        """The last thread that ends calls it."""
        self._closed = False
        self._pid = os.getpid()

    def carry_out(self, num_blocks: int, move: Callable[[int, Scratch], object]) -> None:
        """Call `move` with each number below `num_blocks`, several at once, and return when all are done.

        Whatever interrupts this, no call is running when it returns or raises: `move` works on the caller's memory.

        Raises:
            StateError: the threads are stopped, or belong to another process.
            BaseException: the first that a call raised; blocks that were not begun then never are.
        """
        self._require_open()
        transfer = _Transfer(move, num_blocks)
        failure: BaseException | None = None
        queued = False
        while True:
            try:
                if failure is not None:
                    self._cancel(transfer)
                elif not queued:
                    queued = True
                    self._queue(transfer)
                transfer.over.wait()
                break
            except BaseException as error:
                failure = error
        failure = failure or transfer.failure
        if failure is not None:
            try:
                raise failure
            finally:
                # Its traceback has this frame, which would keep it, and the memory, until garbage is collected.
                del failure, transfer, move

    def stop(self, then: Callable[[], object] | None = None) -> None:
        """Have the threads end when all that was asked for is done; the last one calls `then`.

        Where there are none, this does.
        """
        if os.getpid() != self._pid:
            serving = False
        else:
            with self._changed:
                self._closed = True
                serving = self._num_serving > 0
                if serving:
                    self._then = then
                self._changed.notify_all()
        if then is not None and not serving:
            then()

    def join(self) -> None:
        """Wait until they have ended, after `stop`."""
        if os.getpid() == self._pid:
            for thread in self._threads:
                thread.join()

    def _require_open(self) -> None:
        if os.getpid() != self._pid:
            raise StateError(f"DISK: its threads belong to process {self._pid}, and threads do not outlive a fork")

    def _queue(self, transfer: _Transfer[Scratch]) -> None:
        with self._changed:
            if self._closed:
                raise StateError("DISK is closed; nothing can be read or written any more")
            transfer.settle()
            if transfer.over.is_set():
                return
            while len(self._threads) < self._num_threads:
                name, scratch = f"chunkmem disk pool {len(self._threads)}", self._make_scratch()
                thread = threading.Thread(target=self._serve, args=(scratch,), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
                self._num_serving += 1
            self._waiting.append(transfer)
            self._changed.notify(transfer.num_blocks)

    def _cancel(self, transfer: _Transfer[Scratch]) -> None:
        with self._changed:
            transfer.cancel()
            if transfer in self._waiting:
                self._waiting.remove(transfer)
            transfer.settle()

    def _serve(self, scratch: Scratch) -> None:
        while (begun := self._begin()) is not None:
            transfer, block = begun
            failure: BaseException | None = None
            try:
                transfer.move(block, scratch)
            except BaseException as error:
                failure = error
            with self._changed:
                transfer.end(failure)
                if failure is not None and transfer in self._waiting:
                    self._waiting.remove(transfer)
            # While this thread waits for the next, it keeps nothing of the last.
            del transfer, begun, failure
        with self._changed:
            self._num_serving -= 1
            then = self._then if self._num_serving == 0 else None
        if then is not None:
            then()

    def _begin(self) -> tuple[_Transfer[Scratch], int] | None:
        """Return a block that is to be moved, when there is one; None: there will be no more."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if not self._waiting:
                return None
            transfer = self._waiting.popleft()
            block = transfer.begin()
            if transfer.num_begun < transfer.num_blocks:
                self._waiting.append(transfer)
            return transfer, block
