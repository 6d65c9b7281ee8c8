"""DISK fails below everything: an error with path, offset and cause, and what is not lost is as it was."""

from __future__ import annotations

import contextlib
import errno
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.data.errors import StateError, TierIOError
from chunkmem.data.types import Tier
from tests.helpers.audit import audit
from tests.helpers.faulty_disk import Fault, FaultKind, FaultyDisk
from tests.helpers.plain_chain import DEPTH, NUM_STEPS, WIDTH, batch_of, model_of, plain_weights, values
from tests.helpers.spread import spread
from tests.helpers.twins import cpu_only

SLAB = 4 * WIDTH * WIDTH
FAILS_IN = 3
"""This step follows a plan."""
SAID = re.compile(
    r"(param|grad|exp_avg|exp_avg_sq) chunk \d+.*: the copy from (HOST|DISK) to (HOST|DISK) failed: DISK: "
    r"(reading|writing|reserving) [\d.]+ \w+ at offset \d+ of the unnamed file in /.*\((EIO|ENOSPC)\)"
)
"""The chunk, both tiers, path, offset and errno."""
HALF = r"after an error in optimizer\.step\(\), which has updated \d of \d.*: call optimizer\.step\(\) again"
LOST = re.compile(r".*chunk .* is lost, as the copy.* that was to save it has failed; (load|call) .*")


@pytest.fixture(scope="module")
def plain() -> list[list[torch.Tensor]]:
    return plain_weights()


@dataclass
class Training:
    manager: chunkmem.ChunkManager
    model: nn.Module
    optimizer: chunkmem.AdamW

    def forward_backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.model(batch_of(step)).square().mean().backward()

    def step(self, step: int) -> None:
        self.forward_backward(step)
        self.optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        return values(self.manager.state_dict(self.model))


@contextlib.contextmanager
def training_on(disk: FaultyDisk, path: Path, *, overlap: bool = False, verify: bool = False) -> object:
    config = chunkmem.Config.from_dict(
        {
            "default_chunk_size": WIDTH * WIDTH,
            "memory": {
                "device": 3 * SLAB,
                "host": 7 * SLAB,
                "disk": {"path": str(path), "capacity": "1GiB", "verify": verify},
            },
            "client": {"opts": {"overlap_optimizer": overlap}},
        }
    )
    with chunkmem.ChunkManager(config, disk_calls=disk) as manager:
        with manager.init():
            model = model_of()
        yield Training(manager, model, chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2))


def calls_of_the_step(path: Path, call: str, fails_in: int, *, overlap: bool) -> range:
    """The numbers of the calls that the step makes which is going to fail."""
    disk = FaultyDisk()
    with training_on(disk, path, overlap=overlap) as training:
        for step in range(fails_in):
            training.step(step)
        before = disk.num_calls[call]
        training.step(fails_in)
        training.weights()
        return range(before + 1, disk.num_calls[call] + 1)


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def require_said(error: TierIOError, *patterns: re.Pattern[str]) -> None:
    assert any(pattern.search(str(error)) for pattern in patterns), error


def resume(training: Training, step: int, plain: list[list[torch.Tensor]], way: str) -> int:
    """Do a step that may fail, and continue in one of the ways that docs/disk.md names; return the number of errors."""
    try:
        training.forward_backward(step)
    except TierIOError as error:
        require_said(error, SAID)
        assert same(training.weights(), plain[step]), "a failed forward or backward changes no weight"
        training.step(step)
        return 1
    try:
        training.optimizer.step()
    except TierIOError as error:
        require_said(error, SAID)
        if way == "the step again" and not is_half(training):
            training.forward_backward(step)
        training.optimizer.step()
        return 1
    return 0


def is_half(training: Training) -> bool:
    """Tell whether a step has failed when some groups were updated: only going on is right, and all else is refused."""
    try:
        training.optimizer.zero_grad()
    except StateError as error:
        for refused in (training.weights, lambda: training.model(batch_of(0)), training.optimizer.zero_grad):
            with pytest.raises(
                StateError, match=r"after an error in optimizer\.step\(\).*call optimizer\.step\(\) again"
            ):
                refused()
        return "after an error in optimizer.step()" in str(error)
    return False


