"""DEVICE is given back between steps and taken again: no bit changes, nothing is recorded again, no plan is missed."""

from __future__ import annotations

import copy
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.checkpoints.streaming import untied
from chunkmem.data.errors import CapacityError, StateError
from chunkmem.modules.lazy_gradient import LazyGradient
from chunkmem.pipeline.staged import StagedPipeline
from tests.helpers import staged_training
from tests.helpers.audit import audit
from tests.helpers.counted import blocking, counted, counted_only
from tests.helpers.ranks import Team
from tests.helpers.shared_training import MODELS, Task, batch_of, loss_of, open_manager
from tests.helpers.staged_training import StagedTask
from tests.helpers.twins import (
    AMPLE_NBYTES,
    WIDTH,
    Blocks,
    Twin,
    Weighted,
    assert_equal,
    config,
    copied,
    cpu_only,
    features,
    same,
)

pytestmark = cpu_only
TIGHT_NBYTES = 16 << 10
"""Of about 33 KiB that all chunks take."""


def device_nbytes(manager: chunkmem.ChunkManager) -> int:
    """Return what slabs take on DEVICE, those kept for reuse included."""
    return sum(manager.runtime.tiers.device.now.values())


def offload(twin: Twin, *, onload: bool = False) -> None:
    """Have nothing on DEVICE, twice, and bring it back if asked to; in plain PyTorch do nothing."""
    if twin.manager is None:
        return
    for _ in range(2):
        twin.manager.offload()
        assert device_nbytes(twin.manager) == 0, str(twin.manager.memory())
        grads = [param.grad for param in twin.model.parameters()]
        assert all(grad is None or isinstance(grad, LazyGradient) for grad in grads)
    if onload:
        twin.manager.onload()


def between_steps(twin: Twin) -> Any:
    losses = []
    for step in range(7):
        losses.append(twin.step(features(step)))
        offload(twin, onload=step % 2 == 1)
    return losses


def evaluated(twin: Twin) -> Any:
    outputs: list[Any] = twin.steps(0, 1)
    for step in range(2, 5):
        offload(twin)
        with torch.no_grad():
            outputs.append(twin.model(features(step)))
        offload(twin, onload=step == 3)
        outputs.append(twin.step(features(step)))
    return outputs


def with_a_graph(twin: Twin) -> Any:
    """Whether or not models are heard of, a graph that is to be run has memory on DEVICE."""
    losses = twin.steps(0, 1, 2, 3)
    for step in range(3):
        loss = twin.loss(features(step))
        if twin.manager is not None:
            with pytest.raises(StateError, match="graph of a loss"):
                twin.manager.offload()
        loss.backward()
        offload(twin)
        twin.update()
        losses.append(loss.item())
        twin.loss(features(step))  # whose graph nobody has
        offload(twin)
    return [*losses, *twin.steps(4, 5)]


def accumulating(twin: Twin) -> Any:
    twin.steps(0, 1, 2, 3)
    norms = []
    for step in range(3):
        twin.loss(features(step)).backward()
        offload(twin)
        twin.loss(features(step + 1)).backward()
        offload(twin, onload=True)
        norms.append(twin.clip(0.01))
        offload(twin)
        twin.update()
    return [*norms, *twin.steps(4, 5, 6)]


def gradients_read(twin: Twin) -> Any:
    twin.steps(0, 1, 2, 3)
    twin.loss(features(4)).backward()
    offload(twin)
    return [param.grad.square().sum() for param in twin.model.parameters()]


