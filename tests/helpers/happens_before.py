"""Find missing waits in any single run, however early or late copies and computing are.

[Note: Happens before] A race shows in results only if a copy or the computing is late at the wrong time. This checker
does not look at results. It follows who has to be done before whom, and reports two accesses to the same memory that
nothing orders, whatever happened to come first.

The model. Five actors work, each in its own order: HOST, the thread that runs the training loop, autograd and every
decision; COMPUTE, an accelerator's stream; the lanes H2D and D2H; and HOST_UPDATE. Everything is really done at once
and in RAM, in the order in which it is issued, which is one of the orders that a sound program allows; only the clocks
are late. An actor has a vector clock: for every actor, how many of its operations are over for certain. The edges,
which join clocks, are

    launch    HOST to COMPUTE, H2D, D2H, HOST_UPDATE: what is issued comes after all HOST knew then
    after     event to lane: a copy or an update comes after the events it is given
    stream    event to COMPUTE: `compute_waits`
    wait      event to HOST (to HOST_UPDATE inside of its work): `Event.wait`, and `drain` for all but COMPUTE
    blocking  COMPUTE to HOST: an operator that copies between the tiers, or returns a number rather than a tensor

`done()` is true only of what HOST has waited for: nothing is ordered by luck.

    HOST     issue A ── issue B(after A) ── compute_waits(B) ── launch C
    H2D          └── A ─┐                                            │
    D2H                 └── B(after A) ──────────┐                   │
    COMPUTE                                      └───────────────────C     without the wait B and C race

A dispatch mode sees every operator, those of the runtime included, with what it reads and writes by its schema. An
operator that touches memory of DEVICE is COMPUTE's; one that touches HOST alone is of the actor that calls it. Slabs
are in cells of 64 bytes, so parameters of one chunk do not conflict. Memory of DEVICE counts as written by COMPUTE
when it is allocated and when it is given up: torch's allocator orders its reuse on the stream that computes alone.

What it cannot see: memory other than slabs (activations, tensors of users); operators inside of tensor subclasses that
take themselves apart, unless the runtime runs them; several computing streams or threads of autograd; exchanges
between ranks; how CUDA's own streams and events behave, as lanes here only stand for them. A view counts from its
first byte to its last. Waits of users (`loss.item()`) order nothing here: the runtime must not rely on them.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from chunkmem.optim.kernels import load_kernels
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import Lane
from chunkmem.runtime.device import ComputeDevice, runtime_mode
from chunkmem.runtime.events import COPY_LANES, Event
from chunkmem.runtime.lanes import BlockingLanes
from chunkmem.runtime.pool import DevicePool, HostArena, Slab
from chunkmem.types import Tier
from tests.helpers.vector_clocks import Actor, Clock, Race, ShadowMemory, VectorClocks

_ACTORS = {lane: Actor[lane.name] for lane in (*COPY_LANES, Lane.HOST_UPDATE)}
_WITHOUT_MEMORY = frozenset(
    f"aten::{name}"
    for name in ("set_", "is_set_to", "resize_", "empty", "empty_strided", "detach", "detach_", "requires_grad_")
)
"""Operators that touch no element, whatever their schemas say."""


SLOW = Machine(0, 0, h2d_Bps=6e6, d2h_Bps=6e6, charges_non_model=True, one_processor=False)
"""A copy of a slab takes as long as some moments of a small model: a plan has to prefetch. Caps are a manager's own."""


