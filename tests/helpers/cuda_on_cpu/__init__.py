"""The CUDA kernels, compiled for a CPU by a C++ compiler: their arithmetic, indices and launches, without a GPU."""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path

import torch

from chunkmem.optim.kernels import Kernels
from chunkmem.runtime.build import CXX_FLAGS, Recipe, cpu_recipe, ensure_library, source_dir

_FOLDER = Path(__file__).parent


def _hash_of_included() -> str:
    """What a recipe does not see: headers here, and the code of the kernels."""
    digest = hashlib.sha256()
    for path in (_FOLDER / "cuda_runtime.h", *sorted((source_dir() / "cuda").iterdir())):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class KernelsOnCpu:
    """Operators of the CUDA kernels on tensors of the CPU; for a process that has not loaded those for the CPU."""

    def __init__(self, cache_dir: Path) -> None:
        # Device code reads and writes 16 bytes at a time, as vectors of other types. A GPU refuses an address off their
        # boundary, so a trap does here.
        traps = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
        flags = (*CXX_FLAGS, *traps, "-fno-strict-aliasing", f"-I{_FOLDER}")
        units = (("ops.cpp", CXX_FLAGS), (str(_FOLDER / "kernels.cpp"), flags))
        link_flags = (*cpu_recipe().link_flags, "-Wl,-Bsymbolic")
        recipe = Recipe(f"cuda-on-cpu-{_hash_of_included()}", cpu_recipe().compiler, units, link_flags)
        path = ensure_library(recipe, cache_dir)
        torch.ops.load_library(str(path))
        self._count = ctypes.CDLL(str(path)).num_launches
        self._count.restype = ctypes.c_int64
        self.kernels = Kernels(frozenset({"cpu"}))

    def num_launches(self) -> int:
        """Return how many kernels have been launched so far."""
        return int(self._count())