@pytest.mark.few(1)
@cpu_only
@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.full)])
@spread(
    call=["pwritev", "preadv"],
    kind=[FaultKind.ERROR, FaultKind.TORN],
    fails_in=[FAILS_IN, 0],
    overlap=[False, True],
    way=["step() again", "the step again"],
)
def test_each_call_of_a_step_fails_once(
    call: str,
    kind: FaultKind,
    fails_in: int,
    overlap: bool,
    way: str,
    stride: int,
    tmp_path: Path,
    plain: list[list[torch.Tensor]],
) -> None:
    """Nothing is lost: what failed is done again, in the order in which it was issued. With a stride, so many calls
    apart."""
    if kind is FaultKind.TORN and call == "preadv":
        kind = FaultKind.ERROR
    found = 0
    calls = calls_of_the_step(tmp_path, call, fails_in, overlap=overlap)
    assert len(calls) > DEPTH
    for at in calls[::stride]:
        disk = FaultyDisk(Fault(kind, call, at=at))
        with training_on(disk, tmp_path, overlap=overlap) as training:
            num_raised = 0
            for step in range(NUM_STEPS):  # plans, and so the calls, are not the same in each run
                num_raised += resume(training, step, plain, way)
            assert len(disk.struck) == 1
            assert num_raised <= 1
            found += num_raised
            assert same(training.weights(), plain[NUM_STEPS])
            training.manager.runtime.memory.pager.policy.drain()
            audit(training.manager)
    assert found > 0


def in_and_out(averages: chunkmem.EMA) -> None:
    with averages.swapped():
        pass


def averages_of(
    disk: FaultyDisk, path: Path, use: Callable[[chunkmem.EMA], None], call: str, fault: Fault | None = None
) -> tuple[list[torch.Tensor], int]:
    """Use averages after three steps; return all values, and how many calls that took. `fault` counts from there."""
    with training_on(disk, path) as training:
        averages = chunkmem.EMA(training.manager, decay=0.5)
        for step in range(3):
            training.step(step)
            averages.update()
        training.weights()
        before = disk.num_calls[call]
        if fault is not None:
            disk.faults = (replace(fault, at=before + (fault.at or 0)),)
        use(averages)
        num_calls = disk.num_calls[call] - before
        disk.faults = ()
        audit(training.manager)
        return [*training.weights(), *averages.state_dict().values()], num_calls


@cpu_only
@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.full)])
@spread(call=["pwritev", "preadv"], kind=[FaultKind.TORN, FaultKind.ERROR], use=[in_and_out, chunkmem.EMA.update])
def test_averages_outlive_an_error(
    call: str, kind: FaultKind, use: Callable[[chunkmem.EMA], None], stride: int, tmp_path: Path
) -> None:
    """An error in the middle would leave some weights averaged, or exchanged, and others not."""
    if kind is FaultKind.TORN and call == "preadv":
        kind = FaultKind.ERROR
    right, num_calls = averages_of(FaultyDisk(), tmp_path, use, call)
    assert num_calls > DEPTH
    for at in range(1, num_calls + 1, stride):
        disk = FaultyDisk()
        found, _ = averages_of(disk, tmp_path, use, call, Fault(kind, call, at=at))
        assert len(disk.struck) == 1
        assert same(found, right)


@cpu_only
def test_averages_of_which_nothing_has_changed_are_used_again(tmp_path: Path) -> None:
    disk = FaultyDisk()
    with training_on(disk, tmp_path) as training:
        averages = chunkmem.EMA(training.manager, decay=0.5)
        training.step(0)
        averages.update()
        training.step(1)
        training.weights()
        disk.faults = (Fault(FaultKind.ERROR, "preadv", at=disk.num_calls["preadv"] + 1, times=math.inf),)
        with pytest.raises(TierIOError):
            averages.update()
        disk.faults = ()
        averages.update()
        assert averages.num_updates == 2


