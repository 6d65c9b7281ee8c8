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

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from chunkmem.data.errors import StateError

Scratch = TypeVar("Scratch")
"""The private buffer of each thread."""


@dataclass(eq=False, slots=True)
class _Transfer(Generic[Scratch]):
    """Blocks that somebody waits for."""

    move: Callable[[int, Scratch], object]
    blocks: deque[int]
    """That no thread has begun."""
    num_running: int = 0
    failure: BaseException | None = None

    def is_over(self) -> bool:
        """Tell whether nothing runs and nothing is left."""
        return not self.blocks and not self.num_running


class TransferThreads(Generic[Scratch]):
    """So many threads, started by the first transfer. They know of nobody who uses them, who can thus be collected."""

    def __init__(self, num_threads: int, make_scratch: Callable[[], Scratch]) -> None:
        self._num_threads = num_threads
        self._make_scratch = make_scratch
        self._changed = threading.Condition()
        """Held while anything below is looked at or changed; told when there is something to do, no more, or done."""
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
            StateError: the threads are stopped.
            BaseException: the first that a call raised; blocks that were not begun then never are.
        """
        transfer = _Transfer(move, deque(range(num_blocks)))
        failure: BaseException | None = None
        is_over = False
        while not is_over:
            try:
                with self._changed:
                    if failure is not None:
                        self._cancel(transfer)
                    elif num_blocks:
                        self._queue(transfer)
                    is_over = self._changed.wait_for(transfer.is_over)
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
        is_serving = False
        if os.getpid() == self._pid:
            with self._changed:
                self._closed, self._then = True, then or self._then
                is_serving = self._num_serving > 0
                self._changed.notify_all()
        if then is not None and not is_serving:
            then()

    def close(self) -> None:
        """Finish what was asked for, and end the threads."""
        self.stop()
        if os.getpid() == self._pid:
            for thread in self._threads:
                thread.join()

    def _queue(self, transfer: _Transfer[Scratch]) -> None:
        if self._closed:
            raise StateError("the threads of this file have ended; nothing can be read or written any more")
        while len(self._threads) < self._num_threads:
            name = f"chunkmem transfer {len(self._threads)}"
            thread = threading.Thread(target=self._serve, args=(self._make_scratch(),), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
            self._num_serving += 1
        self._waiting.append(transfer)
        self._changed.notify_all()

    def _cancel(self, transfer: _Transfer[Scratch]) -> None:
        """Begin no more blocks."""
        transfer.blocks.clear()
        with contextlib.suppress(ValueError):
            self._waiting.remove(transfer)

    def _serve(self, scratch: Scratch) -> None:
        while (begun := self._begin()) is not None:
            transfer, block = begun
            try:
                transfer.move(block, scratch)
            except BaseException as error:
                with self._changed:
                    transfer.failure = transfer.failure or error
                    self._cancel(transfer)
            with self._changed:
                transfer.num_running -= 1
                if transfer.is_over():
                    self._changed.notify_all()
            # While this thread waits for the next, it keeps nothing of the last.
            del transfer, begun
        with self._changed:
            self._num_serving -= 1
            then = self._then if self._num_serving == 0 else None
        if then is not None:
            then()

    def _begin(self) -> tuple[_Transfer[Scratch], int] | None:
        """Return a block that is to be moved, when there is one; None: there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            transfer = self._waiting.popleft()
            transfer.num_running += 1
            block = transfer.blocks.popleft()
            if transfer.blocks:
                self._waiting.append(transfer)
            return transfer, block
