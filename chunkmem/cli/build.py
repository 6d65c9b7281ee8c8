"""`chunkmem build`: compile the native library ahead of time."""

from __future__ import annotations

import argparse
import shutil
import time
import warnings
from pathlib import Path

from chunkmem.cli.answer import Answer
from chunkmem.cli.quiet import silenced
from chunkmem.errors import ConfigError

NAME = "build"
SUMMARY = "compile the native library ahead of time"
DESCRIPTION = """\
Compile the native library now, so that the first training run does not have to: on a machine with a compiler, for
others that share its home folder, or while an image is built.

  chunkmem build
  chunkmem build --json | jq -r .path

torch 2.12 and later do by themselves what the library is for; there it is only built to check the compiler."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: there are none."""


def run(options: argparse.Namespace) -> Answer:
    """Build, and answer where the library is.

    Raises:
        ConfigError: it cannot be built.
    """
    import torch

    from chunkmem.runtime.native import load_library
    from chunkmem.runtime.storage import SwapBackend

    began_s, began = time.time(), time.perf_counter()
    with silenced("torch.utils.cpp_extension"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        library = load_library()
    build_s = time.perf_counter() - began
    if library is None:
        raise ConfigError(_why_not(str(caught[-1].message) if caught else "the native library could not be built"))
    path = Path(library._name)
    # The clock of files ticks up to 10 ms late.
    was_there = path.stat().st_mtime < began_s - 0.02
    is_needed = not SwapBackend.available()
    data = {
        "path": str(path),
        "was_there": was_there,
        "build_s": build_s,
        "is_needed": is_needed,
        "torch": torch.__version__,
    }
    text = f"{path}\n{'was there already' if was_there else f'built in {build_s:.1f} s'}"
    if not is_needed:
        text += f"; torch {torch.__version__} does without it"
    return Answer(data, text)


def _why_not(message: str) -> str:
    from torch.utils.cpp_extension import get_cxx_compiler, is_ninja_available

    if not is_ninja_available():
        return "ninja is not on the PATH, which torch builds C++ with; pip install ninja, or activate its environment"
    compiler = str(get_cxx_compiler())
    if shutil.which(compiler.split()[0] if compiler.split() else "") is None:
        return f"there is no C++ compiler {compiler} on the PATH; install one, or name another in the variable CXX"
    return message
