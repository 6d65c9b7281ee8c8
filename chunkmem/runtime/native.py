"""Build and load the native library, where a compiler is there."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import time
import warnings
from pathlib import Path

import torch

from chunkmem.runtime.own_folder import default_cache_dir, make_own, own_folder, require_own
from chunkmem.runtime.quiet import silenced

LOG = logging.getLogger("chunkmem.build")


def source_dir() -> Path:
    """Return the folder of the C++ sources: `csrc/` of a checkout, or the copy an installed package carries."""
    package = Path(__file__).resolve().parents[1]
    carried = package / "csrc"
    return carried if carried.is_dir() else package.parent / "csrc"


def load_library(without: str = "eviction will be slower") -> ctypes.CDLL | None:
    """Return the library, building it first if this torch has none yet (seconds, once); None without a compiler.

    Then a warning says what is `without` it.

    torch's own extension builder keeps it in a folder whose name holds the torch version, whose headers it was built
    for. It loads what is there, and runs what its build files say: so that folder is the user's alone.
    """
    with silenced("torch.utils.cpp_extension"):  # a torch for CUDA says that it has found no driver
        from torch.utils import cpp_extension

    name = "chunkmem_storage_" + "".join(c if c.isalnum() else "_" for c in torch.__version__)
    began_s, timer_s = time.time(), time.perf_counter()
    try:
        folder = own_folder(own_folder(default_cache_dir()) / name)
        if (library := folder / f"{name}.so").exists():
            require_own(library)
        path = cpp_extension.load(
            name,
            [str(source_dir() / "storage.cpp"), str(source_dir() / "kept.cpp")],
            extra_cflags=["-O2"],
            build_directory=str(folder),
            is_python_module=False,
            with_cuda=False,
        )
        make_own(Path(path))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"chunkmem's native library could not be built ({str(error).splitlines()[0]}); {without}. Install a C++ "
            "compiler and ninja",
            stacklevel=2,
        )
        return None
    if Path(path).stat().st_mtime >= began_s:  # else it was there
        LOG.info("compiled %s in %.1f s: %s", name, time.perf_counter() - timer_s, path)
    return ctypes.CDLL(path)
