"""Processes that end at a certain change of the file system, as if they were killed there."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any
from unittest import mock

_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link")
_KILLED = 9


def _die_at(number: int, do: Callable[..., object], args: tuple[Any, ...]) -> None:
    count = 0

    def on_event(event: str, about: tuple[Any, ...]) -> None:
        nonlocal count
        writes = event == "open" and isinstance(about[2], int) and about[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if event in _CHANGES or writes:
            if count == number:
                os._exit(_KILLED)
            count += 1

    sys.addaudithook(on_event)
    real = os.fsync

    def fsync(descriptor: int) -> None:
        on_event("os.remove", ())
        real(descriptor)

    with mock.patch.object(os, "fsync", fsync):
        do(*args)
    os._exit(0)


def is_killed_at(number: int, do: Callable[..., object], *args: Any) -> bool:
    """Do something in a forked process that ends before its change of that number; return whether it came so far."""
    process = get_context("fork").Process(target=_die_at, args=(number, do, args))
    process.start()
    process.join()
    assert process.exitcode in (0, _KILLED)
    return process.exitcode == _KILLED


def at_once(*calls: Callable[[], object]) -> None:
    """Do several things, each in a forked process."""
    processes = [get_context("fork").Process(target=call) for call in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)


@contextmanager
def failing_at(number: int, *, code: int = errno.EIO) -> Iterator[list[str]]:
    """Have one call that renames, removes or syncs fail inside; yield a list that has its name when it was made."""
    made: list[str] = []
    count = iter(range(1 << 30))

    def failing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(count) == number:
                made.append(name)
                raise OSError(code, os.strerror(code), *(() if name == "fsync" else (str(args[0]),)))
            return real(*args, **kwargs)

        return call

    names = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync")
    with mock.patch.multiple(os, **{name: failing(name, getattr(os, name)) for name in names}):
        yield made
