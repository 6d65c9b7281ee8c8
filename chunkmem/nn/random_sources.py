"""Random numbers that torch's checkpoint does not repeat: Python's, numpy's, and generators of one's own."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from chunkmem.errors import ConfigError

Generator = torch.Generator | random.Random | np.random.Generator
RandomSource = Literal["python", "numpy"] | Generator
"""A source of random numbers: Python's `random`, numpy's global state, or a generator."""


class _Access(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], object]


class RandomStates:
    """States of random sources when this was made."""

    def __init__(self, sources: Iterable[RandomSource]) -> None:
        """Read the states of `sources`.

        Raises:
            ConfigError: one of them is none.
        """
        self._accesses = [_access(source) for source in sources]
        self._states = [access.get() for access in self._accesses]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Within, the sources begin again at these states; afterwards they continue where they are now."""
        now = [access.get() for access in self._accesses]
        try:
            for access, state in zip(self._accesses, self._states, strict=True):
                access.set(state)
            yield
        finally:
            for access, state in zip(self._accesses, now, strict=True):
                access.set(state)


def _access(source: object) -> _Access:
    if source == "python":
        return _Access(random.getstate, random.setstate)
    if source == "numpy":
        return _Access(np.random.get_state, np.random.set_state)
    if isinstance(source, torch.Generator):
        return _Access(source.get_state, source.set_state)
    if isinstance(source, random.Random):
        return _Access(source.getstate, source.setstate)
    if isinstance(source, np.random.Generator):
        bits = source.bit_generator
        return _Access(lambda: bits.state, lambda state: setattr(bits, "state", state))
    raise ConfigError(
        f'rng: {source!r} is no source of random numbers; give "python", "numpy", a torch.Generator, a random.Random '
        "or a numpy.random.Generator. torch's own are always repeated"
    )
