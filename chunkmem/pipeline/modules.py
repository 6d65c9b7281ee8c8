"""The part of a model that one stage of a pipeline has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from chunkmem.errors import LayoutError
from chunkmem.nn.regions import RegionActivations
from chunkmem.pipeline.block_times import BlockTimes
from chunkmem.pipeline.frozen_stages import FrozenPart


class StageModule(nn.Module):
    """Modules that are called in turn with what the one before has returned: a tuple is unpacked into arguments."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(modules)
        self.regions: RegionActivations | None = None
        """Manage what calls save; None: nobody does."""
        self.hold: Callable[[nn.Module], None] | None = None
        """Called with this stage before its modules are."""
        self.times: BlockTimes | None = None
        """Of its modules; None: nobody asks for them."""
        self.frozen = FrozenPart()
        """Of the micro-batch that it is called with."""

    def forward(self, value: Any, *, policy: str = "auto") -> Any:
        """Return what the last module returns; `policy` is for what each of them saves, as in `activations.policy`."""
        if self.hold is not None:
            self.hold(self)
        frozen, self.frozen = self.frozen, FrozenPart()
        for number, block in enumerate(self.blocks):
            if number < frozen.start:
                continue
            if number == frozen.num and frozen.keep is not None:
                frozen.keep(value)
            args = value if isinstance(value, tuple) else (value,)
            with contextlib.nullcontext() if self.times is None else self.times.forward(block):
                value = self._call(number, args, policy, frozen)
            if self.times is not None:
                self.times.returned(block, value)
            del args
        return value

    def _call(self, number: int, args: tuple[Any, ...], policy: str, frozen: FrozenPart) -> Any:
        block = self.blocks[number]
        if self.regions is None:
            return block(*args)
        if number < frozen.num:  # nothing is saved there
            with frozen.running(args):
                return block(*args)
        self.regions.enter(f"blocks.{number}", policy, block, args, {}, start=self.regions.now())
        try:
            return block(*args)
        finally:
            self.regions.leave()


def divide(
    blocks: Sequence[nn.Module],
    *,
    first: nn.Module | None,
    last: nn.Module | None,
    num: int,
    cut: Sequence[int] | None = None,
) -> list[StageModule]:
    """Return `num` stages of consecutive blocks.

    Args:
        blocks: in the order in which they are called.
        first: called before them, in the first stage.
        last: called after them, in the last stage.
        num: how many.
        cut: the number of blocks in each; None: as many as in the others, or one more.

    Raises:
        LayoutError: there are fewer blocks than stages.
    """
    if len(blocks) < num:
        raise LayoutError(
            f"{len(blocks)} blocks cannot be divided into {num} stages; use fewer ranks, or smaller blocks"
        )
    ends = with_ends(blocks, first=first, last=last)
    cuts = [len(blocks) * k // num for k in range(num + 1)] if cut is None else [0, *accumulate(cut)]
    parts = [ends[start:stop] for start, stop in pairwise(cuts)]
    return [StageModule([module for block in part for module in block]) for part in parts]


def with_ends(blocks: Sequence[nn.Module], *, first: nn.Module | None, last: nn.Module | None) -> list[list[nn.Module]]:
    """Return each block as a list of modules: `first` with the first one, `last` with the last one."""
    parts = [[block] for block in blocks]
    if first is not None:
        parts[0].insert(0, first)
    if last is not None:
        parts[-1].append(last)
    return parts
