"""`state_dict` and `load_state_dict`, of the manager and of the modules themselves, at small caps."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from tests.helpers.audit import audit
from tests.helpers.training import compute_device
from tests.helpers.twins import WIDTH, Blocks, Twin, assert_equal, config, copied, features, mlp, same

SMALL_NBYTES = 4 * 1024


class Everything(Blocks):
    """Tied names, a scalar, buffers of several kinds, extra state, an integer parameter, parameters of the root."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm1d(WIDTH), nn.ModuleDict())
        self.blocks[1].forward = lambda x: x
        self.tied = self.inner
        self.blocks[2].register_parameter("also", self.head.weight)
        self.scale, self.offset = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.randn(1, 1))
        self.wide = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.count = nn.Parameter(torch.tensor([3, 4]), requires_grad=False)
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("dropped", torch.ones(2), persistent=False)
        self.register_parameter("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale + self.offset * self.wide.float())

    def get_extra_state(self) -> Any:
        return {"note": "kept", "tensor": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


@pytest.fixture
def pair() -> Iterator[tuple[Twin, Twin]]:
    """The same model after two steps: in plain PyTorch, and under a small cap."""
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        plain, twin = Twin(None, Everything), Twin(manager, Everything)
        assert plain.steps(0, 1) == twin.steps(0, 1)
        yield plain, twin
        audit(manager)


SAVED: dict[str, Callable[[Twin], Any]] = {
    "manager": lambda twin: twin.manager.state_dict(),
    "manager, named": lambda twin: twin.manager.state_dict(twin.model, rank0_only=True),
    "model": lambda twin: twin.model.state_dict(),
    "model, variables": lambda twin: twin.model.state_dict(keep_vars=True),
}


@pytest.mark.parametrize("how", SAVED)
def test_the_state_is_what_torch_has(how: str, pair: tuple[Twin, Twin]) -> None:
    """Keys, order, shapes, dtypes, buffers, tied names, extra state."""
    plain, twin = pair
    state, expected = SAVED[how](twin), plain.model.state_dict()
    assert type(state) is type(expected)
    assert_equal(state, expected)
    assert state._metadata == expected._metadata


def test_what_the_manager_returns_is_a_copy(pair: tuple[Twin, Twin]) -> None:
    """Of buffers too; and tied names share it, so that a saved file is no larger than torch's."""
    plain, twin = pair
    state = twin.manager.state_dict()
    assert_equal(state, plain.model.state_dict())
    before = copied(dict(state))
    twin.steps(2)
    assert_equal(dict(state), before)
    assert state["tied.weight"] is state["inner.weight"]
    sizes = []
    for saved in (state, plain.model.state_dict()):
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        sizes.append(buffer.tell())
    assert sizes[0] <= sizes[1]


def test_a_part_of_the_model(pair: tuple[Twin, Twin]) -> None:
    plain, twin = pair
    assert_equal(twin.model.blocks[2].state_dict(), plain.model.blocks[2].state_dict())
    assert_equal(twin.manager.state_dict(twin.model.head), plain.model.head.state_dict())
    assert_equal(twin.model.state_dict(prefix="a.b."), plain.model.state_dict(prefix="a.b."))


def test_hooks_of_the_user_on_the_state() -> None:
    """One that renames an entry, registered before packing, finds the values and not a placeholder."""

    def build() -> nn.Module:
        def rename(module: nn.Module, state: dict[str, Any], prefix: str, meta: Any) -> None:
            state[prefix + "kernel"] = state.pop(prefix + "weight") * 2

        def rename_back(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
            state[prefix + "weight"] = state.pop(prefix + "kernel") / 2

        model = Blocks()
        model.inner._register_state_dict_hook(rename)
        model.inner.register_load_state_dict_pre_hook(rename_back)
        return model

    def scenario(twin: Twin) -> list[Any]:
        losses = twin.steps(0)
        state = twin.weights()
        losses += twin.steps(1)
        twin.model.load_state_dict(state)
        return [losses, twin.steps(2), sorted(state)]

    same(build, scenario)


def load_by_manager(twin: Twin, state: Any, **options: Any) -> Any:
    if twin.manager is None:
        return twin.model.load_state_dict(state, **options)
    return twin.manager.load_state_dict(state, **options)


LOADED: dict[str, Callable[[Twin, Any], Any]] = {
    "manager": load_by_manager,
    "model": lambda twin, state: twin.model.load_state_dict(state),
    # In torch the optimizer would go on updating the replaced parameters; here none is replaced.
    "model, assigned": lambda twin, state: twin.model.load_state_dict(state, assign=twin.manager is not None),
    "in parts": lambda twin, state: [
        getattr(twin.model, name).load_state_dict(
            {k.partition(".")[2]: v for k, v in state.items() if k.startswith(name)}
        )
        for name in ("inner", "blocks", "head")
    ],
    "half precision": lambda twin, state: load_by_manager(twin, {k: v.bfloat16() for k, v in state.items()}),
    "not strict": lambda twin, state: load_by_manager(
        twin, {"other": torch.ones(1), **{k: v for k, v in state.items() if "blocks" in k}}, strict=False
    ),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("how", LOADED)
def test_loading(how: str) -> None:
    """Values, what is returned, and how training goes on, also between two steps."""

    def scenario(twin: Twin) -> list[Any]:
        losses = twin.steps(0)
        state = twin.weights()
        losses += twin.steps(1)
        returned = LOADED[how](twin, copied(state))
        losses += twin.steps(2)
        twin.loss(features(3)).backward()
        LOADED[how](twin, state)
        twin.update()
        return [losses, returned and tuple(map(str, returned))]

    same(Blocks, scenario)


@pytest.mark.parametrize("how", ["manager", "model"])
def test_loading_scalars_buffers_and_tied_names(how: str, pair: tuple[Twin, Twin]) -> None:
    for twin in pair:
        state = copied(twin.weights() | {"_extra_state": {"note": "loaded"}})
        twin.steps(2)
        LOADED[how](twin, state | {"scale": torch.tensor([0.25]) if how == "model" else torch.tensor(0.25)})
        assert twin.model.note == "loaded"
        twin.steps(3)
    assert_equal(pair[1].left(), pair[0].left())


class ListOfMatrices(nn.Module):
    """One module holds them all, and never needs more than one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(8))
        self.blocks = nn.ModuleList(nn.Module() for _ in self.matrices)
        for block, index in zip(self.blocks, range(8), strict=True):
            block.forward = lambda x, index=index: torch.tanh(x @ self.matrices[index])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_loading_needs_no_more_room_than_training() -> None:
    def scenario(twin: Twin) -> list[float]:
        losses = twin.steps(0)
        state = twin.weights()
        losses += twin.steps(1)
        load_by_manager(twin, state)
        losses += twin.steps(2)
        twin.model.load_state_dict(state)
        return losses + twin.steps(3)

    assert same(ListOfMatrices, scenario) == 2 * 1024  # a weight and its gradient


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], list[str]]] = {
    "missing": (lambda s: {k: v for k, v in s.items() if "bias" not in k}, ["missing inner.bias", "blocks.2.0.bias"]),
    "unexpected": (lambda s: s | {"a": s["inner.bias"], "b": 1}, ["unexpected a, b"]),
    "shape": (
        lambda s: s | {"head.bias": torch.ones(5), "inner.weight": torch.ones(16)},
        [r"head.bias is (5,) instead of (4,)", "inner.weight is (16,) instead of (16, 16)"],
    ),
    "all of it": (
        lambda s: {"more": 1, **s, "inner.weight": torch.ones(1), "head.bias": None} | {},
        ["unexpected more", "inner.weight is (1,)", "head.bias is a NoneType"],
    ),
    "no mapping": (lambda s: list(s), ["a mapping of names to tensors, this is a list"]),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("case", WRONG)
def test_a_state_that_does_not_fit_changes_nothing(case: str, strict: bool) -> None:
    """Everything that is wrong is named; without `strict`, what is missing or unexpected is not wrong."""
    damage, named = WRONG[case]
    plain = Twin(None, Blocks)
    losses = plain.steps(0, 1)
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        assert twin.steps(0) == losses[:1]
        state = damage({key: value * 0 for key, value in twin.weights().items()})
        if case in ("missing", "unexpected") and not strict:
            assert manager.load_state_dict(state, strict=False) is not None
            return
        with pytest.raises(chunkmem.CheckpointError) as raised:
            manager.load_state_dict(state, strict=strict)
        for text in named if strict else named[-1:]:
            assert text in str(raised.value)
        assert twin.steps(1) == losses[1:]
        assert_equal(twin.left(), plain.left())


def test_the_error_of_torch_where_the_model_itself_is_asked() -> None:
    """`model.load_state_dict` is torch's: it loads what fits, and names the rest."""
    outcomes = []
    for manager in (None, chunkmem.ChunkManager(config(SMALL_NBYTES))):
        twin = Twin(manager, Blocks)
        state = {key: value + 1 for key, value in twin.weights().items() if key != "inner.bias"}
        state |= {"head.bias": torch.ones(7), "more": torch.ones(1)}
        with pytest.raises(RuntimeError) as raised:
            twin.model.load_state_dict(state)
        outcomes.append((str(raised.value), twin.weights(), twin.steps(0)))
    assert_equal(outcomes[1], outcomes[0])


def test_several_models() -> None:
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        with pytest.raises(chunkmem.StateError, match="has 0 models"):
            manager.state_dict()
        first, second = manager.wrap(mlp()), manager.wrap(Blocks())
        for call in (manager.state_dict, lambda: manager.load_state_dict({})):
            with pytest.raises(chunkmem.StateError, match=r"has 2 models; say which one is meant: model="):
                call()
        manager.load_state_dict({key: value * 2 for key, value in manager.state_dict(first).items()}, first)
        assert list(manager.state_dict(second)) == list(Blocks().state_dict())
        with pytest.raises(chunkmem.StateError, match="this Linear has no parameter of this manager"):
            manager.state_dict(nn.Linear(2, 2))
        with pytest.raises(chunkmem.StateError, match="this Linear has no parameter of this manager"):
            manager.load_state_dict({}, nn.Linear(2, 2), strict=False)


def test_moving_a_model_to_where_it_is_changes_nothing() -> None:
    """`nn.Module.to()` assigns each parameter to its own `.data`; the next update was taken for a write elsewhere."""

    def scenario(twin: Twin) -> list[Any]:
        losses = twin.steps(0)
        twin.model.to(compute_device())
        losses += twin.steps(1)
        twin.model.float()
        return losses + twin.steps(2)

    same(Blocks, scenario)


def test_what_data_returned_may_be_assigned_back() -> None:
    """Python does so for `weight.data += 1`. It is the parameter's own memory: what is written there counts."""

    def scenario(twin: Twin) -> list[Any]:
        losses = twin.steps(0)
        own = twin.model.blocks[0][0].weight.data
        twin.model.blocks[0][0].weight.data = own
        own += 0.5
        losses.append(twin.loss(features(9)).item())
        del own
        twin.model.head.weight.data *= 0.5
        return losses + twin.steps(1, 2)

    same(Blocks, scenario)


@pytest.mark.parametrize("whose", ["model", "module", "manager"])
def test_a_backward_of_a_graph_from_before_loading_raises_as_in_torch(whose: str) -> None:
    """Autograd notices by the version counters: without that, backward would mix activations and other weights."""

    def scenario(twin: Twin) -> None:
        twin.steps(0, 1)
        state = copied(twin.model.state_dict())
        loss = twin.loss(features(2))
        if whose == "manager" and twin.manager is not None:
            twin.manager.load_state_dict(state)
        elif whose == "module":
            twin.model.head.load_state_dict(copied(twin.model.head.state_dict()))
        else:
            twin.model.load_state_dict(state)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss
        twin.optimizer.zero_grad()
        twin.steps(3, 4)

    same(Blocks, scenario)
