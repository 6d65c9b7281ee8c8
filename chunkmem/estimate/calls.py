"""The log of a rehearsed step: what the model's hooks ask of the pager, of the gradients and of units.

Alone, backward releases chunks in other places than with units. But among several ranks none of it depends on how
many there are, since ranks differ in what is done then. So a model is run once, and the log is replayed for every rank
of any number of them (`chunkmem.estimate.rank_stage`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from chunkmem.layout.spec import Layout
from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.gradient_slots import GradientSlots
from chunkmem.optim.rule import StateSpec
from chunkmem.optim.speculative import Intent
from chunkmem.runtime.chunk import Chunk, Replica
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.store import ChunkStore
from chunkmem.shard.shards import ShardStore
from chunkmem.shard.units import Unit, Units
from chunkmem.trace.model import Region
from chunkmem.types import ChunkId, Tier


class Asked(enum.Enum):
    """What a call asks for."""

    PIN = "pin"
    """The weights of a group, or a chunk of activations, stay on DEVICE until UNPIN."""
    UNPIN = "unpin"
    CREATE = "create"
    """A chunk of activations begins to have content."""
    CONSUME = "consume"
    """Its content is used up."""
    LAND = "land"
    """A gradient is final for this backward."""
    UPDATE = "update"
    """A group is updated inside backward."""
    ENTER = "enter"
    """A call of a unit begins."""
    LEAVE = "leave"
    ANNOUNCE = "announce"
    """Backward continues in a unit."""
    RECOMPUTE = "recompute"
    """A unit's forward runs again in backward."""
    END_BACKWARD = "end backward"
    STEP = "step"
    """The optimizer steps."""

    __hash__ = object.__hash__


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

    asked: Asked
    subject: int | Chunk | ManagedParameter | Unit | None
    """The group, the chunk, the parameter or the unit concerned."""
    reader: str
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

    @property
    def activations(self) -> dict[ChunkId, Chunk]:
        """The chunks of activations."""
        created = (call.subject for call in self.calls if call.asked is Asked.CREATE)
        return {chunk.id: chunk for chunk in created if isinstance(chunk, Chunk)}


class CallLog:
    """Takes calls down in their order."""

    def __init__(self, measure: Callable[[], Measured]) -> None:
        """Begin an empty log; `measure` tells of the model since it was last asked."""
        self.calls: list[Call] = []
        self._measure = measure

    def add(
        self, asked: Asked, subject: int | Chunk | ManagedParameter | Unit | None = None, *, reader: object = ""
    ) -> None:
        """Log a call that is about to be served."""
        self.calls.append(Call(asked, subject, str(reader), torch.is_grad_enabled(), self._measure()))


class LoggedPager(Pager):
    """Serves accesses, and logs those to weights and activations on DEVICE."""

    def __init__(self, store: ChunkStore, *, log: CallLog) -> None:
        super().__init__(store)
        self.log = log

    def pin(self, chunk: Chunk, tier: Tier | None = None, *, reader: object, elastic: bool = False) -> Replica:
        if _is_logged(chunk):
            self.log.add(Asked.PIN, chunk, reader=reader)
        return super().pin(chunk, tier, reader=reader, elastic=elastic)

    def unpin(self, chunk: Chunk, tier: Tier | None = None) -> None:
        if _is_logged(chunk):
            self.log.add(Asked.UNPIN, chunk)
        super().unpin(chunk, tier)

    def create(self, chunk: Chunk, tier: Tier, *, reader: object, zero: bool, **options: Any) -> Replica:
        if chunk.id.role.kind.is_of_call:
            self.log.add(Asked.CREATE, chunk, reader=reader)
        return super().create(chunk, tier, reader=reader, zero=zero, **options)

    def consume(self, chunk: Chunk) -> None:
        if chunk.id.role.kind.is_of_call:
            self.log.add(Asked.CONSUME, chunk)
        super().consume(chunk)


def _is_logged(chunk: Chunk) -> bool:
    return chunk.id.role.kind.is_weights or chunk.id.role.kind.is_of_call


class LoggedSlots(GradientSlots):
    """Takes gradients, and logs them."""

    def __init__(self, log: CallLog, pager: Pager, **options: Any) -> None:
        """Begin with none; `options` are those of `GradientSlots`."""
        super().__init__(pager, **options)
        self._log = log

    def land(self, managed: ManagedParameter, grad: torch.Tensor, *, replacing: bool = False) -> None:
        self._log.add(Asked.LAND, managed)
        super().land(managed, grad, replacing=replacing)


class LoggedOptimizer:
    """Owns the states. Nothing is updated, but where groups may be updated inside backward is logged."""

    def __init__(self, log: CallLog | None, *, in_backward: bool) -> None:
        self.in_backward = in_backward
        self._log = log

    def update_in_backward(self, group: int) -> None:
        """Log that it may be."""
        if self._log is not None:
            self._log.add(Asked.UPDATE, group)

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
        self._log.add(Asked.ENTER, unit)

    def leave(self, unit: Unit) -> None:
        self._log.add(Asked.LEAVE, unit)

    def announce(self, unit: Unit | None) -> None:
        if unit is not None:
            self._log.add(Asked.ANNOUNCE, unit)

    def recompute(self, unit: Unit) -> None:
        self._log.add(Asked.RECOMPUTE, unit)

    def end_backward(self) -> None:
        self._log.add(Asked.END_BACKWARD)
