"""The part of a model that one stage of a pipeline has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from chunkmem.data.errors import LayoutError
from chunkmem.pipeline.arguments import arguments_of
from chunkmem.pipeline.options import PipelineOptions


class StageModule(nn.Module):
    """Modules that are called in turn with what the one before has returned: a tuple is unpacked into arguments."""

    def __init__(self, modules: Sequence[nn.Module], *, first: int = 0) -> None:
        """Call `modules`, of which the first one has the number `first` among those of all stages."""
        super().__init__()
        self.blocks = nn.ModuleList(modules)
        self.first = first

    def forward(self, value: Any, *, run: Callable[[Any], Any] | None = None) -> Any:
        """Return what the last module returns; `run` calls them in place of this, inside of the call of the stage."""
        if run is not None:
            return run(value)
        for block in self.blocks:
            value = block(*arguments_of(value))
        return value


def divide(options: PipelineOptions, num: int) -> list[StageModule]:
    """Return `num` stages of consecutive blocks, as many in each as in the others, or one more, if nothing is asked.

    Raises:
        LayoutError: there are fewer blocks than stages.
    """
    size, cut = len(options.blocks), options.cut
    if size < num:
        raise LayoutError(f"{size} blocks cannot be divided into {num} stages; use fewer ranks, or smaller blocks")
    cuts = [size * k // num for k in range(num + 1)] if cut is None else [0, *accumulate(cut)]
    parts = [[module for block in options.chain[start:stop] for module in block] for start, stop in pairwise(cuts)]
    firsts = accumulate(map(len, parts), initial=0)
    return [StageModule(part, first=first) for part, first in zip(parts, firsts, strict=False)]
