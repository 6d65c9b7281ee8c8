"""`chunkmem.EMA`: the bits of torch's averages, under any cap; swapped in and out, saved, loaded, over ranks."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import chunkmem
from chunkmem.data.types import Role, Tier
from tests.helpers.audit import assert_as_predicted, audit
from tests.helpers.ranks import Team
from tests.helpers.saved_training import Net, Saved, Training, assert_same
from tests.helpers.spread import spread
from tests.helpers.twins import CHUNK_NUMEL, WIDTH, Blocks, cpu_only

SLAB = 4 * CHUNK_NUMEL
NUM_GROUPS = 8
"""Chunk groups of `Blocks`."""
DECAY = 0.9
State = dict[str, Tensor]


def manager_of(path: Path | None = None, **memory: Any) -> chunkmem.ChunkManager:
    """`path` is that of a disk."""
    disk = {} if path is None else {"disk": {"path": str(path), "capacity": 1 << 20}}
    memory = {"device": 1 << 20, "host": 1 << 20} | disk | memory
    return chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": memory, "default_chunk_size": CHUNK_NUMEL}))


class Averaged:
    """A model, its optimizer and averages, in plain PyTorch or in chunks."""

    def __init__(self, manager: chunkmem.ChunkManager | None) -> None:
        torch.manual_seed(0)
        self.manager = manager
        with nullcontext() if manager is None else manager.init():
            self.model = Blocks()
        params = self.model.parameters()
        self.optimizer: Any
        self.ema: Any
        if manager is None:
            self.optimizer = torch.optim.AdamW(params, lr=1e-2, fused=True)
            self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        else:
            self.optimizer = chunkmem.AdamW(params, manager=manager, lr=1e-2)
            self.ema = chunkmem.EMA(manager, DECAY)
        self.losses: list[float] = []

    def step(self, seed: int) -> None:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        if self.manager is None:
            self.ema.update_parameters(self.model)
        else:
            self.ema.update()
            audit(self.manager)

    @torch.no_grad()
    def evaluate(self) -> None:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(99))
        if self.manager is None:
            self.losses.append(self.ema(x).sum().item())
            return
        with self.ema.swapped():
            audit(self.manager)
            self.losses.append(self.model(x).sum().item())
        audit(self.manager)

    def run(self, steps: int = 6, *, evaluates: bool = True) -> tuple[list[float], State]:
        for seed in range(steps):
            self.step(seed)
            if evaluates and seed % 2:
                self.evaluate()
        return self.losses, dict(self.ema.state_dict())


# Bits.


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["ample", "tight", "one tier", "disk"])
@cpu_only
def test_the_bits_of_torch(kind: str, tmp_path: Path) -> None:
    """Of the averages, of losses with them, and of the training between."""
    losses, averages = Averaged(None).run()
    memory: dict[str, Any] = {"one tier": {"device": None}}.get(kind, {})
    if kind == "tight":
        with manager_of() as manager:
            Averaged(manager).run()
            memory = {"device": manager.memory().device.required_nbytes}
        assert memory["device"] < NUM_GROUPS * SLAB / 2
    if kind == "disk":
        memory = {"device": 4 * SLAB, "host": 5 * SLAB}
    with manager_of(tmp_path if kind == "disk" else None, **memory) as manager:
        training = Averaged(manager)
        found = training.run()
        assert found[0] == losses
        assert_same(found[1], averages)
        tier = {"disk": Tier.DISK, "one tier": Tier.DEVICE}.get(kind, Tier.HOST)
        report = manager.memory()
        of_tier = {Tier.DEVICE: report.device, Tier.HOST: report.host, Tier.DISK: report.disk}[tier]
        assert of_tier is not None
        assert of_tier.by_role["ema"] == (NUM_GROUPS * SLAB, NUM_GROUPS * SLAB)
        assert "ema" in str(report)
        assert repr(training.ema) == f"EMA(16 parameters, decay=0.9, 6 updates on {tier.name})"


class Reference:
    """A plain loop over weights in float32."""

    def __init__(self, decay: float = DECAY) -> None:
        self.decay = decay
        self.averages: State = {}

    def update(self, weights: State) -> None:
        for name, value in weights.items():
            if name in self.averages:
                self.averages[name].lerp_(value, 1 - self.decay)
            else:
                self.averages[name] = value.clone()


def trainable(training: Training) -> State:
    names = {name for name, param in training.model.named_parameters() if param.requires_grad}
    return {f"module.{name}": value for name, value in training.manager.state_dict().items() if name in names}


def follow(how: Saved, steps: int = 4) -> None:
    """Train, and compare with a plain loop over the weights that there were after each step."""
    training = how.open()
    with training.manager as manager:
        ema, reference = chunkmem.EMA(manager, DECAY), Reference()
        for step in range(steps):
            training.run(1, seed=step)
            ema.update()
            reference.update(trainable(training))
        before = training.state()
        with ema.swapped():
            inside = trainable(training)
        assert_same(training.state(), before)
        assert_same(inside, reference.averages)
        found = ema.state_dict()
        assert int(found.pop("n_averaged")) == steps
        assert_same(found, reference.averages)
        assert all(value.dtype is torch.float32 for value in found.values())


@pytest.mark.few(2)
@cpu_only
@spread(precision=["fp32", "bf16", "fp16"], kind=["tight", "ample", "disk"])
def test_averages_are_those_of_master_weights(precision: str, kind: str, tmp_path: Path) -> None:
    """And all bits of weights, master weights and states are there again after an evaluation."""
    slab = 4 * 4800
    memory: dict[str, Any] = {"tight": {"device_nbytes": 4 * slab}}.get(kind, {})
    if kind == "disk":
        memory = {"device_nbytes": 4 * slab, "host_nbytes": 8 * slab, "disk": tmp_path}
    follow(Saved(precision, **memory))


def follow_on(rank: int, how: Saved) -> None:
    follow(how)


@pytest.mark.few(1)
@spread(sizes=[(2,), (2, 1)], precision=["bf16", "fp32"])
def test_each_rank_averages_its_own_chunks(sizes: tuple[int, ...], precision: str, pair: Team) -> None:
    pair.run(follow_on, Saved(precision, sizes=sizes))


def on_host_of(rank: int) -> None:
    """A module that computes on HOST is on all ranks, which have to have its averages, too."""
    config = chunkmem.Config.from_dict({"memory": {"device": 1 << 20, "host": 1 << 20}})
    with chunkmem.ChunkManager(config) as manager, torch.random.fork_rng():
        torch.manual_seed(0)
        with manager.init():
            model = torch.nn.Sequential(torch.nn.Embedding(32, 8), torch.nn.Linear(8, 8))
            manager.on_host(model[0])
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=0.1)
        ema = chunkmem.EMA(manager, 0.5)
        ids = torch.arange(8)
        for _ in range(3):
            model(ids).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update()
        averages = ema.state_dict()
        with ema.swapped(), torch.no_grad():
            inside = model(ids)
        expected = torch.nn.functional.linear(
            averages["module.0.weight"][ids], averages["module.1.weight"], averages["module.1.bias"]
        )
        assert torch.equal(inside, expected)


def test_modules_on_host_have_their_averages_on_all_ranks(pair: Team) -> None:
    pair.run(on_host_of)
    on_host_of(0)


def repartition_on(rank: int, precision: str, memory: dict[str, int]) -> None:
    training = Saved(precision, sizes=(2, 1), **memory).open()
    with training.manager as manager:
        ema, closed = chunkmem.EMA(manager, DECAY), None
        if not memory:
            closed = chunkmem.EMA(manager, DECAY)
            chunkmem.EMA(manager, DECAY)  # nobody has it
        reference = Reference()
        for step, stages in enumerate([1, 2, 1, 2]):
            training.run(1, seed=step)
            ema.update()
            reference.update(trainable(training))
            if step == 1 and closed is not None:
                closed.close()
            with ema.swapped(), pytest.raises(chunkmem.StateError, match=r"repartition\(\) inside ema\.swapped\(\)"):
                training.pipe.repartition(stages)
            if step < 3:
                training.pipe = training.pipe.repartition(stages)
            before = training.state()
            with ema.swapped():
                inside = trainable(training)
            assert_same(training.state(), before)
            assert_same(inside, reference.averages)
            found = ema.state_dict()
            assert int(found.pop("n_averaged")) == step + 1
            assert_same(found, reference.averages)
        roles = {chunk.id.role for chunk in manager.runtime.memory.store.chunks.values() if chunk.id.role.kind.stays}
        assert roles == {Role("ema")}
        if manager.runtime.tiers.caps.host_nbytes:
            assert manager.memory().device.by_role.get("ema", (0, 0))[0] == 0
        ema.close()
        assert all(not chunk.id.role.kind.stays for chunk in manager.runtime.memory.store.chunks.values())


@pytest.mark.few(1)
@spread(precision=["bf16", "fp32"], memory=[{}, {"device_nbytes": 800 << 10, "host_nbytes": 350 << 10}])
def test_averages_move_along_with_a_pipeline(precision: str, memory: dict[str, int], pair: Team) -> None:
    """To where their parameters are: the averages of a run whose ranks stayed as they were."""
    pair.run(repartition_on, precision, memory)


def lack_host(rank: int) -> None:
    """Two ranks have a half each; as a stage, the first one would have all."""
    training = Saved(sizes=(1, 2), device_nbytes=2 << 20, host_nbytes=60 << 10).open()
    with training.manager as manager:
        ema = chunkmem.EMA(manager, DECAY, training.model.blocks[0].parameters())
        before, averages = manager.state_dict(), ema.state_dict()
        said = r"its averages are to take .* of HOST; a rank lacks"
        with pytest.raises(chunkmem.CapacityError, match=said if rank == 0 else "a rank lacks"):
            training.pipe.repartition(2)
        assert_same(manager.state_dict(), before)
        assert_same(ema.state_dict(), averages)


def test_a_lack_of_room_for_them_on_host_changes_nothing(pair: Team) -> None:
    pair.run(lack_host)


# Parameters that no chunk holds.


class Mixed(torch.nn.Module):
    """An embedding that is excluded, layers in chunks, one of them frozen, and an adapter made once they are packed."""

    def __init__(self, manager: chunkmem.ChunkManager | None) -> None:
        super().__init__()
        with nullcontext() if manager is None else manager.exclude():
            self.words = torch.nn.Embedding(16, WIDTH)
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.frozen = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapter: torch.nn.Module = torch.nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.inner(self.words(ids))
        result: Tensor = x + self.frozen(self.adapter(x))
        return result


class MixedTraining:
    """One of it, in plain PyTorch or in chunks."""

    def __init__(self, manager: chunkmem.ChunkManager | None, *, is_early: bool = True) -> None:
        torch.manual_seed(0)
        with nullcontext() if manager is None else manager.init():
            self.model = Mixed(manager)
        self.model.adapter = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.manager, self.ema = manager, None
        if is_early:
            self.make_averages()
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer: Any = (
            torch.optim.AdamW(trained, lr=1e-2, fused=True)
            if manager is None
            else chunkmem.AdamW(trained, manager=manager, lr=1e-2)
        )
        if not is_early:
            self.make_averages()

    def make_averages(self) -> None:
        self.ema: Any = (
            AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
            if self.manager is None
            else chunkmem.EMA(self.manager, DECAY)
        )

    def run(self, seeds: range) -> list[float]:
        losses = []
        for seed in seeds:
            ids = torch.randint(16, (4,), generator=torch.Generator().manual_seed(seed))
            loss = self.model(ids).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.manager is None:
                self.ema.update_parameters(self.model)
            else:
                self.ema.update()
            losses += [loss.item(), self.evaluate(ids)]
        return losses

    @torch.no_grad()
    def evaluate(self, ids: Tensor) -> float:
        if self.manager is None:
            return float(self.ema(ids).sum())
        with self.ema.swapped():
            return float(self.model(ids).sum())

    def averages(self) -> State:
        """Of what is trained; torch has the others, too."""
        return {name: value for name, value in self.ema.state_dict().items() if "frozen" not in name}


@cpu_only
@pytest.mark.parametrize("is_early", [True, False])
def test_parameters_outside_of_chunks_are_averaged(is_early: bool, tmp_path: Path) -> None:
    """Of an excluded module, and of one that was added: the bits of torch, also from a checkpoint on."""
    plain = MixedTraining(None)
    losses = plain.run(range(4))
    with manager_of() as manager:
        training = MixedTraining(manager, is_early=is_early)
        assert training.run(range(2)) == losses[:4]
        assert repr(training.ema) == "EMA(4 parameters, decay=0.9, 2 updates on HOST)"
        manager.save(tmp_path / "saved", training.optimizer, ema=training.ema, asynchronous=True)
        assert training.run(range(2, 4)) == losses[4:]
        assert_same(training.averages(), plain.averages())
        plain.ema.load_state_dict(training.ema.state_dict(), strict=False)
        training.ema.load_state_dict(plain.ema.state_dict())
        assert_same(training.averages(), plain.averages())
        training.ema.close()
    with manager_of() as manager:
        training = MixedTraining(manager)
        manager.load(tmp_path / "saved", training.optimizer, ema=training.ema)
        assert training.run(range(2, 4)) == losses[4:]
        assert_same(training.averages(), plain.averages())
        wrong = training.ema.state_dict() | {"module.words.weight": torch.ones(3)}
        with pytest.raises(chunkmem.CheckpointError, match=r"words\.weight is \(3,\) instead of \(16, 16\)"):
            training.ema.load_state_dict(wrong)
        assert_same(training.averages(), plain.averages())


def outside_of_chunks_on(rank: int, path: Path) -> tuple[list[float], State]:
    """All ranks have the same batches: means over them are those of one."""
    with manager_of() as manager:
        training = MixedTraining(manager)
        losses = training.run(range(2))
        manager.save(path, training.optimizer, ema=training.ema)
    with manager_of() as manager:
        training = MixedTraining(manager)
        manager.load(path, training.optimizer, ema=training.ema)
        return losses + training.run(range(2, 4)), training.averages()


def test_parameters_outside_of_chunks_are_averaged_on_each_rank(pair: Team, tmp_path: Path) -> None:
    plain = MixedTraining(None)
    losses = plain.run(range(4))
    for found, averages in pair.run(outside_of_chunks_on, tmp_path / "saved"):
        assert found == losses
        assert_same(averages, plain.averages())


# Plans and caps.


@pytest.mark.few(2)
@cpu_only
@pytest.mark.parametrize("kind", ["tight", "disk", "one tier"])
def test_steps_follow_their_plans_to_the_byte(kind: str, tmp_path: Path) -> None:
    """Averages are in no plan, and plans leave them their room."""
    memory: dict[str, Any] = {"device": 4 * SLAB, "host": 40 * SLAB if kind == "tight" else 5 * SLAB}
    if kind == "one tier":
        memory = {"device": None, "host": 40 * SLAB}
    with manager_of(tmp_path if kind == "disk" else None, **memory) as manager:
        training = Averaged(manager)
        for seed in range(8):
            training.step(seed)
            if manager.plan is not None:
                assert_as_predicted(manager)
        assert manager.trace is not None
        assert Role("ema") not in {chunk.role for chunk in manager.trace.chunk_nbytes}


@cpu_only
def test_averages_are_made_after_training_has_begun() -> None:
    """The plan until then fills HOST."""
    with manager_of(device=4 * SLAB, host=40 * SLAB) as manager:
        training = Averaged(manager)
        training.ema.close()
        assert manager.memory().host.by_role["ema"][0] == 0
        for _ in range(4):
            training.model(torch.randn(4, WIDTH)).square().mean().backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
        assert manager.plan is not None
        training.ema = chunkmem.EMA(manager, DECAY)
        assert manager.plan is None
        for seed in range(4):
            training.step(seed)
        assert_as_predicted(manager)


@cpu_only
def test_the_least_host_that_is_said_is_enough() -> None:
    """Weights, gradients, two states and averages: what both tiers have to hold."""
    caps = {"device": 4 * SLAB}
    with manager_of(**caps, host=4 * NUM_GROUPS * SLAB) as manager:
        training_before = manager.memory().host.now_nbytes
        with pytest.raises(
            chunkmem.CapacityError, match="averages: weights, gradients and states of 8 chunk groups, and averages of"
        ):
            Averaged(manager)
        assert manager.memory().host.by_role.get("ema", (0, 0))[0] == 0
        assert manager.memory().host.now_nbytes >= training_before
        try:
            chunkmem.EMA(manager, DECAY)
        except chunkmem.CapacityError as error:
            needed = error.needed_nbytes
    with manager_of(**caps, host=needed) as manager:
        training = Averaged(manager)
        # What a plan needs beyond that is said, in bytes of all of HOST.
        with pytest.warns(
            UserWarning, match=r"raise memory.host .* and by another 8.00 KiB .*: to 40.00 KiB \(40960 bytes\)"
        ):
            losses, averages = training.run()
        assert manager.memory().host.peak_nbytes <= needed
    plain = Averaged(None).run()
    assert losses == plain[0]
    assert_same(averages, plain[1])


@cpu_only
def test_an_optimizer_made_later_counts_them() -> None:
    with manager_of(device=4 * SLAB, host=16 * SLAB) as manager:
        with manager.init():
            model = Blocks()
        chunkmem.EMA(manager, DECAY)
        with pytest.raises(
            chunkmem.CapacityError, match=r"optimizer: .* of 8 chunk groups, and averages of 8.00 KiB, take"
        ):
            chunkmem.AdamW(model.parameters(), manager=manager)


# What a user does.


@cpu_only
def test_some_parameters_another_decay_and_twice() -> None:
    with manager_of() as manager:
        training = Averaged(manager)
        params = dict(training.model.named_parameters())
        some = chunkmem.EMA(manager, 0.5, [params["head.weight"], params["head.bias"]])
        reference = Reference(0.5)
        for seed in range(4):
            training.step(seed)
            if seed == 2:
                some.decay = reference.decay = 0.25
            some.update()
            weights = manager.state_dict()
            reference.update({f"module.{name}": weights[name] for name in ("head.weight", "head.bias")})
        found = some.state_dict()
        assert found.pop("n_averaged") == 4
        assert_same(found, reference.averages)
        assert manager.memory().host.by_role["ema_2"][0] > 0
        with training.ema.swapped(), some.swapped():
            pass  # one after the other, and back again
        assert_same(manager.state_dict(), weights)
        some.close()
        some.close()
        assert manager.memory().host.by_role["ema_2"][0] == 0
        training.step(5)
        with pytest.raises(chunkmem.StateError, match="these averages are closed"):
            some.update()
        assert repr(some).endswith(", closed)")


@cpu_only
@pytest.mark.parametrize("is_late", [False, True])
def test_frozen_parameters_have_no_master_weights(is_late: bool) -> None:
    """Their averages in fp32 are rounded when they are swapped in, and are there again afterwards, to the bit."""
    training = Saved("bf16").open()
    with training.manager as manager:
        ema = chunkmem.EMA(manager, DECAY, training.model.parameters())
        for step in range(4):
            if is_late and step == 2:
                manager.freeze([training.model.blocks[0]])
            training.run(1, seed=step)
            ema.update()
        before, averages = training.state(), ema.state_dict()
        for _ in range(2):
            with ema.swapped():
                inside = manager.state_dict()
            assert_same(training.state(), before)
            assert_same(ema.state_dict(), averages)
        frozen = [name for name, param in training.model.named_parameters() if not param.requires_grad]
        assert len(frozen) == (6 if is_late else 2)
        rounded = []
        for name, param in training.model.named_parameters():
            average = averages[f"module.{name}"]
            if torch.equal(inside[name], average):
                continue
            assert torch.equal(inside[name], average.bfloat16().float())
            assert not param.requires_grad
            rounded.append(name)
        assert rounded or not is_late, "groups that are frozen as a whole have no master weights"


@cpu_only
def test_an_exception_inside_leaves_the_weights() -> None:
    with manager_of() as manager:
        training = Averaged(manager)
        training.step(0)
        training.step(1)
        before, averages = manager.state_dict(), training.ema.state_dict()
        with pytest.raises(ZeroDivisionError), training.ema.swapped():
            assert any(not torch.equal(value, before[name]) for name, value in manager.state_dict().items())
            raise ZeroDivisionError
        assert_same(manager.state_dict(), before)
        assert_same(training.ema.state_dict(), averages)
        with training.ema.swapped():
            manager.close()


class Codes(torch.nn.Module):
    """A parameter of whole numbers, as quantised weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = torch.nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)


