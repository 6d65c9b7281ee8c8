"""Measure how fast this machine copies and updates, and keep what was found for the next run."""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite
from pathlib import Path

import torch

from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.model import Lane
from chunkmem.runtime.device import ComputeDevice, ram_nbytes, runtime_mode
from chunkmem.runtime.queues import Lanes
from chunkmem.runtime.speed_file import kept_speeds, processor
from chunkmem.runtime.tiers import TierCaps
from chunkmem.types import Tier, UpdateForm

UpdatesByForm = Callable[[int], Iterable[tuple[UpdateForm, int, Callable[[], object]]]]
"""Of so many elements: for each form of an update on HOST the bytes it passes over, and what updates them."""

_COPY_NBYTES = 8 * 2**20
_NUM_COPIES = 8
"""Copied one after the other, so that a copy does not find its bytes in a cache."""
_SMALL_NBYTES = 64
_DUPLEX_NBYTES = 64 * 2**20
"""Long enough for both directions that how they begin does not count."""
_DEVICE_UPDATE_NUMEL, _HOST_UPDATE_NUMEL = 2**24, 2**26
_UPDATE_NBYTES_PER_ELEMENT = 16
"""PARAM, GRAD and two states in float32."""
_UPDATE_MOVES_PER_BYTE = 28 / 16
"""Bytes that an update moves, relative to the 16 bytes of an element: 16 are read and 12 are written."""
_NUM_CACHES = 4
"""An update on HOST passes over so many times what the last caches hold, so that it does not find its bytes there."""
_RAM_SHARE = 16
"""It takes no more than one part in so many of the RAM, nor more than the cap on HOST."""
_CACHES = Path("/sys/devices/system/cpu")
_MIN_REPEATS, _MAX_REPEATS = 3, 32
_NUM_MEASURED = 6


def measure_machine(
    compute: ComputeDevice, caps: TierCaps, *, by_form: UpdatesByForm | None = None, budget_s: float = 2.0
) -> Machine:
    """Measure the speeds of this machine; `budget_s` bounds the repetitions, of which each speed gets at least 3.

    Without an accelerator both directions are one and the same copy in RAM, and updates keep `inf`: they run on the
    cores that traced them. On an accelerator this resets its peak counter. There updates on HOST pass over 1 GiB of RAM
    or more: less would stay in the last cache of a server. They are taken to use all the bandwidth of HOST's memory.
    Those `by_form` are measured too: with states in 8 bits, the arithmetic may take longer than the bytes.

    Raises:
        PlanError: a speed came out as 0.
    """
    return _measure(compute, caps, by_form, budget_s / _NUM_MEASURED).machine(compute, caps)


def cached_machine(
    compute: ComputeDevice, caps: TierCaps, *, by_form: UpdatesByForm | None = None, path: Path | None = None
) -> Machine:
    """Return the speeds kept at `path`, or measure them and keep them there; the caps are always the given ones.

    The default is a file of the user's cache folder, another one for each device, processor, torch version, number of
    threads and size of what is updated on HOST. A file that cannot be used is replaced; where none can be written,
    nothing is kept.

    Raises:
        PlanError: a speed was measured as 0.
    """

    def measure() -> _Speeds:
        return _Speeds.of(measure_machine(compute, caps, by_form=by_form))

    made_of = _identity(compute, caps)
    return kept_speeds(_Speeds, measure, name="machine", made_of=made_of, path=path).machine(compute, caps)


