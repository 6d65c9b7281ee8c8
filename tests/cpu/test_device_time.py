"""On an accelerator time is the device's: a host that issues in microseconds what takes milliseconds sees none of it.

host     h f f f f b b b u            <- issues, far ahead
COMPUTE  |-f-|-f-|~~|-f-|--b--|...     <- what a trace, a timeline and the planner are about; ~ is a stall
H2D           |--p----|
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.data.layout import Group
from chunkmem.data.trace import Kind, Mode, Trace
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.plan.model import Lane
from chunkmem.plan.simulate import simulate
from chunkmem.plan.timeline import Timeline
from chunkmem.runtime import timestamps
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.events import host_waits
from chunkmem.runtime.lanes import BlockingLanes
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.step_log import StepLog
from chunkmem.runtime.store import ChunkStore
from chunkmem.steps.recorder import Recorder
from tests.helpers.audit import audit
from tests.helpers.device_time import LINK_Bps, Stream, TimedDevice, TimedLanes, TimedLinear, TimingEvent, timed_device
from tests.helpers.spread import spread

WIDTH = 16
CHUNK_NUMEL = WIDTH * WIDTH + WIDTH
FORWARD_S = (0.010, 0.002, 0.004, 0.001, 0.020, 0.003, 0.005, 0.002)
"""Of each layer; a fetch takes about 1 ms."""
EXACT_S = 1e-4
"""What the host takes for all it issues within a moment."""
NUM_LEARNED = 4
"""Steps until durations are known: one is recorded, and three that follow its plan are timed."""
NUM_ANCHORS = 1
CHUNKS = [
    Chunk(ChunkId(Role.PARAM, at), Group(at, "float32", 4, 1, 1, ()), torch.float32, f"P{at}", ()) for at in (0, 1)
]


@pytest.fixture
def device() -> Iterator[TimedDevice]:
    with timed_device() as found:
        yield found


class Training:
    """Layers of known durations under a cap of some chunks."""

    def __init__(self, device: TimedDevice, *, num_chunks: float, **config: object) -> None:
        memory = {"device": int(num_chunks * 4 * CHUNK_NUMEL), "host": 4 << 20}
        opts = {"overlap_optimizer": False}
        tracer = {"warmup_gpu_chunk_mem_ratio": 1.0}
        self.device = device
        self.manager = chunkmem.ChunkManager(
            chunkmem.Config.from_dict(
                {
                    "memory": memory,
                    "default_chunk_size": CHUNK_NUMEL,
                    "client": {"opts": opts, "mem_tracer": tracer},
                    **config,
                }
            ),
            make_lanes=TimedLanes,
        )
        torch.manual_seed(0)
        with self.manager.init():
            self.model = nn.Sequential(*(TimedLinear(WIDTH, device, s) for s in FORWARD_S))
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=self.manager, lr=1e-3)

    def train(self) -> None:
        self.manager.backward(self.model(torch.ones(2, WIDTH)).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> Timeline:
        self.train()
        found = self.manager.timeline()
        assert found is not None
        return found

    @property
    def trace(self) -> Trace:
        assert self.manager.trace is not None
        return self.manager.trace

    @property
    def predicted(self) -> Timeline:
        assert self.manager.plan is not None
        return simulate(self.manager.plan, self.trace)

    def measured_s(self) -> Counter[str]:
        """The seconds of each layer's forward and backward, by the trace."""
        found: Counter[str] = Counter()
        for moment in self.trace.moments:
            if moment.duration_s > EXACT_S:
                found[moment.label] += moment.duration_s
        return found


COMPUTE_S = {
    **{f"{at} forward": s for at, s in enumerate(FORWARD_S)},
    **{f"{at} backward": 2 * s for at, s in enumerate(FORWARD_S)},
}


@pytest.mark.parametrize("num_chunks", [4, 7, 60])
def test_a_recorded_step_has_the_times_of_the_device(device: TimedDevice, num_chunks: float) -> None:
    """Blocking copies do not take the blame for what the device has still to compute."""
    training = Training(device, num_chunks=num_chunks)
    training.step()
    training.step()
    assert training.measured_s() == pytest.approx(COMPUTE_S, abs=EXACT_S)


