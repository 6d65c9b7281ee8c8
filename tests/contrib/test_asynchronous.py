"""Asynchronous pipelines: stages train as a serial simulation with delayed weights does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import chunkmem
from chunkmem.contrib.async_pipeline.pipeline import AsynchronousPipeline
from tests.helpers.asynchronous_training import AsynchronousOutcome, AsynchronousTask, stashed, train
from tests.helpers.predicted_training import simulated
from tests.helpers.ranks import Team
from tests.helpers.spread import spread
from tests.helpers.staged_training import Net, loss_of


def different(plain: AsynchronousOutcome, outcomes: list[AsynchronousOutcome]) -> list[str]:
    """The names of what differs in a bit from one process."""
    found = [
        f"rank {rank}: {key}"
        for rank, outcome in enumerate(outcomes)
        for key, value in plain.weights.items()
        if not torch.equal(value, outcome.weights[key])
    ]
    return found + [f"rank {rank}: losses" for rank, each in enumerate(outcomes) if each.losses != plain.losses]


@pytest.mark.few(1)
@spread(optimizer=("adamw", "sgd"), micro_batches=(2, 1, 4), flush_after=((), (2,)))
def test_stashed_weights_have_the_bits_of_a_simulation(
    pair: Team, optimizer: str, micro_batches: int, flush_after: tuple[int, ...]
) -> None:
    task = AsynchronousTask(optimizer=optimizer, micro_batches=micro_batches, flush_after=flush_after)
    plain = stashed(task)
    assert different(plain, pair.run(train, task)) == []
    no_delay = stashed(replace(task, flush_after=tuple(range(task.steps))))
    assert any(not torch.equal(value, no_delay.weights[key]) for key, value in plain.weights.items())


@pytest.mark.parametrize(
    "task",
    [
        AsynchronousTask(stages=3),
        pytest.param(AsynchronousTask(stages=3, optimizer="sgd", flush_after=(0, 3)), marks=pytest.mark.full),
        pytest.param(AsynchronousTask(stages=3, steps=1), marks=pytest.mark.full),
    ],
    ids=["three stages", "drained early", "one batch"],
)
def test_three_stages(three: Team, task: AsynchronousTask) -> None:
    assert different(stashed(task), three.run(train, task)) == []


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "task",
    [
        pytest.param(AsynchronousTask(model="frozen"), marks=pytest.mark.full),
        AsynchronousTask(model="pairs", batch=5),
        AsynchronousTask(model="ends in a norm", steps=4),
        AsynchronousTask(model="ends in a layer", steps=4),
        pytest.param(AsynchronousTask(model="in place", checkpoint="never"), marks=pytest.mark.full),
        AsynchronousTask(precision="bf16", scheduled=False),
    ],
    ids=[
        "a frozen stage",
        "tuples and a shorter last micro-batch",
        "a norm in the end",
        "a layer in the end",
        "in-place inputs",
        "bf16",
    ],
)
def test_other_models(pair: Team, task: AsynchronousTask) -> None:
    assert different(stashed(task), pair.run(train, task)) == []


@pytest.mark.full
@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("versions", ["stash", "predict", "predict+gap"])
def test_an_overlapped_optimizer_has_the_same_bits(pair: Team, versions: str, clip: float) -> None:
    task = AsynchronousTask(versions, clip=clip, checkpoint="never")
    outcomes = pair.run(train, replace(task, overlaps=True))
    assert different(pair.run(train, task)[0], outcomes) == []


def test_a_norm_is_that_of_all_stages(pair: Team) -> None:
    task = AsynchronousTask(clip=0.05)
    plain = stashed(task)
    for outcome in pair.run(train, task):
        for key, value in plain.weights.items():
            assert torch.allclose(value, outcome.weights[key], atol=1e-5), key


def test_host_has_a_version_for_each_update_of_the_delay(three: Team) -> None:
    """And DEVICE none: the smallest cap that was needed does, with the same bits."""
    task = AsynchronousTask(stages=3)
    outcomes = three.run(train, task)
    for rank, outcome in enumerate(outcomes):
        delay = 2 - rank
        found = outcome.host.get("stash", (0, 0))
        assert found == (delay * outcome.param_nbytes, delay * outcome.param_nbytes)
        assert "stash" not in outcome.device_roles
    tight = replace(task, device_nbytes=max(outcome.required_nbytes for outcome in outcomes))
    assert different(stashed(tight), three.run(train, tight)) == []


def refuse(rank: int, options: dict[str, object]) -> str:
    """Return the error of `manager.pipeline()` with these options."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
    with chunkmem.ChunkManager(AsynchronousTask().make_config(), mesh=mesh) as manager:
        with manager.init():
            model = Net(str(options.get("model", "plain")))
        given = {"schedule": "async-1f1b", "versions": "stash", **options}
        given.pop("model", None)
        with pytest.raises(chunkmem.ChunkmemError) as raised:
            manager.pipeline(
                model.blocks, first=model.words, last=model.head, loss_fn=loss_of, micro_batches=2, **given
            )
    return str(raised.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"versions": None}, "updates weights between forward and backward of a batch: say by versions="),
        ({"versions": "stale"}, "versions is 'stale'; give one of stash"),
        ({"schedule": "1f1b"}, 'versions="stash" is for schedule='),
        ({"checkpoint": "always"}, "checkpoint='always' with schedule='async-1f1b'"),
        ({"deferred_batch_norm": True}, "deferred_batch_norm with schedule="),
        ({"stages_per_rank": 2}, "stages_per_rank is 2"),
        ({"model": "tied"}, "has stages that share a parameter"),
    ],
)
def test_what_is_refused(pair: Team, options: dict[str, object], said: str) -> None:
    for error in pair.run(refuse, options):
        assert said.replace('"', "'") in error.replace('"', "'")


