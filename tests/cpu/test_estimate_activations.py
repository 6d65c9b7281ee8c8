"""What an estimate says of managed activations against what a step does: the same chunks, moments, bytes, peaks."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.cli.main import main
from chunkmem.data.trace import Trace
from chunkmem.data.types import Role, Tier
from chunkmem.estimate.hardware import HARDWARE
from chunkmem.estimate.model import Model
from chunkmem.estimate.question import Question, device_need, find, find_chosen
from chunkmem.estimate.rehearse import Rehearsal, Setting, rehearse
from chunkmem.plan.simulate import simulate
from chunkmem.report.regions import Policy
from tests.helpers.training import HOST_NBYTES, VARIANTS, Chunked, Trainer
from tests.helpers.twins import cpu_only
from tests.helpers.zoo import ZOO

pytestmark = cpu_only

GPT = next(case for case in ZOO if case.name == "gpt")
PLAIN = next(variant for variant in VARIANTS if variant.name == "plain")
AMPLE_NBYTES = 32 << 20
POLICIES = ("keep", "offload", "recompute")


def as_model() -> Model:
    return Model(GPT.name, GPT.build, lambda model: GPT.loss(model, GPT.batch(0)))


def manager_of(policy: str, device_nbytes: int) -> chunkmem.ChunkManager:
    settings = {"memory": {"device": device_nbytes, "host": HOST_NBYTES}, "default_chunk_size": GPT.chunk_numel}
    return chunkmem.ChunkManager(chunkmem.Config.from_dict(settings | {"activations": {"policy": policy}}))


@functools.cache
def estimated(policy: str, kept: frozenset[int] = frozenset()) -> Rehearsal:
    return rehearse(as_model(), Setting(chunk_numel=GPT.chunk_numel, activations=policy), kept=kept)


@functools.cache
def recorded(policy: str) -> Trace:
    with manager_of(policy, AMPLE_NBYTES) as manager:
        trainer = Trainer(GPT, PLAIN, Chunked(manager))
        trainer.step()
        trainer.evaluate()  # which ends the record
        assert manager.trace is not None
        return manager.trace


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_chunks_and_moments_are_those_of_the_step(policy: str) -> None:
    trace, mine = recorded(policy), estimated(policy).trace
    assert [str(m) for m in mine.moments] == [str(m) for m in trace.moments]
    assert mine.chunk_nbytes == trace.chunk_nbytes
    assert mine.digest == trace.digest
    assert estimated(policy).role_nbytes[Role.ACTIVATION] > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_other_activations_are_those_of_the_step(policy: str) -> None:
    """What is in chunks counts there alone."""
    forward = [m.non_model_peak_nbytes for m in recorded(policy).moments if "forward" in m.label]
    mine = [m.non_model_peak_nbytes for m in estimated(policy).trace.moments if "forward" in m.label]
    # An estimate makes the batch within the step.
    # After the last one comes the loss, which no record watches outside of the model.
    assert mine[:-1] == pytest.approx(forward[:-1], rel=0.03, abs=1024)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("policy", "kept"), [*((policy, frozenset()) for policy in POLICIES), ("auto", frozenset({1}))]
)
def test_peaks_and_moved_bytes_are_as_predicted(policy: str, kept: frozenset[int]) -> None:
    trace = estimated(policy, kept).trace
    with manager_of(policy, AMPLE_NBYTES) as manager:
        trainer = Trainer(GPT, PLAIN, Chunked(manager))
        trainer.step()
        least = manager.memory().device.required_nbytes
    with manager_of(policy, least + least // 4) as manager:
        trainer = Trainer(GPT, PLAIN, Chunked(manager))
        manager.trace = trace  # nothing is recorded: the first step has a plan already
        trainer.step()
        trainer.step()  # the first one has no optimizer states yet
        plan, happened = manager.plan, manager.timeline()
    assert plan is not None
    assert happened is not None
    assert happened.plan_misses == 0
    predicted = simulate(plan, trace)
    assert happened.peak_nbytes == predicted.peak_nbytes
    assert {lane: n for lane, n in happened.moved_nbytes.items() if n} == {
        lane: n for lane, n in predicted.moved_nbytes.items() if n
    }


def tower(width: int, depth: int) -> Model:
    """Blocks whose activations are far more than their weights."""

    def build() -> nn.Module:
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth))
        )

    return Model("tower", build, lambda model: model(torch.randn(1 << 15, width)).square().mean())


def asked(**options: object) -> Question:
    question = Question(model=lambda batch: tower(256, 8), batch=1, device_nbytes=2 << 30, chunk_numel=1 << 19)
    return Question(**{**vars(question), **options})  # type: ignore[arg-type]


def test_less_of_device_is_needed_the_more_is_moved_or_recomputed() -> None:
    needs = {
        policy: device_need(question).nbytes
        for policy in (None, "keep", "offload", "recompute", "auto")
        if (question := asked(activations=policy))
    }
    assert needs["keep"] == pytest.approx(needs[None], rel=0.1)
    assert max(needs["offload"], needs["recompute"]) < needs["keep"] / 2


@pytest.mark.full
@pytest.mark.parametrize("link_Bps", [1e9, 1e12])
def test_auto_takes_what_is_faster(link_Bps: float) -> None:
    # A fast link is no use where HOST's memory is slower: the next block's forward waits for room, so for the copy.
    speeds = {"link_Bps": link_Bps, "duplex_Bps": link_Bps, "host_memory_Bps": max(130e9, link_Bps)}
    hardware = HARDWARE["h100"].__class__(**{**vars(HARDWARE["h100"]), **speeds})
    question = asked(activations="auto", hardware=hardware, device_nbytes=1 << 30)
    found = find_chosen(find(question))
    policies = {region.policy for region in found.regions}
    assert len(found.regions) == 8
    assert (Policy.OFFLOAD if link_Bps > 1e10 else Policy.RECOMPUTE) in policies
    assert found.timeline.peak_nbytes[Tier.DEVICE] <= 1 << 30
    steps = {
        policy: find(other).timeline.step_s
        for policy in ("offload", "recompute")
        if (other := asked(activations=policy, hardware=hardware, device_nbytes=1 << 30))
    }
    assert found.timeline.step_s <= 1.02 * min(steps.values())


def test_the_command_lists_what_becomes_of_each_block(capsys: pytest.CaptureFixture[str]) -> None:
    model, caps = "tests.helpers.estimated:tower", ("--device", "1MiB", "--chunk-size", "8192")
    assert main(["estimate", model, *caps, "--activations", "recompute", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["activations"] == "recompute"
    assert [(region["name"], region["policy"]) for region in answer["regions"]] == [
        (str(block), "recompute") for block in range(6)
    ]
    assert main(["estimate", model, *caps, "--activations", "recompute"]) == 0
    assert "0-5          recomputed" in capsys.readouterr().out


def test_two_ways_to_recompute_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "gpt:64x2", "--activations", "auto", "--checkpointing"]) == 2
    assert "leave one of them out" in capsys.readouterr().err
