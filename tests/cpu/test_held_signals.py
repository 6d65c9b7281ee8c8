"""Interrupts at any line of a step, after which training continues: the numbers are those of plain PyTorch."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import chunkmem
from chunkmem.data.errors import RankError, StateError
from tests.helpers.ranks import Team
from tests.helpers.signals import Line, Lines
from tests.helpers.spread import spread
from tests.helpers.twins import Blocks, Twin, assert_equal, config, cpu_only, features

SLAB = 4 * 256
CAPS = {"tight": {"device": 6 * SLAB, "host": 8 << 20}, "disk": {"device": 6 * SLAB, "host": 9 * SLAB}}
WARM = 3
"""Steps before: of those that come then, each has a plan."""


@pytest.fixture(autouse=True)
def all_is_put_back() -> Iterator[None]:
    """What torch and Python have for the whole process is as it was, and Ctrl-C raises also where it is ignored."""
    of_the_process = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.default_int_handler, torch.is_grad_enabled()
    yield
    assert (signal.getsignal(signal.SIGINT), torch.is_grad_enabled()) == before
    signal.signal(signal.SIGINT, of_the_process)


class Loop:
    """Training in chunkmem, and the same in plain PyTorch one call behind it."""

    def __init__(self, manager: chunkmem.ChunkManager) -> None:
        self.ours, self.plain = Twin(manager, Blocks), Twin(None, Blocks)
        self.manager = manager
        self.num_batches = self.num_steps = 0

    def go(self, phase: str = "", lines: Lines | None = None) -> None:
        """A step, with `lines` around its `phase`. Where it is interrupted, the batch is dropped if it is not over."""
        at, self.num_batches = self.num_batches, self.num_batches + 1

        def around(name: str) -> contextlib.AbstractContextManager[Any]:
            return lines if lines is not None and name == phase else contextlib.nullcontext()

        try:
            with around("forward"):
                loss = self.ours.loss(features(at))
            with around("backward"):
                self.ours.backward(loss)
            with around("step"):
                self.ours.optimizer.step()
            with around("zero_grad"):
                self.ours.optimizer.zero_grad()
        except KeyboardInterrupt:
            assert lines is not None
            assert lines.delivered
            # Of a call of the optimizer's, the interrupt comes at the end.
            self.ours.optimizer.zero_grad()
        if self.counted() > self.num_steps:
            self.num_steps += 1
            self.plain.step(features(at))

    def counted(self) -> int:
        """The steps that the optimizer has made."""
        states = self.ours.optimizer.state_dict()["state"].values()
        return max((int(state["step"]) for state in states), default=0)

    def check(self) -> None:
        """All is as in plain PyTorch."""
        assert_equal(self.ours.left(), self.plain.left())


def some_lines(ran: Lines, seed: int, count: int | None) -> list[tuple[Line, int]]:
    """So many of the lines that ran, None: each, and for each one time of those that it did."""
    draw = random.Random(seed)
    lines = sorted(line for line in ran.ran if not line[0].startswith("chunkmem.plan."))
    chosen = lines if count is None else draw.sample(lines, min(count, len(lines)))
    return [(line, draw.randrange(ran.ran[line])) for line in chosen]


def opened(caps: str, path: Path, *, overlap: bool) -> chunkmem.ChunkManager:
    memory: dict[str, Any] = dict(CAPS[caps])
    if caps == "disk":
        memory["disk"] = {"path": str(path), "capacity": "1GiB"}
    return chunkmem.ChunkManager(config(0, memory=memory, client={"opts": {"overlap_optimizer": overlap}}))


FULL = pytest.mark.full


@pytest.mark.few(1)
@pytest.mark.parametrize("phase", ["forward", "backward", "step", "zero_grad"])
@pytest.mark.parametrize(
    ("caps", "overlap", "count"),
    [
        ("tight", False, 8),
        pytest.param("tight", False, None, marks=FULL),
        *(pytest.param(*case, 40, marks=FULL) for case in (("tight", True), ("disk", False), ("disk", True))),
    ],
)
@cpu_only
def test_at_any_line(phase: str, caps: str, overlap: bool, count: int | None, tmp_path: Path) -> None:
    """The call is finished, and raises at its end."""
    with opened(caps, tmp_path, overlap=overlap) as manager:
        loop = Loop(manager)
        for _ in range(WARM):
            loop.go()
        ran = Lines()
        loop.go(phase, ran)
        for line, nth in some_lines(ran, loop.num_batches, count):
            loop.go(phase, Lines(line, nth=nth))
            loop.go()
        loop.check()


@FULL
@spread(warm=(0, 1, 2), phase=("forward", "step"))
@cpu_only
def test_in_steps_that_are_recorded_and_planned(warm: int, phase: str, tmp_path: Path) -> None:
    ran = Lines()
    with opened("tight", tmp_path, overlap=False) as manager:
        loop = Loop(manager)
        for _ in range(warm):
            loop.go()
        loop.go(phase, ran)
    for line, nth in some_lines(ran, warm, 20):
        with opened("tight", tmp_path, overlap=False) as manager:
            loop = Loop(manager)
            for _ in range(warm):
                loop.go()
            loop.go(phase, Lines(line, nth=nth))
            loop.go()
            loop.check()


def saved(loop: Loop, path: Path) -> None:
    loop.manager.save(path, loop.ours.optimizer)


def loaded(loop: Loop, path: Path) -> None:
    loop.manager.load(path, loop.ours.optimizer)


def weights(loop: Loop, path: Path) -> None:
    loop.manager.state_dict()


def gathered(loop: Loop, path: Path) -> None:
    with loop.manager.gather(loop.ours.model.inner):
        pass


def clipped(loop: Loop, path: Path) -> None:
    loop.ours.backward(loop.ours.loss(features()))
    loop.ours.clip(0.1)


@pytest.mark.parametrize("call", [saved, loaded, weights, gathered, clipped], ids=lambda each: each.__name__)
@pytest.mark.parametrize("count", [3, pytest.param(60, marks=FULL)])
@pytest.mark.few(1)
@cpu_only
def test_in_what_is_called_between_steps(call: Callable[[Loop, Path], None], count: int | None, tmp_path: Path) -> None:
    """What is saved is whole, whenever it was interrupted."""
    path = tmp_path / "checkpoint"
    with opened("tight", tmp_path, overlap=False) as manager:
        loop = Loop(manager)
        for _ in range(WARM):
            loop.go()
        saved(loop, path)
        with Lines() as ran:
            call(loop, path)
        loop.ours.optimizer.zero_grad()
        for line, nth in some_lines(ran, 0, count):
            with contextlib.suppress(KeyboardInterrupt), Lines(line, nth=nth):
                call(loop, path)
            loop.ours.optimizer.zero_grad()
            loaded(loop, path)
            loop.check()
            loop.go()
            saved(loop, path)
        loop.check()


def in_places(rank: int, seed: int, count: int, *, ranks: tuple[int, ...]) -> list[str]:
    """Interrupt these ranks, each at the same line; return what came of it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ranks of tests leave it to the process that runs them
    found: list[str] = []
    loop: Loop | None = None
    for at, phase in enumerate(("forward", "backward", "step", "zero_grad") * count):
        if loop is None:
            loop = Loop(chunkmem.ChunkManager(config(12 * SLAB)))
            for _ in range(WARM):
                loop.go()
        ran = Lines()
        loop.go(phase, ran)
        ((line, nth),) = some_lines(ran, seed + at, 1)
        try:
            loop.go(phase, Lines(line, nth=nth) if rank in ranks else None)
            loop.go()
            loop.check()
        except RankError as error:
            found.append(str(error))
            loop.manager.close()
            loop = None
        else:
            found.append("right")
    if loop is not None:
        loop.manager.close()
    return found


