"""Write a model, its optimizer and whatever else as a checkpoint of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from chunkmem.assembly import Runtime
from chunkmem.checkpoints.files import EXTRA, ChunkPlanner, ChunkWriter
from chunkmem.checkpoints.names import named_state
from chunkmem.checkpoints.replacing import Replacement, not_written, replacing
from chunkmem.checkpoints.unfinished import in_one_line
from chunkmem.comm.ranks import Ranks
from chunkmem.errors import CheckpointError
from chunkmem.optim.ema import EMA
from chunkmem.optim.saved import StatefulOptimizer


def state_to_save(
    runtime: Runtime,
    optimizer: StatefulOptimizer | None,
    *,
    ema: EMA | None,
    model: nn.Module | None,
    extra: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return what a checkpoint has, as nested dicts: values in chunks are lazy, others are copies, but for `extra`.

    All ranks call it; see `ChunkManager.save`.
    """
    root = runtime.root(model)
    require_own(optimizer, "manager.save()")
    require_averages(ema, "manager.save()")
    if extra is not None and not isinstance(extra, Mapping):
        raise CheckpointError(f"manager.save() takes extra= as a dict, not a {type(extra).__name__}")
    with runtime.together("manager.save()"):
        runtime.entry_points.ordinary.follow()
        state: dict[str, Any] = {"model": runtime.modules.surface.state_dict(root, lazily=True)}
    if optimizer is not None:
        state["optimizer"] = named_state(root, optimizer)
    if ema is not None:
        state["ema"] = ema.lazy_state_dict()
    if extra:
        state[EXTRA] = dict(extra)
    return state


def require_own(optimizer: object, call: str) -> None:
    """Raise a `CheckpointError` for an optimizer whose states are not in chunks."""
    if optimizer is not None and not isinstance(optimizer, StatefulOptimizer):
        raise CheckpointError(
            f"{call} takes an optimizer of chunkmem's, or None, not a {type(optimizer).__name__}; put the state_dict() "
            "of another optimizer into extra="
        )


def require_averages(ema: object, call: str) -> None:
    """Raise a `CheckpointError` for averages that are not in chunks."""
    if ema is not None and not isinstance(ema, EMA):
        raise CheckpointError(
            f"{call} takes ema= as a chunkmem.EMA, or None, not a {type(ema).__name__}; put the state_dict() of "
            "another one into extra="
        )


def save_now(state: dict[str, Any], path: Path, ranks: Ranks) -> None:
    """Write a checkpoint, and return when it is complete and in its place.

    Raises:
        CheckpointError: it cannot be written; on every rank.
    """
    with replacing(path, ranks) as replacement:
        write(state, replacement, ranks)


@dataclass(frozen=True)
class PlannedSave:
    """What the ranks have agreed on before they write."""

    planner: ChunkPlanner
    writer: ChunkWriter
    replacement: Replacement
    plan: SavePlan
    """Of this rank."""
    metadata: Metadata | None
    """On the rank that completes the checkpoint."""
    group: _DistWrapper
    """All ranks."""

    def write(self) -> list[WriteResult]:
        """Write this rank's part."""
        return self.writer.write_data(self.plan, self.planner).wait()

    def finish(self, results: list[list[WriteResult]]) -> None:
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
        CheckpointException: a rank cannot; on every rank.
    """
    group = _DistWrapper(ranks.all_ranks_group(), not ranks.are_one, 0)
    planner = ChunkPlanner(writes_tensors=ranks.rank == 0, writes_objects=ranks.is_first)
    writer = ChunkWriter(replacement.folder, generation=replacement.generation)
    metadata: Metadata | None = None

    def local_step() -> SavePlan:
        planner.set_up_planner(state, writer.storage_meta(), group.is_coordinator)
        writer.set_up_storage_writer(group.is_coordinator, rank=group.rank, use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    def global_step(plans: list[SavePlan]) -> list[SavePlan]:
        nonlocal metadata
        plans, metadata = planner.create_global_plan(plans)
        return writer.prepare_global_plan(plans)

    plan = planner.finish_plan(group.reduce_scatter("plan", local_step, global_step))
    return PlannedSave(planner, writer, replacement, plan, metadata, group)


def write(state: dict[str, Any], replacement: Replacement, ranks: Ranks) -> None:
    """Write nested dicts of lazy and other values as a checkpoint, and put it in its place; see `plan_save`.

    Raises:
        CheckpointError: it is not written; on every rank.
    """
    problem = ""
    try:
        planned = plan_save(state, replacement, ranks)
        planned.group.all_reduce("write", planned.write, planned.finish)
    except CheckpointException as error:
        problem = reason(error)
    except OSError as error:
        problem = in_one_line(error)
    problem = ranks.any_text(problem, label="manager.save()")
    if problem:
        raise not_written(replacement.path, problem)


def reason(error: CheckpointException) -> str:
    """Return what went wrong first, in one line."""
    for rank, (raised, _) in error.failures.items():
        return f"rank {rank}: {in_one_line(raised)}"
    return "nobody says why"
