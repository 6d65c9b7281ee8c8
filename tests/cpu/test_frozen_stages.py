"""Frozen stages of a pipeline over ranks: no gradients go to them, and with a cache they have nothing to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import chunkmem
from chunkmem.data.types import Role
from chunkmem.freezing import schedule
from chunkmem.plan.model import Lane
from chunkmem.plan.timeline import StageWork
from chunkmem.ranks.neighbours import Message, Neighbours
from chunkmem.ranks.ranks import Ranks, open_ranks
from tests.helpers.audit import audit
from tests.helpers.frozen_training import BATCH, NUM_SAMPLES, OPTIONS, SAMPLE_NBYTES, Net, Task, loss_of
from tests.helpers.low_precision import LowPlain
from tests.helpers.ranks import RankFailure, Team
from tests.helpers.twins import assert_equal, copied, cpu_only

pytestmark = cpu_only

NUM_PARTS = 4
UNCACHED = {"is_cached": False}


@dataclass
class Step:
    """What one rank has done in a step."""

    sent: list[str] = field(default_factory=list)
    """Messages of tensors, by what they are."""
    calls: Counter[tuple[int, str]] = field(default_factory=Counter)
    """By stage: forwards and backwards."""
    weights_nbytes: int = 0
    """Copied to DEVICE."""


class Run:
    """A pipeline on one rank."""

    def __init__(
        self, manager: chunkmem.ChunkManager, *, is_cached: bool = True, schedule: str = "1f1b", per_rank: int = 1
    ) -> None:
        self.manager = manager
        torch.manual_seed(0)
        with manager.init():
            self.model = Net()
        host_nbytes = NUM_SAMPLES * SAMPLE_NBYTES
        self.cache = chunkmem.FrozenCache(manager, host=host_nbytes) if is_cached else None
        self.pipe: Any = manager.pipeline(
            self.model.blocks,
            first=self.model.words,
            last=self.model.head,
            loss_fn=loss_of,
            micro_batches=NUM_PARTS,
            schedule=schedule,
            stages_per_rank=per_rank,
            freeze=chunkmem.FreezeSchedule(self.model.blocks, alpha=0.5, first=self.model.words),
            cache=self.cache,
        )
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=manager, **OPTIONS)
        self.losses: list[float] = []
        self.data = Task("a growing prefix", "stages").samples(0)

    def step(self, number: int) -> Step:
        """Train with half of the samples."""
        ids = [(number * BATCH + at) % NUM_SAMPLES for at in range(BATCH)]
        found = Step()
        send = Neighbours.send

        def watched(self: Neighbours, tensors: Any, message: Message, **options: Any) -> Any:
            found.sent += [message.label] * bool(tensors)
            return send(self, tensors, message, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Neighbours, "send", watched)
            self.losses.append(self.pipe.step(self.data[0][ids], self.data[1][ids], ids=ids).item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        audit(self.manager)
        timeline = self.manager.timeline()
        if timeline is not None:
            found.calls = Counter(
                (each.stage, each.work.value) for each in timeline.stage_calls if each.work is not StageWork.WAIT
            )
            copies = (span for span in timeline.spans if span.lane is Lane.H2D and span.chunk is not None)
            found.weights_nbytes = sum(span.nbytes for span in copies if span.chunk.role is Role.PARAM)  # type: ignore[union-attr]
        return found

    def steps(self, num: int) -> Step:
        """Return what the last one of some steps was."""
        return [self.step(number) for number in range(num)][-1]


def in_stages(rank: int, work: Callable[[Run], Any], how: Mapping[str, Any], sizes: tuple[int, ...] = (2,)) -> Any:
    """Have one rank do that with a pipeline, made as said."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("stage", "shard")[: len(sizes)])
    config = Task("a growing prefix", "stages", device_nbytes=32 << 10).make_config()
    with chunkmem.ChunkManager(config, mesh=mesh) as manager:
        return work(Run(manager, **how))


def freeze_a_stage(run: Run) -> tuple[Step, Step]:
    """Return a step with all trained, and one with the first stage frozen."""
    trained = run.steps(6)
    assert run.pipe.end_epoch().num_params > 0
    return trained, run.steps(10)


def test_no_gradients_go_to_a_frozen_stage(pair: Team) -> None:
    (first_before, first), (last_before, last) = pair.run(in_stages, freeze_a_stage, UNCACHED)
    assert sorted(kind(label) for label in first_before.sent + last_before.sent) == ["gradients"] * 4 + ["outputs"] * 4
    assert [kind(label) for label in first.sent] == ["outputs"] * 4
    assert last.sent == []
    assert first.calls == {(0, "forward"): 4}
    assert last.calls == {(1, "forward"): 4, (1, "backward"): 4}
    assert first.weights_nbytes <= first_before.weights_nbytes


def kind(label: str) -> str:
    return "gradients" if "gradients" in label else "outputs"


