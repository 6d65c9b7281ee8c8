"""What the hardware gives: links, memories, arithmetic, updates, small costs, disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu.harness import Task
from benchmarks.gpu.rows import Store
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.table import Rows, by_number, page

NAME = "probe"
BACK_END = "back end"
SUMMARY = "what the hardware gives: links, memories, arithmetic, updates, small costs, disk"
HEADER = ("row", "found")
GB = 1e9
LINK, HOST, DEVICE = (f"benchmarks.gpu.probe_{name}" for name in ("link", "host", "device"))


def tasks(setting: Setting, _store: Store) -> Iterator[Task]:
    """Yield the rows, those that lower bounds are worked out from first."""
    dry = setting.dry
    threads = setting.threads(1, 2) if dry else setting.threads(1, 2, 4, 8, 12, 16)
    sizes = [1, 4, 16, 64, 256]
    # Compiling is no other row's business.
    yield Task(BACK_END, f"{DEVICE}:back_end", {}, 180, needs_gpu=False)
    yield Task("copies, pinned", f"{LINK}:copies", {"sizes_mib": sizes, "pinned": True}, 40)
    memory = {"threads": threads, "mib": 16 if dry else 1024, "budget_s": 0.05 if dry else 0.4}
    yield Task("host memory", f"{HOST}:host_memory", {**memory, "under_dma": False}, 40, needs_gpu=False)
    yield Task("matmul, bf16", f"{DEVICE}:matmul", {"sizes": [1024, 2048, 4096, 8192, 16384]}, 40)
    yield Task("device copy", f"{DEVICE}:device_copy", {"sizes_mib": [64, 256, 1024, 4096]}, 30)
    adam = {"threads": threads, "numel": 1 << 18 if dry else 1 << 27, "budget_s": 0.05 if dry else 0.5}
    yield Task("Adam on the host", f"{HOST}:adam_on_host", adam, 60, needs_gpu=False, needs_s=25)
    yield Task("host memory under copies", f"{HOST}:host_memory", {**memory, "under_dma": True}, 40, needs_s=20)
    yield Task("Adam on the device", f"{DEVICE}:adam_on_device", {"numel": 1 << 28}, 40)
    yield Task("copies, pageable", f"{LINK}:copies", {"sizes_mib": sizes, "pinned": False}, 40)
    pin = {"sizes_mib": [64, 256, 1024, 4096], "share_of_ram": 0.7, "budget_s": 15.0}
    yield Task("pinning", f"{LINK}:pinning", pin, 60)
    yield Task("small costs", f"{DEVICE}:small_costs", {"slab_mib": 1 if dry else 64}, 40, needs_gpu=False)
    disk = {"folder": str(setting.folder), "mib": 32 if dry else 1024, "depths": [1, 4]}
    yield Task("disk, O_DIRECT", f"{HOST}:disk", disk, 60, needs_gpu=False)


def table(content: Mapping[str, Any]) -> str:
    """Return the Markdown of a file of rows."""
    return page(content, HEADER, _cells)


def _cells(key: str, figures: Mapping[str, Any], _rows: Rows) -> list[str]:
    return [_TOLD[key](figures)]


def _copies(figures: Mapping[str, Any]) -> str:
    ways = (("H2D", "h2d_Bps"), ("D2H", "d2h_Bps"), ("both at once, sum", "both_Bps"))
    told = [f"{way} {by_number(figures[name], GB)}" for way, name in ways if figures[name]]
    return f"GB/s by MiB: {'; '.join(told)}"


def _memory(figures: Mapping[str, Any]) -> str:
    told = [f"copy {by_number(figures['copy_Bps'], GB)}", f"triad {by_number(figures['triad_Bps'], GB)}"]
    if "dma_beside_copy_Bps" in figures:
        told.append(f"copies to and from the device beside the triad {by_number(figures['dma_beside_triad_Bps'], GB)}")
    return f"GB/s by threads: {'; '.join(told)}"


def _adam_on_host(figures: Mapping[str, Any]) -> str:
    ours = by_number(figures["chunkmem_ns"], 1, 2) if figures["chunkmem_is_native"] else "not built"
    forms = by_number(figures.get("by_form_ns", {}), 1, 3)
    return f"ns a parameter by threads: torch {by_number(figures['torch_ns'], 1, 2)}; chunkmem {ours}; by form {forms}"


def _adam_on_device(figures: Mapping[str, Any]) -> str:
    ours = f"{figures['chunkmem_ns']:.4f}" if figures["chunkmem_is_native"] else "not built"
    return (
        f"ns a parameter: torch {figures['torch_ns']:.4f}; chunkmem {ours}; at best {figures['best_Bps'] / GB:.0f} GB/s"
    )


def _pinning(figures: Mapping[str, Any]) -> str:
    limit = figures["locked_limit_nbytes"]
    return (
        f"GB/s by MiB: pin {by_number(figures['register_Bps'], GB)}; unpin {by_number(figures['unregister_Bps'], GB)}; "
        f"in all {figures['pinned_nbytes'] / 2**30:.0f} GiB ({figures['pinned_until']}); "
        f"ulimit {'none' if limit is None else f'{limit / 2**20:.0f} MiB'}"
    )


def _small_costs(figures: Mapping[str, Any]) -> str:
    told = (f"{name.removesuffix('_s').replace('_', ' ')} {1e6 * cost:.2f}" for name, cost in figures.items()
            if name.endswith("_s"))  # fmt: skip
    return f"µs: {'; '.join(told)} (slab of {figures['slab_nbytes'] / 2**20:.0f} MiB)"


def _disk(figures: Mapping[str, Any]) -> str:
    write, read = (by_number(figures[name], GB, 2) for name in ("write_Bps", "read_Bps"))
    return f"GB/s by threads: write {write}; read {read}"


def _back_end(figures: Mapping[str, Any]) -> str:
    kernels = ", ".join(figures["kernels"]) or "none"
    bits = "with torch's bits" if figures["torch_bits"] else "whose bits are not torch's: fp32 is updated by torch's"
    return (
        f"storage {figures['storage']}; {figures['lanes']}; kernels of {kernels}, {bits}; built or loaded in "
        f"{figures['build_s']:.1f} s"
    )


_TOLD = {
    BACK_END: _back_end,
    "copies, pinned": _copies,
    "copies, pageable": _copies,
    "host memory": _memory,
    "host memory under copies": _memory,
    "matmul, bf16": lambda figures: f"TFLOP/s by side: {by_number(figures['flop_per_s'], 1e12, 0)}",
    "device copy": lambda figures: f"GB/s by MiB, read and written: {by_number(figures['Bps'], GB, 0)}",
    "Adam on the host": _adam_on_host,
    "Adam on the device": _adam_on_device,
    "pinning": _pinning,
    "small costs": _small_costs,
    "disk, O_DIRECT": _disk,
}
