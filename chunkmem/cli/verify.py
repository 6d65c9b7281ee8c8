"""`chunkmem verify`: is a checkpoint whole."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chunkmem.cli.answer import CommandResult, table
from chunkmem.data.sizes import format_nbytes

if TYPE_CHECKING:
    from chunkmem.checkpoints.verifying import Verified

NAME = "verify"
SUMMARY = "read all of a checkpoint: is it whole, and as it was written"
DESCRIPTION = """\
Read all of a checkpoint, without a model, and compare it with its checksums: a directory that manager.save() or
dcp.save() has written, safetensors, or a file of torch.save(). Little memory is taken, and nothing of it is run.

  chunkmem verify ckpt/step-100
  chunkmem verify hf
  chunkmem verify ckpt/step-100 --json | jq .problems

The exit status is 1 if anything is damaged or missing, and 2 if there is no checkpoint. Safetensors have no checksums:
that they are complete and can be read is all there is to tell."""

_MAX_SHOWN = 20
"""Problems that are printed; --json has all of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="a directory, *.safetensors, or a file of torch.save()"
    )


def run(options: argparse.Namespace) -> CommandResult:
    """Look a checkpoint over.

    Raises:
        CheckpointError: it is none.
    """
    from tqdm import tqdm

    from chunkmem.checkpoints.odd_files import checkpoint_path
    from chunkmem.checkpoints.verifying import verify

    path = checkpoint_path(options.checkpoint)
    with tqdm(desc="reading", unit="B", unit_scale=True, disable=None, leave=False) as bar:

        def on_read(more: int, total: int) -> None:
            bar.total = total
            bar.update(more)

        found = verify(path, on_read=on_read)
    data: dict[str, Any] = {"checkpoint": str(path), "whole": found.is_whole, **asdict(found)}
    data["format"] = found.format.value
    return CommandResult(data, _text(path, found), fits=found.is_whole)


def _text(path: Path, found: Verified) -> str:
    rows = [
        (
            " ".join(key.split()),
            str(part.num_tensors),
            str(part.num_objects),
            format_nbytes(part.nbytes),
            str(part.num_damaged or ""),
        )
        for key, part in found.parts.items()
    ]
    lines = [f"{path} ({found.format.value}), compared with {found.compared_with}", ""]
    if rows:
        lines += [table(("", "tensors", "objects", "bytes", "damaged"), rows), ""]
    lines += [" ".join(problem.split()) for problem in found.problems[:_MAX_SHOWN]]
    if len(found.problems) > _MAX_SHOWN:
        lines.append(f"... and {len(found.problems) - _MAX_SHOWN} more (--json has all)")
    if found.needs_trust:
        lines.append(f"to be loaded with trust=True alone: what needs {', '.join(found.needs_trust)}")
    lines.append("whole" if found.is_whole else "damaged")
    return "\n".join(lines)
