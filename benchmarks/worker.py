"""A process of its own for each way to train, which works only while it is asked to."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.program import BenchmarkError


@dataclass(frozen=True)
class Failure:
    """The process ended on an exception."""

    traceback: str


class Worker:
    """An object in a process, which ends with `stack`."""

    def __init__(self, name: str, make: Callable[..., Any], *arguments: Any, stack: ExitStack) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._connection, far_end = context.Pipe()
        process = context.Process(target=_serve, args=(far_end, make, *arguments), daemon=True)
        process.start()
        far_end.close()
        stack.callback(process.join)
        stack.callback(process.terminate)

    def ask(self, *request: Any) -> Any:
        """Call a method of the object, by its name and arguments.

        Raises:
            BenchmarkError: the process ended, on an exception or otherwise.
        """
        try:
            self._connection.send(request)
            answer = self._connection.recv()
        except (EOFError, BrokenPipeError):
            raise BenchmarkError(f"{self.name}: its process ended, see above") from None
        if isinstance(answer, Failure):
            raise BenchmarkError(f"{self.name} failed:\n{answer.traceback}")
        return answer


def _serve(connection: Connection, make: Callable[..., Any], *arguments: Any) -> None:
    """Call the method that each message names, until the far end is gone; answer a `Failure` at last."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent gets Ctrl-C too, and ends every process.
    # The other core is for copies: on an accelerator, they take none of the computing's time.
    torch.set_num_threads(1)
    try:
        made = make(*arguments)
        while True:
            name, *given = connection.recv()
            connection.send(getattr(made, name)(*given))
    except EOFError:
        return
    except Exception:
        connection.send(Failure(traceback.format_exc()))
