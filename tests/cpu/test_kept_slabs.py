"""Slabs kept for reuse while a plan is followed on an accelerator: within the cap together with activations.

The accelerator is simulated in RAM. What its activations take is what the trace says.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import chunkmem
from chunkmem.cli.main import main
from chunkmem.data.trace import Trace
from chunkmem.runtime import device
from chunkmem.runtime.build import storage_library
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.events import Event
from chunkmem.runtime.kept import NativeReclaimable
from chunkmem.runtime.plan_executor import PlanExecutor
from chunkmem.runtime.pool import DevicePool, Slab
from chunkmem.runtime.queues import Lanes
from tests.helpers.audit import audit
from tests.helpers.counted_time import count_time
from tests.helpers.happens_before import SLOW, HappensBefore
from tests.helpers.overlapped import WIDTH, Run, assert_alike
from tests.helpers.simulated import ClockedEvent, ClockedLanes, SimulatedAccelerator
from tests.helpers.training import compute_device

pytestmark = pytest.mark.skipif(compute_device().type != "cpu", reason="the accelerator is simulated in RAM")

SLAB_NBYTES = 20_032
CAP_NBYTES = 8 * SLAB_NBYTES
STEPS = 5


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ComputeDevice, "default", lambda index=None: SimulatedAccelerator())
    monkeypatch.setattr("chunkmem.assembly.speeds.cached_machine", lambda compute, caps, by_form: SLOW)


def run_with(make_lanes: object = lambda compute: Lanes()) -> Run:
    return Run(overlap=False, device_nbytes=CAP_NBYTES, num_blocks=10, make_lanes=make_lanes)  # type: ignore[arg-type]


def trace_with_activations() -> Trace:
    """Return the trace of a step whose activations take none to four slabs, more and less by turns."""
    run = run_with()
    run.step(0)
    run.step(1)
    trace = run.manager.trace
    assert trace is not None
    wave = [0, 1, 3, 4, 3, 0]
    moments = (
        replace(moment, non_model_peak_nbytes=wave[at // 4 % len(wave)] * SLAB_NBYTES)
        for at, moment in enumerate(trace.moments)
    )
    run.manager.close()
    return replace(trace, moments=tuple(moments))


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return, for each planned moment, the bytes of its chunks and of the slabs kept in addition, once it is served.

    Slabs and activations are within the cap at its end, and whenever memory is allocated.
    """
    perform, allocate = PlanExecutor._perform, DevicePool._allocate
    seen: list[tuple[int, int]] = []
    activations = [0]
    room: list[int] = []
    """Of the moment whose actions run."""

    def checked(self: PlanExecutor, ready: object) -> None:
        now_nbytes = self.trace.moments[self._cursor].non_model_peak_nbytes
        activations[0] = min(activations[0], now_nbytes)  # where two moments meet
        room.append(CAP_NBYTES - now_nbytes)
        perform(self, ready)  # type: ignore[arg-type]
        room.clear()
        ledger, activations[0] = self._tiers.device, now_nbytes
        assert ledger.total_nbytes + now_nbytes <= CAP_NBYTES, "kept slabs take what activations need"
        seen.append((ledger.chunk_nbytes, ledger.total_nbytes - ledger.chunk_nbytes))

    def allocated(self: DevicePool, nbytes: int) -> object:
        assert self.ledger.total_nbytes + nbytes + activations[0] <= CAP_NBYTES, "a slab is one too many"
        assert not room or self.room_nbytes == room[0], "the room is another moment's"
        return allocate(self, nbytes)

    monkeypatch.setattr(PlanExecutor, "_perform", checked)
    monkeypatch.setattr(DevicePool, "_allocate", allocated)
    return seen


def test_kept_slabs_and_activations_stay_within_the_cap(moments: list[tuple[int, int]]) -> None:
    """A plan fills the cap with chunks and activations; slabs that were free in between came on top of both."""
    trace = trace_with_activations()
    moments.clear()
    run = run_with()
    run.manager.trace = trace
    for seed in range(STEPS):
        run.step(seed)
        timeline = run.manager.timeline()
        assert timeline is not None
        assert seed == 0 or timeline.plan_misses == 0
    assert len(moments) >= (STEPS - 1) * len(trace.moments)
    kept = [kept_nbytes for _, kept_nbytes in moments]
    assert max(kept) > 2 * SLAB_NBYTES, "what is left of the cap is not used"


