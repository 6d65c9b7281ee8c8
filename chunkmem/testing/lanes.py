"""Lanes for tests, in RAM: adversarial ones are as late as events allow, throttled ones as slow as a given link.

A manager takes them as ``ChunkManager(config, make_lanes=lambda device: AdversarialLanes(seed))``.

A race shows only in the rare run in which a copy is late. Here copies are late as a rule: nothing runs until something
waits for it or the dice say so, and the bytes that a copy may overwrite are overwritten with NaN from the moment it may
begin. Whatever reads or writes too early, for want of a wait, meets NaN or old contents, in the same way each time for
the same seed.

Computing is done by the caller, in order, and is never late. So a copy that should have come after something computed
does: that wait can be left out and nothing shows.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections import deque
from dataclasses import dataclass, field

from chunkmem.data.errors import StateError
from chunkmem.plan.model import Lane
from chunkmem.runtime.events import DoneEvent, Event
from chunkmem.runtime.queues import HostTask, Lanes
from chunkmem.runtime.timestamps import HostTimestamp, Interval

LANES: tuple[Lane, ...] = tuple(lane for lane in Lane if lane not in (Lane.COMPUTE, Lane.COLLECTIVE))
_POISON = 0xFF
"""Repeated, this byte is NaN in every floating dtype."""
_EAGERNESS = (0.0, 0.1, 0.5, 0.9)
"""How likely a copy that could run does, when nothing waits for it. Each lane draws its own: one far behind another
shows most."""


@dataclass(eq=False, slots=True)
class _Held:
    """The event of a task that runs when the dice or a wait say so."""

    task: HostTask
    lanes: AdversarialLanes
    poisoned: bool = field(default=False, init=False)
    failure: None = None

    @property
    def started_s(self) -> float:
        return self.task.started_s

    @property
    def ended_s(self) -> float:
        return self.task.ended_s

    def done(self) -> bool:
        return self.task.done()

    def wait(self) -> None:
        self.lanes.run_until(self)


class AdversarialLanes(Lanes):
    """Copies and updates held back, and run in any order that events allow: without threads, alike for a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self._queues: dict[Lane, deque[_Held]] = {lane: deque() for lane in LANES}
        self._eagerness = {lane: self._random.choice(_EAGERNESS) for lane in LANES}

    def _issue(self, task: HostTask) -> Event:
        held = _Held(task, self)
        self._queues[task.lane].append(held)
        self._poison_targets()
        self._run_some()
        return held

    def compute_event(self) -> Event:
        self._run_some()
        return DoneEvent.now()

    def compute_waits(self, event: Event) -> Interval | None:
        ready = HostTimestamp.now()
        self.run_until(event)
        return Interval(ready, HostTimestamp.now())

    def run_until(self, event: Event) -> None:
        """Run what `event` comes after, and whatever else the dice say, until it is done.

        Raises:
            StateError: it comes after an event of other lanes that is not done.
        """
        self._run_some()
        while not event.done():
            self._run(self._next_for(event))
            self._run_some()

    def drain(self) -> None:
        while any(self._queues.values()):
            queued = self._random.choice([queue for queue in self._queues.values() if queue])
            self.run_until(queued[0])

    def close(self) -> None:
        if not self._closed:
            super().close()
            self.drain()

    def _runnable(self) -> list[_Held]:
        heads = [queue[0] for queue in self._queues.values() if queue]
        return [head for head in heads if all(event.done() for event in head.task.after)]

    def _run_some(self) -> None:
        while willing := [held for held in self._runnable() if self._random.random() < self._eagerness[held.task.lane]]:
            self._run(self._random.choice(willing))

    def _next_for(self, event: Event) -> _Held:
        """Return what can run, and has to before `event` is done."""
        # Each turn goes to something issued earlier, so this ends.
        while isinstance(event, _Held) and event in self._queues[event.task.lane]:
            head = self._queues[event.task.lane][0]
            pending = [before for before in head.task.after if not before.done()]
            if not pending:
                return head
            event = self._random.choice(pending)
        raise StateError("waiting for an event that is not done and not of these lanes: nothing here would end that")

    def _run(self, held: _Held) -> None:
        self._queues[held.task.lane].popleft()
        held.task.run()
        held.task.finish(None)
        self._poison_targets()

    def _poison_targets(self) -> None:
        # Not before it can run: until then, what it comes after may still need the target's old contents.
        for held in self._runnable():
            if not held.poisoned:
                for target, nbytes in held.task.targets:
                    ctypes.memset(target, _POISON, nbytes)
                held.poisoned = True


class ThrottledLanes(Lanes):
    """Threads that copy no faster than a link of `bytes_per_s`, in both directions at once, with a latency a copy.

    Raises:
        StateError: `bytes_per_s` is not positive, or `latency_s` negative.
    """

    def __init__(self, bytes_per_s: float, *, latency_s: float = 0.0) -> None:
        if not (bytes_per_s > 0 and latency_s >= 0):
            raise StateError(f"no copy would end on a link of {bytes_per_s} bytes/s and {latency_s} s latency")

        def move(target: int, source: int, nbytes: int) -> None:
            end_s = time.perf_counter() + latency_s + nbytes / bytes_per_s
            ctypes.memmove(target, source, nbytes)
            time.sleep(max(0.0, end_s - time.perf_counter()))

        super().__init__(move=move)
