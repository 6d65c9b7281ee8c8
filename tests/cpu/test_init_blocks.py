"""Blocks of `manager.init()`: which modules they pack, what is shared and excluded, what it takes in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.modules.lazy_gradient import LazyGradient
from chunkmem.modules.parameter_reads import ParameterReads
from tests.helpers.audit import audit
from tests.helpers.programs import run_python
from tests.helpers.training import compute_device
from tests.helpers.twins import AMPLE_NBYTES, SEED, WIDTH, Blocks, Twin, assert_equal, config, cpu_only, features, mlp

SMALL_NBYTES = 4 * 1024


def test_wrapping_is_the_same_as_building_inside() -> None:
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        torch.manual_seed(SEED)
        model = Blocks()
        built = {name: value.clone() for name, value in model.state_dict().items()}
        assert manager.wrap(model) is model
        assert_equal(dict(manager.state_dict()), built)


def test_modules_thrown_away_are_not_packed() -> None:
    """Nor those that a constructor replaced, nor parameters taken away again."""
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        with manager.init():
            for _ in range(3):
                nn.Linear(64, 64)
            model = Blocks()
            model.blocks[0] = nn.Linear(WIDTH, WIDTH)
            del model.blocks[1][2]
            scratch = nn.Linear(64, 64)
            del scratch.weight
            del scratch
        assert len(manager.runtime.registry.models) == 1
        slots = {managed.name for managed in manager.runtime.registry.parameters}
        assert slots == {name for name, _ in model.named_parameters()}


def test_several_blocks_and_several_models() -> None:
    """Each block adds its models; they train together, and tied ones stay tied across blocks."""

    class Pair(nn.Module):
        def __init__(self, first: nn.Module, second: nn.Module) -> None:
            super().__init__()
            self.list = [first, second]

        def forward(self, x: Tensor) -> Tensor:
            return self.list[1](torch.tanh(self.list[0](x)))

    outcomes = []
    for manager in (None, chunkmem.ChunkManager(config(6 * 1024))):
        torch.manual_seed(SEED)
        if manager is None:
            first, loose, second = mlp(), nn.Linear(WIDTH, WIDTH), Blocks()
            second.inner.weight = loose.weight = first[0].weight
            for model in (first, loose, second):
                model.to(compute_device())
        else:
            with manager.init():
                pass
            with manager.init():
                first, loose = mlp(), nn.Linear(WIDTH, WIDTH)
                loose.weight = first[0].weight
            with manager.init():
                second = Blocks()
                second.inner.weight = first[0].weight
        parameters = list(dict.fromkeys([*first.parameters(), *second.parameters(), *loose.parameters()]))
        make: Any = torch.optim.AdamW if manager is None else chunkmem.AdamW
        optimizer = make(parameters, lr=0.01, **({"fused": True} if manager is None else {"manager": manager}))
        losses = []
        for seed in range(3):
            loss = Pair(Pair(first, second), nn.Identity())(loose(features(seed))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        states = [model.state_dict() for model in (first, second, loose)]
        outcomes.append((losses, [{k: v.clone() for k, v in state.items()} for state in states]))
        if manager is not None:
            audit(manager)
            assert len(list(manager.runtime.registry.parameters)) == len(parameters)
    assert_equal(outcomes[1], outcomes[0])


@cpu_only
def test_a_module_shared_by_two_models() -> None:
    outcomes = []
    for manager in (None, chunkmem.ChunkManager(config(8 * 1024))):

        class Both(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                shared = mlp()
                self.models = (nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.Linear(WIDTH, WIDTH), shared))

            def parameters(self, recurse: bool = True) -> Any:
                return iter(dict.fromkeys(p for model in self.models for p in model.parameters(recurse)))

            def forward(self, x: Tensor) -> Tensor:
                return self.models[1](self.models[0](x))

        twin = Twin(manager, Both)
        losses = twin.steps(0, 1, 2)
        state = twin.optimizer.state_dict()["state"]
        outcomes.append((losses, [dict(model.state_dict()) for model in twin.model.models], state))
    assert_equal(outcomes[1], outcomes[0])


def test_a_module_of_two_models_is_fitted_once() -> None:
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        with manager.init():
            shared = nn.Linear(WIDTH, WIDTH)
            first, second = nn.Sequential(shared), nn.Sequential(shared)
        assert type(shared._parameters) is ParameterReads
        assert len(shared._forward_pre_hooks) == len(first._forward_pre_hooks) == len(second._forward_pre_hooks) == 1


HOST_PEAK = """
import pathlib, psutil, torch, chunkmem

manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(
    {"memory": {"device": "16MiB", "host": "1GiB"}, "default_chunk_size": 4 << 20}))
torch.ones(8 << 20)  # from here on the C library keeps blocks of up to 32 MiB on its heap when they are freed
before = psutil.Process().memory_info().rss
with manager.init():
    model = torch.nn.ParameterList(torch.ones(4 << 20) for _ in range(12))
status = pathlib.Path("/proc/self/status").read_text()  # not ru_maxrss: it begins with the parent process's
peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
print((peak - before) / 2**20)
manager.close()
print((psutil.Process().memory_info().rss - before) / 2**20)
"""


@cpu_only
def test_host_peak_is_the_model_and_one_chunk() -> None:
    """192 MiB in chunks of 16, and a little for Python and torch. `close()` gives all of it back."""
    run = run_python("-c", HOST_PEAK)
    assert run.returncode == 0, run.stderr
    peak, closed = map(float, run.stdout.split())
    assert 192 <= peak < 192 + 16 + 8
    assert closed < 8


def test_an_excluded_module_stays_ordinary() -> None:
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        with manager.init():
            with manager.exclude(reduce=False):
                ordinary = nn.Linear(WIDTH, WIDTH)
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), ordinary)
            with manager.exclude():
                alone = nn.Linear(WIDTH, WIDTH)
        assert type(ordinary._parameters) is dict is type(alone._parameters)
        assert not ordinary.weight.isnan().any()
        model(features(0)).sum().backward()
        assert ordinary.weight.grad is not None
        assert isinstance(model[0].weight.grad, LazyGradient)
        assert not isinstance(ordinary.weight.grad, LazyGradient)
        assert sorted(managed.name for managed in manager.runtime.registry.parameters) == ["0.bias", "0.weight"]
        with pytest.raises(chunkmem.StateError, match=r"belongs inside manager\.init\(\)"), manager.exclude():
            pass


def test_the_chunk_size_is_searched_on_the_model() -> None:
    """Without one in the configuration; `default_chunk_size` is in elements, and clamped to the model."""
    for size, expected in (("auto", 64 * 4), (30, 128), (100, 64 * 4)):
        with chunkmem.ChunkManager(config(AMPLE_NBYTES, default_chunk_size=size)) as manager:
            manager.wrap(nn.Linear(8, 8, bias=False))
            assert manager.runtime.registry.models[0].layout.slab_nbytes == expected


def test_init_with_nothing_inside() -> None:
    with chunkmem.ChunkManager(config(SMALL_NBYTES)) as manager:
        with manager.init():
            nn.Tanh()
        activation = manager.wrap(nn.Sequential(nn.Tanh()))
        assert torch.equal(activation(torch.ones(2)), torch.ones(2).tanh())
        assert manager.memory().host.now_nbytes == 0
