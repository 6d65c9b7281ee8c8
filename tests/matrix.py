"""Install the package as users do, for several Pythons and torches, and run `tests/smoke.py` with each.

python tests/matrix.py                                        # each Python that is there, the newest tested torch
python tests/matrix.py --python python3.12 --torch 2.11.0 2.13.0

An sdist is built in isolation, and a wheel from it; the first torch of each Python gets the sdist, the others the
wheel. The exit status is 1 if any of them fails. A Python that is not there is left out, and named.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13")
TORCHES = ("2.13.0",)


@dataclass(frozen=True)
class Result:
    """One Python with one torch."""

    python: str
    torch: str
    error: str
    """Empty: it works."""
    took_s: float


def run(command: Sequence[object], *, cwd: Path | None = None) -> str:
    """Run a command and return what it said.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.stdout


def make_venv(python: str, folder: Path) -> Path:
    """Return the interpreter of a new virtual environment."""
    shutil.rmtree(folder, ignore_errors=True)
    run([python, "-m", "venv", folder])
    return folder / "bin" / "python"


def build(python: str, folder: Path) -> tuple[Path, Path]:
    """Build the sdist, and a wheel from it, in isolation; return both."""
    tool = make_venv(python, folder / "building")
    run([tool, "-m", "pip", "install", "--quiet", "build"])
    shutil.rmtree(folder / "dist", ignore_errors=True)
    run([tool, "-m", "build", "--outdir", folder / "dist", ROOT])
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


def try_one(python: str, torch: str, package: Path, folder: Path) -> Result:
    """Install and run."""
    began_s = time.perf_counter()
    error = ""
    try:
        own = make_venv(python, folder / f"{python}-torch-{torch}")
        run([own, "-m", "pip", "install", "--quiet", f"torch=={torch}"])
        run([own, "-m", "pip", "install", "--quiet", package, f"torch=={torch}"])
        with tempfile.TemporaryDirectory() as empty:
            shutil.copy(ROOT / "tests" / "smoke.py", empty)
            run([own, "-I", Path(empty) / "smoke.py"], cwd=Path(empty))
    except subprocess.CalledProcessError as failed:
        lines = [line for line in failed.stdout.splitlines() if line.strip()]
        error = f"{' '.join(failed.cmd[:5])} ...: {lines[-1] if lines else 'it said nothing'}"
        (folder / f"{python}-torch-{torch}.log").write_text(failed.stdout)
    return Result(python, torch, error, time.perf_counter() - began_s)


def version(text: str) -> str:
    if not re.fullmatch(r"[0-9][0-9A-Za-z.+]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no version of torch")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="COMMAND", help=f"default: {' '.join(PYTHONS)}")
    parser.add_argument("--torch", nargs="+", type=version, default=TORCHES, help=f"default: {' '.join(TORCHES)}")
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix", help="default: .matrix")
    args = parser.parse_args()
    pythons = [python for python in args.python if shutil.which(python)]
    for python in args.python:
        if python not in pythons:
            print(f"{python}: not there, left out")
    if not pythons:
        print("none of these Pythons is there", file=sys.stderr)
        return 2
    args.folder.mkdir(parents=True, exist_ok=True)
    folder = args.folder.resolve()
    sdist, wheel = build(pythons[0], folder)
    results = []
    for python in pythons:
        for index, torch in enumerate(args.torch):
            results.append(try_one(python, torch, wheel if index else sdist, folder))
            last = results[-1]
            print(f"{python} torch {torch}: {last.error or 'ok'} ({last.took_s:.0f} s)", flush=True)
    return int(any(result.error for result in results))


if __name__ == "__main__":
    sys.exit(main())
