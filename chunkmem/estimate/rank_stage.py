"""What a rank trains with, over chunks without memory: it does a logged step again, as one of several ranks would."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import cast

import torch

from chunkmem.comm.ranks import Ranks
from chunkmem.estimate.calls import Asked, Call, Measured, StepCalls
from chunkmem.estimate.peers import CountedExchange
from chunkmem.estimate.weightless import WeightlessStore
from chunkmem.layout.spec import digest
from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.gradient_slots import GradientSlots
from chunkmem.nn.gradients import GradientBook
from chunkmem.nn.reduction import Reduction
from chunkmem.optim.adam import AdamRule
from chunkmem.optim.order import in_order_of_update
from chunkmem.optim.room import require_room
from chunkmem.plan.placement import GroupBytes, place_states
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.policy import OnDemand
from chunkmem.runtime.pool import Slab
from chunkmem.runtime.store import NO_CONTENT, Chunk
from chunkmem.shard.shards import ShardStore
from chunkmem.shard.units import Unit, Units
from chunkmem.trace.model import Kind, Mode, Trace
from chunkmem.tracing.recorder import Recorder
from chunkmem.types import ChunkId, Role, Tier

_STATES = AdamRule.all_states


@dataclass(frozen=True)
class Exchanged:
    """Bytes of content between ranks in a step, as one rank sees them."""

    sent_nbytes: int = 0
    received_nbytes: int = 0
    buffered_nbytes: int = 0
    """Highest non-model bytes of exchanges, those within the library included."""


@dataclass(frozen=True)
class Step:
    """One step of a rank."""

    trace: Trace
    exchanged: Exchanged = Exchanged()


class _ReplayedUnits(Units):
    """Units that a rehearsal has found."""

    def __init__(self, shards: ShardStore | None, reduction: Reduction | None, units: Iterable[Unit]) -> None:
        super().__init__(shards, None if reduction is None else lambda: reduction)
        for unit in units:
            for group in unit.groups:
                self._users.setdefault(group, set()).add(unit)


class _Slots(GradientSlots):
    """Gradients that nobody looks at: there is no `.grad` to keep in line."""

    is_shared = False

    def show_reduced(self, managed: ManagedParameter) -> None:
        """Count a mean of gradients that other ranks had."""
        self._landed.setdefault(managed.group, set()).add(managed)

    def _clear_carried(self, managed: ManagedParameter) -> None:
        """There are no values to set to zero."""


class _Home:
    """Stands for the DEVICE side of a PARAM chunk: no parameter is bound to it."""

    is_bound = True

    def attach(self, slab: Slab) -> torch.Tensor:
        return slab.bytes

    def bind(self) -> None:
        pass

    def detach(self) -> None:
        pass

    def take_written(self) -> bool:
        return False


class _Meter:
    """Time and non-model bytes since they were last taken: the model's, as logged, and those of exchanges."""

    def __init__(self) -> None:
        self._duration_s = 0.0
        self._now_nbytes = self._buffered_nbytes = self._peak_nbytes = 0

    def pass_over(self, measured: Measured) -> None:
        """The model did this."""
        self._duration_s += measured.duration_s
        self._now_nbytes = measured.now_nbytes
        self._peak_nbytes = max(self._peak_nbytes, measured.peak_nbytes + self._buffered_nbytes)

    def buffer(self, nbytes: int) -> None:
        """Exchanges take `nbytes` more, or fewer."""
        self._buffered_nbytes += nbytes
        self._peak_nbytes = max(self._peak_nbytes, self._now_nbytes + self._buffered_nbytes)

    def take_peak_nbytes(self) -> int:
        peak, self._peak_nbytes = self._peak_nbytes, self._now_nbytes + self._buffered_nbytes
        return peak

    def take_s(self) -> float:
        duration_s, self._duration_s = self._duration_s, 0.0
        return duration_s


