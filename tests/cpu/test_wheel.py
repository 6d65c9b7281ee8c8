"""The library of CPU kernels that a wheel carries: when it is used, and an installed wheel without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from chunkmem.runtime import build
from chunkmem.runtime.build import BuildError, cpu_recipe, load_library, wheel_recipe
from tests.wheels import build_all

ROOT = Path(__file__).parents[2]
COMPILER = """#!/bin/sh
echo "$@" >> "{log}"
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then echo built > "$2"; fi
  shift
done
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Have a fake compiler; return how often it was called."""
    log, path = tmp_path / "log", tmp_path / "fake-c++"
    path.write_text(COMPILER.format(log=log))
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return lambda: len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture
def prebuilt(tmp_path: Path, calls: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have sources as a wheel has them, with a library of another torch; return that."""
    sources = tmp_path / "csrc"
    shutil.copytree(build.source_dir(), sources)
    monkeypatch.setattr(build, "source_dir", lambda: sources)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(torch, "__version__", "9.9.9")
        library = build.ensure_library(wheel_recipe(), tmp_path / "of the wheel")
        return Path(shutil.copy(library, sources / wheel_recipe().path_in_wheel()))


def loads_all_but(refused: Path) -> Callable[[str], None]:
    def load(path: str) -> None:
        if path == str(refused):
            raise OSError(f"{path}: undefined symbol: torch_parallel_for\nmore about it")

    return load


def test_it_is_used_without_a_compiler_and_without_a_cache(
    prebuilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    loaded: list[str] = []
    cache = tmp_path / "cache"
    assert load_library(cpu_recipe(), cache, load=loaded.append) == prebuilt
    assert loaded == [str(prebuilt)]
    assert build.ensure_library(cpu_recipe(), cache) == prebuilt, "chunkmem build has nothing to do"
    assert not cache.exists()


def test_one_that_does_not_load_gives_way_to_one_built_here_once(
    prebuilt: Path, tmp_path: Path, calls: Callable[[], int]
) -> None:
    before = calls()
    cache = tmp_path / "cache"
    path = load_library(cpu_recipe(), cache, load=loads_all_but(prebuilt))
    assert path.parent == cache
    assert calls() - before == len(cpu_recipe().units) + 1
    assert load_library(cpu_recipe(), cache, load=loads_all_but(prebuilt)) == path
    assert calls() - before == len(cpu_recipe().units) + 1


def test_with_neither_one_line_says_why(prebuilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError) as caught:
        load_library(cpu_recipe(), tmp_path / "cache", load=loads_all_but(prebuilt))
    why = f"{prebuilt} cannot be loaded: {prebuilt}: undefined symbol: torch_parallel_for; and there is no compiler for"
    assert str(caught.value).startswith(why)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", ["truncated", "altered", "other sources"])
def test_one_that_is_damaged_or_of_other_sources_is_not_used(how: str, prebuilt: Path) -> None:
    assert cpu_recipe().prebuilt == prebuilt
    if how == "other sources":
        with (prebuilt.parent / "adam_math.h").open("a") as header:
            header.write("\n")
    else:
        whole = prebuilt.read_bytes()
        prebuilt.write_bytes(whole[:-1] if how == "truncated" else b"B" + whole[1:])
    assert cpu_recipe().prebuilt is None


# For real.


@pytest.mark.full
@pytest.mark.parametrize("level", build.LEVEL_FLAGS)
def test_code_for_newer_processors_is_called_by_its_level_only(level: str, tmp_path: Path) -> None:
    """Of a function that two files share, a linker takes either: an older processor might get the one with AVX-512."""
    recipe = cpu_recipe()
    if level not in dict(recipe.units):
        pytest.skip("another architecture")
    include = Path(torch.__file__).parent / "include"
    flags = [*dict(recipe.units)[level], "-isystem", str(include)]
    subprocess.run(
        [*recipe.compiler, *flags, "-c", str(build.source_dir() / level), "-o", tmp_path / "level.o"], check=True
    )
    symbols = subprocess.run(["nm", "--defined-only", tmp_path / "level.o"], capture_output=True, text=True, check=True)
    shared = [line for line in symbols.stdout.splitlines() if line.split()[-2] not in "tdrb"]
    (table,) = shared
    assert Path(level).stem in table


@pytest.mark.full
@pytest.mark.skipif(not build.LEVEL_FLAGS.keys() <= dict(cpu_recipe().units).keys(), reason="wheels are for x86-64")
def test_an_installed_wheel_trains_without_a_compiler(tmp_path: Path) -> None:
    """The README's first example in fp32 and bf16, the commands, the time of an import; `make matrix` has more."""
    _, wheel = build_all(tmp_path)
    packages = tmp_path / "site-packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", packages]
    subprocess.run([*install, wheel], check=True)
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("PATH", "CXX")},
        "PATH": str(tmp_path),
        "PYTHONPATH": str(packages),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    smoke = [sys.executable, str(ROOT / "tests" / "smoke.py"), "--prebuilt"]
    done = subprocess.run(smoke, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "cache").exists(), "nothing was compiled"
