"""What happens in one step, written down as it does, and made a `Timeline` of when somebody asks."""

from __future__ import annotations

import time
from collections.abc import Mapping

from chunkmem.plan.model import FETCH, LANE_LINKS, LINK_LANES, Lane
from chunkmem.plan.timeline import Span, Timeline
from chunkmem.runtime.events import Event
from chunkmem.runtime.store import Chunk
from chunkmem.trace.model import Kind, Trace
from chunkmem.types import Tier


class StepLog:
    """Entries of one iteration, as cheap to make as possible."""

    def __init__(self) -> None:
        self._made_s = time.perf_counter()
        self.began: list[tuple[int, float]] = []
        """(moment, time)"""
        self.stalls: list[tuple[Lane, int, float, float]] = []
        """(lane waited for, moment, start, seconds), also those of 0 seconds"""
        self.copies: list[tuple[Lane, int, Chunk, Event | tuple[float, float]]] = []
        """(lane, moment, chunk, event or times)"""
        self.exchanges: list[tuple[int, Chunk, float, float]] = []
        """(moment, chunk, when it was issued, when it was there)"""
        self._issued: dict[Chunk, int] = {}
        """By chunk: the moment its last exchange was issued in."""
        self.updates: list[tuple[int, int, Chunk, Event]] = []
        """(moment it is for, moment it was begun in, PARAM chunk, event)"""
        self.device_nbytes: list[int] = []
        self.ended_s: float | None = None
        self.plan_misses = 0
        """Accesses that were not foreseen."""

    def goes_on_from(self, step_log: StepLog) -> None:
        """Take in what was copied and waited for in the same step by another plan, whose moments are not those here."""
        self._made_s = step_log._first_s
        self.copies = [(lane, -1, chunk, event) for lane, _, chunk, event in step_log.copies]
        self.stalls = [(lane, -1, start_s, stall_s) for lane, _, start_s, stall_s in step_log.stalls]

    def begin(self, moment: int, kind: Kind, chunk: Chunk) -> None:
        """A moment begins; its actions come next."""
        self.began.append((moment, time.perf_counter()))
        if kind is Kind.EXCHANGE:
            self._issued[chunk] = moment

    def waited(self, lane: Lane, started_s: float, stall_s: float) -> None:
        """COMPUTE or the host has waited for a copy on `lane`."""
        self.stalls.append((lane, self._moment, started_s, stall_s))

    def copied(self, lane: Lane, chunk: Chunk, event: Event) -> None:
        """A copy has been issued."""
        self.copies.append((lane, self._moment, chunk, event))

    def updated(self, moment: int, chunk: Chunk, event: Event) -> None:
        """A group's update has been begun ahead of its `moment`; `chunk` is its PARAM."""
        self.updates.append((moment, self._moment, chunk, event))

    def left_to_lane(self, chunk: Chunk, event: Event) -> None:
        """The update of this moment runs on its lane while the step goes on; `chunk` is its group's PARAM."""
        self.updates.append((self._moment, self._moment, chunk, event))

    def exchanged(self, chunk: Chunk, issued_s: float, waited_s: float) -> None:
        """A chunk that was exchanged with other ranks since `issued_s`, and waited for since `waited_s`, is there."""
        now_s = time.perf_counter()
        self.exchanges.append((self._issued.get(chunk, self._moment), chunk, issued_s, now_s))
        self.stalls.append((Lane.COLLECTIVE, self._moment, waited_s, now_s - waited_s))

    def served(self, chunk: Chunk, source: Tier, target: Tier, started_s: float) -> None:
        """A copy was made on demand, and waited for."""
        lane = LINK_LANES[source, target]
        now_s = time.perf_counter()
        self.copies.append((lane, self._moment, chunk, (started_s, now_s)))
        self.stalls.append((lane, self._moment, started_s, now_s - started_s))

    def end(self) -> None:
        """The last moment is over."""
        self.ended_s = time.perf_counter()

    @property
    def _moment(self) -> int:
        return self.began[-1][0] if self.began else -1

    @property
    def _first_s(self) -> float:
        return self.began[0][1] if self.began else self._made_s

    @property
    def _last_s(self) -> float:
        return self.ended_s or (self.began[-1][1] if self.began else self._made_s)

    def _ends_s(self) -> list[float]:
        """Return when each of `began` ended; there are none in a step that was never on its plan."""
        return [*(at for _, at in self.began[1:]), self._last_s] if self.began else []

    def durations(self) -> dict[int, float]:
        """Return the seconds each moment took, waiting for copies not included; of an update on its lane, its own.

        One that is still under way has none.
        """
        waited: dict[int, float] = {}
        for _, moment, _, stall_s in self.stalls:
            waited[moment] = waited.get(moment, 0.0) + stall_s
        found = {}
        for (moment, began_s), ended_s in zip(self.began, self._ends_s(), strict=True):
            found[moment] = max(0.0, ended_s - began_s - waited.get(moment, 0.0))
        for moment, _, _, event in self.updates:
            if event.done():
                found[moment] = event.ended_s - event.started_s
            else:
                found.pop(moment, None)
        return found

    def timeline(
        self,
        trace: Trace | None,
        peaks: Mapping[Tier, tuple[int, Mapping[str, int]]],
        cap_nbytes: Mapping[Tier, int],
    ) -> Timeline:
        """Return the step as a timeline; its first moment is at 0 s, or, if it was never on its plan, its beginning.

        Args:
            trace: for the names of moments.
            peaks: by tier, the highest sum over chunks and each role's own, in bytes.
            cap_nbytes: by tier.
        """
        first_s, last_s = self._first_s, self._last_s
        spans = self._moment_spans(trace)
        for lane, moment, chunk, event in self.copies:
            start_s, end_s = _times(event, otherwise_s=last_s)
            label = f"{chunk.id} to {LANE_LINKS[lane][1].name}"
            spans.append(Span(lane, label, start_s - first_s, end_s - first_s, moment, chunk.id, chunk.nbytes))
        for moment, chunk, start_s, end_s in self.exchanges:
            label = f"{chunk.id} between ranks"
            spans.append(
                Span(Lane.COLLECTIVE, label, start_s - first_s, end_s - first_s, moment, chunk.id, chunk.nbytes)
            )
        for _, moment, chunk, event in self.updates:
            start_s, end_s = _times(event, otherwise_s=last_s)
            label = f"update of group {chunk.id.group}"
            spans.append(Span(Lane.HOST_UPDATE, label, start_s - first_s, end_s - first_s, moment, chunk.id))
        for lane, moment, start_s, stall_s in self.stalls:
            if stall_s > 0:
                start_s -= first_s
                spans.append(
                    Span(Lane.COMPUTE, f"waits for {lane.value}", start_s, start_s + stall_s, moment, is_stall=True)
                )
        fetched = sum(lane is FETCH for lane, *_ in self.copies)
        late = sum(lane is FETCH and stall_s > 0 for lane, _, _, stall_s in self.stalls)
        return Timeline(
            spans=tuple(sorted(spans, key=lambda span: span.start_s)),
            step_s=last_s - first_s,
            peak_nbytes={tier: nbytes for tier, (nbytes, _) in peaks.items()},
            role_peak_nbytes={(tier, role): n for tier, (_, roles) in peaks.items() for role, n in roles.items()},
            cap_nbytes=cap_nbytes,
            device_nbytes=tuple(self.device_nbytes),
            plan_misses=self.plan_misses,
            prefetched=fetched - min(late, fetched),
            fetched=fetched,
        )

    def _moment_spans(self, trace: Trace | None) -> list[Span]:
        first_s, spans = self._first_s, []
        for (moment, began_s), ended_s in zip(self.began, self._ends_s(), strict=True):
            event = None if trace is None else trace.moments[moment]
            label = "" if event is None else str(event)
            chunk = None if event is None else event.chunk
            spans.append(Span(Lane.COMPUTE, label, began_s - first_s, ended_s - first_s, moment, chunk))
        return spans


def _times(event: Event | tuple[float, float], *, otherwise_s: float) -> tuple[float, float]:
    """Return when a copy began and ended; one that is under way still, for the next step, has no times yet."""
    if isinstance(event, tuple):
        return event
    return (event.started_s, event.ended_s) if event.done() else (otherwise_s, otherwise_s)
