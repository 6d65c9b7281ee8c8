"""`torch.distributed.checkpoint.state_dict` over a managed model: it looks, and leaves everything as it was.

It takes an optimizer whose `state` is empty for a fresh one, assigns gradients of zero, and steps it to have states: a
trained optimizer's moments decayed, its counts rose, and gradients that waited for the step were lost.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import chunkmem
from tests.helpers.audit import audit
from tests.helpers.ranks import Team
from tests.helpers.shared_training import MODELS, Task, batch_of, loss_of, open_manager
from tests.helpers.spread import spread
from tests.helpers.twins import AMPLE_NBYTES, Blocks, Twin, assert_equal, config, copied, features, same

SMALL_NBYTES = 4 * 1024
OPTIONS: dict[str, dict[str, bool]] = {
    "default": {},
    "full": {"full_state_dict": True},
    "full on the CPU": {"full_state_dict": True, "cpu_offload": True},
    "on the CPU": {"cpu_offload": True},
    "flat": {"flatten_optimizer_state_dict": True},
    "not strict": {"strict": False},
}


def ordered(states: Any) -> Any:
    """States sorted by their keys: torch has them in the order in which they were made."""
    return dict(sorted(states.items()))


def looked_at(twin: Twin, options: StateDictOptions) -> list[Any]:
    """All that can be got."""
    weights, states = get_state_dict(twin.model, twin.optimizer, options=options)
    if not options.flatten_optimizer_state_dict:
        states["state"] = ordered(states["state"])
    both = [get_model_state_dict(twin.model, options=options), ordered(weights)]
    assert_equal(ordered(both[0]), both[1])
    alone = get_optimizer_state_dict(twin.model, twin.optimizer, options=options)
    assert alone.keys() == states.keys()
    return copied([both[1], ordered(states)])


@pytest.mark.few(3)
@pytest.mark.parametrize("options", OPTIONS)
def test_looking_shows_what_torch_has_and_changes_nothing(options: str) -> None:
    """Between steps, and while gradients wait, with a learning rate in the groups that has to come back."""

    def scenario(twin: Twin) -> list[Any]:
        wanted = StateDictOptions(**OPTIONS[options])
        losses = twin.steps(0, 1)
        seen = [looked_at(twin, wanted)]
        losses += twin.steps(2)
        twin.loss(features(3)).backward()
        seen.append(looked_at(twin, wanted))
        twin.update()
        rates = [group["lr"] for group in twin.optimizer.param_groups]
        return [losses, seen, rates, twin.steps(4)]

    same(Blocks, scenario)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_looking_before_the_first_step_makes_states_and_counts_nothing(precision: str) -> None:
    """What is there to load into: zeros for all trainable parameters. Training is what it would have been without."""
    keys = {"precision": precision, "fp16": {"enabled": precision == "fp16", "initial_scale_power": 4}}
    left = []
    for is_looking in (False, True):
        with chunkmem.ChunkManager(config(SMALL_NBYTES, **keys)) as manager:
            twin = Twin(manager, Blocks, max_grad_norm=1.0)
            twin.model.blocks[0].requires_grad_(False)
            before, scale = twin.weights(), manager.loss_scale
            if is_looking:
                weights, states = get_state_dict(twin.model, twin.optimizer)
                assert_equal(ordered(weights), ordered(before))
                assert len(states["state"]) == 12
                assert all(not value.any() for entry in states["state"].values() for value in entry.values())
                assert_equal(twin.weights(), before)
                assert (manager.loss_scale, manager.num_skipped_steps, manager.trace) == (scale, 0, None)
                assert [group["lr"] for group in twin.optimizer.param_groups] == [1e-2]
                assert all(param.grad is None for param in twin.model.parameters())
                audit(manager)
            losses = []
            for seed in range(4):
                loss = twin.loss(features(seed))
                twin.backward(loss)
                twin.update()
                losses.append(loss.item())
            left.append([losses, twin.left()])
    assert_equal(left[1], left[0])


def test_a_step_at_learning_rate_zero_counts_unless_its_gradients_were_set_to_zero_for_it() -> None:
    """As warm-up schedules have it: torch counts it, and so does chunkmem."""

    def scenario(twin: Twin) -> list[Any]:
        losses = twin.steps(0)
        twin.optimizer.param_groups[0]["lr"] = 1e-2
        return losses + twin.steps(1, 2)

    same(Blocks, scenario, lr=0.0)


@spread(options=("default", "full", "flat"), into=("a fresh optimizer", "a trained one", "torch"))
def test_a_training_is_handed_over(options: str, into: str) -> None:
    wanted = StateDictOptions(**OPTIONS[options])
    plain = Twin(None, Blocks)
    losses = plain.steps(0, 1, 2, 3)
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as one, chunkmem.ChunkManager(config(AMPLE_NBYTES)) as two:
        first, second = Twin(one, Blocks), Twin(None if into == "torch" else two, Blocks)
        travelled = first.steps(0, 1)
        if into == "a trained one":
            second.steps(7, 8)
        weights, states = get_state_dict(first.model, first.optimizer, options=wanted)
        set_state_dict(
            second.model, second.optimizer, model_state_dict=weights, optim_state_dict=states, options=wanted
        )
        assert_equal(second.left(), first.left())
        assert travelled + second.steps(2, 3) == losses
        assert_equal(second.left(), plain.left())


def test_weights_and_states_are_set_apart() -> None:
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as one, chunkmem.ChunkManager(config(SMALL_NBYTES)) as two:
        first, second = Twin(one, Blocks), Twin(two, Blocks)
        first.steps(0, 1)
        weights = get_model_state_dict(first.model)
        states = get_optimizer_state_dict(first.model, first.optimizer)
        set_model_state_dict(second.model, weights)
        set_optimizer_state_dict(second.model, second.optimizer, states)
        assert_equal(second.left(), first.left())


def test_everything_frozen_has_no_states() -> None:
    def scenario(twin: Twin) -> list[Any]:
        states = get_optimizer_state_dict(twin.model, twin.optimizer)
        return [states["state"], twin.optimizer.param_groups[0]["lr"], twin.loss(features(0)).item()]

    same(lambda: Blocks().requires_grad_(False), scenario)


# Over ranks.


def look_and_train(rank: int, task: Task, looks: tuple[int, ...], hands_over: bool) -> Any:
    """Train; before the steps of `looks`, get everything; at the end, have another manager go on."""
    torch.set_num_threads(1)
    losses: list[float] = []

    def make() -> tuple[Any, Any, Any]:
        manager = open_manager(rank, task)
        torch.manual_seed(0)
        with manager.init():
            model = MODELS[task.model]()
        return manager, model, chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)

    def step(manager: Any, model: Any, optimizer: Any, index: int) -> None:
        loss = loss_of(model, batch_of(task, index, 0, rank))
        manager.backward(loss)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()

    parts = make()
    for index in range(task.steps):
        if index in looks:
            if rank == 0:
                bool(parts[2].state)  # one rank may ask whether there are states
            before = copied(parts[2].state_dict()["state"])
            _, states = get_state_dict(parts[1], parts[2])
            assert index == 0 or len(states["state"]) == len(before) == len(parts[2].state)
            assert index == 0 or copied(parts[2].state_dict()["state"]).keys() == before.keys()
        step(*parts, index)
    if hands_over:
        weights, states = get_state_dict(parts[1], parts[2])
        parts[0].close()
        parts = make()
        set_state_dict(parts[1], parts[2], model_state_dict=weights, optim_state_dict=states)
        step(*parts, task.steps)
    else:
        step(*parts, task.steps)
    result = losses, parts[0].state_dict(), parts[2].state_dict()["state"]
    parts[0].close()
    return result


@pytest.mark.full
@pytest.mark.few(1)
@pytest.mark.parametrize("model", ["tied", "frozen"])
def test_over_ranks_looking_changes_nothing(model: str, pair: Team) -> None:
    """Before the first step too; and what one training got, another goes on from."""
    task = Task(model=model, steps=3)
    expected = pair.run(look_and_train, task, (), False)
    for looks, hands_over in (((0, 1, 2), False), ((2,), True)):
        outcome = pair.run(look_and_train, task, looks, hands_over)
        assert [losses for losses, _, _ in outcome] == [losses for losses, _, _ in expected]
        for (_, weights, states), (_, other_weights, other_states) in zip(outcome, expected, strict=True):
            assert_equal(weights, other_weights)
            assert_equal(ordered(states), ordered(other_states))


def read_and_write_states(rank: int, task: Task) -> Any:
    """Halve all first moments by assignment; a rank that owns none of a parameter's state calls it, too."""
    torch.set_num_threads(1)
    with open_manager(rank, task) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = MODELS[task.model]()
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        loss = loss_of(model, batch_of(task, 0, 0, rank))
        manager.backward(loss)
        optimizer.step()
        before = optimizer.state_dict()["state"]
        for entry in optimizer.state.values():
            entry["exp_avg"] = entry["exp_avg"] / 2
        after = optimizer.state_dict()["state"]
        assert len(before) == len(after) == len(optimizer.state) > 0
        return before, after


