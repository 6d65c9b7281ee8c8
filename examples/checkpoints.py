"""The checkpoints of a training: `checkpoints/step-100` and so on, of which the last few are kept."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from options import fail
from ranks import Ranks


@dataclass(frozen=True)
class Checkpoints:
    """Those in the folder of a training, `out`."""

    out: Path

    @property
    def folder(self) -> Path:
        return self.out / "checkpoints"

    def of(self, step: int) -> Path:
        """Return where the one after a step is."""
        return self.folder / f"step-{step}"

    def steps(self) -> list[int]:
        """Return the steps after which there is one, in order."""
        found = (path.name.removeprefix("step-") for path in self.folder.glob("step-*"))
        return sorted(int(name) for name in found if name.isdigit())

    def prune(self, *, keep: int) -> None:
        """Remove all but the last ones."""
        for step in self.steps()[:-keep]:
            shutil.rmtree(self.of(step), ignore_errors=True)

    def start(self, ranks: Ranks, *, resume: bool) -> int:
        """Return the step to continue after: with `resume`, or when torchrun has started the ranks again; else 0."""
        step = 0
        if resume or ranks.num_restarts:
            step = max(self.steps(), default=0)
            if resume and not step:
                fail(f"{self.folder} has no checkpoint, so there is nothing to resume")
        elif ranks.is_first and ranks.may_restart:
            self._set_aside()  # a restart must not continue an earlier training
        ranks.require_one("the step of the last checkpoint", step)
        return step

    def _set_aside(self) -> None:
        earlier = self.folder.with_name("earlier-checkpoints")
        if self.folder.exists():
            shutil.rmtree(earlier, ignore_errors=True)
            os.replace(self.folder, earlier)
