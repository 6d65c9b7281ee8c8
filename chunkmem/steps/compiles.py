"""When torch's compiler works: a step that it takes part of is not like the others."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any


class CompileWatch:
    """Tells when the compiler begins and ends, as long as somebody has what is told."""

    def __init__(self, begins: Callable[[], None], ends: Callable[[], None]) -> None:
        """Tell nothing yet. `begins` and `ends` are methods, and referred to weakly: torch would keep a manager."""
        self._begins, self._ends = _Note(begins), _Note(ends)

    def begin(self) -> None:
        """Tell from now on, if a compiler has been imported. Call it again: `torch._dynamo.reset()` undoes it."""
        handler = _handler()
        if handler is not None and self._begins not in handler.start_callbacks:
            handler.register_start_callback(self._begins)
            handler.register_end_callback(self._ends)

    def end(self) -> None:
        """Tell no more. Idempotent."""
        handler = _handler()
        if handler is not None and self._begins in handler.start_callbacks:
            handler.remove_start_callback(self._begins)
            handler.remove_end_callback(self._ends)


def _handler() -> Any:
    """Return torch's list of those who are told; None if the compiler has not been imported."""
    callbacks = sys.modules.get("torch._dynamo.callback")
    return None if callbacks is None else callbacks.callback_handler


class _Note:
    """What torch refers to."""

    def __init__(self, method: Callable[[], None]) -> None:
        assert isinstance(method, MethodType)
        self._method = weakref.WeakMethod(method)

    def __call__(self, _args: object) -> None:
        method = self._method()
        if method is not None:
            method()
