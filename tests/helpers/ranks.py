"""A function run in several real processes at once; the test fails if one of them fails, hangs or dies.

Processes are forked from one that has imported torch and does nothing else, so that starting them takes no seconds: it
has none of the threads and none of the state of the tests. They are kept for the next function.
Whatever goes wrong, all of them are killed and waited for before the error is raised; the next function gets new ones.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import pytest

START_S = 120.0
"""What starting may take on a machine that does other things too."""
ANSWER_S = 240.0
"""What a call may take there: the longest takes ten seconds where nothing else runs."""
GRACE_S = 1.0
"""How long the others may take to answer after one has failed."""
STACK_S = 5.0
"""How long a process may take to write where it is; one that is stopped never does."""
LATE_S = 0.2
"""How much later than the others a rank may answer that is not meant to answer at all."""


class RankFailure(AssertionError):
    """What each rank did that did not do its part."""


@dataclass
class _Member:
    rank: int
    process: BaseProcess
    connection: Connection
    stack: Path
    """Where the process writes where it is, when it gets SIGUSR1."""

    def fate(self) -> str:
        """Say how the process, which is over, ended."""
        self.process.join()
        code = self.process.exitcode
        assert code is not None
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"left with status {code}"


class Team:
    """As many processes as ranks, with a gloo group over all of them."""

    def __init__(self, size: int, *, gloo: bool = True) -> None:
        """Promise the processes; they are started when they are needed.

        Args:
            size: how many.
            gloo: false leaves out the group.
        """
        self.size = size
        self._gloo = gloo
        self._members: list[_Member] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The processes that there are now."""
        return [member.process.pid for member in self._members if member.process.pid is not None]

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = ANSWER_S, lost: Collection[int] = ()
    ) -> list[Any]:
        """Call ``function(rank, *args)`` on every rank at once; return what it returned, by rank.

        Args:
            function: of a module; it, the arguments and the results are pickled.
            args: the same for all.
            timeout_s: after which a rank that has not answered hangs.
            lost: ranks that are not meant to answer: for them the result is None. All processes end with the call.

        Raises:
            RankFailure: a rank raised, did not answer in time, or died; or one of `lost` answered.
        """
        self._ask(function, args)
        found = self._collect(time.monotonic() + timeout_s, [m for m in self._members if m.rank not in lost])
        # The lost ones had all the time that the others needed.
        found |= {m.rank: ("answered", None) for m in self._members if m.rank in lost and self._has_answered(m)}
        problems = [
            f"rank {rank} {kind}{_indented(what)}" for rank, (kind, what) in sorted(found.items()) if kind != "done"
        ]
        if problems or lost:
            self._kill()
        if problems:
            raise RankFailure("\n".join([f"{function.__name__} on {self.size} ranks:", *problems]))
        return [found[rank][1] if rank in found else None for rank in range(self.size)]

    def errors(self, function: Callable[..., Any], *args: Any, timeout_s: float = ANSWER_S) -> list[str]:
        """Call what raises an error of chunkmem on every rank; return it, by rank: its class and first line.

        They need not raise soon after each other. All processes end with the call.

        Raises:
            RankFailure: a rank raised none, or did not answer in time.
        """
        self._ask(function, args)
        found = self._collect(time.monotonic() + timeout_s, self._members, grace_s=timeout_s)
        self._kill()
        said = {}
        for rank, (kind, what) in found.items():
            lines = [line for line in str(what or "").splitlines() if line.startswith("chunkmem.data.errors.")]
            said[rank] = lines[0] if kind == "raised" and len(lines) == 1 else ""
        if not all(said.values()):
            all_said = [f"rank {rank} {kind}{_indented(what)}" for rank, (kind, what) in sorted(found.items())]
            raise RankFailure("\n".join([f"{function.__name__} on {self.size} ranks, one error each:", *all_said]))
        return [said[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End the processes. They start again if they are needed."""
        for member in self._members:
            with contextlib.suppress(OSError):  # it is over
                member.connection.send(None)
        for member in self._members:
            member.process.join(GRACE_S)
        self._kill()

    def _start(self) -> None:
        _skip_with_accelerator()
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.helpers.preloaded"])
        for rank in range(self.size):
            here, there = context.Pipe()
            stack = folder / f"stack {rank}"
            store = str(folder / "store") if self._gloo else None
            process = context.Process(target=_serve, args=(rank, self.size, there, store, stack), daemon=True)
            process.start()
            # Else the pipe would stay open when the process dies.
            there.close()
            self._members.append(_Member(rank, process, here, stack))
        self._check("starting", self._collect(time.monotonic() + START_S, self._members))

    def _check(self, name: str, found: dict[int, tuple[str, Any]]) -> None:
        """Raise what is bad among the answers, when all processes are gone."""
        bad = {rank: answer for rank, answer in sorted(found.items()) if answer[0] != "done"}
        if bad:
            self._kill()
            what = [f"rank {rank} {kind}{_indented(text)}" for rank, (kind, text) in bad.items()]
            raise RankFailure("\n".join([f"{name} {self.size} ranks:", *what]))

    def _ask(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if not self._members:
            self._start()
        for member in self._members:
            member.connection.send((function, args))

    def _collect(
        self, deadline_s: float, members: Collection[_Member], *, grace_s: float = GRACE_S
    ) -> dict[int, tuple[str, Any]]:
        """Wait for an answer of each; after the first that is bad, the others have `grace_s`."""
        found: dict[int, tuple[str, Any]] = {}
        waiting = {member.connection: member for member in members}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                member = waiting.pop(connection)
                try:
                    found[member.rank] = connection.recv()
                except (EOFError, ConnectionError):
                    found[member.rank] = member.fate(), ""
                if found[member.rank][0] != "done":
                    deadline_s = min(deadline_s, time.monotonic() + grace_s)
        for member in waiting.values():
            found[member.rank] = "did not answer; it is in", _where(member)
        return found

    @staticmethod
    def _has_answered(member: _Member) -> bool:
        try:
            return member.connection.poll(LATE_S) and bool(member.connection.recv())
        except (EOFError, ConnectionError):
            return False

    def _kill(self) -> None:
        members, self._members = self._members, []
        for member in members:
            member.process.kill()
        for member in members:
            member.process.join()
            member.process.close()
            member.connection.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _skip_with_accelerator() -> None:
    """Skip the test where there is an accelerator: the ranks of a team would all compute on the one that is there."""
    import torch

    if torch.accelerator.is_available():
        pytest.skip("ranks would share the accelerator, which a forked process cannot use; they are tested on CPUs")


def _indented(what: Any) -> str:
    return "".join(f"\n    {line}" for line in str(what or "").splitlines())


def _where(member: _Member) -> str:
    """Return the stacks of a process that hangs, or nothing if it is too far gone to write them."""
    assert member.process.pid is not None
    os.kill(member.process.pid, signal.SIGUSR1)
    deadline_s = time.monotonic() + STACK_S
    # The outermost frame of the main thread is written last.
    while not (said := _read(member.stack)).endswith("in <module>\n") and time.monotonic() < deadline_s:
        if wait([member.process.sentinel], timeout=0.02):
            break
    return said


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _serve(rank: int, size: int, connection: Connection, store: str | None, stack: Path) -> None:
    """Answer what comes over the connection, until None comes or nobody is there to send it."""
    with stack.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        # Ctrl-C is for the test, which then ends its processes.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if store is not None:
            _join(rank, size, store)
        connection.send(("done", None))
        with contextlib.suppress(EOFError):
            while (task := connection.recv()) is not None:
                function, args = task
                try:
                    connection.send(("done", function(rank, *args)))
                except BaseException:
                    connection.send(("raised", traceback.format_exc()))
        faulthandler.unregister(signal.SIGUSR1)
    # Not through torch's end of a process: what a failed test left behind may make it wait.
    os._exit(0)


def _join(rank: int, size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=START_S)
    )
