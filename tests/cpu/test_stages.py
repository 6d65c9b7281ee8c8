"""Pipelines whose stages are on different ranks: they train as one process does in the order of the schedule."""

from __future__ import annotations

import copy
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

import chunkmem
from chunkmem.data.types import Role, Tier
from chunkmem.pipeline.staged import StagedPipeline
from chunkmem.plan.timeline import StageWork, Timeline
from chunkmem.ranks.neighbours import Message, Neighbours
from chunkmem.report.page import timeline_page
from chunkmem.report.run import load_run
from chunkmem.report.tracks import STALL, stage_tracks
from chunkmem.runtime.store import ChunkStore
from tests.helpers.ranks import Team
from tests.helpers.shared_training import Block
from tests.helpers.staged_training import Net, StagedTask, different, loss_of, serial, train

Saved = tuple[dict[str, Any], dict[str, Any]]
SHAPES = {
    ("gpipe", 1): (),
    ("1f1b", 1): ("always", "fp32"),
    ("interleaved", 1): (),
    ("looped-bfs", 1): ("except_last", "bf16"),
    ("interleaved", 2): (),
    ("looped-bfs", 2): ("never", "fp16"),
}
"""By schedule and stages per rank: the mode and precision that run without --full."""
MODES = ("always", "except_last", "never")


def _matrix() -> Iterator[object]:
    for (schedule, per_rank), usual in SHAPES.items():
        for mode in MODES:
            for precision in ("fp32", "bf16", "fp16"):
                task = StagedTask(schedule, per_rank, mode, precision=precision)
                marks = () if (mode, precision) == usual else (pytest.mark.full,)
                yield pytest.param(task, id=f"{schedule}-{per_rank}-{mode}-{precision}", marks=marks)


@pytest.mark.few(1)
@pytest.mark.parametrize("task", list(_matrix()))
def test_stages_train_as_one_process(pair: Team, task: StagedTask) -> None:
    outcomes = pair.run(train, task)
    assert different(task, outcomes) == []
    assert all(outcome.misses[3:] == [0] * (task.steps - 3) for outcome in outcomes)
    tight = replace(task, device_nbytes=max(outcome.required_nbytes for outcome in outcomes))
    outcomes = pair.run(train, tight)
    assert different(tight, outcomes) == []
    assert all(outcome.misses[3:] == [0] * (task.steps - 3) for outcome in outcomes)


