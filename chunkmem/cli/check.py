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

from chunkmem.cli.answer import CommandResult, printable, table
from chunkmem.cli.machine import OPTIMIZERS, PRECISIONS, count, parse_size
from chunkmem.errors import ChunkmemError, ConfigError
from chunkmem.sizes import format_nbytes, shown

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
    add("--steps", type=count, default=4, metavar="N", help="steps of each training, 2 or more (default: 4)")
    add("--device", metavar="SIZE", help="cap on DEVICE to train under in the place of ample room, such as 8GiB")
    add("--host", metavar="SIZE", help="cap on HOST; default: as much as it takes")
    add("--disk", metavar="FOLDER", help="on a disk, for what a cap on HOST leaves no room for")
    add("--batch", type=count, default=1, metavar="N", help="samples a step (default: 1)")
    add("--seq", type=count, metavar="N", help=f"positions a sample (default: {_DEFAULT_SEQ})")
    add("--precision", choices=PRECISIONS, default="fp32", help="of weights and gradients (default: fp32)")
    add("--optimizer", default="adamw", metavar="NAME", help=f"{OPTIMIZERS} (default: adamw)")
    add("--chunk-size", type=count, metavar="NUMEL", help="default_chunk_size, in elements; default: some dozen chunks")
    add("--orders", type=count, default=3, metavar="N", help="orders of late copies (default: 3)")
    add("--seed", type=count, default=1, metavar="N", help="of random numbers and orders (default: 1)")


def run(options: argparse.Namespace) -> CommandResult:
    """Answer whether all bits are equal.

    Raises:
        ConfigError: the model cannot be built, or not be trained in plain PyTorch.
    """
    request = _Request(
        model=options.model,
        batch=options.batch,
        seq=options.seq,
        steps=options.steps,
        device_nbytes=None if options.device is None else parse_size("--device", options.device),
        host_nbytes=None if options.host is None else parse_size("--host", options.host),
        disk=options.disk,
        chunk_numel=options.chunk_size,
        precision=options.precision,
        optimizer=options.optimizer,
        seed=options.seed,
        num_orders=options.orders,
    )
    if request.disk is not None and request.host_nbytes is None:
        raise ConfigError("--disk is for what HOST has no room for; give --host, too")
    if request.steps < 2:
        raise ConfigError("--steps is 1; give at least 2: the first step is recorded, and follows no plan yet")
    from tqdm import tqdm

    total = request.steps * (4 + request.num_orders)
    with tqdm(total=total, desc="training", unit=" steps", disable=None, leave=False) as bar:

        def on_step(name: str, num_steps: int) -> None:
            bar.set_postfix_str(name, refresh=False)
            bar.update(min(num_steps, 1))

        outcome = _in_another_process(request, on_step)
    report = _report_of(request, outcome) if isinstance(outcome, _Died) else outcome
    return CommandResult({"model": request.model, **report.to_dict()}, _text(request, report), fits=report.is_equal)


@dataclass(frozen=True)
class _Request:
    """What is asked; plain data, for another process."""

    model: str
    batch: int
    seq: int | None
    steps: int
    device_nbytes: int | None
    host_nbytes: int | None
    disk: str | None
    chunk_numel: int | None
    precision: str
    optimizer: str
    seed: int
    num_orders: int

    def answer(self, on_step: Callable[[str, int], object]) -> CheckReport:
        """Train; see `chunkmem.testing.check`."""
        import torch

        from chunkmem.estimate.models import resolve_model
        from chunkmem.runtime.device import ComputeDevice
        from chunkmem.testing import check

        if ComputeDevice.default().is_accelerator:  # else plain PyTorch adds in another order each time
            torch.use_deterministic_algorithms(True, warn_only=True)
        model = resolve_model(self.model, batch=self.batch, seq=self.seq, default_seq=_DEFAULT_SEQ)
        return check(
            model.build,
            lambda module, _: model.loss(module),
            steps=self.steps,
            device_nbytes=self.device_nbytes,
            host_nbytes=self.host_nbytes,
            disk=self.disk,
            chunk_numel=self.chunk_numel,
            precision=self.precision,
            optimizer=self.optimizer,
            seed=self.seed,
            num_orders=self.num_orders,
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


def _in_another_process(request: _Request, on_step: Callable[[str, int], object]) -> CheckReport | _Died:
    """Train where a crash does not take the answer along.

    Memory taken out of a parameter (`detach()`, `.numpy()`) and used after its chunk has moved can end a process.
    """
    context = get_context("spawn")  # what a fork takes over of torch's threads does not run there
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send_answer, args=(there, request))
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


def _send_answer(there: Connection, request: _Request) -> None:
    """Send pairs: ``step`` with what `check` tells of each, then ``answer`` with the report, or ``refused`` and why."""
    os.dup2(2, 1)  # what the user's code prints is no part of the answer
    try:
        there.send(("answer", request.answer(lambda *step: there.send(("step", step)))))
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


def _report_of(request: _Request, died: _Died) -> CheckReport:
    """Return what is known of a check whose process died.

    Raises:
        ConfigError: it had not come to train in chunks: the model is what ends it.
    """
    from chunkmem.testing.comparison import AGAIN, FIRST, CheckReport, Comparison
    from chunkmem.testing.reasons import reason_of_death

    said = f"the process ended with {died.cause}, after {died.num_steps} steps of {request.steps}"
    if died.training in ("", FIRST, AGAIN):
        raise ConfigError(f"MODEL {shown(request.model)} in {FIRST}: {said}")
    comparison = Comparison(died.training, error=said, reason=reason_of_death())
    return CheckReport(request.steps, request.precision, request.seed, comparisons=(comparison,))


def _text(request: _Request, report: CheckReport) -> str:
    params = "" if report.num_params is None else f"{report.num_params:,} parameters, "
    optimizer = "" if request.optimizer == "adamw" else f", optimizer {request.optimizer}"
    chunks = "" if report.chunk_numel is None else f", chunks of {report.chunk_numel:,} elements"
    lines = [
        f"{request.model}: {params}{report.steps} steps in {report.precision}, seed {report.seed}{optimizer}{chunks}",
        "",
        table(("trained like plain PyTorch", "cap on DEVICE", "moved", ""), map(_row, report.comparisons)),
        "",
        str(report),
    ]
    noted = dict.fromkeys(message for comparison in report.comparisons for message in comparison.warnings)
    return printable("\n".join([*lines, *(f"warned: {message}" for message in noted)]))


def _row(comparison: Comparison) -> tuple[str, str, str, str]:
    return (
        comparison.name,
        "" if comparison.device_nbytes is None else format_nbytes(comparison.device_nbytes),
        "" if comparison.device_nbytes is None else format_nbytes(comparison.moved_nbytes),
        "equal" if comparison.is_equal else "refused" if comparison.error else "differs",
    )
