"""Compile native libraries on first use, and keep them in the user's cache folder.

A library is a file whose name holds what it was made from (sources, flags, torch, architecture, compiler) and whose
last bytes are its own checksum: one rename puts it in place whole, and what is truncated or altered is made again. The
loader ignores bytes behind the end of a library. A checksum does not tell who wrote it: a folder or a library that is
somebody else's, or that others may write to, is refused.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from chunkmem.data.errors import ConfigError
from chunkmem.runtime.device import cuda_capability
from chunkmem.runtime.own_folder import default_cache_dir, make_own, own_folder, require_own
from chunkmem.runtime.quiet import silenced

TORCH_TARGET_VERSION = "0x020a000000000000"
"""The stable ABI of torch 2.10, the oldest that is supported."""
MARK = b"chunkmem"
TIMEOUT_S = 600.0
LOG = logging.getLogger("chunkmem.build")

# No fused multiply-add but those that are written; square roots without a branch for errno; selects without branches.
SAME_BITS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
STABLE = f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"
CXX_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", STABLE, *SAME_BITS)
NVCC_FLAGS = (
    *("-O3", "-std=c++20", "--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false"),
    *("-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off", "-DUSE_CUDA", STABLE),
)
LEVEL_FLAGS = {
    "cpu/avx2.cpp": ("-mavx2", "-mfma"),
    "cpu/avx512.cpp": (
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"),
        "-mprefer-vector-width=512",
    ),
}
"""The instruction set of a file; which one runs is chosen when it runs."""


class BuildError(ConfigError):
    """The native library cannot be built or loaded; the message says why and what to do."""


@dataclass(frozen=True)
class Recipe:
    """What a library is made from, and how."""

    name: str
    compiler: tuple[str, ...]
    """The command; empty: there is none, and only a library that is there can be used."""
    units: tuple[tuple[str, tuple[str, ...]], ...]
    """Source files below `csrc/`, each with its compiler flags."""
    link_flags: tuple[str, ...]
    prebuilt: Path | None = None
    """A library of these sources that a wheel has brought, for any torch."""

    def path(self, cache_dir: Path) -> Path:
        """Return where the library is or will be; without a compiler, one that any compiler made."""
        stem = f"{self.name}-{self._hash_of_sources(torch.__version__)}"
        if self.compiler:
            return cache_dir / f"{stem}-{_hash_of_compiler(self.compiler[0])}.so"
        return next(iter(sorted(cache_dir.glob(f"{stem}-*.so"))), cache_dir / f"{stem}-none.so")

    def path_in_wheel(self) -> Path:
        """Return where a wheel has its library, below `csrc/`."""
        return Path(f"{self.name}-{self._hash_of_sources()}.so")

    def _hash_of_sources(self, *versions: str) -> str:
        digest = hashlib.sha256()
        for word in (*versions, platform.machine(), repr(self.units), *self.link_flags):
            digest.update(word.encode() + b"\0")
        root = source_dir()
        headers = [path.relative_to(root).as_posix() for path in root.rglob("*.h")]
        for name in sorted({*headers, *(source for source, _ in self.units)}):
            digest.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
        return digest.hexdigest()[:16]


def cpu_recipe(compiler: str | None = None) -> Recipe:
    """Return how the CPU kernels are built; `compiler`: a command, default: the one torch uses (`CXX`, or c++)."""
    sources = ["ops.cpp", "cpu/adam.cpp", "cpu/blocks.cpp", "cpu/baseline.cpp"]
    if platform.machine() in ("x86_64", "AMD64"):
        sources += LEVEL_FLAGS
    units = tuple((source, (*CXX_FLAGS, *LEVEL_FLAGS.get(source, ()))) for source in sources)
    recipe = Recipe("kernels", _cxx(compiler), units, ("-shared", "-Wl,--no-as-needed", "-ltorch_cpu"))
    prebuilt = source_dir() / _for_older_systems(recipe).path_in_wheel()
    return replace(recipe, prebuilt=prebuilt) if _is_whole(prebuilt) else recipe


def wheel_recipe() -> Recipe:
    """Return how the CPU kernels of a wheel are built: for every torch, on x86-64 with glibc 2.28 or newer."""
    return _for_older_systems(replace(cpu_recipe(), prebuilt=None))


def _for_older_systems(recipe: Recipe) -> Recipe:
    return replace(recipe, units=(*recipe.units, ("older_systems.cpp", CXX_FLAGS)))


def storage_recipe() -> Recipe:
    """Return how what reads the layout of torch's storages is built, by headers of this torch."""
    units = tuple((source, ("-O2", "-std=c++20", "-fPIC")) for source in ("storage.cpp", "kept.cpp"))
    return Recipe("storage", _cxx(None), units, ("-shared", "-Wl,--no-as-needed", "-lc10"))


