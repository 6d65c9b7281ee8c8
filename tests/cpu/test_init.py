"""What `manager.init()`, `wrap` and `exclude` make of modules: the same values, names and ties as without them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import chunkmem
from tests.helpers.audit import audit
from tests.helpers.twins import SEED, WIDTH, Blocks, Twin, assert_equal, config, features, same

SMALL_NBYTES = 4 * 1024


class AppliesInit(Blocks):
    """Initialises itself at the end of its constructor, assigns parameters and fills them, ties, replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(WIDTH))
        nn.init.constant_(self.a, 5)
        weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.b = weight
        nn.init.normal_(weight)
        self.apply(self.reset)
        self.tail = nn.Linear(WIDTH, WIDTH)
        self.tail.weight = self.b
        self.blocks[0] = nn.Linear(WIDTH, WIDTH)
        self.inner.bias = nn.Parameter(torch.randn(WIDTH))
        del self.blocks[1][2]
        with torch.no_grad():
            self.tail.bias.copy_(self.a[:WIDTH])

    @staticmethod
    def reset(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            module.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.tail(x * self.a) @ self.b)


class Collections(Blocks):
    def __init__(self) -> None:
        super().__init__(num_blocks=1)
        self.listed = nn.ParameterList([torch.randn(WIDTH), nn.Parameter(torch.randn(WIDTH))])
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH), "b": torch.randn(WIDTH, WIDTH)})
        self.nested = nn.ModuleDict({"x": nn.ParameterList([torch.randn(WIDTH)])})

    def forward(self, x: Tensor) -> Tensor:
        for scale in (*self.listed, self.nested["x"][0], *(self.named[key] for key in ("a",))):
            x = x * scale
        return super().forward(x @ self.named["b"])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 8, num_layers=2, proj_size=4)
        self.gru = nn.GRU(4, 4, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(x)[0])[0]


class OldWeightNorm(Blocks):
    """Its weight is computed by a pre-forward hook, registered before packing."""

    def __init__(self) -> None:
        super().__init__(torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), num_blocks=1)
        self.head = torch.nn.utils.spectral_norm(self.head)


class NewWeightNorm(Blocks):
    """Its weight is a property of a class made on the way, from parameters of another module."""

    def __init__(self) -> None:
        super().__init__(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), num_blocks=1)
        parametrizations.orthogonal(self.head)
        parametrize.register_parametrization(self.inner, "weight", Symmetric())


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).t()


class Unusual(Blocks):
    """Parameters of other dtypes and of no or one element, strided ones, none at all."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1)
        frozen = {"requires_grad": False}
        self.count = nn.Parameter(torch.tensor([1, 2, 3]), **frozen)
        self.mask = nn.Parameter(torch.rand(WIDTH) > 0.3, **frozen)
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64), **frozen)
        self.small = nn.Parameter(torch.arange(5, dtype=torch.int8), **frozen)
        self.float16 = nn.Parameter(torch.randn(5, dtype=torch.float16), **frozen)
        self.empty = nn.Parameter(torch.randn(0, 3))
        self.scalar, self.single = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(1, 1, 1))
        self.columns = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2], **frozen)
        self.transposed = nn.Parameter(torch.randn(WIDTH, 4).t())
        self.register_parameter("none", None)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.mask * self.scalar * self.single[0, 0] + self.count.sum() * self.phase.abs().sum()
        x = x + self.small.sum() + self.float16.float().sum() + self.empty.sum()
        return super().forward(x @ self.columns) + (x @ self.columns)[:, :4] + self.transposed.t()[:4]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "applies init": (AppliesInit, (4, WIDTH)),
    "collections": (Collections, (4, WIDTH)),
    "recurrent": (Recurrent, (3, 2, WIDTH)),
    "old weight norm": (OldWeightNorm, (4, WIDTH)),
    "new weight norm": (NewWeightNorm, (4, WIDTH)),
    "unusual": (Unusual, (4, WIDTH)),
    "transformer": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.1), (3, 2, WIDTH)),
}


@pytest.mark.few(4)
@pytest.mark.filterwarnings("ignore:.*weight_norm|LSTM with projections")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_built_as_without_chunkmem(name: str) -> None:
    """Values, names, order, the identity of parameters, and the random numbers that come after; then it trains."""
    build, shape = MODELS[name]
    torch.manual_seed(SEED)
    plain = build()
    drawn = torch.rand(3)
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        torch.manual_seed(SEED)
        parameters: list[nn.Parameter] = []
        with manager.init():
            model = build()
            parameters += model.parameters()
        assert torch.equal(torch.rand(3), drawn)
        assert_equal(manager.state_dict(), plain.state_dict())
        assert type(model) is type(plain) or name == "new weight norm"
        names = [name for name, _ in plain.named_parameters(remove_duplicate=False)]
        assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        audit(manager)
    same(build, lambda twin: [twin.step(features(seed, shape=shape)) for seed in range(3)])


class Strided(nn.Module):
    def __init__(self, *, dense: bool) -> None:
        super().__init__()
        columns = torch.randn(WIDTH, 2 * WIDTH)[:, ::2]
        self.columns = nn.Parameter(columns.contiguous() if dense else columns)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.columns[:4]


def test_a_parameter_with_gaps_in_its_memory_trains_like_a_dense_one() -> None:
    """Not like torch: its fused kernel would write into the gaps."""
    plain = Twin(None, lambda: Strided(dense=True))
    losses = plain.steps(0, 1, 2)
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        twin = Twin(manager, lambda: Strided(dense=False))
        assert twin.steps(0, 1, 2) == losses
        assert_equal(twin.left(), plain.left())
