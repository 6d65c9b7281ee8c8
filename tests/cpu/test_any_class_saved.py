"""States of `chunkmem.Optimizer`: those of the class's `state_dict()`, in files, and over ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import chunkmem
from tests.helpers.any_class import WAYS, WHOLE, ClassTwin, entries, muon_and_adamw
from tests.helpers.audit import audit
from tests.helpers.ranks import Team
from tests.helpers.shared_training import MODELS, Task, batch_of, loss_of, make_optimizer, open_manager, serial, train
from tests.helpers.spread import spread
from tests.helpers.twins import AMPLE_NBYTES, Blocks, Twin, assert_equal, config, copied, cpu_bits_only, same

pytestmark = cpu_bits_only

STEPS = range(6)
NAMES = [way.name for way in (*WAYS, *WHOLE)]
SMALL_NBYTES = 6 << 10


def moved(source: Twin, target: Twin) -> None:
    weights, state = source.weights(), source.optimizer.state_dict()
    if target.manager is None:
        target.model.load_state_dict(weights)
    else:
        target.manager.load_state_dict(weights, target.model)
    target.optimizer.load_state_dict(state)


@pytest.mark.few(5)
@spread(name=NAMES, device_nbytes=[AMPLE_NBYTES, SMALL_NBYTES])
def test_states_go_to_torch_and_back(name: str, device_nbytes: int) -> None:
    """Half of the steps on one side, the other half on the other: as if all had been made on one."""
    whole = ClassTwin(None, Blocks, kind=name)
    losses = whole.steps(*STEPS)
    with chunkmem.ChunkManager(config(device_nbytes)) as manager:
        ours, theirs = ClassTwin(manager, Blocks, kind=name), ClassTwin(None, Blocks, kind=name)
        assert ours.optimizer.state_dict()["param_groups"] == theirs.optimizer.state_dict()["param_groups"]
        assert ours.steps(*STEPS[:2]) == losses[:2]
        moved(ours, theirs)
        assert theirs.steps(*STEPS[2:4]) == losses[2:4]
        moved(theirs, ours)
        assert ours.steps(*STEPS[4:]) == losses[4:]
        assert_equal(ours.left(), whole.left())
        audit(manager)


SAVED = ("SGD", "nesterov", "NAdam", "Adafactor", "Lion", "ASGD", "pairs", *(way.name for way in WHOLE))


@pytest.mark.few(2)
@spread(name=SAVED, device_nbytes=[SMALL_NBYTES, AMPLE_NBYTES])
def test_checkpoints(name: str, device_nbytes: int, tmp_path: Path) -> None:
    """Written under one cap, read under another, by an optimizer that has its own weights and states already."""
    options: dict[str, Any] = {"params": muon_and_adamw} if name == "pairs" else {}
    plain = ClassTwin(None, Blocks, kind=name, **options)
    losses = plain.steps(*STEPS)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = ClassTwin(manager, Blocks, kind=name, **options)
        assert twin.steps(*STEPS[:3]) == losses[:3]
        manager.save(tmp_path / "ckpt", twin.optimizer)
    with chunkmem.ChunkManager(config(device_nbytes)) as manager:
        twin = ClassTwin(manager, Blocks, kind=name, **options)
        twin.steps(7)
        for _ in range(2):  # as a run does that goes back to its best checkpoint
            manager.load(tmp_path / "ckpt", twin.optimizer)
            assert twin.steps(*STEPS[3:]) == losses[3:]
            assert_equal(twin.left(), plain.left())


@pytest.mark.few(3)
@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_of_excluded_parameters(name: str, tmp_path: Path) -> None:
    """torch keeps their states as they are given: those of a checkpoint stayed unread, and the next step raised."""

    def build(manager: chunkmem.ChunkManager | None) -> nn.Module:
        model = Blocks()
        with nullcontext() if manager is None else manager.exclude():
            model.head = nn.Linear(model.head.in_features, model.head.out_features)
        return model

    plain = ClassTwin(None, partial(build, None), kind=name)
    losses = plain.steps(*STEPS)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = ClassTwin(manager, partial(build, manager), kind=name)
        assert twin.steps(*STEPS[:3]) == losses[:3]
        manager.save(tmp_path / "ckpt", twin.optimizer)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = ClassTwin(manager, partial(build, manager), kind=name)
        manager.load(tmp_path / "ckpt", twin.optimizer)
        assert twin.steps(*STEPS[3:]) == losses[3:]
        assert_equal(twin.left(), plain.left())


@pytest.mark.parametrize("name", ["nesterov", "NAdam", "Adafactor", "stacked"])
def test_a_checkpoint_written_while_training_continues(name: str, tmp_path: Path) -> None:
    plain = ClassTwin(None, Blocks, kind=name)
    plain.steps(0, 1)
    expected = plain.left()
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = ClassTwin(manager, Blocks, kind=name)
        twin.steps(0, 1)
        pending = manager.save(tmp_path / "ckpt", twin.optimizer, asynchronous=True)
        twin.steps(2, 3)
        assert pending is not None
        pending.wait()
        manager.load(tmp_path / "ckpt", twin.optimizer)
        assert_equal(twin.left(), expected)


@pytest.mark.parametrize("name", ["nesterov", "Adagrad", "NAdam", "ASGD"])
def test_looking_before_the_first_step_changes_nothing(name: str) -> None:
    """`torch.distributed.checkpoint` steps once to have states to load into; they begin as the class makes them."""
    plain = ClassTwin(None, Blocks, kind=name)
    losses = plain.steps(*STEPS)
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = ClassTwin(manager, Blocks, kind=name)
        _, states = get_state_dict(twin.model, twin.optimizer)
        assert len(states["state"]) == len(list(twin.model.parameters()))
        assert manager.trace is None
        assert twin.steps(*STEPS) == losses
        assert_equal(twin.left(), plain.left())


def test_states_that_torch_distributed_checkpoint_loads_into_a_new_optimizer() -> None:
    plain = ClassTwin(None, Blocks, kind="NAdam")
    losses = plain.steps(*STEPS[:3])
    weights, states = get_state_dict(plain.model, plain.optimizer)
    weights, states = copied(weights), copied(states)
    losses = plain.steps(*STEPS[3:])
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = ClassTwin(manager, Blocks, kind="NAdam")
        set_state_dict(twin.model, twin.optimizer, model_state_dict=weights, optim_state_dict=states)
        assert twin.steps(*STEPS[3:]) == losses
        assert_equal(twin.left(), plain.left())


def test_the_state_mapping() -> None:
    """`optimizer.state` has the keys of the class, in its order; what is assigned is used."""

    def scenario(twin: Twin) -> Any:
        losses = twin.steps(0, 1)
        weight, bias = twin.model.head.weight, twin.model.head.bias
        state = twin.optimizer.state
        seen = [list(state[weight]), list(state[bias]), copied(dict(state[weight])), weight in state, len(state)]
        state[weight]["row_var"] = torch.ones(4, 1)
        state[bias] = {"step": torch.tensor(7.0), "variance": torch.full((4,), 0.5)}
        del state[twin.model.inner.bias]
        return seen, losses, twin.steps(2, 3)

    same(Blocks, scenario, twin=ClassTwin, kind="Adafactor")


def test_numbers_in_the_state_mapping() -> None:
    """A count that is no tensor is read, and assigned, as one."""

    def scenario(twin: Twin) -> Any:
        losses = twin.steps(0, 1)
        state = twin.optimizer.state[twin.model.head.weight]
        seen = list(state), state["num_updates"]
        state["num_updates"] = 7
        return seen, losses, twin.steps(2, 3), state["num_updates"]

    same(Blocks, scenario, twin=ClassTwin, kind="Lion")


def test_a_lazy_state_dict() -> None:
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = ClassTwin(manager, Blocks, kind="Adafactor")
        assert twin.optimizer.state_dict(lazy=True)["state"] == {}
        twin.steps(0, 1)
        lazy = twin.optimizer.state_dict(lazy=True)["state"]
        found = {index: {key: value.clone() for key, value in lazy[index].items()} for index in sorted(lazy)}
        assert_equal(copied(found), entries(twin.optimizer))


WRONG: list[tuple[Callable[[Any], Any], str]] = [
    (
        lambda s: s["state"][0].update(row_var=torch.zeros(3, 1)),
        r"inner\.weight row_var is \(3, 1\) instead of \(16, 1\)",
    ),
    (lambda s: s["state"][0].pop("col_var"), r"inner\.weight col_var is missing"),
    (
        lambda s: s["state"][1].update(other=torch.zeros(3)),
        r"other \(3,\) is no state of its class, which keeps step",
    ),
    (lambda s: s["state"][1].update(variance=1.0), "variance is a float, not a tensor"),
    (lambda s: s["param_groups"][0].pop("d"), "the state is of another optimizer than Adafactor: it has no d"),
    (lambda s: s["param_groups"][0]["params"].pop(), r"the state has parameter groups of \[15\]"),
]


def test_states_that_do_not_fit_are_refused_and_nothing_is_changed() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = ClassTwin(manager, Blocks, kind="Adafactor")
        twin.steps(0, 1)
        before = twin.left()
        state = twin.optimizer.state_dict()
        for change, says in WRONG:
            wrong = copied(state)
            change(wrong)
            with pytest.raises(chunkmem.CheckpointError, match=says):
                twin.optimizer.load_state_dict(wrong)
        assert_equal(twin.left(), before)
        with pytest.raises(chunkmem.StateError, match=r"variance is \(5,\) instead of \(16,\)"):
            twin.optimizer.state[twin.model.inner.bias]["variance"] = torch.zeros(5)


def test_options_of_a_saved_state_decide_which_states_there_are() -> None:
    saved = ClassTwin(None, Blocks, kind="amsgrad", foreach=None)
    saved.steps(0, 1)
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = ClassTwin(manager, Blocks, kind="amsgrad", amsgrad=False, foreach=None)
        manager.load_state_dict(saved.weights(), twin.model)
        twin.optimizer.load_state_dict(saved.optimizer.state_dict())
        assert twin.steps(2, 3) == saved.steps(2, 3)
        assert_equal(twin.left(), saved.left())


# Ranks.


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "NAdam": {},
    "Adagrad": {"initial_accumulator_value": 0.1},
    "Adafactor": {},
    "Muon and AdamW": {},
}


@pytest.fixture(scope="module")
def team() -> Any:
    with Team(2) as found:
        yield found


@pytest.mark.few(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_have_the_bits_of_one_process(name: str, team: Team) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    task = Task(optimizer=name, options=OPTIMIZERS[name])
    losses, weights, states = serial(task, 2)
    torch.set_num_threads(threads)
    outcomes = team.run(train, task)
    for rank, outcome in enumerate(outcomes):
        assert outcome.losses == losses[rank]
        assert_equal(outcome.weights, weights)
        assert_equal(dict(sorted(outcome.states.items())), dict(sorted(states.items())))


def test_two_ranks_with_copies_and_exchanges_as_late_as_may_be(team: Team) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    overlap = {"client": {"opts": {"overlap_optimizer": True, "undo_log_ratio": 0.5}}}
    task = Task(optimizer="NAdam", adversarial=3, device_nbytes=34 << 10, config=overlap, steps=8)
    losses, weights, states = serial(task, 2)
    torch.set_num_threads(threads)
    for rank, outcome in enumerate(team.run(train, task)):
        assert outcome.losses == losses[rank]
        assert_equal(outcome.weights, weights)
        assert_equal(dict(sorted(outcome.states.items())), dict(sorted(states.items())))


def continued(rank: int, task: Task, path: Path, save: bool) -> Any:
    """Train two steps and save, or load and say what there is."""
    with open_manager(rank, task) as manager:
        torch.manual_seed(rank + 1 if not save else 0)
        with manager.init():
            model = MODELS[task.model]()
        optimizer: Any = make_optimizer(task, model, manager)
        if not save:
            manager.load(path, optimizer)
            return copied((manager.state_dict(), entries(optimizer)))
        for step in range(2):
            manager.backward(loss_of(model, batch_of(task, step, 0, rank)))
            optimizer.step()
            optimizer.zero_grad()
        manager.save(path, optimizer)
        weight = next(iter(model.parameters()))
        assert list(optimizer.state[weight]) == list(entries(optimizer)[0])
        return copied((manager.state_dict(), entries(optimizer)))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["NAdam", "Muon and AdamW"])
def test_checkpoints_go_from_two_ranks_to_one_process_and_back(name: str, team: Team, tmp_path: Path) -> None:
    task = Task(optimizer=name, model="plain")
    saved = team.run(continued, task, tmp_path / "two", True)
    assert_equal(saved[1], saved[0])
    assert_equal(continued(0, task, tmp_path / "two", False), saved[0])
    alone = continued(0, task, tmp_path / "one", True)
    for loaded in team.run(continued, task, tmp_path / "one", False):
        assert_equal(loaded, alone)
