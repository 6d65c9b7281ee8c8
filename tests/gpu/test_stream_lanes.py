"""Lanes that are streams: order by events alone, the host free meanwhile, device time told in host time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from chunkmem.data.errors import StateError
from chunkmem.data.trace import Kind
from chunkmem.plan.model import Lane
from chunkmem.runtime import timestamps
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.lanes import BlockingLanes, open_lanes
from chunkmem.runtime.step_log import StepLog
from chunkmem.runtime.storage import ChunkStorage, default_backend
from chunkmem.runtime.streams import StreamLanes
from chunkmem.runtime.timestamps import StreamClock

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LONG_CYCLES = 400_000_000
"""Cycles of the device, 0.2 s or so: what a test issues meanwhile takes a hundredth of that."""
NO_CHUNK: Any = None
CLOCK_SLACK_S = 1e-3
"""An anchor is late by the time its event takes to reach the host."""


@pytest.fixture(scope="module", autouse=True)
def loaded_kernels() -> None:
    """CUDA loads a kernel when it is first launched, and waits for the device to do so: not in the middle of a test."""
    torch.cuda._sleep(1)
    on_device(8).mul_(2).mul(2).copy_(on_host(8))
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def idle_device(loaded_kernels: None) -> None:
    """Begin with nothing under way: some tests are over while the device still sleeps."""
    torch.cuda.synchronize()


@pytest.fixture
def lanes() -> Iterator[StreamLanes]:
    opened = open_lanes(ComputeDevice.default(), blocking=False)
    assert isinstance(opened, StreamLanes)
    yield opened
    opened.close()


def on_device(numel: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + numel, dtype=torch.float32, device="cuda")


def on_host(numel: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + numel, dtype=torch.float32).pin_memory()


def test_there_and_back(lanes: StreamLanes) -> None:
    source, there, back = on_device(4096), on_host(4096, 1), on_device(4096, 2)
    out = lanes.copy(Lane.D2H, [(there, source)], after=[lanes.compute_event()], label="there")
    home = lanes.copy(Lane.H2D, [(back, there)], after=[out, lanes.compute_event()], label="back")
    lanes.compute_waits(home)
    assert torch.equal(back, source)
    assert out.done()
    assert home.done()
    assert torch.equal(there, source.cpu())


def test_a_copy_comes_after_what_was_computed_before_it(lanes: StreamLanes) -> None:
    source, host = on_device(1024), on_host(1024, 7)
    torch.cuda._sleep(LONG_CYCLES)
    source.mul_(2)
    event = lanes.copy(Lane.D2H, [(host, source)], after=[lanes.compute_event()], label="x")
    assert not event.done()
    event.wait()
    assert torch.equal(host, torch.arange(1024.0) * 2)


def test_computing_comes_after_the_copy_it_waits_for_and_the_host_goes_on(lanes: StreamLanes) -> None:
    chunk, host = on_device(1024, 7), on_host(1024)
    torch.cuda._sleep(LONG_CYCLES)
    fetched = lanes.copy(Lane.H2D, [(chunk, host)], after=[lanes.compute_event()], label="x")
    lanes.compute_waits(fetched)
    result = chunk * 2
    assert not fetched.done()
    assert torch.equal(result.cpu(), host * 2)


def test_a_thread_that_waits_gives_its_core_up(lanes: StreamLanes) -> None:
    # CUDA's own way is to spin, on a core that the threads which launch operators need.
    torch.cuda._sleep(LONG_CYCLES)
    event = lanes.compute_event()
    begin_s, begin_thread_s = time.perf_counter(), time.thread_time()
    event.wait()
    assert time.thread_time() - begin_thread_s < 0.2 * (time.perf_counter() - begin_s)


def test_copies_run_while_the_device_computes(lanes: StreamLanes) -> None:
    chunk, host = on_device(1 << 20, 7), on_host(1 << 20)
    ready = lanes.compute_event()
    torch.cuda._sleep(LONG_CYCLES)
    fetched = lanes.copy(Lane.H2D, [(chunk, host)], after=[ready], label="x")
    computed = lanes.compute_event()
    fetched.wait()
    assert not computed.done()
    computed.wait()
    assert fetched.ended_s < computed.ended_s


def test_lanes_are_in_order_and_ordered_by_events_between_them(lanes: StreamLanes) -> None:
    # A slab is evicted, filled, evicted, filled, ...: without the events, the copies of one lane overtake the other's.
    slab = on_device(1 << 20)
    hosts, targets = [on_host(1 << 20, i) for i in range(8)], [torch.empty(1 << 20).pin_memory() for _ in range(8)]
    events = [lanes.compute_event()]
    for host, target in zip(hosts, targets, strict=True):
        events.append(lanes.copy(Lane.H2D, [(slab, host)], after=events[-1:], label="in"))
        events.append(lanes.copy(Lane.D2H, [(target, slab)], after=events[-1:], label="out"))
    lanes.drain()
    assert all(event.done() for event in events)
    assert all(torch.equal(host, target) for host, target in zip(hosts, targets, strict=True))
    assert all(one.ended_s <= other.started_s + 1e-5 for one, other in itertools.pairwise(events))  # resolution


def test_a_copy_lands_in_the_memory_it_was_issued_for(lanes: StreamLanes) -> None:
    backend, device = default_backend(), torch.device("cuda", torch.cuda.current_device())
    a, b = (ChunkStorage(backend, device=device, dtype=torch.float32) for _ in range(2))
    slab = torch.empty(4 * 1024, dtype=torch.uint8, device=device)
    host_a, host_b = on_host(1024, 9), on_host(1024, 5000)
    a.attach(slab.untyped_storage())
    a.flat.copy_(on_device(1024))
    torch.cuda._sleep(LONG_CYCLES)
    out = lanes.copy(Lane.D2H, [(host_a, a.flat)], after=[lanes.compute_event()], label="evict A")
    a.detach()
    b.attach(slab.untyped_storage())
    into = lanes.copy(Lane.H2D, [(b.flat, host_b)], after=[out], label="fetch B")
    b.detach()
    lanes.compute_waits(into)
    assert torch.equal(slab.view(torch.float32).cpu(), host_b)
    assert torch.equal(host_a, torch.arange(1024.0))


@pytest.mark.parametrize("anchor_life_s", [0.0, 30.0])
def test_times_are_the_hosts(monkeypatch: pytest.MonkeyPatch, lanes: StreamLanes, anchor_life_s: float) -> None:
    monkeypatch.setattr(timestamps, "_ANCHOR_LIFE_S", anchor_life_s)
    chunk, host = on_device(1 << 22), on_host(1 << 22)
    torch.cuda.synchronize()
    before_s = time.perf_counter()
    event = lanes.copy(Lane.H2D, [(chunk, host)], after=[], label="x")
    event.wait()
    after_s = time.perf_counter()
    assert before_s - CLOCK_SLACK_S <= event.started_s < event.ended_s <= after_s + CLOCK_SLACK_S


def test_draining_waits_for_the_lanes_and_not_for_the_device(
    monkeypatch: pytest.MonkeyPatch, lanes: StreamLanes
) -> None:
    chunk, host = on_device(1024, 7), on_host(1024)
    torch.cuda.synchronize()
    monkeypatch.setattr(torch.cuda, "synchronize", None)
    torch.cuda._sleep(LONG_CYCLES)
    copied = lanes.copy(Lane.H2D, [(chunk, host)], after=[], label="x")
    lanes.drain()
    assert copied.done()
    assert not lanes.compute_event().done()


def test_a_stall_is_how_long_computing_waits_and_not_the_host(lanes: StreamLanes) -> None:
    chunk, host = on_device(1024, 7), on_host(1024)
    with lanes._streams[Lane.H2D]:
        torch.cuda._sleep(LONG_CYCLES)
    fetched = lanes.copy(Lane.H2D, [(chunk, host)], after=[], label="late")
    before_s = time.perf_counter()
    stall = lanes.compute_waits(fetched)
    assert not fetched.done()
    fetched.wait()
    over_s = time.perf_counter()
    assert stall is not None
    seen = {
        "computing was over": stall.started_s - before_s,
        "the copy began": fetched.started_s - before_s,
        "the copy ended": fetched.ended_s - before_s,
        "the host had it": over_s - before_s,
    }
    assert 0.05 < stall.duration_s <= over_s - before_s + CLOCK_SLACK_S, f"seconds since the host asked: {seen}"
    assert lanes.compute_waits(fetched) is None, "it is there"


def test_no_stall_where_there_is_more_to_compute(lanes: StreamLanes) -> None:
    chunk, host = on_device(1024, 7), on_host(1024)
    # However fast copies are, this one is not over yet, and will be before what is computed now.
    with lanes._streams[Lane.H2D]:
        torch.cuda._sleep(LONG_CYCLES // 4)
    torch.cuda._sleep(LONG_CYCLES)
    stall = lanes.compute_waits(lanes.copy(Lane.H2D, [(chunk, host)], after=[], label="early"))
    assert stall is not None, "the host cannot tell yet"
    assert stall.duration_s == 0.0


def test_moments_last_as_long_as_the_device_computes() -> None:
    log = StepLog(ComputeDevice.default().clock)
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    log.begin(0, Kind.HOLD, NO_CHUNK)
    began.record()
    torch.cuda._sleep(LONG_CYCLES)
    ended.record()
    log.begin(1, Kind.RELEASE, NO_CHUNK)
    log.end()
    assert not ended.query()
    durations = log.durations()
    assert durations[0] == pytest.approx(1e-3 * began.elapsed_time(ended), abs=CLOCK_SLACK_S)
    assert durations[1] < CLOCK_SLACK_S


def test_timing_events_are_used_again() -> None:
    compute = ComputeDevice.default()
    for _ in range(20):
        log = StepLog(compute.clock)
        for moment in range(100):
            log.begin(moment, Kind.HOLD, NO_CHUNK)
        log.end()
        assert sum(log.durations().values()) >= 0.0
    del log
    assert isinstance(compute.clock, StreamClock)
    (recorded,) = compute.clock._recorded.values()
    assert 102 <= len(recorded.unused) <= 3 * 102


def test_a_thousand_copies_keep_no_memory(lanes: StreamLanes) -> None:
    chunk, host = on_device(1024), on_host(1024)
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        out = lanes.copy(Lane.D2H, [(host, chunk)], after=[lanes.compute_event()], label="out")
        lanes.compute_waits(lanes.copy(Lane.H2D, [(chunk, host)], after=[out], label="in"))
    lanes.drain()
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(chunk.cpu(), torch.arange(1024.0))


def test_closed_lanes_copy_no_more(lanes: StreamLanes) -> None:
    chunk, host = on_device(1024, 7), on_host(1024)
    event = lanes.copy(Lane.H2D, [(chunk, host)], after=[lanes.compute_event()], label="x")
    lanes.close()
    lanes.close()
    assert event.done()
    with pytest.raises(StateError, match="late: the lanes are closed"):
        lanes.copy(Lane.H2D, [(chunk, host)], after=[], label="late")


def test_a_profile_names_the_copies(lanes: StreamLanes) -> None:
    with torch.profiler.profile() as profile:
        lanes.copy(Lane.H2D, [(on_device(64), on_host(64))], after=[lanes.compute_event()], label="param 3")
        lanes.drain()
    assert "chunkmem h2d param 3" in {event.name for event in profile.events()}


def test_blocking_copies_are_done_when_issued() -> None:
    lanes = open_lanes(ComputeDevice.default(), blocking=True)
    assert isinstance(lanes, BlockingLanes)
    source, host = on_device(1024), on_host(1024, 7)
    torch.cuda._sleep(LONG_CYCLES)
    source.mul_(2)
    computed = lanes.compute_event()
    event = lanes.copy(Lane.D2H, [(host, source)], after=[computed], label="x")
    assert computed.done()
    assert event.done()
    assert torch.equal(host, torch.arange(1024.0) * 2)
    lanes.close()
