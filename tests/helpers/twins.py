"""The same calls on the same model, in plain PyTorch and in chunkmem, and what they leave compared bit for bit."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

import chunkmem
from tests.helpers.audit import audit
from tests.helpers.training import compute_device

SEED = 11
WIDTH = 16
CHUNK_NUMEL = 256
"""Small, so that the models of a few thousand parameters in these tests take a dozen chunks."""
AMPLE_NBYTES = 8 << 20

cpu_only = pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator's cap covers activations too")
"""For tests that know every byte, or look at memory as only a CPU can."""
without_accelerator = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="is about machines without an accelerator"
)
OTHER_BITS = (
    "on HOST, torch's operators have other last bits than on an accelerator: of fused Adam alone chunkmem has both"
)
cpu_bits_only = pytest.mark.skipif(torch.accelerator.is_available(), reason=OTHER_BITS)
"""For what compares the bits of other optimizers with torch's on one device; tests/cpu/test_zoo.py has any class."""


class Blocks(nn.Module):
    """A few layers: by default about eleven chunks, of which a step reads one or two at a time."""

    def __init__(self, *blocks: nn.Module, num_blocks: int = 3) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([*blocks, *(mlp() for _ in range(num_blocks))])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Weighted(nn.Module):
    """Reads its own weight, so that nothing but its output tells when backward comes to it."""

    def __init__(self, wrap: Callable[[Tensor], Any] = lambda out: out) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.wrap = wrap

    def compute(self, x: Tensor) -> Tensor:
        # The weight itself and a view of it are saved for backward.
        return torch.tanh(x @ F.softplus(self.weight) + x @ self.weight.t())

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.compute(x))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def features(seed: int = 0, *, shape: tuple[int, ...] = (4, 16)) -> Tensor:
    """A batch on the compute device, a function of the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(compute_device())


class Twin:
    """A model and its optimizer, with the calls that differ between plain PyTorch (no manager) and chunkmem."""

    def __init__(self, manager: chunkmem.ChunkManager | None, build: Callable[[], nn.Module], **options: Any) -> None:
        self.manager = manager
        torch.manual_seed(SEED)
        with nullcontext() if manager is None else manager.init():
            self.model: Any = build()
        if manager is None:
            self.model.to(compute_device())
        options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1} | options
        options["lr"] = options["lr"]() if callable(options["lr"]) else options["lr"]
        kind = options.pop("kind", "AdamW")
        params = options.pop("params", lambda model: model.parameters())(self.model)
        self.optimizer: Any = self.make(kind, params, **options)

    def make(self, kind: str, params: Any, **options: Any) -> Any:
        """Make another optimizer of a class that torch and chunkmem name alike."""
        if self.manager is None:
            options.pop("max_grad_norm", None)
            return getattr(torch.optim, kind)(params, fused=True, **options)
        return getattr(chunkmem, kind)(params, manager=self.manager, **options)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """`loss.backward()`, under chunkmem with its check of undeclared reads."""
        if self.manager is None:
            loss.backward(**kwargs)
        else:
            self.manager.backward(loss, **kwargs)

    def update(self) -> None:
        """`step()` and `zero_grad()`, and then nothing may be pinned or unaccounted for."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.manager is not None:
            audit(self.manager)

    def loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """The mean squared output of the model."""
        return self.model(*args, **kwargs).square().mean()

    def step(self, *args: Any, **kwargs: Any) -> float:
        """One ordinary training step; the loss."""
        loss = self.loss(*args, **kwargs)
        loss.backward()
        self.update()
        return loss.item()

    def steps(self, *seeds: int, **kwargs: Any) -> list[float]:
        """A step on `features(seed)` for each seed; the losses."""
        return [self.step(features(seed), **kwargs) for seed in seeds]

    def train(self) -> list[float]:
        """Three steps, by both ways of starting a backward; the first is checked for undeclared reads."""
        loss = self.loss(features(0))
        self.backward(loss)
        self.update()
        return [loss.item(), *self.steps(1, 2)]

    def clip(self, max_norm: float) -> Tensor:
        """Clip all gradients by their global norm; the norm before."""
        if self.manager is None:
            return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        return self.optimizer.clip_grad_norm_(max_norm)

    def weights(self) -> dict[str, Tensor]:
        """Copies of all values by name."""
        return copied(self.model.state_dict() if self.manager is None else self.manager.state_dict(self.model))

    def left(self) -> dict[str, Any]:
        """All that training has made of the model and its optimizer."""
        states = self.optimizer.state_dict()["state"]
        return {"weights": self.weights(), "optimizer": copied(dict(sorted(states.items())))}


