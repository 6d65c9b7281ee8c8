"""Run `chunkmem estimate` as on the command line."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from chunkmem.cli.main import main


def asked(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> Any:
    """Ask on the command line; return the JSON object."""
    assert main(["estimate", *words, "--json"]) == status
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def assert_refused(capsys: pytest.CaptureFixture[str], *words: str, message: str) -> None:
    """Check that a wrong question is answered with one line that `message` matches, and status 2."""
    assert main(["estimate", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("chunkmem: ")
    assert err.count("\n") == 1
    assert re.search(message, err), err
