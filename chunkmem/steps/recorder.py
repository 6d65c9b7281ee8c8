"""Write the events of a step down as a trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from chunkmem.data.trace import Entry, Kind, Mode, Moment, Region, Trace
from chunkmem.data.types import ChunkId, Role, Tier, UpdateForm
from chunkmem.plan.cursor import label_of
from chunkmem.plan.loop import as_loop
from chunkmem.runtime.chunk import NO_CONTENT, Chunk
from chunkmem.runtime.policy import StepPolicy
from chunkmem.runtime.step_log import StepLog
from chunkmem.runtime.timestamps import Clock, Timestamp


class Recorder(StepPolicy):
    """Takes the events of one step, which is served on demand."""

    def __init__(
        self,
        mode: Mode,
        *,
        clock: Clock,
        take_peaks: Callable[[], tuple[int, int]],
        sampling_interval_s: Callable[[], float] = lambda: 0.0,
        left_nbytes: Callable[[], int] = lambda: 0,
        by_block: bool = False,
    ) -> None:
        """Begin a record.

        Args:
            mode: of the step.
            clock: of what DEVICE computes.
            take_peaks: returns the peak bytes of non-model data since the last call; as sampled, too.
            sampling_interval_s: returns the longest time between two samples so far; asked when the step is over. By
                default nothing is sampled.
            left_nbytes: returns the bytes of non-model data that the step has left behind, such as states of parameters
                outside chunks, or outputs that are kept; asked when the step is over. Later steps have them from their
                first moment on.
            by_block: blocks are heard of as a whole.
        """
        self.mode = mode
        self.step_log = StepLog(clock)
        self._take_peaks = take_peaks
        self._by_block = by_block
        self._ask_interval_s = sampling_interval_s
        self._sampling_interval_s = 0.0
        self._ask_left_nbytes = left_nbytes
        self._left_nbytes = 0
        self._events: list[tuple[Kind, ChunkId, str]] = []
        self._peaks: list[tuple[int, int]] = []
        self._entered: list[tuple[int, str, Timestamp]] = []
        """(moment, label, when); the moment is -1 before the first one."""
        self._held: set[ChunkId] = set()

    def log(self) -> StepLog:
        return self.step_log

    def event(self, kind: Kind, chunk: Chunk, reader: object) -> None:
        """Something happens: the moment before is over. What was held before the step began is released unseen."""
        if kind is Kind.HOLD:
            self._held.add(chunk.id)
        elif kind is Kind.RELEASE:
            if chunk.id not in self._held:
                return
            self._held.remove(chunk.id)
        self._close_moment()
        self._events.append((kind, chunk.id, label_of(kind, chunk.id, reader)))
        self.step_log.begin(len(self._events) - 1, kind, chunk)

    def entered(self, call: object) -> None:
        """A module is entered."""
        self._entered.append((len(self._events) - 1, str(call), self.step_log.clock.timestamp()))

    def end(self) -> None:
        """The step is over."""
        self.step_log.end()
        self._close_moment()
        self._sampling_interval_s = self._ask_interval_s()
        self._left_nbytes = self._ask_left_nbytes()

    def _close_moment(self) -> None:
        peaks = self._take_peaks()
        if len(self._peaks) < len(self._events):
            self._peaks.append(peaks)

    @property
    def num_moments(self) -> int:
        """Moments so far."""
        return len(self._events)

    def trace(self, layout: str, chunks: Mapping[ChunkId, Chunk], regions: Sequence[Region] = ()) -> Trace:
        """Return the trace, as the step repeats; `regions` are the calls of regions in it.

        A training trace has every chunk with content, used or not, so that a plan knows where all of them are; those of
        modules that compute on HOST are in none. An evaluation has what it touches: the rest may stay where the
        training left it.

        Raises:
            TraceError: the step was not whole: something is still held, or was there before and is used up.
        """
        if len(self._peaks) < len(self._events):  # asked before the end
            self._close_moment()
        durations = self.step_log.durations()
        entered, before_s = self._entries(durations)
        moments = tuple(
            Moment(kind, chunk, label, durations[at], self._left_nbytes + peak, sampled, tuple(entered.get(at, ())))
            for at, ((kind, chunk, label), (peak, sampled)) in enumerate(zip(self._events, self._peaks, strict=True))
        )
        wanted = {moment.chunk for moment in moments}
        if self.mode is Mode.TRAIN:
            known = (chunk for chunk in chunks.values() if not (chunk.is_remote or chunk.stays))
            wanted |= {chunk.id for chunk in known if chunk.version != NO_CONTENT}
        trace = Trace(
            self.mode,
            layout,
            {key: chunks[key].nbytes for key in sorted(wanted, key=lambda key: (key.group, key.role))},
            moments,
            self._sampling_interval_s,
            frozenset(c.id.group for c in chunks.values() if c.is_remote and c.compute_tier is Tier.DEVICE),
            tuple(regions),
            before_s,
            _update_form([chunks[key] for key in wanted]),
            self._by_block,
        )
        return as_loop(trace)

    def _entries(self, durations: Mapping[int, float]) -> tuple[dict[int, list[Entry]], float]:
        """Return the entries in each moment, and the seconds from the first one to the first moment."""
        begins_s = self.step_log.computes_from_s()
        found: dict[int, list[Entry]] = {}
        for at, label, when in self._entered:
            if at >= 0:
                share = (when.at_s - begins_s[at]) / durations[at] if durations[at] else 0.0
                found.setdefault(at, []).append(Entry(label, min(max(share, 0.0), 1.0)))
        first = self._entered[0] if self._entered and begins_s else None
        before_s = begins_s[0] - first[2].at_s if first is not None and first[0] < 0 else 0.0
        return found, max(0.0, before_s)


def _update_form(chunks: Sequence[Chunk]) -> UpdateForm:
    """Return what an update passes over that has these chunks."""
    dtypes = {chunk.id.role: chunk.dtype for chunk in chunks}
    has_master = Role.MASTER in dtypes
    if any(role.is_state and dtype is torch.uint8 for role, dtype in dtypes.items()):
        in_float32 = has_master or dtypes.get(Role.PARAM) is torch.float32
        return UpdateForm.CODES if in_float32 else UpdateForm.CODES_ALONE
    return UpdateForm.MASTER if has_master else UpdateForm.FP32
