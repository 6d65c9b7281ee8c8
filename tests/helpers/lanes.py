"""Adversarial and throttled lanes by name, as `make_lanes` takes them. In RAM: on an accelerator the test is skipped.

A test file gets the fixture with ``from tests.helpers.lanes import lanes_by_name_fixture  # noqa: F401``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.queues import Lanes
from chunkmem.testing import AdversarialLanes, ThrottledLanes

MakeLanes = Callable[[ComputeDevice], Lanes]


def _in_ram(make: Callable[[], Lanes]) -> MakeLanes:
    def make_lanes(compute: ComputeDevice) -> Lanes:
        if compute.is_accelerator:
            pytest.skip("these lanes work in RAM only")
        return make()

    return make_lanes


def adversarial(seed: int) -> MakeLanes:
    """Copies as late, and in as odd an order, as their events allow."""
    return _in_ram(lambda: AdversarialLanes(seed))


def throttled(bytes_per_s: float, *, latency_s: float = 0.0) -> MakeLanes:
    """Copies as slow as a link of `bytes_per_s` each way."""
    return _in_ram(lambda: ThrottledLanes(bytes_per_s, latency_s=latency_s))


FACTORIES: dict[str, Callable[..., MakeLanes]] = {"adversarial": adversarial, "throttled": throttled}


@pytest.fixture(name="lanes_by_name")
def lanes_by_name_fixture() -> Iterator[Callable[..., MakeLanes]]:
    """``lanes_by_name("adversarial", 3)`` or ``lanes_by_name("throttled", 1e9)``; closed when the test ends."""
    opened: list[Lanes] = []

    def by_name(name: str, *args: float, **options: float) -> MakeLanes:
        make = FACTORIES[name](*args, **options)

        def make_lanes(compute: ComputeDevice) -> Lanes:
            opened.append(make(compute))
            return opened[-1]

        return make_lanes

    yield by_name
    for lanes in opened:
        lanes.close()


def lane_threads() -> set[str]:
    """The names of the threads of lanes that are alive."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("chunkmem ")}
