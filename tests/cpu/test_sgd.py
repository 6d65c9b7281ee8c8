"""`chunkmem.SGD` against `torch.optim.SGD` as it is by default: the same weights and momentum, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import chunkmem
from chunkmem.data.types import Role, Tier
from chunkmem.plan.model import Lane
from tests.helpers.audit import audit
from tests.helpers.low_precision import LowPlain
from tests.helpers.ranks import Team
from tests.helpers.shared_training import Task, serial, train
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
MOMENTUM = Role("momentum_buffer")
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"weight_decay": 0.0},
    "decayed": {"weight_decay": 0.1},
    "momentum": {"momentum": 0.9},
    "dampened": {"momentum": 0.9, "dampening": 0.3},
    "nesterov": {"momentum": 0.8, "nesterov": True},
}


class SGDTwin(Twin):
    """A model and SGD over it, in plain PyTorch or in chunkmem."""

    def make(self, kind: str, params: Any, **options: Any) -> Any:
        options.pop("betas", None)
        if self.manager is None:
            return torch.optim.SGD(params, **options)
        return chunkmem.SGD(params, manager=self.manager, **options)


def alike(scenario: Callable[[Twin], Any], **options: Any) -> int:
    return same(Blocks, scenario, twin=SGDTwin, **options)


def roles(manager: chunkmem.ChunkManager) -> set[Role]:
    return {key.role for key in manager.runtime.memory.store.chunks}


@pytest.mark.few(2)
@pytest.mark.parametrize("way", WAYS)
def test_with_ample_room_and_on_demand_at_the_smallest_cap(way: str) -> None:
    alike(lambda twin: twin.steps(*STEPS), **WAYS[way])


@pytest.mark.parametrize("way", ["plain", "momentum"])
@cpu_only
def test_steps_follow_a_plan(way: str) -> None:
    """A third of the model fits DEVICE; after the first step, everything that happens was predicted."""
    plain = SGDTwin(None, Blocks, **WAYS[way])
    with chunkmem.ChunkManager(config(6 << 10)) as manager:
        twin = SGDTwin(manager, Blocks, **WAYS[way])
        for seed in range(8):
            assert twin.step(features(seed)) == plain.step(features(seed))
            timeline = manager.timeline()
            assert seed == 0 or (timeline is not None and timeline.plan_misses == 0)
        assert manager.plan is not None
        assert timeline is not None
        assert min(timeline.moved_nbytes.values()) > 0
        assert_equal(twin.left(), plain.left())
        assert roles(manager) == {Role.PARAM, Role.GRAD} | ({MOMENTUM} if way == "momentum" else set())


def overlapped(*, overlap: bool, precision: str = "fp32", max_norm: float = 0.0, **options: Any) -> tuple[Any, int]:
    """Train with updates on HOST; return everything, and how many updates were begun during backward."""
    keys = {
        "precision": precision,
        "gradient_clipping": max_norm,
        "optimizer": {"params": {"use_hybrid_adam": False}},
        "client": {"opts": {"overlap_optimizer": overlap, "undo_log_ratio": 0.5}},
    }
    num_begun = 0
    with chunkmem.ChunkManager(config(12 << 10, **keys)) as manager:
        twin = SGDTwin(manager, Blocks, **options)
        losses = twin.steps(*range(10))
        timeline = manager.timeline()
        assert timeline is not None
        num_begun = sum(span.lane is Lane.HOST_UPDATE for span in timeline.spans)
        return (losses, twin.left()), num_begun


@pytest.mark.few(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", WAYS)
@cpu_only
def test_updates_during_backward(way: str, precision: str) -> None:
    waiting, none = overlapped(overlap=False, precision=precision, **WAYS[way])
    speculative, num_begun = overlapped(overlap=True, precision=precision, **WAYS[way])
    assert none == 0 < num_begun
    assert_equal(speculative, waiting)


@cpu_only
def test_updates_during_backward_of_gradients_that_are_clipped_after_all() -> None:
    waiting, _ = overlapped(overlap=False, max_norm=1e-3, momentum=0.9)
    with pytest.warns(UserWarning, match=r"updates wait for step\(\) again"):
        speculative, _ = overlapped(overlap=True, max_norm=1e-3, momentum=0.9)
    assert_equal(speculative, waiting)


@pytest.mark.parametrize("way", WAYS)
def test_master_weights(way: str) -> None:
    """In bf16, SGD over float32 copies of the weights, which are rounded from them after each step."""
    torch.manual_seed(0)
    plain = LowPlain(torch.bfloat16)
    reference = plain.ready(Blocks())
    masters = [plain.masters[param] for param in reference.parameters()]
    expected = torch.optim.SGD(masters, lr=1e-2, **WAYS[way])
    torch.manual_seed(0)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, precision="bf16")) as manager:
        with manager.init():
            model = Blocks()
        optimizer = chunkmem.SGD(model.parameters(), manager=manager, lr=1e-2, **WAYS[way])
        for seed in STEPS:
            loss = model(features(seed)).square().mean()
            manager.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            other = reference(features(seed)).square().mean()
            other.backward()
            for param, master in zip(reference.parameters(), masters, strict=True):
                assert param.grad is not None
                master.grad = param.grad.float()
            expected.step()
            with torch.no_grad():
                for param, master in zip(reference.parameters(), masters, strict=True):
                    param.copy_(master)
                    param.grad = None
            assert loss.item() == other.item()
        assert_equal(copied(manager.state_dict(model)), copied(plain.state_dict(reference)))
        assert_equal(copied(optimizer.state_dict()["state"]), copied(expected.state_dict()["state"]))


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Chunks hold parameters of both: some with momentum, some without."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "lr": 3e-3, "momentum": 0.9},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]


def test_parameter_groups() -> None:
    alike(lambda twin: twin.steps(*STEPS), params=two_groups)


def test_parameters_with_their_names() -> None:
    alike(lambda twin: twin.steps(*STEPS), params=lambda model: model.named_parameters(), momentum=0.9)


def test_frozen_parameters_and_such_as_are_frozen_later() -> None:
    def scenario(twin: Twin) -> list[float]:
        twin.model.blocks[0].requires_grad_(False)
        losses = twin.steps(0, 1, 2)
        twin.model.blocks[0].requires_grad_(True)
        twin.model.head.requires_grad_(False)
        return losses + twin.steps(3, 4, 5)

    alike(scenario, momentum=0.9)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_excluded_parameters(momentum: float) -> None:
    def run(manager: chunkmem.ChunkManager | None) -> Any:
        torch.manual_seed(0)
        with nullcontext() if manager is None else manager.init():
            first = nn.Linear(WIDTH, WIDTH)
            with nullcontext() if manager is None else manager.exclude():
                second = nn.Linear(WIDTH, 4)
            model = nn.Sequential(first, second)
        options: dict[str, Any] = {"lr": 1e-2, "momentum": momentum, "dampening": 0.1}
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(model.parameters(), **options)
            if manager is None
            else chunkmem.SGD(model.parameters(), manager=manager, **options)
        )
        for seed in STEPS:
            model(features(seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = model.state_dict() if manager is None else manager.state_dict(model)
        return copied((weights, dict(sorted(optimizer.state_dict()["state"].items()))))

    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        assert_equal(run(manager), run(None))


def test_without_momentum_there_are_no_states() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = SGDTwin(manager, Blocks)
        twin.steps(0, 1)
        assert roles(manager) == {Role.PARAM, Role.GRAD}
        assert twin.optimizer.state_dict()["state"] == {}
        assert not twin.optimizer.state
        assert dict(twin.optimizer.state[twin.model.head.weight]) == {}


def test_momentum_that_comes_goes_and_comes_back() -> None:
    def scenario(twin: Twin) -> list[float]:
        (group,) = twin.optimizer.param_groups
        losses = []
        for seed, momentum in enumerate([0.0, 0.0, 0.9, 0.9, 0.0, 0.0, 0.5, 0.5]):
            group["momentum"] = momentum
            losses += twin.steps(seed)
        return losses

    alike(scenario)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rate_schedulers(name: str) -> None:
    """`OneCycleLR` cycles the momentum too."""

    def scenario(twin: Twin) -> list[float]:
        scheduler, losses = SCHEDULERS[name](twin.optimizer), []
        for seed in STEPS:
            losses += twin.steps(seed)
            scheduler.step()
        return losses

    alike(scenario, momentum=0.9)


def test_a_learning_rate_in_a_tensor() -> None:
    alike(lambda twin: twin.steps(*STEPS), momentum=0.9, lr=lambda: torch.tensor(1e-2))


def test_clipping() -> None:
    def scenario(twin: Twin) -> list[Tensor]:
        norms = []
        for seed in STEPS:
            twin.loss(features(seed)).backward()
            norms.append(twin.clip(0.05))
            twin.update()
        return norms

    alike(scenario, momentum=0.9)


@pytest.mark.parametrize("params", [None, two_groups])
def test_states_go_to_torch_and_back(params: Any) -> None:
    """Half of the steps on one side, the other half on the other: as if all had been made on one."""
    options = {"momentum": 0.9, "dampening": 0.2, **({} if params is None else {"params": params})}
    whole = SGDTwin(None, Blocks, **options)
    losses = whole.steps(*STEPS)

    def moved(source: Twin, target: Twin) -> None:
        weights, state = source.weights(), source.optimizer.state_dict()
        if target.manager is None:
            target.model.load_state_dict(weights)
        else:
            target.manager.load_state_dict(weights, target.model)
        target.optimizer.load_state_dict(state)

    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        ours, theirs = SGDTwin(manager, Blocks, **options), SGDTwin(None, Blocks, **options)
        assert ours.optimizer.state_dict() == theirs.optimizer.state_dict()
        assert ours.steps(*STEPS[:2]) == losses[:2]
        moved(ours, theirs)
        assert theirs.steps(*STEPS[2:4]) == losses[2:4]
        moved(theirs, ours)
        assert ours.steps(*STEPS[4:]) == losses[4:]
        assert_equal(ours.left(), whole.left())


def test_a_saved_state_decides_whether_there_is_momentum() -> None:
    saved = SGDTwin(None, Blocks, momentum=0.9)
    losses = saved.steps(0, 1)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = SGDTwin(manager, Blocks)
        manager.load_state_dict(saved.weights(), twin.model)
        twin.optimizer.load_state_dict(saved.optimizer.state_dict())
        losses = saved.steps(2, 3)
        assert twin.steps(2, 3) == losses
        assert_equal(twin.left(), saved.left())


def test_a_state_that_is_assigned_is_the_momentum_of_an_earlier_step() -> None:
    def scenario(twin: Twin) -> list[float]:
        weight = twin.model.head.weight
        twin.optimizer.state[weight] = {"momentum_buffer": torch.ones(4, WIDTH)}
        return twin.steps(*STEPS)

    alike(scenario, momentum=0.9, dampening=0.5)


def test_a_state_of_adam_is_refused() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        sgd = SGDTwin(manager, Blocks, momentum=0.9)
        other = torch.optim.AdamW(Blocks().parameters())
        with pytest.raises(chunkmem.CheckpointError, match="of another optimizer than SGD: it has no momentum, dampen"):
            sgd.optimizer.load_state_dict(other.state_dict())


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"lr": -1.0}, "lr = -1.0 has to be a number of at least 0"),
    ({"momentum": -0.1}, "momentum = -0.1 has to be a number of at least 0"),
    ({"weight_decay": "no"}, "weight_decay = no has to be a number"),
    ({"dampening": None}, "dampening = None has to be a number"),
    ({"nesterov": "no", "momentum": 0.9}, "nesterov = 'no' has to be True or False"),
    ({"nesterov": True}, "nesterov=True needs a momentum above 0 and no dampening"),
    ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov=True needs a momentum above 0 and no dampening"),
]


@pytest.mark.parametrize(("options", "says"), WRONG)
def test_options_that_are_refused(options: dict[str, Any], says: str) -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        model = manager.wrap(Blocks())
        with pytest.raises(chunkmem.ConfigError, match=says):
            chunkmem.SGD(model.parameters(), manager=manager, **options)


@pytest.mark.parametrize("option", ["maximize", "differentiable"])
def test_what_there_is_no_counterpart_of(option: str) -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = SGDTwin(manager, Blocks)
        twin.optimizer.param_groups[0][option] = True
        twin.loss(features()).backward()
        with pytest.raises(chunkmem.ConfigError, match=f"{option}=True is not available"):
            twin.optimizer.step()


# One optimizer after another.


@cpu_only
def test_a_new_optimizer_with_another_rule_drops_the_states_of_the_old_one() -> None:
    """As in plain PyTorch, where the old optimizer and its states are garbage; then steps follow a plan again."""

    def scenario(twin: SGDTwin) -> Any:
        adam = Twin.make(twin, "AdamW", twin.model.parameters(), lr=1e-2)
        sgd, twin.optimizer = twin.optimizer, adam
        losses = twin.steps(0, 1, 2)
        if twin.manager is not None:
            assert roles(twin.manager) == {Role.PARAM, Role.GRAD, Role("exp_avg"), Role("exp_avg_sq")}
            with pytest.raises(chunkmem.StateError, match="was given to a newer optimizer"):
                sgd.state_dict()
        twin.optimizer = twin.make("SGD", twin.model.parameters(), lr=1e-2, momentum=0.9)
        if twin.manager is not None:
            assert roles(twin.manager) == {Role.PARAM, Role.GRAD, MOMENTUM}
            assert not any("exp_avg" in name and now for _, name, now in _bytes_by_role(twin.manager))
            with pytest.raises(chunkmem.StateError, match="was given to a newer optimizer"):
                twin.loss(features()).backward()
                adam.step()
            twin.optimizer.zero_grad()
        losses += twin.steps(*range(3, 9))
        if twin.manager is not None:
            timeline = twin.manager.timeline()
            assert timeline is not None
            assert (twin.manager.plan is not None, timeline.plan_misses) == (True, 0)
        return losses, twin.left()

    plain = scenario(SGDTwin(None, Blocks))
    for device_nbytes in (6 << 10, AMPLE_NBYTES):
        with chunkmem.ChunkManager(config(device_nbytes)) as manager:
            assert_equal(scenario(SGDTwin(manager, Blocks)), plain)
            audit(manager)


def _bytes_by_role(manager: chunkmem.ChunkManager) -> list[tuple[Tier, str, int]]:
    pools = manager.runtime.memory.store.pools
    return [(tier, role, nbytes) for tier, pool in pools.items() for role, nbytes in pool.ledger.now.items()]


def test_two_optimizers_with_different_rules_share_chunks() -> None:
    """Weights by AdamW and biases by SGD; both are in every chunk."""

    def scenario(twin: SGDTwin) -> list[float]:
        parameters = list(twin.model.parameters())
        weights, biases = ([p for p in parameters if (p.dim() > 1) is wanted] for wanted in (True, False))
        optimizers = [Twin.make(twin, "AdamW", weights, lr=1e-2), twin.make("SGD", biases, lr=1e-2, momentum=0.9)]
        losses = []
        for seed in STEPS:
            loss = twin.loss(features(seed))
            loss.backward()
            losses.append(loss.item())
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            if twin.manager is not None:
                audit(twin.manager)
        twin.optimizer = optimizers[0]
        return losses

    plain = SGDTwin(None, Blocks)
    losses = scenario(plain)
    for device_nbytes in (6 << 10, AMPLE_NBYTES):
        with chunkmem.ChunkManager(config(device_nbytes)) as manager:
            twin = SGDTwin(manager, Blocks)
            assert scenario(twin) == losses
            assert_equal(twin.left(), plain.left())


@pytest.mark.few(2)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("first", [0, 1])
def test_an_optimizer_that_is_made_later_for_other_parameters_of_the_same_chunks(first: int, momentum: float) -> None:
    """Either may step first; the states of the other one are there by then, full of zeros."""

    def scenario(twin: SGDTwin) -> list[float]:
        parameters = list(twin.model.parameters())
        weights, biases = ([p for p in parameters if (p.dim() > 1) is wanted] for wanted in (True, False))
        optimizers = [Twin.make(twin, "AdamW", weights, lr=1e-2)] if first == 0 else []
        if first == 1:
            optimizers.append(twin.make("SGD", biases, lr=1e-2, momentum=momentum))
        losses = []
        for seed in range(8):
            if seed == 3 and first == 0:
                optimizers.append(twin.make("SGD", biases, lr=1e-2, momentum=momentum))
            elif seed == 3:
                optimizers.append(Twin.make(twin, "AdamW", weights, lr=1e-2))
            loss = twin.loss(features(seed))
            loss.backward()
            losses.append(loss.item())
            for optimizer in optimizers:
                optimizer.step()
            twin.model.zero_grad()
        twin.optimizer = optimizers[0]
        return losses

    plain = SGDTwin(None, Blocks)
    losses = scenario(plain)
    for device_nbytes in (6 << 10, AMPLE_NBYTES):
        with chunkmem.ChunkManager(config(device_nbytes)) as manager:
            twin = SGDTwin(manager, Blocks)
            assert scenario(twin) == losses
            assert_equal(twin.left(), plain.left())
            audit(manager)


# Ranks.


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["plain", "nesterov"])
def test_two_ranks_have_the_bits_of_one_process(way: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    task = Task(optimizer="SGD", options=WAYS[way])
    losses, weights, states = serial(task, 2)
    torch.set_num_threads(threads)
    with Team(2) as team:
        outcomes = team.run(train, task)
    for rank, outcome in enumerate(outcomes):
        assert outcome.losses == losses[rank]
        assert_equal(outcome.weights, weights)
        assert_equal(dict(sorted(outcome.states.items())), dict(sorted(states.items())))
