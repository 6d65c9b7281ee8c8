"""A signal that arrives at a line of the package that a test chooses."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from types import FrameType, TracebackType
from typing import Any

PACKAGE = "chunkmem"
Line = tuple[str, int]
"""Of a module."""


class Lines:
    """Inside of the block, count the lines of the package that run, and call a signal's handler at one of them.

    The handler is called as Python calls it, with the frame that runs: it decides whether anything is raised there.
    """

    def __init__(self, at: Line | None = None, *, nth: int = 0, signum: int = signal.SIGINT) -> None:
        """Deliver the signal when line `at` runs for the `nth` time, counted from 0; None: never."""
        self.at, self.nth, self.signum = at, nth, signum
        self.ran: Counter[Line] = Counter()
        self.delivered = False

    def __enter__(self) -> Lines:
        sys.settrace(self._called)
        return self

    def __exit__(self, _: object, __: object, ___: TracebackType | None) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        is_wanted = not self.delivered and _module(frame).partition(".")[0] == PACKAGE
        return self._runs if is_wanted else None

    def _runs(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self.delivered:
            return None
        if event == "line":
            line = _module(frame), frame.f_lineno
            count = self.ran[line]
            self.ran[line] += 1
            if (line, count) == (self.at, self.nth):
                self.delivered = True
                self._deliver(frame)
                return None
        return self._runs

    def _deliver(self, frame: FrameType) -> None:
        sys.settrace(None)
        above: FrameType | None = frame
        while above is not None:
            above.f_trace = None
            above = above.f_back
        handler = signal.getsignal(self.signum)
        assert callable(handler)
        handler(self.signum, frame)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
