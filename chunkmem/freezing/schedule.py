"""How many blocks, from the front of a model, are frozen after how many epochs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from chunkmem.data.errors import CheckpointError, ConfigError, StateError
from chunkmem.freezing.follows import HasRuntime
from chunkmem.ranks.ranks import Ranks


class Gathers(HasRuntime, Protocol):
    """A `chunkmem.ChunkManager`."""

    def gather(self, params: Any = None, *, grads: bool = False) -> Any:
        """Have gradients in `.grad` inside the block."""
        ...


class FreezeSchedule:
    """Freezes a growing number of blocks, from the first on: each time a share of those that are still trained.

    After T epochs that is ceil(L · (1 - (1 - alpha)^T)) of L blocks. With `adaptive`, it stops in front of the block
    with the smallest gradients, of those that are trained: blocks behind it may be frozen later. Source:
    PipeTransformer (He et al., 2021).

        schedule = chunkmem.FreezeSchedule(model.blocks, alpha=1 / 3, first=model.embed)
        for epoch in range(20):
            train(model, epoch)
            manager.freeze(schedule.step())

    Args:
        blocks: of the model, in the order of forward.
        alpha: the share, above 0 and below 1.
        first: what comes before the blocks, and is frozen with the first of them: without it, backward has to pass
            through frozen blocks. None: nothing does.
        adaptive: look at gradients, of which `observe` tells.

    Raises:
        ConfigError: `alpha` is no such number, or there are no blocks.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        *,
        alpha: float = 1 / 3,
        first: nn.Module | None = None,
        adaptive: bool = False,
    ) -> None:
        self._blocks = list(blocks)
        self._first = first
        self.adaptive = adaptive
        """It looks at gradients."""
        if not self._blocks or not all(isinstance(block, nn.Module) for block in self._blocks):
            raise ConfigError("FreezeSchedule takes blocks: a list of modules, at least one")
        if not isinstance(alpha, int | float) or not 0 < alpha < 1:
            raise ConfigError(f"alpha is {alpha!r}; give a number above 0 and below 1")
        self._alpha = float(alpha)
        self.num_epochs = 0
        """So many are over."""
        self.prefix = 0
        """Blocks that are frozen now."""
        self._squares = [0.0] * len(self._blocks)
        """By block, of the gradients that were observed since the last epoch."""

    def __repr__(self) -> str:
        adaptive = ", adaptive" if self.adaptive else ""
        frozen = f"{self.prefix} of {len(self._blocks)} blocks frozen, epochs: {self.num_epochs}"
        return f"FreezeSchedule({frozen}, alpha={self._alpha:.3g}{adaptive})"

    def step(self) -> list[nn.Module]:
        """An epoch is over: return what `manager.freeze` is to be given; what is frozen already is part of it.

        Raises:
            StateError: it is adaptive, and no gradients were observed in the epoch.
        """
        self.num_epochs += 1
        num = len(self._blocks)
        # A share of what is left that is a whole number stays one, whatever rounding makes of it.
        wanted = math.ceil(round(num * (1 - (1 - self._alpha) ** self.num_epochs), 9))
        if self.adaptive:
            wanted = self._adapted(num)
        self.prefix = max(self.prefix, min(wanted, num))
        return self.frozen

    @property
    def frozen(self) -> list[nn.Module]:
        """What is frozen by now."""
        first = [] if self._first is None or not self.prefix else [self._first]
        return [*first, *self._blocks[: self.prefix]]

    def _adapted(self, num: int) -> int:
        """Return min(k + alpha · (L - k), the block of those trained that has the smallest gradients)."""
        trained = self._squares[self.prefix :]
        if trained and not any(trained):
            raise StateError(
                "FreezeSchedule(adaptive=True): no gradients were observed in this epoch; call "
                "schedule.observe(manager) between backward and optimizer.step(), in a few steps of each epoch"
            )
        smallest = self.prefix + min(range(len(trained)), key=trained.__getitem__, default=0)
        self._squares = [0.0] * num
        return min(math.ceil(round(self.prefix + self._alpha * (num - self.prefix), 9)), smallest)

    @torch.no_grad()
    def observe(self, manager: Gathers) -> None:
        """Add the gradients of this step up, between backward and `optimizer.step()`; over ranks all call it.

        Raises:
            RankError: a rank is missing.
        """
        own = [0.0] * len(self._blocks)
        for at, block in enumerate(self._blocks[self.prefix :], start=self.prefix):
            with manager.gather(block, grads=True):
                grads: Sequence[torch.Tensor] = [p.grad for p in block.parameters() if p.grad is not None]
                own[at] = float(sum(float(grad.float().square().sum()) for grad in grads))
        for at, square in enumerate(_on_all_ranks(own, manager.runtime.ranks)):
            self._squares[at] += square

    def state_dict(self) -> dict[str, Any]:
        """Return how far it is, for a checkpoint."""
        return {"num_epochs": self.num_epochs, "prefix": self.prefix, "squares": list(self._squares)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there; call `manager.freeze(schedule.frozen)` then.

        Raises:
            CheckpointError: it is of another number of blocks.
        """
        squares = state["squares"]
        if len(squares) != len(self._blocks):
            raise CheckpointError(
                f"the schedule was saved for {len(squares)} blocks, and there are {len(self._blocks)}"
            )
        self.num_epochs, self.prefix, self._squares = state["num_epochs"], state["prefix"], list(squares)


def _on_all_ranks(own: Sequence[float], ranks: Ranks) -> Sequence[float]:
    """Return the same numbers on all ranks: by block, those of the stage that has it.

    Other stages have 0 there, so the sum has the bits of what one process computes. Ranks that share a stage have the
    same gradients, but may add them with another number of threads: those of the first one decide.
    """
    label = "FreezeSchedule: gradients of blocks"
    found = own if ranks.stages is None else ranks.stages.sum_over(own, label=label)
    return ranks.broadcast_object(found, label=label)
