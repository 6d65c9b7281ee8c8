"""Is it right on the device: the tests, file by file, and what compute-sanitizer says of the kernels."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.harness import ROOT, Task
from benchmarks.gpu.rows import NotHereError, Store
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.table import Rows, page

NAME = "correct"
SUMMARY = "tests/gpu and tests/cpu on the device, the whole zoo, compute-sanitizer"
HEADER = ("row", "passed", "failed", "skipped", "s", "which failed")
ZOO = "tests/cpu/test_zoo.py"
FIRST = (
    "tests/cpu/test_lanes.py",
    "tests/cpu/test_kernels.py",
    "tests/cpu/test_overlap.py",
    "tests/cpu/test_engine.py",
)
"""Of tests/cpu, what is about placement, copies and updates."""
DRY = ("tests/unit/test_benchmark_stats.py", "tests/cpu/test_pool.py")
SANITIZED = "tests/gpu/test_kernels.py"
SANITIZED_TESTS = "the_norm_of_the_cpu or views_that_begin_anywhere"
"""A few launches of each kernel; under the tool each takes a hundred times as long."""
TOOLS = ("memcheck", "racecheck")
FUNCTION = "benchmarks.gpu.correct"


def tasks(setting: Setting, _store: Store) -> Iterator[Task]:
    """Yield a row for each file of tests: a CUDA error spoils all that follows in its process."""
    if setting.dry:
        for path in DRY:
            yield Task(path, f"{FUNCTION}:run_tests", {"path": path}, 60, needs_gpu=False)
        yield Task("tests/gpu", f"{FUNCTION}:run_tests", {"path": "tests/gpu"}, 60)
        yield Task(f"{ZOO}, all caps and variants", f"{FUNCTION}:run_tests", {"path": ZOO}, 60)
        for tool in TOOLS:
            yield Task(f"compute-sanitizer {tool}", f"{FUNCTION}:sanitize", {"tool": tool}, 60)
        return
    for path in files("tests/gpu"):
        yield Task(path, f"{FUNCTION}:run_tests", {"path": path}, 100)
    # The tool sees what the driver hands out, and not how torch's allocator divides it.
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool in TOOLS:
        key = f"compute-sanitizer {tool}"
        yield Task(key, f"{FUNCTION}:sanitize", {"tool": tool}, 240, environment=uncached)
    yield Task(ZOO, f"{FUNCTION}:run_tests", {"path": ZOO}, 240)
    for path in (*FIRST, *(path for path in files("tests/cpu") if path not in (*FIRST, ZOO))):
        yield Task(path, f"{FUNCTION}:run_tests", {"path": path}, 180)
    yield Task(f"{ZOO}, all caps and variants", f"{FUNCTION}:run_tests", {"path": ZOO, "full": True}, 480)


def files(folder: str) -> list[str]:
    """Return the files of tests in a folder of the repository."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).glob("test_*.py"))


def run_tests(*, path: str, full: bool = False) -> dict[str, Any]:
    """Run a file of tests; return how many passed, and the names of those that did not."""
    return _pytest([], path, *(["--full"] if full else []))


def sanitize(*, tool: str) -> dict[str, Any]:
    """Run a few tests of the kernels under a tool of compute-sanitizer; what it finds counts as a failure.

    Raises:
        NotHereError: it is not installed.
    """
    program = shutil.which("compute-sanitizer")
    if program is None:
        raise NotHereError("compute-sanitizer is not installed")
    wrapper = [program, "--tool", tool, "--error-exitcode", "86", "--target-processes", "all"]
    found = _pytest(wrapper, SANITIZED, "-k", SANITIZED_TESTS)
    if found["status"] == 86 and not found["failures"]:
        found["failures"] = [f"{tool} reports errors, see the log"]
        found["failed"] = 1
    return found


def _pytest(wrapper: list[str], path: str, *options: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            *options,
            path,
        ]
        status = subprocess.run([*wrapper, *command], cwd=ROOT, check=False, stdin=subprocess.DEVNULL).returncode
        if not report.exists():
            raise RuntimeError(f"pytest ended with {status} and left no report; see the log")
        return {"status": status, **read_report(report)}


def read_report(path: Path) -> dict[str, Any]:
    """Return the counts and the names of failures of a JUnit file."""
    cases = list(ET.parse(path).getroot().iter("testcase"))
    failures = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    num_skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(failures) - num_skipped,
        "failed": len(failures),
        "skipped": num_skipped,
        "tests_s": sum(float(case.get("time", 0)) for case in cases),
        "failures": [str(case.get("name")) for case in failures],
    }


def table(content: Mapping[str, Any]) -> str:
    """Return the Markdown of a file of rows."""
    return page(content, HEADER, _cells)


def _cells(_key: str, figures: Mapping[str, Any], _rows: Rows) -> list[str]:
    names = ", ".join(f"`{name}`" for name in figures["failures"][:5])
    more = len(figures["failures"]) - 5
    return [
        str(figures["passed"]),
        str(figures["failed"]),
        str(figures["skipped"]),
        f"{figures['tests_s']:.1f}",
        (names + (f" and {more} more" if more > 0 else "")).replace("|", "/"),
    ]
