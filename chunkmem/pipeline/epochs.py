"""What a pipeline freezes when an epoch is over."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from chunkmem.data.errors import ConfigError
from chunkmem.data.memory import FreezeReport


@runtime_checkable
class EpochSchedule(Protocol):
    """A `chunkmem.FreezeSchedule`."""

    adaptive: bool

    def step(self) -> Any: ...

    def observe(self, manager: Any) -> None: ...


class Freezes(Protocol):
    """A `chunkmem.ChunkManager`."""

    def freeze(self, modules: Any) -> FreezeReport: ...


class Epochs:
    """Has a schedule look at gradients in a few steps of each epoch, and freezes what it says at the end."""

    def __init__(self, manager: Freezes, schedule: EpochSchedule) -> None:
        """Begin an epoch.

        Raises:
            ConfigError: it is no schedule.
        """
        if not isinstance(schedule, EpochSchedule):
            raise ConfigError(f"freeze is a {type(schedule).__name__}; give a chunkmem.FreezeSchedule")
        self._manager = manager
        self._schedule = schedule
        self._num_steps = 0

    def stepped(self) -> None:
        """A backward is over. All ranks look at gradients in steps 1, 2, 4, 8, ... of an epoch: it gathers them."""
        self._num_steps += 1
        if self._schedule.adaptive and not self._num_steps & (self._num_steps - 1):
            self._schedule.observe(self._manager)

    def end(self) -> FreezeReport:
        """An epoch is over: freeze what the schedule says. Raises what `FreezeSchedule.step` and `freeze` do."""
        self._num_steps = 0
        return self._manager.freeze(self._schedule.step())