def test_with_a_cache_a_frozen_stage_has_nothing_to_do(pair: Team) -> None:
    (_, first), (_, last) = pair.run(in_stages, freeze_a_stage, {})
    assert first.sent == last.sent == []
    assert not first.calls
    assert first.weights_nbytes == 0
    assert last.calls == {(1, "forward"): 4, (1, "backward"): 4}


def freeze_twice(run: Run) -> list[Any]:
    """Freeze to the middle of the first stage, then to the middle of the second."""
    found: list[Any] = []
    run.steps(2)
    for modules in ([run.model.words, run.model.blocks[0]], [*run.model.blocks[1:3]]):
        run.manager.freeze(modules)
        found += [run.step(number) for number in range(4)]
    return [found, run.losses, copied(run.manager.state_dict())]


@pytest.mark.parametrize(
    ("schedule", "per_rank"),
    [
        ("1f1b", 1),
        pytest.param("looped-bfs", 2, marks=pytest.mark.full),
        pytest.param("gpipe", 1, marks=pytest.mark.full),
        pytest.param("interleaved", 2, marks=pytest.mark.full),
    ],
)
def test_more_blocks_begin_where_fewer_had_ended(pair: Team, schedule: str, per_rank: int) -> None:
    how = {"schedule": schedule, "per_rank": per_rank}
    (first, losses, weights), (last, *_) = pair.run(in_stages, freeze_twice, how)
    (_, *expected), _ = pair.run(in_stages, freeze_twice, how | UNCACHED)
    assert_equal([losses, weights], expected)
    messages = [len(a.sent + b.sent) for a, b in zip(first, last, strict=True)]
    if per_rank == 1:
        assert messages == [8] * 4 + [4, 4, 0, 0]  # words 0 1 | 2 3 head: frozen up to 0, then up to 2


@pytest.mark.full
def test_four_ranks_have_caches_of_their_own_samples(four: Team) -> None:
    """Two pipelines share each stage: they leave blocks out together."""
    found = four.run(in_stages, freeze_twice, {}, (2, 2))
    expected = four.run(in_stages, freeze_twice, UNCACHED, (2, 2))
    for (steps, *ours), (_, *theirs) in zip(found, expected, strict=True):
        assert_equal(ours, theirs)
        assert steps[-1].sent == []


def refuse(run: Run) -> tuple[list[str], list[float]]:
    """All raise, and train on."""
    run.manager.freeze([run.model.words, run.model.blocks[:2]])
    said = []
    run.steps(2)
    with pytest.raises(chunkmem.ConfigError, match="there are 3 ids for 8 samples"):
        run.pipe.step(run.data[0][:8], run.data[1][:8], ids=[0, 1, 2])
    with pytest.raises(chunkmem.ConfigError, match="give ids="):
        run.pipe.step(run.data[0][:8], run.data[1][:8])
    with pytest.raises(chunkmem.StateError) as caught:
        run.pipe.step(run.data[0][1:9], run.data[1][:8], ids=list(range(8)))
    said.append(str(caught.value))
    run.model.blocks[0].append_dropout = nn.Dropout(0.5)
    with pytest.raises(chunkmem.StateError) as caught:
        run.pipe.step(run.data[0][:8], run.data[1][:8], ids=list(range(8)))
    said.append(str(caught.value))
    del run.model.blocks[0].append_dropout
    run.steps(2)
    return said, run.losses


def test_a_batch_that_is_refused_is_refused_on_all_stages(pair: Team) -> None:
    (first, losses), (last, _) = pair.run(in_stages, refuse, {})
    assert losses[2:] != losses[:2]
    assert "the cache of another stage refuses the batch" in first[0]
    assert "sample 0 is not what it was the last time" in last[0]
    assert "drops values at random" in first[1]
    assert first[1] == last[1]


def ask_for_other_samples(run: Run) -> None:
    ids = list(range(8))
    ids[0] += run.manager.runtime.ranks.stages.rank  # type: ignore[union-attr]
    run.pipe.step(run.data[0][:8], run.data[1][:8], ids=ids)


def test_all_stages_are_given_the_same_ids(pair: Team) -> None:
    with pytest.raises(RankFailure, match="the batch of the pipeline differs between ranks"):
        pair.run(in_stages, ask_for_other_samples, {})


def load_other_weights(run: Run) -> Any:
    """Those of the first stage alone: only its rank can notice."""
    run.manager.freeze([run.model.words, run.model.blocks[:2]])
    run.steps(6)
    state = run.manager.state_dict()
    run.manager.load_state_dict({k: v * 1.1 if k.startswith("blocks.0") else v for k, v in state.items()})
    run.steps(4)
    return run.losses


def test_other_weights_of_a_frozen_stage_are_noticed(pair: Team) -> None:
    assert_equal(pair.run(in_stages, load_other_weights, {}), pair.run(in_stages, load_other_weights, UNCACHED))


def divide_again(run: Run) -> Any:
    """What the pipeline was made with survives."""
    run.steps(2)
    reports = [run.pipe.end_epoch().num_params]
    run.steps(2)
    run.pipe = run.pipe.repartition(stages=1)
    run.steps(3)
    reports.append(run.pipe.end_epoch().num_params)
    run.steps(3)
    frozen = [not any(p.requires_grad for p in m.parameters()) for m in (run.model.words, *run.model.blocks)]
    return reports, frozen, copied(run.manager.state_dict())


