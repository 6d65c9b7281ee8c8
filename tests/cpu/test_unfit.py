"""Models that were packed, and are made what they were: nothing of chunkmem is left on modules and Parameters."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

import chunkmem
from chunkmem.modules.fitted import FittedModules
from tests.helpers.spread import spread
from tests.helpers.twins import assert_equal, copied

WORDS, WIDTH = 11, 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.blocks = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Conv1d(WIDTH, WIDTH, 1))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.blocks[2].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.recurrent(self.words(x))[0]
        x = self.blocks[1](self.blocks[0](x).flatten(0, 1)).view_as(x)
        return self.head(self.blocks[2](x.transpose(1, 2)).transpose(1, 2))


def what_is_on(model: nn.Module) -> dict[str, Any]:
    """All that hooks and attributes are, by module, and classes of Parameters."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if key not in ("_buffers", "_modules", "_parameters")}
        hooks = {key: list(value.values()) for key, value in own.items() if key.endswith("_hooks")}
        flags = {key: list(value) for key, value in own.items() if "hooks_" in key}
        rest = {key for key in own if "hooks" not in key}
        found[name] = hooks, flags, rest, type(module._parameters)
    for name, param in model.named_parameters():
        found[name] = (
            type(param),
            param.dtype,
            param.shape,
            param.requires_grad,
            param._post_accumulate_grad_hooks or None,
        )
    return found


@spread(precision=["fp32", "bf16"], on_host=[False, True])
def test_nothing_is_left_on_a_model(precision: str, on_host: bool) -> None:
    torch.manual_seed(0)
    model, mine = Net(), []
    model.blocks[0].extra_repr = lambda: "mine"
    model.register_forward_hook(lambda *_: mine.append(1))
    before = what_is_on(model)
    sizes = {"device": "1MiB", "host": "1MiB"}
    config = chunkmem.Config.from_dict({"memory": sizes, "precision": precision, "use_cpu_embedding": on_host})
    if on_host:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        before = what_is_on(model)
    with chunkmem.ChunkManager(config) as manager:
        manager.wrap(model)
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
        for _ in range(3):
            manager.backward(model(torch.randint(0, WORDS, (4, 5))).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert what_is_on(model) != before
        state = manager.state_dict()
        runtime = manager.runtime
        homes = {managed: managed.bound for managed in runtime.registry.parameters}
        runtime.stop("the test takes the model back")
        runtime.modules.unfit(runtime.hooks)
        assert what_is_on(model) == before
        for managed, home in homes.items():  # what chunks hold is there yet
            assert home.parameters == []
            chunk = runtime.modules.access.chunks[managed.group]
            assert chunk.newest_tier() is not None or chunk.can_be_rounded
    assert model.blocks[0].extra_repr() == "mine"
    with torch.no_grad():
        for name, param in model.named_parameters(remove_duplicate=False):
            param.data = state[name].clone()
    plain = Net()
    if on_host:
        plain.head.weight = nn.Parameter(plain.head.weight.detach().clone())
    plain.load_state_dict(state)
    x = torch.randint(0, WORDS, (4, 5))
    loss, expected = model.eval()(x).square().mean(), plain.eval()(x).square().mean()
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None and other.grad is None) or torch.equal(one.grad, other.grad)
    with chunkmem.ChunkManager(config) as manager:  # and it can be packed again
        manager.wrap(model)
        assert all(torch.equal(value, state[key]) for key, value in manager.state_dict().items())


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
@spread(precision=["fp32", "bf16"], disk=[False, True])
def test_training_goes_on_in_plain_pytorch(precision: str, compiled: bool, disk: bool, tmp_path: Path) -> None:
    """Of `unwrap` and of a deep copy: with the weights, buffers and optimizer states that there were."""

    def step(model: nn.Module, optimizer: Any, seed: int) -> float:
        loss = model(torch.randint(0, WORDS, (4, 5), generator=torch.Generator().manual_seed(seed))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    torch.manual_seed(0)
    model = Net()
    before, params = what_is_on(model), list(model.parameters())
    sizes: dict[str, Any] = {"device": "16KiB", "host": "1MiB"}
    if disk:
        sizes = {"device": "12KiB", "host": "44KiB", "disk": {"path": str(tmp_path), "capacity": "1MiB"}}
    keys = {"memory": sizes, "precision": precision, "default_chunk_size": 1024}
    manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(keys))
    manager.wrap(model)
    if compiled:
        manager.compile(model.blocks[2], backend="eager")
    optimizer = chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)
    for seed in range(3):
        step(model, optimizer, seed)
    weights, states = manager.state_dict(), optimizer.state_dict()
    ordinary = copy.deepcopy(model)
    pickle.dumps(copy.deepcopy(model.blocks[:2]))
    kept = model.words.weight.detach()
    with pytest.raises(chunkmem.StateError, match=r"manager\.unwrap\(\): somebody keeps the memory of .*words\.weight"):
        manager.unwrap(model)
    del kept
    model(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    with pytest.raises(chunkmem.StateError, match="has a gradient that waits for its step"):
        manager.unwrap(model)
    optimizer.zero_grad()
    model.load_state_dict(weights)  # running statistics
    assert manager.unwrap(model) is model
    assert all(one is other for one, other in zip(model.parameters(), params, strict=True))
    if not compiled:
        assert what_is_on(model) == what_is_on(ordinary) == before
    manager.close()
    reference = Net()
    losses = []
    reference.load_state_dict(weights)
    for each in (reference, ordinary, model):
        assert_equal(dict(each.state_dict()), weights)
        states.pop("master_weights", None)
        plain = torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True)
        plain.load_state_dict(copy.deepcopy(states))
        losses.append([step(each, plain, seed) for seed in range(3, 6)])
    assert losses[0] == losses[1] == losses[2]
    with pytest.raises(chunkmem.StateError, match=r"manager\.unwrap\(\) has made its models ordinary"):
        optimizer.step()
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({**keys, "memory": {}})) as another:
        assert_equal(dict(another.wrap(model).state_dict()), dict(ordinary.state_dict()))


