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
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.gpu.rows import Reason, Row, Store
from benchmarks.gpu.setting import Setting

ROOT = Path(__file__).resolve().parents[2]
NO_GPU = "no GPU"
LEAST_SHARE = 0.25
"""A row that does not say what it takes is begun, or tried with less, while this share of its limit is left."""
ENDING_S = 60.0
"""What a killed process is waited for: a hundred GiB of pinned memory are not freed in a moment."""
CLOSING_S = 10.0
"""What a function that ends by itself is spared of its limit, to start and to end in."""


@dataclass(frozen=True)
class Task:
    """One row to be: a function, called with plain data in a process of its own, that returns figures."""

    key: str
    function: str
    """``module:function``."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    limit_s: float = 120.0
    """Of all that is tried for it."""
    needs_gpu: bool = True
    alternatives: Sequence[Mapping[str, Any]] = ()
    """What to change of the arguments, one after the other, as long as there was no room."""
    environment: Mapping[str, str] = field(default_factory=dict)
    needs_s: float | None = None
    """It is begun, or tried with less, if there is this much time for it; None: that is `LEAST_SHARE` of its limit."""
    is_told: bool = False
    """The function takes `limit_s`, and returns by then what it has."""

    @property
    def least_s(self) -> float:
        return LEAST_SHARE * self.limit_s if self.needs_s is None else self.needs_s


@dataclass(frozen=True)
class Choice:
    """Which rows a run is about, and how long it may take."""

    budget_s: float
    only: Sequence[str] = ("*",)
    """Patterns of keys, as in a shell."""
    retry: bool = False
    """Try rows again that have no figures."""
    again: bool = False
    """Measure rows again that have figures."""


def carry_out(tasks: Iterable[Task], store: Store, setting: Setting, choice: Choice) -> list[str]:
    """Run tasks until the time is spent; return the keys of the rows that are left.

    `tasks` may be a generator that looks into `store`: each row is there before the next task is asked for. A row that
    is left is not, or was cut, and what depends on it must then not be asked for.
    """
    end_s = time.monotonic() + choice.budget_s
    left: list[str] = []
    # Written even if no row follows: a part that was begun has a file.
    store.save()
    with tqdm(unit="row", disable=None) as bar:
        for task in tasks:
            if not any(fnmatch.fnmatch(task.key, pattern) for pattern in choice.only):
                continue
            known = store.get(task.key)
            has_figures = known is not None and known.figures is not None
            if known is not None and known.is_final and not (choice.again if has_figures else choice.retry):
                continue
            bar.set_postfix_str(task.key)
            if not _found(task, store, setting, end_s):
                left.append(task.key)
            bar.update()
    return left


def _found(task: Task, store: Store, setting: Setting, end_s: float) -> bool:
    """Run one task and keep its row; False if the time is too short for it.

    Until it is done, the row says that it was cut: that is what a command that is killed leaves behind.
    """
    at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    if task.needs_gpu and setting.card is None:
        store.put(Row(task.key, why_not=NO_GPU, reason=Reason.MISSING, at=at))
        return True
    began_s = time.monotonic()
    if end_s - began_s < task.least_s:
        return False
    known = store.get(task.key)
    tries = 1 if known is None or known.is_final else known.tries + 1
    begun = Row(task.key, why_not="the call was killed while it ran", reason=Reason.CUT, at=at, tries=tries)
    if known is None or known.figures is None:
        store.put(begun)
    until_s = min(end_s, began_s + task.limit_s)
    try:
        found = _tried(task, setting, until_s)
    except KeyboardInterrupt:
        if store.get(task.key) == begun:
            store.remove(task.key)
        raise
    row = Row.from_dict(task.key, {**found, "wall_s": time.monotonic() - began_s, "at": at})
    if row.reason is Reason.TIME and until_s == end_s:  # It was the call's time that ended, not the row's.
        row = replace(row, reason=Reason.CUT, tries=tries)
        if known is not None and known.figures is not None:
            return False
    store.put(row)
    return row.is_final


def _tried(task: Task, setting: Setting, until_s: float) -> dict[str, Any]:
    """Return what the process of a task wrote, or why there is nothing, with alternatives as long as there is time."""
    result: dict[str, Any] = {}
    for change in ({}, *task.alternatives):
        limit_s = until_s - time.monotonic()
        if result and limit_s < task.least_s:
            break
        told = {"limit_s": limit_s - CLOSING_S} if task.is_told else {}
        found = _in_a_process(task, {**task.arguments, **change, **told}, setting, limit_s)
        if found is None:
            words = _last_words(log_of(setting.folder, task.key))
            return {"why_not": f"not done after {limit_s:.0f} s{words}", "reason": Reason.TIME.value}
        result = found
        if result.get("reason") != Reason.NO_ROOM.value:
            break
    return result


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
            env={**os.environ, "PYTHONUNBUFFERED": "1", **task.environment},
            # Ctrl-C is for this process, which then ends the other and all that it has started.
            process_group=0,
        )
        assert process.stdin is not None
        try:
            # It stays open, and closes with this process however that ends: the worker then ends, too.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(dict(arguments)).encode() + b"\n")
                process.stdin.flush()
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)
            process.stdin.close()
        if process.returncode == 0 and answer.exists():
            return dict(json.loads(answer.read_text(encoding="utf-8")))
    return _of_its_end(process.returncode, log)


def _of_its_end(status: int, log: Path) -> dict[str, Any]:
    """Tell why a process that left no answer ended."""
    if status == -signal.SIGKILL:
        why = "the system killed it, as it does when RAM is short"
        return {"why_not": why, "reason": Reason.NO_ROOM.value}
    ended = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return {"why_not": f"its process ended with {ended}{_last_words(log)}", "reason": Reason.FAILED.value}


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return f": {lines[-1][:200]}" if lines else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started, and wait until its memory is free again."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    # One that is stuck in a driver does not end; what was measured before is worth more than to wait for it.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(ENDING_S)


def log_of(folder: Path, key: str) -> Path:
    """Return where the output of a row's process goes."""
    return folder / "logs" / (re.sub(r"[^A-Za-z0-9.]+", "-", key) + ".txt")
