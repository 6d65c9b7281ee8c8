"""Models that torch has made tensor-parallel train in chunks as without: alone, and with shards and replicas."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import chunkmem
from tests.helpers.ranks import Team
from tests.helpers.spread import spread
from tests.helpers.tensor_parallel import ChunkTraining, Parallel, PlainTraining, built, full, loss_of

TP, TP_SHARD = {"tp": 2}, {"shard": 2, "tp": 2}
EIGHT = {"replicate": 2, "shard": 2, "tp": 2}


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with Team(2) as team:
        yield team


@pytest.fixture(scope="module")
def four() -> Iterator[Team]:
    with Team(4) as team:
        yield team


def config_of(device: int | None, precision: str = "fp32", activations: str | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {"precision": precision, "activations": {"policy": activations}}
    return found if device is None else {**found, "memory": {"device": device}}


def compare(rank: int, task: Parallel) -> int:
    """Both trainings, step by step; returns the bytes that chunkmem has copied to DEVICE."""
    torch.set_num_threads(1)
    plain, ours = PlainTraining(task), ChunkTraining(task)
    with ours.manager:
        tolerance: dict[str, float] = {"rtol": 0, "atol": 0}
        if task.max_norm or task.micro_batches > 1:
            # torch adds the ranks' gradients up after those of all micro-batches, and norms by parameter.
            tolerance = {"rtol": 1e-5, "atol": 1e-6}
        for number in range(task.steps):
            expected, found = plain.step(number), ours.step(number)
            torch.testing.assert_close(found, expected, **tolerance, msg=f"loss of step {number} on rank {rank}")
        (weights, moments), (our_weights, our_moments) = plain.state(), ours.state()
        torch.testing.assert_close(our_weights, weights, **tolerance)
        torch.testing.assert_close(our_moments, moments, **tolerance)
        return ours.manager.memory().moved.h2d_nbytes


@pytest.mark.few(1)
@spread(device=(6 << 10, None), precision=("fp32", "bf16"), activations=(None, "recompute", "offload"))
def test_two_ranks(team: Team, device: int | None, precision: str, activations: str | None) -> None:
    device = device and device * (1 if activations is None else 5)
    for moved in team.run(compare, Parallel(TP, config_of(device, precision, activations))):
        assert (moved > 0) == (device is not None)


@pytest.mark.few(1)
@spread(device=(8 << 10, None), precision=("bf16", "fp32"))
def test_shards_of_local_parts(four: Team, device: int | None, precision: str) -> None:
    four.run(compare, Parallel(TP_SHARD, config_of(device, precision)))


@pytest.mark.full
@spread(device=(8 << 10, None), precision=("bf16", "fp32"))
def test_replicas_of_shards_of_local_parts(device: int | None, precision: str) -> None:
    with Team(8) as eight:
        eight.run(compare, Parallel(EIGHT, config_of(device, precision)))


@pytest.mark.full  # stages ask for norms in an ordinary run
@pytest.mark.parametrize("max_norm", [0.0, 1e-3])
def test_norms_count_each_element_once(four: Team, max_norm: float) -> None:
    four.run(compare, Parallel(TP_SHARD, config_of(10 << 10), steps=3, micro_batches=2, max_norm=max_norm, lr=1e-3))


def staged(rank: int, sizes: dict[str, int], folder: str, device: int) -> None:
    """A pipeline whose stages are tensor-parallel, against plain accumulation; other ranks take its checkpoint."""
    torch.set_num_threads(1)
    own = Parallel({name: size for name, size in sizes.items() if name != "stage"}, micro_batches=2)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    replica = mesh["shard"].get_local_rank() if "shard" in sizes else 0
    plain = built(mesh["tp"])
    expected_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(config_of(device)), mesh=mesh)
    with manager.init():
        model = built(mesh["tp"])
    pipe = manager.pipeline(
        model.blocks,
        first=model.words,
        last=model.head,
        loss_fn=lambda y, t: nn.functional.cross_entropy(y.flatten(0, 1), t.flatten()),
        micro_batches=2,
    )
    optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-3)
    for step in range(4):
        batches = [own.batch(step, number, replica) for number in range(2)]
        expected_optimizer.zero_grad()
        for batch in batches:
            (loss_of(plain, batch) / 2).backward()
        for param in plain.parameters():
            param.grad = param.grad.redistribute(placements=param.placements)
            if "shard" in sizes:
                dist.all_reduce(param.grad.to_local(), group=mesh["shard"].get_group())
                param.grad.to_local().div_(2)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e-2).full_tensor()
        expected_optimizer.step()
        optimizer.zero_grad()
        pipe.step(torch.cat(batches), torch.cat(batches))
        torch.testing.assert_close(optimizer.clip_grad_norm_(1e-2), expected, rtol=1e-5, atol=0)
        optimizer.step()
    weights = {name: full(value) for name, value in plain.state_dict().items()}
    found = {name: full(value) for name, value in manager.state_dict().items()}
    torch.testing.assert_close(found, weights, rtol=1e-5, atol=1e-6)
    moments = {index: full(state["exp_avg"]) for index, state in optimizer.state_dict()["state"].items()}
    manager.save(folder, optimizer)
    manager.close()
    other = ChunkTraining(Parallel({"shard": sizes["stage"] * sizes.get("shard", 1), "tp": 2}))
    other.manager.load(folder, other.optimizer)
    torch.testing.assert_close(other.state()[0], found, rtol=0, atol=0)
    states = other.optimizer.state_dict()["state"]
    torch.testing.assert_close({i: full(states[i]["exp_avg"]) for i in states}, moments, rtol=0, atol=0)
    other.manager.close()


@pytest.mark.parametrize("device", [24 << 10, pytest.param(1 << 20, marks=pytest.mark.full)])
def test_stages_are_tensor_parallel(four: Team, tmp_path: Path, device: int) -> None:
    four.run(staged, {"stage": 2, "tp": 2}, str(tmp_path / "checkpoint"), device)


@pytest.mark.full
def test_stages_of_shards_of_local_parts(tmp_path: Path) -> None:
    with Team(8) as eight:
        eight.run(staged, {"stage": 2, "shard": 2, "tp": 2}, str(tmp_path / "checkpoint"), 24 << 10)


def odd_sizes(rank: int, width: int, precision: str, folder: str) -> None:
    """Parts of several sizes, maybe empty, next to parameters that each rank has whole: counted and saved once."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tp"))
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        plan: dict[str, Any] = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
        models.append(parallelize_module(layers, mesh["tp"], plan))
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    plain, model = models[0].to(dtype), models[1]
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    plain(batch).float().square().sum().backward()
    expected = sum(full(param.grad).double().square().sum() for param in plain.parameters()).sqrt().item()
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({"precision": precision}), mesh=mesh) as manager:
        manager.wrap(model)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        manager.backward(model(batch).float().square().sum())
        assert float(optimizer.clip_grad_norm_(0.1)) == pytest.approx(expected, rel=1e-3)
        optimizer.step()
        saved = {name: full(value) for name, value in manager.state_dict().items()}
        manager.save(folder, optimizer)
        optimizer.zero_grad()
        manager.backward(model(batch).float().square().sum())
        optimizer.step()
        manager.load(folder, optimizer)
        torch.testing.assert_close({k: full(v) for k, v in manager.state_dict().items()}, saved, rtol=0, atol=0)


