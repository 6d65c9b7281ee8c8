"""What an estimate says of a step against what the step then does: the same moments, bytes and peaks."""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

import chunkmem
from chunkmem.data.errors import TraceError
from chunkmem.data.trace import Trace
from chunkmem.data.types import Role, Tier
from chunkmem.estimate.model import Model
from chunkmem.estimate.rehearse import Rehearsal, Setting, rehearse
from chunkmem.plan.simulate import simulate
from chunkmem.steps.probe import LiveStorageProbe
from tests.helpers.probe_mode import watching
from tests.helpers.training import VARIANTS, WIDTH, Chunked, Trainer, Variant, capped, footprint, freeze_half
from tests.helpers.zoo import ZOO, ZooModel

EXAMPLES = Path(__file__).parents[2] / "examples"
ONE_BATCH = tuple(variant for variant in VARIANTS if variant.micro_batches == 1 and not variant.evaluate)
ORDINARY = ("plain", "checkpoint")
HALF_FROZEN = ("gpt", "lstm")
"""Of which frozen weights share chunks that are read in ways whose end nobody announces."""


def _is_ordinary(case: ZooModel, variant: Variant) -> bool:
    return variant.name in ORDINARY or (variant.name == "half_frozen" and case.name in HALF_FROZEN)


CASES = [
    pytest.param(
        case,
        variant,
        id=f"{case.name}-{variant.name}",
        marks=[] if _is_ordinary(case, variant) else [pytest.mark.full],
    )
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
            freeze_half(model)
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
    sizes = footprint(case, variant, freezes_first=True)
    with chunkmem.ChunkManager(capped(case, 4 * sizes.param_nbytes)) as manager:
        trainer = Trainer(case, variant, Chunked(manager), freezes_first=True)
        probe = LiveStorageProbe(manager.runtime.modules.declared.is_chunk)
        with watching(probe):
            loss = trainer.loss()
            loss.backward()
            del loss
        peak = probe.take_peak_nbytes()
        trainer.optimizer.step()
        roles = Counter[str]()
        for chunk in manager.runtime.memory.store.chunks.values():
            roles[chunk.id.role.value] += chunk.nbytes if chunk.replicas else 0
        trainer.evaluate()  # which ends the record
        trace = manager.trace
    assert trace is not None
    return trace, roles, peak


@pytest.mark.few(4)
@pytest.mark.parametrize(("case", "variant"), CASES)
def test_the_moments_are_those_of_the_step(case: ZooModel, variant: Variant) -> None:
    trace, _, _ = recorded(case, variant)
    mine = estimated(case, variant).trace
    assert [str(m) for m in mine.moments] == [str(m) for m in trace.moments]
    assert mine.chunk_nbytes == trace.chunk_nbytes
    assert mine.digest == trace.digest


@pytest.mark.few(3)
@pytest.mark.parametrize(("case", "variant"), CASES)
def test_updates_inside_backward_stand_where_they_do_in_the_step(case: ZooModel, variant: Variant) -> None:
    sizes = footprint(case, variant, freezes_first=True)
    with chunkmem.ChunkManager(capped(case, 4 * sizes.param_nbytes)) as manager:
        trainer = Trainer(case, variant, Chunked(manager, in_backward=True), freezes_first=True)
        for _ in range(2):
            trainer.optimizer.zero_grad()
            trainer.loss().backward()
            trainer.optimizer.step()
        trace = manager.trace
    mine = rehearse(as_model(case, variant), Setting(chunk_numel=case.chunk_numel, in_backward=True))
    assert trace is not None
    assert [str(moment) for moment in mine.trace.moments] == [str(moment) for moment in trace.moments]
    assert mine.trace.digest == trace.digest
    assert mine.role_nbytes[Role.GRAD] <= sum(n for c, n in trace.chunk_nbytes.items() if c.role is Role.GRAD)


@pytest.mark.few(9)
@pytest.mark.parametrize(("case", "variant"), CASES)
def test_bytes_by_role(case: ZooModel, variant: Variant) -> None:
    _, roles, _ = recorded(case, variant)
    predicted = {role.value: nbytes for role, nbytes in estimated(case, variant).role_nbytes.items()}
    assert {role: roles[role] for role in predicted} == predicted


@pytest.mark.few(4)
@pytest.mark.parametrize(("case", "variant"), CASES)
def test_a_plan_of_the_estimate_is_followed_and_peaks_as_predicted(case: ZooModel, variant: Variant) -> None:
    sizes = footprint(case, variant, freezes_first=True)
    cap = max(sizes.required_nbytes, sizes.param_nbytes // 2)
    with chunkmem.ChunkManager(capped(case, cap)) as manager:
        trainer = Trainer(case, variant, Chunked(manager), freezes_first=True)
        manager.trace = estimated(case, variant).trace  # nothing is recorded: the first step has a plan already
        trainer.step()
        trainer.step()  # the first one has no optimizer states yet
        plan, happened = manager.plan, manager.timeline()
    assert plan is not None
    assert happened is not None
    assert happened.plan_misses == 0
    assert happened.peak_nbytes[Tier.DEVICE] == simulate(plan, estimated(case, variant).trace).peak_nbytes[Tier.DEVICE]


@pytest.mark.parametrize(("case", "variant"), CASES)
@pytest.mark.few(9)
def test_activations(case: ZooModel, variant: Variant) -> None:
    _, _, peak = recorded(case, variant)
    assert estimated(case, variant).activation_nbytes == pytest.approx(peak, rel=0.03)


def test_what_depends_on_values_is_named() -> None:
    moe = next(case for case in ZOO if case.name == "moe")
    with pytest.raises(TraceError, match=r"(?s)blocks\.0.* forward: operator aten\..* needs values, which an estimate"):
        rehearse(as_model(moe, ONE_BATCH[0]), Setting(chunk_numel=moe.chunk_numel))


def test_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model, batch and configuration: the same moments, bytes of activations and chunk peak."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    gpt = importlib.import_module("gpt")
    config = chunkmem.Config.from_json(EXAMPLES / "chunkmem.json")

    def build() -> nn.Module:
        model: nn.Module = gpt.GPT(gpt.PRESETS["2m"], 64)
        return model

    def loss(model: nn.Module) -> torch.Tensor:
        tokens = torch.zeros(16, 64, dtype=torch.long)
        value: torch.Tensor = model(tokens, tokens)
        return value

    cap = sum(p.nbytes for p in build().parameters()) // 3
    predicted = rehearse(Model("demo", build, loss), Setting(device_nbytes=cap))
    settings = config.to_dict() | {"memory": {"device": cap, "host": 1 << 30, "disk": None}}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(settings)) as manager:
        with manager.init():
            model = build()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        for _ in range(3):
            manager.backward(loss(model))
            optimizer.step()
            optimizer.zero_grad()
        trace, plan, happened = manager.trace, manager.plan, manager.timeline()
    assert trace is not None
    assert plan is not None
    assert happened is not None
    assert predicted.trace.digest == trace.digest
    assert predicted.activation_nbytes == pytest.approx(
        max(moment.non_model_peak_nbytes for moment in trace.moments), rel=0.03
    )
    assert happened.plan_misses == 0
    assert happened.peak_nbytes[Tier.DEVICE] == simulate(plan, predicted.trace).peak_nbytes[Tier.DEVICE]
