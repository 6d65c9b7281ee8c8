"""accelerate with a configuration: `ChunkmemAccelerator("chunkmem.json")` trains in chunks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator

from chunkmem.integrations.run import TakeOver
from chunkmem.manager import ChunkManager


class ChunkmemAccelerator(Accelerator):
    """Trains models in chunks, over one rank or several, which share them: the numbers of `Accelerator`.

    A model goes into chunks when `prepare()` is given an optimizer over its parameters; that is chunkmem's afterwards.

    Args:
        config: a configuration, or the path of one in JSON; "auto" in it is what the optimizer says.
        options: of `Accelerator`.

    Raises, from `prepare()`:
        ConfigError: the configuration is wrong, or contradicts the optimizer.
        StateError: an optimizer cannot be taken over.
    """

    def __init__(self, config: Mapping[str, Any] | str | os.PathLike[str], **options: Any) -> None:
        super().__init__(**options)
        self._taken = TakeOver(config, starts_ranks=True)

    @property
    def manager(self) -> ChunkManager | None:
        """Of the models, once they train in chunks."""
        return self._taken.manager

    def prepare(self, *args: Any, **options: Any) -> Any:
        """Pack the models of optimizers, and prepare all, as `Accelerator` does."""
        with self._taken.inside_library():
            ours = [self._taken.converted(each) if isinstance(each, torch.optim.Optimizer) else each for each in args]
            return super().prepare(*ours, **options)
