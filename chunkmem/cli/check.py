"""`chunkmem check`: prove on a model that training it in chunks gives plain PyTorch's bits."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from chunkmem.cli.answer import CommandResult, table
from chunkmem.cli.machine import add_count, add_size, add_training_arguments
from chunkmem.data.errors import ChunkmemError, ConfigError
from chunkmem.data.sizes import format_nbytes, shown

if TYPE_CHECKING:
    from chunkmem.testing import CheckReport, Comparison

NAME = "check"
SUMMARY = "train a model in plain PyTorch and in chunks: are all bits equal"
DESCRIPTION = """\
Train a model some steps in plain PyTorch, twice, and in chunks: with ample room, under the smallest cap that fits, and
there with copies as late as the plan allows, in several orders. Say that all bits are equal, or name the first step and
tensor that differ, and the likely reason. It takes about 60 bytes of RAM a parameter.

  chunkmem check gpt:1m
  chunkmem check mypackage.train:make --steps 8 --batch 4
  chunkmem check gpt:1m --optimizer muon
  chunkmem check path/to/config.json --precision bf16 --json | jq .equal

MODEL is a preset (gpt:1m to gpt:1t), a config.json of transformers, or module:function: a function that returns
(model, step), where step(model) is the loss or step is what the model is called with to return it. It is given those
of `batch` and `seq` that it takes. With another --optimizer than AdamW and Adam, chunkmem.Optimizer trains in chunks.
The exit status is 1 if anything differs or is refused."""

_DEFAULT_SEQ = 64
_GRACE_S = 10.0
"""For a process that has sent its answer to end by itself."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="gpt:1m, a config.json, or module:function")
    add_count(parser, "--steps", "N", default=4, help="steps of each training, 2 or more (default: 4)")
    add_size(parser, "--device", help="cap on DEVICE to train under in the place of ample room, such as 8GiB")
    add_training_arguments(parser, seq=_DEFAULT_SEQ, chunk_size="some dozen chunks")
    add("--disk", metavar="FOLDER", help="on a disk, for what a cap on HOST leaves no room for")
    add_count(parser, "--orders", "N", default=3, help="orders of late copies (default: 3)")
    add_count(parser, "--seed", "N", default=1, help="of random numbers and orders (default: 1)")


def run(options: argparse.Namespace) -> CommandResult:
    """Answer whether all bits are equal.

    Raises:
        ConfigError: the model cannot be built, or not be trained in plain PyTorch.
    """
    if options.disk is not None and options.host is None:
        raise ConfigError("--disk is for what HOST has no room for; give --host, too")
    if options.steps < 2:
        raise ConfigError("--steps is 1; give at least 2: the first step is recorded, and follows no plan yet")
    from tqdm import tqdm

    total = options.steps * (4 + options.orders)
    with tqdm(total=total, desc="training", unit=" steps", disable=None, leave=False) as bar:

        def on_step(name: str, num_steps: int) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update(min(num_steps, 1))

        outcome = _in_another_process(options, on_step)
    report = _report_of(options, outcome) if isinstance(outcome, _Died) else outcome
    return CommandResult({"model": options.model, **report.to_dict()}, _text(options, report), fits=report.is_equal)


def _answer(options: argparse.Namespace, on_step: Callable[[str, int], object]) -> CheckReport:
    """Train; see `chunkmem.testing.check`."""
    import torch

    from chunkmem.estimate.models import resolve_model
    from chunkmem.runtime.device import ComputeDevice
    from chunkmem.testing import check

    if ComputeDevice.default().is_accelerator:  # else plain PyTorch adds in another order each time
        torch.use_deterministic_algorithms(True, warn_only=True)
    model = resolve_model(options.model, batch=options.batch, seq=options.seq, default_seq=_DEFAULT_SEQ)
    return check(
        model.build,
        lambda module, _: model.loss(module),
        steps=options.steps,
        device_nbytes=options.device,
        host_nbytes=options.host,
        disk=options.disk,
        chunk_numel=options.chunk_size,
        precision=options.precision,
        optimizer=options.optimizer,
        seed=options.seed,
        num_orders=options.orders,
        on_step=on_step,
    )


