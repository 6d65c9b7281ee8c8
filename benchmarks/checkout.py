"""Another checkout's chunkmem in the same run as this one's, so that a change can be timed."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

from benchmarks.program import BenchmarkError


def add_option(parser: argparse.ArgumentParser) -> None:
    """Let the command line name the other checkout."""
    told = "run each chunkmem variant with another checkout's chunkmem too, e.g. a `git worktree` of an older commit"
    parser.add_argument("--before", type=_checkout, metavar="CHECKOUT", help=told)


def import_chunkmem(checkout: str | None) -> ModuleType:
    """Import the chunkmem of `checkout` (None: this one's) in place of what the harness itself imported of it.

    Raises:
        BenchmarkError: there is none.
    """
    if checkout is not None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "chunkmem"]:
            del sys.modules[name]
        sys.path.insert(0, checkout)
    chunkmem = importlib.import_module("chunkmem")
    if checkout is not None and not Path(str(chunkmem.__file__)).is_relative_to(checkout):
        raise BenchmarkError(f"{checkout} has no chunkmem: {chunkmem.__file__} was imported")
    return chunkmem


def _checkout(text: str) -> Path:
    path = Path(text).resolve()
    if not (path / "chunkmem" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"there is no chunkmem in {path}")
    return path
