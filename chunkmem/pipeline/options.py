"""What a user asks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from chunkmem.data.errors import ConfigError, LayoutError
from chunkmem.data.sizes import shown
from chunkmem.pipeline.epochs import Epochs
from chunkmem.pipeline.frozen import Cache
from chunkmem.pipeline.micro_batches import MicroBatch

CHECKPOINTS = ("auto", "always", "except_last", "never")
"""Values of `checkpoint`: which calls of blocks are recomputed in backward."""
ASYNCHRONOUS = "async-1f1b"
"""Name of the schedule whose stages update their weights while other batches are in flight."""


@dataclass(frozen=True)
class PipelineOptions:
    """The arguments of `ChunkManager.pipeline`, checked.

    Raises:
        LayoutError: something is no module.
        ConfigError: an option has no such value.
    """

    blocks: tuple[nn.Module, ...]
    first: nn.Module | None
    last: nn.Module | None
    loss_fn: Callable[..., torch.Tensor]
    micro_batches: int
    checkpoint: str
    schedule: str
    stages_per_rank: int | None
    deferred_batch_norm: bool
    epochs: Epochs | None = None
    """Freezing at the end of an epoch; None: nothing is frozen."""
    cache: Cache | None = None
    """Cache of the outputs of frozen blocks; None: there is none."""
    width: str | None = None
    """"auto": the number of stages is chosen between steps."""
    cut: tuple[int, ...] | None = None
    """The number of blocks in each stage; None: about as many in all."""
    versions: str | None = None
    """Weights that backward runs on if updates came after its forward: a value of `versions`; None: synchronous."""

    def __post_init__(self) -> None:
        named = {f"block {at}": block for at, block in enumerate(self.blocks)}
        ends = {"first": self.first, "last": self.last}
        for name, module in (named | {name: end for name, end in ends.items() if end is not None}).items():
            if not isinstance(module, nn.Module):
                raise LayoutError(f"manager.pipeline(): {name} is a {type(module).__name__}, not a torch.nn.Module")
        if not self.blocks and self.first is None:
            raise LayoutError("manager.pipeline() was given no block")
        if not callable(self.loss_fn):
            what = type(self.loss_fn).__name__
            raise ConfigError(f"loss_fn is a {what}; it has to be a function of output and target")
        if not isinstance(self.micro_batches, int) or isinstance(self.micro_batches, bool) or self.micro_batches < 1:
            raise ConfigError(f"micro_batches is {shown(self.micro_batches)}; give a number of at least 1")
        if self.width not in (None, "auto"):
            raise ConfigError(
                f'width is {shown(self.width)}; give "auto", or leave it out and call pipe.repartition(stages=)'
            )
        if self.cache is not None and not hasattr(self.cache, "begin_step"):
            raise ConfigError(f"cache is a {type(self.cache).__name__}; give a chunkmem.FrozenCache")
        if self.checkpoint not in CHECKPOINTS:
            raise ConfigError(f"checkpoint is {shown(self.checkpoint)}; give one of {', '.join(CHECKPOINTS)}")

    @property
    def chain(self) -> list[list[nn.Module]]:
        """Each block as a list of modules: `first` with the first one, `last` with the last one."""
        parts = [[block] for block in self.blocks]
        if self.first is not None:
            parts[0].insert(0, self.first)
        if self.last is not None:
            parts[-1].append(self.last)
        return parts

    def policy(self, part: MicroBatch) -> str:
        """Return the policy for what a micro-batch saves in a block, as `activations.policy` has them."""
        if self.checkpoint == "auto":
            return "auto"
        is_recomputed = self.checkpoint == "always" or (self.checkpoint == "except_last" and not part.is_last)
        return "recompute" if is_recomputed else "offload"


def blocks_of(given: Iterable[nn.Module]) -> tuple[nn.Module, ...]:
    """Return the blocks of a list of them.

    Raises:
        LayoutError: it is a module that is no list.
    """
    if isinstance(given, nn.Module) and not isinstance(given, nn.ModuleList | nn.Sequential):
        raise LayoutError(f"manager.pipeline() takes a list of blocks, not a {type(given).__name__}")
    return tuple(given)
