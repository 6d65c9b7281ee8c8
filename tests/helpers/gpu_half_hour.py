"""A half hour of the GPU suite in seconds: its stages over rows that need neither torch nor a GPU.

``python -m tests.helpers.gpu_half_hour ARCHIVE NOTES [BUDGET]``: the suite's own command, but for its parts.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu.archive import Archive
from benchmarks.gpu.harness import Choice, Task
from benchmarks.gpu.rows import Store
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.stages import Pause, Progress, Stage, digest, run_stages
from benchmarks.gpu.table import page

MACHINE = {"gpu": "none", "torch": "2"}
TOLD = {
    "command": "rehearse",
    "hardware": {"cpu": "a cpu", "num_cpus": 2, "usable_ram_nbytes": 2**34, "card": None},
    "versions": {"torch": "2", "python": "3"},
    "left": [],
}
SECONDS = {"probe": (0.05, 0.1), "speed": (0.3, 0.2, 0.1), "soak": (0.3,)}
"""By part, what its rows take."""
KEYS = [f"{name} {index}" for name, rows in SECONDS.items() for index in range(len(rows))]


def part(name: str, notes: Path) -> Any:
    """Return a part whose rows note in a file of their own that they have begun."""

    def tasks(_setting: Setting, _store: Store) -> Iterator[Task]:
        for index, seconds in enumerate(SECONDS[name]):
            arguments = {"path": str(notes / f"{name} {index}"), "seconds": seconds}
            yield Task(f"{name} {index}", "tests.helpers.gpu_rows:count", arguments, 20, needs_gpu=False)

    return SimpleNamespace(NAME=name, tasks=tasks, table=plain_table)


def plain_table(content: Mapping[str, Any]) -> str:
    """Return the Markdown of rows whose figures are anything."""
    return page(content, ("row", "found"), lambda _key, figures, _rows: [str(figures)])


def main(archive_path: str, notes: str, budget_s: float) -> int:
    """Run the stages as the command line does; return its exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        archive = Archive(Path(archive_path), folder)
        archive.open()

        def open_store(part: Any) -> Store:
            return Store(folder / f"{part.NAME}.json", machine=MACHINE, told=TOLD, saved=archive.save)

        pauses = {"probe": Pause.FAILED, "speed": Pause.MEASURED, "soak": Pause.NEVER}
        stages = [Stage(part(name, Path(notes)), 100, pause=pause) for name, pause in pauses.items()]
        setting, progress = Setting(None, 2**34, 2, folder), Progress()
        run_stages(stages, setting, Choice(budget_s), open_store=open_store, progress=progress)
        print(digest(progress, setting))
    return 0 if progress.is_over else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else 60))
