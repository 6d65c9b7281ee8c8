"""Whether it is worth updating ahead of the step: that guesses what the step will do."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chunkmem.nn.binding import ManagedParameter

Items = Mapping[int, tuple[dict[str, Any], Sequence[tuple[ManagedParameter, torch.Tensor]]]]
"""By any key: the options of a parameter group, and its (parameter, number of its update) in one chunk group."""

WINDOW = 10
"""Steps that are looked back on."""
MAX_WRONG = 3
"""Wrong guesses among them from which on none is made."""


@dataclass(frozen=True)
class UpdateInputs:
    """All that an update depends on in addition to the contents of chunks."""

    options: frozenset[tuple[ManagedParameter, int, tuple[float, ...], bool]]
    """By parameter: the number of its update, its numbers, and whether weight decay is decoupled."""
    multiplier: float | None

    @classmethod
    def of(cls, items: Items, multiplier: float | None) -> UpdateInputs:
        """Return what an update of `items` depends on; a tensor of a learning rate counts by its value."""
        found: set[tuple[ManagedParameter, int, tuple[float, ...], bool]] = set()
        for options, pairs in items.values():
            numbers = (options["lr"], *options["betas"], options["eps"], options["weight_decay"])
            alike = (tuple(map(float, numbers)), bool(options["decoupled_weight_decay"]))
            found.update((managed, int(step), *alike) for managed, step in pairs)
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