@pytest.mark.few(1)
@spread(width=(1, 5, 16), precision=("bf16", "fp32"))
def test_parts_of_several_sizes_next_to_whole_parameters(
    team: Team, tmp_path: Path, width: int, precision: str
) -> None:
    team.run(odd_sizes, width, precision, str(tmp_path / "checkpoint"))


def overflow(rank: int) -> list[Any]:
    """One rank alone has an infinite gradient: all skip the step."""
    task = Parallel(TP, {"precision": "fp16", "fp16": {"initial_scale_power": 4}})
    training = ChunkTraining(task)
    with training.manager as manager:
        before = {name: full(value) for name, value in manager.state_dict().items()}
        training.optimizer.zero_grad()
        manager.backward(loss_of(training.model, task.batch(0, 0, 0)))
        if rank == 1:
            with torch.no_grad():
                next(p for name, p in training.model.named_parameters() if "up.weight" in name).grad.fill_(torch.inf)
        training.optimizer.step()
        after = manager.state_dict()
        return [manager.num_skipped_steps, all(torch.equal(value, full(after[name])) for name, value in before.items())]


def test_ranks_skip_a_step_together(team: Team) -> None:
    assert team.run(overflow) == [[1, True]] * 2


def save_and_load(rank: int, folder: str, sizes: dict[str, int]) -> None:
    """Half of a training, another manager takes it over, and FSDP2 over the same mesh, which gives it back."""
    torch.set_num_threads(1)
    task = Parallel(sizes, config_of(12 << 10))
    first = ChunkTraining(task)
    whole = ChunkTraining(task)
    path = Path(folder) / "checkpoint"
    averages = chunkmem.EMA(first.manager, 0.5)
    for number in range(3):
        first.step(number)
        averages.update()
        whole.step(number)
    first.manager.save(path, first.optimizer, ema=averages)
    saved = {name: full(value) for name, value in averages.state_dict().items()}
    first.manager.close()

    second = ChunkTraining(task)
    averages = chunkmem.EMA(second.manager, 0.5)
    second.manager.load(path, second.optimizer, ema=averages)
    torch.testing.assert_close({k: full(v) for k, v in averages.state_dict().items()}, saved, rtol=0, atol=0)
    assert [second.step(number) for number in range(3, 6)] == [whole.step(number) for number in range(3, 6)]
    weights, moments = whole.state()
    torch.testing.assert_close(second.state(), (weights, moments), rtol=0, atol=0)

    mesh = task.mesh()
    peer: Any = built(mesh["tp"])
    if "shard" in sizes:
        for block in peer.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(peer, mesh=mesh["shard"])
    second.manager.save(path, second.optimizer)
    state = {"model": get_model_state_dict(peer)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(peer, state["model"])
    for name, value in get_model_state_dict(peer).items():
        torch.testing.assert_close(full(value), weights[name], rtol=0, atol=0)
    second.step(6)
    second.manager.load_state_dict(get_model_state_dict(peer))
    torch.testing.assert_close(second.state()[0], weights, rtol=0, atol=0)
    with torch.no_grad():
        for param in peer.parameters():
            param.mul_(2)
    dcp.save({"model": get_model_state_dict(peer)}, checkpoint_id=Path(folder) / "peer")
    second.manager.load(Path(folder) / "peer")
    torch.testing.assert_close(second.state()[0], {name: 2 * value for name, value in weights.items()}, rtol=0, atol=0)
    streamed = dict(second.manager.stream_weights())
    torch.testing.assert_close(streamed["blocks.0.up.weight"], 2 * weights["blocks.0.up.weight"], rtol=0, atol=0)
    for training in (second, whole):
        training.manager.close()


@pytest.mark.full  # stages save, and other ranks load, in an ordinary run
@pytest.mark.parametrize("sizes", [TP, TP_SHARD], ids=str)
def test_checkpoints_are_those_of_torch(team: Team, four: Team, tmp_path: Path, sizes: dict[str, int]) -> None:
    (team if sizes is TP else four).run(save_and_load, str(tmp_path), sizes)


def init(rank: int, sizes: dict[str, int]) -> None:
    """What is divided inside of `manager.init()` trains as what is wrapped."""
    torch.set_num_threads(1)
    task = Parallel(sizes, config_of(10 << 10), steps=3)
    wrapped = ChunkTraining(task)
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(task.config), mesh=wrapped.mesh) as manager:
        with manager.init():
            model = built(wrapped.mesh["tp"])
        wrapped_losses = [wrapped.step(number) for number in range(task.steps)]
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=task.lr)
        for number, expected in enumerate(wrapped_losses):
            optimizer.zero_grad()
            loss = loss_of(model, task.batch(number, 0, task.replica_of(wrapped.mesh)))
            manager.backward(loss)
            optimizer.step()
            assert full(loss.detach()).item() == expected
    wrapped.manager.close()


