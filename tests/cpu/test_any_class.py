"""`chunkmem.Optimizer(class, ...)` against the class itself: the same weights and states, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import chunkmem
from chunkmem.data.types import Role, Tier
from chunkmem.optim.class_rule import ClassRule
from chunkmem.optim.rule import UpdateItem
from chunkmem.plan.model import Lane
from chunkmem.runtime.issued import LeftUpdate
from tests.cpu.test_deferred_updates import Unhurried
from tests.helpers.any_class import MUON, WAYS, WHOLE, ClassTwin, Way, by_name, entries, muon_and_adamw
from tests.helpers.audit import audit
from tests.helpers.lanes import adversarial
from tests.helpers.low_precision import LowPlain
from tests.helpers.spread import spread
from tests.helpers.twins import (
    AMPLE_NBYTES,
    WIDTH,
    Blocks,
    Twin,
    assert_equal,
    config,
    copied,
    cpu_bits_only,
    cpu_only,
    features,
    same,
)

pytestmark = cpu_bits_only

STEPS = range(6)
NAMES = [way.name for way in (*WAYS, *WHOLE)]
FEW = ("nesterov", "NAdam", "Adafactor", "Lion", *(way.name for way in WHOLE))
"""Momentum made of a gradient; numbers in tensors; states of other shapes; new tensors in each step; all at once."""


def alike(scenario: Callable[[Twin], Any], kind: str, **options: Any) -> int:
    return same(Blocks, scenario, twin=ClassTwin, kind=kind, **options)


def state_nbytes(manager: chunkmem.ChunkManager) -> dict[str, int]:
    chunks = manager.runtime.memory.store.chunks
    found: dict[str, int] = {}
    for key, chunk in chunks.items():
        if key.role.is_state:
            found[key.role.value] = found.get(key.role.value, 0) + sum(slot.numel for slot in chunk.group.slots)
    return found


@pytest.mark.few(3)
@pytest.mark.parametrize("name", NAMES)
def test_with_ample_room_and_on_demand_at_the_smallest_cap(name: str) -> None:
    alike(lambda twin: twin.steps(*STEPS), name)


def test_two_classes_in_the_same_chunks() -> None:
    alike(lambda twin: twin.steps(*STEPS), "pairs", params=muon_and_adamw)


def test_chunks_have_room_for_the_states_of_each_class_alone() -> None:
    """Matrices have one state and the rest two, although they are in the same chunks."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = ClassTwin(manager, Blocks, kind="pairs", params=muon_and_adamw)
        sizes = [
            sum(p.numel() for p in twin.model.parameters() if (p.dim() == 2) is wanted) for wanted in (True, False)
        ]
        assert state_nbytes(manager) == {"momentum_buffer": sizes[0], "exp_avg": sizes[1], "exp_avg_sq": sizes[1]}
        twin.steps(0, 1)
        assert state_nbytes(manager) == {"momentum_buffer": sizes[0], "exp_avg": sizes[1], "exp_avg_sq": sizes[1]}


# Master weights.


