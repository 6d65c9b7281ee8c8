"""Files of measured speeds, in the user's cache folder: a file that cannot be used is no file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from chunkmem.files import replace_file


class Speeds(Protocol):
    """A dataclass of numbers."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def is_sound(self) -> bool:
        """Tell whether it may have been measured, whatever a file has in its place."""
        ...


Measured = TypeVar("Measured", bound=Speeds)


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
                text = json.dumps({"machine": list(made_of), "speeds": asdict(found)}, indent=1) + "\n"
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
        found = kind(**content["speeds"])
        return found if content["machine"] == list(made_of) and found.is_sound else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def processor() -> str:
    """Return what the processor calls itself, or else its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
