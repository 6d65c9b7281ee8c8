"""What is frozen gives back what training takes, at once, and nothing else changes: bits of plain PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.data.types import Role
from tests.helpers.audit import assert_as_predicted, audit, kind_of_step
from tests.helpers.low_precision import LowPlain
from tests.helpers.spread import spread
from tests.helpers.training import Chunked, Plain, Side
from tests.helpers.twins import AMPLE_NBYTES, SEED, Blocks, assert_equal, config, copied, features

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
NUM_BLOCKS = 6


def build() -> Blocks:
    return Blocks(num_blocks=NUM_BLOCKS)


class Training:
    """One side: a model, its optimizer, and how it freezes."""

    def __init__(self, side: Side) -> None:
        self.side = side
        torch.manual_seed(SEED)
        with side.building():
            model = build()
        self.model: Any = side.ready(model)
        self.optimizer: Any = side.optimizer(self.model.parameters(), **OPTIONS)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)
        self.num_steps = 0

    def steps(self, num: int) -> list[float]:
        losses = []
        for _ in range(num):
            self.num_steps += 1
            loss = self.model(features(self.num_steps)).float().square().mean()
            self.side.backward(loss, last=True, by_manager=True)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            losses.append(loss.item())
        return losses

    def freeze(self, modules: Sequence[nn.Module], *, keep_states: bool = False) -> None:
        if isinstance(self.side, Chunked):
            report = self.side.manager.freeze(modules, keep_states=keep_states)
            self.forgotten_nbytes = report.freed_nbytes + report.left_nbytes
            audit(self.side.manager)
            return
        for param in (param for module in modules for param in module.parameters()):
            param.requires_grad_(False)
            masters = self.side.masters if isinstance(self.side, LowPlain) else {}
            owner = masters.get(param, param)
            if not keep_states:
                self.optimizer.state.pop(owner, None)
                owner.data.copy_(param.data)

    def unfreeze(self, modules: Sequence[nn.Module]) -> None:
        if isinstance(self.side, Chunked):
            self.side.manager.unfreeze(modules)
            audit(self.side.manager)
            return
        for module in modules:
            module.requires_grad_(True)

    def left(self) -> Any:
        states = dict(sorted(self.optimizer.state_dict()["state"].items()))
        return copied(self.side.state_dict(self.model)), copied(states)


def prefix(training: Training) -> Any:
    model = training.model
    yield from training.steps(5)
    training.freeze([model.inner, *model.blocks[:2]])
    yield from training.steps(4)
    training.freeze([model.inner, *model.blocks[:4]])
    yield from training.steps(4)
    training.unfreeze([model.inner, *model.blocks[1:3]])
    yield from training.steps(5)
    training.unfreeze([model])
    yield from training.steps(4)


def every_second(training: Training) -> Any:
    yield from training.steps(4)
    training.freeze(training.model.blocks[::2])
    yield from training.steps(5)
    training.unfreeze(training.model.blocks[::2])
    training.freeze(training.model.blocks[1::2])
    yield from training.steps(5)


def kept(training: Training) -> Any:
    model = training.model
    yield from training.steps(5)
    training.freeze([model.inner, *model.blocks[:3]], keep_states=True)
    yield from training.steps(4)
    training.unfreeze([model])
    yield from training.steps(4)


def before_the_first_step(training: Training) -> Any:
    training.freeze([training.model.inner, *training.model.blocks[:3]])
    yield from training.steps(4)
    training.unfreeze(training.model.blocks)
    yield from training.steps(4)


def all_but_the_head(training: Training) -> Any:
    yield from training.steps(3)
    training.freeze([training.model.inner, training.model.blocks])
    yield from training.steps(4)
    training.unfreeze([training.model.blocks[-1]])
    yield from training.steps(4)


def kept_next_to_forgotten(training: Training) -> Any:
    """Of one block the states stay, also in chunks of which everything else is forgotten."""
    model = training.model
    yield from training.steps(4)
    training.freeze([model.blocks[1]], keep_states=True)
    training.freeze([model.inner, model.blocks[0], *model.blocks[2:], model.head])
    training.unfreeze([model.head])
    yield from training.steps(3)
    training.unfreeze([model])
    yield from training.steps(3)


def forgotten_later(training: Training) -> Any:
    """What was frozen by hand or with its states has them until it is frozen without; then it begins from zero."""
    model = training.model
    yield from training.steps(4)
    model.inner.requires_grad_(False)
    training.freeze(model.blocks[:3], keep_states=True)
    yield from training.steps(3)
    training.freeze([model.inner, *model.blocks[:3]])
    if isinstance(training.side, Chunked):
        assert training.forgotten_nbytes > 0
    yield from training.steps(3)
    training.unfreeze([model])
    yield from training.steps(4)


SCENES: dict[str, Callable[[Training], Any]] = {
    scene.__name__: scene
    for scene in (
        prefix,
        every_second,
        kept,
        kept_next_to_forgotten,
        forgotten_later,
        before_the_first_step,
        all_but_the_head,
    )
}


@pytest.mark.few(1)
@spread(scene=SCENES, precision=("fp32", "bf16"), cap=("ample", "smallest"), disk=(False, True))
def test_it_has_the_numbers_of_plain_pytorch(scene: str, precision: str, cap: str, disk: bool, tmp_path: Any) -> None:
    plain: Side = Plain() if precision == "fp32" else LowPlain(torch.bfloat16)
    reference = Training(plain)
    expected = list(SCENES[scene](reference)), reference.left()
    cap_nbytes = AMPLE_NBYTES
    for _ in range(2 if cap == "smallest" else 1):
        memory: dict[str, Any] = {"device": cap_nbytes, "host": AMPLE_NBYTES}
        if disk:
            memory |= {"host": 40 << 10, "disk": {"path": str(tmp_path), "capacity": AMPLE_NBYTES}}
        chosen = config(cap_nbytes, precision=precision)
        chosen = chunkmem.Config.from_dict({**chosen.to_dict(), "memory": memory})
        with chunkmem.ChunkManager(chosen) as manager:
            for pool in manager.runtime.memory.store.pools.values():
                pool.poison = True
            ours = Training(Chunked(manager))
            assert_equal((list(SCENES[scene](ours)), ours.left()), expected)
            cap_nbytes = manager.memory().device.required_nbytes


def trained(manager: chunkmem.ChunkManager, num: int = 5) -> Training:
    training = Training(Chunked(manager))
    training.steps(num)
    return training


def content_nbytes(manager: chunkmem.ChunkManager) -> int:
    """Of states, master weights and gradients, on all tiers."""
    chunks = manager.runtime.memory.store.chunks.values()
    return sum(chunk.nbytes * len(chunk.replicas) for chunk in chunks if chunk.id.role != "param")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_training_takes_is_given_back_at_once(precision: str) -> None:
    """States of 8 bytes a parameter, and 4 of its master weight, less a chunk of each role."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, precision=precision)) as manager:
        model = trained(manager).model
        before_nbytes = content_nbytes(manager)
        chunk_nbytes = max(c.nbytes for c in manager.runtime.memory.store.chunks.values())
        report = manager.freeze([model.inner, *model.blocks[:4]])
        num_roles = 2 if precision == "fp32" else 3
        assert report.num_params == sum(p.numel() for m in (model.inner, model.blocks[:4]) for p in m.parameters())
        assert report.freed_nbytes >= 4 * num_roles * report.num_params - num_roles * chunk_nbytes
        assert before_nbytes - content_nbytes(manager) == report.freed_nbytes
        manager.unfreeze(model)
        assert content_nbytes(manager) <= before_nbytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_left_in_chunks_that_others_need_is_told(precision: str) -> None:
    """Every second block, in chunks that cannot be packed again: with those of the others, all would be given back."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, precision=precision, default_chunk_size=1024)) as manager:
        model = trained(manager).model
        alias = model.head.weight.detach()
        report = manager.freeze(model.blocks[::2])
        frozen_nbytes = (8 if precision == "fp32" else 12) * report.num_params
        assert 0 < report.left_nbytes <= frozen_nbytes
        assert "left in chunks that others need" in str(report)
        assert "somebody keeps the memory of param chunk 4 (" in report.not_packed
        assert alias.shape == model.head.weight.shape
        rest = manager.freeze(model)
        assert rest.left_nbytes == 0
        assert str(rest).endswith("given back")
        assert content_nbytes(manager) == 0


def kinds_of_steps(manager: chunkmem.ChunkManager, training: Training, num: int) -> list[str]:
    """Go on for some steps; return what each was."""
    kinds = []
    for _ in range(num):
        training.steps(1)
        kinds.append(kind_of_step(manager))
    return kinds


def test_the_next_step_is_recorded_and_those_after_it_follow_a_plan() -> None:
    """Until what was trained before is trained again: the plan for that is there."""
    with chunkmem.ChunkManager(config(20 << 10)) as manager:
        training = trained(manager)
        before = manager.trace
        assert before is not None
        manager.freeze([training.model.inner, *training.model.blocks[:3]])
        assert kinds_of_steps(manager, training, 3) == ["recorded", "planned", "planned"]
        assert manager.plan is not None
        assert manager.trace is not None
        assert len(manager.trace.moments) < len(before.moments)
        assert manager.plan.trace_digest == manager.trace.digest
        manager.unfreeze(training.model)
        assert kinds_of_steps(manager, training, 1) == ["planned"]
        assert manager.trace.digest == before.digest


def test_a_plan_that_is_not_what_steps_do_any_more_is_made_again_after_two_of_them() -> None:
    """A module computes in another order when the same is trained again."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
            self.is_turned = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.is_turned:
                return self.first(x) + self.second(x).tanh()
            later = self.second(x).tanh()
            return later + self.first(x)

    with chunkmem.ChunkManager(config(20 << 10)) as manager:
        torch.manual_seed(SEED)
        with manager.init():
            turned = Turned()
            model = Blocks(turned, num_blocks=3)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, **OPTIONS)
        kinds = []
        for step in range(12):
            if step in (5, 8):
                manager.freeze([model.inner, model.blocks[1]])
            if step == 7:
                manager.unfreeze(model)
            turned.is_turned = step >= 8
            model(features(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            kinds.append(kind_of_step(manager))
        assert kinds[5:8] == ["recorded", "planned", "planned"]
        assert [kind.startswith("planned, ") for kind in kinds[8:10]] == [True, True], "they miss it"
        assert kinds[10:] == ["recorded", "planned"]


@pytest.mark.few(2)
@pytest.mark.parametrize("keep_states", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.Adafactor, torch.optim.Rprop])
def test_with_any_optimizer(kind: type[torch.optim.Optimizer], keep_states: bool) -> None:
    """Also those whose states do not begin with zeros."""

    def run(manager: chunkmem.ChunkManager | None) -> Any:
        torch.manual_seed(SEED)
        with contextlib.nullcontext() if manager is None else manager.init():
            model = build()
        params = model.parameters()
        optimizer = kind(params) if manager is None else chunkmem.Optimizer(kind, params, manager=manager)  # type: ignore[call-arg]
        modules, losses = [model.inner, *model.blocks[:3]], []
        for step in range(11):
            if step == 4 and manager is not None:
                manager.freeze(modules, keep_states=keep_states)
            elif step == 4:
                for param in (param for module in modules for param in module.parameters()):
                    param.requires_grad_(False)
                    if not keep_states:
                        del optimizer.state[param]
            elif step == 8:
                model.requires_grad_(True) if manager is None else manager.unfreeze(model)
            loss = model(features(step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, copied(model.state_dict() if manager is None else manager.state_dict())

    with chunkmem.ChunkManager(config(20 << 10)) as manager:
        assert_equal(run(manager), run(None))


@spread(
    policy=("offload", None, "keep", "recompute", "auto"),
    device_nbytes=(AMPLE_NBYTES, 24 << 10),
    every_second=(False, True),
)
@pytest.mark.few(4)
def test_plans_with_frozen_blocks_are_exact(policy: str | None, device_nbytes: int, every_second: bool) -> None:
    """First blocks save nothing; those between trained ones are read for the gradients of their inputs, and keep what
    these need for as long as the block's backward."""
    keys = {} if policy is None else {"activations": {"policy": policy}}
    with chunkmem.ChunkManager(config(device_nbytes, **keys)) as manager:
        training = trained(manager, 6)
        model, before = training.model, manager.trace
        assert before is not None
        manager.freeze(model.blocks[1::2] if every_second else [model.inner, *model.blocks[:3]])
        kinds = kinds_of_steps(manager, training, 4)
        num_recorded = kinds.index("planned")  # "auto" chooses what is recomputed again
        assert kinds == ["recorded"] * num_recorded + ["planned"] * (4 - num_recorded)
        assert num_recorded <= (2 if policy == "auto" else 1)
        assert_as_predicted(manager)
        saved, saved_before = (
            {moment.chunk for moment in trace.moments if moment.chunk.role is Role.ACTIVATION}
            for trace in (manager.trace, before)
            if trace is not None
        )
        if not every_second and policy != "auto":
            assert len(saved) == len(saved_before) // 2
        manager.unfreeze(model)
        assert kinds_of_steps(manager, training, 1) == ["planned"]
        assert manager.trace.digest == before.digest


def test_a_plan_is_used_again_once_the_same_is_trained_again() -> None:
    with chunkmem.ChunkManager(config(20 << 10)) as manager:
        training = trained(manager)
        model, digests, kinds = training.model, [], []
        for what, modules in (
            ("freeze", [model.inner, *model.blocks[:4]]),
            ("unfreeze", model.blocks[2:4]),
            ("unfreeze", [model]),
            ("freeze", [model.inner, *model.blocks[:2]]),
        ):
            getattr(manager, what)(modules)
            kinds.append(kinds_of_steps(manager, training, 2))
            assert manager.trace is not None
            digests.append(manager.trace.digest)
        assert kinds == [["recorded", "planned"]] * 2 + [["planned", "planned"]] * 2
        assert digests[1] == digests[3]
        assert len(set(digests)) == 3


def test_what_is_frozen_is_copied_up_and_never_down() -> None:
    with chunkmem.ChunkManager(config(20 << 10)) as manager:
        training = trained(manager)
        moved = []
        for _ in range(2):
            training.steps(4)
            before = manager.memory().moved
            training.steps(1)
            after = manager.memory().moved
            moved.append((after.h2d_nbytes - before.h2d_nbytes, after.d2h_nbytes - before.d2h_nbytes))
            manager.freeze([training.model.inner, *training.model.blocks])
        assert moved[1][0] <= manager.memory().host.by_role["param"][1] + manager.memory().device.by_role["param"][1]
        assert moved[1][1] <= moved[0][1] // 4


def test_frozen_weights_never_change() -> None:
    """Neither by weight decay nor by what is left of their momenta."""
    with chunkmem.ChunkManager(config(20 << 10)) as manager:
        training = trained(manager)
        manager.freeze(training.model.blocks[:3])
        before = copied(manager.state_dict())
        training.steps(3)
        after = manager.state_dict()
        frozen = [name for name in after if name.startswith(("blocks.0", "blocks.1", "blocks.2"))]
        assert all(torch.equal(before[name], after[name]) for name in frozen)
        assert not torch.equal(before["head.weight"], after["head.weight"])


def test_between_micro_batches_it_is_refused() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        training = trained(manager)
        training.model(features(0)).square().mean().backward()
        with pytest.raises(chunkmem.StateError, match="gradients that wait"):
            manager.freeze(training.model.blocks[:2])
        with pytest.raises(chunkmem.StateError, match="gradients that wait"):
            manager.unfreeze(training.model.blocks[:2])
        assert all(param.requires_grad for param in training.model.parameters())
        training.optimizer.zero_grad()
        manager.freeze(training.model.blocks[:2])
        training.steps(2)


def test_after_a_step_without_zero_grad() -> None:
    """What is left in `.grad` was used: plain PyTorch's optimizer would use it again."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        with manager.init():
            model = Blocks(num_blocks=2)
            with manager.exclude():
                model.head = nn.Linear(16, 4)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, **OPTIONS)
        model(features(0)).square().mean().backward()
        optimizer.step()
        manager.freeze([model.blocks[0], model.head])
        before = copied(manager.state_dict())
        model.inner.zero_grad()
        model.blocks[1].zero_grad()
        model(features(1)).square().mean().backward()
        optimizer.step()
        after = manager.state_dict()
        changed = {name.rpartition(".")[0] for name in after if not torch.equal(before[name], after[name])}
        assert changed == {"inner", "blocks.1.0", "blocks.1.2"}


def test_inside_of_a_forward_it_is_refused() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        training = trained(manager)

        def freezes(module: nn.Module, inputs: Any) -> None:
            manager.freeze(training.model.blocks[0])

        handle = training.model.blocks[1].register_forward_pre_hook(freezes)
        with pytest.raises(chunkmem.StateError, match="between two steps"):
            training.model(features(0))
        handle.remove()
        with manager.gather(training.model.head), pytest.raises(chunkmem.StateError, match="between two steps"):
            manager.freeze(training.model.head)
        training.steps(1)


def test_what_is_named_wrongly() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        model = trained(manager).model
        with pytest.raises(chunkmem.ConfigError, match="prefix is 7, and there are 6"):
            manager.freeze(model.blocks, prefix=7)
        with pytest.raises(chunkmem.ConfigError, match="prefix is -1"):
            manager.freeze(model.blocks, prefix=-1)
        with pytest.raises(chunkmem.ConfigError, match="prefix counts modules in a list; Linear is none"):
            manager.freeze(model.head, prefix=1)
        with pytest.raises(chunkmem.ConfigError, match="modules or parameters, one or several, not a str"):
            manager.freeze("blocks")
        with pytest.raises(chunkmem.StateError, match="neither managed nor excluded"):
            manager.freeze(nn.Linear(2, 2))
        assert manager.freeze(model.blocks, prefix=0).num_params == 0
        assert manager.freeze(model.blocks, prefix=2).num_params == sum(
            p.numel() for block in model.blocks[:2] for p in block.parameters()
        )


def test_a_lack_of_room_leaves_it_frozen() -> None:
    """Another model has taken what was given back."""
    memory = {"device": 20 << 10, "host": 50 << 10}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": memory, "default_chunk_size": 256})) as manager:
        training = trained(manager)
        model = training.model
        manager.freeze([model.inner, *model.blocks])
        expected = copied(manager.state_dict(model))
        other = manager.wrap(nn.Sequential(*(nn.Linear(16, 16) for _ in range(30))))
        with pytest.raises(chunkmem.CapacityError):
            manager.unfreeze(model)
        audit(manager)
        assert not any(param.requires_grad for block in model.blocks for param in block.parameters())
        assert_equal(copied(manager.state_dict(model)), expected)
        training.steps(2)
        audit(manager)
        del other


def test_an_excluded_parameter_is_frozen_too() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        with manager.init():
            model = Blocks(num_blocks=2)
            with manager.exclude():
                model.head = nn.Linear(16, 4)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, **OPTIONS)
        for _ in range(2):
            model(features(0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        manager.freeze(model.head)
        assert model.head.weight not in optimizer.state
        before = model.head.weight.detach().clone()
        model(features(0)).square().mean().backward()
        optimizer.step()
        assert torch.equal(model.head.weight, before)


def test_checkpoints_of_a_frozen_model_fit_plain_pytorch_and_back() -> None:
    with chunkmem.ChunkManager(config(20 << 10)) as manager:
        training = trained(manager)
        manager.freeze([training.model.inner, *training.model.blocks[:3]])
        training.steps(2)
        weights, states = copied(manager.state_dict()), copied(training.optimizer.state_dict())
    plain = Training(Plain())
    plain.model.load_state_dict(weights)
    plain.optimizer.load_state_dict(states)
    for module in (plain.model.inner, *plain.model.blocks[:3]):
        module.requires_grad_(False)
    with chunkmem.ChunkManager(config(20 << 10)) as manager:
        ours = Training(Chunked(manager))
        manager.freeze([ours.model.inner, *ours.model.blocks[:3]])
        manager.load_state_dict(weights)
        ours.optimizer.load_state_dict(states)
        assert_equal((ours.steps(3), ours.left()), (plain.steps(3), plain.left()))


@pytest.mark.parametrize("chunk_numel", [64, 1 << 14])
def test_what_is_loaded_into_frozen_weights_does_not_depend_on_chunks(chunk_numel: int) -> None:
    """In bf16, a frozen weight is what is computed with, also where its chunk has master weights of others."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, precision="bf16", default_chunk_size=chunk_numel)) as manager:
        training = trained(manager)
        manager.freeze(training.model.blocks[:3])
        weights = {name: torch.rand_like(value) for name, value in manager.state_dict().items()}
        manager.load_state_dict(weights)
        frozen = {
            f"blocks.{index}.{name}" for index in range(3) for name, _ in training.model.blocks[0].named_parameters()
        }
        expected = {name: w.bfloat16().float() if name in frozen else w for name, w in weights.items()}
        assert_equal(manager.state_dict(), expected)
        training.steps(1)
        left = manager.state_dict()
        assert_equal([left[name] for name in sorted(frozen)], [expected[name] for name in sorted(frozen)])
