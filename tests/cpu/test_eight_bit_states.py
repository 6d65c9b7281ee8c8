"""Training with optimizer states in 8 bits: the same bits wherever and however it runs; what is shown and saved."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.data.types import Role, Tier, UpdateForm
from chunkmem.optim.codes import BLOCK
from chunkmem.plan.model import Lane
from tests.helpers.ranks import Team
from tests.helpers.saved_training import Saved, assert_same
from tests.helpers.spread import spread
from tests.helpers.training import compute_device
from tests.helpers.twins import AMPLE_NBYTES, Blocks, Twin, assert_equal, config, copied, cpu_only, features

EIGHT: dict[str, Any] = {"optimizer": {"params": {"states": "8bit"}}}
KINDS = ("fp32", "bf16", "fp16", "bf16 alone")
"""Precisions, and bf16 without master weights."""


def keys_of(kind: str, **params: Any) -> dict[str, Any]:
    if kind == "bf16 alone":
        params["master"] = "none"
    precision = kind.removesuffix(" alone")
    return {"precision": precision, "optimizer": {"params": {"states": "8bit", **params}}}


def trained(device_nbytes: int, kind: str, *, overlap: bool | None = None, steps: int = 8, **params: Any) -> Any:
    """Losses, weights and states after some steps, the bytes a step needs, and whether updates were overlapped."""
    client = {"opts": {"overlap_optimizer": overlap}}
    given = {"client": client, **keys_of(kind, use_hybrid_adam=not overlap, **params)}
    with chunkmem.ChunkManager(config(device_nbytes, **given)) as manager:
        twin = Twin(manager, Blocks)
        losses = []
        for seed in range(steps):
            loss = twin.loss(features(seed))
            twin.backward(loss)
            twin.update()
            losses.append(loss.item())
        timeline = manager.timeline()
        assert timeline is not None
        is_overlapped = any(span.lane is Lane.HOST_UPDATE for span in timeline.spans)
        return (losses, twin.left()), manager.memory().device.required_nbytes, is_overlapped


@pytest.mark.few(1)
@cpu_only
@pytest.mark.parametrize("kind", KINDS)
def test_neither_caps_nor_overlap_change_a_bit(kind: str) -> None:
    expected, smallest_nbytes, _ = trained(AMPLE_NBYTES, kind)
    assert expected[0][-1] < expected[0][0]
    assert_equal(trained(smallest_nbytes, kind)[0], expected)
    found, _, is_overlapped = trained(smallest_nbytes, kind, overlap=True)
    assert is_overlapped
    assert_equal(found, expected)
    assert trained(AMPLE_NBYTES, kind, seed=1)[0][0] != expected[0]


@cpu_only
def test_small_updates_of_bf16_weights_are_not_lost() -> None:
    """Each is a thousandth of what bf16 resolves: to nearest nothing would change, stochastically the mean does."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, **keys_of("bf16 alone"))) as manager:
        with manager.init():
            model = nn.Linear(256, 256, bias=False)
            nn.init.ones_(model.weight)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=2.0**-18, weight_decay=0.0)
        for _ in range(64):
            manager.backward(model(torch.ones(1, 256, device=compute_device())).sum())
            optimizer.step()
            optimizer.zero_grad()
        off = manager.state_dict(model)["weight"].double() - 1
        chunks = manager.runtime.memory.store.chunks
        assert not any(key.role is Role.MASTER for key in chunks)
    assert float(off.mean()) == pytest.approx(-64 * 2.0**-18, rel=0.05)
    assert set(off.unique().tolist()) <= {-(2.0**-8) * n for n in range(5)}


@pytest.mark.parametrize(
    ("keys", "form"),
    [
        ({}, UpdateForm.FP32),
        ({"precision": "bf16"}, UpdateForm.MASTER),
        (keys_of("fp32"), UpdateForm.CODES),
        (keys_of("bf16"), UpdateForm.CODES),
        (keys_of("bf16 alone"), UpdateForm.CODES_ALONE),
        ({"precision": "bf16", "master_weights": False}, UpdateForm.FP32),
    ],
    ids=lambda value: value.value if isinstance(value, UpdateForm) else None,
)
@pytest.mark.parametrize("chunk_size", ["auto", 1 << 10])
def test_a_trace_tells_what_an_update_passes_over(keys: dict[str, Any], form: UpdateForm, chunk_size: Any) -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, default_chunk_size=chunk_size, **keys)) as manager:
        twin = Twin(manager, Blocks)
        twin.steps(0, 1)
        trace = manager.trace
        assert trace is not None
        assert trace.update_form is form


