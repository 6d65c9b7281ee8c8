"""Blocks by micro-batches, one block after the other: bit for bit what a plain loop of micro-batches gives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import chunkmem
from chunkmem.optim.scaler import LossScaler
from tests.helpers.audit import assert_as_predicted, audit
from tests.helpers.lanes import adversarial
from tests.helpers.low_precision import LowPlain
from tests.helpers.pipelined import BATCH, CHAINS, Chain, ChainModel, layers_step, loop_step
from tests.helpers.training import HOST_NBYTES, Outcome, Plain, Side, assert_same
from tests.helpers.twins import cpu_only

pytestmark = cpu_only

AMPLE_NBYTES = 32 << 20
STEPS = 6
SEED = 7
FP16 = {"enabled": True, "initial_scale_power": 14, "loss_scale_window": 2}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CHECKPOINTS = ("auto", "always", "except_last", "never")
Batches = Callable[[int], tuple[Any, Tensor]]
"""Input and target of each step."""


@dataclass(frozen=True)
class Setup:
    """How a chain is trained."""

    case: ChainModel
    micro_batches: int
    checkpoint: str = "always"
    precision: str = "fp32"

    def config(self, device_nbytes: int) -> chunkmem.Config:
        numel = self.case.chunk_numel if self.precision == "fp32" else 2 * self.case.chunk_numel
        keys = {
            "precision": self.precision,
            "memory": {"device": device_nbytes, "host": HOST_NBYTES},
            "default_chunk_size": numel,
        }
        return chunkmem.Config.from_dict(keys | ({"fp16": FP16} if self.precision == "fp16" else {}))

    def pipeline(self, manager: chunkmem.ChunkManager, model: Chain) -> Any:
        return manager.pipeline(
            model.blocks,
            first=model.first,
            last=model.last,
            loss_fn=self.case.loss,
            micro_batches=self.micro_batches,
            checkpoint=self.checkpoint,
        )


def whole_batches(case: ChainModel) -> Batches:
    """All steps have batches of the same size."""
    return case.batch


def outcome(side: Side, model: Chain, optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> Outcome:
    """Copy everything that a training leaves."""

    def copied(tree: Any) -> Any:
        return tree_map_only(Tensor, lambda t: t.detach().cpu().clone(), tree)

    return Outcome(
        losses=tuple(loss.item() for loss in losses),
        weights=copied(side.state_dict(model)),
        buffers=copied(dict(model.named_buffers())),
        optimizer=copied(optimizer.state_dict()),
    )


@functools.cache
def expected(case: ChainModel, micro_batches: int, precision: str = "fp32") -> Outcome:
    """Accumulate in plain PyTorch."""
    scaler = LossScaler(chunkmem.Config.from_dict({"fp16": FP16}).fp16) if precision == "fp16" else None
    side: Any = Plain() if precision == "fp32" else LowPlain(DTYPES[precision], scaler)
    torch.manual_seed(SEED)
    model = side.ready(case.build())
    optimizer = side.optimizer(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        inputs, target = case.batch(step)
        if case.shares_weights:
            losses.append(layers_step(model, case.loss, inputs, target, num=micro_batches))
        else:
            backward = functools.partial(side.backward, last=True, by_manager=True)
            losses.append(loop_step(model, case.loss, inputs, target, num=micro_batches, backward=backward))
        optimizer.step()
        optimizer.zero_grad()
    return outcome(side, model, optimizer, losses)


class Training:
    """A chain, its optimizer and a pipeline; each step ends with an audit."""

    def __init__(self, setup: Setup, manager: chunkmem.ChunkManager) -> None:
        self.case, self.manager = setup.case, manager
        torch.manual_seed(SEED)
        with manager.init():
            self.model = setup.case.build()
        self.optimizer = chunkmem.AdamW(
            self.model.parameters(), manager=manager, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.pipe = setup.pipeline(manager, self.model)
        self.losses: list[Tensor] = []
        self.num_skipped = 0
        self.misses: list[int] = []

    def step(self, number: int) -> None:
        inputs, target = self.case.batch(number)
        self.losses.append(self.pipe.step(inputs, target))
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        timeline, skipped = self.manager.timeline(), self.manager.num_skipped_steps
        is_skipped, self.num_skipped = skipped > self.num_skipped, skipped
        self.misses.append(0 if timeline is None or is_skipped else timeline.plan_misses)
        if self.case.repeats and not is_skipped and self.manager.plan is not None and len(self.losses) >= 4:
            assert_as_predicted(self.manager)
        audit(self.manager)

    def run(self, steps: int = STEPS) -> Outcome:
        for number in range(steps):
            self.step(number)
        return self.outcome()

    def outcome(self) -> Outcome:
        return outcome(self.manager, self.model, self.optimizer, self.losses)  # type: ignore[arg-type]


def train(setup: Setup, device_nbytes: int, seed: int | None = None) -> tuple[Outcome, list[int], int]:
    """Train; return what it leaves, plan misses by step, and the smallest cap."""
    lanes = None if seed is None else adversarial(seed)
    with chunkmem.ChunkManager(setup.config(device_nbytes), make_lanes=lanes) as manager:
        training = Training(setup, manager)
        manager.runtime.tiers.device_pool.poison = manager.runtime.tiers.host_pool.poison = True
        result = training.run()
        return result, training.misses, manager.memory().device.required_nbytes


def assert_right(setup: Setup, device_nbytes: int, seed: int | None = None) -> int:
    """Train, compare with plain PyTorch, and return the smallest cap."""
    result, misses, required_nbytes = train(setup, device_nbytes, seed)
    assert_same(result, expected(setup.case, setup.micro_batches, setup.precision))
    assert not setup.case.repeats or not any(misses[3:]), misses
    return required_nbytes


FEW = {("gpt", 3, "auto"), ("dense", 3, "auto"), ("unet", 2, "except_last"), ("cnn", 20, "never")}
"""What an ordinary run has of the matrix."""


def matrix() -> list[Any]:
    """Every chain, any number of micro-batches, also more than there are samples, every way to checkpoint."""
    return [
        pytest.param(
            Setup(case, num, checkpoint),
            id=f"{case.name}-{num}-{checkpoint}",
            marks=() if (case.name, num, checkpoint) in FEW else pytest.mark.full,
        )
        for case in CHAINS.values()
        for num in (1, 2, 3, 5, 8, BATCH + 12)
        for checkpoint in CHECKPOINTS
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("setup", matrix())
def test_the_numbers_are_those_of_plain_accumulation(setup: Setup) -> None:
    required_nbytes = assert_right(setup, AMPLE_NBYTES, seed=3)
    # Where steps are of other experts each time, what one was planned for is not what another needs least for.
    least = required_nbytes + (0 if setup.case.repeats else 4 * setup.case.chunk_numel)
    assert_right(setup, least, seed=1)


LOWERED = [case for case in CHAINS.values() if not case.shares_weights]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("case", LOWERED, ids=[case.name for case in LOWERED])
@pytest.mark.full
def test_the_numbers_are_those_in_mixed_precision(case: ChainModel, precision: str, checkpoint: str) -> None:
    setup = Setup(case, 3, checkpoint, precision)
    required_nbytes = assert_right(setup, AMPLE_NBYTES, seed=5)
    assert_right(setup, required_nbytes + (0 if case.repeats else 8 * case.chunk_numel))


@pytest.mark.full
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_the_smallest_cap_is_as_reported(checkpoint: str) -> None:
    """One byte less is too little."""
    setup = Setup(CHAINS["gpt"], 3, checkpoint)
    _, _, required_nbytes = train(setup, AMPLE_NBYTES)
    train(setup, required_nbytes)
    with pytest.raises(chunkmem.CapacityError):
        train(setup, required_nbytes - 1)