@pytest.mark.parametrize("num_chunks", [4, 12, 60])
def test_what_was_predicted_happens(device: TimedDevice, num_chunks: float) -> None:
    training = Training(device, num_chunks=num_chunks)
    for _ in range(NUM_LEARNED + 1):
        happened = training.step()
    predicted = training.predicted
    assert happened.plan_misses == 0
    assert training.measured_s() == pytest.approx(COMPUTE_S, abs=EXACT_S)
    assert happened.step_s == pytest.approx(predicted.step_s, abs=EXACT_S)
    # On an accelerator the simulator calls it no stall if the host waits to update.
    updates = {at for at, moment in enumerate(training.trace.moments) if moment.kind is Kind.UPDATE}
    stalls_s = [span.end_s - span.start_s for span in happened.spans if span.is_stall and span.moment not in updates]
    assert sum(stalls_s) == pytest.approx(predicted.stall_s, abs=EXACT_S)
    is_hooked = num_chunks < 60  # with room for all, nobody hears of calls inside, and it is not measured
    assert happened.python_s == (pytest.approx(predicted.python_s, abs=EXACT_S) if is_hooked else None)
    assert (happened.prefetched, happened.fetched) == (predicted.prefetched, predicted.fetched)
    for span in happened.spans:
        if span.nbytes and span.start_s < happened.step_s:  # the others are under way for the next step
            assert span.end_s - span.start_s == pytest.approx(span.nbytes / LINK_Bps, abs=EXACT_S)
    audit(training.manager)


@spread(num_chunks=(4, 12), num_steps=(1, 2, NUM_LEARNED + 1))
def test_moments_and_stalls_are_the_step(device: TimedDevice, num_chunks: float, num_steps: int) -> None:
    """Each moment begins where the one before it ends, and is computing but for its stalls."""
    training = Training(device, num_chunks=num_chunks)
    for _ in range(num_steps):
        happened = training.step()
    moments = [span for span in happened.spans if span.lane is Lane.COMPUTE and not span.is_stall]
    assert [span.moment for span in moments] == list(range(len(moments)))
    assert all(one.end_s == other.start_s for one, other in itertools.pairwise(moments))
    assert (moments[0].start_s, moments[-1].end_s) == (0.0, happened.step_s)
    for stall in (span for span in happened.spans if span.is_stall):
        around = moments[stall.moment]
        assert around.start_s <= stall.start_s <= stall.end_s <= around.end_s + EXACT_S
    log = training.manager.runtime.controller.now.step_log
    assert log is not None
    assert sum(log.durations().values()) + happened.stall_s == pytest.approx(happened.step_s, abs=EXACT_S)


def test_a_step_that_nothing_is_learnt_from_is_timed_where_it_waits(device: TimedDevice) -> None:
    training = Training(device, num_chunks=4)
    records, timelines = [], []
    for _ in range(NUM_LEARNED + 4):
        before = device.num_records
        timelines.append(training.step())
        records.append(device.num_records - before)
    num_moments, num_copies = len(training.trace.moments), 2 * timelines[-1].fetched
    assert num_moments < records[NUM_LEARNED - 1]
    assert max(records[NUM_LEARNED + 1 :]) < 5 * num_copies < num_moments + 3 * num_copies
    # Moments without a timestamp lie where the trace has them.
    timed, placed = timelines[NUM_LEARNED - 1], timelines[-1]
    assert placed.step_s == pytest.approx(timed.step_s, abs=EXACT_S)
    assert placed.stall_s == pytest.approx(timed.stall_s, abs=EXACT_S)
    begins = [
        [span.start_s for span in timeline.spans if span.lane is Lane.COMPUTE and not span.is_stall]
        for timeline in (timed, placed)
    ]
    assert begins[1] == pytest.approx(begins[0], abs=2 * EXACT_S)