OTHERS = [
    pytest.param(StagedTask(batch=7), id="a shorter last micro-batch"),
    pytest.param(StagedTask("gpipe", batch=3), id="fewer samples than micro-batches", marks=pytest.mark.full),
    pytest.param(StagedTask(model="pairs", checkpoint="always"), id="tuples between stages"),
    pytest.param(StagedTask("looped-bfs", 2, "always", "norms"), id="running statistics", marks=pytest.mark.full),
    pytest.param(StagedTask(model="frozen"), id="a frozen stage"),
    pytest.param(StagedTask(accumulate=2, steps=3), id="two batches a step", marks=pytest.mark.full),
    pytest.param(StagedTask(model="in place"), id="in-place operations on inputs", marks=pytest.mark.full),
    pytest.param(StagedTask("interleaved", 2, "auto"), id="policies by the planner", marks=pytest.mark.full),
    pytest.param(StagedTask(precision="fp16", model="hot", initial_scale_power=20), id="overflow on one stage"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("task", OTHERS)
def test_other_models_and_batches(pair: Team, task: StagedTask) -> None:
    assert different(task, pair.run(train, task)) == []


OUTSIDE = [
    pytest.param(StagedTask("gpipe", outside=True, at_ends=True), id="the first stage alone has the batch"),
    pytest.param(StagedTask(outside=True, checkpoint="always", precision="fp16"), id="recomputed in fp16"),
    pytest.param(StagedTask(outside=True, model="pairs", batch=7), id="tuples between stages", marks=pytest.mark.full),
    pytest.param(StagedTask(outside=True, model="frozen"), id="a frozen stage", marks=pytest.mark.full),
    pytest.param(StagedTask(outside=True, model="looks at values"), id="announced shapes", marks=pytest.mark.full),
    pytest.param(StagedTask(outside=True, precision="bf16"), id="bf16", marks=pytest.mark.full),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("task", OUTSIDE)
def test_a_loss_outside_of_the_pipeline(pair: Team, task: StagedTask) -> None:
    outcomes = pair.run(train, task)
    assert different(task, outcomes) == []
    repeats = task.model != "looks at values"
    assert all(outcome.misses[3:] == [0] * (task.steps - 3) for outcome in outcomes if repeats)
    tight = replace(task, device_nbytes=max(outcome.required_nbytes for outcome in outcomes))
    assert different(tight, pair.run(train, tight)) == []


def joined_wrongly(rank: int, task: StagedTask) -> list[str]:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
    said: list[str] = []
    with chunkmem.ChunkManager(task.make_config(), mesh=mesh) as manager:
        with manager.init():
            blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        pipe = manager.pipeline(
            blocks,
            loss_fn=lambda output, target: (output - target).square().mean(),
            micro_batches=2,
            schedule=task.schedule,
            stages_per_rank=task.stages_per_rank,
        )
        x = torch.ones(4, 4)

        def tried(call: Callable[[], object]) -> None:
            try:
                call()
            except chunkmem.ChunkmemError as error:
                said.append(str(error))

        tried(pipe.backward)
        tried(lambda: pipe(x.clone().requires_grad_(rank == 1)))
        if task.stages_per_rank == 1:
            output = pipe(x)
            tried(lambda: pipe.step(x, x))
            if rank == 1:
                manager.backward(output.sum())
            else:
                pipe.backward()
        with torch.no_grad():
            said.append("outputs" if pipe(x) is not None else "none")
    return said


@pytest.mark.few(1)
@pytest.mark.parametrize("task", [StagedTask(), StagedTask("looped-bfs", 2)], ids=["1f1b", "looped-bfs"])
def test_calls_for_outputs_that_are_refused(pair: Team, task: StagedTask) -> None:
    first, last = pair.run(joined_wrongly, task)
    assert first[0].endswith("this rank has called no pipe(x) before")
    assert "this rank has the outputs: call manager.backward(loss)" in last[0]
    assert (first[-1], last[-1]) == ("none", "outputs")
    if task.stages_per_rank == 2:
        assert all("with gradients, over stages, and several stages a rank" in said[1] for said in (first, last))
        return
    assert all(
        "and inputs that require gradients on a rank without the first stage: call" in said[1] for said in (first, last)
    )
    assert all("before the backward of what pipe(x) has returned" in said[2] for said in (first, last))
    assert len(first) == len(last)


def generator_and_critic() -> tuple[nn.Module, nn.ModuleList]:
    torch.manual_seed(0)
    return nn.Linear(3, 4), nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))


def generate(rank: int, frozen: int, checkpoint: str) -> list[Tensor]:
    """Train blocks and, on the first stage, what makes the inputs; return the weights of both."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
    config = chunkmem.Config.from_dict({"default_chunk_size": 64, "memory": {"device": 1 << 16, "host": 1 << 20}})
    with chunkmem.ChunkManager(config, mesh=mesh) as manager:
        generator, blocks = generator_and_critic()
        blocks[:frozen].requires_grad_(False)
        blocks = manager.wrap(blocks)
        pipe = manager.pipeline(blocks, loss_fn=loss_of, micro_batches=2, checkpoint=checkpoint, schedule="1f1b")
        optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(generator.parameters(), lr=0.1)]
        if frozen < len(blocks):
            optimizers.append(chunkmem.SGD(blocks.parameters(), manager=manager, lr=0.1))
        for z in noise():
            output = pipe(generator(z) if rank == 0 else None)
            if output is None:
                pipe.backward()
            else:
                manager.backward(output.square().sum())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [*manager.state_dict().values(), *(generator.parameters() if rank == 0 else ())]


def noise() -> list[Tensor]:
    return [torch.linspace(-1, 1, 12).reshape(4, 3) + step for step in range(5)]


@pytest.mark.parametrize("frozen", [0, pytest.param(2, marks=pytest.mark.full), 4])
@pytest.mark.parametrize("checkpoint", ["never", pytest.param("always", marks=pytest.mark.full)])
def test_what_makes_the_inputs_is_trained(pair: Team, frozen: int, checkpoint: str) -> None:
    generator, blocks = generator_and_critic()
    before = generator.weight.detach().clone()
    blocks[:frozen].requires_grad_(False)
    optimizer = torch.optim.SGD([*generator.parameters(), *blocks.parameters()], lr=0.1, fused=True)
    for z in noise():
        outputs = [nn.Sequential(*blocks)(part) for part in generator(z).split(2)]
        torch.cat(outputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    first, last = pair.run(generate, frozen, checkpoint)
    critic = [*blocks.state_dict().values()]
    assert len(last) == len(critic)
    assert all(torch.equal(a, b) for a, b in zip(last, critic, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, [*critic, *generator.parameters()], strict=True))
    assert not torch.equal(before, generator.weight)


@pytest.mark.full
def test_a_loss_outside_of_the_pipeline_with_data_parallel_ranks(four: Team) -> None:
    task = StagedTask(outside=True, sizes=(2, 2), at_ends=True)
    assert different(task, four.run(train, task)) == []


@pytest.mark.parametrize(
    "model", ["tied", *(pytest.param(name, marks=pytest.mark.full) for name in ("plain", "frozen"))]
)
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("looped-bfs", marks=pytest.mark.full)])
def test_a_norm_is_that_of_one_process(pair: Team, model: str, schedule: str) -> None:
    task = StagedTask(schedule, model=model, clip=0.1)
    outcomes = pair.run(train, task)
    plain = serial(task)
    for outcome in outcomes:
        assert outcome.norms == pytest.approx(plain.norms, rel=1e-6)
        for key, value in plain.weights.items():
            assert torch.allclose(value, outcome.weights[key], atol=1e-5), key


@pytest.mark.parametrize("per_rank", [1, pytest.param(2, marks=pytest.mark.full)])
def test_tied_parameters_of_two_stages_stay_alike(pair: Team, per_rank: int) -> None:
    task = StagedTask("looped-bfs" if per_rank == 2 else "1f1b", per_rank, model="tied", steps=10)
    outcomes = pair.run(train, task)
    plain, untied = serial(task), serial(task, untied=True)
    for outcome in outcomes:
        assert [key for key, value in untied.weights.items() if not torch.equal(value, outcome.weights[key])] == []
        assert torch.equal(outcome.weights["words.weight"], outcome.weights["head.weight"])
        for key, value in plain.weights.items():
            # One process adds both for each micro-batch. Next to 1, neighbouring floats are 1.2e-7 apart.
            assert torch.allclose(value, outcome.weights[key], rtol=1e-7, atol=1e-7), key


@pytest.mark.parametrize(
    "task",
    [
        StagedTask(model="tied", accumulate=2),
        pytest.param(StagedTask(model="tied", sizes=(2, 2), empty=((2, 1),)), marks=pytest.mark.full),
        pytest.param(StagedTask(sizes=(2, 2), clip=0.1), marks=pytest.mark.full),
    ],
    ids=["several batches a step", "data-parallel ranks", "clipping"],
)
def test_tied_parameters_and_norms_with_more_batches(four: Team, pair: Team, task: StagedTask) -> None:
    outcomes = (four if len(task.sizes) > 1 else pair).run(train, task)
    plain = serial(task)
    for outcome in outcomes:
        for key, value in plain.weights.items():
            assert torch.allclose(value, outcome.weights[key], atol=1e-5), key
            assert torch.equal(outcomes[0].weights[key], outcome.weights[key]), key


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("looped-bfs", marks=pytest.mark.full)])
@pytest.mark.parametrize("checkpoint", ["never", pytest.param("always", marks=pytest.mark.full)])
def test_stages_with_data_parallel_ranks(four: Team, schedule: str, checkpoint: str) -> None:
    task = StagedTask(schedule, checkpoint=checkpoint, sizes=(2, 2), empty=((2, 1),))
    assert different(task, four.run(train, task)) == []


VALUES = StagedTask(model="looks at values", batch=9)
OF_VALUES = {
    "all are given the batch": VALUES,
    "given at the ends": replace(VALUES, at_ends=True),
    "given at the ends, plain": StagedTask(at_ends=True),
    "frozen": StagedTask(model="frozen", at_ends=True),
    "recomputed": replace(VALUES, checkpoint="always", schedule="gpipe"),
    "looped": replace(VALUES, schedule="looped-bfs", stages_per_rank=2, at_ends=True),
    "interleaved": replace(VALUES, schedule="interleaved", stages_per_rank=2, batch=7),
    "accumulated": replace(VALUES, accumulate=2, micro_batches=2),
    "fp16": replace(VALUES, precision="fp16"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", OF_VALUES)
def test_what_goes_between_stages_is_said_where_shapes_do_not_tell(pair: Team, name: str) -> None:
    """Blocks that look at values were refused, and all ranks had to be given the whole batch."""
    assert different(OF_VALUES[name], pair.run(train, OF_VALUES[name])) == []


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "looped-bfs"])
def test_the_same_on_four_ranks(four: Team, sizes: tuple[int, ...], schedule: str) -> None:
    """Of 9 samples there are four micro-batches, as many as 1F1B over four stages needs: there were three."""
    task = replace(VALUES, sizes=sizes, schedule=schedule, at_ends=True)
    assert different(task, four.run(train, task)) == []


def lack_values(rank: int) -> list[str]:
    """Return what is raised where a stage has not what it needs, and a loss where it has."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
    with chunkmem.ChunkManager(StagedTask().make_config(), mesh=mesh) as manager:
        with manager.init():
            model = Net("looks at values")
        pipe = manager.pipeline(
            model.blocks, first=model.words, last=model.head, loss_fn=loss_of, micro_batches=4, schedule="1f1b"
        )
        x, y = next(StagedTask().batches())
        said = []
        for given in ((None, y), (x if rank else None, y), (x, None if rank else y)):
            with pytest.raises(chunkmem.StateError) as raised:
                pipe.step(*given)
            said.append(str(raised.value))
        at_ends = (x, None) if rank == 0 else (None, y)
        assert pipe.evaluate(*at_ends) == pipe.evaluate(x, y) == pipe.step(*at_ends)
        return said


def test_who_needs_what_of_a_batch_is_said_on_all_ranks(pair: Team) -> None:
    one, other = pair.run(lack_values)
    assert one == other
    assert all("rank 0, which has the first stage, was given no inputs" in said for said in one[:2])
    assert "rank 1, which has the last stage, was given no target, and another rank was" in one[2]


def die(rank: int) -> None:
    def watch(pipe: StagedPipeline, manager: chunkmem.ChunkManager, step: int) -> None:
        if step == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(chunkmem.RankError, match=r"rank 1 does not answer.*\(rank 1 has stage 1\)"):
        train(rank, StagedTask(timeout_s=4.0), watch)


def test_a_dead_rank_is_named_with_its_stage(pair: Team) -> None:
    pair.run(die, lost=(1,))


def fail(rank: int, bad: int, task: StagedTask) -> str:
    """Return the error of this rank, when a block of another one raises something."""

    def raise_it(*_: object) -> None:
        raise ValueError("no such word")

    def watch(pipe: StagedPipeline, manager: chunkmem.ChunkManager, step: int) -> None:
        if (step, rank) == (2, bad):
            pipe.stages[0].submod.blocks[1].register_forward_pre_hook(raise_it)

    with pytest.raises((ValueError, chunkmem.RankError)) as raised:
        train(rank, task, watch)
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("bad", [2, pytest.param(0, marks=pytest.mark.full)])
def test_what_a_rank_raises_is_said_on_all_ranks(four: Team, bad: int) -> None:
    """Also on those that exchange nothing with it: they hear it from those that do."""
    said = four.run(fail, bad, StagedTask(sizes=(2, 2), timeout_s=20.0))
    assert said.pop(bad) == "ValueError: no such word"
    for error in said:
        assert error.startswith("RankError: ")
        assert f"rank {bad} raised ValueError: no such word" in error
        assert error.count(f"(rank {bad} has stage {bad // 2})") == 1


def lack_a_batch(rank: int) -> str:
    """Return the error of this rank, when the other one is given a batch of no samples."""

    def watch(pipe: StagedPipeline, manager: chunkmem.ChunkManager, step: int) -> None:
        if (step, rank) == (2, 1):
            pipe.step(torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, 3, dtype=torch.long))

    with pytest.raises(chunkmem.ChunkmemError) as raised:
        train(rank, StagedTask(timeout_s=20.0), watch)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_batch_that_one_rank_cannot_split_is_said_on_all_ranks(pair: Team) -> None:
    first, second = pair.run(lack_a_batch)
    assert second.startswith("StateError: ")
    assert f"rank 1 raised {second}" in first
    assert "(rank 1 has stage 1)" in first


