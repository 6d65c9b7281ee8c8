"""How the speeds of all links are measured, and kept in the user's cache folder: a file that cannot be used is none."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from chunkmem.data.errors import ChunkmemError
from chunkmem.data.files import replace_file
from chunkmem.data.json_files import Saved

Measured = TypeVar("Measured", bound=Saved)


def median_s(
    measure: Callable[[], float], budget_s: float, *, least: int = 3, most: int = 32, warms_up: bool = True
) -> float:
    """Return the median of what `measure` returns, without its first time if it `warms_up`; never 0.

    `budget_s` bounds how often that is measured, `least` times or more and at `most` so often.
    """
    if warms_up:
        measure()
    found: list[float] = []
    end_s = time.perf_counter() + budget_s
    while len(found) < least or (len(found) < most and time.perf_counter() < end_s):
        found.append(measure())
    # A clock too coarse for what it measures may say 0.
    return max(statistics.median(found), 1e-9)


def time_s(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes by the host's clock."""
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def kept_speeds(
    kind: type[Measured], measure: Callable[[], Measured], *, name: str, made_of: Sequence[str], path: Path | None
) -> Measured:
    """Return the speeds kept at `path`, or measure them and keep them there; where nothing can be written, nothing is.

    Args:
        kind: what they are.
        measure: returns them.
        name: of their files in the user's cache folder, where they are by default.
        made_of: the hardware that they are of.
        path: None: a file there, another one for other hardware.
    """
    path = path or _default_path(name, made_of)
    found = None if path is None else _read(kind, path, made_of)
    if found is None:
        found = measure()
        if path is not None:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                text = json.dumps({"machine": list(made_of), "speeds": found.to_dict()}, indent=1) + "\n"
                replace_file(path, text.encode())  # at once: another process never reads half of one
    return found


def _default_path(name: str, made_of: Sequence[str]) -> Path | None:
    """Return where speeds of such hardware are kept; None: the user has no home folder."""
    digest = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]
    with contextlib.suppress(RuntimeError):
        return Path.home() / ".cache" / "chunkmem" / f"{name}-{digest}.json"
    return None


def _read(kind: type[Measured], path: Path, made_of: Sequence[str]) -> Measured | None:
    """Return what is kept in a file; None if it is not there, damaged, or of other hardware."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return kind.from_dict(content["speeds"]) if content["machine"] == list(made_of) else None
    except (ChunkmemError, OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def processor() -> str:
    """Return what the processor calls itself, or else its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
