"""Lanes that are slow, and lanes that are late: that a missing wait shows with them, and a present one never."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from chunkmem.data.errors import StateError
from chunkmem.plan.model import Lane
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.events import Event
from chunkmem.testing import AdversarialLanes, ThrottledLanes
from tests.helpers.lanes import MakeLanes, lane_threads, lanes_by_name_fixture  # noqa: F401

MIB = 1 << 20
CPU = ComputeDevice(torch.device("cpu"))


def numbers(numel: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + numel, dtype=torch.float32)


# Throttled.


def no_sooner_than(happened: threading.Event) -> SimpleNamespace:
    """The module `time`, but that who sleeps waits for something else, too, however late a busy machine does that."""

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        happened.wait(60)

    return SimpleNamespace(perf_counter=time.perf_counter, sleep=sleep)


def test_a_throttled_copy_takes_its_time_while_the_caller_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = threading.Event()
    monkeypatch.setattr("chunkmem.testing.lanes.time", no_sooner_than(computed))
    lanes = ThrottledLanes(100 * MIB)
    source, target = torch.ones(8 * MIB, dtype=torch.uint8), torch.zeros(8 * MIB, dtype=torch.uint8)
    event = lanes.copy(Lane.H2D, [(target, source)], after=[], label="x")
    num_steps, x = 0, torch.ones(64, 64)
    while not event.done():
        x = x @ x / 64
        num_steps += 1
        if num_steps == 10:
            computed.set()
    stall = lanes.compute_waits(event)
    lanes.close()
    assert event.ended_s - event.started_s >= 0.08
    assert num_steps >= 10
    assert stall is None
    assert torch.equal(target, source)


def test_throttled_lanes_have_a_link_each_way_and_a_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=60)  # a copy to DEVICE ends while one to HOST is under way

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        both.wait()

    monkeypatch.setattr("chunkmem.testing.lanes.time", SimpleNamespace(perf_counter=time.perf_counter, sleep=sleep))
    lanes = ThrottledLanes(1 << 40, latency_s=0.03)
    buffers = [torch.zeros(8) for _ in range(4)]
    events = [
        lanes.copy(lane, [(buffers[2 * j + i], torch.ones(8))], after=[], label="x")
        for i in range(2)
        for j, lane in enumerate((Lane.H2D, Lane.D2H))
    ]
    lanes.drain()
    lanes.close()
    assert all(event.ended_s - event.started_s >= 0.03 for event in events)
    first_h2d, first_d2h, second_h2d, second_d2h = events
    assert first_d2h.started_s < first_h2d.ended_s <= second_h2d.started_s
    assert first_d2h.ended_s <= second_d2h.started_s


@pytest.mark.parametrize(("bytes_per_s", "latency_s"), [(0.0, 0.0), (-1.0, 0.0), (float("nan"), 0.0), (1e9, -1.0)])
def test_a_link_that_moves_nothing_is_refused(bytes_per_s: float, latency_s: float) -> None:
    with pytest.raises(StateError, match=f"no copy would end on a link of {bytes_per_s} bytes/s"):
        ThrottledLanes(bytes_per_s, latency_s=latency_s)


# Adversarial.

SEEDS = range(50)
LANES = (Lane.H2D, Lane.D2H, Lane.HOST_UPDATE)
LAZY = next(seed for seed in SEEDS if {AdversarialLanes(seed)._eagerness[lane] for lane in LANES} == {0.0})
"""Nothing runs that nothing waits for."""


def evict_and_fetch(seed: int, *, wait_for_eviction: bool) -> tuple[Tensor, Tensor]:
    """A slab is evicted to HOST and filled with other contents; return both."""
    lanes = AdversarialLanes(seed)
    slab, host_a, host_b = numbers(256), torch.zeros(256), numbers(256, 1000)
    out = lanes.copy(Lane.D2H, [(host_a, slab)], after=[], label="evict A")
    lanes.copy(Lane.H2D, [(slab, host_b)], after=[out] if wait_for_eviction else [], label="fetch B")
    lanes.close()
    return host_a, slab


def read_too_early(seed: int, *, wait: bool) -> Tensor:
    """Compute with a chunk that is fetched; return the result."""
    lanes = AdversarialLanes(seed)
    chunk = torch.zeros(256)
    event = lanes.copy(Lane.H2D, [(chunk, numbers(256))], after=[lanes.compute_event()], label="fetch")
    if wait:
        lanes.compute_waits(event)
    result = chunk * 2
    lanes.close()
    return result


def overwrite_too_early(seed: int, *, wait: bool) -> Tensor:
    """Compute into a slab that is being evicted; return what was evicted."""
    lanes = AdversarialLanes(seed)
    slab, host = numbers(256), torch.zeros(256)
    event = lanes.copy(Lane.D2H, [(host, slab)], after=[lanes.compute_event()], label="evict")
    if wait:
        lanes.compute_waits(event)
    slab.zero_()
    lanes.close()
    return host


def test_a_missing_event_between_lanes_shows() -> None:
    expected = (numbers(256), numbers(256, 1000))
    right = [evict_and_fetch(seed, wait_for_eviction=True) for seed in SEEDS]
    assert all(torch.equal(x, y) for found in right for x, y in zip(found, expected, strict=True))
    wrong = [evict_and_fetch(seed, wait_for_eviction=False) for seed in SEEDS]
    num_wrong = sum(not torch.equal(host_a, expected[0]) for host_a, _ in wrong)
    assert num_wrong >= 10


@pytest.mark.parametrize(("scene", "factor"), [(read_too_early, 2), (overwrite_too_early, 1)])
def test_computing_that_does_not_wait_shows(scene: Callable[..., Tensor], factor: int) -> None:
    assert all(torch.equal(scene(seed, wait=True), numbers(256) * factor) for seed in SEEDS)
    assert sum(not torch.equal(scene(seed, wait=False), numbers(256) * factor) for seed in SEEDS) >= 10


def completion_order(seed: int) -> list[str]:
    """The labels of a few copies in the order they were done, waits in between."""
    lanes = AdversarialLanes(seed)
    events: dict[str, Event] = {}
    for i in range(12):
        after = [events[f"{i - 3}"]] if i % 4 == 3 else []
        events[f"{i}"] = lanes.copy(
            (Lane.H2D, Lane.D2H)[i // 2 % 2], [(torch.zeros(8), numbers(8))], after=after, label=f"{i}"
        )
        if i == 6:
            lanes.compute_waits(events["2"])
            assert events["2"].done()
    lanes.drain()
    return sorted(events, key=lambda label: events[label].started_s)


def test_the_same_seed_does_the_same_and_others_differ() -> None:
    orders = {seed: completion_order(seed) for seed in SEEDS}
    assert all(completion_order(seed) == order for seed, order in orders.items())
    assert len({tuple(order) for order in orders.values()}) >= 10


def test_what_nothing_waits_for_may_run_or_stay_until_drain() -> None:
    num_pending = 0
    for seed in SEEDS:
        lanes = AdversarialLanes(seed)
        idle = lanes.copy(Lane.H2D, [(torch.zeros(8), numbers(8))], after=[], label="idle")
        lanes.compute_waits(lanes.copy(Lane.D2H, [(torch.zeros(8), numbers(8))], after=[], label="waited for"))
        num_pending += not idle.done()
        lanes.drain()
        assert idle.done()
    assert 10 <= num_pending <= 40


def test_time_passes_with_what_is_computed() -> None:
    num_late = 0
    for seed in SEEDS:
        lanes = AdversarialLanes(seed)
        copy = lanes.copy(Lane.H2D, [(torch.zeros(8), numbers(8))], after=[], label="x")
        at_once = copy.done()
        for _ in range(20):
            lanes.compute_event()
        num_late += copy.done() and not at_once
    assert num_late >= 10


def test_waiting_for_an_event_runs_no_more_than_the_dice_say() -> None:
    # d2h  [A]              B waits for A; nothing else has to run for it
    # h2d      [B] [C]
    num_held = 0
    for seed in SEEDS:
        lanes = AdversarialLanes(seed)
        a = lanes.copy(Lane.D2H, [(torch.zeros(8), numbers(8))], after=[], label="A")
        b = lanes.copy(Lane.H2D, [(torch.zeros(8), numbers(8))], after=[a], label="B")
        c = lanes.copy(Lane.H2D, [(torch.zeros(8), numbers(8))], after=[], label="C")
        b.wait()
        assert a.done()
        assert b.done()
        num_held += not c.done()
    assert num_held >= 10


def test_a_target_is_poisoned_when_its_copy_may_begin_and_not_before() -> None:
    lanes = AdversarialLanes(LAZY)
    slab, host_a, host_b = numbers(8), torch.zeros(8), numbers(8, 100)
    out = lanes.copy(Lane.D2H, [(host_a, slab)], after=[], label="evict A")
    into = lanes.copy(Lane.H2D, [(slab, host_b)], after=[out], label="fetch B")
    assert host_a.isnan().all()
    assert torch.equal(slab, numbers(8))
    lanes.compute_waits(out)
    assert torch.equal(host_a, numbers(8))
    assert slab.isnan().all()
    lanes.compute_waits(into)
    assert torch.equal(slab, host_b)


class NeverDone:
    started_s = ended_s = 0.0
    failure = None

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        raise AssertionError("waited for in vain")


def test_an_event_that_cannot_come_is_an_error() -> None:
    lanes = AdversarialLanes(0)
    stuck = lanes.copy(Lane.H2D, [(torch.zeros(8), numbers(8))], after=[NeverDone()], label="stuck")
    others = AdversarialLanes(LAZY).copy(Lane.D2H, [(torch.zeros(8), numbers(8))], after=[], label="elsewhere")
    waits = (
        stuck.wait,
        lanes.drain,
        lambda: lanes.compute_waits(NeverDone()),
        lambda: lanes.compute_waits(others),
    )
    for wait in waits:
        with pytest.raises(StateError, match="not of these lanes"):
            wait()
    assert not stuck.done()


# The fixture.


@pytest.mark.parametrize(
    ("name", "args", "kind"), [("adversarial", (3,), AdversarialLanes), ("throttled", (1e9,), ThrottledLanes)]
)
def test_the_fixture_makes_lanes_by_name(
    lanes_by_name: Callable[..., MakeLanes], name: str, args: tuple[float, ...], kind: type
) -> None:
    lanes = lanes_by_name(name, *args)(CPU)
    target = torch.zeros(8)
    lanes.compute_waits(lanes.copy(Lane.H2D, [(target, numbers(8))], after=[], label="x"))
    assert type(lanes) is kind
    assert torch.equal(target, numbers(8))


def test_the_fixture_has_closed_its_lanes() -> None:
    assert lane_threads() == set()
