"""Pipelines divided into another number of stages between steps: they train on as from a checkpoint, bit for bit."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import chunkmem
from chunkmem.assembly.moving import ChunkMover
from tests.helpers.ranks import Team
from tests.helpers.repartitioned import Change, Training, differences, divided, measured, resumed
from tests.helpers.shared_training import WIDTH, WORDS
from tests.helpers.spread import spread
from tests.helpers.staged_training import AMPLE, Head, Net, StagedTask, loss_of, train

Way = tuple[tuple[int, int], int]
"""Stages and data-parallel ranks, then the number of stages afterwards."""


@pytest.mark.full
@spread(precision=["fp32", "bf16", "fp16"], optimizer=["AdamW", "SGD"], model=["plain", "tied", "frozen", "norms"])
def test_two_stages_become_two_data_parallel_ranks(pair: Team, precision: str, optimizer: str, model: str) -> None:
    change = Change(StagedTask(precision=precision, model=model, sizes=(2, 1)), optimizer=optimizer)
    assert differences(pair.run(divided, change), pair.run(resumed, change)) == []


@pytest.mark.full
@pytest.mark.few(1)
@spread(precision=["bf16", "fp32", "fp16"], model=["tied", "norms", "frozen"])
def test_two_data_parallel_ranks_become_two_stages(pair: Team, precision: str, model: str) -> None:
    change = Change(StagedTask(precision=precision, model=model, sizes=(1, 2)), stages=2)
    assert differences(pair.run(divided, change), pair.run(resumed, change)) == []


@pytest.mark.few(1)
@spread(
    optimizer=["Muon and NAdam", "Adafactor"],
    way=[((2, 1), 1), ((1, 2), 2)],
    precision=["fp32", "bf16"],
    model=["tied", "frozen"],
)
def test_states_of_classes_of_torch(pair: Team, optimizer: str, way: Way, precision: str, model: str) -> None:
    """Each parameter has a shape of its own in their chunks, and numbers outside of chunks."""
    sizes, stages = way
    change = Change(StagedTask(precision=precision, model=model, sizes=sizes), stages, optimizer=optimizer)
    assert differences(pair.run(divided, change), pair.run(resumed, change)) == []


@pytest.mark.few(1)
@spread(optimizer=["Muon and NAdam", "Adafactor"], way=[((2, 1), 1), ((1, 2), 2)])
def test_room_for_states_of_classes_of_torch(pair: Team, optimizer: str, way: Way) -> None:
    sizes, stages = way
    pair.run(measured, Change(StagedTask(sizes=sizes), stages, optimizer=optimizer))


@pytest.mark.full
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("way", "model"),
    [
        pytest.param(((2, 2), 1), "tied", id="2 x 2 to 1 x 4"),
        pytest.param(((4, 1), 2), "plain", id="4 x 1 to 2 x 2", marks=pytest.mark.full),
        pytest.param(((4, 1), 2), "tied", id="4 x 1 to 2 x 2, tied", marks=pytest.mark.full),
        pytest.param(((1, 4), 2), "tied", id="1 x 4 to 2 x 2", marks=pytest.mark.full),
        pytest.param(((2, 2), 4), "tied", id="2 x 2 to 4 x 1", marks=pytest.mark.full),
        pytest.param(((4, 1), 1), "plain", id="4 x 1 to 1 x 4", marks=pytest.mark.full),
        pytest.param(((1, 4), 4), "plain", id="1 x 4 to 4 x 1", marks=pytest.mark.full),
    ],
)
def test_four_ranks(four: Team, way: Way, model: str) -> None:
    sizes, stages = way
    change = Change(StagedTask(model=model, sizes=sizes, precision="bf16"), stages)
    assert differences(four.run(divided, change), four.run(resumed, change)) == []


@pytest.mark.few(1)
@spread(
    kind=[
        "excluded",
        "first excluded",
        "frozen late",
        "on host",
        "tiled",
        "offloaded",
        "clipped",
        "overlapped",
        "two",
        "scheduled",
        "averaged",
        "averaged excluded",
    ],
    way=[((2, 1), 1), ((1, 2), 2)],
    precision=["fp32", "bf16"],
)
def test_other_parts_of_a_run(pair: Team, kind: str, way: Way, precision: str) -> None:
    sizes, stages = way
    # Updates overlap with backward, and are left to a lane by step(), from the first step that follows a plan.
    before, device_nbytes = (5, 48 << 10) if kind == "overlapped" else (3, AMPLE)
    task = StagedTask(precision=precision, sizes=sizes)
    change = Change(task, stages, kind=kind, before=before, device_nbytes=device_nbytes)
    assert differences(pair.run(divided, change), pair.run(resumed, change)) == []


@pytest.mark.few(1)
@spread(
    way=[((2, 1), 1), ((1, 2), 2), ((4, 1), 1), ((4, 1), 2)],
    precision=["fp32", "bf16"],
    chunk_numel=[600, 1600],
    device_nbytes=[None, AMPLE],
)
def test_memory_and_bytes_sent(
    pair: Team, four: Team, way: Way, precision: str, chunk_numel: int, device_nbytes: int | None
) -> None:
    """Each parameter and state is sent once, to its new owner alone; a rank has at most one chunk a role more."""
    sizes, stages = way
    task = StagedTask(precision=precision, sizes=sizes)
    change = Change(task, stages, chunk_numel=chunk_numel, device_nbytes=device_nbytes)
    costs = (pair if sizes[0] * sizes[1] == 2 else four).run(measured, change)
    owner = {name: rank for rank, cost in enumerate(costs) for name in cost.owned}
    expected = [0] * len(costs)
    for rank, cost in enumerate(costs):
        for name in cost.wanted:
            numel, roles = costs[owner[name]].owned[name]
            # Of bf16 weights, which are rounded from master weights, those are sent: 4 bytes in every role.
            expected[owner[name]] += 4 * numel * (len(roles) - (precision == "bf16")) * (owner[name] != rank)
    assert [sum(cost.sent.values()) for cost in costs] == expected
    assert sum(expected) > 0
    for cost in costs:
        assert cost.peak_nbytes <= max(cost.before_nbytes, cost.after_nbytes) + sum(cost.largest.values())


@pytest.mark.few(1)
@spread(way=[((2, 1), 1), ((1, 2), 2)], precision=["bf16", "fp32"], kind=["plain", "two"])
def test_states_are_there_before_the_next_step(pair: Team, way: Way, precision: str, kind: str) -> None:
    sizes, stages = way
    change = Change(StagedTask(precision=precision, sizes=sizes), stages, kind=kind, after=0)
    assert differences(pair.run(divided, change), pair.run(resumed, change)) == []


def go_and_return(rank: int, task: StagedTask) -> dict[str, torch.Tensor]:
    """Train two stages, which are data-parallel ranks for a while; return the weights."""
    training = Training(Change(task), task.sizes)
    batches = list(task.batches())
    with training.manager:
        training.steps(batches[:2])
        training.pipe = training.pipe.repartition(stages=1)
        training.model.eval()
        assert training.pipe.evaluate(*batches[0]).item() > 0
        training.model.train()
        training.pipe = training.pipe.repartition(stages=2)
        training.steps(batches[2:4])
        training.pipe = training.pipe.repartition(stages=1).repartition(stages=2)
        training.steps(batches[4:])
        assert training.manager.timeline().plan_misses == 0
        return training.manager.state_dict()


@pytest.mark.full
@pytest.mark.parametrize("model", ["tied", pytest.param("norms", marks=pytest.mark.full)])
def test_there_and_back_changes_nothing(pair: Team, model: str) -> None:
    task = StagedTask(model=model, sizes=(2, 1), steps=9)
    expected = pair.run(train, task)[0].weights
    for weights in pair.run(go_and_return, task):
        assert [key for key, value in expected.items() if not torch.equal(value, weights[key])] == []


def refuse(rank: int) -> None:
    task = StagedTask(sizes=(2, 1))
    training = Training(Change(task), task.sizes)
    pipe, manager, batches = training.pipe, training.manager, list(task.batches())
    own = training.model.words if rank == 0 else training.model.head
    with manager:
        pipe.step(*batches[0])
        with pytest.raises(chunkmem.StateError, match=r"has a gradient that waits for its step; call optimizer\.step"):
            pipe.repartition(stages=1)
        training.optimizers[0].step()
        training.optimizers[0].zero_grad()
        with pytest.raises(
            chunkmem.ConfigError, match=r"2 x 1 ranks .* cannot become 3 stages: 2 ranks divide into 1, 2"
        ):
            pipe.repartition(stages=3)
        for bad in (0, True, "1"):
            with pytest.raises(chunkmem.ConfigError, match=f"stages is {bad!r}; give a number of at least 1"):
                pipe.repartition(stages=bad)
        with pytest.raises(chunkmem.StateError, match=r"there are 2 x 1 ranks .* already"):
            pipe.repartition(stages=2)
        with pytest.raises(chunkmem.ConfigError, match="number of stages that a pipeline is divided into differs"):
            pipe.repartition(stages=1 + rank)
        kept = own.weight.data if rank == 1 else None
        said = "somebody keeps the memory of param chunk"
        said = said if rank == 1 else f"another rank refuses: StateError.*{said}"
        with pytest.raises(chunkmem.StateError, match=said):
            pipe.repartition(stages=1)
        del kept
        training.steps(batches[1:4])
        training.pipe = pipe.repartition(stages=1)
        for call in (lambda: pipe.step(*batches[0]), lambda: pipe.repartition(1), lambda: pipe.evaluate(*batches[0])):
            with pytest.raises(
                chunkmem.StateError,
                match=r"this pipeline is over: its 2 x 1 ranks .* are 1 x 2 now; use what",
            ):
                call()
        with manager.gather(), pytest.raises(chunkmem.StateError, match=r"inside manager\.gather"):
            training.pipe.repartition(stages=2)
        training.pipe = training.pipe.repartition(stages=2)
        training.steps(batches[4:])
        weights = manager.state_dict()
    expected = train(rank, task).weights
    assert [key for key, value in expected.items() if not torch.equal(value, weights[key])] == []


@pytest.mark.few(1)
@spread(
    kind=["plain", "on host", "tiled", "excluded", "averaged"],
    model=["frozen", "tied", "norms"],
    precision=["bf16", "fp32"],
    way=[((2, 1), 1), ((1, 2), 2)],
)
def test_what_has_room_is_what_is_packed(pair: Team, kind: str, model: str, precision: str, way: Way) -> None:
    sizes, stages = way
    model = "plain" if (kind, model) in (("on host", "tied"), ("excluded", "tied")) else model
    pair.run(measured, Change(StagedTask(precision=precision, model=model, sizes=sizes), stages, kind=kind))


def test_parameters_without_states_have_none_afterwards(pair: Team) -> None:
    pair.run(measured, Change(StagedTask(sizes=(2, 1)), kind="frozen late"))


def test_what_is_refused_changes_nothing(pair: Team) -> None:
    pair.run(refuse)


def lack_room(rank: int, task: StagedTask) -> int:
    """Divide a pipeline under a cap that has no room for a chunk more; then train on. Return the cap that would do."""
    training = Training(Change(task), task.sizes)
    manager, batches = training.manager, list(task.batches())
    with manager:
        training.steps(batches[:3])
        host = manager.runtime.tiers.host
        taken = host.spare_nbytes + manager.runtime.tiers.device.spare_nbytes
        for ledger in (host, manager.runtime.tiers.device):  # as if gradients had no memory, and nothing were free
            ledger.charge("test", ledger.free_nbytes)
        with pytest.raises(chunkmem.CapacityError, match=r"a rank lacks .*: raise memory\.host to") as raised:
            training.pipe.repartition(stages=1)
        for ledger in (host, manager.runtime.tiers.device):
            ledger.release("test", ledger.now["test"])
        assert host.spare_nbytes + manager.runtime.tiers.device.spare_nbytes == taken
        training.steps(batches[3:])
        weights = manager.state_dict()
    expected = train(rank, task).weights
    assert [key for key, value in expected.items() if not torch.equal(value, weights[key])] == []
    return raised.value.needed_nbytes


def test_a_lack_of_room_changes_nothing(pair: Team) -> None:
    assert len(set(pair.run(lack_room, StagedTask(sizes=(2, 1), model="frozen", precision="bf16")))) == 1


def fail(rank: int, bad: int) -> str:
    """Return the error of this rank, when another one has no memory left in the middle."""
    task = StagedTask(sizes=(2, 1), timeout_s=20.0)
    training = Training(Change(task), task.sizes)
    manager = training.manager

    def begin(self: ChunkMover, *args: Any) -> Any:
        if rank == bad:
            raise OSError("no memory left")
        return usual_begin(self, *args)

    usual_begin = ChunkMover._begin
    with manager, pytest.MonkeyPatch.context() as patch:
        training.steps(list(task.batches())[:2])
        patch.setattr(ChunkMover, "_begin", begin)
        with pytest.raises((OSError, chunkmem.RankError)) as raised:
            training.pipe.repartition(stages=1)
        for call in (manager.state_dict, lambda: training.pipe.step(*next(task.batches()))):
            with pytest.raises(chunkmem.StateError, match=r"repartition\(\) has failed; continue from a checkpoint"):
                call()
        ledgers = (manager.runtime.tiers.device, manager.runtime.tiers.host)
        assert sum(ledger.total_nbytes for ledger in ledgers) == 0
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize("bad", [1, pytest.param(0, marks=pytest.mark.full)])
def test_what_one_rank_raises_is_said_on_all(pair: Team, bad: int) -> None:
    said = pair.run(fail, bad)
    assert said[bad] == "OSError: no memory left"
    assert f"rank {bad} raised OSError: no memory left" in said[1 - bad]


def replicated(rank: int, stages: int) -> tuple[list[int], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Divide 2 stages of 2 replicas; return the ranks that share chunks afterwards, and weights before and after."""
    task = StagedTask(sizes=(2, 1))
    training = Training(Change(task), (2, 2, 1))
    with training.manager:
        training.steps(list(task.batches())[:3])
        before = training.manager.state_dict()
        training.pipe = training.pipe.repartition(stages=stages)
        after = training.manager.state_dict()
        training.steps(list(task.batches())[3:])
        ranks = training.manager.runtime.ranks
        assert ranks.replicate is not None
        assert (ranks.shard.size, ranks.replicate.size) == (2, 2)
        return [ranks.name(number) for number in range(ranks.size)], before, after