def low_plain(way: Way, dtype: torch.dtype) -> tuple[list[float], Any, Any]:
    """A class over float32 copies of the weights, which are rounded from them after each step."""
    torch.manual_seed(0)
    plain = LowPlain(dtype)
    model = plain.ready(Blocks())
    params = [p for p in model.parameters() if p.dim() == 2 or way is not MUON]
    for param in model.parameters():
        param.requires_grad_(any(param is one for one in params))
    masters = [plain.masters[param] for param in params]
    optimizer = way.kind(masters, **way.options)
    losses = []
    for seed in STEPS:
        loss = model(features(seed)).square().mean()
        loss.backward()
        for param, master in zip(params, masters, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
                param.grad = None
        losses.append(loss.item())
    return losses, copied(plain.state_dict(model)), copied(entries(optimizer))


@pytest.mark.few(5)
@spread(name=[*NAMES, "Muon"], device_nbytes=[AMPLE_NBYTES, 6 << 10])
def test_master_weights(name: str, device_nbytes: int) -> None:
    way = by_name(name)
    expected = low_plain(way, torch.bfloat16)
    torch.manual_seed(0)
    with chunkmem.ChunkManager(config(device_nbytes, precision="bf16")) as manager:
        with manager.init():
            model = Blocks()
        params = [p for p in model.parameters() if p.dim() == 2 or way is not MUON]
        for param in model.parameters():
            param.requires_grad_(any(param is one for one in params))
        optimizer = chunkmem.Optimizer(way.kind, params, manager=manager, **way.chunked)
        losses = []
        for seed in STEPS:
            loss = model(features(seed)).square().mean()
            manager.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        audit(manager)
        assert losses == expected[0]
        assert_equal((copied(manager.state_dict(model)), copied(entries(optimizer))), expected[1:])


@pytest.mark.few(3)
@spread(name=[*FEW, "Muon"], device_nbytes=[AMPLE_NBYTES, 4 << 10])
def test_bf16_without_master_weights(name: str, device_nbytes: int) -> None:
    """As the class over a model in bf16: states are in bf16, too."""
    way = by_name(name)

    def run(manager: chunkmem.ChunkManager | None) -> Any:
        torch.manual_seed(0)
        model = Blocks() if manager is not None else Blocks().bfloat16()
        params = [p for p in model.parameters() if p.dim() == 2 or way is not MUON]
        if manager is None:
            optimizer = way.kind(params, **way.options)
        else:
            manager.wrap(model)
            optimizer = chunkmem.Optimizer(way.kind, params, manager=manager, **way.chunked)
        for seed in STEPS:
            model(features(seed).bfloat16()).float().square().mean().backward()
            optimizer.step()
            model.zero_grad()
        states = copied(entries(optimizer))
        assert any(value.dtype is torch.bfloat16 for value in states[0].values() if isinstance(value, Tensor))
        return copied([param.bfloat16() for param in model.parameters()]), states

    with chunkmem.ChunkManager(config(device_nbytes, precision="bf16", master_weights=False)) as manager:
        assert_equal(run(manager), run(None))


@spread(max_norm=[0.0, 0.5], device_nbytes=[AMPLE_NBYTES, 4 << 10])
def test_fp16(max_norm: float, device_nbytes: int) -> None:
    """The loss scale, steps that overflow, and clipping are those of `chunkmem.AdamW`."""

    def run(kind: str) -> Any:
        keys = {"fp16": {"enabled": True, "initial_scale_power": 24}, "gradient_clipping": max_norm}
        with chunkmem.ChunkManager(config(device_nbytes, **keys)) as manager:
            twin = Twin(manager, Blocks)
            if kind == "class":
                options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
                twin.optimizer = chunkmem.Optimizer(
                    torch.optim.AdamW, twin.model.parameters(), manager=manager, **options
                )
            losses = []
            for seed in range(12):
                loss = twin.loss(features(seed))
                manager.backward(loss)
                twin.update()
                losses.append(loss.item())
            return losses, twin.left(), manager.loss_scale, manager.num_skipped_steps

    expected = run("own")
    assert 0 < expected[3] < 12
    assert_equal(run("class"), expected)


# Plans.


@pytest.mark.few(3)
@cpu_only
@pytest.mark.parametrize("name", [*FEW, "pairs"])
def test_steps_follow_a_plan(name: str) -> None:
    """A third of the model fits DEVICE; after the first steps, everything that happens was predicted."""
    options = {"params": muon_and_adamw} if name == "pairs" else {}
    plain = ClassTwin(None, Blocks, kind=name, **options)
    with chunkmem.ChunkManager(config(6 << 10)) as manager:
        twin = ClassTwin(manager, Blocks, kind=name, **options)
        for seed in range(8):
            assert twin.step(features(seed)) == plain.step(features(seed))
            timeline = manager.timeline()
            assert seed < 3 or (timeline is not None and timeline.plan_misses == 0)
        assert manager.plan is not None
        assert_equal(twin.left(), plain.left())


def overlapped(kind: str, *, overlap: bool, precision: str, max_norm: float = 0.0) -> tuple[Any, int, int]:
    """Train with updates on HOST; return everything, how many updates were begun early, and how many in vain."""
    keys = {
        "precision": precision,
        "gradient_clipping": max_norm,
        "optimizer": {"params": {"use_hybrid_adam": False}},
        "client": {"opts": {"overlap_optimizer": overlap, "undo_log_ratio": 0.5}},
    }
    options = {"params": muon_and_adamw} if kind == "pairs" else {}
    with chunkmem.ChunkManager(config(12 << 10, **keys)) as manager:
        twin = ClassTwin(manager, Blocks, kind=kind, **options)
        losses = twin.steps(*range(10))
        timeline = manager.timeline()
        assert timeline is not None
        num_begun = sum(span.lane is Lane.HOST_UPDATE for span in timeline.spans)
        return (losses, twin.left()), num_begun, manager.runtime.updater.ahead.guesses.num_wrong


@pytest.mark.few(2)
@spread(kind=[*FEW, "ASGD", "Rprop", "pairs"], precision=["fp32", "bf16"], max_norm=[0.0, 1e3])
@cpu_only
def test_updates_during_backward(kind: str, precision: str, max_norm: float) -> None:
    waiting, none, _ = overlapped(kind, overlap=False, precision=precision, max_norm=max_norm)
    speculative, num_begun, num_wrong = overlapped(kind, overlap=True, precision=precision, max_norm=max_norm)
    assert none == 0 < num_begun
    assert num_wrong == 0
    assert_equal(speculative, waiting)


@cpu_only
@pytest.mark.parametrize("kind", ["NAdam", "Lion"])
def test_updates_during_backward_that_were_wrong(kind: str) -> None:
    """All steps are clipped: numbers of states that were counted in vain are forgotten with the rest."""
    waiting, _, _ = overlapped(kind, overlap=False, precision="fp32", max_norm=0.05)
    speculative, _, num_wrong = overlapped(kind, overlap=True, precision="fp32", max_norm=0.05)
    assert num_wrong > 0
    assert_equal(speculative, waiting)


@cpu_only
@spread(kind=["NAdam", "Lion", "pairs"], seed=[1, 2, 3], overlap=[True, False])
def test_copies_and_updates_that_are_as_late_as_may_be(kind: str, seed: int, overlap: bool) -> None:
    """Numbers of states are read and written where the update is made, whenever that is."""
    options = {"params": muon_and_adamw} if kind == "pairs" else {}
    keys = {
        "optimizer": {"params": {"use_hybrid_adam": False}},
        "client": {"opts": {"overlap_optimizer": overlap, "undo_log_ratio": 0.5}},
    }
    plain = ClassTwin(None, Blocks, kind=kind, **options)
    with chunkmem.ChunkManager(config(12 << 10, **keys), make_lanes=adversarial(seed)) as manager:
        for pool in manager.runtime.memory.store.pools.values():
            pool.poison = True
        twin = ClassTwin(manager, Blocks, kind=kind, **options)
        for index in range(8):
            assert twin.step(features(index)) == plain.step(features(index))
            if index in (3, 6):
                assert_equal(twin.left(), plain.left())
        assert_equal(twin.left(), plain.left())


@cpu_only
def test_what_happens_between_a_step_and_the_updates_it_has_left_to_a_thread() -> None:
    """A learning rate that is changed in place is that of the next step; states are read once they are there."""
    opts = {"overlap_optimizer": True, "undo_log_ratio": 1.5 * 3 * 1024 / AMPLE_NBYTES}
    keys = {"optimizer": {"params": {"use_hybrid_adam": False}}, "client": {"opts": opts}}

    def run(manager: chunkmem.ChunkManager | None) -> Any:
        twin = ClassTwin(manager, Blocks, kind="NAdam")
        rate = twin.optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)
        params, seen, num_left = list(twin.model.parameters()), [], 0
        for index in range(8):
            twin.loss(features(index)).backward()
            twin.optimizer.step()
            if manager is not None:
                num_left += sum(isinstance(one, LeftUpdate) for one in manager.runtime.memory.store.issued)
            rate.mul_(0.8)
            if index in (5, 7):
                param = params[2 * index % len(params)]
                seen.append([copied(dict(twin.optimizer.state[param])), len(twin.optimizer.state[param])])
            twin.optimizer.zero_grad()
        assert manager is None or num_left > 0
        return seen, twin.left()

    with chunkmem.ChunkManager(config(12 << 10, **keys), make_lanes=Unhurried) as manager:
        assert_equal(run(manager), run(None))


