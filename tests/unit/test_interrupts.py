"""Whose code a signal finds, and what its handler does then; without a manager."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from chunkmem.runtime.interrupts import HeldSignal, InterruptGuard, running_section

MODULES = {
    "runtime": "chunkmem.runtime.pager",
    "torch": "torch._tensor",
    "library": "functools",
    "module": "torch.nn.modules.module",
    "engine": "torch.autograd.graph",
    "user": "training",
}
NAMES = {"module": "_call_impl", "engine": "_engine_run_backward"}


def layers(*owners: str, inner: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that calls one of each owner, the first outermost, and then `inner`."""
    for owner in reversed(owners):
        name = NAMES.get(owner, "function")
        made: dict[str, Any] = {"__name__": MODULES[owner], "inner": inner}
        exec(f"def {name}():\n    found = inner()\n    return found\n", made)
        inner = made[name]
    return inner


def frames(*owners: str) -> FrameType:
    """Return the innermost of such frames."""
    return layers(*owners, inner=lambda: sys._getframe(1))()


@pytest.mark.parametrize(
    ("owners", "outermost"),
    [
        (("user",), None),
        (("user", "torch"), None),
        (("user", "runtime"), 1),
        (("user", "runtime", "torch", "library"), 1),
        (("user", "torch", "runtime", "runtime", "torch"), 2),
        (("user", "runtime", "user"), None),
        (("user", "runtime", "user", "torch"), None),
        (("user", "runtime", "user", "runtime"), 3),
        # What a module computes is the user's, whatever the caller.
        (("user", "runtime", "module"), None),
        (("user", "runtime", "module", "runtime"), 3),
        # A backward is one call, whatever the caller.
        (("user", "torch", "engine"), None),
        (("user", "torch", "engine", "runtime"), 2),
        (("user", "runtime", "engine", "runtime"), 1),
        (("user", "runtime", "engine", "user"), None),
    ],
)
def test_a_section_is_what_the_runtime_does_for_the_user_that_calls_it(
    owners: tuple[str, ...], outermost: int | None
) -> None:
    innermost = frames(*owners)
    section = running_section(innermost)
    if outermost is None:
        assert section is None
        return
    assert section is not None
    found, depth = innermost, len(owners) - 1
    while depth > outermost:
        assert found.f_back is not None
        found, depth = found.f_back, depth - 1
    assert section.outermost is found
    assert section.can_raise


class Signal:
    """A handler of SIGINT before ours, and what it was called with."""

    def __init__(self) -> None:
        self.held = HeldSignal(self._installed)
        self.calls: list[str] = []
        self.error: type[BaseException] | None = KeyboardInterrupt

    def _installed(self, signum: int, frame: FrameType | None) -> None:
        assert frame is not None
        self.calls.append(frame.f_code.co_name)
        if self.error is not None:
            raise self.error

    def arrive(self, signum: int = signal.SIGINT) -> str:
        """Arrive in the caller."""
        self.held(signum, sys._getframe(1))
        return "done"


@pytest.fixture
def sent() -> Signal:
    return Signal()


def test_it_raises_when_the_runtime_returns(sent: Signal) -> None:
    done: list[str] = []

    def work() -> None:
        done.append(layers("runtime", inner=lambda: sent.held(signal.SIGINT, sys._getframe(1)))() or "went on")

    outer = layers("runtime", inner=work)
    with pytest.raises(KeyboardInterrupt):
        layers("runtime", "torch", "runtime", inner=lambda: sent.held(signal.SIGINT, sys._getframe(1)))()
    assert sys.gettrace() is None
    # The test's own function is user code, and so the inner call of the runtime is all that is held.
    with pytest.raises(KeyboardInterrupt):
        outer()
    assert done == []


def test_what_the_runtime_raises_is_the_context(sent: Signal) -> None:
    def fail() -> None:
        sent.held(signal.SIGINT, sys._getframe(1))
        raise ValueError("of the runtime")

    with pytest.raises(KeyboardInterrupt) as caught:
        layers("runtime", "torch", inner=fail)()
    assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_that_raises_nothing_is_called_at_the_end(sent: Signal) -> None:
    sent.error = None
    call = layers("runtime", inner=lambda: sent.held(signal.SIGINT, sys._getframe(1)))
    call()
    assert sent.calls == ["function"]
    assert sys.gettrace() is None


def test_two_signals_are_both_delivered(sent: Signal) -> None:
    other = Signal()
    other.error = SystemExit

    def arrive() -> None:
        frame = sys._getframe(1)
        sent.held(signal.SIGINT, frame)
        other.held(signal.SIGTERM, frame)

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        layers("runtime", inner=arrive)()
    assert (len(sent.calls), len(other.calls)) == (1, 1)
    assert sys.gettrace() is None


def test_a_with_block_that_is_entered_is_left(sent: Signal) -> None:
    """What `__enter__` returns is not lost: the interrupt comes inside of the block."""
    left: list[str] = []

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        sent.held(signal.SIGINT, sys._getframe())
        try:
            yield
        finally:
            left.append("left")

    code = block.__wrapped__.__code__  # type: ignore[attr-defined]
    made = {"__name__": MODULES["runtime"], "sent": sent, "left": left, "signal": signal, "sys": sys}
    ours = contextlib.contextmanager(type(block)(code, made, closure=block.__wrapped__.__closure__))  # type: ignore[attr-defined]
    inside: list[str] = []
    with pytest.raises(KeyboardInterrupt), ours():
        inside.append("is never reached")
    assert (inside, left) == ([], ["left"])


def test_what_a_debugger_traces_is_traced_on(sent: Signal) -> None:
    seen: list[str] = []

    def debugger(frame: FrameType, event: str, arg: Any) -> Any:
        seen.append(event)
        return debugger

    sent.error = None
    sys.settrace(debugger)
    try:
        layers("runtime", inner=lambda: sent.held(signal.SIGINT, sys._getframe(1)))()
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(None)
    assert sent.calls == ["function"]
    assert "return" in seen


def test_the_third_one_is_not_held_and_says_so(sent: Signal, capfd: pytest.CaptureFixture[str]) -> None:
    guard = InterruptGuard()
    sent.held.guards.add(guard)
    went_on: list[int] = []

    def arrive() -> None:
        frame = sys._getframe(1)
        for count in range(4):
            sent.held(signal.SIGINT, frame)
            went_on.append(count)

    with pytest.raises(KeyboardInterrupt):
        layers("runtime", inner=arrive)()
    assert went_on == [0, 1]
    assert "SIGINT has interrupted chunkmem.runtime.pager.function in the middle" in (guard.broken or "")
    assert capfd.readouterr().err.count("SIGINT is held until chunkmem.runtime.pager.function returns") == 1
    assert sys.gettrace() is None


def test_a_timer_is_not_held(sent: Signal) -> None:
    def arrive() -> None:
        sent.held(signal.SIGALRM, sys._getframe(1))
        raise AssertionError("it was held")

    with pytest.raises(KeyboardInterrupt):
        layers("runtime", inner=arrive)()
