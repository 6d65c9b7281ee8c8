"""Run rows one after the other, each in a process of its own and within its time; keep what was found."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.gpu.rows import Reason, Row, Store
from benchmarks.gpu.setting import Setting

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = "no GPU"
LEAST_SHARE = 0.25
"""A row is begun while at least this share of its limit is left of the part's time."""


@dataclass(frozen=True)
class Task:
    """One row to be: a function, called with plain data in a process of its own, that returns figures."""

    key: str
    function: str
    """``module:function``."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    limit_s: float = 120.0
    needs_gpu: bool = True
    alternatives: Sequence[Mapping[str, Any]] = ()
    """What to change of the arguments, one after the other, as long as there was no room."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """Which rows a run is about, and how long it may take."""

    budget_s: float
    only: str = "*"
    """A pattern of keys, as in a shell."""
    retry: bool = False
    """Try rows again that have no figures."""


def carry_out(tasks: Iterable[Task], store: Store, setting: Setting, choice: Choice) -> list[str]:
    """Run tasks until the time is spent; return the keys of the rows that are left.

    `tasks` may be a generator that looks into `store`: each row is there before the next task is asked for. A row that
    is left is not, and what depends on it must then not be asked for.
    """
    end_s = time.monotonic() + choice.budget_s
    left: list[str] = []
    # Written even if no row follows: a part that was begun has a file.
    store.save()
    with tqdm(unit="row", disable=None) as bar:
        for task in tasks:
            if not fnmatch.fnmatch(task.key, choice.only):
                continue
            known = store.get(task.key)
            if known is not None and not (choice.retry and known.figures is None):
                continue
            bar.set_postfix_str(task.key)
            row = _row(task, setting, end_s)
            if row is None:
                left.append(task.key)
            else:
                store.put(row)
            bar.update()
    return left


def _row(task: Task, setting: Setting, end_s: float) -> Row | None:
    """Return the row of a task; None if the part's time is too short for it."""
    began_s = time.monotonic()
    at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    if task.needs_gpu and setting.card is None:
        return Row(task.key, why_not=NO_GPU, reason=Reason.MISSING, at=at)
    result: dict[str, Any] = {}
    for change in ({}, *task.alternatives):
        left_s = end_s - time.monotonic()
        if left_s < LEAST_SHARE * task.limit_s:
            return None
        limit_s = min(left_s, task.limit_s)
        found = _in_a_process(task, {**task.arguments, **change}, setting, limit_s)
        if found is None:
            if limit_s < task.limit_s:  # It was the part's time that ended, not the row's.
                return None
            found = {"why_not": f"not done after {limit_s:.0f} s", "reason": Reason.TIME.value}
        result = found
        if result.get("reason") != Reason.NO_ROOM.value:
            break
    return Row.from_dict(task.key, {**result, "wall_s": time.monotonic() - began_s, "at": at})


def _in_a_process(task: Task, arguments: Mapping[str, Any], setting: Setting, limit_s: float) -> dict[str, Any] | None:
    """Return what the process wrote, or how it ended; None if it did not end in time."""
    log = log_of(setting.folder, task.key)
    log.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, open(log, "wb") as output:
        answer = Path(folder) / "answer.json"
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.worker", task.function, str(answer)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env={**os.environ, **task.environment},
            # Ctrl-C is for this process, which then ends the other and all that it has started.
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(dict(arguments)).encode(), timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)
        if process.returncode == 0 and answer.exists():
            return dict(json.loads(answer.read_text(encoding="utf-8")))
    return _of_its_end(process.returncode, log)


def _of_its_end(status: int, log: Path) -> dict[str, Any]:
    """Tell why a process that left no answer ended."""
    if status == -signal.SIGKILL:
        why = "the system killed it, as it does when RAM is short"
        return {"why_not": why, "reason": Reason.NO_ROOM.value}
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ended = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    last = f": {lines[-1][:200]}" if lines else ""
    return {"why_not": f"its process ended with {ended}{last}", "reason": Reason.FAILED.value}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started, and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def log_of(folder: Path, key: str) -> Path:
    """Return where the output of a row's process goes."""
    return folder / "logs" / (re.sub(r"[^A-Za-z0-9.]+", "-", key) + ".txt")