# What users do with an optimizer.


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
}


@spread(schedule=SCHEDULERS, kind=["nesterov", "AdamW"])
def test_learning_rate_schedulers(schedule: str, kind: str) -> None:
    """`OneCycleLR` cycles momentum or betas, too."""

    def scenario(twin: Twin) -> list[float]:
        scheduler, losses = SCHEDULERS[schedule](twin.optimizer), []
        for seed in STEPS:
            losses += twin.steps(seed)
            scheduler.step()
        return losses

    alike(scenario, kind)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", FEW)
def test_clipping(kind: str) -> None:
    def scenario(twin: Twin) -> list[Tensor]:
        norms = []
        for seed in STEPS:
            twin.loss(features(seed)).backward()
            norms.append(twin.clip(0.05))
            twin.update()
        return norms

    alike(scenario, kind)


def halves(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[::2], "lr": 3e-3}, {"params": parameters[1::2]}]


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", FEW)
def test_parameter_groups(kind: str) -> None:
    alike(lambda twin: twin.steps(*STEPS), kind, params=halves)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", FEW)
def test_a_group_that_is_added_later_joins_chunks_that_have_states(kind: str) -> None:
    """Its parameters are in the same chunks as others, whose states stay."""

    def scenario(twin: Twin) -> list[float]:
        losses = twin.steps(0, 1, 2)
        twin.optimizer.add_param_group({"params": list(twin.model.parameters())[1::2], "lr": 1e-3})
        return losses + twin.steps(3, 4, 5, 6)

    alike(scenario, kind, params=lambda model: list(model.parameters())[::2])


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", FEW)
def test_frozen_parameters_and_such_as_get_no_gradient(kind: str) -> None:
    def scenario(twin: Twin) -> list[float]:
        twin.model.blocks[0].requires_grad_(False)
        losses = twin.steps(0, 1, 2)
        twin.model.blocks[0].requires_grad_(True)
        twin.model.head.requires_grad_(False)
        losses += twin.steps(3, 4)
        twin.model.head.requires_grad_(True)
        twin.loss(features(5)).backward()
        twin.model.inner.weight.grad = None
        twin.update()
        return losses + twin.steps(6)

    alike(scenario, kind)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", FEW)
