"""Ranks as a mesh: what is said in it, and hybrid sharding, which trains as one process does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import chunkmem
from chunkmem.ranks.exchange import Exchange, PendingWork, Shard, Work
from chunkmem.ranks.exchange_speed import NUM_TRIALS
from chunkmem.ranks.mesh import mesh_of
from chunkmem.ranks.methods import Replicated, possible_exchanges
from chunkmem.ranks.ranks import Ranks, open_ranks
from chunkmem.runtime.device import ComputeDevice
from tests.helpers.ranks import Team
from tests.helpers.shared_training import MODELS, Net, Task, batch_of, loss_of, make_config, open_manager, serial
from tests.helpers.spread import spread

NAMES = ("replicate", "shard")


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with Team(4) as team:
        yield team


def rows_of(rank: int, sizes: tuple[int, ...], names: tuple[str, ...] | None) -> tuple[tuple[int, ...], ...]:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    found = mesh_of(mesh)
    assert found is not None
    return found.rows


def stages_of(rank: int, sizes: tuple[int, ...], names: tuple[str, ...]) -> tuple[object, list[int]]:
    """The data-parallel ranks of this rank's stage, and the ranks of its pipeline."""
    found = mesh_of(init_device_mesh("cpu", sizes, mesh_dim_names=names))
    assert found is not None
    assert found.stage_group is not None
    return found.rows, dist.get_process_group_ranks(found.stage_group)


@pytest.mark.parametrize(
    ("sizes", "names", "found"),
    [
        ((4,), ("stage",), [(((rank,),), [0, 1, 2, 3]) for rank in range(4)]),
        (
            (2, 2),
            ("stage", "shard"),
            [(((0, 1),), [0, 2]), (((0, 1),), [1, 3]), (((2, 3),), [0, 2]), (((2, 3),), [1, 3])],
        ),
        (
            (2, 2),
            ("replicate", "stage"),
            [(((0,), (2,)), [0, 1]), (((1,), (3,)), [0, 1]), (((0,), (2,)), [2, 3]), (((1,), (3,)), [2, 3])],
        ),
    ],
)
def test_each_stage_of_a_mesh_has_rows_of_its_own(
    team: Team, sizes: tuple[int, ...], names: tuple[str, ...], found: object
) -> None:
    assert team.run(stages_of, sizes, names) == found


@pytest.mark.parametrize(
    ("sizes", "names", "rows"),
    [
        ((2, 2), NAMES, ((0, 1), (2, 3))),
        ((2, 2), None, ((0, 1), (2, 3))),
        ((2, 2), ("shard", "replicate"), ((0, 2), (1, 3))),
        ((4,), ("shard",), ((0, 1, 2, 3),)),
        ((4,), None, ((0, 1, 2, 3),)),
        ((4,), ("replicate",), ((0,), (1,), (2,), (3,))),
        ((1, 4), NAMES, ((0, 1, 2, 3),)),
    ],
)
def test_the_rows_of_a_mesh_are_replicas(
    team: Team, sizes: tuple[int, ...], names: tuple[str, ...] | None, rows: tuple[tuple[int, ...], ...]
) -> None:
    assert team.run(rows_of, sizes, names) == [rows] * 4


def refuse(rank: int) -> None:
    staged = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "shard"))
    with pytest.raises(
        chunkmem.ConfigError, match=r"mesh has 2 dimensions, tensor, shard; pass a mesh with .*replicate"
    ):
        chunkmem.ChunkManager(chunkmem.Config(), mesh=staged)
    with pytest.raises(chunkmem.ConfigError, match="process_group and mesh were given"):
        chunkmem.ChunkManager(chunkmem.Config(), process_group=dist.group.WORLD, mesh=staged)
    with pytest.raises(chunkmem.ConfigError, match="mesh is a tuple; pass a "):
        chunkmem.ChunkManager(chunkmem.Config(), mesh=(2, 2))
    with pytest.raises(chunkmem.ConfigError, match="mesh has 3 dimensions, without names; pass a mesh with"):
        chunkmem.ChunkManager(chunkmem.Config(), mesh=init_device_mesh("cpu", (2, 1, 2)))
    turned = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=NAMES)
    with pytest.raises(chunkmem.ConfigError, match=r"mesh has ranks \[3, 2\] in one dimension; list them in ascending"):
        chunkmem.ChunkManager(chunkmem.Config(), mesh=turned)
    pair = DeviceMesh("cpu", [0, 1])
    if rank > 1:
        with pytest.raises(chunkmem.ConfigError, match="this process is not one of the ranks of mesh"):
            chunkmem.ChunkManager(chunkmem.Config(), mesh=pair)


def test_other_meshes_are_refused(team: Team) -> None:
    team.run(refuse)