def test_over_ranks_states_are_read_and_assigned(pair: Team) -> None:
    for before, after in pair.run(read_and_write_states, Task()):
        for index, entry in before.items():
            assert torch.equal(after[index]["exp_avg"], entry["exp_avg"] / 2)
            assert torch.equal(after[index]["exp_avg_sq"], entry["exp_avg_sq"])


def clip_then_step(rank: int, task: Task) -> Any:
    """Only one parameter is trained, so that one of two ranks owns nothing that has a gradient."""
    torch.set_num_threads(1)
    with open_manager(rank, task) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = MODELS[task.model]()
        model.requires_grad_(False)
        trained = next(model.parameters())
        trained.requires_grad_(True)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        norms = []
        for index in range(3):
            manager.backward(loss_of(model, batch_of(task, index, 0, rank)))
            norms.append(optimizer.clip_grad_norm_(0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        before = manager.state_dict()
        optimizer.step()  # no rank has a batch
        weights = manager.state_dict()
        return norms, [key for key, value in before.items() if not torch.equal(value, weights[key])], weights


def test_over_ranks_a_clipped_step_counts_on_the_rank_that_owns_none_of_it(pair: Team) -> None:
    """It was told 'without a gradient', as the means had been formed before: by the clipping."""
    (norms, changed, weights), (other_norms, other_changed, other_weights) = pair.run(clip_then_step, Task())
    assert norms == other_norms
    assert all(norm > 0 for norm in norms)
    assert changed == other_changed == []
    assert_equal(weights, other_weights)
    assert isinstance(next(iter(weights.values())), Tensor)
