"""Autocast around a managed model: the numbers, the copies of weights that are not kept, and torch's own settings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import chunkmem
from tests.helpers.training import (
    STEPS,
    VARIANTS,
    Chunked,
    Outcome,
    Plain,
    Side,
    Trainer,
    Variant,
    assert_same,
    capped,
    compute_device,
    footprint,
    repeats,
    train_chunked,
    train_plain,
)
from tests.helpers.twins import AMPLE_NBYTES, Twin, config, features
from tests.helpers.zoo import ZOO, Batch, ZooModel

pytestmark = pytest.mark.filterwarnings("ignore:a managed model was called inside torch.autocast")

WIDTH = 32
NUM_LAYERS = 4


def autocast(**options: Any) -> torch.autocast:
    return torch.autocast(compute_device().type, torch.bfloat16, **options)


# The numbers.


def inside(case: ZooModel, *, cache_enabled: bool) -> ZooModel:
    """The model with its forward and its loss under autocast."""

    def loss(model: Any, batch: Batch) -> Tensor:
        with autocast(cache_enabled=cache_enabled):
            return case.loss(model, batch)

    return replace(case, loss=loss)


RUNS_IN_BF16 = tuple(case for case in ZOO if case.name != "moe")
"""Not the experts: plain PyTorch cannot add their bf16 outputs to float32 under autocast either."""
CASES = [
    pytest.param(
        case,
        variant,
        id=f"{case.name}-{variant.name}",
        marks=[] if case.name in ("gpt", "cnn", "lstm", "reused") and variant.name == "plain" else [pytest.mark.full],
    )
    for case in RUNS_IN_BF16
    for variant in VARIANTS
    if variant.name in ("plain", "micro_batches", "evaluation", "checkpoint")
    and (case.has_blocks or variant.early_stop is None)
]


@pytest.fixture
def _composed_attention() -> Iterator[None]:
    """In evaluation torch takes fused kernels for layers without hooks, and autocast does not reach into those."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.few(1)
@pytest.mark.usefixtures("_composed_attention")
@pytest.mark.parametrize(("case", "variant"), CASES)
def test_training_is_that_of_plain_pytorch_without_the_cache(case: ZooModel, variant: Variant) -> None:
    plain = train_plain(inside(case, cache_enabled=False), variant)
    cached = inside(case, cache_enabled=True)
    ample = footprint(cached, variant)
    assert_same(ample.outcome, plain)
    assert_same(train_chunked(cached, variant, STEPS, capped(case, ample.required_nbytes)), plain)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gpt", "cnn", "reused"])
def test_training_inside_one_autocast(name: str) -> None:
    """Forward, backward and updates of all steps. With its cache, plain PyTorch would go on with the first weights."""
    (case,) = (case for case in ZOO if case.name == name)

    def train(side: Side, *, cache_enabled: bool) -> Outcome:
        trainer = Trainer(case, VARIANTS[0], side)
        with autocast(cache_enabled=cache_enabled):
            return trainer.run()

    plain = train(Plain(), cache_enabled=False)
    assert plain.losses != train_plain(case, VARIANTS[0]).losses
    assert plain.losses != train(Plain(), cache_enabled=True).losses
    required_nbytes = footprint(inside(case, cache_enabled=True), VARIANTS[0]).required_nbytes
    for device_nbytes in (8 * required_nbytes, required_nbytes):
        with chunkmem.ChunkManager(capped(case, device_nbytes)) as manager:
            assert_same(train(Chunked(manager, follows=repeats(case)), cache_enabled=True), plain)


# The copies.


