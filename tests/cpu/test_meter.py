"""Non-model data on an accelerator, measured to the byte, and caps that hold it together with the chunks."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import chunkmem
from chunkmem.data.trace import Trace
from chunkmem.data.types import Tier
from chunkmem.runtime.lanes import BlockingLanes
from chunkmem.runtime.ledger import CACHE, Ledger
from chunkmem.runtime.meter import NonModelMeter
from chunkmem.runtime.pool import DevicePool
from chunkmem.runtime.tiers import Tiers
from tests.helpers.chunk_caps import count_chunks_alone
from tests.helpers.counted import CountedDevice, blocking, counted, counted_only
from tests.helpers.happens_before import SLOW
from tests.helpers.training import (
    AMPLE_NBYTES,
    HOST_NBYTES,
    STEPS,
    VARIANTS,
    Chunked,
    Outcome,
    Trainer,
    assert_same,
    capped,
    footprint,
    repeats,
    train_plain,
)
from tests.helpers.twins import WIDTH, mlp
from tests.helpers.zoo import ZOO, ZooModel

pytestmark = counted_only

PLAIN = VARIANTS[0]
SLABS = (4096, 8192, 12288)
CAP = 5 * 8192
QUICK = ("gpt", "cnn", "keyword", "inplace")
"""Two that need most in forward and backward, one with buffers, and one that reads its weights in odd ways."""
CASES = [
    pytest.param(case, marks=() if case.name in QUICK else pytest.mark.full, id=case.name)
    for case in ZOO
    if repeats(case)
]


@pytest.fixture
def device() -> Iterator[CountedDevice]:
    with counted() as device:
        yield device


# The meter.

Step = tuple[str, int]
STEP = st.one_of(
    st.tuples(st.just("take slab"), st.sampled_from(SLABS)),
    st.tuples(st.just("give slab"), st.integers(0, 9)),
    st.tuples(st.just("compute"), st.integers(1, 20_000)),
    st.tuples(st.just("drop"), st.integers(0, 9)),
    st.tuples(st.just("take peak"), st.just(0)),
)


@settings(max_examples=200 if "TESTS_ARE_FULL" in os.environ else 60)
@given(steps=st.lists(STEP, max_size=40), capacity=st.integers(0, 2))
def test_what_the_meter_says_is_true_in_any_order(steps: list[Step], capacity: int) -> None:
    """A slab that was taken within an interval counted as activations."""
    with counted() as device:
        ledger = Ledger(Tier.DEVICE, CAP, CAP)
        pool = DevicePool(ledger, device, capacity=capacity)
        before = device.used_nbytes()
        meter = NonModelMeter(device, ledger)
        pool.changing = meter.excluding
        meter.take_peak_nbytes()
        slabs, tensors, peak, highest = [], [], 0, 0
        for what, number in steps:
            if what == "take slab" and ledger.free_nbytes + ledger.now.get(CACHE, 0) >= number:
                slabs.append(pool.alloc("param", number))
            elif what == "give slab" and slabs:
                pool.free("param", slabs.pop(number % len(slabs)))
            elif what == "compute":
                tensors.append(torch.empty(number, dtype=torch.uint8))
            elif what == "drop" and tensors:
                tensors.pop(number % len(tensors))
            elif what == "take peak":
                assert meter.take_peak_nbytes() == before + peak
                peak = _nbytes(tensors)
            peak = max(peak, _nbytes(tensors))
            highest = max(highest, peak)
        assert meter.now_nbytes == before + _nbytes(tensors)
        assert meter.take_peak_nbytes() == before + peak
        assert meter.highest_nbytes == before + highest
        pool.close()


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def test_what_is_left_out_hides_nothing_before_and_after_it(device: CountedDevice) -> None:
    meter = NonModelMeter(device, Ledger(Tier.DEVICE, CAP, CAP))
    x = torch.empty(50, dtype=torch.uint8)
    del x
    with meter.excluding():
        x = torch.empty(1000, dtype=torch.uint8)
        del x
    x = torch.empty(20, dtype=torch.uint8)
    assert meter.take_peak_nbytes() == 50
    assert meter.take_peak_nbytes() == 20
    del x
    assert meter.highest_nbytes == 50


def test_steps_on_demand_leave_room_for_activations_and_no_more(device: CountedDevice) -> None:
    """The fewest bytes of chunks were taken off the highest sum: what chunks grew by counted as activations."""
    config = chunkmem.Config.from_dict({"memory": {"device": 100_000, "host": 100_000}})
    tiers = Tiers(config, device, BlockingLanes(device))
    tiers.device.cap_nbytes = 100_000
    slabs = [tiers.device_pool.alloc("param", 10_000) for _ in range(3)]
    x = torch.empty(5_000, dtype=torch.uint8)
    del x
    for slab in slabs:
        tiers.device_pool.free("param", slab)
    tiers.leave_room_for_activations()
    assert tiers.device.cap_nbytes == 95_000
    tiers.plan_decides(6_000)
    tiers.leave_room_for_activations(known_nbytes=7_000)
    assert tiers.device.cap_nbytes == 93_000


# Training.


@dataclass(frozen=True)
class Trained:
    required_nbytes: int
    trace: Trace
    highest_nbytes: int
    """Of non-model data."""


def train(case: ZooModel, device_nbytes: int, *, expected: Outcome | None = None) -> Trained:
    """Train in a manager of its own; what an earlier one has left is collected first."""
    gc.collect()
    config = {
        "memory": {"device": device_nbytes, "host": HOST_NBYTES},
        "default_chunk_size": case.chunk_numel,
    }
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(config), make_lanes=blocking) as manager:
        outcome = Trainer(case, PLAIN, WithinCap(manager, device_nbytes)).run()
        if expected is not None:
            assert_same(outcome, expected)
        assert manager.trace is not None
        meter = manager.runtime.tiers.meter
        assert meter is not None
        return Trained(manager.memory().device.required_nbytes, manager.trace, meter.highest_nbytes)


class WithinCap(Chunked):
    """Asserts after each step that followed a plan that nothing has passed the cap, and that it was followed."""

    def __init__(self, manager: chunkmem.ChunkManager, cap_nbytes: int) -> None:
        super().__init__(manager, follows=True)
        self.cap_nbytes = cap_nbytes
        self.num_planned = 0

    def after_step(self) -> None:
        device = self.manager.runtime.memory.compute
        assert isinstance(device, CountedDevice)
        if self.manager.plan is not None:
            assert device.seen_nbytes <= self.cap_nbytes
            is_followed = not self.manager.runtime.controller.residence.is_on
            assert device.num_reads == 1 or self.num_planned == 0 or not is_followed, "slabs are measured"
            self.num_planned += 1
        super().after_step()
        device.take_peak_nbytes()
        device.num_reads = device.seen_nbytes = 0


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
def test_a_recorded_step_shows_the_same_activations_under_any_cap(case: ZooModel, device: CountedDevice) -> None:
    ample = train(case, AMPLE_NBYTES)
    tight = train(case, ample.required_nbytes)
    assert [moment.non_model_peak_nbytes for moment in tight.trace.moments] == [
        moment.non_model_peak_nbytes for moment in ample.trace.moments
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES)
def test_required_nbytes_is_the_smallest_cap(case: ZooModel) -> None:
    """Planned steps passed it by what the first update had left behind; one byte less does not do."""
    expected = train_plain(case, PLAIN)
    with counted():
        required_nbytes = train(case, AMPLE_NBYTES, expected=expected).required_nbytes
        assert train(case, required_nbytes, expected=expected).required_nbytes == required_nbytes
        with pytest.raises(chunkmem.CapacityError, match=f"{required_nbytes} bytes") as raised:
            train(case, required_nbytes - 1)
    assert raised.value.needed_nbytes == required_nbytes


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
def test_two_errors_lead_to_a_cap_that_works(case: ZooModel, device: CountedDevice) -> None:
    """It took up to nine: each error asked for as much as one more access needed."""
    cap_nbytes, num_errors = case.slab_nbytes, 0
    while True:
        try:
            train(case, cap_nbytes)
            break
        except chunkmem.CapacityError as error:
            cap_nbytes = error.enough_nbytes or error.needed_nbytes
            num_errors += 1
    assert num_errors <= 2


class WithExcluded(nn.Module):
    """States of `table` are made by the first update, and stay on DEVICE outside of chunks."""

    def __init__(self, manager: chunkmem.ChunkManager) -> None:
        super().__init__()
        with manager.exclude():
            self.table = nn.Embedding(500, WIDTH)
        self.layers = nn.Sequential(*(mlp() for _ in range(4)))

    def forward(self, index: Tensor) -> Tensor:
        return self.layers(self.table(index))  # type: ignore[no-any-return]


def test_the_cap_holds_the_states_of_excluded_modules(device: CountedDevice) -> None:
    def steps(cap_nbytes: int) -> int:
        gc.collect()
        config = chunkmem.Config.from_dict(
            {
                "memory": {"device": cap_nbytes, "host": HOST_NBYTES},
                "default_chunk_size": WIDTH * WIDTH + WIDTH,
            }
        )
        with chunkmem.ChunkManager(config, make_lanes=blocking) as manager:
            with manager.init():
                model = WithExcluded(manager)
            optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
            side = WithinCap(manager, cap_nbytes)
            for step in range(STEPS):
                manager.backward(model(torch.arange(step, step + 8)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                side.after_step()
            return manager.memory().device.required_nbytes

    required_nbytes = steps(AMPLE_NBYTES)
    assert required_nbytes > 2 * 4 * 500 * WIDTH
    steps(required_nbytes)


def test_measuring_the_machine_is_no_activation() -> None:
    def measure(*_: object, **__: object) -> Any:
        torch.empty(AMPLE_NBYTES // 2, dtype=torch.uint8)
        return SLOW

    case = next(case for case in ZOO if case.name == "cnn")
    with counted(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("chunkmem.assembly.speeds.cached_machine", measure)
        assert train(case, AMPLE_NBYTES).highest_nbytes < AMPLE_NBYTES // 2


# Caps in chunks, for the tests of this folder on a machine with an accelerator.


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
def test_caps_can_be_for_chunks_alone(case: ZooModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest cap of a CPU does on an accelerator, and one slab less does not."""
    cap_nbytes, expected = footprint(case, PLAIN).required_nbytes, train_plain(case, PLAIN)

    def run(nbytes: int) -> int:
        with chunkmem.ChunkManager(capped(case, nbytes), make_lanes=blocking) as manager:
            assert_same(Trainer(case, PLAIN, Chunked(manager, follows=True)).run(), expected)
            return manager.memory().device.required_nbytes

    with counted():
        with pytest.raises(chunkmem.CapacityError, match="next to"):
            run(cap_nbytes)
        count_chunks_alone(monkeypatch)
        assert run(cap_nbytes) == cap_nbytes
        with pytest.raises(chunkmem.CapacityError):
            run(cap_nbytes - case.slab_nbytes)
