"""`chunkmem chunk-size`: what each chunk size would waste."""

from __future__ import annotations

import argparse

from chunkmem.cli.answer import Answer
from chunkmem.errors import ConfigError

NAME = "chunk-size"
SUMMARY = "what each chunk size would waste"
DESCRIPTION = SUMMARY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""


def run(options: argparse.Namespace) -> Answer:
    """Answer."""
    raise ConfigError("not built yet")
