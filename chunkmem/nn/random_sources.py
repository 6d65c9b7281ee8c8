"""Random numbers that torch's checkpoint does not repeat: Python's, numpy's, and generators of one's own."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch

from chunkmem.errors import ConfigError

Generator = torch.Generator | random.Random | np.random.Generator
RandomSource = Literal["python", "numpy"] | Generator
"""A source of random numbers: Python's `random`, numpy's global state, or a generator."""


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

    def settle(self) -> None:
        """The call is over: forget sources that it has not drawn from, as it will not when it is made again."""
        self._states = [(get, put, state) for get, put, state in self._states if not _is_same(get(), state)]

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
    return np.array_equal(one[1], other[1]) and one[2:] == other[2:]


def _access(source: object) -> _Access:
    if source == "python":
        return random.getstate, random.setstate
    if source == "numpy":
        return np.random.get_state, np.random.set_state
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
