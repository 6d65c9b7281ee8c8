"""Models that were packed, and are made what they were: nothing of chunkmem is left on modules and Parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.nn.fitted import FittedModules
from tests.helpers.spread import spread

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
