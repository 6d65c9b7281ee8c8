"""Whether this process runs beside its accelerator, or across from it, on machines with several sockets.

Copies to an accelerator, and updates on HOST, are slower over the link between sockets. Where threads may run is the
user's to say, before Python starts, so nothing is moved here: one warning has the command.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chunkmem.runtime.device import ComputeDevice

_SYSTEM = Path("/sys")


def numa_advice(pci_address: str | None, cpus: frozenset[int], *, system: Path = _SYSTEM) -> str | None:
    """Return what to tell a user some of whose cores are not beside the accelerator; None: all are, or nobody knows.

    Args:
        pci_address: of the accelerator, such as ``0000:3b:00.0``.
        cpus: the cores that this process may use.
        system: what the system tells of itself, in files: Linux's sysfs.
    """
    try:
        node = int((system / "bus/pci/devices" / str(pci_address) / "numa_node").read_text())
        near = _numbers((system / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return None
    num_far = len(cpus - near)
    if node < 0 or not near or num_far == 0:
        return None
    return (
        f"{num_far} of the {len(cpus)} cores of this process are not on NUMA node {node}, where its accelerator is: "
        "copies and updates of host memory cross between sockets, and are slower. Start it by torchrun "
        f"--numa-binding=node, or by numactl --cpunodebind={node} --preferred={node}"
    )


def warn_of_far_cores(compute: ComputeDevice) -> None:
    """Warn where a process may run on cores that are not beside its accelerator."""
    advice = advice_for(compute)
    if advice is not None:
        warnings.warn(advice, stacklevel=2)


def advice_for(compute: ComputeDevice) -> str | None:
    """Return `numa_advice` for this process and its accelerator."""
    if not compute.is_cuda or not hasattr(os, "sched_getaffinity"):
        return None
    return numa_advice(compute.pci_address(), frozenset(os.sched_getaffinity(0)))


def _numbers(text: str) -> frozenset[int]:
    """Return the numbers of a list such as ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
