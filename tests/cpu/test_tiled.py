"""`TiledLinear` in plain PyTorch: the layer that `nn.Linear` is, in pieces."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem import TiledLinear
from tests.helpers.twins import assert_equal

SPLITS = [(1, 1), (1, 4), (4, 1), (2, 2), (3, 5), (7, 10), (10, 7)]
"""Of an input of 10 features and an output of 14."""
IN, OUT = 10, 14


def pair(in_splits: int = 3, out_splits: int = 5, **options: Any) -> tuple[nn.Linear, TiledLinear]:
    """The untiled layer and the tiled one, of the same seed."""
    torch.manual_seed(0)
    plain = nn.Linear(IN, OUT, **options)
    torch.manual_seed(0)
    return plain, TiledLinear(IN, OUT, in_splits=in_splits, out_splits=out_splits, **options)


def tiles(whole: Tensor, in_splits: int, out_splits: int) -> list[Tensor]:
    return [part for row in whole.tensor_split(out_splits) for part in row.tensor_split(in_splits, dim=1)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_splits", "out_splits"), SPLITS)
def test_it_has_the_numbers_names_and_shapes_of_a_linear(in_splits: int, out_splits: int, bias: bool) -> None:
    plain, tiled = pair(in_splits, out_splits, bias=bias)
    expected, state = plain.state_dict(), tiled.state_dict()
    assert_equal(state, expected)
    assert state._metadata == expected._metadata
    weights = [param for name, param in tiled.named_parameters() if name.endswith("weight")]
    assert_equal(weights, tiles(plain.weight, in_splits, out_splits))
    assert sum(param.numel() for param in tiled.parameters()) == sum(param.numel() for param in plain.parameters())
    assert all(type(param) is nn.Parameter and param.is_contiguous() for param in tiled.parameters())
    # No tile keeps the whole alive.
    assert all(param.untyped_storage().nbytes() == param.nbytes for param in tiled.parameters())


def test_the_next_random_number_is_the_same() -> None:
    numbers = []
    for make in (nn.Linear, lambda *sizes: TiledLinear(*sizes, in_splits=2, out_splits=2)):
        torch.manual_seed(0)
        make(IN, OUT)
        numbers.append(torch.rand(3))
    assert torch.equal(*numbers)


def trained(layer: nn.Module, x: Tensor, steps: int = 10) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    losses = []
    for _ in range(steps):
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, layer.state_dict()


@pytest.mark.parametrize("shape", [(IN,), (5, IN), (2, 3, IN), (0, IN), (2, 0, IN)])
@pytest.mark.parametrize(("in_splits", "out_splits"), SPLITS)
def test_it_computes_what_a_linear_does(in_splits: int, out_splits: int, shape: tuple[int, ...]) -> None:
    plain, tiled = pair(in_splits, out_splits)
    x, y = (torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    expected, actual = plain(x), tiled(y)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    expected.square().sum().backward()
    actual.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("in_splits", "out_splits"), SPLITS)
def test_ten_steps_are_within_a_millionth_of_a_linear(in_splits: int, out_splits: int) -> None:
    plain, tiled = pair(in_splits, out_splits)
    x = torch.randn(8, IN, generator=torch.Generator().manual_seed(1))
    (losses, state), (tiled_losses, tiled_state) = trained(plain, x), trained(tiled, x)
    torch.testing.assert_close(tiled_losses, losses, rtol=1e-6, atol=1e-6)
    for name in state:
        # Adam divides by the size of a gradient, so an error of a gradient near zero counts with the learning rate.
        torch.testing.assert_close(tiled_state[name], state[name], rtol=1e-6, atol=1e-6)


def test_one_tile_is_a_linear_to_the_bit() -> None:
    plain, tiled = pair(1, 1)
    x = torch.randn(8, IN)
    assert_equal(trained(tiled, x), trained(plain, x))


@pytest.mark.parametrize(
    ("in_splits", "out_splits"), [(0, 1), (1, 0), (IN + 1, 1), (1, OUT + 1), (-1, 1), (True, 1), (1, 2.0), (None, 1)]
)
def test_splits_that_cannot_be(in_splits: Any, out_splits: Any) -> None:
    name = "in" if in_splits != 1 or in_splits is True else "out"
    with pytest.raises(chunkmem.LayoutError, match=rf"^{name}_splits is .*; it is a number of tiles, from 1 "):
        TiledLinear(IN, OUT, in_splits=in_splits, out_splits=out_splits)


def test_splits_are_given_by_name() -> None:
    with pytest.raises(TypeError):
        TiledLinear(IN, OUT, True, 2, 2)  # type: ignore[misc]


def test_what_is_printed() -> None:
    lines = str(pair(2, 1, bias=False)[1]).splitlines()
    assert lines == [
        "TiledLinear(",
        f"  in_features={IN}, out_features={OUT}, bias=False, in_splits=2, out_splits=1",
        f"  (tile_0_0): Linear(in_features=5, out_features={OUT}, bias=False)",
        f"  (tile_0_1): Linear(in_features=5, out_features={OUT}, bias=False)",
        ")",
    ]


# Where it is made.


def test_device_and_dtype() -> None:
    plain, tiled = pair(dtype=torch.float64)
    assert_equal(tiled.state_dict(), plain.state_dict())
    made = TiledLinear(IN, OUT, in_splits=2, device="meta")
    assert {param.device.type for param in made.parameters()} == {"meta"}
    with torch.device("meta"):
        made = TiledLinear(IN, OUT, out_splits=2)
    assert {param.device.type for param in made.parameters()} == {"meta"}


def test_it_is_materialised_as_a_linear_is() -> None:
    plain, tiled = (layer.to_empty(device="cpu") for layer in pair(device="meta"))
    for layer in (plain, tiled):
        torch.manual_seed(3)
        layer.reset_parameters()
    assert_equal(tiled.state_dict(), plain.state_dict())
    torch.manual_seed(3)
    skipped = torch.nn.utils.skip_init(TiledLinear, IN, OUT, in_splits=2)
    assert {param.device.type for param in skipped.parameters()} == {"cpu"}


# Its state.


def saved(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def stack(layer: Callable[[], nn.Module]) -> nn.Module:
    """Below other modules, one of whom it is twice."""
    model = nn.Sequential(nn.Linear(4, IN), layer(), nn.ReLU())
    model.append(nn.ModuleDict({"again": model[1]}))
    return model


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("source", "target"), [("plain", "tiled"), ("tiled", "plain"), ("tiled", "tiled")])
def test_states_are_exchanged_with_the_untiled_layer(source: str, target: str, assign: bool) -> None:
    build = {
        "plain": lambda: nn.Linear(IN, OUT),
        "tiled": lambda: TiledLinear(IN, OUT, in_splits=3, out_splits=4),
    }
    first, second = stack(build[source]), stack(build[target])
    given = first.state_dict()
    before = saved(first)
    assert str(second.load_state_dict(given, assign=assign)) == "<All keys matched successfully>"
    assert_equal(saved(second), before)
    assert list(given) == list(before), "what is loaded is only read"
    if target == "tiled":
        assert all(param.untyped_storage().nbytes() == param.nbytes for param in second[1].parameters())
        assert all(param.requires_grad for param in second.parameters())


def test_prefixes_and_variables() -> None:
    plain, tiled = pair()
    assert_equal(tiled.state_dict(prefix="a.b."), plain.state_dict(prefix="a.b."))
    state = tiled.state_dict(keep_vars=True)
    state["weight"].sum().backward()
    assert all(bool((param.grad == 1).all()) for name, param in tiled.named_parameters() if "weight" in name)


def test_what_does_not_fit_is_said_of_the_whole() -> None:
    model, plain = stack(lambda: pair()[1]), stack(lambda: nn.Linear(IN, OUT))
    right = saved(plain)
    before = saved(model)
    cases: list[dict[str, Any]] = [
        {key: value for key, value in right.items() if key != "1.weight"},
        {key: value for key, value in right.items() if not key.startswith("1.")},
        right | {"1.weight": torch.ones(OUT, IN + 1)},
        right | {"1.bias": torch.ones(OUT, 1)},
        right | {"1.gain": torch.ones(1), "2.weight": torch.ones(1)},
    ]
    for case in cases:
        messages = []
        for each in (plain, model):
            with pytest.raises(RuntimeError) as error:
                each.load_state_dict(case)
            messages.append(str(error.value))
            if "size" not in messages[0]:
                assert str(each.load_state_dict(case, strict=False))
        assert messages[1] == messages[0].replace(type(plain).__name__, type(model).__name__)
        missing = [each.load_state_dict({}, strict=False).missing_keys for each in (plain, model)]
        assert missing[0] == missing[1]
    with pytest.raises(RuntimeError, match=r"1\.weight is a list, not a tensor"):
        model.load_state_dict(right | {"1.weight": [1.0]})
    model.load_state_dict(before)
    assert_equal(saved(model), before)


def test_entries_by_tile_are_loaded_too() -> None:
    _, tiled = pair()
    given = {name: torch.full_like(param, 2.0) for name, param in tiled.named_parameters()}
    tiled.load_state_dict(given)
    assert all(bool((value == 2).all()) for value in tiled.state_dict().values())


def test_hooks_of_the_user_see_the_whole() -> None:
    _, tiled = pair()
    seen: list[str] = []
    tiled.register_state_dict_post_hook(lambda _module, state, _prefix, _meta: seen.extend(state))
    tiled.state_dict()
    assert seen == ["weight", "bias"]


# The whole weight, for those who ask for it.


def test_the_whole_weight_is_read_like_a_parameter() -> None:
    """Other code asks a layer for its dtype (T5), or computes with its weight (attention)."""
    plain, tiled = pair()
    for whole, param in ((tiled.weight, plain.weight), (tiled.bias, plain.bias)):
        assert isinstance(whole, torch.Tensor)
        assert (whole.shape, whole.dtype, whole.device) == (param.shape, param.dtype, param.device)
        assert (whole.requires_grad, whole.numel(), len(whole), whole.ndim) == (True, param.numel(), OUT, param.ndim)
        assert torch.equal(whole, param)
        assert_equal(
            [whole.norm(), whole[1:3], whole.t(), whole.detach().clone()], [param.norm(), param[1:3], param.t(), param]
        )
        assert str(whole.detach().clone()) == str(param.detach())
    assert pair(bias=False)[1].bias is None
    x = torch.randn(3, IN)
    for layer in (plain, tiled):
        nn.functional.linear(x, layer.weight, layer.bias).square().sum().backward()
    grads = torch.cat([param.grad.flatten() for param in tiled.parameters()])
    assert grads.sort().values.allclose(torch.cat([p.grad.flatten() for p in plain.parameters()]).sort().values)


WRITES: dict[str, Callable[[TiledLinear], Any]] = {
    "init": lambda layer: nn.init.xavier_uniform_(layer.weight),
    "trunc_normal_": lambda layer: nn.init.trunc_normal_(layer.weight),
    "data": lambda layer: layer.weight.data.normal_(),
    "detach": lambda layer: layer.weight.detach().zero_(),
    "copy_": lambda layer: layer.weight.copy_(torch.ones(OUT, IN)),
    "item": lambda layer: layer.weight.__setitem__(0, 1.0),
    "assigned data": lambda layer: setattr(layer.weight, "data", torch.ones(OUT, IN)),
    "assigned grad": lambda layer: setattr(layer.weight, "grad", torch.ones(OUT, IN)),
    "+=": lambda layer: layer.weight.__iadd__(1),
    "out": lambda layer: torch.add(torch.ones(OUT, IN), 1, out=layer.weight),
    "bias": lambda layer: layer.bias.zero_(),  # type: ignore[union-attr]
    "requires_grad_": lambda layer: layer.weight.requires_grad_(False),
    "hook": lambda layer: layer.weight.register_hook(lambda grad: grad),
    "address": lambda layer: layer.weight.data_ptr(),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_write_to_the_whole_weight_is_refused(how: str) -> None:
    """It would be lost."""
    _, tiled = pair()
    before = saved(tiled)
    with (
        torch.no_grad(),
        pytest.raises(chunkmem.StateError, match="of a tiled layer's weight or bias, which is a copy"),
    ):
        WRITES[how](tiled)
    assert_equal(saved(tiled), before)


def test_the_whole_weight_cannot_be_replaced() -> None:
    _, tiled = pair()
    with pytest.raises(KeyError):
        tiled.weight = nn.Parameter(torch.ones(OUT, IN))  # type: ignore[misc]
    with pytest.raises(AttributeError):
        tiled.weight = torch.ones(OUT, IN)  # type: ignore[misc]
    for wrap in (torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.parametrizations.orthogonal):
        with pytest.raises((ValueError, RuntimeError, KeyError)):
            wrap(tiled)
    assert not tiled._parameters


def test_checkpoints_of_torch_distributed() -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    plain, tiled = stack(lambda: nn.Linear(IN, OUT)), stack(lambda: pair()[1])
    tiled.load_state_dict(plain.state_dict())
    assert_equal(get_model_state_dict(tiled), get_model_state_dict(plain))
    zeros = {key: torch.zeros_like(value) for key, value in plain.state_dict().items()}
    set_model_state_dict(tiled, zeros)
    assert_equal(saved(tiled), zeros)


# A hostile user.


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(how: str) -> None:
    model = stack(lambda: pair()[1])
    if how == "deepcopy":
        copied = copy.deepcopy(model)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        copied = torch.load(buffer, weights_only=False)
    before = saved(model)
    with torch.no_grad():
        for param in copied.parameters():
            param.add_(1)
    assert_equal(saved(model), before)
    assert_equal(saved(copied), {key: value + 1 for key, value in before.items()})
    copied.load_state_dict(before)
    assert_equal(saved(copied), before)
    assert copied.load_state_dict({}, strict=False).missing_keys == list(before)


def test_conversions() -> None:
    plain, tiled = pair()
    assert_equal(tiled.double().state_dict(), plain.double().state_dict())
    assert_equal(tiled.bfloat16().state_dict(), plain.bfloat16().state_dict())


class Adapter(nn.Module):
    """Wraps a layer, as adapters of low rank do."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.up(self.down(x))


