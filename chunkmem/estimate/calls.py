"""The log of a rehearsed step: what the model's hooks ask of the pager, of the gradients and of units.

Alone, backward releases chunks in other places than with units. But among several ranks none of it depends on how
many there are, since ranks differ in what is done then. So a model is run once, and the log is replayed for every rank
of any number of them (`chunkmem.estimate.rank_stage`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from chunkmem.data.layout import Layout
from chunkmem.data.trace import Kind, Region
from chunkmem.data.types import ChunkId
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.gradient_slots import GradientSlots
from chunkmem.optim.rule import StateSpec
from chunkmem.optim.speculative import Intent
from chunkmem.ranks.shards import ShardStore
from chunkmem.ranks.units import Unit, Units
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.policy import OnDemand


@dataclass(frozen=True, slots=True)
class Measured:
    """The model since the call before."""

    duration_s: float
    peak_nbytes: int
    """Highest non-model bytes."""
    now_nbytes: int
    """Non-model bytes at its end."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call, and what the model did before it."""

    method: str
    """Of `RankStage`, which serves it; given are `args`."""
    args: tuple[Any, ...]
    with_grad: bool
    """Autograd records: what is exchanged is part of a training step."""
    before: Measured


@dataclass(frozen=True, eq=False)
class StepCalls:
    """All that a step asks for, as plain data."""

    layout: Layout
    calls: tuple[Call, ...]
    units: tuple[Unit, ...]
    """All that have weights; none if the step is that of one process alone."""
    parameters: tuple[ManagedParameter, ...]
    """All that are managed."""
    host_Bps: float
    """Of HOST's memory."""
    regions: tuple[Region, ...]
    """Calls of which is decided whether they are recomputed; their moments are those of `calls`."""
    states: Mapping[ManagedParameter, Sequence[StateSpec]]
    """That the optimizer keeps."""
    in_backward: bool
    """The optimizer updates inside backward."""
    reduce_dtype: torch.dtype
    """See `ExchangeMethod`."""

    @property
    def activations(self) -> dict[ChunkId, Chunk]:
        """The chunks of activations."""
        chunks: list[Chunk] = [call.args[1] for call in self.calls if call.method == "event"]
        return {chunk.id: chunk for chunk in chunks if chunk.id.role.kind.is_of_call}


class CallLog:
    """Takes calls down in their order."""

    def __init__(self, measure: Callable[[], Measured]) -> None:
        """Begin an empty log; `measure` tells of the model since it was last asked."""
        self.calls: list[Call] = []
        self._measure = measure

    def add(self, method: str, *args: object) -> None:
        """Log a call that is about to be served."""
        self.calls.append(Call(method, args, torch.is_grad_enabled(), self._measure()))


class LoggedEvents(OnDemand):
    """The policy of a rehearsed step: nothing is planned, and the events of weights and activations are logged."""

    def __init__(self, log: CallLog) -> None:
        super().__init__()
        self._log = log

    def event(self, kind: Kind, chunk: Chunk, reader: object) -> None:
        if chunk.id.role.kind.is_weights or chunk.id.role.kind.is_of_call:
            self._log.add("event", kind, chunk, str(reader))


class LoggedSlots(GradientSlots):
    """Takes gradients, and logs them."""

    def __init__(self, log: CallLog, pager: Pager, **options: Any) -> None:
        """Begin with none; `options` are those of `GradientSlots`."""
        super().__init__(pager, **options)
        self._log = log

    def land(self, grads: Mapping[ManagedParameter, torch.Tensor], **options: Any) -> None:
        for managed in grads:
            self._log.add("land", managed)
        super().land(grads, **options)


class LoggedOptimizer:
    """Owns the states. Nothing is updated, but where groups may be updated inside backward is logged."""

    def __init__(self, log: CallLog | None, *, in_backward: bool) -> None:
        self.in_backward = in_backward
        self._log = log

    def update_in_backward(self, group: int) -> None:
        """Log that it may be."""
        if self._log is not None:
            self._log.add("update", [group])

    def intent(self, group: int) -> Intent | None:
        """Return that it cannot tell."""
        return None


class LoggedUnits(Units):
    """Divides a model into units as ranks would, and logs when they are entered and left. Nothing is exchanged."""

    def __init__(self, log: CallLog, *, is_alone: bool) -> None:
        """Begin with none; one rank alone has none."""
        super().__init__(None if is_alone else cast(ShardStore, self), None)
        self._log = log

    @property
    def found(self) -> tuple[Unit, ...]:
        """All units that have weights."""
        return tuple(dict.fromkeys(unit for users in self._users.values() for unit in users))

    def enter(self, unit: Unit) -> None:
        self._log.add("unit", "enter", unit)

    def leave(self, unit: Unit) -> None:
        self._log.add("unit", "leave", unit)

    def announce(self, unit: Unit | None) -> None:
        if unit is not None:
            self._log.add("unit", "announce", unit)

    def recompute(self, unit: Unit) -> None:
        self._log.add("unit", "recompute", unit)

    def end_backward(self) -> None:
        self._log.add("unit", "end_backward")