@cpu_only
def test_what_is_refused() -> None:
    with manager_of() as manager:
        with pytest.raises(chunkmem.StateError, match="there is no parameter to average"):
            chunkmem.EMA(manager, DECAY)
        with manager.init():
            model = torch.nn.ModuleList([Blocks()])
            with manager.exclude():
                model.append(torch.nn.Linear(2, 2))
        for decay in (-0.1, 1.1, True, "0.9", float("nan")):
            with pytest.raises(chunkmem.ConfigError, match="has to be a number from 0 to 1"):
                chunkmem.EMA(manager, decay)
        model.append(Codes())
        with pytest.raises(chunkmem.StateError, match=r"parameter 2\.codes is in torch\.int8, .* no averages"):
            chunkmem.EMA(manager, DECAY, model.parameters())
        with pytest.raises(chunkmem.StateError, match="neither managed nor excluded"):
            chunkmem.EMA(manager, DECAY, [torch.nn.Parameter(torch.ones(2))])
        ema = chunkmem.EMA(manager, DECAY)
        with ema.swapped():
            freezing = (partial(call, model[0]) for call in (manager.freeze, manager.unfreeze))
            for call in (ema.update, ema.state_dict, ema.swapped().__enter__, *freezing):
                with pytest.raises(chunkmem.StateError, match=r"inside ema\.swapped\(\)"):
                    call()
            with pytest.raises(chunkmem.StateError, match=r"ema\.close\(\) inside"):
                ema.close()
        with manager.init():
            other = torch.nn.ModuleList([Blocks()])
        with pytest.raises(chunkmem.StateError, match=r"two models have a parameter 0\.inner\.weight"):
            chunkmem.EMA(manager, DECAY)
        assert manager.memory().host.by_role.get("ema_2", (0, 0))[0] == 0
        chunkmem.EMA(manager, DECAY, other.parameters()).update()
    with pytest.raises(chunkmem.StateError, match="closed"):
        ema.update()
    ema.close()


