"""bf16 and fp16 with float32 master weights: the numbers, whatever is where, and what users may do with the weights."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import chunkmem
from chunkmem.data.trace import Kind
from chunkmem.data.types import ChunkId, Role
from chunkmem.estimate.rehearse import Setting, rehearse
from chunkmem.optim.kernels import Kernels
from chunkmem.optim.scaler import LossScaler
from tests.cpu.test_estimate_truth import ONE_BATCH, as_model
from tests.helpers.audit import assert_as_predicted, audit
from tests.helpers.low_precision import LowPlain
from tests.helpers.training import (
    HOST_NBYTES,
    STEPS,
    Chunked,
    Outcome,
    Trainer,
    Variant,
    assert_same,
    repeats,
    variants_of,
)
from tests.helpers.zoo import ZOO, ZooModel

AMPLE_NBYTES = 32 << 20


def config(case: ZooModel, device_nbytes: int, precision: str = "bf16") -> chunkmem.Config:
    memory = {"device": device_nbytes, "host": HOST_NBYTES}
    keys = {"precision": precision, "memory": memory, "default_chunk_size": 2 * case.chunk_numel}
    return chunkmem.Config.from_dict(keys | ({"fp16": FP16} if precision == "fp16" else {}))


FP16 = {"enabled": True, "initial_scale_power": 14, "loss_scale_window": 2}


@functools.cache
def plain(case: ZooModel, variant: Variant, precision: str) -> Outcome:
    if precision == "bf16":
        return Trainer(case, variant, LowPlain(torch.bfloat16)).run(STEPS)
    scaler = LossScaler(chunkmem.Config.from_dict({"fp16": FP16}).fp16)
    return Trainer(case, variant, LowPlain(torch.float16, scaler)).run(STEPS)


class Scaling(Chunked):
    """Only `manager.backward` knows the loss scale; a step that is skipped cannot follow its plan."""

    num_skipped = 0

    def backward(self, loss: torch.Tensor, *, last: bool, by_manager: bool) -> None:
        self.manager.backward(loss, last=last)

    def after_step(self) -> None:
        skipped, self.num_skipped = self.num_skipped, self.manager.num_skipped_steps
        if skipped == self.num_skipped:
            super().after_step()


@functools.cache
def chunked(case: ZooModel, variant: Variant, device_nbytes: int, precision: str) -> tuple[Outcome, int]:
    """Train; return what came out and the smallest cap known to be needed."""
    with chunkmem.ChunkManager(config(case, device_nbytes, precision)) as manager:
        outcome = Trainer(case, variant, Scaling(manager, follows=repeats(case))).run(STEPS)
        return outcome, manager.memory().device.required_nbytes


NEEDS_ONE_DTYPE = ("loose", "direct")
"""They use parameters and blocks outside of the model's own forward, where nothing casts: plain PyTorch fails too."""
LOWERED = tuple(case for case in ZOO if case.name not in NEEDS_ONE_DTYPE)
ORDINARY = ("gpt-unused_branch", "lstm-half_frozen")
"""Besides all plain ones."""
CASES = [
    pytest.param(
        case,
        variant,
        id=f"{case.name}-{variant.name}",
        marks=[] if variant.name == "plain" or f"{case.name}-{variant.name}" in ORDINARY else [pytest.mark.full],
    )
    for case in LOWERED
    for variant in variants_of(case)
]


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.full)])
@pytest.mark.parametrize(("case", "variant"), CASES)
def test_training_is_that_of_plain_pytorch_with_master_weights(
    case: ZooModel, variant: Variant, precision: str
) -> None:
    outcome, required_nbytes = chunked(case, variant, AMPLE_NBYTES, precision)
    assert_same(outcome, plain(case, variant, precision))
    tight, _ = chunked(case, variant, required_nbytes, precision)
    assert_same(tight, plain(case, variant, precision))


ESTIMATED = [
    pytest.param(
        case, variant, id=f"{case.name}-{variant.name}", marks=[] if variant.name == "plain" else [pytest.mark.full]
    )
    for case in LOWERED
    for variant in ONE_BATCH
    if case.name != "moe"
    and variant.name in ("plain", "checkpoint")
    and (case.has_blocks or variant.early_stop is None)
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("case", "variant"), ESTIMATED)
def test_the_estimate_has_the_same_moments_and_bytes(case: ZooModel, variant: Variant) -> None:
    with chunkmem.ChunkManager(config(case, AMPLE_NBYTES)) as manager:
        trainer = Trainer(case, variant, Chunked(manager))
        trainer.step()
        trainer.evaluate()  # which ends the record
        trace = manager.trace
    assert trace is not None
    predicted = rehearse(as_model(case, variant), Setting(precision="bf16", chunk_numel=2 * case.chunk_numel))
    assert predicted.trace.digest == trace.digest
    if case.name not in ("cnn",):  # batch statistics keep their weights in float32
        assert predicted.role_nbytes[Role.MASTER] == 2 * predicted.role_nbytes[Role.PARAM]


