"""`chunkmem run`: an unchanged training script, with its model in chunks."""

from __future__ import annotations

import argparse
import os
import sys
import types
from pathlib import Path
from typing import NoReturn

from chunkmem.cli.answer import BAD_INPUT
from chunkmem.cli.machine import add_count
from chunkmem.config import Config, num_processes_said
from chunkmem.data.errors import ConfigError
from chunkmem.data.schema import read_json
from chunkmem.integrations.auto import filled

NAME = "run"
SUMMARY = "train with an unchanged script, its model in chunks"
DESCRIPTION = """\
Run a training script as python does, with its model in chunks: one that uses Trainer, trl, accelerate or Lightning, or
a loop with an optimizer of torch. The script stays as it is, and so do its numbers.

  chunkmem run chunkmem.json train.py --lr 1e-4
  chunkmem run --nproc 4 chunkmem.json train.py        # by torchrun; or torchrun ... -m chunkmem run ...

The model goes into chunks when an optimizer is made over its parameters, which then is chunkmem's: of the same class,
groups and options. "auto" in the configuration is what the script says. What cannot be taken over ends with one line.
The exit status is the script's, or 2."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add_count(parser, "--nproc", "N", help="processes on this machine, which torchrun starts")
    add("--record", type=Path, metavar="RUN", help="record a step every few seconds, for `report RUN --watch`")
    add("config", metavar="CHUNKMEM.json", type=Path, help="a configuration; {} is all defaults")
    add("script", metavar="SCRIPT.py", type=Path, help="what to run")
    add("arguments", metavar="...", nargs=argparse.REMAINDER, help="its own arguments")


def run(options: argparse.Namespace) -> NoReturn:
    """Run the script, and end with its exit status."""
    values = read_json(options.config)
    try:
        precision = Config.from_dict(filled(values)).precision
    except ConfigError as error:
        raise ConfigError(f"{options.config}: {error}") from None
    if precision == "fp16":
        raise ConfigError(
            f'{options.config}: precision is "fp16", and its loss scale needs manager.backward(loss) in the script; '
            'make it "bf16", or "auto", for the script\'s own autocast and GradScaler'
        )
    if not options.script.is_file():
        raise ConfigError(f"{options.script} is no file; `chunkmem run CHUNKMEM.json SCRIPT.py ...` runs a script")
    if options.nproc is not None:
        _launch(options)
    from chunkmem.integrations.run import Refused, TakeOver  # imports torch

    taken = TakeOver(values, record=options.record)
    try:
        with taken.watching():
            status = _execute(options.script, options.arguments)
        manager = taken.manager
        timeline = None if manager is None or not manager.runtime.ranks.is_first else manager.timeline()
        if timeline is not None:
            print(f"chunkmem: last step: {timeline}", file=sys.stderr)
    except Refused as refused:
        print(f"chunkmem: {refused}", file=sys.stderr)
        sys.exit(BAD_INPUT)
    finally:
        if taken.manager is not None:
            taken.manager.close()
    if manager is None and not status:
        print(
            f"chunkmem: nothing was in chunks: {options.script} made no optimizer of torch over the parameters of a "
            "module in this process; if it starts others itself, have --nproc do so; else see docs/integrations.md",
            file=sys.stderr,
        )
        status = BAD_INPUT if status is None else 0
    sys.exit(status or 0)


def _launch(options: argparse.Namespace) -> NoReturn:
    """Become torchrun, which starts this command in each process."""
    if (size := num_processes_said()) > 1:
        raise ConfigError(f"--nproc {options.nproc} in one of {size} processes that torchrun has started: leave it out")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(options.nproc)]
    record = [] if options.record is None else ["--record", str(options.record)]
    command = ["chunkmem", NAME, *record, str(options.config), str(options.script), *options.arguments]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", *torchrun, "-m", *command])


def _execute(script: Path, arguments: list[str]) -> int | None:
    """Run a script as `python SCRIPT ...` does; return its exit status, None if it ran to its end."""
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    # As in runpy, but that is nowhere in tracebacks: processes that the script spawns find it by its file.
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__file__ = str(script)
    try:
        exec(compile(script.read_bytes(), str(script), "exec", dont_inherit=True), vars(main))
    except SystemExit as ended:
        if isinstance(ended.code, int | None):
            return ended.code or 0
        if type(ended) is not SystemExit:
            raise
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:
        inside = error.__traceback__.tb_next if error.__traceback__ is not None else None
        sys.excepthook(type(error), error.with_traceback(inside), inside)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return None