class HappensBefore:
    """While it is entered, managers are made for an accelerator that is simulated in RAM, and everything is watched.

    Managers take `lanes` as `make_lanes`.
    """

    def __init__(self) -> None:
        self.clocks = VectorClocks()
        self.memory = ShadowMemory(self.clocks)
        self.caller = Actor.HOST
        """Who runs what touches memory of HOST alone."""
        self._lane: Actor | None = None
        """Who runs all operators at present, if it is a copy."""
        self.runtime_depth = 0
        """How many `runtime_mode` are open: operators are the runtime's own, not a user's."""
        self._computed = _Storages()
        """What the runtime has had COMPUTE make of chunks, such as norms."""
        self._observer = _Observer(self)

    def __enter__(self) -> Self:
        self._entered = contextlib.ExitStack()
        patch = self._entered.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(ComputeDevice, "default", lambda index=None: SimulatedAccelerator())
        patch.setattr("chunkmem.assembly.load_kernels", lambda **_: load_kernels())
        patch.setattr("chunkmem.assembly.cached_machine", lambda compute, caps: SLOW)
        patch.setattr("chunkmem.runtime.tiers.DevicePool", lambda *args, **keys: _DeviceSlabs(self, *args, **keys))
        patch.setattr("chunkmem.runtime.tiers.HostArena", lambda *args, **keys: _HostSlabs(self, *args, **keys))
        _observe_runtime(self, self._observer, patch)
        self._entered.enter_context(self._observer)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def lanes(self, _compute: object = None) -> ClockedLanes:
        """Return lanes whose order is followed."""
        return ClockedLanes(self)

    @property
    def races(self) -> list[Race]:
        return self.memory.races

    def kinds(self) -> Counter[tuple[str, str, str]]:
        """Return how many races there are of each kind."""
        return Counter(race.kind for race in self.races)

    def assert_ordered(self) -> None:
        """Assert that a good deal was seen, and that there was no race."""
        assert self.memory.num_accesses > 0, "nothing was seen"
        assert not self.races, "\n".join(f"{count} x {' | '.join(kind)}" for kind, count in self.kinds().items())

    # What the parts below tell.

    def launch(self, actor: Actor, label: str, *, after: Sequence[Clock] = ()) -> Any:
        """Begin an operation that HOST, or who acts for it, issues."""
        if actor is not self.caller:
            self.clocks.wait(actor, self.clocks.of(self.caller))
        for clock in after:
            self.clocks.wait(actor, clock)
        return self.clocks.begin(actor, label)

    def event(self, actor: Actor, label: str) -> ClockedEvent:
        """Return the end of all that an actor has been given so far."""
        self.launch(actor, label)
        return ClockedEvent(self, actor, self.clocks.now(actor))

    @contextlib.contextmanager
    def copying(self, actor: Actor) -> Iterator[None]:
        """Surround the operators of a copy."""
        self._lane = actor
        try:
            yield
        finally:
            self._lane = None

    @contextlib.contextmanager
    def calling(self, actor: Actor) -> Iterator[None]:
        """Surround what another thread would run."""
        before, self.caller = self.caller, actor
        try:
            yield
        finally:
            self.caller = before

    def ran(self, label: str, reads: Sequence[Any], writes: Sequence[Any], results: Sequence[Any]) -> None:
        """An operator has run; the arguments are its name and tensors."""
        spans = [[span for tensor in tensors if (span := _span(tensor))] for tensors in (reads, writes)]
        tiers = {self.memory.name(address) for each in spans for address, _ in each} - {None}
        of_compute = Tier.DEVICE.name in tiers or (self.runtime_depth and any(map(self._computed.has, reads)))
        if of_compute and self.runtime_depth and self._lane is None:
            self._computed.add(results)
        if tiers:
            actor = (Actor.COMPUTE if of_compute else self.caller) if self._lane is None else self._lane
            operation = self.launch(actor, label)
            self.memory.access(operation, spans[0], writes=False)
            self.memory.access(operation, spans[1], writes=True)
        if of_compute and self._lane is None and (not results or Tier.HOST.name in tiers):
            self.clocks.wait(self.caller, self.clocks.of(Actor.COMPUTE))

    def took(self, tier: Tier, memory: torch.Tensor) -> None:
        """A tier has got memory from the system, or from torch's allocator."""
        self.memory.add(memory.data_ptr(), memory.nbytes, tier.name)
        if tier is Tier.DEVICE:
            self._computes_in(memory.data_ptr(), memory.nbytes, "what was computed in the memory of a new slab")

    def gave_up(self, slab: Slab) -> None:
        """DEVICE gives a slab back to torch's allocator: the next operator may get its memory."""
        self._computes_in(slab.bytes.data_ptr(), slab.nbytes, "what is computed next in the memory of a freed slab")
        self.memory.remove(slab.bytes.data_ptr())

    def _computes_in(self, address: int, nbytes: int, label: str) -> None:
        self.memory.access(self.launch(Actor.COMPUTE, label), [(address, nbytes)], writes=True)


