"""`chunkmem report`: pictures of a recorded run."""

from __future__ import annotations

import argparse

from chunkmem.cli.answer import Answer
from chunkmem.errors import ConfigError

NAME = "report"
SUMMARY = "pictures of a recorded run"
DESCRIPTION = SUMMARY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""


def run(options: argparse.Namespace) -> Answer:
    """Answer."""
    raise ConfigError("not built yet")