def run_short(rank: int, task: StagedTask) -> str:
    with pytest.raises(chunkmem.ChunkmemError) as raised:
        train(rank, task)
    return f"{type(raised.value).__name__}: {raised.value}"


def test_what_does_not_fit_one_stage_is_said_on_all_ranks(pair: Team) -> None:
    required = [outcome.required_nbytes for outcome in pair.run(train, StagedTask(model="wide"))]
    small = required.index(max(required))
    assert required[1 - small] < required[small]
    said = pair.run(run_short, StagedTask(model="wide", device_nbytes=required[small] - 64, timeout_s=20.0))
    assert said[small].startswith("CapacityError: ")
    assert f"rank {small} raised CapacityError" in said[1 - small]
    assert f"(rank {small} has stage {small})" in said[1 - small]


def refuse(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
    task = StagedTask()

    def pipeline(**options: Any) -> StagedPipeline:
        given = {
            "first": model.words,
            "last": model.head,
            "loss_fn": loss_of,
            "micro_batches": 4,
            "schedule": "1f1b",
        } | options
        return manager.pipeline(given.pop("blocks", model.blocks), **given)

    with chunkmem.ChunkManager(task.make_config(), mesh=mesh) as manager:
        with manager.init():
            model = Net()
        for name in ("zb", "dualpipev", "zero-bubble"):
            with pytest.raises(chunkmem.ConfigError, match=f"there is no schedule '{name}'.*Zero-bubble schedules"):
                pipeline(schedule=name)
        with pytest.raises(
            chunkmem.ConfigError, match="stages_per_rank is 2; give at least 1, and for schedules other"
        ):
            pipeline(schedule="gpipe", stages_per_rank=2)
        with pytest.raises(chunkmem.ConfigError, match=r"checkpoint is .some.; give one of auto, always"):
            pipeline(checkpoint="some")
        with pytest.raises(chunkmem.LayoutError, match="1 blocks cannot be divided into 2 stages"):
            pipeline(blocks=model.blocks[:1])
        with pytest.raises(chunkmem.LayoutError, match=r"parameter head.weight \(11, 16\) is in no stage"):
            pipeline(last=None)
        with pytest.raises(chunkmem.StateError, match=r"one model; build all of it in one manager\.init"):
            manager.wrap(Net())
        pipe = pipeline()
        with pytest.raises(chunkmem.StateError, match=r"manager.unwrap\(\) of a model over pipeline stages, .* build"):
            manager.unwrap(model)
        with pytest.raises(chunkmem.StateError, match="packs the model that was built"):
            pipeline()
        away = model.words if rank == 1 else model.head
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in Net().parameters())
        with pytest.raises(
            chunkmem.StateError, match=f"parameter .*weight is in stage {1 - rank}, which rank {1 - rank} has"
        ):
            away.weight.sum()
        with pytest.raises(chunkmem.StateError, match="this rank has no values of it"):
            model(torch.zeros(2, 3, dtype=torch.long))
        with pytest.raises(chunkmem.ConfigError, match=r"1f1b with 1 micro-batches: .*greater than"):
            pipe.step(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 3, dtype=torch.long))
        repr(model)