def test_the_thread_that_issues_does_not_wait_for_copies_of_freed_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Giving up a slab that is still being read held all launches up until the copy was over.

    Where computing takes longer than copies, as on a machine that does other things too, none is being read.
    """
    count_time(monkeypatch)
    trace = trace_with_activations()
    waited: list[str] = []
    in_pool: list[str] = []

    def noting(name: str) -> None:
        method = getattr(DevicePool, name)

        def noted(self: DevicePool, *args: object) -> object:
            in_pool.append(name)
            try:
                return method(self, *args)
            finally:
                in_pool.pop()

        monkeypatch.setattr(DevicePool, name, noted)

    def note_wait(self: ClockedEvent) -> None:
        if in_pool and not self.done():
            waited.append(f"HOST in {in_pool[-1]}")
        wait(self)

    def note_compute(self: ClockedLanes, event: ClockedEvent) -> float:
        if in_pool and not event.done():
            waited.append("COMPUTE")
        return compute_waits(self, event)

    wait, compute_waits = ClockedEvent.wait, ClockedLanes.compute_waits
    for name in ("alloc", "free", "trim"):
        noting(name)
    monkeypatch.setattr(ClockedEvent, "wait", note_wait)
    monkeypatch.setattr(ClockedLanes, "compute_waits", note_compute)
    with HappensBefore() as checker:
        run = run_with(checker.lanes)
        run.manager.trace = trace
        for seed in range(STEPS):
            run.step(seed)
    checker.assert_ordered()
    assert set(waited) == {"COMPUTE"}


def test_what_a_plan_kept_is_given_up_when_steps_are_served_on_demand() -> None:
    """Nobody counts the activations of an evaluation, which would have come on top of all that is kept."""
    trace = trace_with_activations()
    run = run_with()
    run.manager.trace = trace
    for seed in range(3):
        run.step(seed)
    ledger, pool = run.manager.runtime.tiers.device, run.manager.runtime.tiers.device_pool
    assert ledger.cap_nbytes == CAP_NBYTES
    run.manager.runtime.forget_plans()
    with torch.no_grad():
        run.model(torch.randn(16, WIDTH))
    peak_nbytes = max(moment.non_model_peak_nbytes for moment in trace.moments)
    assert ledger.cap_nbytes == CAP_NBYTES - peak_nbytes
    assert len(pool._kept) <= 2


class Asking(NativeReclaimable):
    """An allocator that asks for all it may have, now and then, before an allocation."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        self._give_back = library.chunkmem_give_back
        self._give_back.restype = ctypes.c_int64
        self._draw = random.Random(0)
        self.num_asked, self.taken_nbytes = 0, 0

    def offer(self, memory: torch.Tensor, events: Sequence[Event], stream: torch.Stream) -> None:
        super().offer(memory, events, SimpleNamespace(stream_id=0))  # type: ignore[arg-type]

    def ask(self, *, chance: float = 0.3) -> None:
        if self._draw.random() < chance:
            self.num_asked += 1
            self.taken_nbytes += self._give_back(0, -1)  # the CPU


@pytest.fixture
def library() -> ctypes.CDLL:
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        library = storage_library("nothing is tested")
    assert library is not None, "csrc/kept.cpp does not compile"
    return library


def test_memory_that_is_offered_is_taken_or_used_again(library: ctypes.CDLL) -> None:
    asking = Asking(library)
    used, given, never = (torch.full((1 << 20,), 7, dtype=torch.uint8) for _ in range(3))
    stream: Any = None
    asking.offer(used, [], stream)
    asking.offer(given, [], stream)
    assert asking.take(used)
    asking.ask(chance=1)
    assert asking.taken_nbytes == given.numel()
    assert [asking.take(memory) for memory in (used, given, never)] == [True, False, True]
    assert given.untyped_storage().nbytes() == 0
    assert used.sum() == 7 * used.numel()


def test_memory_outlives_whoever_has_offered_it(library: ctypes.CDLL) -> None:
    asking = Asking(library)
    memory, stream = torch.ones(1 << 20, dtype=torch.uint8), None
    asking.offer(memory, [], stream)  # type: ignore[arg-type]
    del memory
    gc.collect()
    asking.ask(chance=1)
    assert asking.taken_nbytes == 1 << 20


