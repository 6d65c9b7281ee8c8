"""What the device gives, and what small things cost; each function is one row of the probe."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.timing import device_median_s, host_median_s, per_call_s
from benchmarks.gpu.work import compute_device

MIB = 2**20
UPDATE_NBYTES = 28


def back_end() -> dict[str, Any]:
    """Build or load what is native; tell what storages, lanes and kernels training will have.

    Raises:
        NotNativeError: there is a device, and one of them is not the native one.
    """
    from chunkmem.optim.kernels import load_kernels
    from chunkmem.runtime.device import ComputeDevice
    from chunkmem.runtime.lanes import open_lanes
    from chunkmem.runtime.storage import default_backend

    compute = ComputeDevice.default()
    begin_s = time.perf_counter()
    backend = default_backend()
    kernels = load_kernels(with_cuda=compute.is_accelerator)
    found: dict[str, Any] = {
        "storage": backend.name,
        "kernels": sorted(kernels.native_devices),
        "torch_bits": "cpu" in kernels.native_devices and kernels.torch_tail_width() is not None,
        "build_s": time.perf_counter() - begin_s,
    }
    # As `chunkmem.assembly.make` chooses them.
    lanes = open_lanes(compute, blocking=not backend.moves_contents)
    found["lanes"] = type(lanes).__name__
    lanes.close()
    if compute.is_accelerator and (lacks := not_native(found)):
        raise NotNativeError(f"{'; '.join(lacks)}. The log says why; rows would measure something else than chunkmem")
    return found


class NotNativeError(Exception):
    """What training would use is a substitute."""


def not_native(found: Mapping[str, Any]) -> list[str]:
    """Return what of a back end on a card is a substitute."""
    lacks = []
    if found["storage"] not in ("swap", "native"):
        lacks.append(f"chunks change memory by {found['storage']}, without a C++ compiler on the PATH")
    if found["lanes"] != "StreamLanes":
        lacks.append(f"copies are on {found['lanes']}, so nothing overlaps")
    missing = {"cpu", "cuda"} - set(found["kernels"])
    if missing:
        lacks.append(f"there are no kernels of our own for {' and '.join(sorted(missing))}")
    return lacks


def device_copy(*, sizes_mib: list[int]) -> dict[str, Any]:
    """Copy within the device's memory; bytes read and written a second, by MiB."""
    rates = {}
    for size in sizes_mib:
        source = torch.empty(size * MIB, dtype=torch.uint8, device="cuda").random_()
        target = torch.empty_like(source)
        rates[str(size)] = 2 * source.nbytes / device_median_s(partial(target.copy_, source), budget_s=0.5)
    return {"Bps": rates, "best_Bps": max(rates.values())}


def matmul(*, sizes: list[int]) -> dict[str, Any]:
    """Square bf16 products on random data; operations a second, by side."""
    rates = {}
    for size in sizes:
        a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        took_s = device_median_s(partial(torch.mm, a, b, out=out), budget_s=1.0)
        rates[str(size)] = 2 * size**3 / took_s
    return {"flop_per_s": rates, "best_flop_per_s": max(rates.values())}


def adam_on_device(*, numel: int) -> dict[str, Any]:
    """AdamW of one flat chunk, fp32: torch's fused kernel and ours; nanoseconds a parameter and bytes a second."""
    from chunkmem.optim.kernels import load_kernels
    from chunkmem.optim.segments import HyperParameters, SegmentPass, Segments

    begin_s = time.perf_counter()
    kernels = load_kernels(with_cuda=True)
    found: dict[str, Any] = {"load_kernels_s": time.perf_counter() - begin_s}
    param, grad, exp_avg, exp_avg_sq = (torch.rand(numel, device="cuda") for _ in range(4))
    step = torch.tensor(10.0, device="cuda")

    def by_torch() -> None:
        torch._fused_adamw_(
            [param], [grad], [exp_avg], [exp_avg_sq], [], [step], lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    found["torch_ns"] = 1e9 * device_median_s(by_torch, budget_s=1.0) / numel
    found["chunkmem_is_native"] = "cuda" in kernels.native_devices
    if found["chunkmem_is_native"]:
        segments = Segments([param], [grad], [exp_avg], [exp_avg_sq])
        hyper = HyperParameters([1e-4], [0.9], [0.95], [1e-8], [0.1], [10])
        took_s = device_median_s(lambda: kernels.adamw_(segments, hyper, SegmentPass()), budget_s=1.0)
        found["chunkmem_ns"] = 1e9 * took_s / numel
    found["best_Bps"] = UPDATE_NBYTES * 1e9 / min(found["torch_ns"], found.get("chunkmem_ns", float("inf")))
    return found


def small_costs(*, slab_mib: int) -> dict[str, Any]:
    """Return the seconds of one: attach and detach of a chunk's memory, event, kernel, allocation."""
    from chunkmem.runtime.storage import ChunkStorage, default_backend

    device = compute_device()
    nbytes = slab_mib * MIB
    storage = ChunkStorage(default_backend(), device=device, dtype=torch.float32)
    slab = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()

    def there_and_back() -> None:
        storage.attach(slab)
        storage.detach()

    found: dict[str, Any] = {
        "slab_nbytes": nbytes,
        "attach_and_detach_s": per_call_s(there_and_back, num_calls=500),
        "allocation_s": per_call_s(lambda: torch.empty(nbytes, dtype=torch.uint8, device=device), num_calls=100),
    }
    if device.type != "cuda":
        return found
    small = torch.ones(1, device=device)
    stream = torch.cuda.Stream()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    pinned = torch.ones(64, pin_memory=True)
    there = torch.ones(64, device=device)

    def fresh() -> None:
        torch.cuda.empty_cache()
        torch.empty(nbytes, dtype=torch.uint8, device=device)

    costs = {
        "event_made_and_recorded_s": lambda: torch.cuda.Event(enable_timing=True).record(),
        "event_waited_for_by_stream_s": lambda: stream.wait_event(event),
        "event_asked_s": event.query,
        "kernel_launched_s": lambda: small.mul_(1.0),
        "copy_launched_s": lambda: there.copy_(pinned, non_blocking=True),
    }
    found |= {name: per_call_s(call, num_calls=200) for name, call in costs.items()}
    torch.cuda.synchronize()
    found["kernel_s"] = device_median_s(lambda: small.mul_(1.0), budget_s=0.2)
    found["copy_of_64_numbers_s"] = device_median_s(lambda: there.copy_(pinned, non_blocking=True), budget_s=0.2)
    found["fresh_allocation_s"] = host_median_s(fresh, budget_s=0.5, wait=torch.cuda.synchronize)
    found["pinned_allocation_s"] = host_median_s(
        lambda: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), budget_s=0.5
    )
    return found
