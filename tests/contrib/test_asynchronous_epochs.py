"""What is done between the epochs of an asynchronous pipeline: evaluate, save, resume, freeze."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import chunkmem
from chunkmem.checkpoints import files
from chunkmem.contrib.async_pipeline.pipeline import AsynchronousPipeline
from chunkmem.pipeline.stage import PackedStage
from tests.helpers.asynchronous_training import AsynchronousOutcome, AsynchronousTask, stashed, train
from tests.helpers.predicted_training import simulated
from tests.helpers.ranks import Team
from tests.helpers.staged_training import Net, loss_of

OTHERS = ("stash", "predict+gap")
EVALUATED, SAVED = 2, 3


@pytest.fixture(scope="module")
def pair() -> Iterator[Team]:
    with Team(2) as team:
        yield team


def plain_of(task: AsynchronousTask) -> AsynchronousOutcome:
    return (stashed if task.versions == "stash" else simulated)(task)


def assert_close(plain: dict[str, Tensor], found: dict[str, Tensor], versions: str) -> None:
    """To the bit with stashed weights; predictions round on their way."""
    for key, value in plain.items():
        assert torch.allclose(value, found[key], rtol=0, atol=0 if versions == "stash" else 1e-6), key


def look(rank: int, task: AsynchronousTask) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Return an evaluation after a flush, the weights then, and those while a batch is under way."""
    seen: list[float] = []
    weights: list[dict[str, Tensor]] = []

    def watch(pipe: AsynchronousPipeline, manager: chunkmem.ChunkManager, step: int) -> None:
        if step == EVALUATED:
            pipe.flush()
            seen.append(pipe.evaluate(*next(task.batches())).item())
        if step in (EVALUATED, EVALUATED + 3):
            weights.append({key: value.clone() for key, value in manager.state_dict().items()})

    train(rank, task, watch)
    return seen[0], weights[0], weights[1]


@pytest.mark.parametrize("versions", ["predict", *(pytest.param(each, marks=pytest.mark.full) for each in OTHERS)])
def test_weights_are_what_they_are_at_any_time(pair: Team, versions: str) -> None:
    """Not predictions, not older ones: after a flush, and after the updates that were made with a batch under way."""
    task = AsynchronousTask(versions, checkpoint="never", flush_after=(EVALUATED,), optimizer="sgd")
    outcomes = pair.run(look, replace(task, flush_after=()))
    x, y = next(task.batches())
    for loss, drained, under_way in outcomes:
        assert_close(plain_of(replace(task, steps=EVALUATED + 1)).weights, drained, versions)
        assert_close(plain_of(replace(task, steps=EVALUATED + 3)).weights, under_way, versions)
        model = Net(task.model)
        model.load_state_dict(drained)
        with torch.no_grad():
            parts = zip(x.chunk(task.micro_batches), y.chunk(task.micro_batches), strict=True)
            assert loss == pytest.approx(sum(loss_of(model(a), b).item() for a, b in parts) / 2, abs=1e-6)


def save_after_a_flush(rank: int, task: AsynchronousTask, folder: str) -> None:
    """A thread writes while the next batches are trained on, and looks at chunks while they hold predictions."""
    write, forward = files._write_item, PackedStage.forward_one_chunk

    def write_slowly(*args: Any) -> Any:
        time.sleep(0.003)
        return write(*args)

    def run_slowly(self: PackedStage, *args: Any) -> Any:
        time.sleep(0.03)
        return forward(self, *args)

    def watch(pipe: AsynchronousPipeline, manager: chunkmem.ChunkManager, step: int) -> None:
        if step == SAVED:
            pipe.flush()
            assert pipe._updates is not None
            manager.save(folder, pipe._updates.optimizer, asynchronous=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_write_item", write_slowly)
        patch.setattr(PackedStage, "forward_one_chunk", run_slowly)
        train(rank, task, watch)


@pytest.mark.parametrize(
    ("versions", "precision"),
    [
        ("predict+gap", "fp32"),
        pytest.param("predict", "fp16", marks=pytest.mark.full),
        pytest.param("stash", "fp32", marks=pytest.mark.full),
        pytest.param("stash", "fp16", marks=pytest.mark.full),
    ],
)
def test_what_was_saved_after_a_flush_resumes_to_the_bit(
    pair: Team, tmp_path: Path, versions: str, precision: str
) -> None:
    task = AsynchronousTask(versions, checkpoint="never", scheduled=False, precision=precision)
    folder = str(tmp_path / "saved")
    pair.run(save_after_a_flush, task, folder)
    resumed = pair.run(train, replace(task, begin=SAVED + 1, loads=folder))
    whole = pair.run(train, replace(task, flush_after=(SAVED,)))
    for found, expected in zip(resumed, whole, strict=True):
        assert found.losses == expected.losses[SAVED + 1 :]
        assert found.scale == expected.scale
        assert all(torch.equal(value, found.weights[key]) for key, value in expected.weights.items())


@pytest.mark.few(1)
@pytest.mark.parametrize("steps", [3, pytest.param(7, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("versions", "keep_states"),
    [
        ("predict", True),
        ("stash", False),
        *(pytest.param(*each, marks=pytest.mark.full) for each in (("predict", False), ("stash", True))),
        *(pytest.param("predict+gap", keep, marks=pytest.mark.full) for keep in (True, False)),
    ],
)
def test_blocks_are_frozen_between_epochs(pair: Team, versions: str, keep_states: bool, steps: int) -> None:
    """From then on, frozen weights stay: momentum that is kept for later is not where they go."""
    task = AsynchronousTask(versions, checkpoint="never", flush_after=(1,), freeze_after=1, steps=steps)
    precision = "bf16" if keep_states else "fp32"  # with master weights, which are kept, too
    task = replace(task, precision=precision, optimizer="adamw" if keep_states else "sgd", keep_states=keep_states)
    plain, before = plain_of(task), plain_of(replace(task, steps=2, flush_after=(), freeze_after=None))
    for outcome in pair.run(train, task):
        assert outcome.losses == pytest.approx(plain.losses, abs=1e-6)
        assert_close(plain.weights, outcome.weights, versions)
        names = [key for key in plain.weights if key.startswith(("words", "blocks.0"))]
        assert_close({key: before.weights[key] for key in names}, outcome.weights, versions)
        assert any(not torch.equal(before.weights[key], value) for key, value in outcome.weights.items())
