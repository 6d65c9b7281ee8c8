"""`manager.save(asynchronous=True)`: what is written is what was there at the call, whatever training does since."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.checkpoints import files
from chunkmem.testing import AdversarialLanes
from tests.helpers.saved_training import WIDTH, Saved, Training, assert_same
from tests.helpers.spread import spread

SHAPES = {
    "plain": Saved(),
    "tiled": Saved(tiled=True),
    "roomy": Saved(device_nbytes=4 << 20),
    "bf16": Saved("bf16"),
    "built in bf16": Saved("bf16", built_low=True),
    "fp16": Saved("fp16"),
    "SGD": Saved(optimizer="SGD"),
}


class SlowDisk:
    """Takes its time for each tensor and object that is written, and counts them."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.num_written = 0
        self._write = files._write_item

    def __call__(self, *args: Any) -> Any:
        time.sleep(self.delay_s)
        self.num_written += 1
        return self._write(*args)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    slow = SlowDisk(0.004)
    monkeypatch.setattr(files, "_write_item", slow)
    return slow


def loaded(how: Saved, path: Path) -> dict[str, Tensor]:
    training = how.open()
    training.manager.load(path, training.optimizer)
    return training.state()


@pytest.mark.few(2)
@spread(kind=SHAPES, num_before=(4, 1, 0))
def test_what_is_saved_is_what_was_there_at_the_call(
    kind: str, num_before: int, disk: SlowDisk, tmp_path: Path
) -> None:
    how = SHAPES[kind]
    training, twin = how.open(), how.open()
    for each in (training, twin):
        each.run(num_before)
    state = training.state()
    extra = {"step": 3, "draws": torch.arange(3)}
    saving = training.manager.save(tmp_path / "saved", training.optimizer, extra=extra, asynchronous=True)
    num_written = disk.num_written
    extra["step"] = 4
    extra["draws"] += 1
    training.run(3, seed=7)
    saving.wait()
    assert saving.done()
    assert num_written < disk.num_written / 2  # it is written later
    twin.run(3, seed=7)
    assert_same(training.state(), twin.state())
    again = how.open()
    found = again.manager.load(tmp_path / "saved", again.optimizer)
    assert found["step"] == 3
    assert torch.equal(found["draws"], torch.arange(3))
    assert_same(again.state(), state)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 20))])
def test_copies_that_come_late(seed: int, disk: SlowDisk, tmp_path: Path) -> None:
    """What a copy fills is not read before it has come."""
    disk.delay_s = 0.002 * (seed % 3)
    how = Saved("bf16" if seed % 4 == 3 else "fp32", device_nbytes=(160 + 40 * (seed % 5)) << 10)
    training = how.open(make_lanes=lambda compute: AdversarialLanes(seed))
    training.run(4)
    for step in range(3):
        state = training.state()
        saving = training.manager.save(tmp_path / "saved", training.optimizer, asynchronous=True)
        training.run(1 + step)
        saving.wait()
        assert_same(loaded(how, tmp_path / "saved"), state)


@pytest.mark.full
@spread(device_kib=(160, 220, 200), host_kib=(300, 220, 260), precision=("fp32", "bf16"))
def test_chunks_that_host_has_no_room_for(
    device_kib: int, host_kib: int, precision: str, disk: SlowDisk, tmp_path: Path
) -> None:
    """They are read where they are, and saved before they change."""
    small = Saved(precision, device_nbytes=device_kib << 10, host_nbytes=host_kib << 10, disk=tmp_path / "third tier")
    training = small.open()
    training.run(4)
    memory = training.manager.memory()
    assert memory.disk is not None
    assert memory.disk.now_nbytes > 0
    for step in range(2):
        state = training.state()
        saving = training.manager.save(tmp_path / "saved", training.optimizer, asynchronous=True)
        training.run(1 + step)
        saving.wait()
        assert_same(loaded(Saved(precision), tmp_path / "saved"), state)
    training.manager.close()


# What changes.


def load_weights(training: Training, path: Path) -> None:
    state = training.manager.state_dict()
    training.manager.load_state_dict({name: value + 1 for name, value in state.items()})


def load_states(training: Training, path: Path) -> None:
    state = training.optimizer.state_dict()
    for row in state["state"].values():
        row["exp_avg"] = row["exp_avg"] + 1
    training.optimizer.load_state_dict(state)


def load(training: Training, path: Path) -> None:
    training.manager.load(path, training.optimizer)


