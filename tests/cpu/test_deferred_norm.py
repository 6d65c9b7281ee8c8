"""Running statistics of a mini-batch in micro-batches: those of `nn.BatchNorm` on the whole; nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import chunkmem
from chunkmem.data.errors import ConfigError
from chunkmem.pipeline.deferred_norm import DeferredStatistics

STEPS = 3
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
Call = Callable[..., Any]
CALLS: dict[str, Call] = {
    "plain": lambda function, x: function(x),
    "chunkmem": chunkmem.checkpoint,
    "non-reentrant": partial(torch_checkpoint, use_reentrant=False),
    "no early stop": partial(torch_checkpoint, use_reentrant=False, early_stop=False),
    "reentrant": partial(torch_checkpoint, use_reentrant=True),
}


def batches(shape: tuple[int, ...], *, mean: float = 0.0, std: float = 1.0) -> list[Tensor]:
    """Batches whose micro-batches have different means, so that variance within them is not all of it."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(STEPS, *shape, generator=generator)
    drift = torch.linspace(-1, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))
    return list(mean + std * (found + drift))


def net(channels: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.BatchNorm2d(channels, momentum=None),
    )


def step(model: nn.Module, parts: tuple[Tensor, ...], *, statistics: DeferredStatistics | None, call: Call) -> None:
    """Forward of all micro-batches, then backward, last in first out."""

    def forward() -> Iterator[Tensor]:
        for index, part in enumerate(parts):
            # A reentrant checkpoint has to be given something that needs a gradient.
            given = part.clone().requires_grad_()
            if statistics is None:
                yield call(model, given).square().mean()
            else:
                with statistics.micro_batch(index):
                    yield call(model, given).square().mean()

    for loss in reversed(list(forward())):
        loss.backward()


def assert_close(layer: nn.Module, expected: nn.Module) -> None:
    """Running statistics differ by 1e-6 of their size at most."""
    for name in BUFFERS:
        torch.testing.assert_close(getattr(layer, name), getattr(expected, name), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_parts", [1, 2, 5])
@pytest.mark.parametrize("momentum", [0.1, 0.37, 1.0, 0.0, None])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.BatchNorm1d, (12, 4)),
        (nn.BatchNorm1d, (12, 4, 5)),
        (nn.BatchNorm2d, (13, 4, 3, 5)),
        (nn.BatchNorm3d, (9, 4, 2, 3, 2)),
    ],
)
def test_statistics_are_those_of_the_whole_batch(
    kind: type[nn.BatchNorm1d], shape: tuple[int, ...], momentum: float | None, num_parts: int
) -> None:
    layer, expected = kind(4, momentum=momentum), kind(4, momentum=momentum)
    statistics = DeferredStatistics([layer])
    for x in batches(shape):
        with statistics.mini_batch():
            step(layer, x.chunk(num_parts), statistics=statistics, call=CALLS["plain"])
        expected(x)
        assert_close(layer, expected)