class Twins:
    """One small model and its optimizer."""

    def __init__(self, **keys: Any) -> None:
        settings = {"precision": "bf16", "memory": {"device": 64 << 10, "host": 8 << 20}, "default_chunk_size": 1056}
        self.manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(settings | keys))
        torch.manual_seed(0)
        with self.manager.init():
            self.model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=self.manager, lr=1e-2)

    def step(self, seed: int) -> float:
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
        loss = self.model(x).square().mean()
        self.manager.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def test_inputs_and_outputs_are_float32() -> None:
    twins = Twins()
    seen: list[torch.dtype] = []
    twins.model[1].register_forward_hook(lambda _m, _a, result: seen.append(result.dtype))
    assert twins.model(torch.randn(2, 32)).dtype is torch.float32
    assert seen == [torch.bfloat16]
    twins.manager.close()


def test_a_resumed_training_goes_on_to_the_bit() -> None:
    first = Twins()
    for seed in range(3):
        first.step(seed)
    weights, states = first.manager.state_dict(), first.optimizer.state_dict()
    assert {value.dtype for value in weights.values()} == {torch.float32}
    ahead = [first.step(seed) for seed in range(3, 6)]
    second = Twins()
    second.manager.load_state_dict(weights)
    second.optimizer.load_state_dict(states)
    assert [second.step(seed) for seed in range(3, 6)] == ahead
    assert all(torch.equal(a, b) for a, b in zip(
        first.manager.state_dict().values(), second.manager.state_dict().values(), strict=True))  # fmt: skip


def test_what_is_written_inside_gather_reaches_the_master_weights_and_nothing_else_does() -> None:
    twins = Twins()
    twins.step(0)
    before = twins.manager.state_dict()
    with twins.manager.gather(), torch.no_grad():
        twins.model[0][0].weight[3, 4] = 0.3
        twins.model[1][0].weight.data[0] = 2.0
    after = twins.manager.state_dict()
    assert after["0.0.weight"][3, 4] == torch.tensor(0.3).bfloat16().float()
    assert (after["1.0.weight"][0] == 2.0).all()
    before["0.0.weight"][3, 4] = after["0.0.weight"][3, 4]
    before["1.0.weight"][0] = 2.0
    assert all(torch.equal(after[key], value) for key, value in before.items())
    twins.step(1)


def test_a_write_outside_of_gather_reaches_the_master_weights() -> None:
    """What was not written to keeps all bits of its master copy, as in a block of gather."""
    twins = Twins(memory={"device": 1 << 20, "host": 8 << 20})
    twins.step(0)
    before = twins.manager.state_dict()
    with torch.no_grad():
        for param in twins.model.parameters():
            param[0] = 2.0
    after = twins.manager.state_dict()
    for key, value in before.items():
        value[0] = 2.0
        assert torch.equal(after[key], value)


def test_excluded_modules_stay_in_float32() -> None:
    settings = {"precision": "bf16", "memory": {"device": 1 << 20, "host": 8 << 20}}
    manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(settings))
    with manager.init():
        with manager.exclude():
            head = nn.Linear(16, 4)
        model = nn.Sequential(nn.Linear(8, 16), head, nn.Linear(4, 2))
    optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
    for _ in range(3):
        manager.backward(model(torch.randn(3, 8)).sum())
        optimizer.step()
        optimizer.zero_grad()
    assert head.weight.dtype is torch.float32
    assert model[0].weight.dtype is torch.bfloat16