def test_what_pipelines_refuse(pair: Team) -> None:
    pair.run(refuse)


NORMS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "clip": lambda params: nn.utils.clip_grad_norm_(params, 0.1),
    "clip by foreach": lambda params: nn.utils.clip_grad_norm_(params, 0.1, foreach=True),
    "clip by the largest": lambda params: nn.utils.clip_grad_norm_(params, 0.1, norm_type=float("inf")),
    "total": lambda params: nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]),
    "by hand": lambda params: [p.grad.data.norm(2) for p in params if p.grad is not None],
    "stacked": lambda params: torch.stack([torch.linalg.norm(p.grad) for p in params if p.grad is not None]).norm(),
}


def ask_for_norms(rank: int, excludes: bool) -> tuple[list[float], list[float]]:
    """Return the norm of all gradients, and the norms of this stage's: what torch's functions took for all."""
    task = StagedTask()
    mesh = init_device_mesh("cpu", task.sizes, mesh_dim_names=("stage",))
    with chunkmem.ChunkManager(task.make_config(), mesh=mesh) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Net()
            if excludes:
                with manager.exclude():
                    model.blocks[3] = copy.deepcopy(model.blocks[3])
        pipe = manager.pipeline(
            model.blocks, first=model.words, last=model.head, loss_fn=loss_of, micro_batches=2, schedule="1f1b"
        )
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        pipe.step(*next(task.batches()))
        params = list(model.parameters())
        for norm in NORMS.values():
            with pytest.raises(
                chunkmem.StateError, match=r"of its pipeline stage alone.*call optimizer\.clip_grad_norm_"
            ):
                norm(params)
        own = [p.grad for p in params if p.grad is not None]
        assert all(len(grad.norm(dim=0)) for grad in own if grad.dim() == 2)
        norms = [float(grad.clone().norm()) for grad in own]
        return [float(optimizer.clip_grad_norm_(1e9))], norms