@cpu_only
@pytest.mark.parametrize("use", [in_and_out, chunkmem.EMA.update])
def test_averages_that_a_disk_has_left_half_changed_are_refused(
    use: Callable[[chunkmem.EMA], None], tmp_path: Path
) -> None:
    disk = FaultyDisk()
    with training_on(disk, tmp_path) as training:
        averages = chunkmem.EMA(training.manager, decay=0.5)
        training.step(0)
        averages.update()
        training.manager.save(tmp_path / "saved", training.optimizer, ema=averages)
        right = [*training.weights(), *averages.state_dict().values()]
        training.step(1)
        training.weights()
        disk.faults = (Fault(FaultKind.ERROR, "pwritev", at=disk.num_calls["pwritev"] + 2, times=math.inf),)
        with pytest.raises(TierIOError):
            use(averages)
        disk.faults = ()
        for refused in (averages.state_dict, averages.update, lambda: in_and_out(averages)):
            with pytest.raises(StateError, match=r"some averages changed.*manager\.load\(path, optimizer, ema=ema\)"):
                refused()
        if use is in_and_out:
            with pytest.raises(StateError, match=r"weights by ema\.swapped\(\) has failed in its middle.*load what"):
                training.step(2)
        training.manager.load(tmp_path / "saved", training.optimizer, ema=averages)
        assert same([*training.weights(), *averages.state_dict().values()], right)
        training.step(1)
        averages.update()