def storage_library(without: str) -> ctypes.CDLL | None:
    """Return that library, building it first if this torch has none yet (seconds, once); None if it cannot be.

    Then a warning says what is `without` it.
    """
    try:
        return ctypes.CDLL(str(load_library(storage_recipe(), default_cache_dir(), load=ctypes.CDLL)))
    except BuildError as error:
        warnings.warn(f"chunkmem's native library could not be built ({error}); {without}", stacklevel=2)
        return None


def cuda_recipe(nvcc: str | None = None, *, capability: tuple[int, int] | None = None) -> Recipe:
    """Return how the CUDA kernels are built; they extend the library of the CPU kernels.

    Args:
        nvcc: a command; default: nvcc.
        capability: of the one device to compile for, as `torch.cuda.get_device_capability` returns it; None: for all
            that nvcc knows, which takes three times as long. Both have machine code, so that the driver has nothing to
            compile, which one older than nvcc cannot.
    """
    found = shutil.which(nvcc or "nvcc") or shutil.which("/usr/local/cuda/bin/nvcc" if nvcc is None else nvcc)
    target: tuple[str, ...] = ("-arch=all-major", "--threads=0")
    if capability is not None:
        number = "".join(map(str, capability))
        target = (f"-gencode=arch=compute_{number},code=[sm_{number},compute_{number}]",)
    units = tuple((source, (*NVCC_FLAGS, *target)) for source in ("cuda/adam.cu", "cuda/blocks.cu", "cuda/norm.cu"))
    # With a CPU-only torch it compiles and links, but cannot be loaded: its CUDA functions are in libtorch_cuda.
    with_cuda = ("-ltorch_cuda",) if (_torch_dir() / "lib" / "libtorch_cuda.so").exists() else ()
    link_flags = ("-shared", "-Xlinker=--no-as-needed", "-ltorch_cpu", *with_cuda)
    return Recipe("kernels-cuda", (found,) if found else (), units, link_flags)


def ensure_library(recipe: Recipe, cache_dir: Path, *, rebuild: bool = False) -> Path:
    """Return the whole library of `recipe`: that of the wheel, else one in `cache_dir`, built first if there is none.

    Raises:
        BuildError: there is no compiler, it fails, or the folder cannot be written, or is not the user's alone.
    """
    if recipe.prebuilt is not None and not rebuild:
        return recipe.prebuilt
    try:
        cache_dir = own_folder(cache_dir)
        path = recipe.path(cache_dir)
        if path.exists():
            require_own(path)
    except OSError as error:
        raise BuildError(
            f"{recipe.name} cannot be kept in {cache_dir}: {error}; make that folder writable for this user, and for "
            "nobody else (chmod 700), or name another in the variable XDG_CACHE_HOME, and run `chunkmem build`"
        ) from error
    if not rebuild and _is_whole(path):
        return path
    if not recipe.compiler:
        raise BuildError(
            f"there is no compiler for {recipe.name} on the PATH; install one, or name a C++ compiler in the variable "
            "CXX, and run `chunkmem build`"
        )
    LOG.info("compiling %s with %s; later runs load what is kept in %s", recipe.name, recipe.compiler[0], cache_dir)
    began_s = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix="building-") as folder:
            built = _compile(recipe, Path(folder))
            library = built.read_bytes()
            built.write_bytes(library + MARK + hashlib.sha256(library).digest())
            make_own(built)
            os.replace(built, path)
    except OSError as error:
        raise BuildError(
            f"cannot build {recipe.name} in {cache_dir}: {error}; make that folder writable, or name another in the "
            "variable XDG_CACHE_HOME, and run `chunkmem build`"
        ) from error
    LOG.info("compiled %s in %.1f s: %s", recipe.name, time.perf_counter() - began_s, path)
    return path


def cuda_recipe_in(cache_dir: Path, *, nvcc: str | None = None) -> Recipe:
    """Return the recipe for the GPU of this process: that of all GPUs if its library is there, or if there is none."""
    for_all = cuda_recipe(nvcc)
    capability = cuda_capability()
    if capability is None or _is_whole(for_all.path(cache_dir)):
        return for_all
    return cuda_recipe(nvcc, capability=capability)


