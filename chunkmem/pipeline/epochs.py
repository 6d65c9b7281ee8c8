"""What a pipeline freezes when an epoch is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from chunkmem.assembly import Runtime
from chunkmem.errors import ConfigError


class FreezeReport(Protocol):
    """What `ChunkManager.freeze` returns. `str()` is one line."""

    @property
    def num_params(self) -> int:
        """Elements whose parameters are frozen from now on, and were not before."""
        ...

    @property
    def freed_nbytes(self) -> int:
        """Given back on all tiers of this rank."""
        ...


class Freezes(Protocol):
    """A `chunkmem.ChunkManager`."""

    def freeze(self, modules: Any) -> FreezeReport: ...

    def gather(self, params: Any = None, *, grads: bool = False) -> Any: ...

    @property
    def runtime(self) -> Runtime: ...


class Schedule(Protocol):
    """A `chunkmem.FreezeSchedule`."""

    @property
    def adaptive(self) -> bool:
        """It looks at gradients."""
        ...

    def step(self) -> Sequence[nn.Module]: ...

    def observe(self, manager: Freezes) -> None: ...


class Epochs:
    """Has a schedule look at gradients in a few steps of each epoch, and freezes what it says at the end."""

    def __init__(self, manager: Freezes, schedule: Schedule) -> None:
        """Begin an epoch.

        Raises:
            ConfigError: it is no schedule.
        """
        if not all(hasattr(schedule, name) for name in ("step", "observe", "adaptive")):
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