@pytest.mark.parametrize("excludes", [False, True], ids=["all in chunks", "some excluded"])
def test_norms_are_of_all_stages_or_refused(pair: Team, excludes: bool) -> None:
    """Torch's functions clipped each stage by its own norm, without a word."""
    plain = serial(StagedTask(micro_batches=2, steps=1, clip=1e9)).norms
    found = pair.run(ask_for_norms, excludes)
    total = math.hypot(*(norm for _, norms in found for norm in norms))
    for (norm,), _ in found:
        assert norm == pytest.approx(total)
        assert norm == pytest.approx(plain[0], rel=1e-5)


def load(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
    torch.manual_seed(5)
    other = Net("norms").state_dict()
    with chunkmem.ChunkManager(StagedTask().make_config(), mesh=mesh) as manager:
        with manager.init():
            model = Net("norms")
        manager.pipeline(model.blocks, first=model.words, last=model.head, loss_fn=loss_of, micro_batches=2)
        manager.load_state_dict(other)
        state = manager.state_dict()
        assert list(state) == list(other)
        assert all(torch.equal(value, other[key]) for key, value in state.items())
        with pytest.raises(chunkmem.CheckpointError, match=r"missing blocks\.0\.norm\.weight"):
            manager.load_state_dict({k: v for k, v in other.items() if k != "blocks.0.norm.weight"})
        rank0 = manager.state_dict(rank0_only=True)
        assert bool(rank0) == (rank == 0)


def test_the_state_of_all_stages_is_saved_and_loaded(pair: Team) -> None:
    pair.run(load)


@dataclass
class Messages:
    """Received and sent tensors of a rank."""

    most_received: int = 0
    """The most that are alive at one time."""
    most_sent: int = 0
    outside: set[str] = field(default_factory=set)
    """What is in no chunk of activations that is pinned on DEVICE, so that no cap covers it."""
    num: int = 0


def keep_count(rank: int, task: StagedTask) -> Messages:
    alive: dict[str, list[StorageWeakRef]] = {"received": [], "sent": []}
    most = {"received": 0, "sent": 0}
    found = Messages()

    def note(neighbours: Neighbours, kind: str, tensors: Sequence[Tensor], message: Message) -> None:
        alive[kind] = [one for one in alive[kind] if not one.expired()]
        alive[kind] += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        most[kind] = max(most[kind], len(alive[kind]))
        found.num += len(tensors)
        pinned = pinned_storages(neighbours._waiting.__self__.store)  # type: ignore[attr-defined]
        if any(tensor.untyped_storage().data_ptr() not in pinned for tensor in tensors):
            found.outside.add(message.label)

    def send(self: Neighbours, tensors: Sequence[Tensor], message: Message, **options: Any) -> list[Any]:
        note(self, "sent", tensors, message)
        return usual_send(self, tensors, message, **options)

    def receive(self: Neighbours, tensors: Sequence[Tensor], message: Message) -> list[Any]:
        note(self, "received", tensors, message)
        return usual_receive(self, tensors, message)

    usual_send, usual_receive = Neighbours.send, Neighbours.receive
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Neighbours, "send", send)
        patch.setattr(Neighbours, "receive", receive)
        train(rank, task)
    found.most_received, found.most_sent = most["received"], most["sent"]
    return found