def assign_a_state(training: Training, path: Path) -> None:
    param = training.model.get_parameter("blocks.0.0.weight")
    training.optimizer.state[param]["exp_avg"] = torch.ones_like(training.optimizer.state[param]["exp_avg"])


def gather(training: Training, path: Path) -> None:
    with training.manager.gather():
        for param in training.model.parameters():
            param.data.add_(1)


def write_outside(training: Training, path: Path) -> None:
    with torch.no_grad():
        for param in training.model.parameters():
            param.mul_(2)


def write_past_counters(training: Training, path: Path) -> None:
    for param in training.model.parameters():
        param.data.mul_(2)


def assign_data(training: Training, path: Path) -> None:
    for param in training.model.parameters():
        param.data = param.data + 1


def initialize(training: Training, path: Path) -> None:
    for param in training.model.parameters():
        nn.init.normal_(param)


def clip_weights(training: Training, path: Path) -> None:
    with torch.no_grad():
        torch._foreach_clamp_max_(list(training.model.parameters()), 0.01)


def take_another_optimizer(training: Training, path: Path) -> None:
    """Its states take the place of those there were."""
    training.optimizer = chunkmem.SGD(training.model.parameters(), manager=training.manager, lr=0.1, momentum=0.5)
    training.run(2)


def count_batches(training: Training, path: Path) -> None:
    training.model.get_buffer("norm.running_mean").add_(1)


def unfreeze(training: Training, path: Path) -> None:
    training.model.get_submodule("frozen").requires_grad_(True)
    training.run(2)


def raise_the_rate(training: Training, path: Path) -> None:
    for group in training.optimizer.param_groups:
        group["lr"] *= 2
    training.run(1)


CHANGES: list[Callable[[Training, Path], None]] = [
    load_weights, load_states, load, assign_a_state, gather, write_outside, write_past_counters, assign_data,
    initialize, clip_weights, take_another_optimizer, count_batches, unfreeze, raise_the_rate,
]  # fmt: skip


@pytest.mark.few(2)
@spread(change=CHANGES, kind=("plain", "roomy", "bf16"))
def test_a_change_waits_until_what_was_there_is_copied(
    change: Callable[[Training, Path], None], kind: str, disk: SlowDisk, tmp_path: Path
) -> None:
    how = SHAPES[kind]
    other = how.open()
    other.run(1, seed=9)
    other.manager.save(tmp_path / "other", other.optimizer)
    training = how.open()
    training.run(3)
    state = training.state()
    groups = [group["lr"] for group in training.optimizer.param_groups]
    saving = training.manager.save(tmp_path / "saved", training.optimizer, asynchronous=True)
    change(training, tmp_path / "other")
    if change in (load_weights, load_states, load, gather, write_outside):
        assert not saving.done()
    saving.wait()
    again = how.open()
    again.manager.load(tmp_path / "saved", again.optimizer)
    assert_same(again.state(), state)
    assert [group["lr"] for group in again.optimizer.param_groups] == groups


def test_a_tensor_that_was_taken_before(disk: SlowDisk, tmp_path: Path) -> None:
    """Nothing tells of a write to it."""
    how = SHAPES["roomy"]
    training = how.open()
    training.run(3)
    alias = training.model.get_parameter("blocks.0.0.weight").data
    array = training.model.get_parameter("blocks.1.0.weight").detach().numpy()
    state = training.state()
    saving = training.manager.save(tmp_path / "saved", training.optimizer, asynchronous=True)
    alias.add_(1)
    array += 1
    saving.wait()
    assert_same(loaded(how, tmp_path / "saved"), state)
    assert not torch.equal(training.state()["model.blocks.0.0.weight"], state["model.blocks.0.0.weight"])


