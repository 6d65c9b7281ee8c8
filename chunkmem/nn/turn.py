"""One thread at a time: chunks are moved by whoever runs a model, and two that did so would move them apart."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from chunkmem.errors import StateError

_POLL_S = 0.1


class Turn:
    """Belongs to the thread that runs a model, a backward, a step, or an operator on a parameter; others wait."""

    def __init__(self, *, timeout_s: float, with_hooks: bool) -> None:
        """Make a turn that nobody has.

        Args:
            timeout_s: how long others wait.
            with_hooks: autograd's hooks run in the thread that called backward, and need the turn. On an accelerator
                autograd has threads of its own, which act for one that waits for them.
        """
        self._timeout_s = timeout_s
        self._with_hooks = with_hooks
        self._given_back = threading.Condition()
        self._owner: threading.Thread | None = None
        self._waiting: deque[threading.Thread] = deque()
        """In the order they came: one that asks again and again would keep all others out."""

    def take(self) -> bool:
        """Wait until no other thread has the turn; return whether this call took it, and is to give it back.

        Raises:
            StateError: another thread has kept it for too long.
        """
        me = threading.current_thread()
        if self._owner is me:
            return False
        deadline_s = time.monotonic() + self._timeout_s
        with self._given_back:
            self._waiting.append(me)
            while self._waiting[0] is not me or (self._owner is not None and self._owner.is_alive()):
                if time.monotonic() > deadline_s and self._owner is not None:
                    self._waiting.remove(me)
                    raise StateError(
                        f"thread {me.name} has waited {self._timeout_s:.0f} s for thread {self._owner.name}, which "
                        "uses the models of this manager; let one thread at a time do so, or give each a manager"
                    )
                self._given_back.wait(_POLL_S)
            self._waiting.popleft()
            self._owner = me
        return True

    def give_back(self) -> None:
        """Let others have it, if this thread does."""
        if self._owner is threading.current_thread():
            with self._given_back:
                self._owner = None
                self._given_back.notify_all()

    def taken_by_hook(self) -> AbstractContextManager[None]:
        """Have the turn inside the block, in one of autograd's hooks. Raises what `take` does."""
        return self.taken() if self._with_hooks else nullcontext()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Have the turn inside the block. Raises what `take` does."""
        took = self.take()
        try:
            yield
        finally:
            if took:
                self.give_back()
