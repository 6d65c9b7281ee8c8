"""`chunkmem convert`: a checkpoint in another format."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from chunkmem.cli.answer import CommandResult
from chunkmem.cli.machine import add_size
from chunkmem.data.errors import ConfigError
from chunkmem.data.sizes import format_nbytes

NAME = "convert"
SUMMARY = "write a checkpoint in another format, in little memory"
DESCRIPTION = """\
Convert a checkpoint between directories of torch.distributed.checkpoint, as manager.save() and dcp.save() write them,
safetensors as from_pretrained() loads them, and one file of torch.save(). A tensor is in memory at a time.

  chunkmem convert ckpt/step-100 hf --to safetensors
  chunkmem convert ckpt/step-100 all.pt
  chunkmem convert model.safetensors ckpt/start --to dcp

What is read is not run: tensors and plain containers need no trust, and a class that does is named.

Safetensors have weights alone: those under "model", if there is such a key. Weights alone come under "model"."""

_FORMATS = ("dcp", "safetensors", "torch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("source", metavar="SOURCE", type=Path, help="a checkpoint directory, *.safetensors, or a file of torch.save()")
    add("target", metavar="TARGET", type=Path, help="a directory, or a file such as all.pt")
    add("--to", choices=_FORMATS, help="format of TARGET; default: torch if it ends in .pt, .pth or .bin")
    add("--trust", action="store_true", help="read what may run anything while it is read: pickles of any class")
    add_size(parser, "--max-shard-size", default="5GiB", help="of a safetensors file (default: 5GiB)")


def run(options: argparse.Namespace) -> CommandResult:
    """Convert.

    Raises:
        ConfigError: the format is not given.
        CheckpointError: SOURCE cannot be read, or TARGET cannot be written.
    """
    from chunkmem.checkpoints.converting import Format, convert, format_of

    to = options.to or ("torch" if options.target.suffix in (".pt", ".pth", ".bin") else None)
    if to is None:
        raise ConfigError(f"{options.target}: say in which format, --to dcp or --to safetensors")
    source = format_of(options.source)
    done = convert(
        options.source, options.target, Format(to), max_shard_nbytes=options.max_shard_size, trust=options.trust
    )
    left = f"; left out: {', '.join(done.left_out)}" if done.left_out else ""
    text = (
        f"{options.source} ({source.value}) -> {options.target} ({to}): {done.num_tensors} tensors, "
        f"{format_nbytes(done.nbytes)}{left}"
    )
    return CommandResult({"source": source.value, "target": to, **asdict(done)}, text)