class Renormed(nn.Module):
    """Writes to its weights while it runs."""

    def __init__(self, *, past_counters: bool = False, when: int = 0) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.past_counters = past_counters
        self.num_calls = 0
        self.when = when
        """The first call that does."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls > self.when:
            with torch.no_grad():
                weight = self.inner.weight
                (weight.data if self.past_counters else weight).mul_(0.5)
        result: Tensor = self.inner(x)
        return result


def open_renormed(*, past_counters: bool = False, when: int = 0, device_nbytes: int = 1 << 20) -> Training:
    torch.set_num_threads(1)
    config = {"memory": {"device": device_nbytes, "host": 8 << 20}, "default_chunk_size": 4800}
    manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(config))
    with manager.init():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), *(Renormed(past_counters=past_counters, when=when) for _ in "ab")
        )
    return Training(manager, model, chunkmem.AdamW(model.parameters(), manager=manager), None)


def step(training: Training) -> None:
    training.manager.backward(training.model(torch.ones(2, WIDTH)).square().sum())
    training.optimizer.step()
    training.optimizer.zero_grad()


@pytest.mark.parametrize("past_counters", [False, True])
def test_modules_that_write_to_their_weights(past_counters: bool, disk: SlowDisk, tmp_path: Path) -> None:
    training = open_renormed(past_counters=past_counters)
    for _ in range(3):
        step(training)
    state = training.manager.state_dict()
    saving = training.manager.save(tmp_path / "saved", training.optimizer, asynchronous=True)
    for _ in range(3):
        step(training)
    saving.wait()
    again = open_renormed()
    again.manager.load(tmp_path / "saved", again.optimizer)
    assert_same(again.manager.state_dict(), state)


@pytest.mark.parametrize("device_nbytes", [1 << 20, 160 << 10])
def test_what_a_module_has_written_just_before(device_nbytes: int, disk: SlowDisk, tmp_path: Path) -> None:
    """Nobody has noticed yet when the save begins."""
    training, twin = (open_renormed(device_nbytes=device_nbytes) for _ in "ab")
    for each in (training, twin):
        for _ in range(3):
            step(each)
        with torch.no_grad():
            each.model(torch.ones(2, WIDTH))
    training.manager.save(tmp_path / "saved", training.optimizer, asynchronous=True).wait()
    again = open_renormed()
    again.manager.load(tmp_path / "saved", again.optimizer)
    assert_same(again.manager.state_dict(), twin.manager.state_dict())


def test_the_first_time_that_a_module_writes_to_its_weights(disk: SlowDisk, tmp_path: Path) -> None:
    training = open_renormed(when=3)
    for _ in range(3):
        step(training)
    saving = training.manager.save(tmp_path / "saved", training.optimizer, asynchronous=True)
    step(training)
    with pytest.raises(chunkmem.CheckpointError, match=r"chunk 0 .* was written to inside of a module .*again"):
        saving.wait()
    assert list(tmp_path.iterdir()) == []
    state = training.manager.state_dict()
    saving = training.manager.save(tmp_path / "saved", training.optimizer, asynchronous=True)
    step(training)
    saving.wait()
    again = open_renormed()
    again.manager.load(tmp_path / "saved", again.optimizer)
    assert_same(again.manager.state_dict(), state)


def test_what_is_being_saved_is_complete_when_it_is_loaded(disk: SlowDisk, tmp_path: Path) -> None:
    how = SHAPES["plain"]
    training = how.open()
    training.run(1)
    training.manager.save(tmp_path / "saved", training.optimizer, extra={"step": 1})
    training.run(1)
    state = training.state()
    saving = training.manager.save(tmp_path / "saved", training.optimizer, extra={"step": 2}, asynchronous=True)
    training.run(1)
    assert training.manager.load(tmp_path / "saved", training.optimizer) == {"step": 2}
    assert saving.done()
    assert_same(training.state(), state)


def test_another_thread_waits(disk: SlowDisk, tmp_path: Path) -> None:
    how = SHAPES["roomy"]
    training = how.open()
    training.run(3)
    state = training.state()
    saving = training.manager.save(tmp_path / "saved", training.optimizer, asynchronous=True)
    thread = threading.Thread(target=saving.wait)
    thread.start()
    training.run(2)
    thread.join()
    assert saving.done()
    assert_same(loaded(how, tmp_path / "saved"), state)


def interrupt(training: Training) -> None:
    """Leave a call of the model in the middle, as a debugger or Ctrl-C does: its weights stay pinned until the next."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    hook = training.model.get_submodule("norm").register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        training.run(1)
    hook.remove()


@pytest.mark.parametrize("kind", ["plain", "roomy"])
def test_what_an_interrupted_call_has_left_pinned(kind: str, disk: SlowDisk, tmp_path: Path) -> None:
    training = SHAPES[kind].open()
    training.run(3)
    state = training.state()
    saving = training.manager.save(tmp_path / "saved", training.optimizer, asynchronous=True)
    interrupt(training)
    saving.wait()
    assert_same(loaded(SHAPES[kind], tmp_path / "saved"), state)
    training.run(1)