@pytest.mark.parametrize("num_chunks", [7, 12])
def test_a_step_that_is_slow_at_first_is_shown_as_it_was(
    device: TimedDevice, monkeypatch: pytest.MonkeyPatch, num_chunks: float
) -> None:
    """The trace knows nothing of it, but what copies come after has a timestamp, and that is where a moment began.

    trace    |-f-|-f-|-b-|-b-|                 <- of each moment, its share of the step
    COMPUTE  |-----f-----|-----f-----|-b-|-b-|
    D2H                                  |--g--|   <- issued in the second b, and after the first
    """
    training = Training(device, num_chunks=num_chunks)
    for _ in range(NUM_LEARNED + 1):
        training.step()
    for layer in training.model:
        layer.register_forward_hook(lambda *_: device.launch(0.05))
    began_s: dict[int, float] = {}
    begin = StepLog.begin

    def watched(log: StepLog, moment: int, kind: Kind, chunk: Chunk) -> None:
        began_s[moment] = max(device.computing.end_s, device.host_s)
        begin(log, moment, kind, chunk)

    monkeypatch.setattr(StepLog, "begin", watched)
    happened = training.step()
    log = training.manager.runtime.controller.now.step_log
    assert log is not None
    assert log.began[1][1] is None, "not every moment is timed"
    shown_s = {span.moment: span.start_s for span in happened.spans if span.lane is Lane.COMPUTE and not span.is_stall}
    evictions = [span for span in happened.spans if span.lane is Lane.D2H]
    assert evictions
    for span in evictions:
        assert shown_s[span.moment] <= span.start_s
        assert shown_s[span.moment] == pytest.approx(began_s[span.moment] - began_s[0], abs=EXACT_S)
    assert sorted(shown_s.values()) == [shown_s[moment] for moment in sorted(shown_s)]