def test_states_take_little_more_than_a_byte() -> None:
    """Codes, scales of blocks of 256, and chunks of one size for groups of one size."""
    keys = {**EIGHT, "default_chunk_size": 1 << 16}
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, **keys)) as manager:
        with manager.init():
            model = nn.Sequential(*(nn.Linear(256, 254) if n % 2 else nn.Linear(254, 256) for n in range(4)))
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        manager.backward(model(torch.randn(2, 254, device=compute_device())).square().mean())
        optimizer.step()
        chunks = manager.runtime.memory.store.chunks
        sizes = {role: {c.nbytes for c in chunks.values() if c.id.role == role} for role in ("exp_avg", "exp_avg_sq")}
        (param_nbytes,) = {c.nbytes for c in chunks.values() if c.id.role is Role.PARAM}
        for (nbytes,) in sizes.values():
            assert 1 + 4 / BLOCK < nbytes / (param_nbytes // 4) < 1.04


def test_a_step_is_close_to_that_of_fp32_states() -> None:
    """Losses differ by less than a hundredth of the first one; the last ones are a thousandth of it."""
    plain = Twin(None, Blocks)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, **EIGHT)) as manager:
        twin = Twin(manager, Blocks)
        first = plain.step(features(99))
        twin.step(features(99))
        for seed in range(30):
            assert abs(twin.step(features(seed)) - plain.step(features(seed))) < 0.01 * first
        for name, value in plain.weights().items():
            assert (twin.weights()[name] - value).abs().max() < 0.05


def test_the_state_dict_is_torchs_and_back_to_the_bit() -> None:
    """Values in fp32 go to plain PyTorch and come back, and training continues as if they had not."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, **EIGHT)) as manager:
        twin = Twin(manager, Blocks)
        twin.steps(0, 1)
        weights, state = twin.weights(), copied(twin.optimizer.state_dict())
        entry = state["state"][0]
        assert (entry["exp_avg"].dtype, entry["exp_avg"].shape) == (torch.float32, weights["inner.weight"].shape)
        plain = Twin(None, Blocks)
        plain.model.load_state_dict(weights)
        plain.optimizer.load_state_dict(copied(state))
        plain.step(features(2))
        expected = twin.steps(2, 3), twin.left()
    plain.optimizer.load_state_dict(copied(state))
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, **EIGHT)) as manager:
        again = Twin(manager, Blocks)
        manager.load_state_dict(weights, again.model)
        again.optimizer.load_state_dict(plain.optimizer.state_dict())
        assert_equal((again.steps(2, 3), again.left()), expected)


def test_optimizer_state_reads_and_writes_values() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, **EIGHT)) as manager:
        twin = Twin(manager, Blocks)
        twin.steps(0)
        weight = twin.model.inner.weight
        state = twin.optimizer.state[weight]
        assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
        value = torch.linspace(-1, 1, weight.numel()).view(weight.shape)
        state["exp_avg"] = value
        assert 0 < (state["exp_avg"] - value).abs().max() <= 1 / 32
        state["exp_avg"] = torch.full_like(value, 0.25)
        assert torch.equal(state["exp_avg"], torch.full_like(value, 0.25))
        with pytest.raises(chunkmem.StateError, match="exp_avg is"):
            state["exp_avg"] = torch.zeros(3)


class Permuted(nn.Module):
    """A parameter that is not row after row in memory, a tied and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).mean(dim=(2, 3))
        return self.tied(torch.tanh(self.last(self.frozen(x))))


def test_strides_ties_and_frozen_parameters() -> None:
    def run(device_nbytes: int) -> Any:
        with chunkmem.ChunkManager(config(device_nbytes, **EIGHT)) as manager:
            twin = Twin(manager, Permuted)
            for seed in range(4):
                twin.step(features(seed, shape=(2, 3, 6, 6)))
            states = copied(twin.optimizer.state_dict())
            exp_avg = twin.optimizer.state[twin.model.conv.weight]["exp_avg"]
            found = copied({"exp_avg": exp_avg}), twin.left()
            twin.optimizer.load_state_dict(states)
            assert_equal(copied(twin.optimizer.state_dict())["state"], states["state"])
            return found, manager.memory().device.required_nbytes

    expected, smallest_nbytes = run(AMPLE_NBYTES)
    assert_equal(run(smallest_nbytes)[0], expected)
    plain = Twin(None, Permuted)
    for seed in range(4):
        plain.step(features(seed, shape=(2, 3, 6, 6)))
    value = plain.optimizer.state[plain.model.conv.weight]["exp_avg"].cpu()
    assert (expected[0]["exp_avg"] - value).abs().max() < 0.2 * value.abs().max()


def test_excluded_parameters_have_states_in_fp32() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, **EIGHT)) as manager:
        with manager.init():
            torch.manual_seed(0)
            inner = nn.Linear(16, 16)
            with manager.exclude():
                head = nn.Linear(16, 4)
        model = nn.Sequential(inner, head)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        before = head.weight.detach().clone()
        manager.backward(model(features()).square().mean())
        optimizer.step()
        assert optimizer.state[head.weight]["exp_avg"].dtype is torch.float32
        assert not torch.equal(before, head.weight)


