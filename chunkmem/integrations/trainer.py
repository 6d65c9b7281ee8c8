"""transformers' Trainer, and those made of it, with a flag: `--chunkmem chunkmem.json` trains in chunks.

@dataclass
class Arguments(ChunkmemArguments, TrainingArguments): ...

class ChunkTrainer(TrainsInChunks, Trainer): ...
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from chunkmem.data.errors import StateError
from chunkmem.integrations.run import TakeOver
from chunkmem.manager import ChunkManager


@dataclass
class ChunkmemArguments:
    """Comes before `TrainingArguments`, or a class made of it, among the bases of a dataclass for HfArgumentParser."""

    chunkmem: str | None = field(
        default=None, metadata={"help": "Train in chunks: a configuration in JSON; auto in it is what is said here."}
    )


class TrainsInChunks:
    """Comes before `Trainer`, or a class made of it, among the bases of a class; its `args` have `chunkmem`.

    The model goes into chunks when `train()` makes the optimizer, which becomes chunkmem's. Over ranks, all of them
    take part in checkpoints.

    Raises, from `train()`:
        ConfigError: the arguments contradict the configuration.
        StateError: `optimizers=` was given; `optimizer_cls_and_kwargs=` says which one to make.
    """

    args: Any
    optimizer: Any
    _taken: TakeOver | None = None

    @property
    def manager(self) -> ChunkManager | None:
        """Of the model, once it trains in chunks."""
        return None if self._taken is None else self._taken.manager

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer, as Trainer does, and pack the model."""
        make = super().create_optimizer  # type: ignore[misc]
        if self.args.chunkmem is None:
            return make(*args, **kwargs)
        if self._taken is None:
            if self.optimizer is not None:
                raise StateError(
                    f"{type(self).__name__}(optimizers=...) with --chunkmem {self.args.chunkmem}: that optimizer was "
                    "made before the model was in chunks; pass optimizer_cls_and_kwargs=(Class, options) instead"
                )
            self._taken = TakeOver(self.args.chunkmem)
        with self._taken.inside_library():
            return make(*args, **kwargs)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leave a model where it is that is going to be in chunks."""
        if self.args.chunkmem is None:
            super()._move_model_to_device(model, device)  # type: ignore[misc]