def test_a_wrapped_layer() -> None:
    plain, tiled = pair()
    torch.manual_seed(5)
    first = Adapter(plain)
    torch.manual_seed(5)
    second = Adapter(tiled)
    assert_equal(second.state_dict(), first.state_dict())


def test_a_wrapped_tile_keeps_its_own_names() -> None:
    _, tiled = pair()
    tiled.tile_0_0 = Adapter(tiled.tile_0_0)
    state = tiled.state_dict()
    assert state.keys() > {"tile_0_0.base.weight", "tile_1_0.weight"}
    assert "weight" not in state
    tiled.load_state_dict(state)
    assert tiled(torch.ones(2, IN)).shape == (2, OUT)
    assert not hasattr(tiled, "weight")


def test_a_parametrized_tile() -> None:
    _, tiled = pair()
    torch.nn.utils.parametrizations.weight_norm(tiled.tile_0_0)
    tiled.load_state_dict(tiled.state_dict())
    assert tiled(torch.ones(2, IN)).shape == (2, OUT)


@pytest.mark.filterwarnings("ignore")
def test_compiled_by_dynamo() -> None:
    _, tiled = pair()
    compiled = torch.compile(tiled, backend="eager", fullgraph=True)
    x = torch.randn(4, IN)
    assert torch.equal(compiled(x), tiled(x))


def test_vmap_and_functional_call() -> None:
    _, tiled = pair()
    x = torch.randn(3, 4, IN)
    torch.testing.assert_close(torch.func.vmap(tiled)(x), tiled(x))
    zeros = {name: torch.zeros_like(param) for name, param in tiled.named_parameters()}
    assert not torch.func.functional_call(tiled, zeros, (x,)).any()


def test_it_is_where_users_look_for_it() -> None:
    program = (
        "import sys, chunkmem\n"
        "assert 'torch' not in sys.modules\n"
        "layer = chunkmem.nn.TiledLinear(4, 4, in_splits=2, out_splits=2)\n"
        "from chunkmem import TiledLinear\n"
        "assert type(layer) is TiledLinear is chunkmem.TiledLinear"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
