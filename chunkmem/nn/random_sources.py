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
        self._accesses = [_access(source) for source in sources]
        self._states = [get() for get, _ in self._accesses]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Within, the sources begin again at these states; afterwards they continue where they are now."""
        now = [get() for get, _ in self._accesses]
        try:
            for (_, put), state in zip(self._accesses, self._states, strict=True):
                put(state)
            yield
        finally:
            for (_, put), state in zip(self._accesses, now, strict=True):
                put(state)


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
