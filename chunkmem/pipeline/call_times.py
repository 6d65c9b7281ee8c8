"""What a pipeline tells of its calls; `chunkmem.contrib.elastic.block_times` times them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from chunkmem.pipeline.micro_batches import MicroBatch


class CallTimes:
    """Told when blocks are called, and times nothing."""

    def step(self, parts: Sequence[MicroBatch]) -> AbstractContextManager[None]:
        """Surround a step over these micro-batches; of one that raises, no times count."""
        return nullcontext()

    def forward(self, module: nn.Module | None) -> AbstractContextManager[None]:
        """Surround a call for one micro-batch; None: the loss, which counts to the last block."""
        return nullcontext()

    def backward(self, modules: Sequence[nn.Module | None]) -> AbstractContextManager[None]:
        """Surround the backward of these modules for one micro-batch; None is the loss."""
        return nullcontext()

    def returned(self, module: nn.Module, value: Any) -> None:
        """Note what a module returns for a micro-batch."""
