"""A third tier below HOST: bit for bit plain PyTorch under caps on HOST down to the smallest, and as predicted."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.data.errors import CapacityError
from chunkmem.data.types import Role, Tier
from chunkmem.plan.model import Lane
from tests.helpers.audit import assert_as_predicted, audit
from tests.helpers.lanes import adversarial
from tests.helpers.spread import spread
from tests.helpers.training import (
    STEPS,
    VARIANTS,
    Chunked,
    Trainer,
    Variant,
    assert_same,
    footprint,
    repeats,
    train_chunked,
    train_plain,
    variants_of,
)
from tests.helpers.twins import Blocks, Twin, assert_equal, config, copied, cpu_only, features
from tests.helpers.zoo import ZOO, ZooModel

CASES = {case.name: case for case in ZOO}
PLAIN = VARIANTS[0]
HOSTS = ("states away", "a quarter", "smallest")
CAPACITY = 1 << 30


def group_nbytes(case: ZooModel) -> int:
    """What an update of the largest group takes on HOST: weights, gradients and two states."""
    with chunkmem.ChunkManager(capped(case, 32 << 20, 64 << 20, None)) as manager:
        Trainer(case, PLAIN, Chunked(manager)).step()
        sizes: dict[int, int] = {}
        for chunk in manager.runtime.memory.store.chunks.values():
            sizes[chunk.id.group] = sizes.get(chunk.id.group, 0) + chunk.nbytes
    return max(sizes.values())


def capped(case: ZooModel, device_nbytes: int, host_nbytes: int, path: Path | None, **opts: Any) -> chunkmem.Config:
    """Caps on three tiers; `path` None: two."""
    memory: dict[str, Any] = {"device": device_nbytes, "host": host_nbytes}
    if path is not None:
        memory["disk"] = {"path": str(path), "capacity": CAPACITY}
    values = {"memory": memory, "default_chunk_size": case.chunk_numel, "client": {"opts": opts}}
    return chunkmem.Config.from_dict(values)


def host_nbytes(case: ZooModel, variant: Variant, host: str) -> int:
    sizes = footprint(case, variant)
    share = {"states away": 2.0, "a quarter": 1.0, "smallest": 0.0}[host]
    return max(group_nbytes(case), int(share * sizes.param_nbytes))


# The numbers.


@pytest.mark.few(1)
@cpu_only
@spread(case=ZOO, host=HOSTS, variant=VARIANTS)
def test_training_is_plain_pytorch_bit_for_bit(case: ZooModel, host: str, variant: Variant, tmp_path: Path) -> None:
    """Of model data, four times the weights, HOST has half, a quarter, or one group; every planned step is followed."""
    if variant not in variants_of(case):
        variant = PLAIN
    device_nbytes = footprint(case, variant).required_nbytes + 2 * case.slab_nbytes
    made = capped(case, device_nbytes, host_nbytes(case, variant, host), tmp_path)
    assert_same(train_chunked(case, variant, STEPS, made), train_plain(case, variant))
    assert list(tmp_path.iterdir()) == [], "a file stays behind"


@pytest.mark.few(1)
@cpu_only
@spread(case=[CASES[name] for name in ("gpt", "cnn", "t5", "loose")], seed=range(8), overlap=[True, False])
def test_late_copies(case: ZooModel, seed: int, overlap: bool, tmp_path: Path) -> None:
    """What reads or writes too early meets NaN, or what was there before."""
    device_nbytes = footprint(case, PLAIN).required_nbytes + (seed % 3) * case.slab_nbytes
    host = host_nbytes(case, PLAIN, HOSTS[seed % 3])
    made = capped(case, device_nbytes, host, tmp_path, overlap_optimizer=overlap)
    with chunkmem.ChunkManager(made, make_lanes=adversarial(seed)) as manager:
        for pool in manager.runtime.memory.store.pools.values():
            pool.poison = True
        outcome = Trainer(case, PLAIN, Chunked(manager, follows=repeats(case))).run()
        if repeats(case):
            moved = manager.timeline().moved_nbytes
            assert moved[Lane.DISK_READ] > 0 < moved[Lane.DISK_WRITE]
    assert_same(outcome, train_plain(case, PLAIN))


def with_disk(path: Path, *, device: int, host: int, **keys: Any) -> chunkmem.Config:
    memory = {"device": device, "host": host, "disk": {"path": str(path), "capacity": CAPACITY}}
    return config(device, **{"memory": memory, **keys})


SLAB = 4 * 256
TIGHT = {"device": 4 * SLAB, "host": 5 * SLAB}


@pytest.mark.few(1)
@cpu_only
@spread(precision=["fp32", "bf16", "fp16"], max_grad_norm=[0.0, 0.05], overlap=[True, False])
def test_precisions(precision: str, max_grad_norm: float, overlap: bool, tmp_path: Path) -> None:
    """Masters, too, are away; a norm over all gradients reads those on DISK where they are, and misses no plan."""
    keys = {"precision": precision, "client": {"opts": {"overlap_optimizer": overlap}}}

    def trained(made: chunkmem.Config, *, follows: bool) -> Any:
        with chunkmem.ChunkManager(made) as manager:
            twin = Twin(manager, Blocks, max_grad_norm=max_grad_norm)
            losses = []
            for seed in range(6):
                loss = twin.loss(features(seed))
                twin.backward(loss)
                twin.update()
                losses.append(loss.item())
                timeline = manager.timeline()
                # In float32 gradients are scaled where they are, as torch does: those on DISK are brought for it.
                if follows and seed > 2 and not (precision == "fp32" and max_grad_norm):
                    assert_as_predicted(manager)
                    assert timeline.moved_nbytes[Lane.DISK_READ] > 0
            return losses, copied(twin.left())

    ample = trained(config(8 << 20, **keys), follows=False)
    caps = TIGHT if precision == "fp32" else {"device": 4 * SLAB, "host": 6 * SLAB}
    assert_equal(trained(with_disk(tmp_path, **caps, **keys), follows=True), ample)


# What a user does besides training.


def saved_and_loaded(twin: Twin) -> Any:
    losses = twin.steps(0, 1)
    saved = twin.left()["weights"], copied(twin.optimizer.state_dict())
    losses += twin.steps(2)
    if twin.manager is None:
        twin.model.load_state_dict(saved[0])
    else:
        twin.manager.load_state_dict(saved[0], model=twin.model)
    twin.optimizer.load_state_dict(saved[1])
    return losses + twin.steps(2, 3)


def evaluated(twin: Twin) -> Any:
    losses = twin.steps(0, 1)
    for seed in range(4):
        twin.model.eval()
        with torch.no_grad():
            losses.append(twin.loss(features(seed)).item())
        twin.model.train()
        losses += twin.steps(seed)
    return losses


def accumulated(twin: Twin) -> Any:
    losses = []
    for step in range(4):
        for part in range(3):
            loss = twin.loss(features(3 * step + part)) / 3
            loss.backward()
            losses.append(loss.item())
        twin.update()
    return losses


def clipped(twin: Twin) -> Any:
    norms: list[Tensor] = []
    for seed in range(4):
        twin.loss(features(seed)).backward()
        norms.append(twin.clip(0.01))
        twin.update()
    return norms


def gradients_read(twin: Twin) -> Any:
    found = []
    for seed in range(4):
        twin.loss(features(seed)).backward()
        found.append([parameter.grad.detach().clone() for parameter in twin.model.parameters()])
        for parameter in twin.model.parameters():
            parameter.grad.mul_(0.5)
        twin.update()
    return found


def gradients_in_lists(twin: Twin) -> Any:
    """Operators over all gradients at once, of which memory has room for a few."""
    found: list[Any] = []
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for seed in range(4):
        scaler.scale(twin.loss(features(seed))).backward()
        scaler.unscale_(twin.optimizer)
        grads = [parameter.grad for parameter in twin.model.parameters()]
        found += torch._foreach_norm(grads)
        torch._foreach_mul_(grads, 0.5)
        torch._foreach_add_(grads, [grad.clone() for grad in grads])
        found.append(torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 0.01, foreach=True))
        first, last = grads[0].flatten()[:4], grads[-1].flatten()[:4]
        first.add_(last)
        found.append([torch.stack([first, last]), *torch._foreach_abs(grads)])
        scaler.step(twin.optimizer)
        scaler.update()
        twin.optimizer.zero_grad()
    return found


def zeroed(twin: Twin) -> Any:
    losses = []
    for seed in range(4):
        loss = twin.loss(features(seed))
        loss.backward()
        twin.optimizer.step()
        twin.optimizer.zero_grad(set_to_none=False)
        losses.append(loss.item())
    return losses


def weights_touched(touch: Callable[[Sequence[nn.Parameter]], object]) -> Callable[[Twin], Any]:
    """Return a scenario in which a script uses all weights itself after each step."""

    def scenario(twin: Twin) -> Any:
        found: list[Any] = []
        for seed in range(4):
            found += twin.steps(seed)
            found.append(touch(list(twin.model.parameters())))
        return found

    scenario.__name__ = touch.__name__
    return scenario


def clamped(params: Sequence[nn.Parameter]) -> None:
    for parameter in params:
        parameter.data.clamp_(-0.3, 0.3)


def scaled(params: Sequence[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in params:
            parameter.mul_(0.99)


def replaced(params: Sequence[nn.Parameter]) -> None:
    for parameter in params:
        parameter.data = parameter.data * 0.98


def averaged(params: Sequence[nn.Parameter]) -> list[Tensor]:
    return [parameter.data.clone().mul_(0.9) for parameter in params]


def as_numpy(params: Sequence[nn.Parameter]) -> list[float]:
    return [float(parameter.detach().numpy().sum()) for parameter in params]


TOUCHES = (clamped, scaled, replaced, averaged, as_numpy)


@pytest.mark.few(1)
@cpu_only
@pytest.mark.parametrize(
    "scenario",
    [
        *(saved_and_loaded, evaluated, accumulated, clipped, gradients_read, gradients_in_lists, zeroed),
        *map(weights_touched, TOUCHES),
    ],
    ids=lambda each: each.__name__,
)
def test_calls_around_training(scenario: Callable[[Twin], Any], tmp_path: Path) -> None:
    plain = Twin(None, Blocks)
    expected = copied(scenario(plain)), plain.left()
    with chunkmem.ChunkManager(with_disk(tmp_path, **TIGHT)) as manager:
        twin = Twin(manager, Blocks)
        assert_equal((copied(scenario(twin)), twin.left()), expected)
        assert manager.memory().disk.peak_nbytes > 0


@cpu_only
def test_a_checkpoint_is_read_from_where_the_chunks_are(tmp_path: Path) -> None:
    """Saving moves nothing, and another manager, without DISK, continues to the same bits."""
    folder = tmp_path / "saved"
    (tmp_path / "disk").mkdir()
    plain = Twin(None, Blocks)
    expected = plain.steps(0, 1, 2, 3, 4, 5), plain.left()
    with chunkmem.ChunkManager(with_disk(tmp_path / "disk", **TIGHT)) as manager:
        twin = Twin(manager, Blocks)
        losses = twin.steps(0, 1, 2, 3)
        before = manager.memory().moved
        manager.save(folder, twin.optimizer)
        assert manager.memory().moved == before
        twin.steps(9)
    with chunkmem.ChunkManager(config(8 << 20)) as manager:
        twin = Twin(manager, Blocks)
        manager.load(folder, twin.optimizer)
        assert_equal((losses + twin.steps(4, 5), twin.left()), expected)
    with chunkmem.ChunkManager(with_disk(tmp_path / "disk", **TIGHT)) as manager:
        twin = Twin(manager, Blocks)
        twin.steps(8)
        manager.load(folder, twin.optimizer)
        assert_equal((losses + twin.steps(4, 5), twin.left()), expected)


# Caps.


@pytest.mark.few(1)
@cpu_only
@spread(case=ZOO)
def test_the_smallest_host_holds_what_one_update_touches(case: ZooModel, tmp_path: Path) -> None:
    """One byte less is an error that names both numbers; nothing else of HOST is needed."""
    device_nbytes, smallest = footprint(case, PLAIN).required_nbytes, group_nbytes(case)
    with chunkmem.ChunkManager(capped(case, device_nbytes, smallest, tmp_path)) as manager:
        trainer = Trainer(case, PLAIN, Chunked(manager))
        trainer.step()
        assert manager.memory().host.peak_nbytes <= smallest
    with chunkmem.ChunkManager(capped(case, device_nbytes, smallest - 1, tmp_path)) as manager:
        trainer = Trainer(case, PLAIN, Chunked(manager))
        with pytest.raises(CapacityError, match="on HOST") as raised:
            trainer.step()
        assert (raised.value.cap_nbytes, raised.value.needed_nbytes) == (smallest - 1, smallest)


@cpu_only
def test_a_full_disk_is_said_with_its_key(tmp_path: Path) -> None:
    made = with_disk(tmp_path, **TIGHT)
    small = replace(made, memory=replace(made.memory, disk=replace(made.memory.disk, capacity=8 * SLAB)))
    with chunkmem.ChunkManager(small) as manager, pytest.raises(CapacityError, match="raise memory") as raised:
        Twin(manager, Blocks).steps(0)
    assert raised.value.needed_nbytes > raised.value.cap_nbytes


@cpu_only
def test_nothing_is_written_while_all_fits(tmp_path: Path) -> None:
    with chunkmem.ChunkManager(with_disk(tmp_path, device=8 << 20, host=8 << 20)) as manager:
        twin = Twin(manager, Blocks)
        twin.steps(0, 1, 2)
        moved = manager.memory().moved
    assert (moved.read_nbytes, moved.written_nbytes) == (0, 0)


@pytest.mark.full
@cpu_only
def test_traffic_stays_when_host_has_room(tmp_path: Path) -> None:
    """The more HOST has, the less is read and written a step, and nothing from where all is there."""
    traffic = []
    for host in (5, 12, 24, 40, 80):
        with chunkmem.ChunkManager(with_disk(tmp_path, device=4 * SLAB, host=host * SLAB)) as manager:
            twin = Twin(manager, Blocks)
            twin.steps(*range(5))
            assert_as_predicted(manager)
            audit(manager)
            moved = manager.timeline().moved_nbytes
            traffic.append(moved[Lane.DISK_READ] + moved[Lane.DISK_WRITE])
    assert traffic == sorted(traffic, reverse=True)
    assert traffic[0] > 0 == traffic[-1]


@cpu_only
def test_the_memory_report_has_a_line_for_it(tmp_path: Path) -> None:
    with chunkmem.ChunkManager(with_disk(tmp_path, **TIGHT)) as manager:
        twin = Twin(manager, Blocks)
        twin.steps(0, 1, 2)
        report = manager.memory()
        chunks = manager.runtime.memory.store.chunks.values()
        there = sum(chunk.nbytes for chunk in chunks if Tier.DISK in chunk.replicas)
        masters = [chunk for chunk in chunks if chunk.id.role is Role.MASTER]
    assert masters == []
    assert report.disk is not None
    assert report.disk.now_nbytes == there <= report.disk.peak_nbytes <= CAPACITY
    assert "DISK " in str(report)
    assert "read from DISK" in str(report)


@cpu_only
def test_no_descriptor_is_left(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with chunkmem.ChunkManager(with_disk(tmp_path, **TIGHT)) as manager:
        before = descriptors()
        Twin(manager, Blocks).steps(0, 1)
    assert descriptors() <= before
