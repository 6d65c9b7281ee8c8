"""What a rank trains with, over chunks without memory: it does a logged step again, as one of several ranks would."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch

from chunkmem.assembly.parts import Memory, make_sharding, make_shards, make_update_parts, make_updater
from chunkmem.comm.ranks import Ranks
from chunkmem.estimate.calls import Asked, Call, Measured, StepCalls
from chunkmem.estimate.peers import CountedExchange
from chunkmem.layout.spec import digest
from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.gradient_slots import GradientSlots
from chunkmem.nn.gradients import GradientBook
from chunkmem.nn.region_chunks import activation_chunk
from chunkmem.optim.adam_rule import AdamRule
from chunkmem.optim.order import in_order_of_update
from chunkmem.optim.places import StatePlaces
from chunkmem.optim.rule import StateSpec
from chunkmem.optim.speculative import Intent
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.lanes import BlockingLanes
from chunkmem.runtime.policy import OnDemand
from chunkmem.runtime.timestamps import HostClock
from chunkmem.shard.units import Unit, Units
from chunkmem.trace.model import Kind, Mode, Moments, Region, Trace
from chunkmem.tracing.recorder import Recorder
from chunkmem.types import Role, Tier


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
    on_host_nbytes: Mapping[Role, int] = field(default_factory=dict)
    """Of modules that compute on HOST, and so in no trace."""


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

    def wait(self, duration_s: float) -> None:
        """HOST does something that everything waits for."""
        self._duration_s += duration_s

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
        super().__init__(Mode.TRAIN, clock=HostClock(), take_peaks=lambda: (meter.take_peak_nbytes(), 0))
        self._meter = meter
        self.passed_s: list[float] = []
        """Before each event, since the one before it."""

    def event(self, kind: Kind, chunk: Chunk, reader: object) -> None:
        self.passed_s.append(self._meter.take_s())
        super().event(kind, chunk, reader)


class _Optimizer:
    """Owns the states; nothing is updated before its step, or all groups inside backward."""

    def __init__(self, update: Callable[[int], None], *, in_backward: bool) -> None:
        self.in_backward = in_backward
        self.update_in_backward = update

    def intent(self, group: int) -> Intent | None:
        """Return that it cannot tell."""
        return None


class RankStage:
    """What a rank trains with, over chunks that are only counted. Modules are not there: a log tells what they do."""

    def __init__(
        self,
        step: StepCalls,
        ranks: Ranks,
        memory: Memory,
        *,
        is_accelerator: bool,
        margin_use_ratio: float = 0.0,
    ) -> None:
        """Pack the model; `margin_use_ratio` is as for `first_residents`.

        Raises:
            CapacityError: there is no room for the weights, or for what training adds to them.
        """
        self._calls, self._regions = step.calls, step.regions
        self._activations = {n: activation_chunk(n, kept.label, kept.nbytes) for n, kept in step.activations.items()}
        """By group."""
        self._host_Bps = step.host_Bps
        kept = dict.fromkeys(step.parameters, step.states) if step.kept is None else step.kept
        self._states = cast(Mapping[ManagedParameter, tuple[StateSpec, ...]], kept)
        self._pager, self._store = memory.pager, memory.store
        self._parameters = cast(list[ManagedParameter], list(step.parameters))
        self._meter = _Meter()
        self._exchange = CountedExchange(
            ranks, step.layout, is_accelerator=is_accelerator, on_buffer=self._meter.buffer
        )
        places = StatePlaces(memory.store, memory.caps, margin_use_ratio=margin_use_ratio)
        parts = make_update_parts(memory.store, memory.compute, BlockingLanes(memory.compute))
        self._slots = GradientSlots(memory.pager, settles=places.updates_on_host, landed=parts.landed)
        shards = make_shards(memory, ranks, [self._exchange])
        self._sharding = make_sharding(memory, ranks, shards, self._slots)
        gradients = cast(GradientBook, self._slots)  # there is no `.grad` to keep in line
        self._updater = make_updater(memory, gradients, places, parts)
        self._layout = digest([step.layout])
        if ranks.size > 1:
            self._layout += f" on rank {ranks.rank} of {ranks.size}"
        self._optimizer = _Optimizer(lambda group: self._update([group]), in_backward=step.in_backward)
        if step.in_backward:
            self._updater.in_backward.optimizers.add(self._optimizer)
        self._rule = AdamRule(self._updater.native, decoupled=True)
        self._pack(step, memory)
        self._has_states: set[int] = set()

    @property
    def units(self) -> Units:
        """Of exchange."""
        return self._sharding.units

    def _pack(self, step: StepCalls, memory: Memory) -> None:
        packer, shards = memory.packer(step.states), self._sharding.shards
        names = {managed.slot.tensor: managed.name for managed in self._parameters}
        for group in step.layout.groups:
            inside = [names[slot.tensor] for slot in group.slots]
            packer.make_chunks(group, inside, is_own=shards is None or shards.owns(group.id))
        if shards is not None:
            shards.drop_unowned(group.id for group in step.layout.groups)
        for chunk in self._activations.values():
            self._store.add(chunk)
        self._slots.add(self._parameters)
        self.units.add(step.units)
        self._updater.claims.require_room(self._states, self._optimizer)
        self._updater.claim(self._states, self._optimizer, forget_plans=lambda: None)

    def measure_links(self) -> None:
        """Gather the largest unit a few times, as ranks do after their first step."""
        if self._sharding.shards is not None and self.units.prefetch is not None:
            self._sharding.shards.measure(self.units.prefetch.largest(), time_s=_done_at_once)

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
        places = []
        """By index of a call: how many moments there are then."""
        for call in self._calls:
            places.append(recorder.num_moments)
            self._meter.pass_over(call.before)
            with torch.set_grad_enabled(call.with_grad):
                self._serve(call)
        recorder.end()
        durations_s = [*recorder.passed_s, self._meter.take_s()]
        # What passed before the first event is forward's own beginning.
        first_s, *durations_s = durations_s
        durations_s[0] += first_s
        regions = tuple(_moved(region, [*places, recorder.num_moments]) for region in self._regions)
        trace = recorder.trace(self._layout, self._store.chunks, regions)
        timed = zip(trace.moments, durations_s, strict=True)
        trace = replace(trace, moments=tuple(replace(moment, duration_s=s) for moment, s in timed))
        self._pager.policy = OnDemand()
        self.units.end_step()
        sent, received = traffic.sent_nbytes - before.sent_nbytes, traffic.received_nbytes - before.received_nbytes
        exchanged = Exchanged(sent, received, traffic.peak_buffered_nbytes)
        return Step(trace, exchanged, self._store.kept_nbytes(Tier.HOST))

    def _serve(self, call: Call) -> None:
        subject = call.subject
        if isinstance(subject, int):
            chunk = self._activations.get(subject) or self._store.weights(subject)
            if call.asked is Asked.PIN:
                self._pager.pin(chunk, chunk.compute_tier, reader=call.reader)
            elif call.asked is Asked.UNPIN:
                self._pager.unpin(chunk, chunk.compute_tier)
            elif call.asked is Asked.CREATE:
                self._pager.create(chunk, Tier.DEVICE, reader=call.reader, zero=False)
            else:
                self._pager.consume(chunk)
                if Tier.DEVICE in chunk.replicas:
                    self._store.drop(chunk, Tier.DEVICE)
        elif isinstance(subject, Unit):
            if self._sharding.reduction is not None:  # alone, there are no units
                by_name = {
                    Asked.ENTER: self.units.enter,
                    Asked.LEAVE: self.units.leave,
                    Asked.RECOMPUTE: self.units.recompute,
                }
                by_name.get(call.asked, self.units.announce)(subject)
        elif call.asked is Asked.LANDED:
            self._updater.in_backward.landed(cast(ManagedParameter, subject), {})
        elif subject is not None:
            self._slots.land(cast(ManagedParameter, subject), _NOTHING, replacing=True)
        elif call.asked is Asked.END_BACKWARD:
            self.units.end_backward()
        else:
            self._end_step()

    def _end_step(self) -> None:
        """Do what `optimizer.step()` does: reduce what has not been, make states, update, use the gradients up."""
        slots = self._slots
        if self._sharding.reduction is not None:
            self._sharding.reduction.reduce(self._parameters, is_step=True)
        self._update([group for group, landed in slots.landed.items() if landed])
        if self._sharding.shards is not None:
            trained = {managed.group for managed in self._parameters if managed.requires_grad}
            self._sharding.shards.send_on_host(trained, reader="updated weights on HOST")
        slots.forget(self._parameters)  # as `zero_grad` does: frozen ones have zeros, which were reduced with others

    def _update(self, groups: Sequence[int]) -> None:
        """Make states, update groups, and use their gradients up."""
        slots, updater = self._slots, self._updater
        updater.place(filter(self._sharding.owns, self._parameters))
        updated = [managed for group in groups for managed in slots.members[group] if managed in slots.landed[group]]
        roles = {spec.role for managed in updated for spec in self._states[managed]}
        for managed in updated:
            if managed.group not in self._has_states:
                self._has_states.add(managed.group)
                updater.make_states([managed], roles)
        updater.complete_states(updated)
        for group in in_order_of_update(groups, landing=groups):
            updater.update(group, (), self._rule)  # of no parameter: nothing is computed
            if updater.is_on_host(group):
                moved_nbytes = 2 * sum(chunk.nbytes for chunk in updater.claims.chunks(group))
                self._meter.wait(moved_nbytes / self._host_Bps)
            slots.forget(set(slots.landed[group]))


def _moved(region: Region, places: Sequence[int]) -> Region:
    """Return a region of calls as one of moments."""

    def moved(span: Moments) -> Moments:
        return places[span[0]], places[span[1]]

    again = None if region.recomputed is None else moved(region.recomputed)
    return replace(region, forward=moved(region.forward), backward=moved(region.backward), recomputed=again)


def _done_at_once(work: Callable[[], object]) -> float:
    work()
    return 0.0


_NOTHING = torch.empty(0, device="cpu")