def pinned_storages(store: ChunkStore) -> set[int]:
    """Where the memory of activations lies that stays on DEVICE."""
    replicas = [
        chunk.replicas[Tier.DEVICE]
        for chunk in store.chunks.values()
        if chunk.id.role is Role.ACTIVATION and Tier.DEVICE in chunk.replicas
    ]
    pieces = [piece for replica in replicas if replica.pins for _, piece in replica.pieces]
    return {piece.untyped_storage().data_ptr() for piece in pieces}


@pytest.mark.parametrize(
    ("schedule", "in_flight"), [("1f1b", (2, 1)), pytest.param("gpipe", (8, 8), marks=pytest.mark.full)]
)
def test_messages_live_no_longer_than_their_micro_batches(
    pair: Team, schedule: str, in_flight: tuple[int, int]
) -> None:
    task = StagedTask(schedule, micro_batches=8, batch=16, steps=3)
    for rank, messages in enumerate(pair.run(keep_count, task)):
        assert messages.most_received <= in_flight[rank]
        assert messages.most_sent <= len(in_flight) + 1


@pytest.mark.few(1)
@pytest.mark.parametrize("model", ["plain", "saves its output", pytest.param("pairs", marks=pytest.mark.full)])
@pytest.mark.parametrize("checkpoint", ["never", pytest.param("always", marks=pytest.mark.full)])
def test_the_cap_covers_messages(pair: Team, model: str, checkpoint: str) -> None:
    """What is received and sent is a chunk of activations until it is used, or has been sent."""
    for messages in pair.run(keep_count, StagedTask(model=model, checkpoint=checkpoint, steps=5)):
        assert messages.num > 0
        assert messages.outside == set()


