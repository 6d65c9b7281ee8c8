"""Texts that ranks leave for each other where they met: for threads that may not use the groups of training."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from chunkmem.comm.failure_detector import said_by_torch
from chunkmem.errors import RankError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_POLL_S = 0.02


class Notes:
    """Those of one occasion, by name. Nobody has to be there when one is left."""

    def __init__(
        self, store: Store | None, rank: int, size: int, *, timeout_s: float, is_lost: Callable[[], bool]
    ) -> None:
        """Have none.

        Args:
            store: of this occasion alone; None: there is one rank, which waits for nobody.
            rank: this one.
            size: number of ranks.
            timeout_s: to wait for a note.
            is_lost: tells whether ranks have lost each other meanwhile.
        """
        self._store = store
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._is_lost = is_lost

    def leave(self, name: str, text: str) -> None:
        """Leave a note, once.

        Raises:
            RankError: the store is gone, and with it the first rank.
        """
        if self._store is not None:
            try:
                self._store.set(name, f"={text}")  # a store may not keep what is empty
            except RuntimeError as error:
                raise _store_error(name, error) from None

    def wait_for(self, name: str, *, of: int, limit_s: float | None = None) -> str:
        """Return the text of a note, when it is there.

        Args:
            name: of the note.
            of: the rank that leaves it, for the error.
            limit_s: to wait; None: `timeout_s`.

        Raises:
            RankError: it did not come, or ranks have lost each other.
        """
        assert self._store is not None
        limit_s = self._timeout_s if limit_s is None else limit_s
        deadline_s = time.monotonic() + limit_s
        while True:
            try:
                if self._store.check([name]):
                    return self._store.get(name).decode()[1:]
            except RuntimeError as error:
                raise _store_error(name, error) from None
            if self._is_lost():
                raise RankError(f"{name}: the ranks have lost each other, as one failed before", (of,))
            if time.monotonic() > deadline_s:
                raise RankError(f"{name}: no word of rank {of} for {limit_s:.0f} s", (of,))
            time.sleep(_POLL_S)


def _store_error(name: str, error: RuntimeError) -> RankError:
    return RankError(
        f"{name}: the store that the ranks met in is gone ({said_by_torch(error)}); its rank has ended", (0,)
    )
