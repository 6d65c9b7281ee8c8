"""Both tiers nearly full: plans are reached and followed, and one that is out of reach is said to be."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.data.errors import PlanError
from chunkmem.estimate.gpt import GPT, Shape
from chunkmem.plan.model import Lane
from chunkmem.runtime import off_plan
from tests.helpers.audit import audit
from tests.helpers.overlapped import WIDTH, Block
from tests.helpers.twins import cpu_only


class Tight:
    """A stack of blocks whose weights, gradients and states take most of both tiers."""

    def __init__(
        self, device_nbytes: int, host_nbytes: int, *, blocks: int, numel: int, precision: str = "bf16", **opts: Any
    ) -> None:
        values = {
            "precision": precision,
            "default_chunk_size": numel,
            "memory": {"device": device_nbytes, "host": host_nbytes},
            "client": {"opts": {"overlap_optimizer": True, **opts}},
        }
        self.manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(values))
        torch.manual_seed(0)
        with self.manager.init():
            self.model = nn.Sequential(*(Block(WIDTH) for _ in range(blocks)))
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=self.manager, lr=1e-3)

    def step(self, seed: int) -> float:
        loss = self.model(torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed))).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        audit(self.manager)
        return loss.item()


@cpu_only
@pytest.mark.parametrize("caps", [(258792, 298885, 6, 2100), (238233, 327393, 6, 2500)])
def test_a_plan_is_reached_through_the_last_free_slabs(caps: tuple[int, int, int, int]) -> None:
    """Copies to HOST before all copies from it found no room there: such plans were never followed."""
    device, host, blocks, numel = caps
    run = Tight(device, host, blocks=blocks, numel=numel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = [run.step(seed) for seed in range(5)]
    timeline = run.manager.timeline()
    assert timeline is not None
    assert run.manager.plan is not None
    assert timeline.plan_misses == 0
    ample = Tight(8 << 20, 8 << 20, blocks=blocks, numel=numel)
    assert losses == [ample.step(seed) for seed in range(5)]


def test_a_plan_out_of_reach_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are served on demand, a warning says why, and the timeline has what happened."""
    expected = [run.step(seed) for run in [Tight(96 << 10, 8 << 20, blocks=3, numel=5000)] for seed in range(4)]
    run = Tight(96 << 10, 8 << 20, blocks=3, numel=5000)

    def no_way(*args: object, **kwargs: object) -> object:
        raise PlanError("param chunk 7 takes 3 bytes on HOST, and 2 are free there")

    losses = [run.step(0)]
    monkeypatch.setattr(off_plan, "_actions", no_way)
    losses.append(run.step(1))
    message = (
        r"^a train step could not follow its plan.* on demand.*: param chunk 7 takes 3 bytes on HOST, and 2 are free"
    )
    with pytest.warns(UserWarning, match=message):
        losses.append(run.step(2))
    timeline = run.manager.timeline()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses.append(run.step(3))
    assert losses == expected
    assert timeline is not None
    fetches = [span for span in timeline.spans if span.lane is Lane.H2D]
    assert fetches
    assert all(0 <= span.start_s <= span.end_s <= timeline.step_s < 60 for span in fetches)
    assert timeline.device_nbytes == ()
    assert timeline.plan_misses > 0
    assert math.isfinite(timeline.step_s)