def misuse(rank: int) -> None:
    """Everything that needs a drained pipeline, or the same batch, says so."""

    def watch(pipe: AsynchronousPipeline, manager: chunkmem.ChunkManager, step: int) -> None:
        x, y = next(AsynchronousTask().batches())
        if step == 1:
            with pytest.raises(
                chunkmem.StateError, match=r"pipe.evaluate\(\) with 1 batches under way; call pipe.flush"
            ):
                pipe.evaluate(x, y)
            with pytest.raises(chunkmem.ConfigError, match="keeps its stages"):
                pipe.repartition(1)
        if step == 2:
            pipe.flush()
            assert pipe.flush() == []
            assert torch.isfinite(pipe.evaluate(x, y))

    train(rank, AsynchronousTask(), watch)


def test_what_needs_a_drained_pipeline_says_so(pair: Team) -> None:
    pair.run(misuse)


def differ(rank: int) -> str:
    def watch(pipe: AsynchronousPipeline, manager: chunkmem.ChunkManager, step: int) -> None:
        if step == 1:
            x, y = next(AsynchronousTask().batches())
            for _ in range(3):
                pipe.step(x + rank, y)

    with pytest.raises(chunkmem.ChunkmemError) as raised:
        train(rank, AsynchronousTask(), watch)
    return str(raised.value)


def test_another_batch_on_another_rank_is_an_error(pair: Team) -> None:
    said = pair.run(differ)
    assert all("stage 1 was given another batch than stage 0" in error for error in said)


@pytest.mark.few(2)
@spread(
    optimizer=("adamw", "adam", "adam without decay", "sgd", "sgd with decay"),
    scheduled=(True, False),
    micro_batches=(2, 1),
)
def test_predicted_weights_are_those_of_a_simulation(
    pair: Team, optimizer: str, scheduled: bool, micro_batches: int
) -> None:
    task = AsynchronousTask(
        "predict", optimizer=optimizer, scheduled=scheduled, micro_batches=micro_batches, checkpoint="never"
    )
    plain = simulated(task)
    for outcome in pair.run(train, task):
        assert outcome.losses == pytest.approx(plain.losses, abs=1e-6)
        for key, value in plain.weights.items():
            assert torch.allclose(value, outcome.weights[key], rtol=0, atol=1e-6), key
        assert outcome.host.get("predicted", (0, 0))[1] in (outcome.param_nbytes, 0)
        assert "predicted" not in outcome.device_roles
    stashed_instead = stashed(task)
    assert any((value - stashed_instead.weights[key]).abs().max() > 1e-5 for key, value in plain.weights.items())