@dataclass(frozen=True)
class _Died:
    """The process that trained ended without an answer."""

    cause: str
    training: str
    """What it was training; empty before any."""
    num_steps: int
    """How many steps of that were over."""


def _in_another_process(options: argparse.Namespace, on_step: Callable[[str, int], object]) -> CheckReport | _Died:
    """Train where a crash does not take the answer along.

    Memory taken out of a parameter (`detach()`, `.numpy()`) and used after its chunk has moved can end a process.
    """
    context = get_context("spawn")  # what a fork takes over of torch's threads does not run there
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send_answer, args=(there, options))
    process.start()
    there.close()
    kind, training, num_steps = "step", "", 0
    try:
        while True:
            kind, value = here.recv()
            if kind == "step":
                training, num_steps = value
                on_step(training, num_steps)
            elif kind == "refused":
                raise ConfigError(value)
            else:
                report: CheckReport = value
                return report
    except EOFError:
        process.join()
        return _Died(_cause(process.exitcode or 0), training, num_steps)
    finally:
        here.close()
        process.join(0 if kind == "step" else _GRACE_S)  # what the user's code has printed is still being written
        process.terminate()
        process.join()


def _send_answer(there: Connection, options: argparse.Namespace) -> None:
    """Send pairs: ``step`` with what `check` tells of each, then ``answer`` with the report, or ``refused`` and why."""
    os.dup2(2, 1)  # what the user's code prints is no part of the answer
    try:
        there.send(("answer", _answer(options, lambda *step: there.send(("step", step)))))
    except ChunkmemError as error:
        there.send(("refused", str(error)))
    except KeyboardInterrupt:  # the other process is interrupted too, and says so
        pass


def _cause(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _report_of(options: argparse.Namespace, died: _Died) -> CheckReport:
    """Return what is known of a check whose process died.

    Raises:
        ConfigError: it had not come to train in chunks: the model is what ends it.
    """
    from chunkmem.testing.comparison import AGAIN, FIRST, CheckReport, Comparison
    from chunkmem.testing.reasons import reason_of_death

    said = f"the process ended with {died.cause}, after {died.num_steps} steps of {options.steps}"
    if died.training in ("", FIRST, AGAIN):
        raise ConfigError(f"MODEL {shown(options.model)} in {FIRST}: {said}")
    comparison = Comparison(died.training, error=said, reason=reason_of_death())
    return CheckReport(options.steps, options.precision, options.seed, comparisons=(comparison,))


def _text(options: argparse.Namespace, report: CheckReport) -> str:
    params = "" if report.num_params is None else f"{report.num_params:,} parameters, "
    optimizer = "" if options.optimizer == "adamw" else f", optimizer {options.optimizer}"
    chunks = "" if report.chunk_numel is None else f", chunks of {report.chunk_numel:,} elements"
    lines = [
        f"{options.model}: {params}{report.steps} steps in {report.precision}, seed {report.seed}{optimizer}{chunks}",
        "",
        table(("trained like plain PyTorch", "cap on DEVICE", "moved", ""), map(_row, report.comparisons)),
        "",
        str(report),
    ]
    noted = dict.fromkeys(message for comparison in report.comparisons for message in comparison.warnings)
    return "\n".join([*lines, *(f"warned: {message}" for message in noted)])


def _row(comparison: Comparison) -> tuple[str, str, str, str]:
    return (
        comparison.name,
        "" if comparison.device_nbytes is None else format_nbytes(comparison.device_nbytes),
        "" if comparison.device_nbytes is None else format_nbytes(comparison.moved_nbytes),
        "equal" if comparison.is_equal else "refused" if comparison.error else "differs",
    )