class WithEmbedding(nn.Module):
    """An embedding of several slabs, and blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, WIDTH)
        self.blocks = nn.Sequential(Block(WIDTH), Block(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.embedding((3 * x[:, 0].abs()).long()))


@cpu_only
@pytest.mark.parametrize(
    ("precision", "device_nbytes", "host_nbytes"),
    [
        ("fp32", 74_000, 186_416),  # in all a chunk more than there are, but on each tier a part of one
        ("bf16", 74_088, 177_112),  # weights and gradients take half of what states take: one free slab is too few
        ("bf16", 76_811, 174_389),
    ],
)
def test_what_would_end_in_the_first_update_is_refused_before(
    precision: str, device_nbytes: int, host_nbytes: int
) -> None:
    """With the cap that the optimizer asks for, three steps go well."""
    asked = []
    while len(asked) < 3:
        values = {"precision": precision, "default_chunk_size": 5000}
        values["memory"] = {"device": device_nbytes, "host": asked[-1] if asked else host_nbytes}
        with chunkmem.ChunkManager(chunkmem.Config.from_dict(values)) as manager:
            with manager.init():
                model = WithEmbedding()
            try:
                optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
            except chunkmem.CapacityError as error:
                asked.append(error.needed_nbytes)
                continue
            for seed in range(3):
                draw = torch.Generator().manual_seed(seed)
                model(torch.randn(16, WIDTH, generator=draw)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            break
    assert len(asked) == 1
    assert asked[0] < 1.2 * host_nbytes


@dataclass(frozen=True)
class TwoModels:
    """Two models on two tiers, of which one is trained."""

    precision: str
    device_nbytes: int
    host_nbytes: int
    numel: int
    """Of a chunk."""
    blocks: int
    """Of the model that is trained."""
    others: int
    """Blocks of the other one."""
    script: str
    """``t`` is a step, ``e`` evaluates the other model, ``g`` leaves gradients of it."""

    def train(self, *, log_ratio: float | None) -> tuple[list[float], int]:
        """Follow the script; return the losses, and how often the last step missed its plan."""
        values = {"precision": self.precision, "default_chunk_size": self.numel}
        values["memory"] = {"device": self.device_nbytes, "host": self.host_nbytes}
        values["client"] = {"opts": {"overlap_optimizer": True, "undo_log_ratio": log_ratio}}
        losses = []
        with chunkmem.ChunkManager(chunkmem.Config.from_dict(values)) as manager:
            torch.manual_seed(0)
            with manager.init():
                model = nn.Sequential(*(Block(WIDTH) for _ in range(self.blocks)))
                other = nn.Sequential(*(Block(WIDTH) for _ in range(self.others)))
            optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-3)
            for seed, what in enumerate(self.script):
                x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
                if what == "e":
                    with torch.no_grad():
                        losses.append(other(x).sum().item())
                elif what == "g":
                    other(x).sum().backward()
                else:
                    loss = model(x).square().mean()
                    losses.append(loss.item())
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    audit(manager)
            timeline = manager.timeline()
            assert timeline is not None
            return losses, timeline.plan_misses


@pytest.mark.few(2)
@cpu_only
@pytest.mark.parametrize("log_ratio", [0.5, None])
@pytest.mark.parametrize(
    "models",
    [
        TwoModels("fp32", 50_603, 346_500, 5000, 4, 1, "ttgtett"),
        TwoModels("fp32", 36_442, 283_805, 2100, 3, 1, "tttetgtttt"),
        TwoModels("bf16", 33_282, 342_018, 2100, 4, 1, "tttgtttt"),
        TwoModels("bf16", 63_004, 382_109, 5000, 3, 5, "tttetgtttt"),
        TwoModels("fp32", 97_566, 350_458, 5000, 3, 4, "tttgtttt"),
    ],
    ids=lambda models: f"{models.precision}-{models.script}",
)
def test_what_a_plan_does_not_know_may_take_room_on_host(models: TwoModels, log_ratio: float | None) -> None:
    """Gradients that nobody steps came after the plan was made; with its shadow buffers they were more than HOST may
    hold:
    AssertionError: host over its cap, out of backward."""
    tight, _ = models.train(log_ratio=log_ratio)
    ample, plan_misses = replace(models, device_nbytes=8 << 20, host_nbytes=8 << 20).train(log_ratio=log_ratio)
    assert tight == ample
    assert plan_misses == 0


MIB = 1 << 20
SHAPE = Shape(layers=8, width=128, heads=4, vocab=512)
"""1.8 M parameters: 23.37 MiB of chunks in bf16, gradients in the place of weights."""


class TightGPT:
    """A GPT and the two tiers that it is trained on."""

    def __init__(self, device_nbytes: int, host_nbytes: int) -> None:
        memory = {"device": device_nbytes, "host": host_nbytes}
        values = {"precision": "bf16", "default_chunk_size": 70_000, "memory": memory}
        self.manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(values))
        torch.manual_seed(0)
        with self.manager.init():
            self.model = GPT(SHAPE, seq=32)
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=self.manager, lr=1e-3)

    def step(self, seed: int) -> float:
        loss: Tensor = self.model(torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(seed)))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        audit(self.manager)
        return loss.item()


@cpu_only
@pytest.mark.parametrize("device_nbytes", [8 * MIB, *(pytest.param(n * MIB, marks=pytest.mark.full) for n in (12, 20))])
def test_both_tiers_hold_a_model_and_one_mebibyte(device_nbytes: int) -> None:
    """DEVICE was reserved for all weights and gradients: a plan had more on HOST than fits, and none was followed."""
    tight = TightGPT(device_nbytes, int(24.37 * MIB) - device_nbytes)
    ample = TightGPT(64 * MIB, 64 * MIB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(5):
            assert tight.step(seed) == ample.step(seed)
    timeline = tight.manager.timeline()
    assert timeline is not None
    assert timeline.plan_misses == 0
    assert tight.manager.plan is not None
    for (name, value), (_, expected) in zip(
        tight.model.state_dict().items(), ample.model.state_dict().items(), strict=True
    ):
        assert torch.equal(value, expected), name


@cpu_only
def test_steps_of_two_kinds_do_not_take_turns_on_device() -> None:
    """Each would have filled DEVICE with its own groups for good, and moved those of the other one to HOST."""
    values = {"precision": "bf16", "default_chunk_size": 66_000, "memory": {"device": 9 * MIB, "host": 64 * MIB}}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(values)) as manager:
        with manager.init():
            models = [nn.Sequential(*(nn.Linear(256, 256) for _ in range(10))) for _ in range(2)]
        optimizers = [chunkmem.AdamW(model.parameters(), manager=manager) for model in models]
        found = []
        for seed in range(14):
            model, optimizer = models[seed % 2], optimizers[seed % 2]
            x = torch.randn(4, 256, generator=torch.Generator().manual_seed(seed))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            states = [c for c in manager.runtime.memory.store.chunks.values() if c.id.role.is_state]
            found.append([chunk.newest_tier() for chunk in states])
        assert found[-4] == found[-3] == found[-2] == found[-1]
