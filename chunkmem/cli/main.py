"""The command line: parse, run one command, print its answer or one line that says what is wrong."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from chunkmem.cli import build, check, chunk_size, config, convert, estimate, info, plan, report, run, verify
from chunkmem.cli.answer import BAD_INPUT, CommandResult
from chunkmem.data.errors import ChunkmemError
from chunkmem.data.sizes import printable
from chunkmem.version import __version__

DOES_NOT_FIT = 1

_COMMANDS = (run, estimate, check, plan, report, convert, verify, chunk_size, config, info, build)
_DESCRIPTION = """\
Train models larger than the accelerator's memory. These commands answer questions before and after training; `run`
trains by an unchanged script. Loops of your own: see docs/getting-started.md."""
_EPILOG = """\
exit status: 0 answered, 1 it does not fit, bits differ or a checkpoint is damaged, 2 bad input (one line on stderr
says what is wrong)"""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {' '.join(message.split())} (--help explains)\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(prog="chunkmem", description=_DESCRIPTION, epilog=_EPILOG,
                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in _COMMANDS:
        command = commands.add_parser(
            module.NAME,
            help=module.SUMMARY,
            description=module.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if module is not run:  # the script prints
            command.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status; `run` raises SystemExit with the script's."""
    try:
        options = make_parser().parse_args(arguments)
        return _print(options.run(options), as_json=options.json)
    except (ChunkmemError, OSError) as error:
        print(f"chunkmem: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("chunkmem: interrupted", file=sys.stderr)
        return 130


def _print(answer: CommandResult, *, as_json: bool) -> int:
    text = json.dumps(answer.data, allow_nan=False) if as_json else printable(answer.text)
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `chunkmem ... | head`: what was asked for has been read
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0 if answer.fits else DOES_NOT_FIT
