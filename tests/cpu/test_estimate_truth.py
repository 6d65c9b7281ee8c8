"""What an estimate says of a step against what the step then does: the same moments, bytes and peaks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

import chunkmem
from chunkmem.errors import TraceError
from chunkmem.estimate.model import Model
from chunkmem.estimate.rehearse import Rehearsal, Setting, rehearse
from chunkmem.plan.simulate import simulate
from chunkmem.trace.model import Trace
from chunkmem.tracing.probe import LiveStorageProbe
from chunkmem.types import Role, Tier
from tests.helpers.training import VARIANTS, WIDTH, Chunked, Trainer, Variant, capped, footprint
from tests.helpers.zoo import ZOO, ZooModel

ONE_BATCH = tuple(variant for variant in VARIANTS if variant.micro_batches == 1 and not variant.evaluate)
CASES = [
    pytest.param(case, variant, id=f"{case.name}-{variant.name}")
    for case in ZOO
    for variant in ONE_BATCH
    if case.name != "moe" and (case.has_blocks or variant.early_stop is None)
]


def as_model(case: ZooModel, variant: Variant) -> Model:
    """The zoo's model, built and run as `Trainer` does."""

    def build() -> nn.Module:
        model = case.build()
        if variant.unused_branch:
            model.unused_branch = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH))
        model.checkpointing = variant.early_stop is not None
        if variant.freeze_half:
            for index, parameter in enumerate(model.parameters()):
                parameter.requires_grad_(index % 4 >= 2)
        return model

    def loss(model: nn.Module) -> torch.Tensor:
        with set_checkpoint_early_stop(variant.early_stop is not False):
            return case.loss(model, case.batch(0))

    return Model(case.name, build, loss)


@functools.cache
def estimated(case: ZooModel, variant: Variant) -> Rehearsal:
    return rehearse(as_model(case, variant), Setting(chunk_numel=case.chunk_numel))


@functools.cache
def recorded(case: ZooModel, variant: Variant) -> tuple[Trace, dict[str, int], int]:
    """The trace of a first step, bytes of chunks by role, and the peak of live storages of the whole step."""
    sizes = footprint(case, variant)
    with chunkmem.ChunkManager(capped(case, 4 * sizes.param_nbytes)) as manager:
        trainer = Trainer(case, variant, Chunked(manager))
        probe = LiveStorageProbe(manager._declared.is_chunk)
        with probe.watching():
            loss = trainer.loss()
            loss.backward()
            del loss
        peak = probe.take_peak_nbytes()
        trainer.optimizer.step()
        roles = {role: now for role, (now, _) in manager.memory().device.by_role.items()}
        trainer.evaluate()  # which ends the record
        trace = manager.trace
    assert trace is not None
    return trace, roles, peak


@pytest.mark.parametrize(("case", "variant"), CASES)
def test_the_moments_are_those_of_the_step(case: ZooModel, variant: Variant) -> None:
    trace, _, _ = recorded(case, variant)
    mine = estimated(case, variant).trace
    assert [str(m) for m in mine.moments] == [str(m) for m in trace.moments]
    assert mine.chunk_nbytes == trace.chunk_nbytes
    assert mine.digest == trace.digest


@pytest.mark.parametrize(("case", "variant"), CASES)
def test_activations(case: ZooModel, variant: Variant) -> None:
    _, _, peak = recorded(case, variant)
    assert estimated(case, variant).activation_nbytes == pytest.approx(peak, rel=0.03)
