"""Programs in processes of their own, without what takes seconds there: they are forked from one that has imported it.

That is the one that ranks are forked from; see `tests.helpers.ranks`. What is about how a process begins and what it
imports needs one that `subprocess` starts.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType

import torch

ROOT = Path(__file__).parents[2]


def run_python(
    *arguments: object,
    cwd: Path = ROOT,
    stdin: str = "",
    env: Mapping[str, str] = MappingProxyType({}),
    paths: tuple[Path, ...] = (),
    timeout_s: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """Run what `python` with these arguments would: a script, `-m` and a module, or `-c` and code.

    With an accelerator, which a forked process cannot use, that is what is run.

    Args:
        arguments: of the interpreter.
        cwd: where it runs; by default, where it finds the tests, too.
        stdin: what it reads.
        env: of its environment, what differs from that of the tests.
        paths: where it looks for modules beside what is installed.
        timeout_s: after which it is killed, and TimeoutExpired raised.
    """
    command = [sys.executable, *map(str, arguments)]
    if torch.accelerator.is_available():
        given = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))} | env
        return subprocess.run(
            command, cwd=cwd, env=given, input=stdin, capture_output=True, text=True, timeout=timeout_s
        )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.helpers.preloaded"])
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("in", "out", "err")]
        files[0].write_text(stdin)
        process = context.Process(target=_program, args=(command[1:], cwd, dict(env), paths, files), daemon=False)
        process.start()
        process.join(timeout_s)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(command, timeout_s, files[1].read_bytes(), files[2].read_bytes())
        process.close()
        return subprocess.CompletedProcess(command, code, files[1].read_text(), files[2].read_text())


def _program(arguments: list[str], cwd: Path, env: dict[str, str], paths: tuple[Path, ...], files: list[Path]) -> None:
    os.chdir(cwd)
    os.environ.update(env)
    for at, (path, flags) in enumerate(zip(files, (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY), strict=True)):
        os.dup2(os.open(path, flags | os.O_CREAT), at)
    sys.stdin = open(0)  # noqa: SIM115 - multiprocessing has closed the one that there was
    sys.path[:0] = map(str, paths)
    try:
        if arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            sys.path.insert(0, "")
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
        elif arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, "")
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a forked process leaves without
