"""Scripts run as `python SCRIPT` and `chunkmem run` do, in this process, and what they print."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from chunkmem.cli.main import main

SCRIPTS = Path(__file__).parents[1] / "scripts"
SMALL = {"memory": {"device": "96KiB"}}
"""Less than the weights of these scripts and their gradients take: chunks move."""


class Scripts:
    """Runs scripts in a folder of their own, both ways."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self._folder = folder
        self._capfd = capfd

    def file(self, script: Path | str) -> Path:
        """The file of a script: of `tests/scripts` by its name, or written from its text."""
        if isinstance(script, Path):
            return script
        if script.endswith(".py"):
            return SCRIPTS / script
        (self._folder / "script.py").write_text(script)
        return Path("script.py")

    def plain(self, script: str, *arguments: str) -> str:
        """What a script prints in plain PyTorch."""
        file = self.file(script)
        self._capfd.readouterr()
        with _left_as_it_was():
            sys.argv = [str(file), *arguments]
            with suppress(SystemExit):
                runpy.run_path(str(file), run_name="__main__")
        return self._capfd.readouterr().out

    def chunked(
        self, script: str, *arguments: str, config: Any = SMALL, options: Sequence[str] = ()
    ) -> tuple[int, str, str]:
        """The exit status under `chunkmem run`, and what was printed to stdout and stderr."""
        (self._folder / "chunkmem.json").write_text(json.dumps(config))
        status: Any
        self._capfd.readouterr()
        with _left_as_it_was():
            try:
                status = main(["run", *options, "chunkmem.json", str(self.file(script)), *arguments])
            except SystemExit as ended:
                status = ended.code
        return status, *self._capfd.readouterr()


@contextmanager
def _left_as_it_was() -> Iterator[None]:
    before = sys.argv, list(sys.path), sys.modules["__main__"]
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before