@FULL
@pytest.mark.parametrize("ranks", [(0, 1), (0,)])
@pytest.mark.parametrize("count", [10])
def test_ranks_go_on_together_or_are_told(ranks: tuple[int, ...], count: int, pair: Team) -> None:
    """With the same batch on each, they train as one process does: the mean of two equal gradients is that gradient."""
    first, second = pair.run(partial(in_places, ranks=ranks), 5, count)
    for ours, others in zip(first, second, strict=True):
        assert (ours == "right") == (others == "right")
        assert ours == "right" or "the ranks are in different places" in ours
    assert "right" in first


def handlers() -> list[object]:
    return [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]


def test_user_code_is_interrupted_where_it_is() -> None:
    """A module's forward, a hook of the user's and a loss: in the midst of a step, and at once."""
    with chunkmem.ChunkManager(config(6 * SLAB)) as manager:
        twin = Twin(manager, Blocks)
        twin.steps(0, 1)
        places: list[str] = []

        def interrupt(*_: Any) -> None:
            places.append("before")
            signal.raise_signal(signal.SIGINT)
            places.append("after")

        for register in (
            twin.model.blocks[1].register_forward_hook,
            next(twin.model.parameters()).register_hook,
            twin.optimizer.register_step_pre_hook,
        ):
            handle = register(interrupt)
            with pytest.raises(KeyboardInterrupt):
                twin.step(features(2))
            handle.remove()
            twin.optimizer.zero_grad()
        assert places == ["before"] * 3
        twin.steps(3)


