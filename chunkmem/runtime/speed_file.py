"""Files of measured speeds, in the user's cache folder: a file that cannot be used is no file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chunkmem.files import replace_file


def speed_file(kind: str, made_of: Sequence[str]) -> Path | None:
    """Return where speeds of such hardware are kept; None: the user has no home folder."""
    digest = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]
    with contextlib.suppress(RuntimeError):
        return Path.home() / ".cache" / "chunkmem" / f"{kind}-{digest}.json"
    return None


def processor() -> str:
    """Return what the processor calls itself, or else its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def read_speeds(path: Path, made_of: Sequence[str]) -> dict[str, Any] | None:
    """Return what is kept in a file, unchecked; None if it is not there, damaged, or of other hardware."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["machine"] != list(made_of):
            return None
        speeds = content["speeds"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return speeds if isinstance(speeds, dict) else None


def write_speeds(path: Path, made_of: Sequence[str], speeds: Mapping[str, Any]) -> None:
    """Put a whole file in place at once, so that another process never reads half of one.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps({"machine": list(made_of), "speeds": dict(speeds)}, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text.encode())
