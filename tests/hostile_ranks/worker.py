"""One script on one rank: in plain PyTorch, then in chunkmem; what came of it as plain data."""

from __future__ import annotations

import gc
import hashlib
import time
import traceback
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import chunkmem
from tests.hostile.harness import SEED, Script
from tests.hostile.judge import differences
from tests.hostile_ranks.harness import (
    LIBRARY_TOLERANCE,
    SCRIPTS,
    Alike,
    Either,
    Equal,
    User,
    manager_for,
    short_roll_calls,
    without_times,
)

HERE = Path(__file__).parent
NOT_SCRIPTS = {"__init__", "fuzz_cases", "fuzz_worker", "harness", "judge", "models", "reference", "worker"}
THEMES = tuple(
    sorted(p.stem for p in HERE.glob("*.py") if p.stem not in NOT_SCRIPTS and not p.stem.startswith("test_"))
)

Report = dict[str, Any]


def load() -> dict[str, Script]:
    """All scripts by name, in the order of their files."""
    for theme in THEMES:
        import_module(f"tests.hostile_ranks.{theme}")
    return SCRIPTS


def run_named(rank: int, name: str, exchange: str) -> Report:
    """Run one of the scripts; a `Team` calls it on every rank."""
    return run_script(rank, load()[name], exchange)


def run_script(rank: int, script: Script, exchange: str) -> Report:
    """Run a script in plain PyTorch, unless there is nothing to compare with, and in chunkmem."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    expected = None
    if isinstance(script.expect, Equal | Either):
        try:
            expected, _ = _outcome(script, User(None, rank, dist.get_world_size()))
        except Exception as error:
            return {"reference": raised(error)}
    started_s = time.monotonic()
    report = _run_chunked(rank, script, exchange, expected)
    report["seconds"] = time.monotonic() - started_s
    # What a failed script left in cycles would be freed in the middle of another one.
    gc.collect()
    return report


def _run_chunked(rank: int, script: Script, exchange: str, expected: Any) -> Report:
    tolerance = 0.0 if exchange == "point to point" else LIBRARY_TOLERANCE
    if isinstance(script.expect, Equal):
        tolerance = max(tolerance, script.expect.tolerance)
    try:
        with short_roll_calls(), manager_for(exchange, script.keys) as manager:
            user = User(manager, rank, dist.get_world_size())
            left, shared = _outcome(script, user)
            with_plain = expected is not None and not isinstance(script.expect, Alike)
            found = differences(left, expected, tolerance=tolerance) if with_plain else []
            return {"differences": found[:20], "digest": hashlib.sha256(b"".join(bytes_of(shared))).hexdigest()}
    except BaseException as error:  # KeyboardInterrupt and SystemExit are among what scripts do
        return raised(error)


def _outcome(script: Script, user: User) -> tuple[dict[str, Any], list[Any]]:
    if script.model is not None:
        user.build(script.model)
    torch.manual_seed(SEED)
    script.run(user)
    left = user.left()
    return left, user.shared(left)


def bytes_of(tree: Any) -> Iterator[bytes]:
    """Everything in a tree, in its order; tensors as their bits."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield str(key).encode()
            yield from bytes_of(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from bytes_of(value)
    elif isinstance(tree, torch.Tensor):
        yield f"{tree.dtype} {tuple(tree.shape)}".encode()
        yield tree.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    else:
        yield repr(tree).encode()


def raised(error: BaseException) -> Report:
    """An error as plain data, with the innermost places in the script or the package."""
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if "/chunkmem/" in f.filename or "/hostile_ranks/" in f.filename] or frames
    places = [f"{Path(f.filename).name}:{f.lineno}" for f in mine]
    return {
        "error": type(error).__name__,
        "message": without_times(str(error)),
        "where": " < ".join(places[:-6:-1]),
        "is_ours": isinstance(error, chunkmem.ChunkmemError),
    }
