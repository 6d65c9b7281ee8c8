"""The files of a report, each there as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from chunkmem.data.errors import PlanError
from chunkmem.data.files import replace_file
from chunkmem.report.page import timeline_page
from chunkmem.report.perfetto import perfetto_trace
from chunkmem.report.picture import memory_picture
from chunkmem.report.run import Run


def write_report(
    runs: Sequence[Run], folder: Path, *, with_perfetto: bool = False, reload_s: int | None = None
) -> tuple[dict[str, Path | None], list[str]]:
    """Write memory.png of the first run and timeline.html of all; nothing before all of it is there.

    `with_perfetto` adds perfetto.json, the same timelines as a Chrome trace; for `reload_s` see `timeline_page`.

    Returns:
        What was written, by "memory", "timeline" and, if asked for, "perfetto", and a sentence on what could not be: a
        machine without matplotlib gets no picture, and a file of an earlier report stays as it was.

    Raises:
        PlanError: the directory or a file in it cannot be written.
    """
    contents = {"timeline": ("timeline.html", timeline_page(runs, reload_s=reload_s).encode())}
    if with_perfetto:
        contents["perfetto"] = ("perfetto.json", perfetto_trace(runs).encode())
    notes = []
    try:
        contents["memory"] = ("memory.png", memory_picture(runs[0]))
    except ModuleNotFoundError as error:
        notes.append(f"no memory.png: {error}")
    make_directory(folder)
    files: dict[str, Path | None] = {"memory": None, "timeline": None}
    for key, (name, content) in contents.items():
        write_whole(folder / name, content)
        files[key] = folder / name
    return files, notes


def make_directory(path: Path) -> None:
    """Make sure that results can be written to a directory; it and its parents are made if they are missing.

    Raises:
        PlanError: it cannot be made, cannot be written to, or is something else.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise PlanError(f"{path} is not a directory, so nothing can be written into it; name another one") from None
    except OSError as error:
        raise PlanError(f"{path} cannot be made: {error.strerror}; name another directory") from None
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise PlanError(f"{path} cannot be written to; name another directory with --out")


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, which is replaced as a whole or, after an error, as it was.

    Raises:
        PlanError: it cannot be written.
    """
    try:
        replace_file(path, content)
    except OSError as error:
        raise PlanError(f"{path} cannot be written: {error.strerror}; name another directory with --out") from None