@pytest.mark.full
@pytest.mark.parametrize("sizes", [TP, TP_SHARD], ids=str)
def test_inside_of_init(team: Team, four: Team, sizes: dict[str, int]) -> None:
    (team if sizes is TP else four).run(init, sizes)


def averages(training: ChunkTraining, step: int) -> None:
    if step == 0:
        training.averages = chunkmem.EMA(training.manager, 0.9)
    training.averages.update()
    with training.averages.swapped():
        pass


def frozen(training: ChunkTraining, step: int) -> None:
    training.optimizer.zero_grad()
    if step == 2:
        training.manager.freeze(training.model.blocks[0])
    if step == 4:
        training.manager.unfreeze(training.model.blocks[0])


def evaluated(training: ChunkTraining, step: int) -> None:
    with torch.no_grad():
        training.model(training.task.batch(step, 0, 0))


def read(training: ChunkTraining, step: int) -> None:
    copy.deepcopy(training.model)
    training.model.state_dict()
    training.optimizer.state_dict()
    dict(training.manager.stream_weights())
    with training.manager.gather(list(training.model.parameters())[:2]):
        pass


def compiled(training: ChunkTraining, step: int) -> None:
    if step == 0:
        training.manager.compile(training.model.blocks[0], backend="eager")


def nothing(training: ChunkTraining, step: int) -> None:
    """Between two steps."""