def test_float64_weights_are_updated_in_float64() -> None:
    plain = nn.Linear(16, 4, dtype=torch.float64)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, **EIGHT)) as manager:
        with manager.init():
            model = nn.Linear(16, 4, dtype=torch.float64)
        manager.load_state_dict(plain.state_dict(), model)
        ours = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        x = features().double()
        manager.backward(model(x).square().mean())
        plain.to(compute_device())(x).square().mean().backward()
        ours.step()
        theirs.step()
        assert_equal(copied(manager.state_dict(model)), copied(plain.state_dict()))


@cpu_only
@pytest.mark.parametrize("kind", ["bf16", "bf16 alone"])
def test_what_users_do_between_steps_has_the_same_bits_under_any_cap(kind: str) -> None:
    """Writes to weights, loaded weights and states, frozen layers, averages, gradients clipped or thrown away."""

    def run(device_nbytes: int) -> Any:
        with chunkmem.ChunkManager(config(device_nbytes, **keys_of(kind))) as manager:
            twin = Twin(manager, Blocks)
            ema = chunkmem.EMA(manager, 0.9)
            twin.steps(0, 1)
            with torch.no_grad():
                twin.model.head.weight.mul_(0.5)
            twin.model.inner.weight.data.clamp_(-0.1, 0.1)
            twin.steps(2)
            ema.update()
            weights, states = twin.weights(), copied(twin.optimizer.state_dict())
            twin.backward(twin.loss(features(3)))
            twin.clip(1e-3)
            twin.update()
            twin.backward(twin.loss(features(4)))
            twin.optimizer.zero_grad()
            manager.load_state_dict(weights, twin.model)
            twin.optimizer.load_state_dict(states)
            manager.freeze(twin.model.inner)
            twin.steps(5, 6)
            manager.unfreeze(twin.model.inner)
            losses = twin.steps(7, 8)
            return (losses, twin.left()), manager.memory().device.required_nbytes

    expected, smallest_nbytes = run(AMPLE_NBYTES)
    assert_equal(run(smallest_nbytes)[0], expected)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_stays_visible(value: float) -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, **EIGHT)) as manager:
        twin = Twin(manager, Blocks)
        twin.steps(0)
        loss = twin.loss(features(1))
        twin.backward(loss)
        weight = twin.model.inner.weight
        grad = weight.grad.clone()
        grad[0, 0] = value
        weight.grad = grad
        twin.update()
        assert twin.weights()["inner.weight"].isnan().sum() == 1
        assert twin.optimizer.state[weight]["exp_avg"].isnan().all()
        assert not twin.optimizer.state[twin.model.head.weight]["exp_avg"].isnan().any()


def test_options_given_to_the_optimizer_win() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Twin(manager, Blocks, states="8bit")
        twin.steps(0)
        chunks = manager.runtime.memory.store.chunks.values()
        assert {c.dtype for c in chunks if c.id.role.is_state} == {torch.uint8}
        with pytest.raises(chunkmem.ConfigError, match=r'optimizer\.params\.states is .4bit.*"fp32" or "8bit"'):
            chunkmem.Adam(twin.model.parameters(), manager=manager, states="4bit")


# Checkpoints: what chunks hold is fp32 values in files, whatever it is in memory.


HOW = {
    "plain": {},
    "tiled": {"tiled": True},
    "small": {"device_nbytes": 220 << 10},
    "bf16": {"precision": "bf16"},
    "built in bf16": {"precision": "bf16", "built_low": True},
    "fp16": {"precision": "fp16"},
    "bf16 alone": {"precision": "bf16", "master": "none"},
    "built and trained in bf16 alone": {"precision": "bf16", "master": "none", "built_low": True},
}


@pytest.mark.few(2)
@spread(kind=HOW, asynchronous=[False, True])
def test_a_resumed_training_continues_to_the_bit(tmp_path: Path, kind: str, asynchronous: bool) -> None:
    how = Saved(states="8bit", **HOW[kind])
    training = how.open()
    training.run(3)
    saving = training.manager.save(tmp_path / "saved", training.optimizer, asynchronous=asynchronous)
    training.run(1, seed=5)
    expected = training.state()
    if asynchronous:
        saving.wait()
    again = how.open()
    again.manager.load(tmp_path / "saved", again.optimizer)
    again.run(1, seed=5)
    assert_same(again.state(), expected)
    for one in (training, again):
        one.manager.close()


