"""Do something in a second process while this one does something else."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar, cast

T = TypeVar("T")


def in_fork(work: Callable[[], T]) -> Callable[[], T]:
    """Start `work` in a forked process; return a function that waits for its result.

    Where processes cannot be forked, or this one ends without a result (`work` raised), `work` is done by that
    function, here. So the outcome is always that of calling `work`.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        return work
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(there, work), daemon=True)
    process.start()
    there.close()

    def result() -> T:
        try:
            found = cast(T, here.recv())
        except EOFError:
            found = work()
        finally:
            here.close()
            process.join()
        return found

    return result


def _send(there: Connection, work: Callable[[], object]) -> None:
    try:
        found = work()
    except (Exception, KeyboardInterrupt):  # said by the other process, which does it again or is interrupted, too
        return
    there.send(found)
