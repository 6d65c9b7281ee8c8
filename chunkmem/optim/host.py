"""What an optimizer over chunks is given by the manager that holds its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from chunkmem.config import Config
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.registry import ModelRegistry
from chunkmem.optim.scaler import LossScaler
from chunkmem.optim.update import GroupUpdater
from chunkmem.ranks.ranks import Ranks

T = TypeVar("T")


class Owners(Protocol):
    """Which rank has the chunks of a parameter."""

    def owns(self, managed: ManagedParameter) -> bool:
        """Tell whether this rank does."""
        ...

    def from_owner(self, managed: ManagedParameter, read: Callable[[], T]) -> T:
        """Return what `read` returns on the rank that owns a parameter; every rank calls it."""
        ...


class OptimizerHost(Owners, Protocol):
    """The part of a manager's runtime that optimizers see."""

    @property
    def config(self) -> Config: ...
    @property
    def registry(self) -> ModelRegistry:
        """Knows all managed parameters."""
        ...

    @property
    def updater(self) -> GroupUpdater:
        """Has the states and gradients of chunk groups, and updates them."""
        ...

    @property
    def ranks(self) -> Ranks: ...
    @property
    def scaler(self) -> LossScaler | None:
        """In fp16."""
        ...

    @property
    def device(self) -> torch.device:
        """That computes."""
        ...

    @property
    def is_lowered(self) -> bool:
        """Weights are computed with in bf16 or fp16: mixed precision, or bf16 alone."""
        ...

    @property
    def is_shared(self) -> bool:
        """Several ranks train together."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all models, by their names in them; with pipeline stages, those of all stages."""
        ...

    @property
    def is_closed(self) -> bool:
        """The manager is closed."""
        ...

    def send_on_host(self, reader: str) -> None:
        """Say that weights were written: over ranks, those computed with on HOST go to all of them."""
        ...

    def require_open(self) -> None:
        """Raise a `StateError` if the manager is closed."""
        ...

    def add_holder(self, holder: Any) -> None:
        """Know of a `StateHolder` of these parameters, as long as somebody has it."""
        ...

    def drop_holder(self, holder: Any) -> None:
        """Forget it: it has no states any more."""
        ...

    def adopt(self, params: Iterable[torch.Tensor]) -> None:
        """Take in those parameters that were added to models after these were packed; they stay ordinary."""
        ...

    def together(self, call: str) -> AbstractContextManager[None]:
        """Surround a call that all ranks make, by this thread alone."""
        ...

    def forget_plans(self) -> None:
        """Say that there are other chunks than in the steps that were recorded."""
        ...

    def step(self, options: str, *, updates: bool, goes_on: bool = False) -> AbstractContextManager[None]:
        """Surround `step()` and clipping; all ranks come with the same `options`, but one that `goes_on`."""
        ...

    def skip_step(self) -> None:
        """Say that the step changes nothing."""
        ...


class HasOptimizerHost(Protocol):
    """A `chunkmem.ChunkManager`."""

    @property
    def runtime(self) -> OptimizerHost: ...
