"""`chunkmem.AdamW` and `Adam` against torch's fused ones: the same weights and states, bit for bit, in every use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import chunkmem
from chunkmem.data.types import Role, Tier
from chunkmem.optim.adam_rule import _steps_on
from tests.helpers.twins import (
    AMPLE_NBYTES,
    WIDTH,
    Blocks,
    Twin,
    assert_equal,
    config,
    cpu_only,
    features,
    same,
)

STEPS = range(5)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "lr": 3e-3, "betas": (0.8, 0.99)},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0, "eps": 1e-6},
    ]


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_parameter_groups(kind: str) -> None:
    same(Blocks, lambda twin: twin.steps(*STEPS), kind=kind, params=two_groups)


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_the_defaults_are_those_of_torch(kind: str) -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        model = manager.wrap(Blocks())
        ours = getattr(chunkmem, kind)(model.parameters(), manager=manager)
        theirs = getattr(torch.optim, kind)(Blocks().parameters(), fused=True)
        assert ours.defaults == theirs.defaults
        assert ours.state_dict() == theirs.state_dict()


def test_arguments_win_over_the_configuration() -> None:
    params = {"lr": 0.5, "betas": [0.1, 0.2], "eps": 0.25, "weight_decay": 0.75}
    keys = {"optimizer": {"type": "AdamW", "params": params}}
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, **keys)) as manager:
        model = manager.wrap(Blocks())
        (group,) = chunkmem.AdamW(model.parameters(), manager=manager, lr=0.25).param_groups
        assert [group[key] for key in params] == [0.25, (0.1, 0.2), 0.25, 0.75]


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "warm_restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-1, step_size_up=2),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.5)]),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.PolynomialLR(o, 4)], milestones=[2]
    ),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rate_schedulers(name: str) -> None:
    """`OneCycleLR` and `CyclicLR` cycle the first beta too."""

    def scenario(twin: Twin) -> list[Any]:
        scheduler = SCHEDULERS[name](twin.optimizer)
        rates = []
        for seed in STEPS:
            loss = twin.step(features(seed))
            scheduler.step(*[loss] if name == "plateau" else [])
            rates += [(loss, group["lr"], group["betas"]) for group in twin.optimizer.param_groups]
        assert len({rate for _, *rate in map(tuple, rates) for rate in rate if isinstance(rate, float)}) > 2
        return rates

    same(Blocks, scenario, params=two_groups)


def test_a_learning_rate_in_a_tensor() -> None:
    def scenario(twin: Twin) -> list[float]:
        scheduler = lr_scheduler.ExponentialLR(twin.optimizer, 0.5)
        losses = []
        for seed in STEPS:
            losses += twin.steps(seed)
            scheduler.step()
        return losses

    same(Blocks, scenario, lr=lambda: torch.tensor(1e-2))


def test_a_parameter_group_added_later() -> None:
    def scenario(twin: Twin) -> list[float]:
        losses = twin.steps(0, 1)
        twin.optimizer.add_param_group({"params": twin.model.blocks.parameters(), "lr": 0.1})
        return losses + twin.steps(2, 3)

    same(Blocks, scenario, params=lambda model: [*model.inner.parameters(), *model.head.parameters()])


def test_parameters_outside_of_the_optimizer_are_untouched() -> None:
    """Their gradients add up in vain, as in torch."""

    def scenario(twin: Twin) -> dict[str, Tensor]:
        before = twin.weights()
        twin.steps(0, 1, 2)
        after = twin.weights()
        assert all(torch.equal(before[key], after[key]) == key.startswith("blocks") for key in before)
        return after

    same(Blocks, scenario, params=lambda model: [*model.inner.parameters(), *model.head.parameters()])


class Branches(Blocks):
    """Blocks, of which a call may leave some out."""

    def forward(self, x: Tensor, *, skip: tuple[int, ...] = ()) -> Tensor:
        x = self.inner(x)
        for index, block in enumerate(self.blocks):
            x = x if index in skip else block(x)
        return self.head(x)


def test_frozen_and_unused_parameters_are_untouched() -> None:
    """Neither weight decay nor momentum touches what has no gradient; which that is changes from step to step."""

    def scenario(twin: Twin) -> list[Any]:
        left = []
        for step, frozen in enumerate([(), (0,), (0, 1), (1,), ()]):
            for index, block in enumerate(twin.model.blocks):
                block.requires_grad_(index not in frozen)
            before = twin.weights()
            left.append(twin.step(features(step), skip=(2,) if step < 3 else (0,)))
            after = twin.weights()
            idle = {f"blocks.{index}." for index in (*frozen, 2 if step < 3 else 0)}
            assert all(torch.equal(before[key], after[key]) == any(map(key.startswith, idle)) for key in before)
        return left

    same(Branches, scenario)


def test_freezing_between_backward_and_step() -> None:
    """torch updates what has a gradient, whether it requires one any more or not."""

    def scenario(twin: Twin) -> list[float]:
        losses = twin.steps(0)
        twin.loss(features(1)).backward()
        twin.model.blocks[0].requires_grad_(False)
        twin.update()
        losses += twin.steps(2)
        twin.model.blocks[0].requires_grad_(True)
        return losses + twin.steps(3)

    same(Blocks, scenario)


def mixed() -> nn.Module:
    """Parameters of three dtypes."""

    class Mixed(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.inner, *self.blocks, self.head):
                x = layer(x.to(next(layer.parameters()).dtype))
            return x.double()

    return Mixed(nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).bfloat16(), num_blocks=1)


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_double_and_bfloat16_parameters(kind: str) -> None:
    """torch keeps states in the dtype of the parameter, and so does chunkmem."""
    same(mixed, lambda twin: twin.steps(*STEPS), kind=kind)


def test_channels_last_weights() -> None:
    """Kernels choose by memory order: a slot keeps it, and so do gradients and states."""

    def build() -> nn.Module:
        convs = [nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 3)]
        return nn.Sequential(*convs).to(memory_format=torch.channels_last)

    def scenario(twin: Twin) -> list[Any]:
        images = features(0, shape=(2, 4, 6, 6)).to(memory_format=torch.channels_last)
        losses = [twin.step(images) for _ in STEPS]
        return [losses, [value.stride() for value in twin.weights().values()]]

    same(build, scenario)


@pytest.mark.parametrize("build", [Blocks, mixed], ids=["one dtype", "three dtypes"])
def test_clipping(build: Callable[[], nn.Module]) -> None:
    """A small bound, one that is never reached, and the norm that is returned."""

    def scenario(twin: Twin) -> list[Tensor]:
        norms = []
        for seed, bound in enumerate([0.01, 1e9, 0.1]):
            twin.loss(features(seed)).backward()
            norms.append(twin.clip(bound))
            twin.update()
        assert float(norms[0]) > 0.01
        return norms

    same(build, scenario)


@pytest.mark.parametrize("how", ["argument", "configuration"])
def test_clipping_in_step(how: str) -> None:
    def scenario(twin: Twin) -> list[float]:
        losses = []
        for seed in STEPS:
            loss = twin.loss(features(seed))
            loss.backward()
            if twin.manager is None:
                twin.clip(0.05)
            twin.update()
            losses.append(loss.item())
        return losses

    if how == "argument":
        same(Blocks, scenario, keys={"gradient_clipping": 7.0}, max_grad_norm=0.05)
    else:
        same(Blocks, scenario, keys={"gradient_clipping": 0.05})


def test_an_argument_of_zero_switches_configured_clipping_off() -> None:
    same(Blocks, lambda twin: twin.steps(*STEPS), keys={"gradient_clipping": 1e-3}, max_grad_norm=0)


@cpu_only
@pytest.mark.parametrize("margin", [0, 0.25, 0.5, 1])
@pytest.mark.parametrize("hybrid", [True, False])
def test_states_live_where_the_configuration_says(hybrid: bool, margin: float) -> None:
    """At two thirds of model data about half of the groups fit DEVICE with all they have. How many is the planner's."""
    keys = {
        "optimizer": {"params": {"use_hybrid_adam": hybrid}},
        "client": {"mem_tracer": {"margin_use_ratio": margin}},
    }
    plain = Twin(None, Blocks)
    losses = plain.steps(*STEPS)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        Twin(manager, Blocks)
        num_groups = sum(key.role is Role.PARAM for key in manager.runtime.memory.store.chunks)
    cap = num_groups * 1024 * 4 * 2 // 3
    with chunkmem.ChunkManager(config(cap, **keys)) as manager:
        twin = Twin(manager, Blocks)
        assert twin.steps(*STEPS) == losses
        assert_equal(twin.left(), plain.left())
        states = [
            c
            for key, c in manager.runtime.memory.store.chunks.items()
            if key.role in (Role("exp_avg"), Role("exp_avg_sq"))
        ]
        on_device = sum(chunk.ready(Tier.DEVICE) for chunk in states)
        left = cap // 1024 - 2  # at the peak, weights and their gradient are in use
        most = (left - 3) // 4  # three chunks are for those that pass
        bound = 2 * min(int(left * margin / 2), most) if hybrid else 0
        assert min(bound, 1) <= on_device <= bound


def test_all_states_on_host_at_the_smallest_cap() -> None:
    same(Blocks, lambda twin: twin.steps(*STEPS), keys={"optimizer": {"params": {"use_hybrid_adam": False}}})


def test_the_numbers_of_updates_are_copied_to_a_device_once_each() -> None:
    """There was a copy for each parameter, and each has the host wait."""
    steps = [torch.tensor(float(number)) for number in (3, 3, 5, 3)]
    there = _steps_on(torch.device("meta"), steps)
    assert {step.device.type for step in there} == {"meta"}
    assert [step is there[0] for step in there] == [True, True, False, True]
    assert all(a is b for a, b in zip(_steps_on(torch.device("cpu"), steps), steps, strict=True))
