"""Wait, with a deadline, for what other processes do."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL_S = 0.05
"""Neither a file of another process nor the end of one that is no child can be waited for otherwise."""


def wait_for(path: Path, process: subprocess.Popen[Any]) -> None:
    """Wait until a process has written a file."""

    def is_written() -> bool:
        assert process.poll() is None
        return path.exists() and bool(path.read_text())

    _poll(is_written, deadline_s=60)


def assert_end(*processes: int) -> None:
    """Processes that were sent a signal are gone soon after, or dead and not yet waited for by their parent."""
    _poll(lambda: all(_has_ended(process) for process in processes), deadline_s=10)


def _has_ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _poll(is_over: Callable[[], bool], *, deadline_s: float) -> None:
    end_s = time.monotonic() + deadline_s
    while not is_over():
        assert time.monotonic() < end_s
        time.sleep(POLL_S)
