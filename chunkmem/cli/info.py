"""`chunkmem info`: what this machine has, and what it lacks."""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import mmap
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkmem.cli.answer import CommandResult, table
from chunkmem.cli.machine import default_caps, measured_machine
from chunkmem.data.sizes import format_nbytes
from chunkmem.plan.model import LINK_LANES
from chunkmem.runtime.populate import num_cores

if TYPE_CHECKING:
    from chunkmem.runtime.device import ComputeDevice

NAME = "info"
SUMMARY = "what this machine has"
DESCRIPTION = """\
Show the tiers and their capacities, how fast this machine copies and updates, how chunks change their memory, and the
versions of everything. Speeds are measured once, in some seconds, and kept for later runs. What is missing is said, and
is no error.

  chunkmem info
  chunkmem info --disk /mnt/nvme
  chunkmem info --json | jq .speeds.h2d_Bps"""

_PINNED_NBYTES = 1 << 20
"""Of a piece that is pinned to see whether that is possible."""
_HOME = Path(__file__).parents[2]
_DRIVER = Path("/proc/driver/nvidia/version")
_PACKAGES = ("torch", "numpy", "matplotlib", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--disk", metavar="PATH", help="a folder for memory.disk: how fast is the disk under it")


def run(options: argparse.Namespace) -> CommandResult:
    """Answer what is there."""
    missing: list[str] = []

    def found(what: str, look: Callable[[], Any]) -> Any:
        try:
            return look()
        except _AbsentError as absent:
            missing.append(f"{what}: {absent}")
            return None
        except Exception as error:  # part of the answer: this command is for machines where something goes wrong
            missing.append(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}")
            return None

    data = {
        "chunkmem": found("chunkmem", partial(_version, "chunkmem", f"not installed, but run from {_HOME}")),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: found(name, partial(_version, name)) for name in _PACKAGES},
        "cores": found("cores", num_cores),
        "threads": found("threads", _num_threads),
        "cuda": found("CUDA of torch", _cuda),
        "driver": found("NVIDIA driver", _driver),
        "accelerator": found("accelerator", _accelerator),
        "ram": found("RAM", _ram),
        "tiers": found("tiers", _tiers),
        "storage": found("storage back end", _storage),
        "updates": found("optimizer kernels", _updates),
        "speeds": found("speeds", _speeds),
        "disk": None if options.disk is None else found("disk", partial(_disk, options.disk)),
        "missing": missing,
    }
    return CommandResult(data, _text(data))


class _AbsentError(Exception):
    """Something is not there, and nothing is wrong."""


def _version(package: str, absent: str = "not installed") -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise _AbsentError(absent) from None


def _num_threads() -> int:
    import torch

    return torch.get_num_threads()


def _cuda() -> str:
    import torch

    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"  # torch calls its devices cuda
    if torch.version.cuda is None:
        raise _AbsentError(f"torch {torch.__version__} is built without it")
    return str(torch.version.cuda)


def _driver() -> str:
    try:
        return _DRIVER.read_text(errors="replace").splitlines()[0].partition("version:")[2].strip()
    except (OSError, IndexError):
        raise _AbsentError("none is loaded") from None


def _accelerator() -> dict[str, Any]:
    from chunkmem.runtime.device import ComputeDevice
    from chunkmem.runtime.numa import advice_for

    compute = ComputeDevice.default()
    if not compute.is_accelerator:
        raise _AbsentError("torch sees none; DEVICE is a part of RAM")
    return {
        "name": compute.name(),
        "nbytes": compute.capacity_nbytes(),
        "expandable_segments": compute.has_expandable_segments(),
        "far_cores": advice_for(compute),
        "pins": _pins(compute) if compute.is_cuda else None,
    }


