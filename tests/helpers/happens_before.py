"""Find missing waits in any single run, however early or late copies and computing are.

[Note: Happens before] A race shows in results only if a copy or the computing is late at the wrong time. This checker
does not look at results. It follows who has to be done before whom, and reports two accesses to the same memory that
nothing orders, whatever happened to come first.

The model. Eight actors work, each in its own order: HOST, the thread that runs the training loop, autograd and every
decision; COMPUTE, an accelerator's stream; the lanes H2D and D2H; HOST_UPDATE, DISK_READ and DISK_WRITE, which are
threads; and COLLECTIVE, the stream of a library that exchanges chunks between ranks, of which each has a checker of its
own. Everything is really done at once
and in RAM, in the order in which it is issued, which is one of the orders that a sound program allows; only the clocks
are late. An actor has a vector clock: for every actor, how many of its operations are over for certain. The edges,
which join clocks, are

    launch    HOST to all others: what is issued comes after all HOST knew then
    exchange  COMPUTE to COLLECTIVE where one is issued, COLLECTIVE to COMPUTE where it is waited for, as in NCCL
    after     event to lane: a copy or an update comes after the events it is given
    stream    event to COMPUTE: `compute_waits`
    wait      event to HOST (to a thread inside of its work): `Event.wait`, and `drain` for all but COMPUTE
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

DISK is a file that is really read and written. Its bytes are cells as those of memory are, by their place in the file.

What it cannot see: memory other than slabs (activations, tensors of users); operators inside of tensor subclasses
that take themselves apart, unless the runtime runs them; several threads of autograd; what other ranks do to this
one's memory but for exchanges (`recorded_group` tells whether all ranks are asked for the same); how CUDA's own
streams and events behave, as lanes here only stand for them. A view counts from its first byte to its last. Waits of
users (`loss.item()`) order nothing here: the runtime must not rely on them. It may on its own: what `runtime_mode`
computes of chunks, such as a norm, is followed until it is read as a number.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, Self

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from chunkmem.optim.kernels import load_kernels
from chunkmem.plan.machine import Machine, host_links
from chunkmem.ranks.methods import ExchangeMethod
from chunkmem.runtime.device import ComputeDevice, runtime_mode
from tests.helpers.access_order import AccessOrder
from tests.helpers.ordered_exchange import ordered
from tests.helpers.simulated import ClockedLanes, DeviceSlabs, FollowedSlab, HostSlabs, SimulatedAccelerator
from tests.helpers.vector_clocks import Actor, Clock, Race

_WITHOUT_MEMORY = frozenset(
    f"aten::{name}"
    for name in ("set_", "is_set_to", "resize_", "empty", "empty_strided", "detach", "detach_", "requires_grad_")
)
"""Operators that touch no element, whatever their schemas say."""

SLOW = Machine(0, 0, links=host_links(h2d_Bps=6e6, d2h_Bps=6e6), charges_non_model=True, one_processor=False)
"""A copy of a slab takes as long as some moments of a small model: a plan has to prefetch. Caps are a manager's own."""


class HappensBefore(AccessOrder):
    """While it is entered, managers are made for an accelerator that is simulated in RAM, and everything is watched.

    Managers take `lanes` as `make_lanes`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._observer = _Observer(self)

    def __enter__(self) -> Self:
        self._entered = contextlib.ExitStack()
        patch = self._entered.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(ComputeDevice, "default", lambda index=None: SimulatedAccelerator(self))
        patch.setattr("chunkmem.assembly.parts.load_kernels", lambda **_: load_kernels())
        patch.setattr("chunkmem.assembly.speeds.cached_machine", lambda compute, caps, by_form: SLOW)
        patch.setattr("chunkmem.runtime.tiers.DevicePool", lambda *args, **keys: DeviceSlabs(self, *args, **keys))
        patch.setattr("chunkmem.runtime.tiers.HostArena", lambda *args, **keys: HostSlabs(self, *args, **keys))
        patch.setattr("chunkmem.runtime.disk_pool.DiskSlab", type("Followed", (FollowedSlab,), {"order": self}))
        _observe_runtime(self, self._observer, patch)
        self._entered.enter_context(self._observer)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    def lanes(self, compute: Any = None) -> ClockedLanes:
        """Return lanes whose order is followed."""
        return ClockedLanes(self, SimulatedAccelerator(self) if compute is None else compute)

    @contextlib.contextmanager
    def second_stream(self, forked: Clock) -> Iterator[None]:
        """Inside, a second stream computes, after what had been computed at a time; what is computed next waits for it.

        HOST       with torch.Stream() as second: second.wait_event(forked) ... first.wait_stream(second)
        """
        self.clocks.wait(Actor.COMPUTE_2, forked)
        self.computing = Actor.COMPUTE_2
        try:
            yield
        finally:
            self.computing = Actor.COMPUTE
        self.clocks.wait(Actor.COMPUTE, self.clocks.of(Actor.COMPUTE_2))

    def exchange(self, method: type[ExchangeMethod]) -> type[ExchangeMethod]:
        """Return a way to exchange chunks whose order is followed."""
        return ordered(method, self)

    @property
    def races(self) -> list[Race]:
        return self.memory.races

    def was_active(self, actor: Actor) -> bool:
        """Tell whether an actor has done anything."""
        return bool(self.clocks.of(actor)[actor])

    def kinds(self) -> Counter[tuple[str, str, str]]:
        """Return how many races there are of each kind."""
        return Counter(race.kind for race in self.races)

    def assert_ordered(self) -> None:
        """Assert that a good deal was seen, and that there was no race."""
        assert self.memory.num_accesses > 0, "nothing was seen"
        assert not self.races, "\n".join(f"{count} x {' | '.join(kind)}" for kind, count in self.kinds().items())


class _Observer(TorchDispatchMode):
    """Tells of every operator."""

    def __init__(self, order: AccessOrder) -> None:
        super().__init__()
        self._order = order
        self._thread = threading.get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():  # parameters that serve themselves have been served
            result = func(*args, **kwargs)
            schema = func._schema
            is_library = threading.get_ident() != self._thread  # gloo copies in threads of its own: a part of exchanges
            if schema.name in _WITHOUT_MEMORY or func.is_view or is_library:
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
            results = list(_tensors(result))
            blocks = bool(schema.returns) and not results  # a number
            self._order.ran(schema.name, accesses[False], accesses[True], results, blocks=blocks)
        return result


def _observe_runtime(order: AccessOrder, observer: _Observer, patch: pytest.MonkeyPatch) -> None:
    """Let the runtime's own operators, which run outside of all modes, be seen by this one."""
    enter, leave = runtime_mode.__enter__, runtime_mode.__exit__

    def observed(mode: Any) -> None:
        order.runtime_depth += 1
        others = _disable_current_modes()
        others.__enter__()
        enter(mode)
        observer.__enter__()
        mode._guards = [others, *mode._guards, observer]

    def left(mode: Any, *error: object) -> None:
        leave(mode, *error)
        order.runtime_depth -= 1

    patch.setattr(runtime_mode, "__enter__", observed)
    patch.setattr(runtime_mode, "__exit__", left)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