@pytest.mark.full
def test_the_schedule_and_the_cache_survive_a_repartition(pair: Team) -> None:
    first, second = pair.run(in_stages, divide_again, UNCACHED)
    assert_equal(first, second)
    block = sum(param.numel() for param in Net().blocks[0].parameters())
    assert first[0] == [sum(p.numel() for p in Net().words.parameters()) + 2 * block, block]
    assert first[1] == [True, True, True, True, False]
    assert_equal(pair.run(in_stages, divide_again, {}), [first, second])  # with a cache


class Here:
    """A manager of plain parameters."""

    def __init__(self) -> None:
        self.runtime: Any = SimpleNamespace(ranks=open_ranks(timeout_s=1.0))

    def gather(self, params: Any = None, *, grads: bool = False) -> AbstractContextManager[None]:
        return nullcontext()


ADAPTIVE_EPOCHS = 3


def adaptive(rank: int, sizes: tuple[int, ...], precision: str) -> Any:
    """Train some epochs. All but the first of the ranks that share a stage add squares up with other roundings."""
    torch.set_num_threads(1)
    usual = schedule._on_all_ranks

    def rounded_otherwise(own: Sequence[float], ranks: Ranks) -> Sequence[float]:
        return usual([square * (1 + 1e-9 * ranks.rank) for square in own], ranks)

    with patch.object(schedule, "_on_all_ranks", rounded_otherwise):
        return adapted(rank, sizes, precision)


def adapted(rank: int, sizes: tuple[int, ...], precision: str) -> Any:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("stage", "shard")[: len(sizes)])
    column = rank % (sizes[1] if len(sizes) > 1 else 1)
    with chunkmem.ChunkManager(Task("a schedule", "stages", precision).make_config(), mesh=mesh) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Net()
        freezing = chunkmem.FreezeSchedule(model.blocks, alpha=0.6, first=model.words, adaptive=True)
        pipe = manager.pipeline(
            model.blocks,
            first=model.words,
            last=model.head,
            loss_fn=loss_of,
            micro_batches=NUM_PARTS,
            schedule="1f1b" if sizes[0] > 1 else "auto",
            freeze=freezing,
        )
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, **OPTIONS)
        x, y = Task("a schedule", "stages").samples(column)
        found = []
        for _ in range(ADAPTIVE_EPOCHS):
            for at in (0, BATCH):
                pipe.step(x[at : at + BATCH], y[at : at + BATCH])
                optimizer.step()
                optimizer.zero_grad()
            squares = freezing.state_dict()["squares"]
            pipe.end_epoch()
            found.append((squares, freezing.prefix))
        return found, copied(manager.state_dict())


def plain_adaptive(precision: str) -> Any:
    """Do that in plain PyTorch."""
    torch.manual_seed(0)
    low, model = LowPlain(torch.bfloat16), Net()
    if precision == "fp32":
        optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True, **OPTIONS)
    else:
        model = low.ready(model)  # type: ignore[assignment]
        optimizer = low.optimizer(model.parameters(), **OPTIONS)
    schedule = chunkmem.FreezeSchedule(model.blocks, alpha=0.6, first=model.words, adaptive=True)
    x, y = Task("a schedule", "stages").samples(0)
    found = []
    for _ in range(ADAPTIVE_EPOCHS):
        for at in (0, BATCH):
            parts = zip(x[at : at + BATCH].chunk(NUM_PARTS), y[at : at + BATCH].chunk(NUM_PARTS), strict=True)
            for a, b in parts:
                (loss_of(model(a), b) / NUM_PARTS).backward()
            schedule.observe(Here())
            optimizer.step()
            optimizer.zero_grad()
        squares = schedule.state_dict()["squares"]
        for param in (param for module in schedule.step() for param in module.parameters() if param.requires_grad):
            param.requires_grad_(False)
            owner = low.masters.get(param, param)
            optimizer.state.pop(owner, None)
            owner.data.copy_(param.data)
        found.append((squares, schedule.prefix))
    return found, copied(model.state_dict() if precision == "fp32" else low.state_dict(model))


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
def test_an_adaptive_schedule_decides_as_on_one_rank(pair: Team, precision: str) -> None:
    expected = plain_adaptive(precision)
    assert [prefix for _, prefix in expected[0]] != [3, 4, 4], "it is the smallest gradients that decide"
    for found in pair.run(adaptive, (2,), precision):
        assert_equal(found, expected)


@pytest.mark.full
@pytest.mark.parametrize("num_stages", [1, 2])
def test_ranks_that_share_chunks_decide_alike(four: Team, num_stages: int) -> None:
    """What they gather for it is part of steps with regions, too."""
    first, *others = four.run(adaptive, (num_stages, 4 // num_stages), "fp32")
    for found in others:
        assert_equal(found, first)