class CastWeights(TorchDispatchMode):
    """Watches the copies in bf16 that are made of the layers' weights."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and result.dtype is torch.bfloat16
        if is_cast and result.shape == (WIDTH, WIDTH):
            self.made.append(StorageWeakRef(result.untyped_storage()))
        return result

    @property
    def num_live(self) -> int:
        return sum(not copy.expired() for copy in self.made)


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


def layers(kind: type[nn.Sequential] = nn.Sequential) -> nn.Module:
    """Layers whose weights `CastWeights` knows by their shape."""
    return nn.Sequential(*(kind(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)))


def managed_twin(build: Callable[[], nn.Module] = layers, **keys: Any) -> Twin:
    return Twin(chunkmem.ChunkManager(config(AMPLE_NBYTES, default_chunk_size=WIDTH * (WIDTH + 1), **keys)), build)


def x() -> Tensor:
    return features(1, shape=(8, WIDTH))


@pytest.mark.parametrize("managed", [False, True])
def test_no_copy_outlives_its_use(managed: bool) -> None:
    twin = managed_twin() if managed else Twin(None, layers)
    kept = 0 if managed else NUM_LAYERS  # what plain PyTorch keeps shows that the test would see it
    with CastWeights() as casts, autocast():
        with torch.no_grad():
            twin.loss(x())
        assert len(casts.made) == NUM_LAYERS
        assert casts.num_live == kept
        for _ in range(STEPS):
            loss = twin.loss(x())
            # For its backward, autograd holds the copies too. The first layer's input needs no gradient.
            assert casts.num_live == (NUM_LAYERS - 1 if managed else NUM_LAYERS)
            twin.backward(loss)
            assert casts.num_live == kept
            twin.update()
    assert casts.num_live == 0


def test_checkpoints_in_the_model_recompute_without_the_cache() -> None:
    twin = managed_twin(lambda: layers(Checkpointed))
    with CastWeights() as casts, autocast():
        for _ in range(STEPS):
            loss = twin.loss(x())
            assert casts.num_live == 0
            twin.backward(loss)
            assert casts.num_live == 0
            assert not torch.is_autocast_cache_enabled()
            twin.update()
    assert len(casts.made) == 2 * STEPS * NUM_LAYERS
    twin.backward(twin.loss(x()))
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("backward_inside", [False, True])
def test_a_checkpoint_around_the_model(backward_inside: bool) -> None:
    """It has noted that the cache is on, before the model is called. Its copies go with the region at the latest."""

    def train(twin: Twin, *, cache_enabled: bool) -> list[float]:
        losses = []
        for _ in range(STEPS):
            with CastWeights() as casts:
                with autocast(cache_enabled=cache_enabled):
                    loss = checkpoint(twin.model, x(), use_reentrant=False).square().mean()
                    if backward_inside:
                        twin.backward(loss)
                if not backward_inside:
                    twin.backward(loss)
            assert casts.num_live == 0
            assert torch.is_autocast_cache_enabled()
            twin.update()
            losses.append(loss.item())
        return losses

    assert train(managed_twin(), cache_enabled=True) == train(Twin(None, layers), cache_enabled=False)


# The warning.


@contextmanager
def told() -> Iterator[list[str]]:
    """What was warned of inside, whether or not it had been before."""
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(warning.message) for warning in caught if "autocast" in str(warning.message)]


def test_each_manager_warns_once() -> None:
    first, second = managed_twin(), managed_twin()
    with told() as messages:
        for _ in range(2):
            with autocast():
                first.step(x())
                first.step(x())
    (message,) = messages
    assert '"precision" to "bf16" or "fp16"' in message
    with told() as messages:
        for twin in (first, second):
            with autocast():
                twin.step(x())
    assert messages == [message]


def test_with_low_precision_the_warning_does_not_advise_it() -> None:
    twin = managed_twin(precision="bf16")
    with told() as messages, autocast():
        twin.step(x())
    (message,) = messages
    assert '"precision": "bf16" computes in low precision already' in message


@pytest.mark.parametrize("options", [{"cache_enabled": False}, {"enabled": False}])
def test_nothing_to_warn_of(options: dict[str, bool]) -> None:
    twin = managed_twin()
    with told() as messages:
        twin.step(x())
        with autocast(**options):
            before = torch.is_autocast_cache_enabled()
            twin.step(x())
            assert torch.is_autocast_cache_enabled() == before
    assert messages == []


# Torch's own settings.


def test_the_cache_is_on_again_after_the_region_and_after_an_error() -> None:
    twin = managed_twin()
    with autocast():
        assert torch.is_autocast_cache_enabled()
        twin.step(x())
        assert not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled()
    assert not torch.is_autocast_enabled(compute_device().type)
    with pytest.raises(RuntimeError, match="mat1 and mat2"), autocast():
        twin.model(torch.randn(2, WIDTH + 1, device=compute_device()))
    assert torch.is_autocast_cache_enabled()


def test_nested_regions() -> None:
    """An inner autocast puts back the setting of the outer one; the next call turns it off there too."""
    twin = managed_twin()

    def seen(**options: Any) -> tuple[bool, bool]:
        with autocast(**options):
            twin.step(x())
            inner = torch.is_autocast_cache_enabled()
        return inner, torch.is_autocast_cache_enabled()

    with autocast(), CastWeights() as casts:
        assert seen() == (False, True)
        assert seen(enabled=False) == (True, True)
        assert seen(cache_enabled=False) == (False, True)
        twin.step(x())
        assert seen() == (False, False)
        assert casts.num_live == 0
    assert torch.is_autocast_cache_enabled()


def test_what_was_cached_before_the_call_is_dropped() -> None:
    twin, plain = managed_twin(), Twin(None, layers)
    with CastWeights() as casts, autocast(), torch.no_grad():
        plain.loss(x())
        assert casts.num_live == NUM_LAYERS
        twin.loss(x())
        assert casts.num_live == 0