@dataclass(frozen=True)
class _Speeds:
    """What is measured of a `Machine`."""

    h2d_Bps: float
    d2h_Bps: float
    latency_s: float
    device_update_Bps: float = inf
    host_update_Bps: float = inf
    duplex_Bps: float = inf
    by_form: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second of updates on HOST, by the name of their form."""

    @classmethod
    def of(cls, machine: Machine) -> _Speeds:
        fetch, save = machine.links[Tier.HOST, Tier.DEVICE], machine.links[Tier.DEVICE, Tier.HOST]
        update_Bps = machine.device_update_Bps, machine.host_update_Bps
        by_form = {form.value: Bps for form, Bps in machine.host_form_Bps}
        return cls(fetch.Bps, save.Bps, fetch.latency_s, *update_Bps, machine.duplex_Bps, by_form)

    def machine(self, compute: ComputeDevice, caps: TierCaps) -> Machine:
        return Machine(
            device_nbytes=caps.device_nbytes,
            host_nbytes=caps.host_nbytes,
            links=host_links(h2d_Bps=self.h2d_Bps, d2h_Bps=self.d2h_Bps, latency_s=self.latency_s),
            device_update_Bps=self.device_update_Bps,
            host_update_Bps=self.host_update_Bps,
            charges_non_model=compute.is_accelerator,
            one_processor=not compute.is_accelerator,
            host_memory_Bps=max(_UPDATE_MOVES_PER_BYTE * self.host_update_Bps, self.duplex_Bps),
            duplex_Bps=self.duplex_Bps,
            host_form_Bps=tuple((UpdateForm(name), Bps) for name, Bps in self.by_form.items()),
        )

    @property
    def is_sound(self) -> bool:
        """What is measured is positive, but for updates and both directions at once finite, and of known forms."""
        finite = (self.h2d_Bps, self.d2h_Bps, self.latency_s, *self.by_form.values())
        values = (*finite, self.device_update_Bps, self.host_update_Bps, self.duplex_Bps)
        are_positive = all(type(value) in (int, float) and value > 0 for value in values)
        return (
            are_positive and all(map(isfinite, finite)) and self.by_form.keys() <= {form.value for form in UpdateForm}
        )


# Measuring.


def _measure(compute: ComputeDevice, caps: TierCaps, by_form: UpdatesByForm | None, budget_s: float) -> _Speeds:
    """Spend about `budget_s` on each of the `_NUM_MEASURED` speeds."""
    with runtime_mode():
        if not compute.is_accelerator:
            copy_Bps = _COPY_NBYTES / _median_s(_ram_copies(compute), budget_s)
            return _Speeds(copy_Bps, copy_Bps, _hand_over_s(budget_s))
        cpu = ComputeDevice(torch.device("cpu"))
        return _Speeds(
            h2d_Bps=_COPY_NBYTES / _median_s(_link_copies(compute, _COPY_NBYTES, to_device=True), budget_s),
            d2h_Bps=_COPY_NBYTES / _median_s(_link_copies(compute, _COPY_NBYTES, to_device=False), budget_s),
            latency_s=_median_s(_link_copies(compute, _SMALL_NBYTES, to_device=True), budget_s),
            device_update_Bps=_update_Bps(compute, _DEVICE_UPDATE_NUMEL, budget_s),
            host_update_Bps=_update_Bps(cpu, _host_update_numel(caps), budget_s),
            duplex_Bps=_duplex_Bps(compute, budget_s),
            by_form={
                form.value: nbytes / _median_s(partial(cpu.time_s, update), budget_s / len(UpdateForm))
                for form, nbytes, update in (() if by_form is None else by_form(_host_update_numel(caps)))
            },
        )


def _median_s(measure: Callable[[], float], budget_s: float) -> float:
    """Return the median of what `measure` returns, without its first time; never 0."""
    measure()
    found: list[float] = []
    end_s = time.perf_counter() + budget_s
    while len(found) < _MIN_REPEATS or (len(found) < _MAX_REPEATS and time.perf_counter() < end_s):
        found.append(measure())
    # A clock too coarse for what it measures may say 0.
    return max(statistics.median(found), 1e-9)


def _ram_copies(compute: ComputeDevice) -> Callable[[], float]:
    """Return what copies the next 8 MiB within RAM, as the lanes do it, and how long that took."""
    source, target = (torch.ones(_NUM_COPIES * _COPY_NBYTES, dtype=torch.uint8) for _ in range(2))
    position = 0

    def measure() -> float:
        nonlocal position
        position = (position + 1) % _NUM_COPIES
        to, of = (memory.data_ptr() + position * _COPY_NBYTES for memory in (target, source))
        return compute.time_s(lambda: ctypes.memmove(to, of, _COPY_NBYTES))

    return measure


def _link_copies(compute: ComputeDevice, nbytes: int, *, to_device: bool) -> Callable[[], float]:
    """Return what copies between the accelerator and memory as HOST has it, and how long that took."""
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=compute.is_cuda)
    device = torch.ones(nbytes, dtype=torch.uint8, device=compute.device)
    target, source = (device, host) if to_device else (host, device)
    return lambda: compute.time_s(lambda: target.copy_(source, non_blocking=True))


def _duplex_Bps(compute: ComputeDevice, budget_s: float) -> float:
    """Return the bytes a second of copies in both directions at once, each issued by a thread and on a stream."""
    fetch, save = (_link_copies(compute, _DUPLEX_NBYTES, to_device=to_device) for to_device in (True, False))

    def measure(other: ThreadPoolExecutor) -> float:
        begin_s = time.perf_counter()
        saving = other.submit(save)
        fetch()
        saving.result()
        return time.perf_counter() - begin_s

    with ThreadPoolExecutor(1, thread_name_prefix="chunkmem measure") as other:
        return 2 * _DUPLEX_NBYTES / _median_s(lambda: measure(other), budget_s)


def _hand_over_s(budget_s: float) -> float:
    """Return the seconds from handing a copy of 64 bytes to the thread of a lane until it is known to be done."""
    pieces = [(torch.zeros(_SMALL_NBYTES, dtype=torch.uint8), torch.ones(_SMALL_NBYTES, dtype=torch.uint8))]
    with contextlib.closing(Lanes()) as lanes:

        def copy() -> None:
            lanes.copy(Lane.H2D, pieces, after=(), label="measuring").wait()

        return _median_s(partial(ComputeDevice(torch.device("cpu")).time_s, copy), budget_s)


def _host_update_numel(caps: TierCaps) -> int:
    """Return how many elements updates on HOST are measured with: beyond the caches, within RAM; a power of 2."""
    wanted = max(_HOST_UPDATE_NUMEL, _NUM_CACHES * _last_caches_nbytes() // _UPDATE_NBYTES_PER_ELEMENT)
    most = min(ram_nbytes() // _RAM_SHARE, caps.host_nbytes) // _UPDATE_NBYTES_PER_ELEMENT
    return 1 << max(1, min(wanted, most)).bit_length() - 1


def _last_caches_nbytes() -> int:
    """Return the sum of the processor's caches of level 3; 0 where the system does not say."""
    found: dict[str, int] = {}
    for folder in _CACHES.glob("cpu[0-9]*/cache/index3"):
        with contextlib.suppress(OSError, ValueError):
            size = (folder / "size").read_text().strip()  # such as 32768K
            cores = (folder / "shared_cpu_list").read_text().strip()
            found[cores] = int(size.removesuffix("K")) << 10
    return sum(found.values())


def _update_Bps(compute: ComputeDevice, numel: int, budget_s: float) -> float:
    param, grad, average, average_sq = (torch.ones(numel, dtype=torch.float32, device=compute.device) for _ in range(4))
    step = torch.ones((), dtype=torch.float32, device=compute.device)

    def update() -> None:
        torch._fused_adamw_(
            [param],
            [grad],
            [average],
            [average_sq],
            [],
            [step],
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    return numel * _UPDATE_NBYTES_PER_ELEMENT / _median_s(lambda: compute.time_s(update), budget_s)


# Keeping.


def _identity(compute: ComputeDevice, caps: TierCaps) -> list[str]:
    """Return what the speeds depend on."""
    return [
        compute.name(),
        processor(),
        f"{len(os.sched_getaffinity(0))} cores" if hasattr(os, "sched_getaffinity") else f"{os.cpu_count()} cores",
        f"torch {torch.__version__}",
        f"{torch.get_num_threads()} threads",
        *([f"updates of {_host_update_numel(caps)} elements, by form"] if compute.is_accelerator else []),
    ]
