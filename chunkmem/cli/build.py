"""`chunkmem build`: compile the native libraries ahead of time."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chunkmem.cli.answer import CommandResult

NAME = "build"
SUMMARY = "compile the native libraries ahead of time"
DESCRIPTION = """\
Compile the native libraries now, so that the first training run does not have to: on a machine with a compiler, for
others that share its home folder, or while an image is built.

  chunkmem build
  chunkmem build --json | jq -r '.libraries[].path'

There is one of optimizer kernels, which a wheel for x86-64 brings; with a CUDA build of torch and nvcc one of those for
GPUs, for the GPU of this machine or, where there is none, for all that nvcc knows; and, for CUDA or torch before 2.12,
one that exchanges the memory of storages and gives kept memory back to torch's allocator."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: there are none."""


def run(options: argparse.Namespace) -> CommandResult:
    """Build, and answer where the libraries are.

    Raises:
        ConfigError: one cannot be built.
    """
    import torch

    from chunkmem.runtime.build import cpu_recipe, cuda_recipe, cuda_recipe_in, ensure_library, storage_recipe
    from chunkmem.runtime.own_folder import default_cache_dir
    from chunkmem.runtime.storage import can_swap

    folder = default_cache_dir()
    builders: dict[str, Callable[[], Path]] = {"kernels": lambda: ensure_library(cpu_recipe(), folder)}
    notes = []
    if torch.version.cuda is not None and cuda_recipe().compiler:
        builders["kernels-cuda"] = lambda: ensure_library(cuda_recipe_in(folder), folder)
    elif torch.version.cuda is not None:
        notes.append(
            "no kernels for GPUs: there is no nvcc on the PATH. Updates on a GPU will run in plain PyTorch, which is "
            f"slower; install the CUDA toolkit {torch.version.cuda}, and run `chunkmem build` again"
        )
    if torch.version.cuda is not None or not can_swap():
        builders["storage"] = lambda: ensure_library(storage_recipe(), folder)
    libraries = [_built(name, build) for name, build in builders.items()]
    lines = []
    for library in libraries:
        when = "was there already" if library["was_there"] else f"built in {library['build_s']:.1f} s"
        lines += [library["path"], when]
    return CommandResult({"libraries": libraries, "torch": torch.__version__, "notes": notes}, "\n".join(lines + notes))


def _built(name: str, build: Callable[[], Path]) -> dict[str, Any]:
    began_s, began = time.time(), time.perf_counter()
    path = build()
    build_s = time.perf_counter() - began
    # The clock of files ticks up to 10 ms late.
    was_there = path.stat().st_mtime < began_s - 0.02
    return {"name": name, "path": str(path), "was_there": was_there, "build_s": build_s}
