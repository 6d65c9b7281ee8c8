"""Install what is in dist/ as users do, for several Pythons and torches, and run `tests/smoke.py` with each.

python tests/matrix.py                                        # each Python that is there, the newest tested torch
python tests/matrix.py --python python3.12 --torch 2.11.0 2.13.0
python tests/matrix.py --with "transformers==4.57.*" accelerate   # with transformers' Trainer too

Each gets the wheel, and no compiler on the PATH, then the sdist, with one. The exit status is 1 if any of them fails. A
Python that is not there is left out, and named. What an installation has passed in is removed: with torch for CUDA it
is several GB.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
TORCHES = ("2.13.0",)


@dataclass(frozen=True)
class Result:
    """One Python with one torch."""

    python: str
    torch: str
    error: str
    """Empty: it works."""
    took_s: float


def run(command: Sequence[object], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a command and return what it said.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.stdout


def make_venv(python: str, folder: Path) -> Path:
    """Return the interpreter of a new virtual environment."""
    shutil.rmtree(folder, ignore_errors=True)
    run([python, "-m", "venv", folder])
    return folder / "bin" / "python"


def try_one(python: str, torch: str, packages: Sequence[Path], extra: Sequence[str], folder: Path) -> Result:
    """Install and run."""
    began_s = time.perf_counter()
    error = ""
    name = f"{python}-torch-{torch}"
    try:
        own = make_venv(python, folder / name)
        run([own, "-m", "pip", "install", "--quiet", f"torch=={torch}"])
        for package in packages:
            again = ["--force-reinstall", "--no-deps"] if package is not packages[0] else extra
            run([own, "-m", "pip", "install", "--quiet", package, f"torch=={torch}", *again])
            smoke(own, is_prebuilt=package.suffix == ".whl")
        shutil.rmtree(folder / name)
    except subprocess.CalledProcessError as failed:
        lines = [line for line in failed.stdout.splitlines() if line.strip()]
        error = f"{' '.join(map(str, failed.cmd[:5]))} ...: {lines[-1] if lines else 'it said nothing'}"
        (folder / f"{name}.log").write_text(failed.stdout)
    return Result(python, torch, error, time.perf_counter() - began_s)


def smoke(python: Path, *, is_prebuilt: bool) -> None:
    """Run `tests/smoke.py` in an empty folder; prebuilt kernels without a compiler on the PATH."""
    with tempfile.TemporaryDirectory() as empty:
        environment = {**os.environ, "XDG_CACHE_HOME": f"{empty}/cache"}
        if is_prebuilt:
            environment = {**environment, "PATH": str(python.parent), "CXX": "no-compiler"}
        shutil.copy(ROOT / "tests" / "smoke.py", empty)
        command = [python, "-I", f"{empty}/smoke.py", *(["--prebuilt"] if is_prebuilt else [])]
        run(command, cwd=Path(empty), env=environment)


def version(text: str) -> str:
    if not re.fullmatch(r"[0-9][0-9A-Za-z.+]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no version of torch")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="COMMAND", help=f"default: {' '.join(PYTHONS)}")
    parser.add_argument("--torch", nargs="+", type=version, default=TORCHES, help=f"default: {' '.join(TORCHES)}")
    parser.add_argument("--with", dest="extra", nargs="+", default=(), metavar="PACKAGE", help="also install these")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="what make wheels has made; default: dist")
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix", help="default: .matrix")
    args = parser.parse_args()
    pythons = [python for python in args.python if shutil.which(python)]
    for python in args.python:
        if python not in pythons:
            print(f"{python}: not there, left out")
    if not pythons:
        print("none of these Pythons is there", file=sys.stderr)
        return 2
    packages = [path.resolve() for pattern in ("*.whl", "*.tar.gz") for path in args.dist.glob(pattern)]
    if len(packages) != 2:
        print(f"{args.dist} has not one wheel and one sdist: make wheels", file=sys.stderr)
        return 2
    args.folder.mkdir(parents=True, exist_ok=True)
    folder = args.folder.resolve()
    results = []
    for python in pythons:
        for torch in args.torch:
            results.append(try_one(python, torch, packages, args.extra, folder))
            last = results[-1]
            print(f"{python} torch {torch}: {last.error or 'ok'} ({last.took_s:.0f} s)", flush=True)
    return int(any(result.error for result in results))


if __name__ == "__main__":
    sys.exit(main())
