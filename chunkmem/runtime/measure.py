"""Measure how fast this machine copies and updates, and keep what was found for the next run."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from chunkmem.data.types import UpdateForm
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.model import Lane
from chunkmem.runtime.device import ComputeDevice, ram_nbytes, runtime_mode
from chunkmem.runtime.populate import num_cores
from chunkmem.runtime.queues import Lanes
from chunkmem.runtime.speeds import kept_speeds, median_s, processor, time_s
from chunkmem.runtime.tiers import TierCaps

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
    budget_s /= _NUM_MEASURED
    machine = partial(
        Machine,
        caps.device_nbytes,
        caps.host_nbytes,
        charges_non_model=compute.is_accelerator,
        one_processor=not compute.is_accelerator,
    )
    with runtime_mode():
        if not compute.is_accelerator:
            copy_Bps = _COPY_NBYTES / median_s(_ram_copies(compute), budget_s)
            return machine(host_links(h2d_Bps=copy_Bps, d2h_Bps=copy_Bps, latency_s=_hand_over_s(budget_s)))
        cpu = ComputeDevice(torch.device("cpu"))
        links = host_links(
            h2d_Bps=_COPY_NBYTES / median_s(_link_copies(compute, _COPY_NBYTES, to_device=True), budget_s),
            d2h_Bps=_COPY_NBYTES / median_s(_link_copies(compute, _COPY_NBYTES, to_device=False), budget_s),
            latency_s=median_s(_link_copies(compute, _SMALL_NBYTES, to_device=True), budget_s),
        )
        numel = _host_update_numel(caps)
        host_update_Bps, duplex_Bps = _update_Bps(cpu, numel, budget_s), _duplex_Bps(compute, budget_s)
        return machine(
            links,
            device_update_Bps=_update_Bps(compute, _DEVICE_UPDATE_NUMEL, budget_s),
            host_update_Bps=host_update_Bps,
            host_memory_Bps=max(_UPDATE_MOVES_PER_BYTE * host_update_Bps, duplex_Bps),
            duplex_Bps=duplex_Bps,
            host_form_Bps=tuple(
                (form, nbytes / median_s(partial(cpu.time_s, update), budget_s / len(UpdateForm)))
                for form, nbytes, update in (() if by_form is None else by_form(numel))
            ),
        )


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

    measure = partial(measure_machine, compute, caps, by_form=by_form)
    found = kept_speeds(Machine, measure, name="machine", made_of=_identity(compute, caps), path=path)
    return replace(found, device_nbytes=caps.device_nbytes, host_nbytes=caps.host_nbytes)


# Measuring.


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

    def copy_both() -> None:
        saving = other.submit(save)
        fetch()
        saving.result()

    with ThreadPoolExecutor(1, thread_name_prefix="chunkmem measure") as other:
        return 2 * _DUPLEX_NBYTES / median_s(partial(time_s, copy_both), budget_s)


def _hand_over_s(budget_s: float) -> float:
    """Return the seconds from handing a copy of 64 bytes to the thread of a lane until it is known to be done."""
    pieces = [(torch.zeros(_SMALL_NBYTES, dtype=torch.uint8), torch.ones(_SMALL_NBYTES, dtype=torch.uint8))]
    with contextlib.closing(Lanes()) as lanes:

        def copy() -> None:
            lanes.copy(Lane.H2D, pieces, after=(), label="measuring").wait()

        return median_s(partial(time_s, copy), budget_s)


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

    return numel * _UPDATE_NBYTES_PER_ELEMENT / median_s(lambda: compute.time_s(update), budget_s)


# Keeping.


def _identity(compute: ComputeDevice, caps: TierCaps) -> list[str]:
    """Return what the speeds depend on."""
    return [
        compute.name(),
        processor(),
        f"{num_cores()} cores",
        f"torch {torch.__version__}",
        f"{torch.get_num_threads()} threads",
        *([f"updates of {_host_update_numel(caps)} elements, by form"] if compute.is_accelerator else []),
    ]
