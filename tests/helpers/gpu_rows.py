"""Rows of the GPU suite that end in every way a row can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import NoRoomError, NotHereError


def give(**figures: Any) -> dict[str, Any]:
    return figures


def miss() -> dict[str, Any]:
    raise NotHereError("no such library")


def run_out_of_room() -> dict[str, Any]:
    raise NoRoomError("it needs 3 GiB and has 2")


def leave() -> dict[str, Any]:
    print("last words", flush=True)
    os._exit(7)


def be_killed() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still here")


def hang(*, path: str) -> dict[str, Any]:
    """Start a process, write down its number, and never end."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    new = Path(path + ".new")
    new.write_text(str(child.pid))
    new.replace(path)
    time.sleep(600)
    return {}


def interrupted(folder: str) -> None:
    """Run one row that gives and one that hangs; end as the suite does on Ctrl-C."""
    from benchmarks.gpu.harness import Choice, Task, carry_out
    from benchmarks.gpu.rows import Store
    from benchmarks.gpu.setting import Setting

    store = Store(Path(folder) / "probe.json", machine={}, told={})
    tasks = [
        Task("give", "tests.helpers.gpu_rows:give", {"x": 1}, needs_gpu=False),
        Task("hang", "tests.helpers.gpu_rows:hang", {"path": str(Path(folder) / "pid")}, needs_gpu=False),
    ]
    # A background job of a shell is started with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        carry_out(tasks, store, Setting(None, 2**34, 4, Path(folder)), Choice(60))
    except KeyboardInterrupt:
        sys.exit(130)


def count(*, path: str, seconds: float) -> dict[str, Any]:
    """Note that it has begun, by its process's number, and take that long."""
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    print("half way there", flush=True)
    time.sleep(seconds)  # the row's work, which commands are killed during
    return {"began": path}


def until(*, limit_s: float) -> dict[str, Any]:
    """Return what was allowed."""
    return {"limit_s": limit_s}


def killed(folder: str) -> None:
    """Run one row that hangs, until somebody kills this process."""
    from benchmarks.gpu.harness import Choice, Task, carry_out
    from benchmarks.gpu.rows import Store
    from benchmarks.gpu.setting import Setting

    store = Store(Path(folder) / "probe.json", machine={}, told={})
    task = Task("hang", "tests.helpers.gpu_rows:hang", {"path": str(Path(folder) / "pid")}, needs_gpu=False)
    carry_out([task], store, Setting(None, 2**34, 4, Path(folder)), Choice(60))