@pytest.mark.parametrize("states", ["8bit", "fp32"])
def test_any_checkpoint_can_be_loaded(tmp_path: Path, states: str) -> None:
    """Into fp32 states values are those that codes stood for; into 8 bits they are rounded."""
    first = Saved("bf16", states=states).open()
    first.run(3)
    first.manager.save(tmp_path / "saved", first.optimizer)
    other = Saved("bf16", states="fp32" if states == "8bit" else "8bit").open()
    other.manager.load(tmp_path / "saved", other.optimizer)
    one, two = first.state(), other.state()
    if states == "8bit":
        assert_same(one, two)
    else:
        assert one.keys() == two.keys()
        for name, value in one.items():
            off = (two[name].double() - value.double()).abs().max()
            assert bool(off > 0) is ("exp_avg" in name and bool(value.any()))
            assert off <= value.abs().max() / 16
    other.run(1)
    for training in (first, other):
        training.manager.close()


@pytest.mark.parametrize("master", ["none", "fp32"])
def test_checkpoints_with_and_without_master_weights(tmp_path: Path, master: str) -> None:
    """Master weights are rounded to nearest where there are none; where there are, they begin as what was saved."""
    low = Saved("bf16", states="8bit", master=master)
    other = replace(low, master="fp32" if master == "none" else "none")
    first, second = low.open(), other.open()
    first.run(3)
    first.manager.save(tmp_path / "saved", first.optimizer)
    second.manager.load(tmp_path / "saved", second.optimizer)
    one, two = first.state(), second.state()
    for name, value in one.items():
        rounded = name.startswith("model.") and "norm" not in name and value.is_floating_point() and master == "fp32"
        assert torch.equal(value.bfloat16().to(value.dtype) if rounded else value, two[name]), name
    second.run(1)
    for training in (first, second):
        training.manager.close()


def shared(rank: int, how: Saved, path: Path) -> Any:
    training = how.open()
    training.run(3)
    training.manager.save(path, training.optimizer)
    found = training.state()
    training.manager.close()
    return found


@pytest.mark.few(1)
@spread(kind=["fp32", "bf16", "bf16 alone"], sizes=[(2,), (2, 1)])
def test_ranks_change_no_bit(pair: Team, tmp_path: Path, kind: str, sizes: tuple[int, ...]) -> None:
    """Both have the same batch, so that the mean of their gradients is that of one; stages have half the model each."""
    how = Saved(kind.removesuffix(" alone"), states="8bit", master="none" if kind.endswith("alone") else "fp32")
    found = pair.run(shared, replace(how, sizes=sizes), tmp_path / "saved")
    one = how.open()
    one.manager.load(tmp_path / "saved", one.optimizer)
    loaded = one.state()
    one.manager.close()
    for state in found:
        assert_same(state, loaded)
    if len(sizes) == 1:
        assert_same(shared(0, how, tmp_path / "alone"), loaded)


def repartitioned(rank: int, path: Path) -> Any:
    training = Saved("bf16", sizes=(2, 1), states="8bit").open()
    training.run(3)
    before = training.state()
    training.pipe = training.pipe.repartition(stages=1)
    found = before, training.state()
    training.run(1, seed=3)
    training.manager.close()
    return found


def test_states_move_with_a_repartition(pair: Team, tmp_path: Path) -> None:
    for before, after in pair.run(repartitioned, tmp_path):
        assert_same(before, after)


def test_disk_holds_states_in_8_bits(tmp_path: Path) -> None:
    large = Saved("bf16", states="8bit").open()
    small = Saved("bf16", states="8bit", device_nbytes=160 << 10, host_nbytes=200 << 10, disk=tmp_path).open()
    for training in (large, small):
        training.run(4)
    assert_same(small.state(), large.state())
    assert small.manager.memory().disk.peak_nbytes > 0
    for training in (large, small):
        training.manager.close()


@cpu_only
@pytest.mark.parametrize(("kind", "bytes_a_parameter"), [("bf16", 8), ("bf16 alone", 6)])
def test_a_planned_step_peaks_at_these_bytes_a_parameter(kind: str, bytes_a_parameter: int) -> None:
    """Gradients take the place of weights that master weights can be rounded to; states are 1/32 more than a byte."""
    with chunkmem.ChunkManager(
        config(3 << 13, default_chunk_size=1 << 12, **keys_of(kind, use_hybrid_adam=False))
    ) as manager:
        with manager.init():
            model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(24)))
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-3)
        for seed in range(6):
            manager.backward(model(features(seed, shape=(4, 64))).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        numel, chunk_nbytes = 24 * 64 * 64, 2 << 12
        timeline = manager.timeline()
        assert manager.plan is not None
        assert timeline is not None
        assert timeline.plan_misses == 0
        peak_nbytes = timeline.peak_nbytes[Tier.HOST]
    assert peak_nbytes <= (bytes_a_parameter + 2 / 16) * numel + 2 * chunk_nbytes
