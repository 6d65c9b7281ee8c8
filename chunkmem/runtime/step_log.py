"""What happens in one step, written down as it does, and made a `Timeline` of when somebody asks.

Moments, stalls, copies and exchanges are timed by COMPUTE and the lanes, updates on HOST by the host: see
[Note: Device time]. Nothing is read before the step is over.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise

from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import Tier
from chunkmem.plan.model import DIRECTIONS, FETCH, LINK_LANES, Lane
from chunkmem.plan.timeline import Span, StageCall, StageWork, StepFigures, Timeline, no_bytes_moved, python_between_s
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.events import DoneEvent, Event
from chunkmem.runtime.timestamps import Clock, Interval, Timestamp

NO_MOMENT = -1
"""Of what was done before the first moment, or is not what a moment was for."""


class StepLog:
    """Entries of one iteration, as cheap to make as possible."""

    def __init__(self, clock: Clock, *, times_moments: bool = True) -> None:
        """Begin when the iteration does.

        Args:
            clock: of what COMPUTE does.
            times_moments: take a timestamp when a moment begins, for its duration. Else, where that is not free, those
                moments have one that take one anyway: as COMPUTE stalls, or something else comes after it. Those
                between are placed by the durations of the trace.
        """
        self.clock = clock
        self._times_moments = times_moments or clock.is_free
        self._made = clock.timestamp()
        self.began: list[tuple[int, Timestamp | None]] = []
        """(moment, when)"""
        self.stalls: list[tuple[Lane, int, Interval]] = []
        """(lane waited for, moment, when)"""
        self.copies: list[tuple[Lane, int, Chunk, Event]] = []
        """(lane, moment, chunk, event)"""
        self.exchanges: list[tuple[int, Chunk, Interval]] = []
        """(moment, chunk, from when it was issued until it was there)"""
        self._issued: dict[Chunk, int] = {}
        """By chunk: the moment in which its last exchange was issued."""
        self.updates: list[tuple[int, int, str, Chunk, Event]] = []
        """What was done on HOST_UPDATE: (moment it is for, moment it was begun in, label, PARAM chunk, event)"""
        self.stage_calls: list[tuple[StageWork, int, int, Interval]] = []
        """(what, pipeline stage, micro-batch, when)"""
        self.device_nbytes: list[int] = []
        self._ended: Timestamp | None = None
        self.plan_misses = 0
        """Accesses that were not foreseen."""

    def goes_on_from(self, step_log: StepLog) -> None:
        """Take in what was copied and waited for in the same step by another plan, whose moments are not those here."""
        self._made = step_log._first
        self.copies = [(lane, NO_MOMENT, chunk, event) for lane, _, chunk, event in step_log.copies]
        self.stalls = [(lane, NO_MOMENT, stall) for lane, _, stall in step_log.stalls]
        self.stage_calls = step_log.stage_calls

    def begin(self, moment: int, kind: Kind, chunk: Chunk) -> None:
        """A moment begins; its actions come next."""
        is_timed = self._times_moments or not self.began
        self.began.append((moment, self.clock.timestamp() if is_timed else None))
        if kind is Kind.EXCHANGE:
            self._issued[chunk] = moment

    def waited(self, lane: Lane, stall: Interval | None) -> None:
        """COMPUTE waits for a copy on `lane`; None: it need not."""
        if stall is not None:
            self.stalls.append((lane, self._moment, stall))
            self._begins_at(stall.start)

    def comes_after(self, computed: Event) -> None:
        """Something of the moment's actions comes after all that is `computed` before it."""
        if isinstance(computed, Interval):
            self._begins_at(computed.end)

    def _begins_at(self, timestamp: Timestamp) -> None:
        """Take the first timestamp of a moment as its own: its actions come before anything that it computes."""
        if self.began and self.began[-1][1] is None:
            self.began[-1] = (self._moment, timestamp)

    def copied(self, lane: Lane, chunk: Chunk, event: Event) -> None:
        """A copy has been issued."""
        self.copies.append((lane, self._moment, chunk, event))

    def updating(self, label: str, chunk: Chunk, event: Event, *, moment: int | None = None) -> None:
        """A group is updated, or its weights are rounded, on HOST_UPDATE while the step continues.

        Args:
            label: says which.
            chunk: PARAM of the group.
            event: the end of it.
            moment: that it is for, if that is not the present one; `NO_MOMENT`: it makes weights again.
        """
        self.updates.append((self._moment if moment is None else moment, self._moment, label, chunk, event))

    def exchanged(self, chunk: Chunk, issued: Timestamp, waited: Interval) -> None:
        """A chunk that was exchanged with other ranks since `issued` is there."""
        moment = self._issued.get(chunk, self._moment)
        self.exchanges.append((moment, chunk, Interval(issued, waited.end)))
        self.waited(Lane.COLLECTIVE, waited)

    def served(self, chunk: Chunk, source: Tier, target: Tier, taken: Interval) -> None:
        """A copy was made on demand, and waited for."""
        lane = LINK_LANES[source, target]
        self.copied(lane, chunk, DoneEvent(taken.start, taken.end))
        self.waited(lane, taken)

    def end(self) -> None:
        """The last moment is over."""
        self._ended = self.clock.timestamp()

    @property
    def _moment(self) -> int:
        return self.began[-1][0] if self.began else NO_MOMENT

    @property
    def _first(self) -> Timestamp:
        first = self.began[0][1] if self.began else None
        return self._made if first is None else first

    @property
    def _last(self) -> Timestamp:
        """The end, or, if it has not come to that, the last timestamp before it."""
        return self._ended or next((at for _, at in reversed(self.began) if at is not None), self._made)

    def _times_s(self, trace: Trace | None) -> list[float]:
        """Return when each of `began` began, and when the last of them ended: all in one list.

        Moments without a timestamp share the time between two that have one, stalls excluded, in proportion to their
        durations.
        """
        known = [*(timestamp for _, timestamp in self.began), self._last]
        times_s = [0.0 if timestamp is None else timestamp.at_s for timestamp in known]
        stalled_s = self._stalled_s()
        for at, until in pairwise([at for at, timestamp in enumerate(known) if timestamp is not None]):
            if until == at + 1:
                continue
            moments = [moment for moment, _ in self.began[at:until]]
            weights = [1.0 if trace is None else trace.moments[moment].duration_s + 1e-9 for moment in moments]
            begin_s = min(times_s[at] + stalled_s[moments[0]], times_s[until])
            scale = (times_s[until] - begin_s) / sum(weights)
            for index, passed in enumerate(accumulate(weights[:-1]), at + 1):
                times_s[index] = begin_s + scale * passed
        return times_s

    def _stalled_s(self) -> defaultdict[int, float]:
        """Return how long COMPUTE waited in each moment."""
        found = defaultdict[int, float](float)
        for _, moment, stall in self.stalls:
            found[moment] += stall.duration_s
        return found

    def durations(self) -> dict[int, float]:
        """Return the seconds each moment took, waiting for copies not included; of an update on its lane, its own.

        One that is still under way has none. Waits until COMPUTE has come to the end of the step. Ask only where
        moments were timed, and if something is made of it that takes longer, such as a plan.
        """
        stalled_s = self._stalled_s()
        found = {}
        for (moment, _), (began_s, ended_s) in zip(self.began, pairwise(self._times_s(None)), strict=True):
            found[moment] = max(0.0, ended_s - began_s - stalled_s[moment])
        for moment, *_, event in self.updates:
            found.pop(moment, None)
            if event.done() and moment != NO_MOMENT:
                found[moment] = event.ended_s - event.started_s
        return found

    def computes_from_s(self) -> list[float]:
        """Return when each of `began` began to compute, after what it waited for; ask as for `durations`."""
        stalled_s = self._stalled_s()
        times_s = self._times_s(None)
        return [began_s + stalled_s[moment] for (moment, _), began_s in zip(self.began, times_s, strict=False)]

    def timeline(
        self,
        trace: Trace | None,
        peaks: Mapping[Tier, tuple[int, Mapping[str, int]]],
        cap_nbytes: Mapping[Tier, int],
    ) -> Timeline:
        """Return the step as a timeline; its first moment is at 0 s, or, if it was never on its plan, its beginning.

        Waits until COMPUTE has come to the end of the step.

        Args:
            trace: for the names of moments.
            peaks: by tier, the highest sum over chunks and each role's own, in bytes.
            cap_nbytes: by tier.
        """
        times_s = self._times_s(trace)
        first_s, last_s = self._first.at_s, times_s[-1]
        spans = self._moment_spans(trace, times_s)
        for lane, moment, chunk, event in self.copies:
            label = f"{chunk.id} {DIRECTIONS[lane]}"
            spans.append(Span(lane, label, *_times(event, first_s, last_s), moment, chunk.id, chunk.nbytes))
        for moment, chunk, under_way in self.exchanges:
            times = under_way.started_s - first_s, under_way.ended_s - first_s
            spans.append(Span(Lane.COLLECTIVE, f"{chunk.id} between ranks", *times, moment, chunk.id, chunk.nbytes))
        for _, moment, label, chunk, event in self.updates:
            spans.append(Span(Lane.HOST_UPDATE, label, *_times(event, first_s, last_s), moment, chunk.id))
        for lane, moment, stall in self.stalls:
            if stall.duration_s > 0:
                times = stall.started_s - first_s, stall.started_s - first_s + stall.duration_s
                spans.append(Span(Lane.COMPUTE, f"waits for {lane.value}", *times, moment, is_stall=True))
        figures = self.figures(())
        return Timeline(
            spans=tuple(sorted(spans, key=lambda span: span.start_s)),
            step_s=figures.step_s,
            peak_nbytes={tier: nbytes for tier, (nbytes, _) in peaks.items()},
            role_peak_nbytes={(tier, role): n for tier, (_, roles) in peaks.items() for role, n in roles.items()},
            cap_nbytes=cap_nbytes,
            device_nbytes=tuple(self.device_nbytes),
            plan_misses=self.plan_misses,
            prefetched=figures.prefetched,
            fetched=figures.fetched,
            stage_calls=tuple(
                StageCall(work, stage, part, when.started_s - first_s, when.started_s - first_s + when.duration_s)
                for work, stage, part, when in self.stage_calls
            ),
            python_by_layer=python_between_s(spans, trace),
        )

    def figures(self, tiers: Iterable[Tier]) -> StepFigures:
        """Return what `timeline(...).figures` has, sooner, with 0 bytes for links between `tiers` that nothing was
        copied on."""
        moved = no_bytes_moved(tiers)
        for lane, _, chunk, _ in self.copies:
            moved[lane] = moved.get(lane, 0) + chunk.nbytes
        stalls = [(lane, stall_s) for lane, _, stall in self.stalls if (stall_s := stall.duration_s) > 0]
        fetched, late = sum(lane is FETCH for lane, *_ in self.copies), sum(lane is FETCH for lane, _ in stalls)
        return StepFigures(
            step_s=self._last.at_s - self._first.at_s,
            stall_s=sum(stall_s for _, stall_s in stalls),
            moved_nbytes=moved,
            exchanged_nbytes=sum(chunk.nbytes for _, chunk, _ in self.exchanges),
            fetched=fetched,
            prefetched=fetched - min(late, fetched),
            plan_misses=self.plan_misses,
        )

    def _moment_spans(self, trace: Trace | None, times_s: list[float]) -> list[Span]:
        first_s, spans = self._first.at_s, list[Span]()
        if not self.began:  # nobody has heard of moments
            spans.append(Span(Lane.COMPUTE, "step", 0.0, self._last.at_s - first_s, NO_MOMENT))
        for (moment, _), (began_s, ended_s) in zip(self.began, pairwise(times_s), strict=True):
            event = None if trace is None else trace.moments[moment]
            label = "" if event is None else str(event)
            chunk = None if event is None else event.chunk
            spans.append(Span(Lane.COMPUTE, label, began_s - first_s, ended_s - first_s, moment, chunk))
        return spans


def _times(event: Event, first_s: float, last_s: float) -> tuple[float, float]:
    """Return when an operation began and ended, from `first_s` on; `last_s` if it is under way still, for the next
    step."""
    times_s = (event.started_s, event.ended_s) if event.done() else (last_s, last_s)
    return times_s[0] - first_s, times_s[1] - first_s
