"""Optimizer states between torch and chunkmem, between caps, and refused ones: nothing changes then."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from tests.helpers.audit import audit
from tests.helpers.twins import AMPLE_NBYTES, Blocks, Twin, assert_equal, config, copied, features, mlp

SMALL_NBYTES = 4 * 1024


def through_a_file(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def hand_over(origin: Twin, target: Twin) -> None:
    """Save one training and go on with it in another, as programs do."""
    weights, state = through_a_file(origin.weights()), through_a_file(origin.optimizer.state_dict())
    if target.manager is None:
        target.model.load_state_dict(weights)
    else:
        target.manager.load_state_dict(weights)
    target.optimizer.load_state_dict(state)


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_from_torch_to_chunkmem_to_another_cap_and_back(kind: str) -> None:
    """Four stations, two steps at each: the same as eight steps in torch."""

    def twin(manager: chunkmem.ChunkManager | None) -> Twin:
        return Twin(manager, Blocks, kind=kind)

    alone = twin(None)
    losses = alone.steps(*range(8))
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as ample, chunkmem.ChunkManager(config(SMALL_NBYTES)) as small:
        stations = [twin(None), twin(ample), twin(small), twin(None)]
        travelled = stations[0].steps(0, 1)
        for index in (1, 2, 3):
            hand_over(stations[index - 1], stations[index])
            travelled += stations[index].steps(2 * index, 2 * index + 1)
        assert travelled == losses
        assert_equal(stations[-1].left(), alone.left())
        for manager in (ample, small):
            audit(manager)


def test_a_training_with_unused_parameters_and_its_own_rates_is_handed_over() -> None:
    """What has no state yet has none afterwards; what the groups say is loaded with the states."""
    outcomes = []
    for managers in ((None, None), tuple(chunkmem.ChunkManager(config(SMALL_NBYTES)) for _ in range(2))):
        first, second = (Twin(manager, Blocks, lr=lr) for manager, lr in zip(managers, (0.1, 0.5), strict=True))
        second.steps(7, 8)
        first.model.blocks.requires_grad_(False)
        losses = first.steps(0, 1)
        hand_over(first, second)
        assert second.optimizer.param_groups[0]["lr"] == 0.1
        left = [second.left(), second.steps(2), second.left()]
        outcomes.append((losses, left))
    assert_equal(outcomes[1], outcomes[0])


def test_the_state_is_what_torch_has() -> None:
    """Groups with all their options, steps, dtypes; and it is a copy: training on does not change it."""
    plain = Twin(None, Blocks, lr=torch.tensor(0.25))
    plain.steps(0, 1)
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = Twin(manager, Blocks, lr=torch.tensor(0.25))
        twin.steps(0, 1)
        state = twin.optimizer.state_dict()
        assert_equal(state, plain.optimizer.state_dict())
        before = copied(state)
        twin.steps(2)
        twin.optimizer.param_groups[0]["lr"].fill_(0.5)
        assert_equal(state, before)
        assert all(value.device.type == "cpu" for entry in state["state"].values() for value in entry.values())
        assert len(twin.optimizer.state) == len(state["state"])


def test_adam_takes_the_kind_of_decay_from_a_loaded_state_and_adamw_does_not() -> None:
    """torch does so; the numbers show which update ran."""
    outcomes = []
    for manager in (None, chunkmem.ChunkManager(config(SMALL_NBYTES))):
        left = []
        for kind, other in (("Adam", "AdamW"), ("AdamW", "Adam")):
            saved = Twin(None, Blocks, kind=other)
            saved.steps(0)
            twin = Twin(manager, Blocks, kind=kind)
            twin.optimizer.load_state_dict(saved.optimizer.state_dict())
            left += [twin.steps(1, 2), copied(twin.model.state_dict())]
        outcomes.append(left)
    assert_equal(outcomes[1], outcomes[0])


def test_hooks_of_torch() -> None:
    """Around `step`, `state_dict` and `load_state_dict`; the last may change what is loaded."""

    def seen_by(twin: Twin) -> list[Any]:
        calls: list[Any] = []
        optimizer = twin.optimizer
        optimizer.register_step_pre_hook(lambda *_: calls.append("before step"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after step"))
        optimizer.register_state_dict_pre_hook(lambda o: calls.append("before save"))
        optimizer.register_state_dict_post_hook(lambda o, state: calls.append(sorted(state["state"])))
        optimizer.register_load_state_dict_post_hook(lambda o: calls.append(o.state_dict()["state"][0]["step"].item()))

        def restart(_: Any, state: dict[str, Any]) -> dict[str, Any]:
            calls.append("before load")
            return {**state, "state": {key: {**s, "step": s["step"] * 0 + 7} for key, s in state["state"].items()}}

        optimizer.register_load_state_dict_pre_hook(restart)
        twin.steps(0)
        optimizer.load_state_dict(copied(optimizer.state_dict()))
        return [calls, twin.steps(1), twin.left()]

    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        assert_equal(seen_by(Twin(manager, Blocks)), seen_by(Twin(None, Blocks)))


def without(state: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != key}


def changed(state: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The state with one entry of parameter 2 replaced."""
    return {**state, "state": {**state["state"], 2: {**state["state"][2], key: value}}}


