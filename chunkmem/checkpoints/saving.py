"""Write a model, its optimizer and whatever else as a checkpoint of torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from chunkmem.assembly import Runtime
from chunkmem.checkpoints.directory import replacing
from chunkmem.checkpoints.files import EXTRA, ChunkPlanner, ChunkWriter
from chunkmem.checkpoints.names import named_state
from chunkmem.comm.ranks import Ranks
from chunkmem.errors import CheckpointError
from chunkmem.optim.saved import StatefulOptimizer


def save_checkpoint(
    runtime: Runtime,
    path: Path,
    optimizer: StatefulOptimizer | None,
    *,
    model: nn.Module | None,
    extra: Mapping[str, Any] | None,
) -> None:
    """See `ChunkManager.save`."""
    root = runtime.root(model)
    require_own(optimizer, "manager.save()")
    if extra is not None and not isinstance(extra, Mapping):
        raise CheckpointError(f"manager.save() takes extra= as a dict, not a {type(extra).__name__}")
    with runtime.together("manager.save()"):
        runtime.entry_points.ordinary.follow()
        state: dict[str, Any] = {"model": runtime.modules.surface.state_dict(root, lazily=True)}
    if optimizer is not None:
        state["optimizer"] = named_state(root, optimizer)
    if extra:
        state[EXTRA] = dict(extra)
    ranks = runtime.ranks
    with replacing(path, ranks) as folder:
        write(state, folder, ranks, named=path)


def require_own(optimizer: object, call: str) -> None:
    """Raise a `CheckpointError` for an optimizer whose states are not in chunks."""
    if optimizer is not None and not isinstance(optimizer, StatefulOptimizer):
        raise CheckpointError(
            f"{call} takes an optimizer of chunkmem's, or None, not a {type(optimizer).__name__}; put the state_dict() "
            "of another optimizer into extra="
        )


def write(state: dict[str, Any], folder: Path, ranks: Ranks, *, named: Path) -> None:
    """Write nested dicts of lazy and other values as a checkpoint.

    Args:
        state: of this rank; ordinary tensors are alike on the ranks of a stage.
        folder: where to.
        ranks: that write.
        named: what errors call it.

    Raises:
        CheckpointError: it cannot be written; on every rank.
    """
    problem = ""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(
                state,
                storage_writer=ChunkWriter(folder, single_file_per_rank=True, overwrite=True),
                planner=ChunkPlanner(writes_tensors=ranks.rank == 0, writes_objects=ranks.is_first),
                process_group=ranks.all_ranks_group(),
                no_dist=ranks.are_one,
            )
    except CheckpointException as error:
        problem = _reason(error)
    except OSError as error:
        problem = f"{error.filename or folder}: {error.strerror or error}"
    problem = ranks.any_text(problem, label="manager.save()")
    if problem:
        raise CheckpointError(f"{named} could not be written: {problem}; what was there before is there still")


def _reason(error: CheckpointException) -> str:
    """Return what went wrong first, in one line."""
    for rank, (raised, _) in error.failures.items():
        what = f"{raised.filename}: {raised.strerror}" if isinstance(raised, OSError) else str(raised)
        return f"rank {rank}: {what.strip().splitlines()[0] if what.strip() else type(raised).__name__}"
    return "nobody says why"
