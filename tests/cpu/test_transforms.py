"""What reads a model's code or wraps its parameters in place of calling it: refused by name, and training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

import chunkmem
from tests.helpers.twins import CHUNK_NUMEL, Blocks, Twin, assert_equal, config, cpu_only, features

CAP_NBYTES = 5 * 4 * CHUNK_NUMEL
Model = Callable[[Tensor], Tensor]
pytestmark = cpu_only


def loss_of(model: Model) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().mean()


def of_weights(model: nn.Module) -> Any:
    params = dict(model.named_parameters())
    return torch.func.grad(lambda params: functional_call(model, params, (features(),)).square().mean())(params)


COMPILED = r"is managed and runs inside of torch.compile, .*; compile the model by manager.compile\(model\), and call"
WRAPPED = (
    r"^parameter inner.weight is read inside of a transform of torch.func .*functional_call\(model, weights, inputs\)"
)
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "compile a step": (lambda model: torch.compile(loss_of(model), backend="eager")(features()), f"^Blocks {COMPILED}"),
    "grad": (lambda model: torch.func.grad(loss_of(model))(features()), WRAPPED),
    "vjp": (lambda model: torch.func.vjp(model, features()), WRAPPED),
    "jvp": (lambda model: torch.func.jvp(model, (features(),), (features(1),)), WRAPPED),
    "jacrev": (lambda model: torch.func.jacrev(model)(features()), WRAPPED),
    "jacfwd": (lambda model: torch.func.jacfwd(model)(features()), WRAPPED),
    "hessian": (lambda model: torch.func.hessian(loss_of(model))(features()), WRAPPED),
    "grad of an operator": (
        lambda model: torch.func.grad(lambda x: (x @ model.inner.weight).sum())(features()),
        WRAPPED,
    ),
    "grad of weights": (of_weights, r"^parameter inner.weight itself was given to a transform of torch.func; give it"),
    "script": (torch.jit.script, r"^parameter inner.weight \(16, 16\) is managed: torch.jit.script would keep it"),
    "trace": (lambda model: torch.jit.trace(model, features()), r"torch.jit.trace keeps the parameters themselves"),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_and_training_goes_on(name: str, after: int) -> None:
    """Before the first step, and when plans are followed. It was an AssertionError of torch's compiler, or NaN."""
    use, message = REFUSED[name]
    plain = Twin(None, Blocks)
    losses = plain.steps(0, 1, 2, 3)
    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        assert twin.steps(*range(after)) == losses[:after]
        torch._dynamo.reset()
        with pytest.raises(chunkmem.StateError, match=message):
            use(twin.model)
        assert twin.steps(*range(after, 4)) == losses[after:]
        assert_equal(twin.left(), plain.left())


def test_the_compiler_asked_for_the_whole_graph_says_why_not() -> None:
    torch._dynamo.reset()
    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        model = Twin(manager, Blocks).model
        # torch 2.11 says of what kind each argument of the error is, too.
        message = rf"StateError\((\(ConstantVariable\(str: )?'Blocks {COMPILED}"
        with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
            torch.compile(loss_of(model), backend="eager", fullgraph=True)(features())


def jacobian(model: Any) -> Any:
    return torch.autograd.functional.jacobian(model, features(), vectorize=True)


def batched(model: Any) -> Any:
    with torch.no_grad():
        return torch.func.vmap(model)(features())


def per_sample(model: Any) -> Any:
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, weights, (x[None],)).square().mean()

    return torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, features())


def compiled_inside(model: Any) -> Any:
    return torch.compile(lambda x: torch.tanh(x) * 2, backend="eager")(model(features())).detach()


@pytest.mark.parametrize("use", [jacobian, batched, per_sample, compiled_inside], ids=lambda use: use.__name__)
def test_what_the_errors_advise_works(use: Callable[[Any], Any]) -> None:
    plain = Twin(None, Blocks)
    expected = [use(plain.model), plain.steps(0, 1), use(plain.model), plain.steps(2)]
    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        assert_equal([use(twin.model), twin.steps(0, 1), use(twin.model), twin.steps(2)], expected)
        assert_equal(twin.left(), plain.left())


@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(16), lambda: nn.GroupNorm(2, 16), lambda: nn.BatchNorm1d(16)])
def test_forward_mode_ad_through_norms(norm: Callable[[], nn.Module]) -> None:
    """Under a dispatch mode, as recorded steps have one, torch's formulas take another way: other last bits."""

    def scenario(twin: Twin) -> Any:
        seen = []
        for seed in range(4):
            with forward_ad.dual_level(), torch.no_grad():
                out = twin.model(forward_ad.make_dual(features(seed), features(seed + 1)))
                seen += list(forward_ad.unpack_dual(out))
            seen += twin.steps(seed)
        return seen

    def build() -> nn.Module:
        return Blocks(norm(), num_blocks=2)

    with chunkmem.ChunkManager(config(CAP_NBYTES)) as manager:
        assert_equal(scenario(Twin(manager, build)), scenario(Twin(None, build)))