def test_training_neither_reads_timestamps_nor_waits_for_them(
    device: TimedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(device, num_chunks=60)  # nothing is copied
    for _ in range(NUM_LEARNED + 1):
        training.step()
    with monkeypatch.context() as patch:
        for name in ("synchronize", "elapsed_time"):
            patch.setattr(TimingEvent, name, lambda *_: pytest.fail("a timestamp is waited for"))
        began_s = device.host_s
        for _ in range(3):
            training.train()
        issued_s = device.host_s - began_s
    assert issued_s < 3 * 0.01 * sum(COMPUTE_S.values()), "the host runs ahead"
    timeline = training.manager.timeline()
    assert timeline is not None
    assert timeline.step_s == pytest.approx(sum(COMPUTE_S.values()), abs=EXACT_S)


# Events are used again, whatever becomes of a step.


class Interrupted(Exception):
    pass


def interrupted(training: Training) -> None:
    """Stop in the middle of forward."""

    def stop(*_: object) -> None:
        raise Interrupted

    handle = training.model[5].register_forward_pre_hook(stop)
    with pytest.raises(Interrupted):
        training.train()
    handle.remove()


def skipping(training: Training) -> None:
    """Leave a layer out."""
    skipped, training.model[3] = training.model[3], nn.Identity()
    training.train()
    training.model[3] = skipped


def evaluated(training: Training) -> None:
    with torch.no_grad():
        training.model(torch.ones(2, WIDTH))


@pytest.mark.few(2)
@pytest.mark.parametrize("disturb", [Training.train, interrupted, skipping, evaluated])
def test_events_go_back_to_their_pool(device: TimedDevice, disturb: Callable[[Training], None]) -> None:
    training = Training(device, num_chunks=4)
    for _ in range(NUM_LEARNED + 1):
        training.step()
    num_events = []
    for _ in range(10):
        disturb(training)
        training.step()
        device.host_s = max(device.host_s, device.computing.end_s)  # an event that is not over is not used again
        num_events.append(device.num_events)
    assert len(set(num_events[6:])) == 1, "the events of some steps are used for all others"
    training.manager.close()
    del training
    gc.collect()
    unused = sum(len(recorded.unused) for recorded in device.clock._recorded.values())
    assert unused == device.num_events - NUM_ANCHORS


@pytest.mark.parametrize("num_chunks", [4, 7])
def test_a_followed_step_asks_the_device_less_often_than_it_records(device: TimedDevice, num_chunks: float) -> None:
    """Each question is a call of CUDA. Asked about each event on its own, there were nearly three for each."""
    training = Training(device, num_chunks=num_chunks)
    for _ in range(NUM_LEARNED + 4):
        training.train()
    num_queries, num_records = device.num_queries, device.num_records
    for _ in range(4):
        training.train()
    assert device.num_queries - num_queries <= 1.2 * (device.num_records - num_records)


def test_an_event_that_is_over_tells_of_all_before_on_its_stream_alone(device: TimedDevice) -> None:
    other = Stream(device)
    other.run(2.0)
    elsewhere = device.clock.timestamp_on(other)
    first = device.clock.timestamp()
    device.launch(1.0)
    second = device.clock.timestamp()
    assert not second.is_over()
    device.host_s += 1.5
    assert second.is_over()
    num_queries = device.num_queries
    assert first.is_over()
    assert device.num_queries == num_queries
    assert not elsewhere.is_over()
    device.launch(1.0)
    assert not device.clock.timestamp().is_over()


# Waits of other kinds.


@pytest.mark.parametrize("computing_s", [0.0, 0.3, 2.0])
def test_waiting_for_ranks_is_a_stall_once_nothing_is_left_to_compute(device: TimedDevice, computing_s: float) -> None:
    """Other ranks hold the host up for a second; the device computes meanwhile."""

    def wait() -> None:
        device.host_s += 1.0

    pager = Pager(ChunkStore({}, device.clock))
    pager.policy = recorder = Recorder(Mode.TRAIN, clock=device.clock, take_peaks=lambda: (0, 0))
    pager.exchange(CHUNKS, reader="x")
    issued = device.clock.timestamp()
    device.launch(computing_s)
    pager.arrive(CHUNKS, wait, reader="x", issued=issued)
    recorder.end()
    log = recorder.step_log
    assert log.timeline(None, {}, {Tier.DEVICE: 0}).stall_s == pytest.approx(max(0.0, 1 - computing_s), abs=EXACT_S)
    assert sum(log.durations().values()) == pytest.approx(computing_s, abs=EXACT_S)
    arrived_s = max(1.0, computing_s)
    assert [taken.duration_s for _, _, taken in log.exchanges] == pytest.approx([arrived_s] * 2, abs=EXACT_S)


@pytest.mark.parametrize("computing_s", [0.0, 0.3, 2.0])
def test_a_host_that_waits_is_a_stall_once_nothing_is_left_to_compute(device: TimedDevice, computing_s: float) -> None:
    log, lanes = StepLog(device.clock), TimedLanes(device)
    log.begin(0, Kind.HOLD, CHUNKS[0])
    device.launch(computing_s)
    copied = lanes.copy(Lane.D2H, [(torch.empty(0), torch.empty(0))], after=[], label="x")
    link: Any = lanes._streams[Lane.D2H]
    link.run(1.0)
    copied = lanes.copy(Lane.D2H, [(torch.empty(0), torch.empty(0))], after=[], label="y")
    log.waited(Lane.D2H, host_waits(copied, device.clock))
    log.end()
    assert log.timeline(None, {}, {Tier.DEVICE: 0}).stall_s == pytest.approx(max(0.0, 1.0 - computing_s), abs=EXACT_S)


def test_copies_that_block_do_not_take_what_was_computed_before(device: TimedDevice) -> None:
    lanes = BlockingLanes(device)
    device.launch(2.0)
    device.computing.queued_s = 0.5  # the copy's, from the next timestamp on
    event = lanes.copy(Lane.D2H, [(torch.zeros(4), torch.ones(4))], after=[], label="x")
    assert event.ended_s - event.started_s == pytest.approx(0.5, abs=EXACT_S)


def test_a_new_anchor_changes_no_time(device: TimedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timestamps, "_ANCHOR_LIFE_S", 0.5)
    taken, issued_s = [], []
    for _ in range(10):
        taken.append(device.clock.timestamp())
        issued_s.append(device.host_s)
        device.launch(0.3)
        device.host_s = device.computing.end_s
    assert [timestamp.at_s for timestamp in taken] == pytest.approx(issued_s, abs=EXACT_S), "nothing was computing then"