def test_a_pool_that_is_gone_has_nothing_on_offer(library: ctypes.CDLL) -> None:
    """Its events would be gone, too, which the allocator waits for in their order."""
    asking, other = Asking(library), Asking(library)
    memory, stream = torch.ones(1 << 20, dtype=torch.uint8), None
    asking.offer(memory, [], stream)  # type: ignore[arg-type]
    del asking
    gc.collect()
    other.ask(chance=1)
    assert other.taken_nbytes == 0
    assert memory.untyped_storage().nbytes() == 1 << 20


def test_what_the_allocator_takes_changes_no_bit(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept slabs lose their memory at any time between two operations of the pool; the plan takes other memory."""
    allocate, asking = DevicePool._allocate, Asking(library)

    def asked(self: DevicePool, nbytes: int) -> object:
        asking.ask()
        return allocate(self, nbytes)

    trace = trace_with_activations()
    plain = run_with()
    plain.manager.trace = trace
    run = run_with()
    run.manager.trace = trace
    pool = run.manager.runtime.tiers.device_pool
    pool.reclaimable = asking
    monkeypatch.setattr(DevicePool, "_allocate", asked)
    free = DevicePool.free

    def freed(self: DevicePool, role: str, slab: Slab) -> None:
        free(self, role, slab)
        if self is pool:
            asking.ask(chance=0.05)

    monkeypatch.setattr(DevicePool, "free", freed)
    for seed in range(STEPS):
        assert run.step(seed) == plain.step(seed)
        audit(run.manager)
    assert asking.taken_nbytes >= 5 * SLAB_NBYTES
    assert_alike(run, plain)
    run.manager.close()
    assert pool.ledger.total_nbytes == 0


class Card(SimulatedAccelerator):
    """An accelerator of 1 MiB whose allocator has expandable segments or not."""

    def __init__(self, *, is_expandable: bool) -> None:
        super().__init__()
        self.is_expandable = is_expandable

    def capacity_nbytes(self) -> int:
        return 1 << 20

    def has_expandable_segments(self) -> bool:
        return self.is_expandable


@pytest.mark.parametrize(
    ("share", "is_expandable", "warns"), [(0.9, False, True), (0.9, True, False), (0.5, False, False)]
)
def test_a_cap_near_the_whole_device_needs_expandable_segments(
    monkeypatch: pytest.MonkeyPatch, share: float, is_expandable: bool, warns: bool
) -> None:
    monkeypatch.setattr(ComputeDevice, "default", lambda index=None: Card(is_expandable=is_expandable))
    config = chunkmem.Config.from_dict({"memory": {"device": int(share * (1 << 20)), "host": 1 << 20}})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        chunkmem.ChunkManager(config, make_lanes=lambda compute: Lanes()).close()
    told = [str(warning.message) for warning in caught if "expandable_segments:True" in str(warning.message)]
    assert len(told) == warns


def test_info_names_the_allocator_setting_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ComputeDevice, "default", lambda index=None: Card(is_expandable=False))
    monkeypatch.setattr("chunkmem.runtime.numa.advice_for", lambda compute: "cores of the other socket")
    assert main(["info"]) == 0
    said = capsys.readouterr().out
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in said
    assert "cores of the other socket" in said


@pytest.mark.parametrize(("status", "says"), [(0, "granted"), (2, "refused; copies will be slower")])
def test_info_says_whether_the_driver_pins(
    status: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = Card(is_expandable=True)
    card.is_cuda = True
    pinned: list[int] = []
    monkeypatch.setattr(ComputeDevice, "default", lambda index=None: card)
    monkeypatch.setattr(Card, "pin", ComputeDevice.pin)
    monkeypatch.setattr(Card, "unpin", lambda self, address: pinned.remove(address))
    monkeypatch.setattr(ComputeDevice, "pci_address", lambda self: None)
    monkeypatch.setattr(device, "_clear_cuda_error", lambda of: None)
    monkeypatch.setattr(device, "_cuda_register", lambda address, nbytes: status or pinned.append(address) or 0)
    assert main(["info"]) == 0
    assert f"pinned memory   {says}" in capsys.readouterr().out
    assert pinned == []


def test_measured_times_and_readers_share_a_stream_each() -> None:
    """torch has 32 streams, and gives the first out again after the last, which would be that of a lane's copies."""
    made: list[str] = []

    class Made(Card):
        def stream(self) -> Any:
            made.append("stream")
            return SimpleNamespace()

    card = Made(is_expandable=True)
    for _ in range(3):
        assert card._stream_of("timed") is card._stream_of("timed")
        assert card._stream_of("readers") is card._stream_of("readers")
    assert len(made) == 2