class SimulatedAccelerator(ComputeDevice):
    """RAM that plays an accelerator, with a stream that computes. Only chunks count of its memory."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.is_accelerator = True

    def name(self) -> str:
        return "simulated in RAM"

    def num_update_threads(self) -> int:
        return 1

    def used_nbytes(self) -> int:
        return 0

    def take_peak_nbytes(self) -> int:
        return 0

    def pin(self, region: object, address: int) -> bool:
        return False


@dataclass(eq=False, slots=True)
class ClockedEvent:
    """What an actor had done at a time, and knew to be done."""

    checker: HappensBefore
    actor: Actor
    clock: Clock
    started_s: float = 0.0
    ended_s: float = 0.0

    def done(self) -> bool:
        return self.checker.clocks.knows(self.checker.caller, self.clock)

    def wait(self) -> None:
        self.checker.clocks.wait(self.checker.caller, self.clock)


class ClockedLanes(BlockingLanes):
    """Lanes that do everything at once, and tell a checker in what order it would have to be done."""

    def __init__(self, checker: HappensBefore) -> None:
        super().__init__(ComputeDevice(torch.device("cpu")))
        self._checker = checker
        self._last: dict[Lane, ClockedEvent] = {}

    def copy(
        self, lane: Lane, target: torch.Tensor, source: torch.Tensor, *, after: Sequence[Event], label: str
    ) -> Event:
        self._hold_back(_ACTORS[lane], after)
        with self._checker.copying(_ACTORS[lane]):
            return self._issued(lane, label, super().copy(lane, target, source, after=(), label=label))

    def work(self, work: Callable[[], object], *, after: Sequence[Event], label: str) -> Event:
        self._checker.launch(Actor.HOST_UPDATE, label)
        self._hold_back(Actor.HOST_UPDATE, after)
        with self._checker.calling(Actor.HOST_UPDATE):
            done = super().work(work, after=(), label=label)
        return self._issued(Lane.HOST_UPDATE, label, done)

    def _issued(self, lane: Lane, label: str, done: Event) -> Event:
        event = self._last[lane] = self._checker.event(_ACTORS[lane], label)
        event.started_s, event.ended_s = done.started_s, done.ended_s
        return event

    def _hold_back(self, actor: Actor, after: Sequence[Event]) -> None:
        """Have what an actor does next come after events; an update is waited for by the thread that issues."""
        for event in after:
            if isinstance(event, ClockedEvent):
                if event.actor is Actor.HOST_UPDATE:
                    event.wait()
                self._checker.clocks.wait(actor, event.clock)

    def compute_event(self) -> Event:
        event = self._checker.event(Actor.COMPUTE, "the end of what is computed")
        event.started_s = event.ended_s = time.perf_counter()
        return event

    def compute_waits(self, event: Event) -> float:
        self._hold_back(Actor.COMPUTE, [event])
        return 0.0

    def drain(self) -> None:
        for event in self._last.values():
            event.wait()
        self._last.clear()


class _DeviceSlabs(DevicePool):
    """Slabs of DEVICE whose memory a checker follows."""

    def __init__(self, checker: HappensBefore, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._checker = checker

    def _allocate(self, nbytes: int) -> torch.Tensor:
        memory = super()._allocate(nbytes)
        self._checker.took(Tier.DEVICE, memory)
        return memory

    def free(self, role: str, slab: Slab) -> None:
        super().free(role, slab)
        if not self.keeps_all and self._capacity == 0:
            self._checker.gave_up(slab)

    def _discard(self, slab: Slab) -> None:
        super()._discard(slab)
        self._checker.gave_up(slab)


class _HostSlabs(HostArena):
    """Slabs of HOST whose memory a checker follows."""

    def __init__(self, checker: HappensBefore, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._checker = checker

    def _reserve(self, nbytes: int) -> None:
        super()._reserve(nbytes)
        self._checker.took(Tier.HOST, self._segments[-1].bytes)


class _Observer(TorchDispatchMode):
    """Tells a checker of every operator."""

    def __init__(self, checker: HappensBefore) -> None:
        super().__init__()
        self._checker = checker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # parameters that serve themselves have been served
            result = func(*args, **kwargs)
            schema = func._schema
            if schema.name in _WITHOUT_MEMORY or func.is_view:
                return result
            accesses: dict[bool, list[torch.Tensor]] = {False: [], True: []}
            named = {argument.name: argument for argument in schema.arguments}
            given = [
                *zip(schema.arguments, args, strict=False),
                *((named[key], value) for key, value in kwargs.items()),
            ]
            for argument, value in given:
                writes = argument.alias_info is not None and argument.alias_info.is_write
                accesses[writes] += _tensors(value)
            self._checker.ran(schema.name, accesses[False], accesses[True], list(_tensors(result)))
        return result


def _observe_runtime(checker: HappensBefore, observer: _Observer, patch: pytest.MonkeyPatch) -> None:
    """Let the runtime's own operators, which run outside of all modes, be seen by this one."""
    enter, leave = runtime_mode.__enter__, runtime_mode.__exit__

    def observed(mode: Any) -> None:
        checker.runtime_depth += 1
        others = _disable_current_modes()
        others.__enter__()
        enter(mode)
        observer.__enter__()
        mode._guards = [others, *mode._guards, observer]

    def left(mode: Any, *error: object) -> None:
        leave(mode, *error)
        checker.runtime_depth -= 1

    patch.setattr(runtime_mode, "__enter__", observed)
    patch.setattr(runtime_mode, "__exit__", left)


class _Storages:
    """A set of storages that holds none of them."""

    def __init__(self) -> None:
        self._live: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._live[storage._cdata] = storage

    def has(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return self._live.get(storage._cdata) is storage


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the address and the bytes of an ordinary tensor, from its first element to its last."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # of wrappers
        return None
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return address, (reach + 1) * tensor.element_size()