def regrouped(state: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {**state, "param_groups": [{**group, **options} for group in state["param_groups"]]}


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "not a state": (lambda s: [1, 2], "'state' and 'param_groups'"),
    "no groups": (lambda s: without(s, "param_groups"), "'state' and 'param_groups'"),
    "another number of parameters": (lambda s: regrouped(s, params=[0, 1]), r"\[2\] parameters, this optimizer of \[1"),
    "another number of groups": (lambda s: {**s, "param_groups": s["param_groups"] * 2}, "parameter groups of"),
    "another shape": (lambda s: changed(s, "exp_avg", torch.zeros(3)), r"blocks.0.0.weight exp_avg is \(3,\) instead"),
    "no tensor": (lambda s: changed(s, "exp_avg_sq", [1.0]), "blocks.0.0.weight exp_avg_sq is a list, not a tensor"),
    "no step": (lambda s: changed(s, "step", None), "blocks.0.0.weight step is not a number"),
    "amsgrad": (lambda s: regrouped(s, amsgrad=True), "amsgrad=True"),
    "bad rate": (lambda s: regrouped(s, lr=-1.0), "lr = -1.0"),
    "of SGD": (
        lambda s: {**s, "param_groups": [{"params": g["params"], "lr": 0.1} for g in s["param_groups"]]},
        "another optimizer than Adam: it has no betas",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_state_that_does_not_fit_changes_nothing(case: str) -> None:
    damage, message = REFUSED[case]
    plain = Twin(None, Blocks)
    losses = plain.steps(0, 1, 2)
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        assert twin.steps(0, 1) == losses[:2]
        with pytest.raises(chunkmem.CheckpointError, match=message):
            twin.optimizer.load_state_dict(damage(copied(twin.optimizer.state_dict())))
        assert twin.steps(2) == losses[2:]
        assert_equal(twin.left(), plain.left())


def test_two_optimizers_over_different_parameters() -> None:
    outcomes = []
    for manager in (None, chunkmem.ChunkManager(config(SMALL_NBYTES))):
        twin = Twin(manager, Blocks, params=lambda model: model.blocks.parameters())
        rest = [*twin.model.inner.parameters(), *twin.model.head.parameters()]
        other = twin.make("Adam", rest, lr=0.02, weight_decay=0.1)
        losses = []
        for seed in range(6):
            loss = twin.loss(features(seed))
            loss.backward()
            for optimizer in (twin.optimizer, other) if seed % 3 else (other,):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        outcomes.append((losses, twin.left(), copied(other.state_dict()["state"])))
    assert_equal(outcomes[1], outcomes[0])


def test_a_newer_optimizer_takes_the_parameters_over() -> None:
    """The older one says so instead of using states that are no longer its own; both work on in torch."""
    plain = Twin(None, Blocks)
    losses = plain.steps(0, 1)
    plain.optimizer = plain.make("AdamW", plain.model.parameters(), lr=0.1)
    losses += plain.steps(2, 3)
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        assert twin.steps(0, 1) == losses[:2]
        older, state = twin.optimizer, copied(twin.optimizer.state_dict())
        twin.optimizer = twin.make("AdamW", twin.model.parameters(), lr=0.1)
        loss = twin.loss(features(2))
        loss.backward()
        for use in (older.step, older.state_dict, lambda: older.load_state_dict(state)):
            with pytest.raises(chunkmem.StateError, match=r"inner\.weight was given to a newer optimizer"):
                use()
        twin.update()
        assert [loss.item(), *twin.steps(3)] == losses[2:]
        assert_equal(twin.left(), plain.left())


def test_an_optimizer_that_could_not_be_made_takes_nothing_over() -> None:
    plain = Twin(None, Blocks)
    losses = plain.steps(0, 1)
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        assert twin.steps(0) == losses[:1]
        groups = [{"params": twin.model.parameters()}, {"params": [nn.Parameter(torch.zeros(3))]}]
        with pytest.raises(chunkmem.StateError, match="neither managed nor excluded"):
            twin.make("AdamW", groups)
        with pytest.raises(chunkmem.StateError, match="neither managed nor excluded"):
            twin.optimizer.add_param_group(groups[1])
        assert len(twin.optimizer.param_groups) == 1
        assert twin.steps(1) == losses[1:]
        assert_equal(twin.left(), plain.left())


class WithOrdinary(Blocks):
    """Some of its parts stay ordinary modules; of two dtypes."""

    def __init__(self, manager: chunkmem.ChunkManager | None) -> None:
        super().__init__()
        if manager is None:
            self.extra, self.wide = mlp(), nn.Linear(4, 4).double()
        else:
            with manager.exclude():
                self.extra, self.wide = mlp(), nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(super().forward(self.extra(x)).double())


def test_excluded_modules() -> None:
    """They are updated, clipped, frozen, saved and loaded with the others."""
    outcomes = []
    for manager in (None, chunkmem.ChunkManager(config(6 * 1024))):
        twin = Twin(manager, lambda manager=manager: WithOrdinary(manager), max_grad_norm=None)
        losses = twin.steps(0, 1)
        twin.loss(features(2)).backward()
        norm = twin.clip(0.01)
        twin.update()
        twin.model.extra.requires_grad_(False)
        losses += twin.steps(3)
        saved = copied(twin.optimizer.state_dict())  # torch hands out what it goes on changing
        twin.steps(4)
        twin.optimizer.load_state_dict(saved)
        losses += twin.steps(5)
        outcomes.append((losses, norm, twin.left()))
        if manager is not None:
            ordinary = {"extra", "wide"}
            assert all(
                (name.split(".")[0] in ordinary) == (manager.runtime.registry.lookup(p) is None)
                for name, p in twin.model.named_parameters()
            )
            manager.close()
    assert_equal(outcomes[1], outcomes[0])
