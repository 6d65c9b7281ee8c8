"""Signals whose handlers wait while the runtime works.

Python runs a signal's handler in the main thread, between any two bytecodes, and Ctrl-C's raises. Raised between two
lines of the pager, a chunk has its slab and no pin, and every step from then on is wrong. So while a manager is open,
its handler stands before the one that was installed, and looks at where the signal has found the program: the frames on
Python's stack tell, and nothing has to be counted while a step runs.

    for batch in loader:                  user code, which `loss = model(batch)` keeps on the stack
      └ Module._call_impl                 counts as user code, too: what a module computes is the user's
          └ ModuleHooks._enter            runtime: the outermost frame of it is where the signal is held to
              └ Pager.pin
                  └ torch.Tensor.copy_    whose it is, its caller tells: this one is the runtime's

The innermost frame that is somebody's decides. User code is interrupted at once, also where the runtime has called it:
what a forward, a hook or a loss raises is answered like any other error. In the runtime the signal is held until the
outermost frame that belongs to it returns, which a trace function of Python tells; then the handler that was
installed is called, and raises from that call, whose work is done. A backward is one call: it ends before.

A wait that never ends would hold a signal for ever. So the second one says what is waited for, and the third one is not
held any more; neither is SIGALRM, which is there to end what hangs. What is raised then has interrupted the runtime
itself, and its managers refuse to be used.

Decided in ADR 57.
"""

from __future__ import annotations

import dis
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from types import FrameType, GeneratorType
from typing import Any
from weakref import WeakSet

_PACKAGE = __name__.partition(".")[0]
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
"""Those that programs have handlers for. One that raises nothing waits, too: it may save a checkpoint."""
_MAX_HELD = 2
"""So many of one signal are held."""
_WRAPPERS = frozenset({"contextlib", "torch.utils._contextlib", "torch.optim.optimizer"})
"""Modules with functions that call one of ours and then do more; until they return, ours is not over."""

Handler = Callable[[int, FrameType | None], Any]
Trace = Callable[[FrameType, str, Any], Any]


class Whose(Enum):
    """Who a frame on Python's stack belongs to."""

    RUNTIME = auto()
    USER = auto()
    BACKWARD = auto()
    """Autograd's engine: the frame belongs to the runtime if the runtime runs inside of it."""
    CALLER = auto()
    """A frame of torch or the standard library: it belongs to whatever called it."""


def whose(frame: FrameType) -> Whose:
    """Tell who a frame belongs to."""
    name, function = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
    package = name.partition(".")[0]
    if package == _PACKAGE:
        return Whose.RUNTIME
    if package != "torch" and package not in sys.stdlib_module_names:
        return Whose.USER
    if (name, function) == ("torch.nn.modules.module", "_call_impl"):
        return Whose.USER
    if (name, function) == ("torch.autograd.graph", "_engine_run_backward"):
        return Whose.BACKWARD
    return Whose.RUNTIME if name in _WRAPPERS and _wraps_runtime(frame) else Whose.CALLER


def _wraps_runtime(frame: FrameType) -> bool:
    """Tell whether a frame of a decorator, or of a ``with`` block over a generator, is around one of our functions."""
    function, generator = frame.f_locals.get("func"), getattr(frame.f_locals.get("self"), "gen", None)
    if isinstance(generator, GeneratorType):
        return generator.gi_frame is not None and whose(generator.gi_frame) is Whose.RUNTIME
    return str(getattr(function, "__module__", "")).partition(".")[0] == _PACKAGE


@dataclass(frozen=True)
class UninterruptedSection:
    """Work of the runtime that must not be interrupted."""

    outermost: FrameType
    """The section is over when it returns."""
    caller: FrameType
    """User code."""

    @property
    def can_raise(self) -> bool:
        """Tell whether what is raised when the section ends gets to the caller, and costs the caller nothing.

        What `__enter__` returns would be lost, and so never left. What a finalizer raises is printed and ignored.
        """
        code, around = self.outermost.f_code, self.outermost.f_back
        is_finalizer = around is not None and around.f_globals.get("__name__") == "weakref"
        return not (code.co_name in ("__enter__", "__del__") or code.co_flags & inspect.CO_GENERATOR or is_finalizer)


def running_section(frame: FrameType | None) -> UninterruptedSection | None:
    """Return the section that `frame` is in; None where it is user code, or where no user code has called it."""
    outermost = None
    while frame is not None:
        owner = whose(frame)
        if owner is Whose.USER:
            return None if outermost is None else UninterruptedSection(outermost, frame)
        if owner is Whose.RUNTIME or (owner is Whose.BACKWARD and outermost is not None):
            outermost = frame
        frame = frame.f_back
    return None