def test_accumulated_gradients(kind: str) -> None:
    def scenario(twin: Twin) -> None:
        if twin.manager is not None:
            twin.manager.accumulate(3)
        for seed in range(12):
            twin.backward(twin.loss(features(seed)))
            if seed % 3 == 2:
                twin.update()

    alike(scenario, kind)


@pytest.mark.parametrize("kind", FEW)
def test_excluded_parameters(kind: str) -> None:
    way = by_name(kind)

    def run(manager: chunkmem.ChunkManager | None) -> Any:
        torch.manual_seed(0)
        with nullcontext() if manager is None else manager.init():
            first = nn.Linear(WIDTH, WIDTH)
            with nullcontext() if manager is None else manager.exclude():
                second = nn.Linear(WIDTH, 4)
            model = nn.Sequential(first, second)
        optimizer: torch.optim.Optimizer = (
            way.kind(model.parameters(), **way.options)
            if manager is None
            else chunkmem.Optimizer(way.kind, model.parameters(), manager=manager, **way.chunked)
        )
        for seed in STEPS:
            model(features(seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = model.state_dict() if manager is None else manager.state_dict(model)
        return copied((weights, entries(optimizer)))

    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        assert_equal(run(manager), run(None))


def test_a_learning_rate_in_a_tensor_that_is_changed_in_place() -> None:
    def scenario(twin: Twin) -> list[float]:
        rate = twin.optimizer.param_groups[0]["lr"] = torch.tensor(1e-2)
        losses = twin.steps(0, 1, 2)
        rate.mul_(0.3)
        return losses + twin.steps(3, 4)

    alike(scenario, "NAdam")


@pytest.mark.parametrize("in_group", [False, True])
def test_a_learning_rate_in_a_tensor_that_the_optimizer_is_made_with(in_group: bool) -> None:
    """It stays the user's own, as in torch.optim: ours kept the copy that its class was tried with."""

    def run(manager: chunkmem.ChunkManager | None) -> Any:
        torch.manual_seed(0)
        with nullcontext() if manager is None else manager.init():
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))
        rate = torch.tensor(1e-2)
        params: Any = [{"params": list(model.parameters()), "lr": rate}] if in_group else model.parameters()
        options: dict[str, Any] = {} if in_group else {"lr": rate}
        optimizer = (
            torch.optim.AdamW(params, fused=True, **options)
            if manager is None
            else chunkmem.Optimizer(torch.optim.AdamW, params, manager=manager, fused=True, **options)
        )
        for seed in STEPS:
            model(features(seed)).square().mean().backward()
            rate.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.param_groups[0]["lr"] is rate
        return copied(model.state_dict() if manager is None else manager.state_dict(model))

    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        assert_equal(run(manager), run(None))