class _TimedRecorder(Recorder):
    """Takes the logged times of a step with its events."""

    def __init__(self, meter: _Meter) -> None:
        super().__init__(Mode.TRAIN, take_peaks=lambda: (meter.take_peak_nbytes(), 0))
        self._meter = meter
        self.passed_s: list[float] = []
        """Before each event, since the one before it."""

    def event(self, kind: Kind, chunk: Chunk, reader: object) -> None:
        self.passed_s.append(self._meter.take_s())
        super().event(kind, chunk, reader)


class RankStage:
    """What a rank trains with, over chunks without memory."""

    def __init__(
        self,
        step: StepCalls,
        ranks: Ranks,
        store: WeightlessStore,
        *,
        is_accelerator: bool,
        margin_use_ratio: float | None = None,
    ) -> None:
        """Pack the model; without `margin_use_ratio`, everything is on DEVICE and stays there."""
        layout, self._calls = step.layout, step.calls
        self._layout = digest([layout])
        self._store = store
        self._pager = Pager(store)
        self._on_device: dict[int, bool] = {}
        self._parameters = cast(list[ManagedParameter], list(step.parameters))
        self._slots = _Slots(self._pager, settles=lambda group: not self._on_device.get(group, True))
        self._meter = _Meter()
        self._exchange = CountedExchange(ranks, layout, is_accelerator=is_accelerator, on_buffer=self._meter.buffer)
        self._reduction: Reduction | None = None
        self._shards: ShardStore | None = None
        if ranks.size > 1:
            self._layout += f" on rank {ranks.rank} of {ranks.size}"
            self._shards = ShardStore(ranks, [self._exchange], self._pager)
            self._reduction = Reduction(self._shards, cast(GradientBook, self._slots), self._pager)
        shards = self._shards
        for group in layout.groups:
            weights = store.add_group(group)
            weights[0].home = _Home()
            for spec in _STATES:
                store.add(spec.chunk(weights[0]))
            for chunk in weights if shards is None or shards.owns(group.id) else ():
                if margin_use_ratio is None:
                    store.create(chunk, Tier.DEVICE, zero=False)
                else:
                    self._pager.place(chunk, reader="packing")
        if shards is not None:
            shards.drop_unowned(group.id for group in layout.groups)
        self._slots.add(self._parameters)
        self._margin_use_ratio = margin_use_ratio
        if margin_use_ratio is not None:
            trained = {m.group for m in self._parameters if m.requires_grad}
            chunks = {group.id: self._chunks(group.id) for group in layout.groups}
            states_nbytes = {
                group: [chunk.nbytes for chunk in found if chunk.id.role.is_state]
                for group, found in chunks.items()
                if not found[0].is_remote
            }
            require_room(trained & states_nbytes.keys(), states_nbytes, store)
        self.units = _ReplayedUnits(shards, self._reduction, step.units)

    def measure_links(self) -> None:
        """Gather the largest unit a few times, as ranks do after their first step."""
        if self._shards is not None and self.units.prefetch is not None:
            self._shards.measure(self.units.prefetch.largest(), time_s=_done_at_once)

    def begin_ahead(self) -> bool:
        """Gather ahead from the next step on, if there is room for it; tell whether there is."""
        prefetch = self.units.prefetch
        assert prefetch is not None
        prefetch.is_wanted = prefetch.has_room
        return prefetch.is_wanted

    def step(self) -> Step:
        """Do one step, and write it down."""
        self._pager.policy = recorder = _TimedRecorder(self._meter)
        traffic = self._exchange.traffic
        before, traffic.peak_buffered_nbytes = replace(traffic), traffic.buffered_nbytes
        self.units.begin_root(grad_enabled=True)
        for call in self._calls:
            self._meter.pass_over(call.before)
            with torch.set_grad_enabled(call.with_grad):
                self._serve(call)
        recorder.end()
        durations_s = [*recorder.passed_s, self._meter.take_s()]
        # What passed before the first event is forward's own beginning.
        first_s, *durations_s = durations_s
        durations_s[0] += first_s
        trace = recorder.trace(self._layout, self._store.chunks)
        timed = zip(trace.moments, durations_s, strict=True)
        trace = replace(trace, moments=tuple(replace(moment, duration_s=s) for moment, s in timed))
        self._pager.policy = OnDemand()
        self.units.end_step()
        sent, received = traffic.sent_nbytes - before.sent_nbytes, traffic.received_nbytes - before.received_nbytes
        return Step(trace, Exchanged(sent, received, traffic.peak_buffered_nbytes))

    def _place_states(self, margin_use_ratio: float) -> None:
        """Decide where groups are updated, as an optimizer does in its first step."""
        chunks = self._store.chunks.items()
        own = [key.group for key, chunk in chunks if key.role is Role.PARAM and not chunk.is_remote]
        sizes = []
        for group in own:
            nbytes = {chunk.id.role: chunk.nbytes for chunk in self._chunks(group)}
            model_nbytes = nbytes[Role.PARAM] + nbytes[Role.GRAD]
            sizes.append(GroupBytes(group, model_nbytes, sum(nbytes.values()) - model_nbytes))
        cap_nbytes = self._store.pools[Tier.DEVICE].ledger.cap_nbytes
        chosen = place_states(sizes, cap_nbytes=cap_nbytes, margin_use_ratio=margin_use_ratio)
        self._on_device = {group: group in chosen for group in own}

    def _tier_for_states(self, chunk: Chunk) -> Tier:
        free_nbytes = self._store.pools[Tier.HOST].ledger.free_nbytes
        is_there = self._on_device.get(chunk.id.group, True) or free_nbytes < chunk.nbytes
        return Tier.DEVICE if is_there else Tier.HOST

    def _chunks(self, group: int) -> list[Chunk]:
        """Return a group's chunks as an update takes them."""
        roles = (Role.PARAM, Role.GRAD, Role.MASTER, *(spec.role for spec in _STATES))
        return [self._store.chunks[key] for role in roles if (key := ChunkId(role, group)) in self._store.chunks]

    def _serve(self, call: Call) -> None:
        subject = call.subject
        if isinstance(subject, int):
            chunk = self._store.chunks[ChunkId(Role.PARAM, subject)]
            if call.asked is Asked.PIN:
                self._pager.pin(chunk, Tier.DEVICE, reader=call.reader)
            else:
                self._pager.unpin(chunk, Tier.DEVICE)
        elif isinstance(subject, Unit):
            if self._reduction is not None:  # alone, there are no units
                by_name = {Asked.ENTER: self.units.enter, Asked.LEAVE: self.units.leave}
                by_name.get(call.asked, self.units.announce)(subject)
        elif subject is not None:
            self._slots.land(cast(ManagedParameter, subject), _NOTHING, replacing=True)
        elif call.asked is Asked.END_BACKWARD:
            self.units.end_backward()
        else:
            self._update()

    def _update(self) -> None:
        """Do what `optimizer.step()` does: reduce what has not been, make states, update, use the gradients up."""
        slots = self._slots
        if self._reduction is not None:
            self._reduction.reduce(self._parameters)
        if self._margin_use_ratio is not None and not self._on_device:
            self._place_states(self._margin_use_ratio)
        groups = [group for group, landed in slots.landed.items() if landed]
        for group in dict.fromkeys(m.group for m in self._parameters if m in slots.landed.get(m.group, ())):
            for chunk in self._chunks(group):
                if chunk.id.role.is_state and chunk.version == NO_CONTENT:
                    tier = self._tier_for_states(chunk)
                    self._pager.create(chunk, tier, reader="optimizer states", zero=True, elastic=True)
        for group in in_order_of_update(groups, landing=groups):
            chunks, home = self._chunks(group), Tier.DEVICE if self._on_device.get(group, True) else Tier.HOST
            with self._pager.updating(chunks, reader="optimizer step", stateless_tier=home) as tier:
                for chunk in self._chunks(group):
                    if chunk.id.role is not Role.GRAD:
                        self._store.mark_written(chunk, tier)
            slots.forget(set(slots.landed[group]))
        slots.forget(self._parameters)  # as `zero_grad` does: frozen ones have zeros, which were reduced with others


def _done_at_once(work: Callable[[], object]) -> float:
    work()
    return 0.0


_NOTHING = torch.empty(0, device="cpu")
