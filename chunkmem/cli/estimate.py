"""`chunkmem estimate`: before anything is built: does it fit, and how fast will a step be."""

from __future__ import annotations

import argparse

from chunkmem.cli.answer import Answer
from chunkmem.errors import ConfigError

NAME = "estimate"
SUMMARY = "before anything is built: does it fit, and how fast will a step be"
DESCRIPTION = SUMMARY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""


def run(options: argparse.Namespace) -> Answer:
    """Answer."""
    raise ConfigError("not built yet")
