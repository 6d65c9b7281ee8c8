"""`chunkmem build`: compile the native library ahead of time."""

from __future__ import annotations

import argparse

from chunkmem.cli.answer import Answer
from chunkmem.errors import ConfigError

NAME = "build"
SUMMARY = "compile the native library ahead of time"
DESCRIPTION = SUMMARY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""


def run(options: argparse.Namespace) -> Answer:
    """Answer."""
    raise ConfigError("not built yet")