@pytest.mark.few(1)
@spread(optimizer=("adam", "sgd with decay", "sgd", "adamw"), scheduled=(True, False), micro_batches=(2, 1))
def test_gradients_are_divided_by_gaps_as_in_a_simulation(
    pair: Team, optimizer: str, scheduled: bool, micro_batches: int
) -> None:
    task = AsynchronousTask(
        "predict+gap", optimizer=optimizer, scheduled=scheduled, micro_batches=micro_batches, checkpoint="never"
    )
    plain = simulated(task)
    for rank, outcome in enumerate(pair.run(train, task)):
        assert outcome.losses == pytest.approx(plain.losses, abs=1e-6)
        for key, value in plain.weights.items():
            assert torch.allclose(value, outcome.weights[key], rtol=0, atol=1e-6), key
        delay = 1 - rank  # predictions of as many rounds and one, and a float32 average
        assert outcome.host.get("predicted", (0, 0))[1] == (delay and delay + 1) * outcome.param_nbytes
        assert outcome.host.get("squared steps", (0, 0))[1] == delay * outcome.param_nbytes
        assert "predicted" not in outcome.device_roles
    without = simulated(replace(task, versions="predict"))
    assert any((value - without.weights[key]).abs().max() > 1e-5 for key, value in plain.weights.items())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "task",
    [
        AsynchronousTask("predict+gap", optimizer="sgd with decay", two_groups=True),
        AsynchronousTask("predict+gap", optimizer="adam", two_groups=True),
        pytest.param(AsynchronousTask("predict+gap", optimizer="sgd", flush_after=(0, 3)), marks=pytest.mark.full),
        pytest.param(AsynchronousTask("predict+gap", optimizer="adam", clip=0.05), marks=pytest.mark.full),
        *(
            pytest.param(AsynchronousTask("predict+gap", stages=3, optimizer=name, steps=steps), marks=pytest.mark.full)
            for name, steps in (("sgd", 1), ("sgd", 2), ("sgd", 7), ("adam", 7))
        ),
    ],
    ids=lambda task: f"{task.versions} {task.optimizer} {task.stages} stages {task.steps} steps",
)
def test_gaps_of_other_trainings(pair: Team, three: Team, task: AsynchronousTask) -> None:
    """Parameter groups with options of their own, averages that begin when the pipeline fills, norms, delays."""
    task = replace(task, checkpoint="never")
    plain = simulated(task)
    for outcome in (pair if task.stages == 2 else three).run(train, task):
        assert outcome.losses == pytest.approx(plain.losses, abs=1e-6)
        for key, value in plain.weights.items():
            assert torch.allclose(value, outcome.weights[key], rtol=0, atol=1e-6), key


@pytest.mark.few(1)
@spread(
    versions=("stash", "predict", "predict+gap"),
    precision=("fp16", "bf16"),
    scheduled=(True, False),
    optimizer=("adam", "adamw"),
)
def test_low_precision_has_the_bits_of_a_simulation(
    pair: Team, versions: str, precision: str, scheduled: bool, optimizer: str
) -> None:
    """In fp16, gradients of the first stage overflow in some batches: no stage makes an update for these."""
    model = "hot" if precision == "fp16" else "plain"
    task = AsynchronousTask(versions, optimizer=optimizer, model=model, precision=precision, scheduled=scheduled)
    task = replace(task, initial_scale_power=8, steps=9, checkpoint="never")
    plain = (stashed if versions == "stash" else simulated)(task)
    outcomes = pair.run(train, task)
    assert different(plain, outcomes) == []
    assert [(each.scale, each.num_skipped) for each in outcomes] == [(plain.scale, plain.num_skipped)] * 2
    assert 0 < plain.num_skipped < task.steps if precision == "fp16" else plain.num_skipped == 0


@pytest.mark.full
def test_three_stages_predict_each_by_its_own_delay(three: Team) -> None:
    task = AsynchronousTask("predict", stages=3, optimizer="sgd", checkpoint="never")
    plain = simulated(task)
    for outcome in three.run(train, task):
        for key, value in plain.weights.items():
            assert torch.allclose(value, outcome.weights[key], rtol=0, atol=1e-6), key
