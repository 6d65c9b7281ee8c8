"""What asynchronous pipelines refuse: by name, on all ranks, and the same model trains in 1F1B afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import chunkmem
from chunkmem.assembly.runtime import Runtime
from chunkmem.contrib.async_pipeline.checks import require_trainable
from chunkmem.contrib.async_pipeline.pipeline import AsynchronousPipeline
from tests.helpers.asynchronous_training import AsynchronousTask, train
from tests.helpers.predicted_training import simulated
from tests.helpers.ranks import Team
from tests.helpers.staged_training import Net, StagedTask, loss_of, serial

TASK = StagedTask(micro_batches=2, batch=4, steps=3)
FORGOTTEN = "updates weights between forward and backward of a batch: say by versions="

Outcome = tuple[list[str], dict[str, Tensor]]


@pytest.fixture(scope="module")
def pair() -> Iterator[Team]:
    with Team(2) as team:
        yield team


@pytest.fixture(scope="module")
def four() -> Iterator[Team]:
    with Team(4) as team:
        yield team


def refuse(rank: int, task: StagedTask, problem: str, options: list[dict[str, Any]], folder: str) -> Outcome:
    """Return the errors of `manager.pipeline()` with these options, and the weights after 1F1B with that manager."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", task.sizes, mesh_dim_names=("stage", "shard")[: len(task.sizes)])
    config: dict[str, Any] = {"default_chunk_size": 1600, "distributed": {"timeout_s": 60.0}}
    memory: dict[str, Any] = {"device": 4 << 20, "host": 8 << 20}
    errors = []
    if problem == "disk":
        memory |= {"disk": {"path": folder, "capacity": "64MiB"}}
    if problem == "recomputation":
        config |= {"activations": {"policy": "recompute"}}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({**config, "memory": memory}), mesh=mesh) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Net(task.model)
            if problem == "on host":
                manager.on_host(model.words)
            if problem == "excluded":
                with manager.exclude():
                    norm = nn.LayerNorm(model.blocks[3].norm.normalized_shape)
                model.blocks[3].norm = norm
        made = {
            "freeze": lambda: chunkmem.FreezeSchedule(model.blocks, first=model.words),
            "cache": lambda: chunkmem.FrozenCache(manager, host=1 << 16),
        }
        given: dict[str, Any] = {"first": model.words, "last": model.head, "loss_fn": loss_of, "micro_batches": 2}
        for each in options:
            chosen = {key: made[key]() if key in made else value for key, value in each.items()}
            with pytest.raises(chunkmem.ConfigError) as raised:
                manager.pipeline(model.blocks, **given, **{"schedule": "async-1f1b", "versions": "stash", **chosen})
            errors.append(str(raised.value))
        pipe = manager.pipeline(model.blocks, **given, schedule="1f1b", checkpoint="never")
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        column = rank % task.sizes[-1] if len(task.sizes) > 1 else 0
        for x, y in task.batches(column):
            pipe.step(x, y)
            optimizer.step()
            optimizer.zero_grad()
        return errors, {key: value.clone() for key, value in manager.state_dict().items()}


def assert_trained(task: StagedTask, outcomes: list[Outcome]) -> None:
    """Weights have the bits of plain PyTorch."""
    for key, value in serial(task, untied=task.model == "tied").weights.items():
        assert all(torch.equal(value, weights[key]) for _, weights in outcomes), key


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"versions": None}, FORGOTTEN),
    ({"versions": "stale"}, "versions is 'stale'; give one of stash, predict, predict+gap"),
    ({"schedule": "1f1b"}, "versions='stash' is for schedule='async-1f1b'; '1f1b' updates no weights"),
    ({"checkpoint": "always"}, "checkpoint='always' with schedule='async-1f1b'"),
    ({"checkpoint": "except_last"}, "checkpoint='except_last' with schedule='async-1f1b'"),
    ({"deferred_batch_norm": True}, "deferred_batch_norm with schedule='async-1f1b': batches overlap"),
    ({"freeze": True}, "freeze with schedule='async-1f1b': batches overlap; leave it out, or use schedule='1f1b'"),
    ({"cache": True}, "cache with schedule='async-1f1b': batches overlap"),
    ({"width": "auto"}, "width='auto' with schedule='async-1f1b' is not available"),
    ({"stages_per_rank": 2}, "stages_per_rank is 2"),
]


def test_options_that_are_refused_leave_the_model_as_it_was(pair: Team, tmp_path: Path) -> None:
    outcomes = pair.run(refuse, TASK, "", [options for options, _ in OPTIONS], str(tmp_path))
    for errors, _ in outcomes:
        for (options, said), error in zip(OPTIONS, errors, strict=True):
            assert said in error.replace('"', "'"), options
    assert_trained(TASK, outcomes)