def test_replicas_keep_their_ranks(four: Team) -> None:
    #   replica 0: ranks 0 (stage 0) and 2 (stage 1); replica 1: ranks 1 and 3
    for names, before, after in four.run(replicated, 1):
        assert names == [0, 2, 1, 3]
        assert [key for key, value in before.items() if not torch.equal(value, after[key])] == []


class Adapted(nn.Module):
    """A layer with an adapter."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.adapter = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x) + self.adapter(x)
        return result


def add_adapter(rank: int) -> None:
    """A rank looked for it in chunks: KeyError, "no rank has parameter 3"."""
    task = StagedTask(sizes=(1, 2))
    training = Training(Change(task), task.sizes)
    with training.manager:
        block = training.model.blocks[0]
        block.down = Adapted(block.down)
        training.optimizers = [chunkmem.AdamW(training.model.parameters(), manager=training.manager, lr=1e-2)]
        batches = list(task.batches(rank))
        training.steps(batches[:2])
        with pytest.raises(chunkmem.StateError, match=r"blocks\.0\.down\.adapter\.weight was added after"):
            training.pipe.repartition(stages=2)
        training.steps(batches[2:4])


def test_parameters_that_were_added_later_are_refused(pair: Team) -> None:
    pair.run(add_adapter)


class Hooked:
    """Hooks on Parameters, of which every rank has values at one time and has none at another."""

    def __init__(self, training: Training) -> None:
        self.called: Counter[str] = Counter()
        for name, param in training.model.named_parameters():
            param.register_hook(partial(self._count, f"gradient of {name}"))
            param.register_post_accumulate_grad_hook(partial(self._count, f"accumulated {name}"))

    def _count(self, name: str, _tensor: torch.Tensor) -> None:
        self.called[name] += 1


def hook(rank: int) -> dict[str, int]:
    task = StagedTask(sizes=(1, 2))
    training = Training(Change(task), task.sizes)
    with training.manager:
        hooked = Hooked(training)
        training.pipe = training.pipe.repartition(stages=2).repartition(stages=1)
        training.steps(list(task.batches())[:1])
        return dict(hooked.called)


def test_hooks_of_users_stay(pair: Team) -> None:
    names = [name for name, _ in Net().named_parameters()]
    for called in pair.run(hook):
        assert set(called) == {f"{what} {name}" for what in ("gradient of", "accumulated") for name in names}
        assert set(called.values()) == {4}, "once for each micro-batch"


def refuse_other_managers(rank: int, folder: str) -> None:
    task = StagedTask()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
    values = task.make_config().to_dict()
    values["memory"]["disk"] = {"path": folder, "capacity": 1 << 20}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(values), mesh=mesh) as manager:
        with manager.init():
            model = Net()
        pipe = manager.pipeline(model.blocks, first=model.words, last=model.head, loss_fn=loss_of, micro_batches=2)
        with pytest.raises(chunkmem.ConfigError, match=r"with memory\.disk is not available"):
            pipe.repartition(stages=1)
    with chunkmem.ChunkManager(task.make_config()) as manager:
        with manager.init():
            model = Net()
        pipe = manager.pipeline(model.blocks, first=model.words, last=model.head, loss_fn=loss_of, micro_batches=2)
        with pytest.raises(chunkmem.ConfigError, match=r"make the manager with ChunkManager\(config, mesh="):
            pipe.repartition(stages=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    with chunkmem.ChunkManager(task.make_config(), mesh=mesh) as manager:
        with manager.init():
            model = Net()
        pipe = manager.pipeline(model.blocks, first=model.words, loss_fn=loss_of, micro_batches=2)
        with pytest.raises(chunkmem.LayoutError, match=r"parameter head.weight \(11, 16\) is in no stage"):
            pipe.repartition(stages=2)
        pipe = manager.pipeline([model], loss_fn=loss_of, micro_batches=2)
        with pytest.raises(chunkmem.LayoutError, match="1 blocks cannot be divided into 2 stages"):
            pipe.repartition(stages=2)
        manager.wrap(nn.Linear(2, 2))
        with pytest.raises(chunkmem.StateError, match="this manager has 2 models"):
            pipe.repartition(stages=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("stage",))
    with chunkmem.ChunkManager(task.make_config(), mesh=mesh) as manager:
        with manager.init():
            model = Net()
            with manager.exclude(reduce=False):
                model.head = Head(WIDTH, WORDS, bias=False)
        pipe = manager.pipeline(model.blocks, first=model.words, last=model.head, loss_fn=loss_of, micro_batches=2)
        with pytest.raises(chunkmem.StateError, match=r"built in manager.exclude\(reduce=False\)"):
            pipe.repartition(stages=1)


def test_which_managers_cannot_be_divided(pair: Team, tmp_path: Path) -> None:
    pair.run(refuse_other_managers, str(tmp_path))