class InterruptGuard:
    """What one manager has of the handlers: it has them installed, and hears of what they could not hold."""

    def __init__(self) -> None:
        self.broken: str | None = None
        """Why nothing can be served any more, once the runtime itself was interrupted."""
        self._is_open = True
        self._handlers: dict[int, HeldSignal] = {}
        """By signal number: the handlers that were installed at the last look."""

    def install(self) -> None:
        """Stand before the handlers that are installed now: others may have been since the last time.

        Only the main thread can, and runs handlers.
        """
        if not self._is_open or threading.current_thread() is not threading.main_thread():
            return
        for signum in _SIGNALS:
            handler = signal.getsignal(signum)
            if handler is self._handlers.get(signum) or not callable(handler):  # or it is the system's own
                continue
            if not isinstance(handler, HeldSignal):
                handler = HeldSignal(handler)
                signal.signal(signum, handler)
            self._handlers[signum] = handler
            handler.guards.add(self)

    def close(self) -> None:
        """Put the handlers back that were installed, where no other manager needs ours."""
        self._is_open = False
        self._handlers.clear()
        if threading.current_thread() is not threading.main_thread():
            return  # they hold nothing where nothing runs
        for signum in _SIGNALS:
            handler = signal.getsignal(signum)
            if isinstance(handler, HeldSignal):
                handler.guards.discard(self)
                if not handler.guards:
                    signal.signal(signum, handler.installed)


class HeldSignal:
    """Stands before the handler of one signal, and calls it when user code runs."""

    def __init__(self, installed: Handler) -> None:
        """Stand before a handler."""
        self.installed = installed
        self.guards: WeakSet[InterruptGuard] = WeakSet()
        """Guards of the open managers."""
        self._num_held = 0
        self._pid = os.getpid()

    def __call__(self, signum: int, frame: FrameType | None) -> Any:
        """Be the handler."""
        section = None if os.getpid() != self._pid else running_section(frame)
        if section is None:
            self._num_held = 0
            return self.installed(signum, frame)
        if signum == signal.SIGALRM or self._num_held >= _MAX_HELD:
            self._num_held = 0
            return self._break_into(section, signum, frame)
        self._num_held += 1
        if self._num_held == 1:
            _Watch(section, partial(self._end_section, signum)).begin()
        elif self._num_held == _MAX_HELD:
            os.write(2, f"\n{_waiting(section, signum)}\n".encode())
        return None

    def _end_section(self, signum: int, frame: FrameType) -> None:
        if self._num_held:
            self._num_held = 0
            self.installed(signum, frame)

    def _break_into(self, section: UninterruptedSection, signum: int, frame: FrameType | None) -> Any:
        """Call the handler in the middle of the runtime's work."""
        try:
            return self.installed(signum, frame)
        except BaseException:
            name = signal.Signals(signum).name
            for guard in tuple(self.guards):
                guard.broken = (
                    f"{name} has interrupted {_function(section.outermost)} in the middle, and what it was moving is "
                    "lost; make another manager, and load the last checkpoint"
                )
            raise


class _Watch:
    """Tells when a section is over, by a trace function of Python; a debugger's is called as well."""

    def __init__(self, section: UninterruptedSection, ended: Callable[[FrameType], object]) -> None:
        """`ended` is called with the frame that ends, or in which user code continues; it may raise."""
        self._ended = ended
        can_raise = section.can_raise
        self._watched = section.outermost if can_raise else section.caller
        self._events = ("return",) if can_raise else ("line", "return")
        self._before: Trace | None = self._watched.f_trace
        self._starts_tracing = sys.gettrace() is None
        self._error: BaseException | None = None
        """The last exception raised in the watched frame; None: none was."""

    def begin(self) -> None:
        """Watch from now on."""
        self._watched.f_trace = self._happened
        if self._starts_tracing:
            sys.settrace(self._called)

    def _called(self, frame: FrameType, event: str, arg: Any) -> None:
        """A function is called: a module runs, which belongs to the user."""
        if whose(frame) is Whose.USER and frame.f_globals.get("__name__") == "torch.nn.modules.module":
            self._end(frame)

    def _happened(self, frame: FrameType, event: str, arg: Any) -> Trace:
        try:
            if self._before is not None:
                self._before = self._before(frame, event, arg)
        finally:
            if event == "exception":
                self._error = arg[1]
            elif event in self._events:
                self._end(frame)
        return self._happened

    def _end(self, frame: FrameType) -> None:
        self._watched.f_trace = self._before
        if self._starts_tracing:
            sys.settrace(None)
        error, self._error = self._error, None
        try:
            self._ended(frame)
        except BaseException as raised:
            # Python says that a frame returns also where it has raised something, which would be lost.
            if error is not None and not dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN"):
                raised.__context__ = error
            raise


def _waiting(section: UninterruptedSection, signum: int) -> str:
    return (
        f"chunkmem: {signal.Signals(signum).name} is held until {_function(section.outermost)} returns; once more "
        "interrupts it in the middle, and its manager cannot be used any more"
    )


def _function(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"