FEATURES: dict[str, tuple[dict[str, Any], Any]] = {
    "in backward": ({"optimizer": {"params": {"in_backward": True}}}, nothing),
    "phases": (config_of(24 << 10), lambda training, step: training.manager.offload()),
    "averages": (config_of(24 << 10), averages),
    "evaluation": (config_of(12 << 10), evaluated),
    "copies": (config_of(12 << 10), read),
    "frozen": (config_of(24 << 10), frozen),
    "compiled": ({}, compiled),
    "tiles": ({"with_tiling_linear": True}, nothing),
    "disk": ({"memory": {"device": 16 << 10, "host": 96 << 10, "disk": {"capacity": "8MiB"}}}, nothing),
}


def cross(rank: int, sizes: dict[str, int], feature: str, folder: str) -> None:
    torch.set_num_threads(1)
    config, between = FEATURES[feature]
    if feature == "disk":
        config = {"memory": {**config["memory"], "disk": {**config["memory"]["disk"], "path": folder}}}
    ample = {} if feature in ("disk", "tiles", "in backward") else {**config, "memory": {"device": None}}
    found = []
    for each in (ample, config):
        training = ChunkTraining(Parallel(sizes, each))
        with training.manager:
            losses = []
            for step in range(6):
                losses.append(training.step(step))
                between(training, step)
            found.append((losses, *training.state()))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.full
