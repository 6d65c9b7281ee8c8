"""What every kind of lanes in RAM promises, adversarial or not: contents, order, addresses, nothing left behind."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from chunkmem.data.errors import StateError
from chunkmem.plan.model import Lane
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.lanes import BlockingLanes, open_lanes
from chunkmem.runtime.queues import Lanes
from chunkmem.runtime.storage import ChunkStorage, default_backend
from chunkmem.testing import AdversarialLanes, ThrottledLanes
from tests.helpers.lanes import lane_threads

CPU = ComputeDevice(torch.device("cpu"))
KINDS: dict[str, Callable[[], Lanes]] = {
    "blocking": lambda: BlockingLanes(CPU),
    "threads": Lanes,
    "throttled": lambda: ThrottledLanes(1 << 30, latency_s=1e-4),
    "adversarial": lambda: AdversarialLanes(seed=7),
}


@pytest.fixture(params=KINDS)
def lanes(request: pytest.FixtureRequest) -> Iterator[Lanes]:
    opened = KINDS[request.param]()
    yield opened
    opened.close()


def numbers(numel: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + numel, dtype=torch.float32)


# What every kind promises.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_the_bytes_arrive(lanes: Lanes, dtype: torch.dtype) -> None:
    source = torch.randint(0, 255, (4096,), dtype=torch.uint8).view(dtype)
    there, back = torch.zeros_like(source), torch.zeros_like(source)
    out = lanes.copy(Lane.D2H, [(there, source)], after=[lanes.compute_event()], label="there")
    home = lanes.copy(Lane.H2D, [(back, there)], after=[out], label="back")
    lanes.compute_waits(home)
    assert out.done()
    assert home.done()
    assert torch.equal(there.view(torch.uint8), source.view(torch.uint8))
    assert torch.equal(back.view(torch.uint8), source.view(torch.uint8))
    assert out.started_s <= out.ended_s <= home.started_s <= home.ended_s <= time.perf_counter()


def test_pieces_are_one_copy(lanes: Lanes) -> None:
    host, sources = torch.zeros(100), [numbers(36, 1), numbers(64, 50)]
    out = lanes.copy(Lane.D2H, list(zip(host.split([36, 64]), sources, strict=True)), after=[], label="out")
    targets = [torch.zeros(36), torch.zeros(64)]
    pieces = list(zip(targets, host.split([36, 64]), strict=True))
    home = lanes.copy(Lane.H2D, pieces, after=[out], label="home")
    lanes.compute_waits(home)
    assert out.done()
    assert home.done()
    assert all(map(torch.equal, targets, sources))
    assert out.started_s <= out.ended_s <= home.started_s <= home.ended_s


def test_no_piece_is_copied_if_one_is_refused() -> None:
    target = torch.zeros(8)
    with contextlib.closing(Lanes()) as lanes, pytest.raises(StateError, match="36 bytes cannot be copied to 32"):
        pieces = [(target, torch.ones(8)), (torch.zeros(8), torch.zeros(9))]
        lanes.copy(Lane.H2D, pieces, after=[], label="block 3")
    assert torch.equal(target, torch.zeros(8))


def test_a_lane_keeps_its_order(lanes: Lanes) -> None:
    target = torch.zeros(1024)
    events = [lanes.copy(Lane.H2D, [(target, numbers(1024, i))], after=[], label=str(i)) for i in range(20)]
    lanes.compute_waits(events[-1])
    assert all(event.done() for event in events)
    assert torch.equal(target, numbers(1024, 19))
    assert all(before.ended_s <= after.started_s for before, after in itertools.pairwise(events))


def test_drain_finishes_what_nothing_waits_for(lanes: Lanes) -> None:
    sources, targets = [numbers(512, i) for i in range(10)], [torch.zeros(512) for _ in range(10)]
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        lanes.copy((Lane.H2D, Lane.D2H)[i % 2], [(target, source)], after=[], label=str(i))
    lanes.drain()
    assert all(torch.equal(source, target) for source, target in zip(sources, targets, strict=True))
    lanes.drain()


def test_a_copy_lands_in_the_memory_it_was_issued_for(lanes: Lanes) -> None:
    #   chunk A's slab is evicted (copy issued), taken away at once and given to chunk B, which is then fetched into it
    backend = default_backend()
    a, b = (ChunkStorage(backend, device=torch.device("cpu"), dtype=torch.float32) for _ in range(2))
    slab = torch.empty(4 * 1024, dtype=torch.uint8)
    host_a, host_b = torch.zeros(1024), numbers(1024, 5000)
    a.attach(slab.untyped_storage())
    a.flat.copy_(numbers(1024))
    out = lanes.copy(Lane.D2H, [(host_a, a.flat)], after=[lanes.compute_event()], label="evict A")
    a.detach()
    b.attach(slab.untyped_storage())
    into = lanes.copy(Lane.H2D, [(b.flat, host_b)], after=[out], label="fetch B")
    b.detach()
    lanes.compute_waits(into)
    assert torch.equal(host_a, numbers(1024))
    assert torch.equal(slab.view(torch.float32), host_b)


def test_close_finishes_copies_and_is_for_good(lanes: Lanes) -> None:
    target = torch.zeros(1024)
    lanes.copy(Lane.D2H, [(target, numbers(1024))], after=[], label="last")
    lanes.close()
    lanes.close()
    assert torch.equal(target, numbers(1024))
    with pytest.raises(StateError, match="late: the lanes are closed"):
        lanes.copy(Lane.D2H, [(target, numbers(1024))], after=[], label="late")
    lanes.drain()
    assert lane_threads() == set()


def bad_copies() -> dict[str, tuple[Lane, Tensor, Tensor, str]]:
    flat = torch.zeros(8)
    return {
        "sizes": (Lane.H2D, flat, torch.zeros(9), "36 bytes cannot be copied to 32"),
        "shape": (Lane.H2D, flat, torch.zeros(2, 4), r"not one of shape \[2, 4\]"),
        "strides": (Lane.H2D, flat, torch.zeros(16)[::2], r"only 1-D contiguous tensors"),
        "lane": (Lane.COMPUTE, flat, torch.ones(8), "lane compute does not copy"),
    }


@pytest.mark.parametrize("case", bad_copies())
def test_what_would_overwrite_other_memory_is_refused(lanes: Lanes, case: str) -> None:
    lane, target, source, message = bad_copies()[case]
    with pytest.raises(StateError, match=f"block 3: .*{message}"):
        lanes.copy(lane, [(target, source)], after=[], label="block 3")
    assert torch.equal(target, torch.zeros(8))


@pytest.mark.parametrize("kind", ["threads", "throttled", "adversarial"])
def test_copies_outside_of_ram_are_refused(kind: str) -> None:
    with pytest.raises(StateError, match="from cpu to meta is not a copy within RAM"):
        KINDS[kind]().copy(Lane.H2D, [(torch.empty(8, device="meta"), torch.ones(8))], after=[], label="x")


class Forbidden(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise AssertionError(f"{func} was dispatched")


def test_modes_of_the_caller_do_not_reach_a_copy(lanes: Lanes) -> None:
    source, target = numbers(64), torch.zeros(64)
    with torch.inference_mode(), torch.device("meta"), Forbidden():
        lanes.compute_waits(lanes.copy(Lane.H2D, [(target, source)], after=[], label="x"))
    assert torch.equal(target, source)


def test_a_profile_names_the_copies(lanes: Lanes) -> None:
    target, source = torch.zeros(64), numbers(64)
    with torch.profiler.profile() as profile, Forbidden():
        lanes.copy(Lane.D2H, [(target, source)], after=[], label="grad 3")
        lanes.drain()
    assert [event.name for event in profile.events() if event.name.startswith("chunkmem")] == ["chunkmem d2h grad 3"]


def test_a_thousand_copies_leave_nothing_behind(lanes: Lanes) -> None:
    source, target = numbers(64), torch.zeros(64)

    def copy_many(num: int) -> None:
        event = lanes.compute_event()
        for i in range(num):
            event = lanes.copy((Lane.H2D, Lane.D2H)[i % 2], [(target, source)], after=[event], label="x")
            lanes.compute_waits(event)
        lanes.drain()

    copy_many(10)
    gc.collect()
    num_objects, num_threads = len(gc.get_objects()), threading.active_count()
    copy_many(1000)
    gc.collect()
    assert threading.active_count() == num_threads
    assert len(gc.get_objects()) - num_objects < 50  # some caches of the interpreter; 1000 would be one a copy


def test_a_finished_copy_keeps_neither_its_tensors_nor_the_events_before_it(lanes: Lanes) -> None:
    source = numbers(64)
    first = lanes.copy(Lane.D2H, [(torch.zeros(64), source)], after=[], label="first")
    second = lanes.copy(Lane.H2D, [(torch.zeros(64), source)], after=[first], label="second")
    lanes.compute_waits(second)
    lanes.drain()
    alive = weakref.ref(source)
    del source
    assert alive() is None
    assert first not in gc.get_referents(second, *gc.get_referents(second))


def test_open_lanes_picks() -> None:
    assert isinstance(open_lanes(CPU, blocking=True), BlockingLanes)
    lanes = open_lanes(CPU, blocking=False)
    assert isinstance(lanes, Lanes)
    lanes.close()
