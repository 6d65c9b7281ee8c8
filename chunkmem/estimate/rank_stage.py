"""What a rank trains with, over chunks without memory: it does a logged step again, as one of several ranks would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from chunkmem.activations.region_chunks import activation_chunk
from chunkmem.assembly.parts import Memory, make_training, make_update_parts
from chunkmem.data.layout import Layout, digest
from chunkmem.data.layout_pack import dealt
from chunkmem.data.trace import Kind, Mode, Moments, Region, Trace
from chunkmem.data.types import Role, Tier
from chunkmem.estimate.calls import LoggedOptimizer, Measured, StepCalls
from chunkmem.estimate.peers import CountedInRam, CountedOverLibrary, Unison
from chunkmem.estimate.weightless import ANYTHING
from chunkmem.modules.binding import ManagedParameter
from chunkmem.optim.adam_rule import AdamRule
from chunkmem.optim.order import in_order_of_update
from chunkmem.optim.speculative import Intent
from chunkmem.ranks.exchange import Traffic
from chunkmem.ranks.exchange_speed import measure_exchanges
from chunkmem.ranks.ranks import Ranks
from chunkmem.ranks.units import Unit
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.lanes import BlockingLanes
from chunkmem.runtime.policy import OnDemand
from chunkmem.runtime.timestamps import HostClock
from chunkmem.steps.recorder import Recorder


@dataclass(frozen=True)
class Step:
    """One step of a rank."""

    trace: Trace
    exchanged: Traffic
    """Bytes of content between ranks, as this one sees them; what the library buffers is counted, too."""
    on_host_nbytes: Counter[Role] = field(default_factory=Counter)
    """Of modules that compute on HOST, and so in no trace."""


@dataclass(frozen=True)
class RankSteps:
    """The steps of a rank that differ from each other."""

    first: Step
    """Nobody knows which backward is the last one, so gradients are reduced when the optimizer steps."""
    later: Step
    has_room: bool = False
    """Later ones hold more than one unit at a time."""


class _Meter:
    """Time and non-model bytes of moments: the model's, as logged, and those of exchanges."""

    def __init__(self) -> None:
        self.moments_s: list[float] = []
        """Of the step; what passed before its first moment comes first."""
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

    def end_moment(self) -> tuple[int, int]:
        """Note the time of a moment; return its peak of non-model bytes, and none as sampled."""
        self.moments_s.append(self._duration_s)
        peak_nbytes = self._peak_nbytes
        self._duration_s, self._peak_nbytes = 0.0, self._now_nbytes + self._buffered_nbytes
        return peak_nbytes, 0


class _MeteredTraffic(Traffic):
    """Of a step; what exchanges buffer is non-model data."""

    def __init__(self, meter: _Meter) -> None:
        super().__init__()
        self._meter = meter

    def buffer(self, nbytes: int) -> None:
        super().buffer(nbytes)
        self._meter.buffer(nbytes)


