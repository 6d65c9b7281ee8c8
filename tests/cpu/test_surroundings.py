"""What may be active around training: a user's hooks, modes, profilers, defaults, autocast, a data loader."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import chunkmem
from tests.helpers.training import VARIANTS, Chunked, Trainer, capped
from tests.helpers.twins import AMPLE_NBYTES, Blocks, Twin, Weighted, features, mlp, same
from tests.helpers.zoo import ZOO, ZooModel


def add_hooks(model: nn.Module, calls: list[Any]) -> None:
    """Hooks of every kind on every module; some read parameters, some change what passes."""

    def pre(module: nn.Module, args: Any) -> Any:
        calls.append("pre")
        weight = getattr(module, "weight", None)
        return None if weight is None else (args[0] + 0.01 * weight.mean(), *args[1:])

    def post(module: nn.Module, args: Any, result: Any) -> Any:
        calls.append("post")
        weight = getattr(module, "weight", None)
        return None if weight is None else result * weight.square().mean()

    def backward(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        calls.append([grad.abs().sum().item() for grad in grad_output if grad is not None])

    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Sequential, Blocks, Weighted)):
            module.register_forward_pre_hook(pre)
            module.register_forward_hook(post)
            module.register_full_backward_hook(backward)
            module.register_full_backward_pre_hook(lambda module, grad: calls.append("backward"))


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("when", ["before packing", "after packing"])
def test_hooks_of_the_user(when: str) -> None:
    def scenario(twin: Twin) -> list[Any]:
        if when == "after packing":
            add_hooks(twin.model, twin.model.calls)
        return [twin.train(), twin.model.calls]

    def build() -> nn.Module:
        model = Blocks(Weighted())
        model.calls = []
        if when == "before packing":
            add_hooks(model, model.calls)
        return model

    same(build, scenario)


class CountsOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class CountsFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dispatch mode": CountsOperators,
    "function mode": CountsFunctions,
    "flop counter": lambda: FlopCounterMode(display=False),
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "anomaly mode": torch.autograd.detect_anomaly,
    "default device": lambda: torch.device("cpu"),
    "default device meta": lambda: default_device("meta"),
    "default dtype": lambda: default_dtype(torch.float64),
    "saved tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "tensors saved on the CPU": torch.autograd.graph.save_on_cpu,
    "no multithreading": lambda: torch.autograd.set_multithreading_enabled(False),
    "enabled gradients": torch.enable_grad,
    "autocast without a cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
}


@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("what", AROUND)
def test_training_inside(what: str) -> None:
    """The runtime's own operators are neither seen nor redirected; what the user's are told is as without chunkmem."""

    def scenario(twin: Twin) -> list[Any]:
        batches = [features(seed) for seed in range(3)]
        with AROUND[what]() as mode:
            losses = []
            for index, batch in enumerate(batches):
                loss = twin.loss(batch)
                if index:
                    loss.backward()
                else:
                    twin.backward(loss)
                losses.append(loss.item())
                if isinstance(mode, CountsOperators):
                    losses.append(list(mode.names))
                if isinstance(mode, FlopCounterMode):
                    losses.append(mode.get_total_flops())
                twin.update()
                if isinstance(mode, CountsOperators):
                    mode.names.clear()  # the operators of an update differ
        return losses

    same(lambda: Blocks(Weighted()), scenario)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_evaluation_before_the_first_step(mode: Any) -> None:
    def scenario(twin: Twin) -> list[Any]:
        with mode():
            before = [twin.model(features(seed)).clone() for seed in range(2)]
        with mode():
            state = twin.weights()
        return [before, state, twin.train()]

    same(lambda: Blocks(Weighted()), scenario)


def test_autocast_around_the_forward_only() -> None:
    """As programs use it; a weight that is read twice comes from autocast's cache the second time."""

    class Twice(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.blocks[0](self.blocks[0](x)))

    def scenario(twin: Twin) -> list[float]:
        losses = []
        for seed in range(3):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=twin.manager is not None):
                loss = twin.loss(features(seed)) + twin.loss(features(seed + 9))
            loss.backward()
            twin.update()
            losses.append(loss.item())
        return losses

    same(Twice, scenario)


def test_a_data_loader_that_forks_workers() -> None:
    """Beside the host arena, while a step is running, twice."""

    def scenario(twin: Twin) -> list[float]:
        data = TensorDataset(torch.cat([features(seed) for seed in range(4)]))
        losses = []
        for _ in range(2):
            for (batch,) in DataLoader(data, batch_size=4, num_workers=2):
                losses.append(twin.step(batch))
        return losses

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same(Blocks, scenario)


class Undeclared(Blocks):
    """Uses a weight in a way that no read tells of."""

    def __init__(self, *, where: str) -> None:
        super().__init__(mlp())
        self.where = where
        self.hidden = [lambda: None]

    def hide(self) -> None:
        weight = dict(self.blocks[0].named_parameters())["0.weight"]
        self.hidden = [lambda: weight]

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "forward":
            x = x @ self.hidden[0]()
        if self.where == "backward":
            x = UsesHiddenWeight.apply(x, self)
        return super().forward(x)


class UsesHiddenWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Undeclared) -> Tensor:
        ctx.model = model
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.model.hidden[0](), None


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_use_that_no_lookup_tells_of_is_served(where: str) -> None:
    """The parameter itself says that an operator got it, in a module's forward and in a function's own backward."""

    def scenario(twin: Twin) -> list[Any]:
        twin.model.hide()
        losses = []
        for seed in range(3):
            loss = twin.loss(features(seed).requires_grad_())
            loss.backward()
            twin.update()
            losses.append(loss.item())
        return losses

    same(lambda: Undeclared(where=where), scenario)


def count_guards(manager: chunkmem.ChunkManager) -> list[object]:
    """Return a list that gets what each outermost call of a module is guarded by."""
    guards: list[object] = []
    make_guard = manager.runtime.entry_points.make_guard

    def noting() -> Any:
        guards.append(make_guard())
        return guards[-1]

    manager.runtime.entry_points.make_guard = noting
    return guards


@pytest.mark.few(4)
@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_the_check_has_nothing_to_say_about_the_zoo(case: ZooModel) -> None:
    """Every forward and every backward of a first step, recomputation included, by `manager.backward`."""
    variants = [variant for variant in VARIANTS if case.has_blocks or variant.early_stop is None]
    for variant in (variants[0], variants[-1]):
        with chunkmem.ChunkManager(capped(case, AMPLE_NBYTES)) as manager:
            trainer = Trainer(case, variant, Chunked(manager))
            trainer.by_manager = True
            guards = count_guards(manager)
            trainer.step()
            assert guards
            assert all(guard is not None for guard in guards)
            guards.clear()
            trainer.step()
            assert guards
            assert all(guard is None for guard in guards)
