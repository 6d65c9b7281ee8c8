"""What an estimate says of steps over ranks against what real processes then do."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.data.trace import Trace
from chunkmem.data.types import Role, Tier
from chunkmem.estimate.mesh import RankMesh
from chunkmem.estimate.model import Model
from chunkmem.estimate.question import device_need, find, trains_on_demand
from chunkmem.estimate.rank_stage import Step
from chunkmem.estimate.rehearse import Rehearsal, Setting, rehearse
from chunkmem.plan.model import Plan
from chunkmem.plan.planner import make_plan
from chunkmem.plan.simulate import simulate
from tests.helpers.estimated_ranks import AMPLE_NBYTES, CASES, IN_RAM, Case, Facts, train
from tests.helpers.ranks import Team
from tests.helpers.shared_training import MODELS, Task, batch_of, loss_of, make_config

SIZES = [2, pytest.param(4, marks=pytest.mark.full)]
ALL = [pytest.param(1, marks=pytest.mark.full), *SIZES]
ORDINARY = ("gpt", "large root")
NAMES = [pytest.param(name, marks=[] if name in ORDINARY else [pytest.mark.full]) for name in CASES]
STEPS = [
    pytest.param(name, size, marks=[] if name == "mlp" or (name in ORDINARY and size == 2) else [pytest.mark.full])
    for name in CASES
    for size in (1, 2, 4)
]
"""Of a small model, caps, traffic and peaks are always compared for one, two and four ranks."""
STEADY = [
    pytest.param(name, marks=[] if name in ("checkpointed", "reused") else [pytest.mark.full])
    for name in sorted(set(MODELS) - {"routed"})
]


@pytest.fixture(scope="module")
def teams() -> Iterator[dict[int, Team]]:
    made = {size: Team(size) for size in (1, 2, 4)}
    yield made
    for team in made.values():
        team.close()


def rehearsed(task: Task, size: int) -> Rehearsal:
    def loss(model: nn.Module) -> torch.Tensor:
        return loss_of(model, batch_of(task, 0, 0, 0))

    return rehearse(Model(task.model, MODELS[task.model], loss), Setting(chunk_numel=1600, mesh=RankMesh(shard=size)))


def record(rank: int, task: Task) -> tuple[list[tuple[str, str]], str]:
    """Train; return the moments of the step that was recorded, and the digest of its trace."""
    torch.set_num_threads(1)
    with chunkmem.ChunkManager(make_config(task)) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = MODELS[task.model]()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(6):
            manager.backward(loss_of(model, batch_of(task, step, 0, rank)))
            optimizer.step()
            optimizer.zero_grad()
        assert manager.trace is not None
        return moments_of(manager.trace), manager.trace.digest


def moments_of(trace: Trace) -> list[tuple[str, str]]:
    return [(f"{moment.kind.value} {moment.chunk}", str(moment)) for moment in trace.moments]


@pytest.mark.few(1)
@pytest.mark.parametrize("device_nbytes", [26 << 10, 80 << 10, 1 << 20], ids=["one unit", "two units", "all stay"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model", STEADY)
def test_the_moments_of_every_rank(teams: dict[int, Team], model: str, size: int, device_nbytes: int) -> None:
    if model == "reused" and device_nbytes == 26 << 10:
        device_nbytes = 34 << 10  # its unit is larger
    task = Task(model, device_nbytes=device_nbytes)
    rehearsal = rehearsed(task, size)
    for rank, (moments, digest) in enumerate(teams[size].run(record, task)):
        steps = rehearsal.over(size, rank=rank, is_accelerator=False, device_nbytes=task.device_nbytes)
        assert steps.has_room is (device_nbytes > 34 << 10)
        assert moments == moments_of(steps.later.trace)
        assert digest == steps.later.trace.digest


# Caps, peaks and traffic.


def test_gradients_reduced_in_bf16_take_half_the_bytes_and_less_memory() -> None:
    question, world = CASES["bf16"].question(4), 4
    in_fp32, in_bf16 = (
        replace(question, reduce_dtype=dtype).rehearsal.over(world, is_accumulating=True).later
        for dtype in ("fp32", "bf16")
    )
    nbytes = sum(n for chunk, n in in_bf16.trace.chunk_nbytes.items() if chunk.role is Role.GRAD)
    assert in_fp32.exchanged.sent_nbytes - in_bf16.exchanged.sent_nbytes == nbytes * (world - 1) // world
    assert in_fp32.exchanged.peak_buffered_nbytes > in_bf16.exchanged.peak_buffered_nbytes


def runs(team: Team, case: Case, device_nbytes: int, host_nbytes: int) -> bool:
    """Tell whether all ranks train under these caps, or none does."""
    facts = team.run(train, case.name, device_nbytes, host_nbytes, 3)
    assert len({found is None for found in facts}) == 1
    return facts[0] is not None


@pytest.mark.few(1)
@pytest.mark.parametrize("size", ALL)
@pytest.mark.parametrize("name", NAMES)
def test_the_smallest_cap_on_device(teams: dict[int, Team], name: str, size: int) -> None:
    case = CASES[name]
    question = case.question(size)
    need_nbytes = device_need(question).nbytes
    assert runs(teams[size], case, need_nbytes, AMPLE_NBYTES)
    assert not runs(teams[size], case, int(0.97 * need_nbytes), AMPLE_NBYTES)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", ALL)
@pytest.mark.parametrize("name", NAMES)
def test_the_smallest_cap_on_host(teams: dict[int, Team], name: str, size: int) -> None:
    case = CASES[name]
    question = case.question(size)
    rehearsal = question.rehearsal
    question = replace(question, device_nbytes=device_need(question).nbytes)
    slab_nbytes = rehearsal.layout.slab_nbytes
    caps = [slabs * slab_nbytes for slabs in range(1, AMPLE_NBYTES // slab_nbytes)]
    least = caps[bisect_left(caps, True, key=lambda cap: trains_on_demand(replace(question, host_nbytes=cap)))]
    assert runs(teams[size], case, question.device_nbytes, least)
    assert not runs(teams[size], case, question.device_nbytes, least - slab_nbytes)


def as_estimated(facts: Facts, step: Step, plan: Plan) -> None:
    """Assert that a rank did in its last step what was estimated: exactly, where it follows the same plan."""
    timeline = simulate(plan, step.trace)
    assert facts.plan_misses == 0
    assert facts.digest == step.trace.digest
    assert timeline.peak_nbytes[Tier.DEVICE] == pytest.approx(facts.device_peak_nbytes, rel=0.03)
    assert timeline.peak_nbytes[Tier.HOST] == pytest.approx(facts.host_peak_nbytes, rel=0.03)
    assert sum(timeline.moved_nbytes.values()) == pytest.approx(facts.copied_nbytes, rel=0.03)
    exchanged = step.exchanged
    assert (exchanged.sent_nbytes, exchanged.received_nbytes) == (facts.sent_nbytes, facts.received_nbytes)
    assert exchanged.peak_buffered_nbytes == facts.buffered_nbytes


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "size"), STEPS)
def test_a_step_where_device_is_as_small_as_can_be(teams: dict[int, Team], name: str, size: int) -> None:
    question = CASES[name].question(size)
    rehearsal = question.rehearsal
    question = replace(question, device_nbytes=device_need(question).nbytes)
    finding = find(question)
    facts = teams[size].run(train, name, question.device_nbytes, AMPLE_NBYTES)
    as_estimated(facts[rehearsal.fullest_ranks(size)[0]], Step(finding.trace, finding.exchanged), finding.plan)


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "size"), STEPS)
def test_a_step_with_room_for_all(teams: dict[int, Team], name: str, size: int) -> None:
    question = CASES[name].question(size)
    rehearsal = question.rehearsal
    machine = IN_RAM.machine(AMPLE_NBYTES, AMPLE_NBYTES, mesh=RankMesh(shard=size))
    for rank, facts in enumerate(teams[size].run(train, name, AMPLE_NBYTES, AMPLE_NBYTES)):
        steps = rehearsal.over(size, rank=rank, is_accelerator=False, device_nbytes=AMPLE_NBYTES)
        as_estimated(facts, steps.later, make_plan(steps.later.trace, machine))
