"""Whether it is worth updating ahead of the step: that guesses what the step will do."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from chunkmem.nn.binding import ManagedParameter
from chunkmem.optim.rule import UpdateItem

WINDOW = 10
"""Steps that are looked back on."""
MAX_WRONG = 3
"""Wrong guesses among them from which on none is made."""


@dataclass(frozen=True)
class UpdateInputs:
    """All that an update depends on in addition to the contents of chunks."""

    updates: frozenset[tuple[ManagedParameter, int, int, Hashable]]
    """(parameter, number of its update, its own in the optimizer, its hyper-parameters)."""
    multiplier: float | None

    @classmethod
    def of(cls, items: Sequence[UpdateItem], multiplier: float | None) -> UpdateInputs:
        """Return what an update of `items` depends on."""
        found: set[tuple[ManagedParameter, int, int, Hashable]] = set()
        for item in items:
            rows = zip(item.params, map(int, item.steps), item.numbers, strict=True)
            found.update((managed, step, number, item.hyper) for managed, step, number in rows)
        return cls(frozenset(found), multiplier)


class Speculation:
    """What became of the guesses of the last steps. Steps without one count as they would have."""

    def __init__(self, max_wrong: int = MAX_WRONG) -> None:
        self._max_wrong = max_wrong
        self._wrong: deque[bool] = deque(maxlen=WINDOW)
        self._is_wrong = False
        self.num_wrong = 0
        """Steps whose guess was wrong, of all there were."""

    @property
    def are_worthwhile(self) -> bool:
        """Fewer than `max_wrong` of the last ten steps were guessed wrongly."""
        return sum(self._wrong) < self._max_wrong

    def roll_back(self) -> None:
        """The guess of the step that runs is wrong."""
        self._is_wrong = True

    def end_step(self) -> None:
        """The step is over."""
        self._wrong.append(self._is_wrong)
        self.num_wrong += self._is_wrong
        self._is_wrong = False