def train(rank: int, sizes: tuple[int, int], task: Task, clip: float) -> tuple[dict[str, Tensor], Any, int]:
    """The weights and optimizer states after some steps, and the bytes of optimizer states on this rank."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=NAMES)
    with chunkmem.ChunkManager(make_config(task), mesh=mesh) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = MODELS[task.model]()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(task.steps):
            for micro in range(task.num_micro_batches(step, rank)):
                manager.backward(loss_of(model, batch_of(task, step, micro, rank)))
            if clip:
                optimizer.clip_grad_norm_(clip)
            optimizer.step()
            optimizer.zero_grad()
        report = manager.memory()
        nbytes = sum(tier.by_role.get("exp_avg", (0, 0))[0] for tier in (report.device, report.host))
        return manager.state_dict(), optimizer.state_dict()["state"], nbytes


def assert_alike(outcomes: list[tuple[dict[str, Tensor], Any, int]]) -> None:
    (weights, states, _), *others = outcomes
    for other, other_states, _ in others:
        assert [key for key, value in weights.items() if not torch.equal(value, other[key])] == []
        for index, state in states.items():
            assert all(torch.equal(value, other_states[index][key]) for key, value in state.items())


SIZES = [(2, 2), (4, 1), (1, 4)]


@pytest.mark.full
def test_replicas_update_inside_backward_to_the_bit(team: Team) -> None:
    task = Task("tied", steps=5, device_nbytes=26 << 10)
    outcomes = team.run(train, (2, 2), replace(task, config={"optimizer": {"params": {"in_backward": True}}}), 0.0)
    assert_alike([*team.run(train, (2, 2), task, 0.0), *outcomes])


@pytest.mark.few(1)
@spread(precision=("fp32", "bf16"), sizes=SIZES)
def test_replicas_train_alike_and_as_one_process(team: Team, sizes: tuple[int, int], precision: str) -> None:
    task = Task(
        "reused", steps=6, config={} if precision == "fp32" else {"precision": precision}, device_nbytes=96 << 10
    )
    outcomes = team.run(train, sizes, task, 0.0)
    assert_alike(outcomes)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _, weights, _ = serial(task, 4)
    torch.set_num_threads(threads)
    if precision == "fp32" and 1 in sizes:
        # One sum, in the order of the ranks.
        assert [key for key, value in weights.items() if not torch.equal(value, outcomes[0][0][key])] == []
    elif precision == "fp32":
        # (a + b) / 2 and (c + d) / 2 are added: the same terms, in another order.
        assert all(torch.allclose(value, outcomes[0][0][key], atol=1e-5) for key, value in weights.items())
    total = sum(nbytes for _, _, nbytes in outcomes)
    assert total == sizes[0] * sum(nbytes for _, _, nbytes in outcomes[: sizes[1]]), "each replica has all states once"


def test_a_rank_without_a_batch_and_a_norm_over_the_shards(team: Team) -> None:
    task = Task(steps=5, empty=((1, 2), (3, 0)), micro_batches=2)
    outcomes = team.run(train, (2, 2), task, 0.05)
    assert_alike(outcomes)
    clipped = Task(steps=5, empty=((1, 2), (3, 0)), micro_batches=2, config={"gradient_clipping": 0.05})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _, weights, _ = serial(clipped, 4)
    torch.set_num_threads(threads)
    assert all(torch.allclose(value, outcomes[0][0][key], atol=1e-5) for key, value in weights.items())


class Mixed(nn.Module):
    """Modules in chunks, and one that is excluded, whose gradients are averaged."""

    def __init__(self, manager: chunkmem.ChunkManager) -> None:
        super().__init__()
        self.net = Net()
        with manager.exclude():
            self.scale = nn.Linear(11, 11)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.scale(self.net(x))
        return result


def with_excluded(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train with an excluded module, look at gathered gradients, and resume from a checkpoint in a new manager."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    saved: tuple[dict[str, Any], dict[str, Any]] | None = None
    seen: dict[str, Tensor] = {}
    for first in (0, 2):
        with chunkmem.ChunkManager(make_config(Task()), mesh=mesh) as manager:
            torch.manual_seed(first + rank)
            with manager.init():
                model = Mixed(manager)
            optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
            if saved is not None:
                manager.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            for step in range(first, first + 2):
                manager.backward(loss_of(model, batch_of(Task(), step, 0, rank)))
                with manager.gather(grads=True):
                    seen |= {
                        f"{step} {k}": p.grad.clone() for k, p in model.net.named_parameters() if p.grad is not None
                    }
                optimizer.step()
                optimizer.zero_grad()
            saved = manager.state_dict(), optimizer.state_dict()
    assert saved is not None
    return saved[0], seen


def test_excluded_modules_gathered_gradients_and_checkpoints(team: Team) -> None:
    outcomes = team.run(with_excluded)
    assert outcomes[0][1]
    for outcome in outcomes[1:]:
        for found, expected in zip(outcome, outcomes[0], strict=True):
            assert found.keys() == expected.keys()
            assert [key for key, value in expected.items() if not torch.equal(value, found[key])] == []


# The exchange by itself.

NUMEL = 1000


def content(index: int, rank: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(10 * index + rank))


def opened(reduce_dtype: torch.dtype = torch.float32, timeout_s: float = 60.0) -> tuple[Ranks, Exchange]:
    """Two replicas of two shards each, and their exchange in RAM."""
    ranks = open_ranks(mesh=mesh_of(init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)), timeout_s=timeout_s)
    cpu = torch.device("cpu")
    overlap = ComputeDevice(cpu).overlap
    (exchange,) = possible_exchanges(ranks, cpu, memory_saving=None, reduce_dtype=reduce_dtype, overlap=overlap)
    return ranks, exchange


def exchange_replicated(rank: int, dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
    ranks, exchange = opened(reduce_dtype)
    shard, replicate = ranks.shard, ranks.replicate
    assert replicate is not None
    assert (shard.rank, replicate.rank) == (rank % 2, rank // 2)
    shards = [Shard(index, index % 2, content(index, rank).to(dtype)) for index in range(4)]
    exchange.reduce(shards, label="reduce").wait()
    for one in shards:
        a, b, c, d = (content(one.index, other).to(dtype).float() for other in range(4))
        if one.owner == shard.rank:
            means = [((x + y) / 2).to(reduce_dtype).float() for x, y in ((a, b), (c, d))]
            assert torch.equal(one.flat, (sum(means) / 2).to(dtype)), "rounded once, or to bf16 where asked for"
    # 2 of 4 chunks go to their owners, and of those that are owned one goes across, and the mean of the other back.
    assert exchange.traffic.sent_nbytes == (2 + 2) * NUMEL * reduce_dtype.itemsize
    assert exchange.traffic.received_nbytes == (2 + 2) * NUMEL * reduce_dtype.itemsize
    assert exchange.traffic.buffered_nbytes == 0 < exchange.traffic.peak_buffered_nbytes
    shards = [Shard(index, index % 2, content(index, rank % 2).to(dtype)) for index in range(4)]
    exchange.gather(shards, label="gather").wait()
    assert all(torch.equal(one.flat, content(one.index, one.owner).to(dtype)) for one in shards)
    assert ranks.sum_over([float(1 + rank % 2)]) == (3.0,), "of one replica"
    ranks.close()
    with pytest.raises(chunkmem.StateError, match="there is no process group"):
        exchange.gather(shards, label="gather")


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_owners_in_all_replicas_have_the_mean_over_all_ranks(
    team: Team, dtype: torch.dtype, reduce_dtype: torch.dtype
) -> None:
    team.run(exchange_replicated, dtype, reduce_dtype)


def wait_early(rank: int) -> None:
    """Rank 0 waits for its reductions before it comes to a barrier, the others wait for theirs behind it."""
    ranks, exchange = opened(timeout_s=20.0)
    lists = [[Shard(index, index % 2, content(index, rank)) for index in (first, first + 1)] for first in (0, 2)]
    works = [exchange.reduce(shards, label="reduce") for shards in lists]
    gathered = [Shard(index, index % 2, content(index, rank)) for index in (4, 5)]
    works.append(exchange.gather(gathered, label="gather"))
    assert not works[0].done()
    if rank:
        ranks.barrier(label="barrier")
    for work in works if rank % 2 else reversed(works):
        work.wait()
    if not rank:
        ranks.barrier(label="barrier")
    for one in lists[0] + lists[1]:
        a, b, c, d = (content(one.index, other) for other in range(4))
        assert one.owner != ranks.shard.rank or torch.equal(one.flat, ((a + b) / 2 + (c + d) / 2) / 2)
    assert exchange.traffic.buffered_nbytes == 0
    ranks.close()


def test_a_rank_that_waits_early_waits_for_nobody_who_waits_for_it(team: Team) -> None:
    team.run(wait_early)


class Watched:
    """Reductions over replicas, in which what is to overlap waits for each other, so that time decides nothing.

    trains   reduce k returns | backward of the first unit ----------------| waits for k
    across                    '> begins, is over, lets backward go on -----'
    """

    PATIENCE_S = 30.0

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.returned: list[threading.Event] = []
        self.averaged: list[threading.Event] = []
        self.waited: list[bool] = []
        self.num_averaged = self.num_overlapped = 0
        reduce, average, wait = Replicated.reduce, Replicated._average, PendingWork.wait
        watched: dict[Work, int] = {}

        def reducing(exchange: Replicated, shards: list[Shard], *, label: str) -> Work:
            at = len(self.returned)
            self.returned.append(threading.Event())
            self.averaged.append(threading.Event())
            self.waited.append(False)
            work = reduce(exchange, shards, label=label)
            watched[work] = at
            self.returned[at].set()
            return work

        def averaging(*args: Any) -> None:
            at, self.num_averaged = self.num_averaged, self.num_averaged + 1
            assert self.returned[at].wait(self.PATIENCE_S), "a reduction returns before it goes across"
            average(*args)
            self.averaged[at].set()

        def waiting(work: PendingWork) -> None:
            if work in watched:
                self.waited[watched[work]] = True
            wait(work)

        patch.setattr(Replicated, "reduce", reducing)
        patch.setattr(Replicated, "_average", averaging)
        patch.setattr(PendingWork, "wait", waiting)

    def in_backward(self, grad: Tensor) -> None:
        """The newest reduction comes to its end though nobody has waited for it yet."""
        if self.returned and not self.waited[-1]:
            self.num_overlapped += 1
            assert self.averaged[-1].wait(self.PATIENCE_S), "what goes across needs no thread that trains"


def train_watched(rank: int) -> tuple[int, int]:
    """Train blocks of a unit each; return how many reductions there were, and how many a later block has seen end."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    config = chunkmem.Config.from_dict({"default_chunk_size": 320, "memory": {"device": "12KiB"}})
    with pytest.MonkeyPatch.context() as patch, chunkmem.ChunkManager(config, mesh=mesh) as manager:
        watched = Watched(patch)
        with manager.init():
            model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        manager.accumulate(2)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        for _ in range(3):
            for _ in range(2):
                x = torch.randn(4, 16, requires_grad=True)
                between = model[0](x)
                between.register_hook(watched.in_backward)
                manager.backward(model[3](model[2](model[1](between))).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return len(watched.returned), watched.num_overlapped


def test_what_goes_across_replicas_overlaps_with_backward(team: Team) -> None:
    for num_reductions, num_overlapped in team.run(train_watched):
        assert num_reductions - NUM_TRIALS == 3 * 4, "one a block and step, not one a micro-batch"
        assert num_overlapped == 2, "those of the steps that know their last backward"


def train_a_stage(rank: int) -> tuple[tuple[int, int], dict[str, Tensor]]:
    """Two stages of a pipeline, each with a model of its own over two ranks."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("stage", *NAMES))
    stage, task = mesh.get_local_rank("stage"), Task(steps=3)
    with chunkmem.ChunkManager(make_config(task), mesh=mesh[NAMES]) as manager:
        torch.manual_seed(stage)
        with manager.init():
            model = Net()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(task.steps):
            manager.backward(loss_of(model, batch_of(task, step, 0, rank)))
            optimizer.step()
            optimizer.zero_grad()
        return (stage, manager.runtime.ranks.size), manager.state_dict()


def test_a_stage_of_a_pipeline_passes_its_part_of_the_mesh(team: Team) -> None:
    outcomes = team.run(train_a_stage)
    assert [found for found, _ in outcomes] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    weights = [found for _, found in outcomes]
    for one, other in ((0, 1), (2, 3)):
        assert all(torch.equal(value, weights[other][key]) for key, value in weights[one].items())
    assert not torch.equal(weights[0]["words.weight"], weights[2]["words.weight"])


def train_late(rank: int) -> dict[str, Tensor]:
    """Copies and exchanges as late as they may be, over memory full of NaN."""
    torch.set_num_threads(1)
    task = Task(adversarial=3, steps=8)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    with open_manager(rank, task, mesh=mesh) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Net()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for step in range(task.steps):
            manager.backward(loss_of(model, batch_of(task, step, 0, rank)))
            optimizer.step()
            optimizer.zero_grad()
        return manager.state_dict()


@pytest.mark.full
def test_late_copies_and_exchanges_change_no_bit(team: Team) -> None:
    expected = team.run(train, (2, 2), Task(steps=8), 0.0)
    for weights in team.run(train_late):
        assert [key for key, value in expected[0][0].items() if not torch.equal(value, weights[key])] == []


def die(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    task = Task(config={"distributed": {"timeout_s": 8}})
    with chunkmem.ChunkManager(make_config(task), mesh=mesh) as manager:
        with manager.init():
            model = Net()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        try:
            for step in range(3):
                loss = loss_of(model, batch_of(task, step, 0, rank))
                if (step, rank) == (1, 3):
                    os.kill(os.getpid(), signal.SIGKILL)
                manager.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        except chunkmem.RankError as error:
            return f"{error.ranks} {error}"
    return "nothing happened"


def test_a_rank_that_dies_is_named_in_all_replicas(team: Team) -> None:
    for said in team.run(die, lost=(3,))[:3]:
        assert said.startswith("(3,) ")
        assert "rank 3 does not answer" in said
