"""Random numbers of micro-batches that run block by block: those that they draw when they run one after the other.

In a plain loop micro-batch 1 draws what comes after the numbers of micro-batch 0. Block by block, both have begun
before either is over. So each has a stream of its own, which begins where the one before is going to end. How many
numbers a micro-batch draws is not known before one has run: the first batch of a form runs one micro-batch after the
other, and their draws are counted. What is drawn block by block is compared with that before backward begins. Where
micro-batches of a form draw different amounts (layers that are dropped at random), or numbers of Python's `random` or
of numpy, all batches of that form run one micro-batch after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from itertools import pairwise

import torch

_PERIOD = 624
"""Numbers of a CPU generator, a Mersenne twister, from one renewal of its state to the next."""
_MAX_PERIODS = 1 << 14
"""More are not counted."""

States = tuple[torch.Tensor, ...]
"""States of all random number generators."""


class MicroBatchStreams:
    """Those of one step: micro-batch m draws from the m-th."""

    def __init__(self, generators: Sequence[torch.Generator], starts: list[States]) -> None:
        """Begin each at a state."""
        self._generators = generators
        self._starts = starts
        self._now = list(starts)

    @contextlib.contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Draw from the stream of a micro-batch."""
        _set_states(self._generators, self._now[number])
        yield
        self._now[number] = states_of(self._generators)

    def end(self) -> int | None:
        """Go on where the last one has ended; return None.

        If one has drawn more or fewer numbers than the next one has taken for granted, return its number, and go back
        to where the first one has begun.
        """
        pairs = enumerate(zip(self._now, self._starts[1:], strict=False))
        wrong = next((number for number, (end, start) in pairs if not _same(end, start)), None)
        _set_states(self._generators, self._now[-1] if wrong is None else self._starts[0])
        return wrong


class RandomStreams:
    """What is known of the random numbers that micro-batches draw."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        """Know nothing of what is drawn from `generators`."""
        self.generators = tuple(generators)
        self._draws: dict[Hashable, tuple[int | None, ...]] = {}
        """By form of a micro-batch: how many numbers it draws from each; None: that varies, or cannot be told."""

    def begin(self, forms: Sequence[Hashable]) -> MicroBatchStreams | None:
        """Return streams for a step of micro-batches of these forms; None if forward has to run them in turn."""
        none = (0,) * len(self.generators)
        draw_nothing = bool(self._draws) and all(each == none for each in self._draws.values())
        draws = [self._draws.get(form, none if draw_nothing else (None,)) for form in _asked(forms)]
        if any(None in each for each in draws):
            return None
        starts = [states_of(self.generators)]
        for _, each in zip(forms[1:], draws, strict=False):
            pairs = zip(self.generators, starts[-1], each, strict=True)
            starts.append(tuple(_advanced(generator, state, count or 0) for generator, state, count in pairs))
        return MicroBatchStreams(self.generators, starts)

    def forget(self, forms: Sequence[Hashable]) -> None:
        """What micro-batches of these forms draw varies."""
        self._draws.update(dict.fromkeys(_asked(forms), (None,) * len(self.generators)))

    def learn(self, forms: Sequence[Hashable], states: Sequence[States]) -> None:
        """Take note of the states before each micro-batch of a step in which they ran in turn, and at the end.

        Args:
            forms: of each.
            states: one more.
        """
        for form, (before, after) in zip(forms, pairwise(states), strict=True):
            counts = tuple(
                _count(generator, start, stop)
                for generator, start, stop in zip(self.generators, before, after, strict=True)
            )
            draws = self._draws.get(form, counts)
            self._draws[form] = tuple(a if a == b else None for a, b in zip(draws, counts, strict=True))


def _asked(forms: Sequence[Hashable]) -> Sequence[Hashable]:
    """Return the forms of micro-batches that others follow, which begin where these end."""
    return forms[:-1] or forms


def states_of(generators: Sequence[torch.Generator]) -> States:
    """Return the state of each."""
    return tuple(generator.get_state() for generator in generators)


def _set_states(generators: Sequence[torch.Generator], states: States) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _same(one: States, other: States) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _advanced(generator: torch.Generator, state: torch.Tensor, count: int) -> torch.Tensor:
    """Return what the state of a generator is after so many numbers; on an accelerator, they are an offset."""
    if not count:
        return state
    other = _at(generator, state)
    if generator.device.type == "cpu":
        torch.empty(count, dtype=torch.int32).random_(generator=other)
    else:
        other.set_offset(other.get_offset() + count)
    return other.get_state()


def _count(generator: torch.Generator, start: torch.Tensor, stop: torch.Tensor) -> int | None:
    """Return how many numbers lie between two states of a generator; None if that cannot be told."""
    if torch.equal(start, stop):
        return 0
    if generator.device.type == "cpu":
        count = _count_on_cpu(_at(generator, start), start, stop)
    else:
        count = _at(generator, stop).get_offset() - _at(generator, start).get_offset()
    return count if torch.equal(_advanced(generator, start, count), stop) else None


def _at(generator: torch.Generator, state: torch.Tensor) -> torch.Generator:
    """Return another generator of the same kind at a state."""
    other = torch.Generator(generator.device)
    other.set_state(state)
    return other


def _count_on_cpu(other: torch.Generator, start: torch.Tensor, stop: torch.Tensor) -> int:
    """Return it for a Mersenne twister, of which `other` is at the start, or any number if that never stops there.

    A state has 8 bytes of seed, 4 that say how many numbers are left of the period, 12 of others, and then the period.
    """
    for num in range(_MAX_PERIODS):
        now = other.get_state()
        if torch.equal(now[24 : 24 + 8 * _PERIOD], stop[24 : 24 + 8 * _PERIOD]):
            return num * _PERIOD + _left(start) - _left(stop)
        torch.empty(_PERIOD, dtype=torch.int32).random_(generator=other)
    return 0


def _left(state: torch.Tensor) -> int:
    return int(state[8:12].view(torch.int32).item())
