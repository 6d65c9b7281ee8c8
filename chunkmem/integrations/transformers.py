"""transformers' Trainer: metrics of the manager among what it logs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from chunkmem.errors import ConfigError
from chunkmem.manager import ChunkManager
from chunkmem.metrics import NAMES

DEFAULT_NAMES: Final = (
    "memory/device_peak_bytes",
    "memory/host_peak_bytes",
    "step/h2d_bytes",
    "step/d2h_bytes",
    "step/stall_seconds",
    "step/plan_misses",
)


class ChunkmemCallback(TrainerCallback):
    """Adds `manager.metrics()` to each entry of the log that has a training loss.

    Trainer calls those that report to TensorBoard, wandb and others before the `callbacks` it is given:

        trainer = Trainer(...)
        ChunkmemCallback(manager).add_to(trainer)

    comes before them. `Trainer(callbacks=[ChunkmemCallback(manager)])` is enough for `state.log_history`, and for what
    is printed.

    Args:
        manager: of the model that is trained.
        names: metrics to add, of those of `manager.metrics()`; None: all of them.

    Raises:
        ConfigError: there is no such metric.
    """

    def __init__(self, manager: ChunkManager, *, names: Iterable[str] | None = DEFAULT_NAMES) -> None:
        self._manager = manager
        self._names = NAMES if names is None else frozenset(names)
        if unknown := sorted(self._names - NAMES):
            raise ConfigError(f"there is no metric {', '.join(unknown)}; there are {', '.join(sorted(NAMES))}")

    def add_to(self, trainer: Trainer) -> None:
        """Have a trainer call this before all other callbacks, those that report included."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add to what is about to be reported, and to the entry of `state.log_history`."""
        if logs is None or "loss" not in logs:
            return
        found = {name: value for name, value in self._manager.metrics().items() if name in self._names}
        logs |= found
        history = state.log_history
        if history and history[-1].get("step") == state.global_step:
            history[-1] |= found