class Named(torch.optim.Optimizer):
    """Has a state of the name that averages have."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["ema"] = torch.zeros_like(param)
                    state["ema"].lerp_(param.grad, 0.5)
                    param.add_(state["ema"], alpha=-group["lr"])


def train_named(manager: chunkmem.ChunkManager | None) -> tuple[State, State]:
    torch.manual_seed(0)
    with nullcontext() if manager is None else manager.init():
        model = Blocks()
    params = model.parameters()
    optimizer: Any = Named(params) if manager is None else chunkmem.Optimizer(Named, params, manager=manager)
    ema: Any = None
    for seed in range(4):
        model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if manager is None:
            ema = ema or AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
            ema.update_parameters(model)
        else:
            ema = ema or chunkmem.EMA(manager, DECAY)  # the optimizer's states are known from its first step on
            ema.update()
    weights = model.state_dict() if manager is None else manager.state_dict()
    return {name: value.clone() for name, value in weights.items()}, dict(ema.state_dict())


@cpu_only
def test_an_optimizer_s_state_of_that_name() -> None:
    weights, averages = train_named(None)
    with manager_of(device=4 * SLAB) as manager:
        found = train_named(manager)
        assert_same(found[0], weights)
        assert_same(found[1], averages)
        assert manager.memory().host.by_role["ema_2"][0] > 0
    with manager_of() as manager:
        with manager.init():
            model = Blocks()
        chunkmem.EMA(manager, DECAY)
        with pytest.raises(chunkmem.ConfigError, match="make the optimizer before the EMA"):
            optimizer = chunkmem.Optimizer(Named, model.parameters(), manager=manager)
            model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()


# Saved and loaded.


@cpu_only
def test_state_dicts_go_both_ways_with_torch() -> None:
    plain = Averaged(None)
    plain.run(3)
    with manager_of() as manager:
        training = Averaged(manager)
        training.run(3)
        again = Averaged(None)
        again.ema.load_state_dict(training.ema.state_dict())
        assert_same(again.ema.state_dict(), plain.ema.state_dict())
        loaded = chunkmem.EMA(manager, DECAY)
        loaded.load_state_dict(plain.ema.state_dict())
        assert loaded.num_updates == 3
        assert_same(loaded.state_dict(), training.ema.state_dict())
        for state, says in (
            ({}, "a state of averages has n_averaged"),
            ({"n_averaged": torch.tensor(1)}, "inner.weight is missing"),
            ({**plain.ema.state_dict(), "module.head.bias": torch.ones(3)}, r"head.bias is \(3,\) instead of \(4,\)"),
        ):
            with pytest.raises(chunkmem.CheckpointError, match=says):
                loaded.load_state_dict(state)
        assert_same(loaded.state_dict(), training.ema.state_dict())


def resumed(how: Saved, path: Path, *, asynchronous: bool) -> None:
    """Two steps, a checkpoint, two more; and the same two from the checkpoint."""
    training = how.open()
    ema = chunkmem.EMA(training.manager, DECAY)
    for step in range(4):
        training.run(1, seed=step)
        ema.update()
        if step == 1:
            saving = training.manager.save(path, training.optimizer, ema=ema, extra={"a": 1}, asynchronous=asynchronous)
    saving.wait()
    expected, averages = training.state(), ema.state_dict()
    training.manager.close()
    training = how.open()
    ema = chunkmem.EMA(training.manager, DECAY)
    assert training.manager.load(path, training.optimizer, ema=ema) == {"a": 1}
    assert ema.num_updates == 2
    for step in (2, 3):
        training.run(1, seed=step)
        ema.update()
    assert_same(training.state(), expected)
    assert_same(ema.state_dict(), averages)
    training.manager.close()


@pytest.mark.few(1)
@cpu_only
@spread(asynchronous=[True, False], kind=["disk", "host"], precision=["bf16", "fp32"])
def test_training_resumes_with_its_averages(asynchronous: bool, kind: str, precision: str, tmp_path: Path) -> None:
    slab = 4 * 4800
    memory: dict[str, Any] = {"device_nbytes": 4 * slab, "host_nbytes": 8 * slab, "disk": tmp_path / "disk"}
    resumed(Saved(precision, **(memory if kind == "disk" else {})), tmp_path / "saved", asynchronous=asynchronous)


def resume_on(rank: int, how: Saved, path: Path, asynchronous: bool) -> None:
    resumed(how, path, asynchronous=asynchronous)


@pytest.mark.few(1)
@spread(sizes=[(2, 1), (2,)], asynchronous=[False, True])
def test_it_resumes_over_ranks(sizes: tuple[int, ...], asynchronous: bool, pair: Team, tmp_path: Path) -> None:
    pair.run(resume_on, Saved(sizes=sizes), tmp_path / "saved", asynchronous)


@cpu_only
def test_plain_pytorch_reads_what_was_saved(tmp_path: Path) -> None:
    training = Saved().open()
    with training.manager as manager:
        ema = chunkmem.EMA(manager, DECAY)
        for step in range(3):
            training.run(1, seed=step)
            ema.update()
        manager.save(tmp_path / "saved", ema=ema)
        expected = ema.state_dict()
        averaged = AveragedModel(Net())
        found = {name: value for name, value in averaged.state_dict().items() if name in expected}
        dcp.load({"ema": found}, checkpoint_id=tmp_path / "saved", no_dist=True)
        assert_same({name: found[name] for name in expected}, expected)
        with ema.swapped():
            manager.save(tmp_path / "averages")
            with pytest.raises(chunkmem.StateError, match=r"inside ema\.swapped\(\)"):
                manager.save(tmp_path / "other", ema=ema)
        found = {f"module.{name}": value for name, value in averaged.module.state_dict().items()}
        dcp.load({"model": averaged.module.state_dict()}, checkpoint_id=tmp_path / "averages", no_dist=True)
        assert all(torch.equal(found[name], value) for name, value in expected.items() if name in found)


@cpu_only
def test_a_checkpoint_without_averages_changes_nothing(tmp_path: Path) -> None:
    training = Saved().open()
    with training.manager as manager:
        ema = chunkmem.EMA(manager, DECAY)
        training.run(1)
        ema.update()
        manager.save(tmp_path / "saved", training.optimizer)
        training.run(1)
        before, averages = training.state(), ema.state_dict()
        with pytest.raises(
            chunkmem.CheckpointError, match=r"has no averages; load it without ema=.*nothing was loaded"
        ):
            manager.load(tmp_path / "saved", training.optimizer, ema=ema)
        for call in (manager.save, manager.load):
            with pytest.raises(chunkmem.CheckpointError, match=r"takes ema= as a chunkmem.EMA, or None, not a dict"):
                call(tmp_path / "saved", training.optimizer, ema={})
        assert_same(training.state(), before)
        assert_same(ema.state_dict(), averages)