def config(device_nbytes: int, **keys: Any) -> chunkmem.Config:
    """Two tiers on any machine: an explicit cap on DEVICE, ample HOST."""
    keys.setdefault("default_chunk_size", CHUNK_NUMEL)
    return chunkmem.Config.from_dict({"memory": {"device": device_nbytes, "host": AMPLE_NBYTES}, **keys})


def same(
    build: Callable[[], nn.Module],
    scenario: Callable[[Twin], Any],
    *,
    keys: Mapping[str, Any] | None = None,
    twin: type[Twin] = Twin,
    **options: Any,
) -> int:
    """Assert that a scenario returns, and leaves, the same in plain PyTorch, with ample room, and at the smallest cap.

    With ample room, models are without hooks as soon as that can be, see [Note: Resident models] in
    `chunkmem.modules.hooks`. Of three scenarios one has ample room once more, with [Note: Blocks as a whole] in
    `chunkmem.modules.blocks`, and in a full run each has, and with all hooks, too. Returns the smallest cap, in bytes.
    """
    plain = twin(None, build, **options)
    expected = copied(scenario(plain)), plain.left()

    def required_at(cap_nbytes: int) -> int:
        with chunkmem.ChunkManager(config(cap_nbytes, **(keys or {}))) as manager:
            ours = twin(manager, build, **options)
            for chunk_pool in manager.runtime.memory.store.pools.values():
                chunk_pool.poison = True
            assert_equal((copied(scenario(ours)), ours.left()), expected)
            return manager.memory().device.required_nbytes

    with resident_at_once():
        required_nbytes = required_at(AMPLE_NBYTES)
    required_at(required_nbytes)
    is_full = "TESTS_ARE_FULL" in os.environ
    if is_full:
        assert required_at(AMPLE_NBYTES) == required_nbytes
    if is_full or zlib.crc32(scenario.__qualname__.encode()) % 3 == 0:
        with by_block():
            required_at(AMPLE_NBYTES)
    return required_nbytes


@contextmanager
def never_resident() -> Iterator[None]:
    """Inside, models keep their hooks though all fits: for tests of what happens in those."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chunkmem.steps.cached_plan.CachedPlan.fits", lambda *_: False)
        yield


@contextmanager
def by_block(chunk_numel: int = 4 * CHUNK_NUMEL) -> Iterator[None]:
    """Inside, blocks are heard of as a whole from the second step on, however small; some have chunks of their own."""
    with pytest.MonkeyPatch.context() as patch, never_resident():
        patch.setattr("tests.helpers.twins.CHUNK_NUMEL", chunk_numel)
        patch.setattr("chunkmem.steps.hook_levels.WORTH", 1)
        patch.setattr("chunkmem.steps.hook_levels.has_room", lambda *_: True)
        yield


@contextmanager
def resident_at_once() -> Iterator[None]:
    """Inside, models that fit are resident from the third step on, and not only when plans are final."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chunkmem.steps.cached_plan._MAX_REFINEMENTS", 0)
        yield


def copied(tree: Any) -> Any:
    """Copies of all tensors in a tree, on the CPU."""
    return tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), tree)


def assert_equal(actual: Any, expected: Any) -> None:
    """Every leaf of two trees is the same; tensors bit for bit, with their dtypes, and free of NaN."""
    if isinstance(expected, Mapping):
        assert list(actual) == list(expected)
        for key, value in expected.items():
            try:
                assert_equal(actual[key], value)
            except AssertionError as error:
                raise AssertionError(f"{key}: {error}") from None
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for left, right in zip(actual, expected, strict=True):
            assert_equal(left, right)
    elif isinstance(expected, Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert not expected.isnan().any()
        assert torch.equal(actual, expected), f"off by up to {(actual - expected).abs().max().item()}"
    else:
        assert actual == expected, f"{actual} is not {expected}"
