"""transformers' Trainer: metrics of the manager among what it logs, and checkpoints over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from chunkmem.data.errors import ConfigError
from chunkmem.manager import ChunkManager
from chunkmem.report.metrics import NAMES

DEFAULT_NAMES: Final = (
    "memory/device_peak_bytes",
    "memory/host_peak_bytes",
    "step/h2d_bytes",
    "step/d2h_bytes",
    "step/stall_seconds",
    "step/plan_misses",
)


class ChunkmemCallback(TrainerCallback):
    """Adds `manager.metrics()` to each entry of the log that has a training loss; over ranks, saves with all of them.

    Trainer calls those that report to TensorBoard, wandb and others before the `callbacks` it is given:

        trainer = Trainer(...)
        ChunkmemCallback(manager).add_to(trainer)

    comes before them. `Trainer(callbacks=[ChunkmemCallback(manager)])` is enough for `state.log_history`, and for what
    is printed, but not for checkpoints over ranks: see `add_to`.

    Args:
        manager: of the model that is trained.
        names: metrics to add, of those of `manager.metrics()`; None: all of them.

    Raises:
        ConfigError: there is no such metric.
    """

    def __init__(self, manager: ChunkManager, *, names: Iterable[str] | None = DEFAULT_NAMES) -> None:
        self._manager = manager
        self.gathers_checkpoints = False
        """All ranks take part when the trainer that this was added to saves."""
        self._names = NAMES if names is None else frozenset(names)
        if unknown := sorted(self._names - NAMES):
            raise ConfigError(f"there is no metric {', '.join(unknown)}; there are {', '.join(sorted(NAMES))}")

    def add_to(self, trainer: Trainer) -> None:
        """Have a trainer call this before all other callbacks, those that report included.

        Over ranks, its checkpoints and `save_model()` are collective from now on: the first rank writes the files of
        one process, of what all ranks give it. Weights and states have to fit its RAM once more while it does.

        Raises:
            ConfigError: this version of transformers saves in another way.
        """
        saves, steps = getattr(trainer, "_save", None), getattr(trainer, "_save_optimizer_and_scheduler", None)
        if not callable(saves) or not callable(steps):
            raise ConfigError(
                f"{type(trainer).__name__} has no _save and _save_optimizer_and_scheduler, by which checkpoints are "
                "written: this version of transformers saves in another way; 5.23 is known to work"
            )
        trainer.callback_handler.callbacks.insert(0, self)
        if trainer.args.world_size > 1 and not self.gathers_checkpoints:
            vars(trainer)["_save"] = partial(_save, trainer, saves)
            vars(trainer)["_save_optimizer_and_scheduler"] = partial(_save_states, trainer, steps)
            self.gathers_checkpoints = True

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


def _save(
    trainer: Any, saves: Callable[..., None], output_dir: str | None = None, state_dict: Any | None = None
) -> None:
    """Stand in for `Trainer._save`, which leaves out all ranks but the one that writes."""
    if state_dict is None:
        state_dict = trainer.model.state_dict()
    saves(output_dir, state_dict)


def _save_states(trainer: Any, saves: Callable[[str], None], output_dir: str) -> None:
    """Stand in for `Trainer._save_optimizer_and_scheduler`, in which one rank asks for the optimizer's states."""
    if not trainer.args.should_save:
        trainer.optimizer.state_dict()
    saves(output_dir)
