"""What is asked of torch for an accelerator of any kind, and what of CUDA alone."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.cli import info
from chunkmem.data.errors import ConfigError
from chunkmem.optim.kernels import Kernels
from chunkmem.runtime import measure
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.lanes import BlockingLanes
from chunkmem.testing.training import generators_kept
from tests.helpers.simulated import SimulatedAccelerator

OTHERS = ("xpu", "privateuseone", "mtia")
"""Accelerators of torch's that are not CUDA's."""


def refuse(*given: object, **named: object) -> None:
    raise AssertionError("CUDA is asked")


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever chunkmem could ask of CUDA fails the test."""
    for name in ("cudart", "Stream", "Event", "device_count", "current_device", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, refuse)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have torch see two accelerators of a type, the second of which is current."""

    def see(kind: str) -> None:
        answers: dict[str, Callable[..., Any]] = {
            "current_accelerator": lambda check_available=False: torch.device(kind),
            "device_count": lambda: 2,
            "current_device_index": lambda: 1,
            "get_memory_info": lambda device: (100 + device.index, 1000 + device.index),
            "memory_allocated": lambda device: 10 + device.index,
            "max_memory_allocated": lambda device: 50 + device.index,
            "reset_peak_memory_stats": lambda device: None,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.accelerator, name, answer)

    return see


class Waiting:
    """A stream, and those that it has waited for."""

    def __init__(self) -> None:
        self.waited: list[Waiting] = []

    def wait_stream(self, other: Waiting) -> None:
        self.waited.append(other)


def test_streams_of_a_program_take_turns(seen: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a chunk is accessed on comes after the one before; freed memory may go to any of them."""
    seen("xpu")
    first, second = Waiting(), Waiting()
    device = ComputeDevice.default()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: first)
    assert device.current_stream() is device.current_stream() is first
    device.free_in_order()
    assert first.waited == []
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: second)
    assert device.current_stream() is device.current_stream() is second
    assert (first.waited, second.waited) == ([], [first])
    assert list(device.computing_streams()) == [first, second]
    device.free_in_order()
    assert first.waited == [second]
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: first)
    assert list(device.computing_streams()) == [second, first]
    assert first.waited == [second, second]


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("kind", OTHERS)
def test_any_accelerator_is_computed_on_and_asked_for_its_memory(
    seen: Callable[[str], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen(kind)
    given_back: list[str] = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: given_back.append(kind))
    for device in (ComputeDevice.default(), ComputeDevice(torch.device("cpu"))):
        device.give_back_freed()
    assert given_back == [kind]
    current, first = ComputeDevice.default(), ComputeDevice.default(0)
    assert (current.device, first.device) == (torch.device(kind, 1), torch.device(kind, 0))
    assert current.is_accelerator
    assert (first.capacity_nbytes(), current.capacity_nbytes()) == (1000, 1001)
    assert (current.used_nbytes(), current.take_peak_nbytes()) == (11, 51)
    with pytest.raises(ConfigError, match=r"^there is no accelerator 2: 2 are visible to this process$"):
        ComputeDevice.default(2)


def test_a_wheel_for_cuda_without_a_driver_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch names the accelerator that it was built for, unless it is asked whether there is one.
    def named(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", named)
    assert ComputeDevice.default().device == torch.device("cpu")


def test_an_accelerator_without_streams_is_left_alone(seen: Callable[[str], None]) -> None:
    seen("mps")
    assert ComputeDevice.default().device == torch.device("cpu")
    with pytest.raises(ConfigError, match="there is no accelerator 1: 0 are visible"):
        ComputeDevice.default(1)


def test_a_capacity_that_torch_cannot_tell_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, seen: Callable[[str], None]
) -> None:
    def lacks(device: torch.device) -> tuple[int, int]:
        # As torch does for a backend that has no such query; of its lines only the first is told.
        raise NotImplementedError("getMemoryInfo is not implemented yet\nC++ frames")

    seen("mtia")
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lacks)
    message = r"^torch cannot tell how much memory mtia:1 has \(getMemoryInfo .* yet\); set memory.device$"
    with pytest.raises(ConfigError, match=message):
        ComputeDevice.default().capacity_nbytes()


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("kind", [*OTHERS, "cpu"])
def test_host_memory_is_registered_with_cuda_alone(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not ComputeDevice(torch.device(kind)).pin(mmap.mmap(-1, 4096), 0)


@pytest.mark.parametrize("hip", [None, "7.1"])
def test_kernels_for_cuda_are_for_cuda_alone(monkeypatch: pytest.MonkeyPatch, hip: str | None) -> None:
    # torch calls ROCm's devices cuda, and nvcc makes nothing for them.
    monkeypatch.setattr(torch.version, "hip", hip)
    assert ComputeDevice(torch.device("cuda", 0)).runs_cuda_kernels == (hip is None)
    assert not any(ComputeDevice(torch.device(kind)).runs_cuda_kernels for kind in (*OTHERS, "cpu"))


@pytest.mark.parametrize("is_ours", [False, True])
def test_without_kernels_of_ours_updates_run_in_pytorch_and_nobody_is_warned(
    monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    asked: list[bool] = []

    def load(*, with_cuda: bool) -> Kernels:
        asked.append(with_cuda)
        return Kernels(frozenset())

    compute = SimulatedAccelerator()
    compute.runs_cuda_kernels = is_ours
    monkeypatch.setattr(ComputeDevice, "default", lambda index=None: compute)
    monkeypatch.setattr("chunkmem.assembly.parts.load_kernels", load)
    memory = {"device": "4MiB", "host": "4MiB"}
    config = chunkmem.Config.from_dict({"memory": memory, "precision": "bf16"})
    lanes = BlockingLanes(ComputeDevice(torch.device("cpu")))
    with chunkmem.ChunkManager(config, make_lanes=lambda _: lanes) as manager:
        model = manager.wrap(nn.Linear(4, 4))
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        manager.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
    assert asked == [is_ours]


class _Event:
    """An event of torch's, as it was asked for."""

    def __init__(self, *given: object, **named: object) -> None:
        self.given, self.named = given, named


def test_a_thread_that_waits_for_cuda_gives_its_core_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    event: Any = ComputeDevice(torch.device("cuda", 0)).timing_event()
    assert event.named == {"enable_timing": True, "blocking": True}


@pytest.mark.usefixtures("no_cuda")
def test_events_of_other_accelerators_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", _Event)
    event: Any = ComputeDevice(torch.device("xpu", 1)).timing_event()
    assert (event.given, event.named) == ((torch.device("xpu", 1),), {"enable_timing": True})


@pytest.mark.parametrize(("cores", "threads"), [(16, 14), (3, 1), (2, 1), (1, 1)])
def test_updates_leave_two_cores_to_the_threads_that_launch(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert ComputeDevice(torch.device("cuda", 0)).num_update_threads() == threads


def test_without_an_accelerator_updates_take_the_threads_of_torch() -> None:
    assert ComputeDevice(torch.device("cpu")).num_update_threads() == torch.get_num_threads()


def test_updates_of_any_accelerator_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "median_s", lambda work, budget_s: (work(), 2.0)[1])
    assert measure._update_Bps(Untimed(), 1000, 0.1) == 1000 * 16 / 2


class Untimed(SimulatedAccelerator):
    """One whose streams are not there to be timed."""

    def time_s(self, work: Callable[[], object]) -> float:
        work()
        return 1.0


def test_the_names_of_devices() -> None:
    assert ComputeDevice(torch.device("cpu")).name() == "cpu"
    assert ComputeDevice(torch.device("mtia", 0)).name() == "mtia", "torch has no names for these"


def test_the_generators_of_all_accelerators_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed is set on all of them. Torch warned of several, and before 2.13 it kept those of CUDA, on any machine."""
    states = [torch.tensor(1), torch.tensor(2)]
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "get_rng_state", lambda device: states[device])
    monkeypatch.setattr(torch.xpu, "set_rng_state", lambda state, device: kept.insert(device, state))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with generators_kept(torch.device("xpu", 1)):
            assert kept == []
    assert kept == states


def test_rocm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert info._cuda() == "ROCm 7.1"
