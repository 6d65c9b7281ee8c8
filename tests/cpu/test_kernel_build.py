"""Building the native kernels: the cache, damaged files, compilers that fail, and two processes at once."""

from __future__ import annotations

import hashlib
import os
import pty
import shutil
import subprocess
import sys
import termios
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from chunkmem.optim import kernels
from chunkmem.optim.segments import HyperParameters, Segments
from chunkmem.runtime import build
from chunkmem.runtime.build import BuildError, cpu_recipe, cuda_recipe, cuda_recipe_in, ensure_library, load_library

ROOT = Path(__file__).parents[2]

# Writes what it was called with to a log, and its output file.
WORKS = """#!/bin/sh
echo "$@" >> "{log}"
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then echo built > "$2"; fi
  shift
done
"""
LINKER = """#!/bin/sh
echo "/usr/bin/ld: cannot find -lcheese: No such file"
echo "collect2: error: ld returned 1 exit status"
exit 1
"""
FAILS = """#!/bin/sh
echo "warning: something else"
echo "ops.cpp:7: error: the disk is made of cheese"
exit 3
"""


@pytest.fixture
def compiler(tmp_path: Path) -> Callable[[str], str]:
    """Make a fake compiler of a script."""

    def make(script: str, name: str = "fake-c++") -> str:
        path = tmp_path / name
        path.write_text(script.format(log=tmp_path / "log"))
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def calls(tmp_path: Path) -> Callable[[], int]:
    """Count how often the fake compiler was called."""
    log = tmp_path / "log"
    return lambda: len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `load_kernels` believe that this process has loaded nothing yet."""
    monkeypatch.setattr(kernels, "_is_registered", lambda key: False)


def loads_never(path: str) -> None:
    raise OSError(f"{path}: invalid ELF header\nmore about it")


# The cache.


def test_a_library_is_built_once(tmp_path: Path, compiler: Callable[..., str], calls: Callable[[], int]) -> None:
    recipe, cache = cpu_recipe(compiler(WORKS)), tmp_path / "new" / "cache"
    path = ensure_library(recipe, cache)
    assert path.read_bytes().startswith(b"built\n")
    assert calls() == len(recipe.units) + 1
    assert ensure_library(recipe, cache) == path
    assert calls() == len(recipe.units) + 1
    assert list(cache.iterdir()) == [path], "what was needed for building is gone"


def test_every_source_gets_the_flags_that_keep_its_bits(tmp_path: Path, compiler: Callable[..., str]) -> None:
    ensure_library(cpu_recipe(compiler(WORKS)), tmp_path / "cache")
    *compilations, link = (tmp_path / "log").read_text().splitlines()
    assert len(compilations) == len(list((build.source_dir() / "cpu").glob("*.cpp"))) + 1
    assert all(" -ffp-contract=off " in line and "-ffast-math" not in line for line in compilations)
    assert "-ltorch_cpu" in link


@pytest.mark.full
def test_a_terminal_shows_a_line_while_they_are_compiled(tmp_path: Path, compiler: Callable[..., str]) -> None:
    """The first run took a minute without a word. A log gets none of it."""
    program = (
        "import sys; from pathlib import Path; from chunkmem.runtime.build import cpu_recipe, ensure_library; "
        "ensure_library(cpu_recipe(sys.argv[1]), Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", program, compiler(WORKS)]
    terminal, other_end = pty.openpty()
    termios.tcsetwinsize(other_end, (24, 100))
    subprocess.run([*command, str(tmp_path / "first")], stderr=other_end, check=True)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(other_end)
    os.close(terminal)
    assert "chunkmem: compiling kernels, once:   0%" in shown
    piped = subprocess.run([*command, str(tmp_path / "second")], capture_output=True, text=True, check=True)
    assert "compiling" not in piped.stderr
    assert list((tmp_path / "second").iterdir())


def test_the_name_tells_sources_torch_and_compilers_apart(
    tmp_path: Path, compiler: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "csrc"
    shutil.copytree(build.source_dir(), sources)
    monkeypatch.setattr(build, "source_dir", lambda: sources)
    recipe = cpu_recipe(compiler(WORKS))
    names = [recipe.path(tmp_path)]
    for changed in ("cpu/tile.h", "arguments.h", "cpu/avx2.cpp"):
        (sources / changed).write_text((sources / changed).read_text() + "\n")
        names.append(recipe.path(tmp_path))
    (sources / "storage.cpp").write_text("")
    assert recipe.path(tmp_path) == names[-1], "another library's source"
    names.append(cpu_recipe(compiler(WORKS + "\n", name="other-c++")).path(tmp_path))
    compiler(WORKS + "# a new version\n")
    names.append(recipe.path(tmp_path))
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    names.append(recipe.path(tmp_path))
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("damage", ["truncated", "altered", "empty", "no checksum"])
def test_a_damaged_library_is_built_again(
    damage: str, tmp_path: Path, compiler: Callable[..., str], calls: Callable[[], int]
) -> None:
    recipe = cpu_recipe(compiler(WORKS))
    path = ensure_library(recipe, tmp_path)
    whole = path.read_bytes()
    digest_nbytes = hashlib.sha256().digest_size
    damaged = {
        "truncated": whole[:-1],
        "altered": b"B" + whole[1:],
        "empty": b"",
        "no checksum": whole[:-digest_nbytes],
    }
    path.write_bytes(damaged[damage])
    assert ensure_library(recipe, tmp_path) == path
    assert path.read_bytes() == whole
    assert calls() == 2 * (len(recipe.units) + 1)


def test_a_library_that_does_not_load_is_built_once_more(
    tmp_path: Path, compiler: Callable[..., str], calls: Callable[[], int]
) -> None:
    recipe = cpu_recipe(compiler(WORKS))
    tried: list[str] = []

    def loads_the_second_time(path: str) -> None:
        tried.append(path)
        if len(tried) == 1:
            loads_never(path)

    path = load_library(recipe, tmp_path, load=loads_the_second_time)
    assert tried == [str(path)] * 2
    assert calls() == 2 * (len(recipe.units) + 1)
    with pytest.raises(BuildError, match=r"built but cannot be loaded: .*: invalid ELF header; use the compiler"):
        load_library(recipe, tmp_path, load=loads_never)


def test_without_a_compiler_a_library_that_is_there_is_used(tmp_path: Path, compiler: Callable[..., str]) -> None:
    path = ensure_library(cpu_recipe(compiler(WORKS)), tmp_path)
    assert ensure_library(cpu_recipe("no-such-compiler"), tmp_path) == path
    path.write_bytes(b"")
    with pytest.raises(BuildError, match="there is no compiler for kernels"):
        ensure_library(cpu_recipe("no-such-compiler"), tmp_path)


# Whose it is.


def as_others(path: Path, how: str) -> None:
    """Make a file or folder somebody else's, or one that others may write to."""
    if how == "another user's":
        if os.geteuid():
            pytest.skip("needs root, who may give files away")
        os.chown(path, 12345, -1)
    else:
        path.chmod(path.stat().st_mode | {"group": 0o020, "all": 0o002}[how])


