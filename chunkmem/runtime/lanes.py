"""What copies between tiers, overlapped with computing: by lane, a thread on a CPU, a stream on an accelerator.

Operations of a lane are in order, so to wait for one is to rely on all before it, and on all they came after. A copy
that fails in a thread therefore fails everything issued behind it on its lane, or `after` it on another, until `drain`
has raised its error. What that leaves of chunks is said in [Note: After a failed copy].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chunkmem.plan.model import LANE_LINKS, Lane
from chunkmem.runtime.device import ComputeDevice, runtime_mode
from chunkmem.runtime.events import DoneEvent, Event, Piece, copy_error, named_range, require_copyable
from chunkmem.runtime.queues import HostTask, Lanes
from chunkmem.runtime.streams import StreamLanes, computed
from chunkmem.runtime.timestamps import HostTimestamp, StreamClock


def open_lanes(compute: ComputeDevice, *, blocking: bool) -> Lanes:
    """Return the lanes for `compute`; with `blocking`, a copy is done when `copy` returns."""
    if blocking:
        return BlockingLanes(compute)
    return StreamLanes(compute) if compute.is_accelerator else Lanes()


class BlockingLanes(Lanes):
    """Copies run in the calling thread (on an accelerator, on its current stream) and are done when `copy` returns."""

    def __init__(self, compute: ComputeDevice) -> None:
        super().__init__(compute.clock)

    def copy(self, lane: Lane, pieces: Sequence[Piece], *, after: Sequence[Event], label: str) -> Event:
        self._require_open(label)
        for event in after:
            event.wait()
        start = self._clock.timestamp()
        with runtime_mode(), named_range(lane, label):
            require_copyable(lane, pieces, label)
            try:
                for target, source in pieces:
                    target.view(torch.uint8).copy_(source.view(torch.uint8))
            except Exception as error:
                raise copy_error(label, *LANE_LINKS[lane], error) from error
        return DoneEvent(start, self._clock.timestamp())

    def _issue(self, task: HostTask) -> Event:
        for event in task.after:
            event.wait()
        task.run()
        return DoneEvent(HostTimestamp(task.started_s), HostTimestamp(task.ended_s))

    def compute_event(self) -> Event:
        return computed(self._clock) if isinstance(self._clock, StreamClock) else super().compute_event()