@pytest.mark.parametrize(
    ("problem", "task", "said"),
    [
        ("excluded", TASK, "a parameter outside of chunks, blocks.1.norm.weight of stage 1; leave out manager.exclude"),
        pytest.param(
            "disk", TASK, "keeps versions of weights on HOST, and there is memory.disk; leave", marks=pytest.mark.full
        ),
        pytest.param("recomputation", TASK, 'and activations.policy is "recompute"; leave', marks=pytest.mark.full),
        pytest.param(
            "on host", TASK, "a module that computes on HOST; leave out manager.on_host()", marks=pytest.mark.full
        ),
        pytest.param(
            "shared",
            StagedTask(micro_batches=2, batch=4, steps=3, sizes=(2, 2)),
            "has one rank a stage, and here are 2; leave out the other dimensions",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "tied",
            StagedTask(micro_batches=2, batch=4, steps=3, model="tied"),
            "has stages that share a parameter",
            marks=pytest.mark.full,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_models_and_machines_that_are_refused_train_in_1f1b(
    pair: Team, four: Team, tmp_path: Path, problem: str, task: StagedTask, said: str
) -> None:
    """All ranks raise the same, also where the other one has what is refused."""
    outcomes = (pair if len(task.sizes) == 1 else four).run(refuse, task, problem, [{}], str(tmp_path))
    assert all(said in errors[0] for errors, _ in outcomes), outcomes[0][0]
    assert_trained(task, outcomes)


def test_an_accelerator_is_refused() -> None:
    """Only a CPU has tests of asynchronous pipelines: the rest of the runtime is not looked at."""
    runtime = SimpleNamespace(ranks=SimpleNamespace(size=1), device=torch.device("cuda:0"))
    with pytest.raises(chunkmem.ConfigError, match="sends over gloo, in RAM, and the model is on cuda:0; use schedule"):
        require_trainable(cast(Runtime, runtime), [])


def update_badly(rank: int, task: AsynchronousTask) -> tuple[list[str], dict[str, Tensor]]:
    """Give `pipe.step` what it cannot update with, before the first batch; then train."""
    errors: list[str] = []

    def try_out(pipe: AsynchronousPipeline, manager: chunkmem.ChunkManager, model: nn.Module) -> None:
        x, y = next(task.batches())

        def refused(optimizer: Any, scheduler: Any = None) -> None:
            with pytest.raises(chunkmem.ConfigError) as raised:
                pipe.step(x, y, optimizer=optimizer, scheduler=scheduler)
            errors.append(str(raised.value))

        refused(None)
        refused(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
        refused(chunkmem.Optimizer(torch.optim.RMSprop, model.parameters(), manager=manager, lr=0.1))
        refused(chunkmem.SGD(model.parameters(), manager=manager, lr=0.1))
        good = chunkmem.AdamW(model.parameters(), manager=manager, lr=0.1)
        refused(good, torch.optim.lr_scheduler.ReduceLROnPlateau(good))
        refused(good, torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), 1))
        refused(good, "cosine")
        assert pipe.flush() == []

    outcome = train(rank, task, before=try_out)
    return errors, outcome.weights


def test_what_cannot_update_is_refused_before_a_batch_is_under_way(pair: Team) -> None:
    task = AsynchronousTask("predict+gap", optimizer="sgd", steps=4, checkpoint="never")
    said = [
        "pipe.step() updates the weights itself: give it the optimizer",
        "optimizer is a SGD, which does not know of chunks; give one of chunkmem",
        'versions="predict+gap" knows where chunkmem.SGD, Adam and AdamW go, not Optimizer',
        "takes expected steps from momentum, and that of parameter group 0 is 0",
        "scheduler is a ReduceLROnPlateau, whose step() needs a metric",
        "scheduler is a StepLR of another optimizer",
        "scheduler is a str; pipe.step() takes a torch.optim.lr_scheduler.LRScheduler",
    ]
    plain = simulated(task)
    for errors, weights in pair.run(update_badly, task):
        for expected, error in zip(said, errors, strict=True):
            assert expected in error
        for key, value in plain.weights.items():
            assert torch.allclose(value, weights[key], rtol=0, atol=1e-6), key


def change_under_way(rank: int, task: AsynchronousTask) -> dict[str, Tensor]:
    """Freeze, or have gradients of one's own, while a batch is under way; then train on."""

    def watch(pipe: AsynchronousPipeline, manager: chunkmem.ChunkManager, step: int) -> None:
        if step != 3:
            return
        (model,) = manager.runtime.built.unpacked.roots  # type: ignore[union-attr]
        x, y = next(task.batches())
        with pytest.raises(chunkmem.StateError, match=r"manager.freeze\(\) with 1 batches under way.*pipe.flush\(\)"):
            manager.freeze(model.blocks, prefix=1)
        for load in (lambda: manager.load("nowhere"), lambda: manager.load_state_dict(model.state_dict())):
            with pytest.raises(chunkmem.StateError, match=r"manager.load.*with 1 batches under way.*pipe.flush\(\)"):
                load()
        own = [block for block in model.blocks if next(block.parameters()).requires_grad]
        for block in own:
            block.requires_grad_(False)
        for call in (lambda: pipe.step(x, y), pipe.flush):
            with pytest.raises(chunkmem.StateError, match="requires_grad of a parameter was changed while batches"):
                call()
        for block in own:
            block.requires_grad_(True)
        mine = model.blocks[3 * rank]
        manager.backward(sum(param.square().sum() for param in mine.parameters()))
        with pytest.raises(chunkmem.StateError, match=r"gradients of another backward.*zero_grad\(\) before it"):
            pipe.step(x, y)
        for param in mine.parameters():
            param.grad = None

    return train(rank, task, watch).weights


@pytest.mark.parametrize(
    "versions",
    ["predict", pytest.param("stash", marks=pytest.mark.full), pytest.param("predict+gap", marks=pytest.mark.full)],
)
def test_what_cannot_change_under_way_is_refused_and_nothing_is_lost(pair: Team, versions: str) -> None:
    """The run has the bits of one in which nobody tried."""
    task = AsynchronousTask(versions, checkpoint="never")
    changed, plain = pair.run(change_under_way, task), pair.run(train, task)
    for found, expected in zip(changed, plain, strict=True):
        assert all(torch.equal(value, found[key]) for key, value in expected.weights.items())