def test_frozen_parameters_of_integers_are_left_alone() -> None:
    """As of a quantised layer: the class is not tried on them."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        model.codes = nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)
        manager.wrap(model)
        params = [model.codes, *model[0].parameters()]
        optimizer = chunkmem.Optimizer(torch.optim.NAdam, params, manager=manager)
        for seed in range(3):
            model(features(seed)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert list(entries(optimizer)) == [1, 2]


def test_momentum_that_comes_and_goes() -> None:
    def scenario(twin: Twin) -> list[float]:
        (group,) = twin.optimizer.param_groups
        losses = []
        for seed, momentum in enumerate([0.0, 0.0, 0.9, 0.9, 0.0, 0.0, 0.5, 0.5]):
            group["momentum"] = momentum
            losses += twin.steps(seed)
        return losses

    alike(scenario, "SGD")


def test_a_closure() -> None:
    def scenario(twin: Twin) -> list[float]:
        losses = []
        for seed in STEPS:

            def closure(seed: int = seed) -> Tensor:
                twin.optimizer.zero_grad()
                loss = twin.loss(features(seed))
                loss.backward()
                return loss

            losses.append(twin.optimizer.step(closure).item())
        twin.optimizer.zero_grad()
        return losses

    alike(scenario, "Adagrad")


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (torch.optim.NAdam, {}, {"step": "cpu", "mu_product": "cpu"}),
        (torch.optim.ASGD, {}, {"step": "meta", "eta": "meta", "mu": "meta"}),
        (torch.optim.AdamW, {"fused": True}, {"step": "meta"}),
    ],
)
def test_numbers_are_on_the_device_where_the_class_has_them(kind: Any, options: Any, expected: dict[str, str]) -> None:
    """An update on an accelerator finds those there that the class makes there; the meta device plays one."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        model = manager.wrap(nn.Linear(WIDTH, WIDTH))
        optimizer = chunkmem.Optimizer(kind, model.parameters(), manager=manager, **options)
        model(features()).sum().backward()
        optimizer.step()
        managed = manager.runtime.registry.find(model.weight)
        assert managed is not None
        states, rule = optimizer.updates.states, optimizer.updates.rule
        assert isinstance(rule, ClassRule)
        item = UpdateItem(rule.hyper(optimizer.param_groups[0]), [], [])
        item.add(managed, 0, states.records[managed])
        slots = {spec.role: [torch.empty(WIDTH, WIDTH)] * 2 for spec in states.specs_of(managed).values()}
        entry = rule.entry_of(item, 0, slots, torch.device("meta"))
        assert entry is not None
        assert {key: value.device.type for key, value in entry.items() if key in expected} == expected
        assert all(value.is_cpu for value in dict(optimizer.state[model.weight]).values())


def test_hooks_on_all_steps_of_the_process_are_called_once_a_step() -> None:
    calls: list[str] = []
    hooks = [
        register(lambda optimizer, *_: calls.append(type(optimizer).__name__))
        for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
    ]
    try:
        with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
            ClassTwin(manager, Blocks, kind="NAdam").steps(0, 1)
    finally:
        for hook in hooks:
            hook.remove()
    assert calls == ["Optimizer"] * 4


def test_random_numbers_are_left_as_they_are() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        model = manager.wrap(Blocks())
        before = torch.get_rng_state()
        chunkmem.Optimizer(by_name("Lion").kind, model.parameters(), manager=manager)
        assert torch.equal(torch.get_rng_state(), before)


# The tier DISK.


@pytest.mark.few(1)
@cpu_only
@pytest.mark.parametrize("kind", ["Adafactor", "pairs"])
def test_states_on_disk(kind: str, tmp_path: Path) -> None:
    options = {"params": muon_and_adamw} if kind == "pairs" else {}
    plain = ClassTwin(None, Blocks, kind=kind, **options)
    memory = {"device": 6 << 10, "host": 9 << 10, "disk": {"path": str(tmp_path), "capacity": 1 << 30}}
    keys = {"memory": memory, "default_chunk_size": 256, "optimizer": {"params": {"use_hybrid_adam": False}}}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(keys)) as manager:
        twin = ClassTwin(manager, Blocks, kind=kind, **options)
        assert twin.steps(*range(7)) == plain.steps(*range(7))
        chunks = manager.runtime.memory.store.chunks.values()
        assert any(chunk.id.role.is_state and Tier.DISK in chunk.replicas for chunk in chunks)
        assert_equal(twin.left(), plain.left())


def test_roles_tell_dtypes_apart() -> None:
    """A state in another dtype than the weights is in chunks of its own; its key is what the class calls it."""

    class Halved(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1e-2})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for param in self.param_groups[0]["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    last = state.get("grad", torch.zeros_like(param, dtype=torch.bfloat16))
                    param.add_(param.grad + last, alpha=-1e-2)
                    state["grad"] = param.grad.bfloat16()

    plain = Twin(None, Blocks)
    plain.optimizer = Halved(plain.model.parameters())
    with chunkmem.ChunkManager(config(6 << 10)) as manager:
        twin = Twin(manager, Blocks)
        twin.optimizer = chunkmem.Optimizer(Halved, twin.model.parameters(), manager=manager)
        assert {key.role for key in manager.runtime.memory.store.chunks if key.role.is_state} == {
            Role("grad state.bfloat16")
        }
        assert twin.steps(*STEPS) == plain.steps(*STEPS)
        assert_equal(twin.left(), plain.left())
