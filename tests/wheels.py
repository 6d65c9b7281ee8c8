"""Build into dist/ what is released: the sdist, and of it a wheel with compiled CPU kernels for Linux on x86-64.

python tests/wheels.py

The library in the wheel is for every Python and every supported torch: it uses torch's stable ABI only. The exit status
is 1 if auditwheel finds that the wheel needs a newer system than torch's own wheels do.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLATFORM = "manylinux_2_28_x86_64"
"""That of torch's wheels: glibc 2.28, libstdc++ of GCC 8."""


def add_kernels(tree: Path) -> None:
    """Compile the CPU kernels into an unpacked sdist."""
    from chunkmem.runtime.build import ensure_library, wheel_recipe

    recipe = wheel_recipe()
    with tempfile.TemporaryDirectory() as cache:
        shutil.copy(ensure_library(recipe, Path(cache) / "native"), tree / "csrc" / recipe.path_in_wheel())


def build_all(folder: Path) -> tuple[Path, Path]:
    """Build into `folder`; return the sdist and the wheel."""
    sdist = folder / build("sdist", ROOT, folder)
    with tempfile.TemporaryDirectory() as unpacked:
        shutil.unpack_archive(sdist, unpacked, filter="data")
        (tree,) = Path(unpacked).iterdir()
        add_kernels(tree)
        return sdist, folder / build("wheel", tree, folder, f"--plat-name={PLATFORM}")


def build(what: str, tree: Path, folder: Path, *options: str) -> str:
    """Build one file with setuptools and return its name."""
    call = f"build_{what}({str(folder)!r}, {{'--build-option': {[*options]}}})"
    program = f"from setuptools import build_meta; print(build_meta.{call})"
    done = subprocess.run([sys.executable, "-c", program], cwd=tree, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()[-1]


def problem_with(wheel: Path) -> str:
    """Return why the wheel would not load on the systems that its name promises; empty: it does."""
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    needed, promised = (tuple(map(int, re.findall(r"_(\d+)(?=_)", tag))) for tag in (found["sym_tag"], PLATFORM))
    if not needed or needed > promised:
        return f"its symbols are those of {found['sym_tag']}: csrc/older_systems.cpp lacks one"
    if others := set(found["external_libs"]) - {"libtorch_cpu.so"}:
        return f"it needs {sorted(others)}, which are not part of torch or of every system"
    return "its start needs a newer processor" if found["unsupported_isa"] else ""


def main() -> int:
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    sdist, wheel = build_all(dist)
    if problem := problem_with(wheel):
        print(f"{wheel.name}: {problem}", file=sys.stderr)
        return 1
    print(sdist.relative_to(ROOT), wheel.relative_to(ROOT), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
