"""`chunkmem info`: what this machine has."""

from __future__ import annotations

import argparse

from chunkmem.cli.answer import Answer
from chunkmem.errors import ConfigError

NAME = "info"
SUMMARY = "what this machine has"
DESCRIPTION = SUMMARY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""


def run(options: argparse.Namespace) -> Answer:
    """Answer."""
    raise ConfigError("not built yet")