@pytest.mark.parametrize("how", ["another user's", "group", "all"])
@pytest.mark.parametrize("what", ["folder", "library"])
def test_what_others_may_write_to_is_not_loaded(
    what: str, how: str, tmp_path: Path, compiler: Callable[..., str], calls: Callable[[], int]
) -> None:
    recipe, cache = cpu_recipe(compiler(WORKS)), tmp_path / "cache"
    path = ensure_library(recipe, cache)
    num_calls = calls()
    as_others(cache if what == "folder" else path, how)
    loaded: list[str] = []
    with pytest.raises(BuildError, match=r"belongs to user 12345|others may write to it \(mode [67]") as caught:
        load_library(recipe, cache, load=loaded.append)
    assert "XDG_CACHE_HOME" in str(caught.value)
    assert (loaded, calls()) == ([], num_calls)


def test_what_is_built_is_the_users_alone_under_any_umask(tmp_path: Path, compiler: Callable[..., str]) -> None:
    before = os.umask(0)
    try:
        recipe, cache = cpu_recipe(compiler(WORKS)), tmp_path / "chunkmem" / "cache"
        path = ensure_library(recipe, cache)
        assert ensure_library(recipe, cache) == path
    finally:
        os.umask(before)
    assert [folder.stat().st_mode & 0o777 for folder in (cache.parent, cache)] == [0o700, 0o700]
    assert path.stat().st_mode & 0o022 == 0


def test_a_folder_in_whose_place_others_may_put_another(tmp_path: Path, compiler: Callable[..., str]) -> None:
    recipe, cache = cpu_recipe(compiler(WORKS)), tmp_path / "everybody's" / "mine" / "cache"
    path = ensure_library(recipe, cache)
    shared = tmp_path / "everybody's"
    shared.chmod(0o777)
    with pytest.raises(BuildError, match=r"others may rename what is in it \(mode 777\): .*everybody's"):
        ensure_library(recipe, cache)
    shared.chmod(0o1777)  # like /tmp
    assert ensure_library(recipe, cache) == path


def test_a_link_to_the_folder_of_somebody_else(tmp_path: Path, compiler: Callable[..., str]) -> None:
    (tmp_path / "theirs").mkdir()
    as_others(tmp_path / "theirs", "all")
    (tmp_path / "cache").symlink_to("theirs")
    with pytest.raises(BuildError, match=r"theirs"):
        ensure_library(cpu_recipe(compiler(WORKS)), tmp_path / "cache")
    assert not list((tmp_path / "theirs").iterdir())


def test_a_failure_leaves_nothing_behind(tmp_path: Path, compiler: Callable[..., str]) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(
        BuildError, match=r"fake-c\+\+ ended with status 3: ops.cpp:7: error: the disk is made of cheese"
    ):
        ensure_library(cpu_recipe(compiler(FAILS)), cache)
    assert list(cache.iterdir()) == []


