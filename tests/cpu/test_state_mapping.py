"""`optimizer.state` reads as torch's; a write is kept or refused, and never lost without a word."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from tests.helpers.audit import audit
from tests.helpers.twins import AMPLE_NBYTES, WIDTH, Blocks, Twin, assert_equal, config, copied, features, same

SMALL_NBYTES = 4 * 1024


def read(twin: Twin) -> dict[str, Any]:
    """All that a program sees, by the parameters' names."""
    names = {param: name for name, param in twin.model.named_parameters()}
    state = twin.optimizer.state
    entries = {names[param]: {key: copied(value) for key, value in entry.items()} for param, entry in state.items()}
    return {
        "bool": bool(state),
        "len": len(state),
        "in": [param in state for param in names],
        "items": dict(sorted(entries.items())),  # torch has them in the order of their first updates
        "get": [sorted(state.get(param, ())) for param in names],
        "step": [float(state[param]["step"]) for param in names if param in state],
    }


def test_reading_is_as_in_torch() -> None:
    """Before the first step, after some, and with a parameter that has no state."""

    def scenario(twin: Twin) -> list[Any]:
        seen = [read(twin)]
        twin.model.blocks[1].requires_grad_(False)
        twin.steps(0)
        seen.append(read(twin))
        twin.steps(1, 2)
        twin.loss(features(3)).backward()
        seen.append(read(twin))
        twin.update()
        return [seen, twin.steps(4)]

    same(Blocks, scenario)


def test_a_value_is_a_copy_made_when_it_is_asked_for() -> None:
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        twin.steps(0, 1)
        weight = dict(twin.model.named_parameters())["inner.weight"]
        entry = twin.optimizer.state[weight]
        first = entry["exp_avg"]
        before = first.clone()
        twin.steps(2)
        assert torch.equal(first, before)
        assert not torch.equal(entry["exp_avg"], before)
        assert first.device.type == "cpu"
        assert set(entry) == {"step", "exp_avg", "exp_avg_sq"}
        assert type(first.clone()) is type(first + 1) is type(first.sum()) is Tensor
        buffer = io.BytesIO()
        torch.save({"kept": first}, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=True)["kept"], before)
        assert type(copy.deepcopy(first)) is Tensor
        with pytest.raises(chunkmem.StateError, match="cannot be copied or pickled"):
            copy.deepcopy(twin.optimizer.state)


class Halves(Blocks):
    """One linear layer is in no chunk."""

    def __init__(self, manager: chunkmem.ChunkManager | None) -> None:
        super().__init__(num_blocks=1)
        if manager is None:
            self.beside = nn.Linear(WIDTH, WIDTH)
        else:
            with manager.exclude():
                self.beside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(self.beside(x))
        return result


def test_states_of_excluded_parameters_are_the_real_ones() -> None:
    def train(manager: chunkmem.ChunkManager | None) -> Any:
        twin = Twin(manager, lambda: Halves(manager))
        losses = twin.steps(0, 1)
        entry = twin.optimizer.state[twin.model.beside.weight]
        entry["exp_avg"].zero_()
        entry["mine"] = torch.ones(2)
        assert twin.optimizer.state[twin.model.beside.weight]["mine"].sum() == 2
        del entry["mine"]
        return [losses, read(twin), twin.steps(2), twin.left()]

    plain = train(None)
    for nbytes in (AMPLE_NBYTES, SMALL_NBYTES):
        with chunkmem.ChunkManager(config(nbytes)) as manager:
            assert_equal(train(manager), plain)


# Writes.


def set_moments(twin: Twin) -> None:
    for index, (_, param) in enumerate(twin.model.named_parameters()):
        entry = twin.optimizer.state[param]
        entry["exp_avg"] = entry["exp_avg"] * 0.5 + index
        entry.update(exp_avg_sq=entry["exp_avg_sq"] + 0.25)
        entry["step"] = torch.tensor(7.0)


def replace_entries(twin: Twin) -> None:
    for param, entry in list(twin.optimizer.state.items()):
        twin.optimizer.state[param] = {key: value.clone() * 3 for key, value in entry.items()}


def remove_one(twin: Twin) -> None:
    del twin.optimizer.state[dict(twin.model.named_parameters())["inner.weight"]]


def remove_all(twin: Twin) -> None:
    twin.optimizer.state.clear()


def assign_nothing(twin: Twin) -> None:
    twin.optimizer.state = defaultdict(dict)


def assign_entries(twin: Twin) -> None:
    ones = {
        param: {key: torch.ones_like(v) for key, v in entry.items()} for param, entry in twin.optimizer.state.items()
    }
    twin.optimizer.state = defaultdict(dict, ones)


def pass_through(twin: Twin) -> None:
    """As Lightning moves states to a device: it makes another collection of the same type, by items."""
    for param, entry in twin.optimizer.state.items():
        moved = OrderedDict((key, value.to("cpu")) for key, value in entry.items())
        twin.optimizer.state[param] = type(entry)(moved)


def make_some(twin: Twin) -> None:
    """Where there are none yet."""
    remove_all(twin)
    head = dict(twin.model.named_parameters())["head.weight"]
    zeros = torch.zeros(head.shape)
    twin.optimizer.state[head] = {"step": torch.tensor(3.0), "exp_avg": zeros + 1, "exp_avg_sq": zeros + 2}


KEPT = [set_moments, replace_entries, remove_one, remove_all, assign_nothing, assign_entries, pass_through, make_some]