class RankStage:
    """What a rank trains with, over chunks that are only counted. Modules are not there: a log tells what they do."""

    def __init__(
        self,
        step: StepCalls,
        rank: int,
        world: int,
        memory: Memory,
        *,
        is_accelerator: bool,
        is_accumulating: bool,
        margin_use_ratio: float = 0.0,
    ) -> None:
        """Pack the model.

        Args:
            step: what a rehearsal has logged.
            rank: which one of `world` ranks, each with the batch of the rehearsal.
            world: their number.
            memory: that only counts.
            is_accelerator: what DEVICE is; it decides how chunks are exchanged.
            is_accumulating: `manager.accumulate(1)` was called: the first backward is known to be the last one, too.
            margin_use_ratio: see `first_residents`.

        Raises:
            CapacityError: there is no room for the weights, or for what training adds to them.
        """
        self._log, ranks = step, Ranks(Unison(rank, world))
        self._memory, self._pager, self._store = memory, memory.pager, memory.store
        self._meter = _Meter()
        self._exchange = (CountedOverLibrary if is_accelerator else CountedInRam)(ranks.shard)
        self._exchange.reduce_dtype = step.reduce_dtype
        gradients, self._sharding, self._updater = make_training(
            memory,
            ranks,
            [self._exchange],
            make_update_parts(memory.store, memory.compute, BlockingLanes(memory.compute)),
            margin_use_ratio=margin_use_ratio,
        )
        self._gradients, self._slots, self._units = gradients, gradients.slots, self._sharding.units
        self._layout = digest([step.layout])
        if world > 1:
            self._layout += f" on rank {rank} of {world}"
        self._optimizer = LoggedOptimizer(None, in_backward=step.in_backward)
        self._rule = AdamRule(self._updater.native, decoupled=True)
        self._pack(dealt(step.layout, num_ranks=world))
        self._has_states: set[int] = set()
        self._num_steps = 0
        if is_accumulating:
            self._units.backwards.declare(1)

    def _pack(self, layout: Layout) -> None:
        step, packer, shards = self._log, self._memory.packer(()), self._sharding.shards
        by_tensor = {managed.slot.tensor: managed for managed in step.parameters}
        for group in layout.groups:
            inside = [by_tensor[slot.tensor] for slot in group.slots]
            forms = tuple((managed.shape, managed.stride) for managed in inside)
            is_own = shards is None or shards.ranks.shard.rank == group.owner
            packer.make_chunks(group, [managed.name for managed in inside], forms, is_own=is_own)
        if shards is not None:
            shards.drop_unowned(group.id for group in layout.groups)
        for key, chunk in step.activations.items():
            self._store.add(activation_chunk(key.group, chunk.label, chunk.nbytes))
        self._gradients.add(step.parameters)
        self._units.add(step.units)
        self._updater.state_chunks.require_room(step.states, self._optimizer)
        self._updater.claim(step.states, self._optimizer, forget_plans=lambda: None)

    def steps(self) -> RankSteps:
        """Do the first steps: until nothing changes, if the rank trains alone."""
        first, prefetch = self.step(), self._units.prefetch
        if prefetch is None:
            return RankSteps(first, first)
        has_room = prefetch.has_room or bool(prefetch.staying)
        return RankSteps(first, self.step(), has_room)

    def step(self) -> Step:
        """Do one step, and write it down.

        Raises:
            CapacityError: room cannot be made under the caps.
        """
        shards, prefetch = self._sharding.shards, self._units.prefetch
        if self._num_steps == 1 and shards is not None and prefetch is not None:
            # As ranks do after their first step.
            measure_exchanges(shards, self._pager, prefetch.together(), time_s=self._memory.compute.time_s)
        self._num_steps += 1
        self._meter.moments_s.clear()
        self._exchange.traffic = _MeteredTraffic(self._meter)
        recorder = Recorder(Mode.TRAIN, clock=HostClock(), take_peaks=self._meter.end_moment)
        self._pager.policy = recorder
        self._units.begin_root(grad_enabled=True)
        places = []
        """By index of a call: how many moments there are then."""
        for call in self._log.calls:
            places.append(recorder.num_moments)
            self._meter.pass_over(call.before)
            with torch.set_grad_enabled(call.with_grad):
                getattr(self, call.method)(*call.args)
        recorder.end()
        # What passed before the first moment is forward's own beginning.
        first_s, *durations_s = self._meter.moments_s
        durations_s[0] += first_s
        regions = tuple(_moved(region, [*places, recorder.num_moments]) for region in self._log.regions)
        trace = recorder.trace(self._layout, self._store.chunks, regions)
        timed = zip(trace.moments, durations_s, strict=True)
        trace = replace(trace, moments=tuple(replace(moment, duration_s=s) for moment, s in timed))
        self._pager.policy = OnDemand()
        self._units.end_step()
        return Step(trace, self._exchange.traffic, self._store.kept_nbytes(Tier.HOST))

    # What calls of the log ask for.

    def event(self, kind: Kind, logged: Chunk, reader: str) -> None:
        """Weights on DEVICE are held or released, or activations are created, held, released or consumed."""
        chunk = self._store.chunks[logged.id]
        if kind is Kind.HOLD:
            self._pager.pin(chunk, reader=reader)
        elif kind is Kind.RELEASE:
            self._pager.unpin(chunk)
        elif kind is Kind.CREATE:
            self._pager.create(chunk, Tier.DEVICE, reader=reader, zero=False)
        else:
            self._pager.consume(chunk)
            if Tier.DEVICE in chunk.replicas:
                self._store.drop(chunk, Tier.DEVICE)

    def land(self, managed: ManagedParameter) -> None:
        """A gradient is final for this backward."""
        self._slots.land({managed: ANYTHING})

    def unit(self, method: str, *args: Unit) -> None:
        """A call of a unit begins or ends, backward continues in one, or is over: a method of `Units`."""
        if self._sharding.reduction is not None:  # alone, there are no units
            getattr(self._units, method)(*args)

    def end_step(self) -> None:
        """Do what `optimizer.step()` does: reduce what has not been, make states, update, use the gradients up."""
        slots = self._slots
        if self._sharding.reduction is not None:
            self._sharding.reduction.reduce(self._log.parameters, is_step=True)
        self.update([group for group, landed in slots.landed.items() if landed])
        if self._sharding.shards is not None:
            trained = {managed.group for managed in self._log.parameters if managed.requires_grad}
            self._sharding.shards.send_on_host(trained, reader="updated weights on HOST")
        # As `zero_grad` does: frozen ones have zeros, which were reduced with others.
        slots.forget(self._log.parameters)

    def update(self, groups: Sequence[int]) -> None:
        """Make states, update groups, and use their gradients up."""
        slots, updater = self._slots, self._updater
        updater.place(filter(self._sharding.owns, self._log.parameters))
        updated = [m for group in groups for m in slots.groups[group].members if m in slots.landed[group]]
        roles = {spec.role for managed in updated for spec in self._log.states[managed]}
        for managed in updated:
            if managed.group not in self._has_states:
                self._has_states.add(managed.group)
                updater.make_states([managed], roles)
        updater.complete_states(updated)
        for group in in_order_of_update(groups, landing=groups):
            updater.update(group, Intent(self._rule, (), None))  # of no parameter: nothing is computed
            if updater.is_on_host(group):
                moved_nbytes = 2 * sum(chunk.nbytes for chunk in updater.state_chunks.chunks(group))
                self._meter.wait(moved_nbytes / self._log.host_Bps)
            slots.forget(set(slots.landed[group]))


def _moved(region: Region, places: Sequence[int]) -> Region:
    """Return a region of calls as one of moments."""

    def moved(span: Moments) -> Moments:
        return places[span[0]], places[span[1]]

    again = None if region.recomputed is None else moved(region.recomputed)
    return replace(region, forward=moved(region.forward), backward=moved(region.backward), recomputed=again)