@pytest.mark.parametrize("sizes", [TP, TP_SHARD], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_other_features(team: Team, four: Team, tmp_path: Path, sizes: dict[str, int], feature: str) -> None:
    (team if sizes is TP else four).run(cross, sizes, feature, str(tmp_path))


def ways_out(rank: int) -> None:
    """Copies and what `unwrap` leaves are DTensors again, and the ways that need more than a part are refused."""
    task = Parallel(TP)
    training = ChunkTraining(task)
    model, manager = training.model, training.manager
    built_anew: Any = built(training.mesh["tp"])
    assert type(model.blocks[0].up) is not nn.Linear
    assert isinstance(model.blocks[0].up, nn.Linear)
    training.step(0)
    weights, _ = training.state()
    copied = copy.deepcopy(model)
    assert type(copied.blocks[0].up) is nn.Linear
    assert {name: type(param) for name, param in copied.named_parameters()} == dict.fromkeys(
        dict(copied.named_parameters()), DTensor
    )
    torch.testing.assert_close({k: full(v) for k, v in copied.state_dict().items()}, weights, rtol=0, atol=0)
    manager.backward(loss_of(model, task.batch(1, 0, 0)))
    with pytest.raises(chunkmem.StateError, match=r"its parts of the parameters alone, which torch.nn.utils.clip_grad"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(chunkmem.ConfigError, match=r"Adafactor may need whole .*words.weight is a part of the DTensor"):
        chunkmem.Optimizer(torch.optim.Adafactor, model.parameters(), manager=manager)
    training.optimizer.zero_grad()
    with pytest.raises(chunkmem.CheckpointError, match=r"blocks\.0\.up\.weight is \(3, 3\) instead of \(32, 16\)"):
        manager.load_state_dict({**weights, "blocks.0.up.weight": torch.ones(3, 3)})
    ordinary = manager.unwrap(model)
    assert ordinary is model
    assert type(model.blocks[0].up) is nn.Linear
    torch.testing.assert_close({k: full(v) for k, v in model.state_dict().items()}, weights, rtol=0, atol=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, task.batch(1, 0, 0)).backward()
    optimizer.step()
    manager.close()

    hooked: Any = built(training.mesh["tp"])
    with chunkmem.ChunkManager(mesh=training.mesh["tp"]) as other:
        hooked.head.weight.register_hook(lambda grad: grad)
        with pytest.raises(chunkmem.LayoutError, match=r"words.weight is a DTensor that has a gradient, or hooks"):
            other.wrap(hooked)
        assert isinstance(hooked.blocks[0].up.weight, DTensor)
        with pytest.raises(chunkmem.LayoutError, match="has a gradient, or hooks"), other.init():
            first = nn.Linear(4, 4)
            parallelize_module(first, training.mesh["tp"], ColwiseParallel())
            second = nn.Linear(4, 4)
            parallelize_module(second, training.mesh["tp"], ColwiseParallel())
            second.weight.register_hook(lambda grad: grad)
        assert isinstance(first.weight, nn.Parameter), "none of both is taken apart"
        with torch.device("meta"):
            on_meta = built(training.mesh["tp"])
        with pytest.raises(chunkmem.LayoutError, match=r"words.weight is a DTensor on the meta device, and has no val"):
            other.wrap(on_meta)
    with chunkmem.ChunkManager(mesh=training.mesh["tp"]) as other:
        params = list(built_anew.parameters())
        wrong: Any = distribute_tensor(torch.ones(4, 4), training.mesh["tp"], [Replicate()])
        built_anew.late = nn.Parameter(DTensor.from_local(wrong.to_local(), training.mesh["tp"], [Partial()]))
        with pytest.raises(chunkmem.LayoutError, match="late is a DTensor of sums that have not been formed"):
            other.wrap(built_anew)
        assert [id(a) for a in built_anew.parameters()][: len(params)] == [id(a) for a in (built_anew.late, *params)][
            : len(params)
        ]
    with (
        chunkmem.ChunkManager(mesh=training.mesh["tp"]) as other,
        pytest.raises(chunkmem.LayoutError, match=r"is a DTensor .* over the ranks"),
    ):
        own = dist.device_mesh.DeviceMesh("cpu", [rank])
        lone = nn.Linear(4, 4)
        lone.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), own, [Replicate()]))
        other.wrap(lone)


def test_ways_out(team: Team) -> None:
    team.run(ways_out)
