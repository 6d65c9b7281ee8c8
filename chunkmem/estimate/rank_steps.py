"""The first steps of one rank of several, replayed from the log of a rehearsal: their traces, and what is exchanged.

The units, the schedule of exchanges, the shard store and the reductions are those of training. Only chunks have no
memory, and other ranks are taken to say and do what this one does: all have the same batch, and exchange in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chunkmem.estimate.calls import StepCalls
from chunkmem.estimate.peers import UnisonRanks
from chunkmem.estimate.rank_stage import RankStage, Step
from chunkmem.estimate.weightless import NO_CAP_NBYTES, counted_memory, one_tier, two_tiers
from chunkmem.runtime.ledger import Ledger


@dataclass(frozen=True)
class RankSteps:
    """The steps of a rank that differ from each other."""

    first: Step
    """Nobody knows which backward is the last one, so gradients are reduced when the optimizer steps."""
    lazy: Step
    """A later one that gathers when it needs to."""
    ahead: Step | None
    """A later one that gathers one unit ahead; None: that is not tried, as there is no room for two units at a time."""


def replay(
    step: StepCalls,
    *,
    rank: int = 0,
    world: int = 1,
    is_accelerator: bool = True,
    is_accumulating: bool = False,
    device_nbytes: int = NO_CAP_NBYTES,
) -> RankSteps:
    """Return the steps of `rank`, of `world` ranks that each have the batch of the rehearsal.

    Args:
        step: what a rehearsal has logged.
        rank: which one of them.
        world: how many ranks.
        is_accelerator: what DEVICE is; it decides how chunks are exchanged.
        is_accumulating: `manager.accumulate(1)` was called: the first backward is known to be the last one, too.
        device_nbytes: cap on DEVICE, which decides whether gathering ahead is tried.
    """
    tiers = two_tiers if any(group.is_on_host for group in step.layout.groups) else one_tier
    memory = counted_memory(*tiers(device_nbytes))
    stage = RankStage(step, UnisonRanks(rank, world), memory, is_accelerator=is_accelerator)
    if is_accumulating:
        stage.units.accumulate(1)
    first = stage.step()
    if world == 1:
        return RankSteps(first, first, None)
    stage.measure_links()
    lazy = stage.step()
    return RankSteps(first, lazy, stage.step() if stage.begin_ahead() else None)


def serve_on_demand(
    step: StepCalls,
    ledgers: Sequence[Ledger],
    *,
    rank: int,
    world: int,
    is_accumulating: bool,
    margin_use_ratio: float,
) -> None:
    """Do the steps of `rank` that follow no plan: the first one, and the next one, which has optimizer states.

    Args:
        step: what a rehearsal has logged.
        ledgers: of DEVICE, of HOST, and of DISK if there is one, with their caps.
        rank: which one of them.
        world: how many ranks.
        is_accumulating: see `replay`.
        margin_use_ratio: see `first_residents`.

    Raises:
        CapacityError: room cannot be made under these caps.
    """
    stage = RankStage(
        step,
        UnisonRanks(rank, world),
        counted_memory(*ledgers),
        is_accelerator=False,
        margin_use_ratio=margin_use_ratio,
    )
    if is_accumulating:
        stage.units.accumulate(1)
    stage.step()
    stage.measure_links()
    stage.step()