@pytest.mark.parametrize(("mean", "std"), [(1e3, 1e-2), (1e4, 1.0), (-3e5, 1.0), (1e-3, 1e-6)])
def test_variances_survive_a_large_mean(mean: float, std: float) -> None:
    layer, expected = nn.BatchNorm2d(64), nn.BatchNorm2d(64).double()
    statistics = DeferredStatistics([layer])
    for x in batches((16, 64, 3, 3), mean=mean, std=std):
        with statistics.mini_batch():
            step(layer, x.chunk(8), statistics=statistics, call=CALLS["plain"])
        expected(x.double())
    torch.testing.assert_close(layer.running_var, expected.running_var.float(), rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(layer.running_mean, expected.running_mean.float(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("call", CALLS)
def test_only_running_statistics_change(call: str) -> None:
    """Weights, gradients and outputs keep their bits; each layer gets the statistics of what it was given in all."""
    plain, model = net(), net()
    given: dict[str, list[Tensor]] = {"1": [], "4": []}
    for name in given:
        plain[int(name)].register_forward_pre_hook(lambda _, args, name=name: given[name].append(args[0].detach()))
    whole = copy.deepcopy(net())
    statistics = DeferredStatistics([model])
    keys, classes = list(model.state_dict()), [type(module) for module in model]
    optimizers = [torch.optim.Adam(each.parameters()) for each in (plain, model)]
    for x in batches((7, 3, 6, 6)):
        step(plain, x.chunk(3), statistics=None, call=CALLS["plain"])
        with statistics.mini_batch():
            step(model, x.chunk(3), statistics=statistics, call=CALLS[call])
        for name, inputs in given.items():
            whole[int(name)](torch.cat(inputs))
            inputs.clear()
            assert_close(model[int(name)], whole[int(name)])
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert [int(model[at].num_batches_tracked) for at in (1, 4)] == [STEPS, STEPS]
    assert not torch.equal(plain[1].running_var, model[1].running_var)
    assert list(model.state_dict()) == keys
    assert [type(module) for module in model] == classes
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model)


@pytest.mark.parametrize("call", CALLS)
def test_backward_of_a_micro_batch_right_after_its_forward(call: str) -> None:
    """As in an accumulating loop, or 1F1B: recomputations happen while a micro-batch is under way."""
    model, expected = net(), net()
    statistics, of_expected = DeferredStatistics([model]), DeferredStatistics([expected])
    (x, *_) = batches((7, 3, 6, 6))
    with statistics.mini_batch():
        for index, part in enumerate(x.chunk(3)):
            with statistics.micro_batch(index):
                CALLS[call](model, part.requires_grad_()).sum().backward()
    with of_expected.mini_batch():
        step(expected, x.chunk(3), statistics=of_expected, call=CALLS["plain"])
    assert all(torch.equal(value, expected.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_mini_batch_leaves_nothing(at: int, error: type[BaseException]) -> None:
    """Wherever it stops: between layers, in a layer's call, in backward."""
    model, expected = net(), net()
    statistics = DeferredStatistics([model])
    (x, *_) = batches((6, 3, 6, 6))
    before = {key: value.clone() for key, value in model.state_dict().items()}

    class Interrupted(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is F.batch_norm:
                raise error("in a layer's call")
            return function(*args, **(kwargs or {}))

    with pytest.raises(error), statistics.mini_batch():
        step(model, x.chunk(3)[:1], statistics=statistics, call=CALLS["plain"])
        if at == 0:
            raise error("between layers")
        if at == 1:
            with Interrupted():
                step(model, x.chunk(3)[1:], statistics=statistics, call=CALLS["plain"])
        loss = model(x).sum()
        loss.register_hook(partial(_raise, error))
        loss.backward()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [model[i].momentum for i in (1, 4)] == [0.1, None]
    model.zero_grad()
    for each, own in ((model, statistics), (expected, DeferredStatistics([expected]))):
        with own.mini_batch():
            step(each, x.chunk(3), statistics=own, call=CALLS["plain"])
    assert all(torch.equal(value, expected.state_dict()[key]) for key, value in model.state_dict().items())


def _raise(error: type[BaseException], _: Tensor) -> None:
    raise error("in backward")


def test_layers_in_evaluation_and_without_statistics_are_left_alone() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False), nn.BatchNorm1d(3))
    model[0].eval()
    (x, *_) = batches((8, 3))
    model[0].running_mean.fill_(0.5)
    statistics = DeferredStatistics([model])
    with statistics.mini_batch():
        step(model, x.chunk(2), statistics=statistics, call=CALLS["plain"])
    assert [int(model[0].num_batches_tracked), int(model[2].num_batches_tracked)] == [0, 1]
    assert torch.equal(model[0].running_mean, torch.full((3,), 0.5))
    assert model[1].running_mean is None
    model(x)  # outside of a mini-batch: counted as ever
    assert int(model[2].num_batches_tracked) == 2


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_shared_layer_has_the_statistics_of_each_of_its_calls(by_layer: bool) -> None:
    """As on the whole batch: one update for each call, in their order."""
    layer, expected = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    (x, *_) = batches((8, 3), mean=2.0)
    statistics = DeferredStatistics([nn.Sequential(layer), nn.Sequential(layer)])
    parts = x.chunk(3)
    order = [(index, call) for index in range(3) for call in range(2)]
    with statistics.mini_batch():
        for index, call in sorted(order, key=lambda each: each[1]) if by_layer else order:
            with statistics.micro_batch(index):
                layer(parts[index] * (1 + call))
    expected(x)
    expected(2 * x)
    assert_close(layer, expected)


def test_a_short_mini_batch_counts_as_one() -> None:
    layer, expected = nn.BatchNorm1d(3, momentum=None), nn.BatchNorm1d(3, momentum=None)
    statistics = DeferredStatistics([layer])
    for x in (batches((16, 3))[0], batches((3, 3))[1], batches((5, 3))[2]):
        with statistics.mini_batch():
            step(layer, x.chunk(4) if len(x) > 5 else x.chunk(1), statistics=statistics, call=CALLS["plain"])
        expected(x)
        assert_close(layer, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_with_statistics_in_float32(dtype: torch.dtype) -> None:
    layer, expected = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    statistics = DeferredStatistics([layer])
    for x in batches((16, 3), mean=20.0):
        with statistics.mini_batch():
            step(layer, x.to(dtype).chunk(4), statistics=statistics, call=CALLS["plain"])
        expected(x.to(dtype).float())
    assert_close(layer, expected)


def test_sync_batch_norm_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4))
    with pytest.raises(ConfigError, match="deferred_batch_norm: 1 is a SyncBatchNorm, which exchanges its statistics"):
        DeferredStatistics([model])


class Blocks(nn.Module):
    """Two blocks, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([net(3), net(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_a_managed_model(policy: str) -> None:
    """Under a manager that recomputes blocks in backward, buffers are those of a model without one, to the bit."""
    config = chunkmem.Config.from_dict(
        {
            "memory": {"device": "1MiB", "host": "8MiB"},
            "default_chunk_size": 256,
            "activations": {"policy": policy},
        }
    )

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[Tensor], object]) -> None:
        statistics = DeferredStatistics([model])
        for x in batches((6, 3, 6, 6)):
            with statistics.mini_batch():
                for index, part in enumerate(x.chunk(3)):
                    with statistics.micro_batch(index):
                        loss = model(part)
                    backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    plain = Blocks()
    train(plain, torch.optim.Adam(plain.parameters(), lr=1e-3, fused=True), Tensor.backward)
    with chunkmem.ChunkManager(config) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Blocks()
        train(model, chunkmem.Adam(model.parameters(), lr=1e-3, manager=manager), manager.backward)
        state = manager.state_dict(model)
    assert all(torch.equal(value, state[key]) for key, value in plain.state_dict().items())
