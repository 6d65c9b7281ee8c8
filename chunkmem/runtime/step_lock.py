"""One thread at a time: the thread that runs a model moves chunks, and two at once would undo each other's moves."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from chunkmem.data.errors import StateError

_POLL_S = 0.1


class _Taken(threading.local):
    """Of each thread: what it has taken and not given back."""

    def __init__(self) -> None:
        self.order: list[threading.RLock | None] = []
        """What was taken last comes last; None is the lock itself."""


class StepLock:
    """Belongs to the thread that runs a model, a backward, a step, or an operator on a parameter; others wait."""

    def __init__(self, *, timeout_s: float, with_hooks: bool) -> None:
        """Make a turn that nobody has.

        Args:
            timeout_s: how long others wait.
            with_hooks: autograd's hooks run in the thread that called backward, and need the lock. On an accelerator
                autograd has threads of its own, which act for one that waits for them, and which runs the nodes of
                modules on HOST meanwhile: their hooks take turns among themselves.
        """
        self._timeout_s = timeout_s
        self._with_hooks = with_hooks
        self._lock = threading.RLock()
        """Of `_owner_id`. Taken in place of the condition, whose own methods are Python."""
        self._given_back = threading.Condition(self._lock)
        self._in_hooks = threading.RLock()
        self._taken = _Taken()
        self._owner_id: int | None = None
        self._waiting: deque[int] = deque()
        """In the order they came: one that asks again and again would keep all others out."""

    def take(self) -> bool:
        """Wait until no other thread has the lock; return whether this call took it, and is to give it back.

        Raises:
            StateError: another thread has kept it for too long.
        """
        me = threading.get_ident()
        if self._owner_id == me:
            return False
        with self._lock:
            if self._owner_id is not None or self._waiting:
                self._wait()
            self._owner_id = me
        self._taken.order.append(None)
        return True

    def give_back(self) -> None:
        """Let others have it, if this thread does; what was taken last goes first."""
        order = self._taken.order
        taken = order.pop() if order else None
        if taken is not None:
            taken.release()
        elif self._owner_id == threading.get_ident():
            with self._lock:
                self._owner_id = None
                if self._waiting:
                    self._given_back.notify_all()

    def hook_thread(self) -> int | None:
        """Return, in a hook, the thread that called backward; None where autograd has threads of its own."""
        return threading.get_ident() if self._with_hooks else None

    def runs_elsewhere(self, thread: int | None) -> bool:
        """Tell whether that is another thread, and one that runs."""
        return thread not in (None, threading.get_ident()) and any(t.ident == thread for t in threading.enumerate())

    def take_in_hook(self) -> bool:
        """The same in one of autograd's hooks, which may act for a thread that has the lock."""
        if self._with_hooks:
            return self.take()
        lock = self._in_hooks
        if not lock.acquire(timeout=self._timeout_s):
            raise self._late()
        self._taken.order.append(lock)
        return True

    def end_hooks(self) -> None:
        """No backward runs: a hook that was torn down keeps others out no longer."""
        self._in_hooks = threading.RLock()

    @contextmanager
    def taken(self, *, in_hook: bool = False) -> Iterator[None]:
        """Have the lock inside the block, which may be in one of autograd's hooks. Raises what `take` does."""
        took = self.take_in_hook() if in_hook else self.take()
        try:
            yield
        finally:
            if took:
                self.give_back()

    def _wait(self) -> None:
        me = threading.get_ident()
        deadline_s = time.monotonic() + self._timeout_s
        self._waiting.append(me)
        try:
            while self._waiting[0] != me or self.runs_elsewhere(self._owner_id):
                if time.monotonic() > deadline_s:
                    raise self._late()
                self._given_back.wait(_POLL_S)
        finally:
            self._waiting.remove(me)

    def _late(self) -> StateError:
        return StateError(
            f"thread {threading.current_thread().name} has waited {self._timeout_s:.0f} s for another one, which uses "
            "the models of this manager; let one thread at a time do so, or give each a manager"
        )