def load_library(
    recipe: Recipe, cache_dir: Path, *, load: Callable[[str], object] = torch.ops.load_library, rebuild: bool = False
) -> Path:
    """Load the library of `recipe`, building it if there is none, and once more if it cannot be loaded.

    Raises:
        BuildError: it cannot be built or, freshly built, be loaded.
    """
    path = ensure_library(recipe, cache_dir, rebuild=rebuild)
    try:
        load(str(path))
        return path
    except (OSError, RuntimeError) as error:
        problem = str(error.__cause__ or error).strip().splitlines()[0]  # torch's own error names the path only
        if rebuild:
            raise BuildError(
                f"{path} was built but cannot be loaded: {problem}; use the compiler that torch's release notes name, "
                "and run `chunkmem build`"
            ) from error
    if path != recipe.prebuilt:
        return load_library(recipe, cache_dir, load=load, rebuild=True)
    try:
        return load_library(replace(recipe, prebuilt=None), cache_dir, load=load)
    except BuildError as error:
        raise BuildError(f"{path} cannot be loaded: {problem}; and {error}") from error


def source_dir() -> Path:
    """Return the folder of the C++ sources: `csrc/` of a checkout, or the copy an installed package carries."""
    package = Path(__file__).resolve().parents[1]
    carried = package / "csrc"
    return carried if carried.is_dir() else package.parent / "csrc"


def _cxx(compiler: str | None) -> tuple[str, ...]:
    """Return a C++ compiler's command, None: that of the one torch uses; empty: there is none."""
    with silenced("torch.utils.cpp_extension"):  # a torch for CUDA says that it has found no driver
        from torch.utils.cpp_extension import get_cxx_compiler

    command = tuple(shlex.split(str(get_cxx_compiler()) if compiler is None else compiler))
    found = shutil.which(command[0]) if command else None
    return (found, *command[1:]) if found else ()


def _compile(recipe: Recipe, folder: Path) -> Path:
    """Compile all units at once, then link; return the library. A terminal shows a line meanwhile."""
    include = _torch_dir() / "include"
    common = ("-isystem", str(include))
    from tqdm import tqdm

    objects = [folder / f"{index}.o" for index in range(len(recipe.units))]
    library = folder / f"{recipe.name}.so"
    libraries = f"-L{_torch_dir() / 'lib'}"
    title = f"chunkmem: compiling {recipe.name}, once"
    with tqdm(total=len(objects) + 1, desc=title, unit="file", disable=None, leave=False) as bar:
        _run_all(
            [
                [*recipe.compiler, *flags, *common, "-c", str(source_dir() / source), "-o", str(target)]
                for (source, flags), target in zip(recipe.units, objects, strict=True)
            ],
            bar,
        )
        _run_all([[*recipe.compiler, *map(str, objects), "-o", str(library), libraries, *recipe.link_flags]], bar)
    return library


def _run_all(commands: Sequence[Sequence[str]], bar: Any) -> None:
    """Run commands side by side; BuildError with the first message of the first that fails. `bar` counts them."""
    with ExitStack() as stack:
        running: list[subprocess.Popen[str]] = []
        for command in commands:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)  # those that still run when another one has failed
            running.append(process)
        for command, process in zip(commands, running, strict=True):
            try:
                output, _ = process.communicate(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                raise BuildError(
                    f"{command[0]} did not end within {TIMEOUT_S:.0f} s; run `chunkmem build` when the machine has time"
                ) from error
            if process.returncode != 0:
                raise BuildError(
                    f"{Path(command[0]).name} ended with status {process.returncode}: {_first_error(output)}; install "
                    "a C++ compiler that knows C++20 (GCC 11, Clang 14), name it in CXX, and run `chunkmem build`"
                )
            bar.update()


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    words = ("cannot find", "undefined reference", "error")  # a linker's own line comes before "ld returned 1"
    found = (line for line in lines if any(word in line for word in words))
    return next(found, lines[0] if lines else "it said nothing")


def _is_whole(path: Path) -> bool:
    """Return whether the file is there and ends with the checksum of what comes before."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    library, mark, digest = content[: -size - len(MARK)], content[-size - len(MARK) : -size], content[-size:]
    return mark == MARK and hashlib.sha256(library).digest() == digest


def _hash_of_compiler(command: str) -> str:
    """Tell compilers apart without starting one: an update changes the size or the time of the file."""
    real = Path(command).resolve()
    stat = real.stat()
    return hashlib.sha256(f"{real}\0{stat.st_size}\0{stat.st_mtime_ns}".encode()).hexdigest()[:8]


def _torch_dir() -> Path:
    return Path(torch.__file__).parent
