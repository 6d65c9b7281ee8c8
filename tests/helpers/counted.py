"""An accelerator played by RAM whose allocator counts: every byte that torch takes, and the highest number of them.

As both tiers are RAM, what torch takes on the host counts too, but for the host arena, which is mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from chunkmem.optim.kernels import load_kernels
from chunkmem.optim.native import NativeUpdate
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.lanes import BlockingLanes
from tests.helpers.happens_before import SLOW
from tests.helpers.simulated import SimulatedAccelerator

_COMPILER = shutil.which("c++")
counted_only = pytest.mark.skipif(
    _COMPILER is None or torch.accelerator.is_available(), reason="an allocator of RAM is compiled"
)


class CountedDevice(SimulatedAccelerator):
    """RAM that plays an accelerator; all that torch allocates of it counts, to the byte, within operators too."""

    def __init__(self) -> None:
        super().__init__()
        self._library = _library()
        self.num_reads = 0
        """How often the peak was read."""
        self.seen_nbytes = 0
        """The highest peak that was read; a test sets it to 0."""

    def capacity_nbytes(self) -> int:
        return 1 << 30

    def used_nbytes(self) -> int:
        return int(self._library.counted_now())

    def take_peak_nbytes(self) -> int:
        self.num_reads += 1
        peak = int(self._library.counted_take_peak())
        self.seen_nbytes = max(self.seen_nbytes, peak)
        return peak


def blocking(_compute: ComputeDevice) -> BlockingLanes:
    """Return lanes for managers of a counted device."""
    return BlockingLanes(ComputeDevice(torch.device("cpu")))


@contextlib.contextmanager
def counted() -> Iterator[CountedDevice]:
    """While it is entered, RAM is counted, and managers are made for the device that it plays."""
    device = CountedDevice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComputeDevice, "default", lambda index=None: device)
        patch.setattr("chunkmem.assembly.parts.load_kernels", lambda **_: load_kernels())
        # The trial of the kernels is not what the model takes; on an accelerator it is made in host memory.
        patch.setattr(NativeUpdate, "tail_width", NativeUpdate(load_kernels).tail_width)
        patch.setattr("chunkmem.assembly.speeds.cached_machine", lambda compute, caps, by_form: SLOW)
        patch.setattr("chunkmem.runtime.pool._MAPPED_NBYTES", 1 << 62)  # slabs come from the allocator, too
        _library().counted_begin()
        try:
            yield device
        finally:
            _library().counted_end()


@functools.cache
def _library() -> ctypes.CDLL:
    """Compile and load the allocator, once; it is never unloaded, as memory that it gave out may live on."""
    torch_dir = Path(torch.__file__).parent
    target = Path(tempfile.mkdtemp()) / "counted.so"
    command = [str(_COMPILER), "-O1", "-std=c++20", "-fPIC", "-shared", "-isystem", str(torch_dir / "include")]
    source = Path(__file__).with_suffix(".cpp")
    subprocess.run([*command, str(source), "-o", str(target), f"-L{torch_dir / 'lib'}", "-lc10"], check=True)
    library = ctypes.CDLL(str(target))
    for name in ("counted_now", "counted_take_peak"):
        getattr(library, name).restype = ctypes.c_int64
    return library
