"""Lightning with a flag: `Trainer(strategy=ChunkmemStrategy("chunkmem.json"))` trains in chunks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

from chunkmem.integrations.run import TakeOver
from chunkmem.manager import ChunkManager


class ChunkmemStrategy(DDPStrategy):
    """Trains a LightningModule in chunks, over one rank or several, which share them: the numbers of `strategy="ddp"`.

    The module goes into chunks when `fit()` makes its optimizers, which become chunkmem's.

    Args:
        config: a configuration, or the path of one in JSON; "auto" in it is what the module's optimizer says.
        options: of `DDPStrategy`.

    Raises, from `fit()`:
        ConfigError: the configuration is wrong, or contradicts the optimizer.
        StateError: an optimizer cannot be taken over.
    """

    def __init__(self, config: Mapping[str, Any] | str | os.PathLike[str], **options: Any) -> None:
        super().__init__(**options)
        self._taken = TakeOver(config, starts_ranks=True)

    @property
    def manager(self) -> ChunkManager | None:
        """Of the module, once it trains in chunks."""
        return self._taken.manager

    def setup(self, trainer: Any) -> None:
        """Set up the accelerator, the module and, to fit it, its optimizers, as Lightning does."""
        if trainer.state.fn is TrainerFn.FITTING:
            with self._taken.inside_library():
                super().setup(trainer)
        elif self.manager is None:
            super().setup(trainer)
        else:  # DDPStrategy would move and broadcast the weights, which are the same on all ranks
            trainer.accelerator.setup(trainer)
            self.setup_precision_plugin()

    def teardown(self) -> None:
        """Release what Lightning holds; the module stays in its chunks."""
        with self._taken.inside_library():
            super().teardown()