class Slow(Block):
    """Computes for a long time."""

    def __init__(self, slow_s: float) -> None:
        super().__init__()
        self.slow_s = slow_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.slow_s)  # what the other stage waits for has to be longer than anything that it computes
        return super().forward(x)


def wait_for_a_slow_stage(rank: int, slow_s: float) -> tuple[float, float]:
    """The seconds that the last stage has computed in its recorded step, and has waited in the last one."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
    with chunkmem.ChunkManager(StagedTask().make_config(), mesh=mesh) as manager:
        with manager.init():
            model = Net()
            model.blocks[0] = Slow(slow_s)
        pipe = manager.pipeline(
            model.blocks, first=model.words, last=model.head, loss_fn=loss_of, micro_batches=4, schedule="1f1b"
        )
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        for _ in range(4):
            pipe.step(torch.zeros(8, 3, dtype=torch.long), torch.zeros(8, 3, dtype=torch.long))
            optimizer.step()
            optimizer.zero_grad()
        trace, timeline = manager.trace, manager.timeline()
        assert trace is not None
        assert timeline is not None
        return trace.compute_s, timeline.stall_s


def test_waiting_for_another_stage_is_no_compute(pair: Team) -> None:
    for slow_s in (0.1, 0.8):  # on a busy machine, what the last stage computes may take as long as a short wait
        (first_s, _), (last_s, waited_s) = pair.run(wait_for_a_slow_stage, slow_s)
        if last_s < 4 * slow_s:
            break
    assert first_s >= 4 * slow_s
    assert last_s < 4 * slow_s
    assert waited_s >= 2 * slow_s


def record_stages(rank: int, folder: str) -> tuple[str, list[tuple[str, int]], float, float]:
    """What the stage of this rank did in a planned step that was recorded, the seconds it waited, and of the step."""

    def watch(pipe: StagedPipeline, manager: chunkmem.ChunkManager, step: int) -> None:
        if step == 5:
            manager.record(f"{folder}/rank{rank}")

    train(rank, StagedTask(), watch)
    timeline = Timeline.load(f"{folder}/rank{rank}/timeline.json")
    calls = timeline.stage_calls
    assert {call.stage for call in calls} == {rank}
    assert all(call.start_s <= call.end_s for call in calls)
    assert all(one.end_s <= next_one.start_s for one, next_one in pairwise(calls))
    order = [(call.work.value, call.micro_batch) for call in calls if call.work is not StageWork.WAIT]
    waited_s = sum(call.end_s - call.start_s for call in calls if call.work is StageWork.WAIT)
    run = load_run(Path(folder) / f"rank{rank}")
    (track,) = stage_tracks(run, run.happened)
    assert [piece.text for piece in track.slices if piece.style != STALL] == [str(number) for _, number in order]
    assert f"stage {rank}" in timeline_page([run])
    return track.name, order, waited_s, timeline.step_s


def test_a_timeline_shows_micro_batches_and_bubbles(pair: Team, tmp_path: Path) -> None:
    first, last = pair.run(record_stages, str(tmp_path))
    assert (first[0], last[0]) == ("stage 0", "stage 1")
    #   stage 0 | F0 F1 .. B0 F2 B1 F3 B2 .. B3
    #   stage 1 | .. F0 B0 F1 B1 F2 B2 F3 B3 ..
    ahead = [("forward", 0), ("forward", 1), ("backward", 0), ("forward", 2), ("backward", 1), ("forward", 3)]
    assert first[1] == [*ahead, ("backward", 2), ("backward", 3)]
    assert last[1] == [(work, number) for number in range(4) for work in ("forward", "backward")]
    for _, _, waited_s, step_s in (first, last):
        assert 0 < waited_s < step_s


def evaluate(rank: int) -> list[float]:
    """The losses of three steps over one batch, which is evaluated before each of them."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
    task = StagedTask()
    with chunkmem.ChunkManager(task.make_config(), mesh=mesh) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Net()
        pipe = manager.pipeline(model.blocks, first=model.words, last=model.head, loss_fn=loss_of, micro_batches=4)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        x, y = next(task.batches())
        losses = []
        for _ in range(3):
            evaluated = pipe.evaluate(x, y)
            loss = pipe.step(x, y)
            assert torch.equal(evaluated, loss)
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        other = x.flip(0) if rank else x
        with pytest.raises(chunkmem.ConfigError, match="the batch of the pipeline differs between ranks"):
            pipe.step(other, y)
        return losses


