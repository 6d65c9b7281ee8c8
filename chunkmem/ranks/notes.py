"""Texts that ranks leave for each other where they met: for threads that may not use the groups of training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from chunkmem.data.errors import RankError
from chunkmem.ranks.failure_detector import poll_s, said_by_torch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_SIGN_SHARE = 0.25
"""Of the time after which a rank is lost: how often it says that it lives."""


class Notes:
    """Those of one occasion, by name. Nobody has to be there when one is left."""

    def __init__(self, store: Store, rank: int, size: int, *, timeout_s: float, is_lost: Callable[[], bool]) -> None:
        """Have none.

        Args:
            store: of this occasion alone.
            rank: this one.
            size: number of ranks.
            timeout_s: to wait for a note of a rank that gives no sign of life.
            is_lost: tells whether ranks have lost each other meanwhile.
        """
        self._store = store
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._is_lost = is_lost

    @contextmanager
    def working(self) -> Iterator[None]:
        """Give signs of life inside of the block, from a thread: others wait for notes however long the work takes."""
        over, store = threading.Event(), self._store

        def give_signs() -> None:
            count = 0
            while not over.wait(_SIGN_SHARE * self._timeout_s):
                count += 1
                try:
                    store.set(_sign_of(self.rank), str(count))
                except RuntimeError:  # it is gone: the next note says so
                    return

        thread = threading.Thread(target=give_signs, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def leave(self, name: str, text: str) -> None:
        """Leave a note, once.

        Raises:
            RankError: the store is gone, and with it the first rank.
        """
        try:
            self._store.set(name, f"={text}")  # a store may not keep what is empty
        except RuntimeError as error:
            raise _store_error(name, error) from None

    def wait_for(self, name: str, *, of: int, limit_s: float | None = None) -> str:
        """Return the text of a note, when it is there.

        Args:
            name: of the note.
            of: the rank that leaves it, for the error.
            limit_s: to wait while that rank gives no sign of life; None: `timeout_s`.

        Raises:
            RankError: it did not come, nor a sign, or ranks have lost each other.
        """
        limit_s = self._timeout_s if limit_s is None else limit_s
        deadline_s, sign = time.monotonic() + limit_s, b""
        while True:
            try:
                if self._store.check([name]):
                    return self._store.get(name).decode()[1:]
                is_late, before = time.monotonic() > deadline_s, sign
                if is_late and self._store.check([_sign_of(of)]):
                    sign = self._store.get(_sign_of(of))
            except RuntimeError as error:
                raise _store_error(name, error) from None
            if self._is_lost():
                raise RankError(f"{name}: the ranks have lost each other, as one failed before", (of,))
            if is_late and sign == before:
                raise RankError(f"{name}: no word of rank {of} for {limit_s:.0f} s", (of,))
            deadline_s += limit_s if is_late else 0.0
            time.sleep(poll_s(self.size))


def _sign_of(rank: int) -> str:
    """Return the name of a note that is left again and again, with another text."""
    return f"rank {rank} lives"


def _store_error(name: str, error: RuntimeError) -> RankError:
    return RankError(
        f"{name}: the store that the ranks met in is gone ({said_by_torch(error)}); its rank has ended", (0,)
    )
