"""The most memory that this process takes while something runs, as Linux counts it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MIB = 1 << 20
IS_COUNTED = _CLEAR.exists()
NEEDS_COUNT = "needs Linux's count of the largest memory"


def _status_nbytes(name: str) -> int:
    return int(_STATUS.read_text().split(f"{name}:")[1].split()[0]) * 1024


def anonymous_increase_nbytes(run: Callable[[], object]) -> int:
    """Do the same for memory that is no file's, as far as is seen each millisecond: mapped files can go at any time."""
    gc.collect()
    before = peak = _status_nbytes("RssAnon")
    is_over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.001):
            peak = max(peak, _status_nbytes("RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        run()
    finally:
        is_over.set()
        thread.join()
    return peak - before


def increase_nbytes(run: Callable[[], object]) -> int:
    """Return how much more memory the process had at the most, while `run` ran, than before."""
    gc.collect()
    _CLEAR.write_text("5")
    before = _status_nbytes("VmRSS")
    run()
    return _status_nbytes("VmHWM") - before
