"""Read a checkpoint into a model and its optimizer: looked over as a whole first, then a tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils._pytree import tree_map_only

from chunkmem.assembly.runtime import Runtime
from chunkmem.checkpoints.by_rank import OwnNames, OwnParts
from chunkmem.checkpoints.files import EXTRA
from chunkmem.checkpoints.odd_files import checkpoint_path
from chunkmem.checkpoints.reading import CheckpointFiles
from chunkmem.checkpoints.saving import require_own
from chunkmem.data.errors import CheckpointError, ChunkmemError, RankError, said
from chunkmem.modules.lazy_tensor import LazyTensor
from chunkmem.modules.registry import check_fits
from chunkmem.optim.ema import EMA
from chunkmem.optim.optimizer import RuleOptimizer
from chunkmem.optim.tiles import indexed_state


def load_checkpoint(
    runtime: Runtime,
    named: str | os.PathLike[str],
    optimizer: RuleOptimizer | None,
    *,
    ema: EMA | None,
    model: nn.Module | None,
    strict: bool,
    trust: bool,
    before_reading: Callable[[Path], None],
) -> dict[str, Any]:
    """See `ChunkManager.load`; `before_reading` is told what directory is about to be read."""
    root, ranks = runtime.root(model), runtime.ranks
    require_own(optimizer, ema, "manager.load()")
    ledger, owner = runtime.updater.ledger, runtime.updater.state_chunks.owner
    everyone = ranks.everyone()
    problem = written = ""
    cause: Exception | None = None
    try:
        updates = None if optimizer is None else optimizer.updates
        others = [managed for managed in ledger.begun if owner(managed) is not updates]
        ledger.require_over("manager.load() without its optimizer", others)
        path = checkpoint_path(named)
        before_reading(path)
        files = CheckpointFiles(path, trust=trust)
        written = f"{files.digest} {path} of rank {ranks.name(ranks.rank)}"
        names = OwnNames(root, runtime)
        own = OwnParts(files, names, everyone)
        expected = runtime.modules.overrides.expected_state(root)
        weights: dict[str, Any] = names.elsewhere(expected) | (own.nested("model") or {})
        check_fits(weights, expected, strict=strict)
        states, averages = _states(own, root, optimizer), _averages(own, ema)
        extra = tree_map_only(LazyTensor, LazyTensor.read, own.extra or files.nested(EXTRA) or {})
        # A share of each rank: they are read whole, as no damage may be found when half is loaded.
        files.verify(files.tensors[ranks.rank :: ranks.size])
    except RankError:
        raise
    except (ChunkmemError, OSError) as error:  # else the other ranks would wait for this one
        problem = str(error)
    except Exception as error:  # of what anybody may have written, the checks of models and optimizers raise anything
        problem, cause = f"{named!r} cannot be loaded: {said(error)}", error
    first = ranks.from_first(written, label="manager.load()")
    if written and first and written.split()[0] != first.split()[0]:
        this, other = written.partition(" ")[2], first.partition(" ")[2]
        problem = f"{this} is another checkpoint than {other}: copy one to all of them; nothing was loaded"
    problem = ranks.any_text(problem, label="manager.load()")
    if problem:
        raise CheckpointError(
            problem if "nothing was" in problem.lower() else f"{problem}; nothing was loaded"
        ) from cause
    with ledger.replacing():
        runtime.load_state_dict(weights, root, strict=strict)
        if optimizer is not None and states is not None:
            optimizer.load_state_dict(states)
            optimizer.updates.end_if_begun(discards=True)
    if ema is not None:
        ema.load_state_dict(averages)
    return dict(extra)


def _averages(own: OwnParts, ema: EMA | None) -> dict[str, Any]:
    """Return the saved averages, once they are certain to fit.

    Raises:
        CheckpointError: there are none, or they do not.
    """
    if ema is None:
        return {}
    saved = own.nested("ema")
    if not isinstance(saved, dict):
        raise CheckpointError(f"{own.files.path} has no averages; load it without ema=")
    ema.check_state_dict(saved)
    return saved


def _states(own: OwnParts, root: nn.Module, optimizer: RuleOptimizer | None) -> dict[str, Any] | None:
    """Return the saved state of an optimizer as it takes it, once it is certain to.

    Raises:
        CheckpointError: there is none, or it does not fit.
    """
    if optimizer is None:
        return None
    saved = own.nested("optimizer")
    if not isinstance(saved, dict) or "param_groups" not in saved:
        raise CheckpointError(f"{own.files.path} has no optimizer state; load it without an optimizer")
    states = indexed_state(root, optimizer, saved)
    optimizer.check_state_dict(states)
    return states
