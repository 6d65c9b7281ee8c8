"""The checkpoints that a manager writes, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from chunkmem.assembly.runtime import Runtime
from chunkmem.checkpoints.asynchronous import Saving, begin_saving
from chunkmem.checkpoints.saving import save_now
from chunkmem.data.errors import CheckpointError


class CheckpointSaver:
    """Writes checkpoints, and knows of the one that is being written while training continues."""

    def __init__(self) -> None:
        """Have written none."""
        self._last: Saving | None = None
        """That was asynchronous."""

    def save(
        self,
        runtime: Runtime,
        path: Path,
        state_to_save: Callable[[], dict[str, Any]],
        *,
        asynchronous: bool,
    ) -> Saving:
        """Write a checkpoint, or begin to; see `ChunkManager.save`."""
        if self._last is not None:
            # On all ranks, though some may have asked before.
            problem = runtime.ranks.any_text(str(self.finish() or ""), label="manager.save()")
            if problem:
                raise CheckpointError(f"{problem} (that is the save before this one, of which nothing was written)")
        state = state_to_save()
        if asynchronous:
            self._last = begin_saving(state, path, runtime)
            return self._last
        save_now(state, path, runtime.ranks)
        return Saving.over(path)

    def finish(self) -> CheckpointError | None:
        """Wait for what is being written; return what went wrong with it, once, if nobody has asked yet."""
        last, self._last = self._last, None
        if last is None:
            return None
        was_told, error = last.was_told, last.outcome()
        return None if was_told else error

    def before_load(self, path: Path) -> None:
        """Wait for what is being written to a directory that is about to be read; an error is left for `finish`."""
        if self._last is not None and self._last.path == path:
            self._last.join()
