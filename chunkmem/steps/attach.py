"""Who hears what the executor announces while a step runs: a recorder, a performer, or nobody."""

from __future__ import annotations

from chunkmem.runtime.events import Lanes
from chunkmem.runtime.executor import DemandExecutor
from chunkmem.runtime.performer import Performer
from chunkmem.runtime.store import Chunk
from chunkmem.trace.model import Kind
from chunkmem.tracing.recorder import Recorder


def ignore(kind: Kind, chunk: Chunk, reader: object) -> None:
    """Listen to nothing."""
    return


def attach_recorder(executor: DemandExecutor, lanes: Lanes, recorder: Recorder) -> None:
    """Serve on demand, and have it written down."""
    detach(executor, lanes)
    executor.on_event = recorder.event
    executor.store.on_copy = recorder.journal.served
    executor.on_arrival = recorder.journal.exchanged


def attach_performer(executor: DemandExecutor, performer: Performer) -> None:
    """Have a plan followed by a performer that has begun its lap."""
    executor.on_event = performer.event
    executor.before_demand = performer.depart
    executor.drain = performer.drain
    executor.update_tier = performer.update_tier
    executor.update_order = performer.update_order
    executor.is_planned = lambda: performer.is_on_plan
    executor.store.on_copy = performer.journal.served
    executor.on_arrival = performer.journal.exchanged


def detach(executor: DemandExecutor, lanes: Lanes) -> None:
    """Serve on demand; copies are over when this returns."""
    lanes.drain()
    executor.reserve_log({})
    executor.on_event = ignore
    executor.before_demand = executor.drain = lambda: None
    executor.update_tier = lambda group: None
    executor.update_order = lambda groups: ()
    executor.is_planned = lambda: False
    executor.store.on_copy = lambda chunk, target, started_s: None
    executor.on_arrival = lambda chunk, issued_s, waited_s: None