class ReadsChild(nn.Module):
    """Has no parameters of its own, and uses those of a child, as a head that is normalised by hand does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(16, 16), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(functional.linear(x, functional.normalize(self.layer.weight), self.layer.bias))


class ReadsList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(16, 16) / 4) for _ in range(2))
        self.inner = nn.ModuleDict({"reads": ReadsChild()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x @ weight
        return self.inner["reads"](x) + x @ self.inner["reads"].layer.weight


@pytest.mark.parametrize("kind", [ReadsChild, ReadsList])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_excluded_modules_that_read_weights_of_their_children(kind: type[nn.Module], low: torch.dtype) -> None:
    """What is around excluded modules alone computes as they do: it was given bf16, and torch refused."""
    settings = {
        "precision": "bf16" if low is torch.bfloat16 else "fp16",
        "memory": {"device": 1 << 20, "host": 8 << 20},
    }
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(settings)) as manager:
        torch.manual_seed(0)
        with manager.init():
            with manager.exclude():
                head = kind()
            model = nn.Sequential(nn.Linear(8, 16), head, nn.Linear(16, 2))
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        x = torch.randn(3, 8)
        first, _, last = (nn.Linear(8, 16).to(low), head, nn.Linear(16, 2).to(low))
        first.load_state_dict(model[0].state_dict())
        last.load_state_dict(model[2].state_dict())
        expected = last(head(first(x.to(low)).float()).to(low)).float()
        assert torch.equal(model(x), expected)
        for _ in range(3):
            manager.backward(model(x).sum())
            assert all(param.grad is not None and param.grad.dtype is torch.float32 for param in head.parameters())
            optimizer.step()
            optimizer.zero_grad()


def test_the_norm_is_summed_in_float32() -> None:
    twins = Twins()
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    twins.manager.backward(twins.model(x).square().mean())
    with twins.manager.gather(grads=True):
        grads = [param.grad.float() for param in twins.model.parameters() if param.grad is not None]
    norm = twins.optimizer.clip_grad_norm_(1e9)
    expected = torch.stack([grad.double().norm() for grad in grads]).norm()
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)


# fp16


FP16_KEYS = {"precision": "fp16", "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 2}}


def test_a_step_that_overflows_changes_nothing_and_the_scale_recovers() -> None:
    twins = Twins(**FP16_KEYS)
    twins.step(0)
    twins.step(1)
    weights, states = twins.manager.state_dict(), twins.optimizer.state_dict()
    scales = []
    for _ in range(4):
        loss = twins.model(torch.randn(8, 32)).square().mean()
        twins.manager.backward(loss * float("inf"))
        twins.optimizer.step()
        twins.optimizer.zero_grad()
        scales.append(twins.manager.loss_scale)
    assert scales == [16, 8, 4, 2]  # the first overflow is forgiven
    assert twins.manager.num_skipped_steps == 4
    after, states_after = twins.manager.state_dict(), twins.optimizer.state_dict()
    assert all(torch.equal(after[key], value) for key, value in weights.items())
    for index, state in states["state"].items():
        assert all(torch.equal(states_after["state"][index][key], value) for key, value in state.items())
    losses = [twins.step(seed) for seed in range(2, 8)]
    assert losses[-1] < losses[0]
    timeline = twins.manager.timeline()
    assert timeline is not None
    assert timeline.plan_misses == 0


def test_an_overflow_in_the_first_step_is_not_what_is_recorded() -> None:
    twins = Twins(**FP16_KEYS)
    twins.manager.backward(twins.model(torch.randn(8, 32)).mean() * float("nan"))
    twins.optimizer.step()
    twins.optimizer.zero_grad()
    twins.step(0)
    twins.step(1)
    twins.step(2)
    timeline, trace = twins.manager.timeline(), twins.manager.trace
    assert trace is not None
    assert sum(moment.kind is Kind.UPDATE for moment in trace.moments) == 4
    assert timeline is not None
    assert timeline.plan_misses == 0


def test_the_scale_is_resumed() -> None:
    keys = FP16_KEYS | {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 3}}
    first = Twins(**keys)
    for seed in range(4):
        first.step(seed)
    assert first.manager.loss_scale == 32
    second = Twins(**keys)
    second.manager.load_state_dict(first.manager.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    for seed in range(4, 8):
        assert second.step(seed) == first.step(seed)
    assert second.manager.loss_scale == first.manager.loss_scale == 64


def test_a_backward_without_the_scale_is_refused() -> None:
    twins = Twins(**FP16_KEYS)
    twins.model(torch.randn(8, 32)).mean().backward()
    with pytest.raises(chunkmem.StateError, match=r"fp16 gradients need the loss scale: call manager\.backward"):
        twins.optimizer.step()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_clipping_is_part_of_the_update(precision: str) -> None:
    """The coefficient meets gradients in float32: they are not rounded once more."""
    twins = Twins(precision=precision, gradient_clipping=1e-3)
    plain = Twins(precision="bf16") if precision == "bf16" else Twins(**FP16_KEYS)
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    for one in (twins, plain):
        one.manager.backward(one.model(x).square().mean())
    with plain.manager.gather(grads=True):
        scale = plain.manager.loss_scale
        grads = [param.grad.float() / scale for param in plain.model.parameters() if param.grad is not None]
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    twins.optimizer.step()
    for index, grad in enumerate(grads):
        expected = 0.1 * grad * (1e-3 / (norm + 1e-6))
        assert torch.allclose(twins.optimizer.state_dict()["state"][index]["exp_avg"], expected, rtol=1e-3, atol=1e-9)


README = Path(__file__).parents[2] / "README.md"
ROLES = ("param", "grad", "master", "exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_bytes_a_parameter_are_those_of_the_readme(precision: str) -> None:
    (row,) = re.findall(rf"^\| {precision} \| (.*) \|$", README.read_text(encoding="utf-8"), re.MULTILINE)
    *told, total = map(int, row.split(" | "))
    assert sum(told) == total
    memory = {"device": 64 << 20, "host": 64 << 20}
    fp16 = {"enabled": precision == "fp16", "initial_scale_power": 4}
    settings = {"precision": precision, "fp16": fp16, "memory": memory, "default_chunk_size": 64 * 64}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(settings)) as manager:
        with manager.init():
            model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        for _ in range(3):
            manager.backward(model(torch.randn(8, 64)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        by_role = manager.memory().device.by_role  # all of it fits there
    numel = 4 * 64 * 64
    assert {role: by_role.get(role, (0, 0))[1] / numel for role in ROLES} == dict(zip(ROLES, told, strict=True))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_without_native_kernels_the_bits_are_the_same(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, Any] = {"gradient_clipping": 0.01, "precision": precision}
    if precision == "fp16":
        keys["fp16"] = FP16_KEYS["fp16"]
    native = Twins(**keys)
    losses = [native.step(seed) for seed in range(4)]
    assert native.manager.runtime.updater.native.has_torch_bits, "there are no native kernels to compare with"
    monkeypatch.setattr("chunkmem.assembly.parts.load_kernels", lambda with_cuda: Kernels(frozenset()))
    plain = Twins(**keys)
    assert [plain.step(seed) for seed in range(4)] == pytest.approx(losses, rel=1e-3)  # the norm is summed otherwise
    keys["gradient_clipping"] = 0.0
    plain = Twins(**keys)
    monkeypatch.undo()
    native = Twins(**keys)
    assert [plain.step(seed) for seed in range(4)] == [native.step(seed) for seed in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(
        plain.manager.state_dict().values(), native.manager.state_dict().values(), strict=True))  # fmt: skip


def on_host(**keys: Any) -> Twins:
    """All updates on HOST, and DEVICE so small that a group at a time fits."""
    return Twins(memory={"device": 16 << 10, "host": 8 << 20}, optimizer={"params": {"use_hybrid_adam": False}}, **keys)


def test_a_planned_step_takes_fourteen_bytes_a_parameter() -> None:
    twins = on_host()
    for seed in range(4):
        twins.step(seed)
        audit(twins.manager)
    assert_as_predicted(twins.manager)
    nbytes = sum(chunk.nbytes for chunk in twins.manager.runtime.memory.store.chunks.values())
    slab = twins.manager.runtime.memory.store.chunks[ChunkId(Role.PARAM, 0)].nbytes
    num_groups = len({chunk.group for chunk in twins.manager.runtime.memory.store.chunks})
    assert nbytes == num_groups * 8 * slab, "16 bytes a parameter, of which a slab of weights has 2"
    peak_nbytes = twins.manager.memory().host.step_peak_nbytes
    assert peak_nbytes <= num_groups * 7 * slab + slab, "while it is updated, a group has both"
    twins.manager.close()


def test_weights_that_made_room_for_gradients_come_back_when_a_user_asks_for_them() -> None:
    """Between backward and step some weights are nowhere; a forward, a gather, an evaluation round them again."""
    twins, untouched = on_host(), Twins()
    for seed in range(4):
        assert twins.step(seed) == untouched.step(seed)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(9))
    for each in (twins, untouched):
        each.manager.backward(each.model(x).square().mean())
    chunks = [c for c in twins.manager.runtime.memory.store.chunks.values() if c.id.role is Role.PARAM]
    assert any(chunk.newest_tier() is None for chunk in chunks)
    with twins.manager.gather():
        now = {name: value.clone() for name, value in twins.model.named_parameters()}
    masters = twins.manager.state_dict()
    assert all(torch.equal(value, masters[name].bfloat16()) for name, value in now.items())
    with torch.no_grad():
        assert torch.equal(twins.model(x), untouched.model(x))
    for each in (twins, untouched):
        each.manager.backward(each.model(x).square().mean())
        each.optimizer.step()
        each.optimizer.zero_grad()
    for seed in range(4, 8):
        assert twins.step(seed) == untouched.step(seed)
        audit(twins.manager)
    assert_as_predicted(twins.manager)


def test_weights_come_back_after_a_step_that_was_skipped() -> None:
    twins = on_host(precision="fp16", fp16={"enabled": True, "initial_scale_power": 14})
    for seed in range(4):
        twins.step(seed)
    before = twins.manager.state_dict()
    loss = twins.model(torch.full((8, 32), float("inf"))).square().mean()
    twins.manager.backward(loss)
    twins.optimizer.step()
    twins.optimizer.zero_grad()
    assert twins.manager.num_skipped_steps == 1
    assert all(torch.equal(value, before[key]) for key, value in twins.manager.state_dict().items())
    for seed in range(5, 9):
        twins.step(seed)
        audit(twins.manager)
    assert_as_predicted(twins.manager)