def in_the_runtime(call: Callable[[], object], signum: int, times: int) -> None:
    """Have the handler of a signal called in the middle of something of the runtime's, and go on with it."""
    lines = Lines(("chunkmem.runtime.pager", 0))

    def deliver(frame: FrameType) -> None:
        handler = signal.getsignal(signum)
        assert callable(handler)
        for _ in range(times):
            handler(signum, frame)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_deliver", deliver)
        with Lines() as ran:
            call()
        lines.at = next(line for line in sorted(ran.ran) if line[0] == "chunkmem.runtime.pager")
        with lines:
            call()


def test_one_that_is_held_is_told_the_second_time_and_breaks_in_the_third(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def counted() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = counted()
    manager = opened("disk", tmp_path, overlap=True)
    twin = Twin(manager, Blocks)
    twin.steps(0, 1)
    with pytest.raises(KeyboardInterrupt):
        in_the_runtime(lambda: manager.state_dict(), signal.SIGINT, 2)
    said = capfd.readouterr().err
    assert "SIGINT is held until" in said
    assert "state_dict returns" in said
    twin.steps(2)
    with pytest.raises(KeyboardInterrupt):
        in_the_runtime(lambda: manager.state_dict(), signal.SIGINT, 3)
    said_by = "SIGINT has interrupted .*state_dict in the middle.*make another manager, and load the last checkpoint"
    for call in (lambda: twin.loss(features()), twin.optimizer.step, twin.optimizer.zero_grad, manager.state_dict):
        with pytest.raises(StateError, match=said_by):
            call()
    manager.close()
    assert counted() == before


def test_handlers_that_raise_nothing_wait_too_and_one_of_a_timer_does_not() -> None:
    found: list[str] = []
    for signum, kind in ((signal.SIGUSR1, "held"), (signal.SIGALRM, "at once")):
        before = signal.signal(signum, lambda *_, kind=kind: found.append(kind))
        try:
            with chunkmem.ChunkManager(config(6 * SLAB)) as manager:
                Twin(manager, Blocks).steps(0, 1)
                in_the_runtime(manager.state_dict, signum, 1)
                in_the_runtime(manager.state_dict, signum, 1)
                manager.state_dict()
        finally:
            signal.signal(signum, before)
    assert found == ["held"] * 2 + ["at once"] * 2


def test_handlers_are_put_back_when_the_last_manager_closes() -> None:
    before = handlers()
    first, second = chunkmem.ChunkManager(config(6 * SLAB)), chunkmem.ChunkManager(config(6 * SLAB))
    assert handlers() != before
    first.close()
    assert handlers() != before
    second.close()
    assert handlers() == before


def test_handlers_are_put_back_when_models_are_ordinary_again() -> None:
    """A script that trains on in plain PyTorch has no manager to close any more."""
    before = handlers()
    manager = chunkmem.ChunkManager(config(6 * SLAB))
    manager.unwrap(Twin(manager, Blocks).model)
    assert handlers() == before


def test_a_handler_that_is_installed_later_is_held_from_the_next_call_on() -> None:
    """As a notebook does for each cell, and for a manager that another thread has made."""
    made: list[chunkmem.ChunkManager] = []
    thread = threading.Thread(target=lambda: made.append(chunkmem.ChunkManager(config(6 * SLAB))))
    thread.start()
    thread.join()
    with made[0] as manager:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        twin = Twin(manager, Blocks)
        twin.steps(0, 1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with pytest.raises(KeyboardInterrupt):
            in_the_runtime(manager.state_dict, signal.SIGINT, 1)
        twin.steps(2)


@FULL
@cpu_only
def test_real_ones_at_any_time(tmp_path: Path) -> None:
    """Another thread sends them, so that Python delivers them where it does."""
    with opened("disk", tmp_path, overlap=True) as manager:
        loop = Loop(manager)
        loop.go()
        num_raised = 0
        for seed in range(60):
            timer = threading.Timer(random.Random(seed).random() * 0.03, os.kill, (os.getpid(), signal.SIGINT))
            try:
                at, loop.num_batches = loop.num_batches, loop.num_batches + 1
                timer.start()  # it may arrive here
                loss = loop.ours.loss(features(at))
                loop.ours.backward(loss)
                loop.ours.optimizer.step()
                loop.ours.optimizer.zero_grad()
                while timer.is_alive():
                    timer.join(0.001)
                signal.pthread_sigmask(signal.SIG_BLOCK, ())  # those that are pending are delivered here
            except KeyboardInterrupt:
                num_raised += 1
                loop.ours.optimizer.zero_grad()
            if loop.counted() > loop.num_steps:
                loop.num_steps += 1
                loop.plain.step(features(at))
            loop.go()
        loop.check()
        assert num_raised == 60