class Shrinks(nn.Linear):
    """Writes to its own weight while it runs."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


def written(twin: Twin) -> Any:
    """What users write to weights that are on both tiers, or on one, is kept."""
    outputs = []
    for step in range(4):
        with torch.no_grad():
            outputs.append(twin.model(features(step)))
        twin.model.head.weight.data.mul_(1.5)
        twin.model.blocks[1][0].bias.data.fill_(step)
        with torch.no_grad():
            twin.model.inner.weight.add_(0.5)
        offload(twin, onload=step % 2 == 1)
        outputs.append(twin.step(features(step)))
        twin.model.head.weight.data.mul_(1.5)
        offload(twin)
    return outputs


SCENARIOS = (between_steps, evaluated, with_a_graph, accumulating, gradients_read, written)


@pytest.mark.few(2)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_bit_changes(scenario: Callable[[Twin], Any]) -> None:
    same(lambda: Blocks(Shrinks(WIDTH, WIDTH)) if scenario is written else Blocks(), scenario)


KINDS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "8 bit": {"optimizer": {"params": {"states": "8bit"}}},
    "inside backward": {"optimizer": {"params": {"in_backward": True}}},
    "activations": {"activations": {"policy": "offload"}},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cap_nbytes", [AMPLE_NBYTES, TIGHT_NBYTES])
def test_training_goes_on_as_if_nothing_had_been(kind: str, cap_nbytes: int) -> None:
    def trained(phase: Callable[..., None]) -> Any:
        with chunkmem.ChunkManager(config(cap_nbytes, **KINDS[kind])) as manager:
            twin = Twin(manager, Blocks)
            losses = []
            for step in range(6):
                losses.append(twin.step(features(step)))
                phase(twin, onload=step % 2 == 1)
            return losses, twin.left()

    assert_equal(trained(offload), trained(lambda *_, **__: None))


# Plans.


@pytest.mark.few(2)
@pytest.mark.parametrize("onload", [False, True])
@pytest.mark.parametrize("cap_nbytes", [AMPLE_NBYTES, TIGHT_NBYTES])
def test_nothing_is_recorded_again_and_no_plan_is_missed(
    cap_nbytes: int, onload: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with chunkmem.ChunkManager(config(cap_nbytes)) as manager:
        twin = Twin(manager, Blocks)
        twin.steps(*range(6))
        caplog.set_level(logging.INFO, "chunkmem.plan")
        caplog.clear()  # of the first step's, where another test has left the level lower
        for step in range(3):
            offload(twin, onload=onload)
            twin.step(features(step))
            timeline = manager.timeline()
            assert timeline is not None
            assert timeline.plan_misses == 0
        for step in range(4):  # in the middle of steps some is served on demand, and nothing is learnt from that
            loss = twin.loss(features(step))
            loss.backward()
            offload(twin)
            twin.update()
        twin.steps(3, 4)
        assert not [record for record in caplog.records if "recorded, as" in record.getMessage()]
        assert manager.runtime.controller.residence.is_on is (cap_nbytes == AMPLE_NBYTES)


def test_what_a_step_begins_with_is_there_again() -> None:
    with chunkmem.ChunkManager(config(TIGHT_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        twin.steps(*range(6))
        offload(twin, onload=True)
        assert device_nbytes(manager) > 0
        moved = manager.memory().moved
        twin.manager.onload()  # type: ignore[union-attr]
        assert manager.memory().moved == moved
        audit(manager)


def activations_nbytes(manager: chunkmem.ChunkManager) -> tuple[int, int]:
    """Return what activations have taken at most, and what plans have for them."""
    assert manager.trace is not None
    assert manager.runtime.tiers.meter is not None
    planned_nbytes = max(moment.non_model_peak_nbytes for moment in manager.trace.moments)
    return manager.runtime.tiers.meter.highest_nbytes, planned_nbytes


@counted_only
@pytest.mark.few(1)
@pytest.mark.parametrize("onload", [False, True])
@pytest.mark.parametrize("cap_nbytes", [2 << 20, 32 << 10])
def test_what_an_engine_takes_meanwhile_is_not_taken_for_activations(
    cap_nbytes: int, onload: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """On an accelerator its peak, of an engine in the same process, would have left chunks no room in plans to come."""

    def trained(*, phases: bool) -> list[float]:
        with counted() as device, chunkmem.ChunkManager(config(cap_nbytes), make_lanes=blocking) as manager:
            twin = Twin(manager, Blocks)
            losses = twin.steps(*range(6))
            before = activations_nbytes(manager)
            caplog.set_level(logging.INFO, "chunkmem.plan")
            caplog.clear()
            for step in range(3 * phases):
                for _ in range(2):
                    manager.offload()
                    engine = torch.empty(8 << 20, dtype=torch.uint8)
                    assert device_nbytes(manager) == 0
                    assert device.used_nbytes() > 8 << 20
                    del engine
                if onload:
                    manager.onload()
                if step == 1:
                    with torch.no_grad():
                        twin.model(features(step))
                losses.append(twin.step(features(step)))
                timeline = manager.timeline()
                assert timeline is not None
                assert timeline.plan_misses == 0
            if phases:
                assert not [record for record in caplog.records if "train step: recorded" in record.getMessage()]
                assert activations_nbytes(manager) == before
            return losses + twin.steps(7, 8)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trained(phases=True)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        assert found == twin.steps(*range(6), 0, 1, 2, 7, 8)


# Surroundings.


def test_averages_and_copies_are_as_ever(tmp_path: Path) -> None:
    with chunkmem.ChunkManager(config(TIGHT_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        ema = chunkmem.EMA(manager, 0.9)
        for step in range(3):
            twin.step(features(step))
            ema.update()
        expected = twin.left(), copied(ema.state_dict())
        offload(twin)
        assert_equal((twin.left(), copied(ema.state_dict())), expected)
        assert_equal(copied(copy.deepcopy(twin.model).state_dict()), expected[0]["weights"])
        manager.save(tmp_path / "saved", twin.optimizer, ema=ema)
        manager.save(tmp_path / "meanwhile", twin.optimizer, asynchronous=True)
        offload(twin)
        assert device_nbytes(manager) == 0
        with ema.swapped():
            offload(twin)
            averaged = copied(manager.state_dict())
        twin.steps(3, 4)
        manager.load(tmp_path / "saved", twin.optimizer, ema=ema)
        assert_equal((twin.left(), copied(ema.state_dict())), expected)
        assert not torch.equal(averaged["inner.weight"], expected[0]["weights"]["inner.weight"])
        manager.load(tmp_path / "meanwhile", twin.optimizer)
        assert_equal(twin.left(), expected[0])
        ema.close()


def test_what_finds_no_room_on_host_goes_to_disk(tmp_path: Path) -> None:
    disk = {"path": str(tmp_path), "capacity": 1 << 24}

    def trained(host_nbytes: int, phase: Callable[..., None], **more: Any) -> Any:
        memory = {"device": 24 << 10, "host": host_nbytes, **more}
        with chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": memory, "default_chunk_size": 256})) as manager:
            twin = Twin(manager, Blocks)
            losses = []
            for step in range(5):
                losses.append(twin.step(features(step)))
                phase(twin, onload=step % 2 == 1)
                audit(manager)
            return losses, twin.left()

    expected = trained(AMPLE_NBYTES, lambda *_, **__: None)
    assert_equal(trained(12 << 10, offload, disk=disk), expected)


@pytest.mark.parametrize("overlaps", [False, True])
def test_too_little_room_on_host_is_an_error_with_the_cap_that_does(overlaps: bool) -> None:
    keys = {"default_chunk_size": 256, "client": {"opts": {"overlap_optimizer": overlaps}}}

    def trained(host_nbytes: int, phase: Callable[[chunkmem.ChunkManager], None]) -> list[float]:
        memory = {"device": 32 << 10, "host": host_nbytes}
        with chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": memory, **keys})) as manager:
            twin = Twin(manager, Blocks)
            losses = twin.steps(0, 1, 2)
            phase(manager)
            audit(manager)
            return losses + twin.steps(3, 4)

    needed: list[int] = []

    def refused(manager: chunkmem.ChunkManager) -> None:
        with pytest.raises(CapacityError, match=r"or give it a memory\.disk") as caught:
            manager.offload()
        assert caught.value.on_host
        needed.append(caught.value.needed_nbytes)

    losses = trained(20 << 10, refused)
    assert needed[0] > 20 << 10
    assert trained(needed[0], chunkmem.ChunkManager.offload) == losses


# Weights for an engine.


class Tied(Blocks):
    """Has a tied weight, a buffer and one that is not persistent, and no optimizer for what is frozen."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(WIDTH))
        self.blocks[1][2].weight = self.inner.weight
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.blocks[2].requires_grad_(False)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_come_one_after_the_other(precision: str) -> None:
    with chunkmem.ChunkManager(config(TIGHT_NBYTES, precision=precision)) as manager:
        twin = Twin(manager, Tied)
        twin.steps(0, 1, 2)
        expected = {name: value for name, value in twin.weights().items() if name != "blocks.1.2.weight"}
        manager.offload()
        found, params = {}, dict(twin.model.named_parameters())
        came: list[weakref.ref[Tensor]] = []
        for name, tensor in manager.stream_weights():
            assert all(earlier() is None for earlier in came), name
            came += [weakref.ref(tensor)] if name in params else []
            found[name] = tensor.numpy().copy()
            del tensor
        assert device_nbytes(manager) == 0
        assert_equal({name: torch.from_numpy(value) for name, value in found.items()}, expected)
        assert dict(manager.stream_weights(twin.model)).keys() == expected.keys()