def _pins(compute: ComputeDevice) -> bool:
    """Tell whether the driver pins memory of the host."""
    mapped = mmap.mmap(-1, _PINNED_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the answer says it
        is_pinned = compute.pin(mapped, address)
    if is_pinned:
        compute.unpin(address)
    return is_pinned


def _ram() -> dict[str, int]:
    import psutil

    from chunkmem.runtime.device import ram_nbytes

    return {"nbytes": ram_nbytes(), "machine_nbytes": int(psutil.virtual_memory().total)}


def _tiers() -> dict[str, Any]:
    caps = default_caps()
    return {"device_nbytes": caps.device_nbytes, "host_nbytes": caps.host_nbytes, "shared": caps.shared}


def _storage() -> dict[str, Any]:
    from chunkmem.runtime.storage import default_backend

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backend = default_backend()
    return {
        "name": backend.name,
        "moves_contents": backend.moves_contents,
        "warnings": [" ".join(str(warning.message).split()) for warning in caught],
    }


def _updates() -> dict[str, Any]:
    from chunkmem.optim.kernels import load_kernels

    kernels = load_kernels(with_cuda=False)
    is_native = "cpu" in kernels.native_devices
    return {"is_native": is_native, "torch_bits": is_native and kernels.torch_tail_width() is not None}


def _speeds() -> dict[str, float | None]:
    machine = measured_machine()
    found = {f"{lane.value}_Bps": machine.links[link].Bps for link, lane in LINK_LANES.items() if link in machine.links}
    found["latency_s"] = max(link.latency_s for link in machine.links.values())
    found |= {name: getattr(machine, name) for name in ("device_update_Bps", "host_update_Bps")}
    found |= {f"host_update_Bps, {form.value}": Bps for form, Bps in machine.host_form_Bps}
    return {name: value if isfinite(value) else None for name, value in found.items()}


def _disk(path: str) -> dict[str, Any]:
    from chunkmem.runtime.disk_speed import cached_disk_speed, file_system

    if not Path(path).is_dir():  # kept speeds are of its file system
        raise _AbsentError(f"{path} is not a folder")
    speed = cached_disk_speed(path)
    return {"path": path, "file_system": file_system(Path(path)), "read_Bps": speed.read_Bps,
            "write_Bps": speed.write_Bps, "latency_s": speed.latency_s}  # fmt: skip


# Text.

_BACKENDS: Mapping[str, str] = {
    "swap": "torch's own exchange of memory",
    "native": "our C++ library (chunkmem build)",
    "resize": "resize_, which is slower: torch 2.12 or a C++ compiler would help",
}


def _text(data: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in data["packages"].items() if version)
    versions = [
        ("chunkmem", data["chunkmem"] or "not installed"),
        ("Python", f"{data['python']} on {data['system']}"),
        ("packages", packages or "none"),
        ("CUDA, driver", f"{data['cuda'] or 'none'}, {data['driver'] or 'none'}"),
        ("cores, threads", f"{data['cores'] or '?'}, {data['threads'] or '?'}"),
        *_accelerator_rows(data["accelerator"]),
        ("RAM", _ram_text(data["ram"])),
        ("back end", "?" if data["storage"] is None else _BACKENDS[data["storage"]["name"]]),
    ]
    if data["updates"] is not None:
        versions.append(("updates on HOST", _updates_text(data["updates"])))
    lines = [f"{name:<16}{value}" for name, value in versions]
    for key, header, rows in (
        ("tiers", ("tier", "cap by default"), _tier_rows),
        ("speeds", ("speed", "measured"), _speed_rows),
        ("disk", ("disk", "measured"), _disk_rows),
    ):
        if data[key] is not None:
            lines += ["", table(header, rows(data[key]))]
    if data["missing"]:
        lines += ["", "missing", *(f"  {sentence}" for sentence in data["missing"])]
    return "\n".join(lines)


def _accelerator_rows(accelerator: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if accelerator is None:
        yield "accelerator", "none"
        return
    from chunkmem.runtime.tiers import EXPANDABLE_SEGMENTS

    yield "accelerator", f"{accelerator['name']}, {format_nbytes(accelerator['nbytes'])}"
    if not accelerator["expandable_segments"]:
        yield "allocator", f"no expandable segments; {EXPANDABLE_SEGMENTS}"
    if accelerator["far_cores"] is not None:
        yield "sockets", accelerator["far_cores"]
    if accelerator["pins"] is not None:
        refused = "refused; copies will be slower. Raise the locked-memory limit (ulimit -l)"
        yield "pinned memory", "granted; manager.memory() says how much" if accelerator["pins"] else refused


def _updates_text(updates: Mapping[str, Any]) -> str:
    from chunkmem.optim.native import OTHER_BITS

    if not updates["is_native"]:
        return "PyTorch's operators, which are slower, and at step() only (chunkmem build)"
    return (
        "kernels of our own, with torch's bits in fp32"
        if updates["torch_bits"]
        else f"kernels of our own; {OTHER_BITS}"
    )


def _ram_text(ram: Mapping[str, int] | None) -> str:
    if ram is None:
        return "?"
    if ram["nbytes"] == ram["machine_nbytes"]:
        return format_nbytes(ram["nbytes"])
    return f"{format_nbytes(ram['nbytes'])} for this control group, of {format_nbytes(ram['machine_nbytes'])}"


def _tier_rows(tiers: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    if tiers["shared"]:
        return [("DEVICE and HOST, one piece of RAM", format_nbytes(tiers["device_nbytes"]))]
    return [("DEVICE", format_nbytes(tiers["device_nbytes"])), ("HOST", format_nbytes(tiers["host_nbytes"]))]


def _disk_rows(disk: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    return [
        ("folder", f"{disk['path']}, {disk['file_system'] or 'of a file system that the system does not name'}"),
        ("DISK to HOST", f"{disk['read_Bps'] / 1e9:.2f} GB/s"),
        ("HOST to DISK", f"{disk['write_Bps'] / 1e9:.2f} GB/s"),
        ("latency of a read", f"{1e6 * disk['latency_s']:.0f} us"),
    ]


def _speed_rows(speeds: Mapping[str, float | None]) -> Sequence[tuple[str, str]]:
    def rate(name: str) -> str:
        Bps = speeds[name]
        return "as in the trace" if Bps is None else f"{Bps / 1e9:.2f} GB/s"

    return [
        *(
            (f"{source.name} to {target.name}", rate(f"{lane.value}_Bps"))
            for (source, target), lane in LINK_LANES.items()
            if f"{lane.value}_Bps" in speeds
        ),
        ("latency of a copy", f"{1e6 * (speeds['latency_s'] or 0.0):.1f} us"),
        ("update on DEVICE", rate("device_update_Bps")),
        ("update on HOST", rate("host_update_Bps")),
        *((f"update on HOST, {name.partition(', ')[2]}", rate(name)) for name in speeds if ", " in name),
    ]
