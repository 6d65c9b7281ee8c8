"""Random numbers that torch's checkpoint does not repeat: Python's, numpy's, and generators of one's own."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch

from chunkmem.data.errors import ConfigError

Generator = torch.Generator | random.Random | np.random.Generator
_STATE_NBYTES = 2500
"""Of a Mersenne twister in memory: 624 words, and which one comes next."""


class _NumpyState:
    """The state of numpy's global generator, read where it has changed: that takes as long as a small call."""

    def __init__(self) -> None:
        """Know nothing of it."""
        self._found: tuple[bytes | None, Any] = None, None
        """What was in the generator's memory, and its state."""

    def get(self) -> Any:
        """Return the state, the same object if it is as it was."""
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        memory, state = self._found
        is_known = type(bits) is np.random.MT19937
        now = ctypes.string_at(bits.ctypes.state_address, _STATE_NBYTES) if is_known else None
        if now is None or now != memory or state[3]:  # what is kept for the next draw of a normal number is elsewhere
            self._found = now, np.random.get_state()
        return self._found[1]


RandomSource = Literal["python", "numpy"] | Generator | _NumpyState
"""A source of random numbers: Python's `random`, numpy's global state, or a generator."""


def global_sources() -> tuple[RandomSource, ...]:
    """Return Python's and numpy's generators, for somebody who asks for their states again and again."""
    return "python", _NumpyState()


_Access = tuple[Callable[[], Any], Callable[[Any], object]]
"""What returns the state of a source, and what sets it."""


class RandomStates:
    """States of random sources when this was made."""

    def __init__(self, sources: Iterable[RandomSource]) -> None:
        """Read the states of `sources`.

        Raises:
            ConfigError: one of them is none.
        """
        self._states = [(get, put, get()) for get, put in map(_access, sources)]

    def forget_undrawn(self) -> bool:
        """The call is over: forget sources that it has not drawn from, as it will not when it is made again.

        Returns:
            Whether it has drawn from any.
        """
        self._states = [(get, put, state) for get, put, state in self._states if not _is_same(get(), state)]
        return bool(self._states)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Within, the sources begin again at these states; afterwards they continue where they are now."""
        now = [(put, get()) for get, put, _ in self._states]
        try:
            for _, put, state in self._states:
                put(state)
            yield
        finally:
            for put, state in now:
                put(state)


def _is_same(one: Any, other: Any) -> bool:
    """Compare two states of Python's generator, or of numpy's global one; others are never the same."""
    if not isinstance(one, tuple) or not isinstance(one[1], np.ndarray):
        return isinstance(one, tuple) and one == other
    return one is other or (np.array_equal(one[1], other[1]) and one[2:] == other[2:])


def _access(source: object) -> _Access:
    if source == "python":
        return random.getstate, random.setstate
    if source == "numpy":
        return _NumpyState().get, np.random.set_state
    if isinstance(source, _NumpyState):
        return source.get, np.random.set_state
    if isinstance(source, torch.Generator):
        return source.get_state, source.set_state
    if isinstance(source, random.Random):
        return source.getstate, source.setstate
    if isinstance(source, np.random.Generator):
        bits = source.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    raise ConfigError(
        f'rng: {source!r} is no source of random numbers; give "python", "numpy", a torch.Generator, a random.Random '
        "or a numpy.random.Generator. torch's own are always repeated"
    )