CHANGES: dict[str, Callable[[Twin], object]] = {
    "step": lambda twin: twin.step(features(5)),
    "load": lambda twin: twin.manager.load_state_dict(twin.weights()),  # type: ignore[union-attr]
    "write": lambda twin: twin.model.inner.weight.requires_grad_(False).mul_(2.0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("cap_nbytes", [AMPLE_NBYTES, TIGHT_NBYTES])
def test_weights_that_change_in_the_middle_are_an_error(change: str, cap_nbytes: int) -> None:
    with chunkmem.ChunkManager(config(cap_nbytes)) as manager:
        twin = Twin(manager, Blocks)
        twin.steps(0, 1, 2, 3)
        stream = manager.stream_weights()
        next(stream)
        with torch.no_grad():
            twin.model(features(4))
        next(stream)
        CHANGES[change](twin)
        with pytest.raises(StateError, match=r"weights have changed since it was called, before blocks\.0\.0\.weight"):
            next(stream)
        assert len(list(manager.stream_weights())) == len(twin.weights())
        stream = manager.stream_weights()
    with pytest.raises(StateError, match="closed"):
        next(stream)


def test_averages_are_streamed_inside_of_their_block() -> None:
    with chunkmem.ChunkManager(config(TIGHT_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        ema = chunkmem.EMA(manager, 0.9)
        for step in range(2):
            twin.step(features(step))
            ema.update()
        with ema.swapped():
            expected = copied(manager.state_dict())
            stream = manager.stream_weights()
            assert_equal(copied(dict(manager.stream_weights())), expected)
            next(stream)
        with pytest.raises(StateError, match="weights have changed"):
            next(stream)
        ema.close()


# Errors.


class Calls(nn.Module):
    """Has a manager do something in the middle of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Blocks()
        self.call: Callable[[], object] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.call()
        result: Tensor = self.body(x)
        return result


def test_it_is_refused_where_memory_is_in_use() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Twin(manager, Calls)
        twin.steps(0, 1)
        with manager.gather(), pytest.raises(StateError, match=r"inside of manager\.gather"):
            manager.offload()
        twin.model.call = manager.offload
        with pytest.raises(StateError, match="inside of forward"):
            twin.step(features(2))
        twin.model.call = manager.onload
        with pytest.raises(StateError, match=r"manager\.onload\(\) inside of forward"):
            twin.step(features(2))
        twin.model.call = lambda: None
        twin.optimizer.zero_grad()
        view = twin.model.body.inner.weight.data
        with pytest.raises(StateError, match=r"keeps the memory of .*body\.inner\.weight"):
            manager.offload()
        del view
        offload(twin)
        twin.steps(3, 4)
    for call in (manager.offload, manager.onload):
        with pytest.raises(StateError, match="closed"):
            call()


class Raises(Weighted):
    """Saves its weight for a backward that raises in the middle."""

    raises = False

    def compute(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight)
        if self.raises:
            y.register_hook(failing)
        return y + x @ self.weight.t()


def failing(*_: object) -> None:
    raise ValueError("mine")


@pytest.mark.few(2)
@pytest.mark.parametrize("cap_nbytes", [AMPLE_NBYTES, TIGHT_NBYTES])
@pytest.mark.parametrize("where", ["forward", "backward", "update"])
def test_after_a_step_that_raised(where: str, cap_nbytes: int) -> None:
    def trained(*, raises: bool) -> Any:
        with chunkmem.ChunkManager(config(cap_nbytes)) as manager:
            twin = Twin(manager, lambda: Blocks(Raises(), Raises()))
            twin.steps(0, 1, 2)
            block = twin.model.blocks[1]
            if raises:
                hook = {
                    "forward": block.register_forward_hook,
                    "backward": block.register_forward_hook,
                    "update": twin.optimizer.register_step_pre_hook,
                }[where](failing if where != "backward" else lambda *_: None)
                block.raises = where == "backward"
                with pytest.raises(ValueError, match="mine"):
                    twin.step(features(3))
                hook.remove()
                block.raises = False
                offload(twin)
                twin.optimizer.zero_grad()
                offload(twin)
            return twin.steps(3, 4), twin.left()

    assert_equal(trained(raises=True), trained(raises=False))


def test_where_both_tiers_are_one_piece_of_ram_nothing_is_moved() -> None:
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({"default_chunk_size": 256})) as manager:
        twin = Twin(manager, Blocks)
        twin.steps(0, 1)
        before = device_nbytes(manager)
        manager.offload()
        manager.onload()
        assert device_nbytes(manager) == before > 0
        twin.steps(2, 3)


# Ranks.


@pytest.fixture(scope="module")
def pair() -> Iterator[Team]:
    team = Team(2)
    yield team
    team.close()


def shared(rank: int, task: Task, phases: bool) -> Any:
    torch.set_num_threads(1)
    with open_manager(rank, task) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = MODELS[task.model]()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        losses = []
        for step in range(6):
            for part in range(2):
                loss = loss_of(model, batch_of(task, step, part, rank))
                manager.backward(loss)
                losses.append(loss.item())
                if phases and step in (2, 4) and part == 0:
                    manager.offload()
                    assert device_nbytes(manager) == 0
            optimizer.step()
            optimizer.zero_grad()
            if phases:
                manager.offload()
                assert device_nbytes(manager) == 0
                if step % 2:
                    manager.onload()
                audit(manager)
        assert_equal(dict(manager.stream_weights()), untied(manager.state_dict(), model))
        return losses, copied(manager.state_dict()), manager.timeline().plan_misses  # type: ignore[union-attr]


@pytest.mark.few(1)
@pytest.mark.parametrize("task", [Task(), Task(device_nbytes=8 << 20), Task("frozen", config={"precision": "bf16"})])
def test_over_ranks(pair: Team, task: Task) -> None:
    assert_equal(pair.run(shared, task, True), pair.run(shared, task, False))


def leave_device(pipe: StagedPipeline, manager: chunkmem.ChunkManager, step: int) -> None:
    manager.offload()
    assert device_nbytes(manager) == 0
    assert_equal(dict(manager.stream_weights()), manager.state_dict())
    if step % 2:
        manager.onload()


@pytest.mark.full
@pytest.mark.few(1)
@pytest.mark.parametrize("cap_nbytes", [48 << 10, staged_training.AMPLE])
def test_over_pipeline_stages(pair: Team, cap_nbytes: int) -> None:
    task = StagedTask(device_nbytes=cap_nbytes, checkpoint="auto")
    for found, expected in zip(
        pair.run(staged_training.train, task, leave_device), pair.run(staged_training.train, task), strict=True
    ):
        assert_equal((found.losses, found.weights, found.states), (expected.losses, expected.weights, expected.states))
        assert found.misses == expected.misses