@pytest.mark.few(3)
@pytest.mark.parametrize("write", KEPT, ids=lambda write: write.__name__)
@pytest.mark.parametrize("when", ["between steps", "before the step"])
def test_what_is_assigned_is_kept(write: Callable[[Twin], None], when: str) -> None:
    """Also while gradients wait, of which some may have been used for an update overlapped with backward."""

    def scenario(twin: Twin) -> list[Any]:
        losses = twin.steps(0, 1, 2)
        if when == "before the step":
            twin.loss(features(5)).backward()
        write(twin)
        if when == "before the step":
            twin.update()
        return [losses, read(twin), twin.steps(3, 4)]

    same(Blocks, scenario)


IN_PLACE: dict[str, Callable[[Any, Any], Any]] = {
    "zero_": lambda entry, other: entry["exp_avg"].zero_(),
    "item": lambda entry, other: entry["exp_avg"].__setitem__(0, 1.0),
    "a view": lambda entry, other: entry["exp_avg"].view(-1)[1:].mul_(2),
    "detached": lambda entry, other: entry["exp_avg"].detach().fill_(1),
    "data": lambda entry, other: entry["exp_avg"].data.fill_(1),
    "other data": lambda entry, other: setattr(entry["exp_avg"], "data", torch.ones(3)),
    "out": lambda entry, other: torch.add(other, 1, out=entry["exp_avg"]),
    "copy_": lambda entry, other: entry["exp_avg_sq"].copy_(other),
    "foreach": lambda entry, other: torch._foreach_mul_([entry["exp_avg"], other], 2.0),
    "count": lambda entry, other: entry["step"].add_(1),
    "augmented count": lambda entry, other: entry.__setitem__("step", entry["step"].__iadd__(1)),
    "init": lambda entry, other: nn.init.ones_(entry["exp_avg"]),
}


@pytest.fixture
def twin() -> Iterator[Twin]:
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        yield Twin(manager, Blocks)


@pytest.mark.few(13)
@pytest.mark.parametrize("how", IN_PLACE)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_a_write_in_place_is_refused(how: str, mode: Any, twin: Twin) -> None:
    """It would go to a copy, and be lost."""
    twin.steps(0, 1)
    weight = dict(twin.model.named_parameters())["inner.weight"]
    before = twin.left()
    with mode(), pytest.raises(chunkmem.StateError, match=r"a write to one would be lost; assign it"):
        IN_PLACE[how](twin.optimizer.state[weight], torch.ones(WIDTH, WIDTH))
    assert_equal(twin.left(), before)


def test_a_numpy_array_of_a_value_is_read_only(twin: Twin) -> None:
    twin.steps(0)
    weight = dict(twin.model.named_parameters())["inner.weight"]
    array = twin.optimizer.state[weight]["exp_avg"].numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_a_value_may_be_read_by_what_writes_elsewhere(twin: Twin) -> None:
    twin.steps(0)
    weight = dict(twin.model.named_parameters())["inner.weight"]
    value = twin.optimizer.state[weight]["exp_avg"]
    target = torch.zeros(WIDTH, WIDTH)
    assert torch.equal(target.copy_(value), value)
    torch._foreach_add_([target], [value])
    assert torch.equal(target, value + value)


DOES_NOT_FIT: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "shape": (lambda state, p: state[p].update(exp_avg=torch.ones(3)), r"inner\.weight: exp_avg is \(3,\) instead of"),
    "no tensor": (lambda state, p: state[p].update(exp_avg=1.0), r"inner\.weight: exp_avg is a float, not a tensor"),
    "step": (lambda state, p: state[p].update(step="many"), r"inner\.weight: step is not a number"),
    "key": (lambda state, p: state[p].update(max_exp_avg_sq=torch.ones(3)), r"'max_exp_avg_sq' cannot be kept"),
    "a part": (
        lambda state, p: state.update({p: {"exp_avg": torch.ones(3)}}),
        r"has the keys step, exp_avg, exp_avg_sq",
    ),
    "no entry": (
        lambda state, p: state.update({p: 7}),
        r"is a mapping of step, exp_avg, exp_avg_sq to tensors, not a int",
    ),
    "remove a key": (lambda state, p: state[p].pop("exp_avg"), r"'exp_avg' cannot be removed alone"),
}


@pytest.mark.parametrize("what", DOES_NOT_FIT)
def test_what_does_not_fit_is_refused_and_changes_nothing(what: str, twin: Twin) -> None:
    twin.steps(0, 1)
    weight = dict(twin.model.named_parameters())["inner.weight"]
    before = twin.left()
    write, message = DOES_NOT_FIT[what]
    with pytest.raises(chunkmem.StateError, match=message):
        write(twin.optimizer.state, weight)
    assert_equal(twin.left(), before)
    audit(twin.manager)


def test_states_of_another_optimizer_or_a_closed_manager_are_refused(twin: Twin) -> None:
    twin.steps(0)
    weight = dict(twin.model.named_parameters())["inner.weight"]
    chunkmem.AdamW(twin.model.parameters(), manager=twin.manager)
    with pytest.raises(chunkmem.StateError, match="was given to a newer optimizer"):
        _ = twin.optimizer.state[weight]["exp_avg"]
    with pytest.raises(chunkmem.StateError, match="was given to a newer optimizer"):
        twin.optimizer.state[weight]["step"] = 3
    twin.manager.close()
    with pytest.raises(chunkmem.StateError, match="manager is closed"):
        _ = twin.optimizer.state[weight]["exp_avg"]


def test_lowered_precision_keeps_states_in_float32() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, precision="bf16")) as manager:
        twin = Twin(manager, Blocks)
        twin.steps(0, 1)
        for entry in twin.optimizer.state.values():
            assert all(value.dtype is torch.float32 for value in entry.values())
        before = twin.left()
        pass_through(twin)
        assert_equal(twin.left(), before)