def test_a_linker_is_quoted_with_what_it_lacks(tmp_path: Path, compiler: Callable[..., str]) -> None:
    with pytest.raises(BuildError, match=r"ended with status 1: /usr/bin/ld: cannot find -lcheese"):
        ensure_library(cpu_recipe(compiler(LINKER)), tmp_path / "cache")


# Falling back.


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("trouble", ["no compiler", "failing compiler", "useless compiler", "unwritable cache"])
def test_any_trouble_ends_in_one_warning_and_the_reference(
    trouble: str, tmp_path: Path, compiler: Callable[..., str]
) -> None:
    cache = tmp_path / "cache"
    command = str(tmp_path / "missing")
    message = "there is no compiler for kernels on the PATH"
    if trouble == "failing compiler":
        command, message = compiler(FAILS), "the disk is made of cheese"
    elif trouble == "useless compiler":
        command, message = compiler(WORKS), "was built but cannot be loaded"
    elif trouble == "unwritable cache":
        command, message = compiler(WORKS), "make that folder writable"
        cache.write_text("a file where the folder should be")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fallback = kernels.load_kernels(cache_dir=cache, compiler=command)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "run in plain PyTorch everywhere" in text
    assert message in text
    assert "run `chunkmem build`" in text
    assert "\n" not in text
    assert caught[0].filename == __file__
    assert fallback.native_devices == frozenset()
    # It computes.
    segments = Segments([torch.ones(3)], [torch.ones(3)], [torch.zeros(3)], [torch.zeros(3)])
    fallback.adamw_(segments, HyperParameters([0.1], [0.9], [0.999], [1e-8], [0.0], [1]))
    torch.testing.assert_close(segments.params[0], torch.full((3,), 0.9))


@pytest.mark.usefixtures("unloaded")
def test_the_path_is_where_a_compiler_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.warns(UserWarning, match="there is no compiler for kernels on the PATH"):
        assert kernels.load_kernels(cache_dir=tmp_path).native_devices == frozenset()


@pytest.mark.usefixtures("unloaded")
def test_without_nvcc_the_cpu_kernels_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "load_library", _load_cpu_only)
    with pytest.warns(UserWarning, match=r"plain PyTorch on CUDA.*no compiler for kernels-cuda"):
        found = kernels.load_kernels(with_cuda=True, cache_dir=tmp_path, nvcc=str(tmp_path / "missing"))
    assert found.native_devices == {"cpu"}


def _load_cpu_only(recipe: build.Recipe, cache_dir: Path) -> Path:
    return cache_dir if recipe.name == "kernels" else ensure_library(recipe, cache_dir)


# For real.

USE_THEM = """
import sys
from pathlib import Path
import torch
from chunkmem.optim.kernels import load_kernels
kernels = load_kernels(cache_dir=Path(sys.argv[1]))
again = load_kernels(cache_dir=Path(sys.argv[1]))
print(sorted(kernels.native_devices), kernels == again, kernels.norm_and_finite([torch.full((5,), 2.0)]).tolist())
"""


@pytest.mark.full
def test_two_processes_may_build_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", USE_THEM, str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate() for process in both]
    assert outputs == [("['cpu'] True [20.0, 1.0]\n", "")] * 2
    (library,) = tmp_path.iterdir()
    assert library.stat().st_size < 1 << 20


@pytest.mark.full  # `make check` runs it
@pytest.mark.skipif(not build.cuda_recipe().compiler, reason="needs nvcc")
def test_the_cuda_kernels_compile(tmp_path: Path) -> None:
    library = ensure_library(cuda_recipe(capability=(9, 0)), tmp_path).read_bytes()
    assert b"adam_kernel" in library
    assert b"chunkmem" in library


# For which GPU.


def targets(recipe: build.Recipe) -> set[str]:
    return {flag for _, flags in recipe.units for flag in flags if "arch" in flag}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cuda_capability", lambda: (9, 0))


def test_without_a_gpu_the_library_is_for_all(tmp_path: Path) -> None:
    assert targets(cuda_recipe_in(tmp_path)) == {"-arch=all-major"}


@pytest.mark.usefixtures("gpu")
def test_with_a_gpu_the_library_is_for_that_one(tmp_path: Path) -> None:
    assert targets(cuda_recipe_in(tmp_path)) == {"-gencode=arch=compute_90,code=[sm_90,compute_90]"}


@pytest.mark.usefixtures("gpu")
def test_a_library_for_all_that_is_there_is_used(
    tmp_path: Path, compiler: Callable[[str], str], calls: Callable[[], int]
) -> None:
    nvcc = compiler(WORKS)
    built = ensure_library(cuda_recipe(nvcc), tmp_path)
    num_calls = calls()
    recipe = cuda_recipe_in(tmp_path, nvcc=nvcc)
    assert targets(recipe) == {"-arch=all-major"}
    assert (ensure_library(recipe, tmp_path), calls()) == (built, num_calls)