@pytest.mark.full
@cpu_only
@spread(call=["pwritev", "preadv"], fails_in=[FAILS_IN, 0], overlap=[True, False])
def test_a_disk_that_stays_down(
    call: str, fails_in: int, overlap: bool, tmp_path: Path, plain: list[list[torch.Tensor]]
) -> None:
    """No number is ever wrong: weights are those before or after the step, or their chunk says that it is lost."""
    calls = calls_of_the_step(tmp_path, call, fails_in, overlap=overlap)
    for at in list(calls)[:: max(1, len(calls) // 12)]:
        disk = FaultyDisk(Fault(FaultKind.ERROR, call, at=at, times=math.inf, number=errno.EIO))
        with training_on(disk, tmp_path, overlap=overlap) as training:
            with pytest.raises(TierIOError) as raised:
                for step in range(NUM_STEPS):
                    training.step(step)
            require_said(raised.value, SAID, LOST)
            disk.faults = ()
            if is_half(training):
                continue_or_say_lost(training, step, plain)
                continue
            state = training.manager.state_dict(training.model, lazy=True)
            lost = set()
            for group, (name, old, new) in enumerate(zip(state, plain[step], plain[step + 1], strict=True)):
                try:
                    is_right = torch.equal(state[name], old) or torch.equal(state[name], new)
                except TierIOError as error:
                    require_said(error, LOST)
                    lost.add(group)
                else:
                    assert is_right, (
                        name,
                        step,
                        at,
                        [i for i, p in enumerate(plain) for q in p if torch.equal(state[name], q)],
                    )
            chunks = training.manager.runtime.memory.store.chunks.values()
            needed = {chunk.id.group for chunk in chunks if Tier.DISK in chunk.replicas}
            assert lost <= needed, "what is on other tiers, and was not to be saved, is not lost"


@pytest.mark.few(1)
@cpu_only
@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_the_last_checkpoint_is_loaded_after_a_disk_that_was_down(
    call: str, tmp_path: Path, plain: list[list[torch.Tensor]]
) -> None:
    disk = FaultyDisk()
    with training_on(disk, tmp_path) as training:
        training.step(0)
        training.manager.save(tmp_path / "last", training.optimizer)
        disk.faults = (Fault(FaultKind.ERROR, call, at=disk.num_calls[call] + 2, times=math.inf, number=errno.EIO),)
        with pytest.raises(TierIOError):
            for step in range(1, NUM_STEPS):
                training.step(step)
        disk.faults = ()
        training.manager.load(tmp_path / "last", training.optimizer)
        for step in range(1, NUM_STEPS):
            training.step(step)
        assert same(training.weights(), plain[NUM_STEPS])


def continue_or_say_lost(training: Training, step: int, plain: list[list[torch.Tensor]]) -> None:
    """What a half step needs is there, and it continues; or it is lost, and says so."""
    try:
        training.optimizer.step()
    except TierIOError as error:
        require_said(error, LOST)
    else:
        assert same(training.weights(), plain[step + 1])


@pytest.mark.few(1)
@cpu_only
@pytest.mark.parametrize("at", [1, 4, 9])
def test_a_disk_that_is_full(at: int, tmp_path: Path, plain: list[list[torch.Tensor]]) -> None:
    """Said where room is reserved, with what the file system has left; afterwards the step is done again."""
    disk = FaultyDisk(Fault(FaultKind.ERROR, "fallocate", at=at, times=math.inf, number=errno.ENOSPC))
    with training_on(disk, tmp_path) as training:
        num_raised = 0
        for step in range(NUM_STEPS):
            try:
                training.step(step)
            except TierIOError as error:
                require_said(error, re.compile(r"ENOSPC.*memory\.disk\.capacity"))
                num_raised += 1
                disk.faults = ()
                training.optimizer.step()
        assert num_raised == 1
        assert same(training.weights(), plain[NUM_STEPS])


@pytest.mark.few(1)
@cpu_only
@spread(fails_in=[2, 1], at=[7, 5, 3])
def test_a_planned_step_on_a_full_disk(fails_in: int, at: int, tmp_path: Path, plain: list[list[torch.Tensor]]) -> None:
    """While nothing can be written, whatever call says so, `zero_grad()` included; and once there is room, each call
    is repeated."""
    disk = FaultyDisk()
    with training_on(disk, tmp_path) as training:
        for step in range(NUM_STEPS):
            if step == fails_in:
                first = disk.num_calls["pwritev"] + at
                disk.faults = (Fault(FaultKind.ERROR, "pwritev", at=first, times=6, number=errno.ENOSPC),)
            again(lambda step=step: training.forward_backward(step))
            again(training.optimizer.step)
            again(training.optimizer.zero_grad)
        assert same(training.weights(), plain[NUM_STEPS])


def again(call: Callable[[], object]) -> None:
    """Make a call until it raises no error of the disk."""
    for _ in range(8):
        try:
            call()
        except TierIOError as error:
            require_said(error, SAID)
        else:
            return
    raise AssertionError("there is room again")


@pytest.mark.few(1)
@cpu_only
@pytest.mark.parametrize("seed", range(4))
def test_short_and_late_calls_are_no_failures(seed: int, tmp_path: Path, plain: list[list[torch.Tensor]]) -> None:
    faults = (
        Fault(FaultKind.SHORT, "preadv", probability=0.2),
        Fault(FaultKind.SHORT, "pwritev", probability=0.2),
        Fault(FaultKind.DELAY, "preadv", probability=0.1, delay_s=0.003),
        Fault(FaultKind.DELAY, "pwritev", probability=0.1, delay_s=0.003),
    )
    disk = FaultyDisk(*faults, seed=seed)
    with training_on(disk, tmp_path, overlap=seed % 2 == 0) as training:
        for step in range(NUM_STEPS):
            training.step(step)
        assert same(training.weights(), plain[NUM_STEPS])
    assert len(disk.struck) > 20


@cpu_only
def test_a_changed_byte_is_found_if_asked_for(tmp_path: Path) -> None:
    disk = FaultyDisk(Fault(FaultKind.FLIP, "preadv", at=30))
    with (
        training_on(disk, tmp_path, verify=True) as training,
        pytest.raises(TierIOError, match="are not what was written: their CRC-32"),
    ):
        for step in range(NUM_STEPS):
            training.step(step)


@cpu_only
def test_a_folder_that_cannot_be_used_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(chunkmem.ConfigError, match=r"memory\.disk\.path: .*file cannot be used"):
        training_on(FaultyDisk(), tmp_path / "file").__enter__()
