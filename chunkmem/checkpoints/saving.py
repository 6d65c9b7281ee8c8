"""Write a model, its optimizer and whatever else as a checkpoint of torch.distributed.checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from chunkmem.assembly.runtime import Runtime
from chunkmem.checkpoints.by_rank import OwnNames, divide
from chunkmem.checkpoints.files import EXTRA, ChunkPlanner, ChunkWriter, Written
from chunkmem.checkpoints.replacing import Replacement, replacing, told_to_all
from chunkmem.data.errors import CheckpointError
from chunkmem.optim.ema import EMA
from chunkmem.optim.optimizer import RuleOptimizer
from chunkmem.optim.tiles import named_state
from chunkmem.ranks.ranks import Ranks

_LABEL = "manager.save()"
_WORD_S = 10.0
_WORD_SHARE = 0.25
"""Of the time after which a rank is lost: how often it says that it is still writing; at least every `_WORD_S`."""


def state_to_save(
    runtime: Runtime,
    optimizer: RuleOptimizer | None,
    *,
    ema: EMA | None,
    model: nn.Module | None,
    extra: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return what a checkpoint has, as nested dicts: values in chunks are lazy, others are copies, but for `extra`.

    All ranks call it; see `ChunkManager.save`.
    """
    root = runtime.root(model)
    require_own(optimizer, ema, _LABEL)
    if extra is not None and not isinstance(extra, Mapping):
        raise CheckpointError(f"manager.save() takes extra= as a dict, not a {type(extra).__name__}")
    with runtime.together(_LABEL):
        runtime.entry_points.ordinary.follow()
        state: dict[str, Any] = {"model": runtime.modules.overrides.state_dict(root, lazily=True)}
    if optimizer is not None:
        state["optimizer"] = named_state(root, optimizer, optimizer.lazy_state_dict())
    if ema is not None:
        state["ema"] = ema.lazy_state_dict()
    if extra:
        state[EXTRA] = dict(extra)
    return divide(state, OwnNames(root, runtime), runtime.ranks.everyone())


def require_own(optimizer: object, ema: object, call: str) -> None:
    """Raise a `CheckpointError` for an optimizer, or averages, whose states are not in chunks."""
    for given, own, said in (
        (optimizer, RuleOptimizer, "an optimizer of chunkmem's"),
        (ema, EMA, "ema= as a chunkmem.EMA"),
    ):
        if given is not None and not isinstance(given, own):
            raise CheckpointError(
                f"{call} takes {said}, or None, not a {type(given).__name__}; put the state_dict() of another one into "
                "extra="
            )


def save_now(state: dict[str, Any], path: Path, ranks: Ranks) -> None:
    """Write nested dicts of lazy and other values as a checkpoint, and return when it is in its place; see `plan_save`.

    Raises:
        CheckpointError: it cannot be written; on every rank.
        RankError: a rank did not come.
    """
    everyone = ranks.everyone()
    with replacing(path, everyone) as replacement:
        planned = plan_save(state, replacement, ranks)
        with told_to_all(path, everyone):
            planner = planned.planner
            _write_together(planned.writer.write_all(planner.contents(), planner.plan), everyone)
        rows = everyone.gather_to_first(planned.writer.results, label=_LABEL)
        with told_to_all(path, everyone):
            if rows is not None:
                planned.finish(rows)


@dataclass(frozen=True)
class PlannedSave:
    """What the ranks have agreed on before they write."""

    planner: ChunkPlanner
    writer: ChunkWriter
    replacement: Replacement
    metadata: Metadata | None
    """On the rank that completes the checkpoint."""

    def finish(self, results: list[list[Written]]) -> None:
        """Write what makes the checkpoint complete, and put it in its place, once all ranks have written their parts.

        Raises:
            OSError: it is not; what was there before is.
            CheckpointError: that, too.
        """
        assert self.metadata is not None
        self.replacement.put_in_place(self.writer.finish(self.metadata, results))


def plan_save(state: dict[str, Any], replacement: Replacement, ranks: Ranks) -> PlannedSave:
    """Have the ranks agree on who writes what.

    Args:
        state: nested dicts of lazy and other values, of this rank; ordinary tensors are alike on the ranks of a stage.
        replacement: where to.
        ranks: that write.

    Raises:
        CheckpointError: a rank cannot; on every rank.
        RankError: a rank did not come.
    """
    everyone = ranks.everyone()
    planner = ChunkPlanner(writes_tensors=ranks.rank == 0, writes_objects=everyone.is_first)
    writer = ChunkWriter(replacement.folder, generation=replacement.generation)
    plans = metadata = None
    with told_to_all(replacement.path, everyone):
        planner.set_up_planner(state, writer.storage_meta(), everyone.is_first)
        writer.set_up_storage_writer(everyone.is_first, rank=everyone.rank, use_collectives=True)
        plan = writer.prepare_local_plan(planner.create_local_plan())
    gathered = everyone.gather_to_first(plan, label=_LABEL)
    with told_to_all(replacement.path, everyone):
        if gathered is not None:
            plans, metadata = planner.create_global_plan(gathered)
            plans = writer.prepare_global_plan(plans)
    planner.finish_plan(everyone.scatter_from_first(plans, label=_LABEL))
    return PlannedSave(planner, writer, replacement, metadata)


def _write_together(steps: Iterator[bool], ranks: Ranks) -> None:
    """Write, step by step, until all ranks have.

    Meanwhile they tell each other, now and then, that they are still writing: who does is not lost, however long it
    takes. What goes wrong is raised when the others have ended, too.
    """
    problem: BaseException | None = None
    is_writing = True
    while ranks.any_text("writes" if is_writing else "", label=_LABEL):
        until_s = time.monotonic() + min(_WORD_S, _WORD_SHARE * ranks.connection.timeout_s)
        while is_writing and time.monotonic() < until_s:
            try:
                is_writing = next(steps, False)
            except BaseException as error:  # what cannot be pickled raises anything
                problem, is_writing = error, False
    if problem is not None:
        raise problem