def test_evaluations_between_steps_and_batches_that_differ(pair: Team) -> None:
    one, other = pair.run(evaluate)
    assert one == other
    assert one[0] > one[1] > one[2]


def resume(rank: int, task: StagedTask, saved: Saved | None) -> Saved:
    """Some steps, from the beginning or from what other ranks have saved."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", task.sizes, mesh_dim_names=("stage", "shard")[: len(task.sizes)])
    with chunkmem.ChunkManager(task.make_config(), mesh=mesh) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Net(task.model)
        pipe = manager.pipeline(model.blocks, first=model.words, last=model.head, loss_fn=loss_of, micro_batches=4)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        batches = list(task.batches())
        if saved is not None:
            manager.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        for x, y in batches[3:] if saved is not None else batches[:3]:
            pipe.step(x, y)
            optimizer.step()
            optimizer.zero_grad()
        return manager.state_dict(), optimizer.state_dict()


@pytest.mark.full
@pytest.mark.parametrize("model", ["tied", pytest.param("plain", marks=pytest.mark.full)])
def test_a_run_is_resumed_by_other_stages(pair: Team, four: Team, model: str) -> None:
    task = StagedTask(model=model)
    saved = pair.run(resume, task, None)[0]
    resumed = pair.run(resume, task, saved)
    assert len({tuple(state["state"]) for _, state in resumed}) == 1
    others = [*resumed, *four.run(resume, replace(task, sizes=(4,)), saved)]
    weights = pair.run(train, task)[0].weights
    for state, _ in others:
        assert [key for key, value in weights.items() if not torch.equal(value, state[key])] == []


def exchange(rank: int, task: StagedTask) -> list[tuple[int, int]]:
    """After each step: bytes that were received in it, and of the weights of this rank's stages."""
    found, before = [], [0]

    def watch(pipe: StagedPipeline, manager: chunkmem.ChunkManager, step: int) -> None:
        assert manager.runtime.sharding.shards is not None
        received = manager.runtime.sharding.shards.exchange.traffic.received_nbytes
        groups = {group.id: group.nbytes for model in manager.runtime.registry.models for group in model.layout.groups}
        found.append((received - before[0], sum(groups.values())))
        before[0] = received

    outcome = train(rank, task, watch)
    assert outcome.misses[-2:] == [0, 0]
    return found


@pytest.mark.parametrize("num", [2, pytest.param(8, marks=pytest.mark.full)])
def test_what_data_parallel_ranks_exchange_does_not_grow_with_micro_batches(four: Team, num: int) -> None:
    task = StagedTask(sizes=(2, 2), micro_batches=num, batch=16, steps=9)
    pairs = list(zip(*four.run(exchange, task), strict=True))
    total = sum(received for received, _ in pairs[-1])
    weights = sum(nbytes for _, nbytes in pairs[-1][:: task.sizes[1]])
    assert total <= 3 * weights, "each stage to the other rank twice, and its gradients once"