def averaged(kind: str, model: nn.Module) -> Any:
    if kind == "AveragedModel":
        return swa_utils.AveragedModel(model)
    return swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True)


class Average(nn.Module):
    """An EMA as that of timm: a copy, and its state followed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        for own, new in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            own.copy_(0.9 * own + 0.1 * new if own.is_floating_point() else new)


@pytest.mark.parametrize("kind", ["AveragedModel", "averages of buffers, too", "timm"])
def test_averages_that_begin_with_a_copy(kind: str) -> None:
    """`torch.optim.swa_utils`, and what others do alike, which then read weights and write to their own."""

    def scenario(manager: chunkmem.ChunkManager | None) -> Any:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
        if manager is None:
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        else:
            optimizer = chunkmem.AdamW(manager.wrap(model).parameters(), manager=manager, lr=1e-2)
        average: Any = Average(model) if kind == "timm" else averaged(kind, model)
        seen = []
        for seed in range(4):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            seen += [loss.item(), average.module(x).sum().item()]
        swa_utils.update_bn([torch.ones(8, WIDTH), torch.eye(WIDTH)], average.module)
        return seen, copied(dict(average.state_dict()))

    config = chunkmem.Config.from_dict({"memory": {"device": "4KiB", "host": "1MiB"}, "default_chunk_size": 256})
    with chunkmem.ChunkManager(config) as manager:
        assert_equal(scenario(manager), scenario(None))


def test_a_quantised_copy() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
    expected = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})(torch.ones(2, WIDTH))
    with chunkmem.ChunkManager(chunkmem.Config()) as manager:
        quantised = torch.ao.quantization.quantize_dynamic(manager.wrap(model), {nn.Linear})
        assert torch.equal(quantised(torch.ones(2, WIDTH)), expected)
        model(torch.ones(2, WIDTH)).sum().backward()


def test_all_models_of_a_manager_become_ordinary() -> None:
    manager = chunkmem.ChunkManager()
    with manager.init():
        one = Net()
    other = manager.wrap(nn.Linear(2, 2))
    with pytest.raises(chunkmem.StateError, match="has 2 models"):
        manager.unwrap()
    assert manager.unwrap(one) is one
    assert type(other.weight) is nn.Parameter
    other(torch.ones(2)).sum().backward()


def test_a_graph_from_before_is_noticed() -> None:
    model = Net()
    with chunkmem.ChunkManager(chunkmem.Config()) as manager:
        manager.wrap(model)
        loss = model(torch.randint(0, WORDS, (4, 5))).square().mean()
        manager.runtime.stop("the test takes the model back")
        manager.runtime.modules.unfit(manager.runtime.hooks)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_attributes_that_a_module_had_come_back() -> None:
    module, fitted = nn.Linear(2, 2), FittedModules()
    vars(module)["extra_repr"] = "a"
    fitted.set(module, "extra_repr", "b")
    fitted.set(module, "extra_repr", "c")
    fitted.set(module, "forward", "d")
    assert module in fitted
    fitted.undo()
    assert module not in fitted
    assert (vars(module)["extra_repr"], "forward" in vars(module)) == ("a", False)
