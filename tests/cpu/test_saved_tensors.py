"""A user's saved-tensor hooks around a managed model, or parts of it: the bits as plain, and no copy of weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import chunkmem
from chunkmem.data.errors import StateError

WIDTH = 16
CHUNK_NUMEL = 1104
Around = Callable[[], AbstractContextManager[Any]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    """Sets hooks around all, around a block, or around operators of its own."""

    def __init__(self, where: str, around: Around) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.words.weight
        self.where, self.around = where, around

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            if self.where == "block":
                with self.around():
                    x = block(x)
            elif self.where == "checkpoint in it":
                with self.around():
                    x = torch_checkpoint(block, x, use_reentrant=False)
            elif self.where == "in a checkpoint":
                x = torch_checkpoint(self._around_block, block, x, use_reentrant=False)
            else:
                x = block(x)
        if self.where == "operators":
            with self.around():
                return F.linear(x * self.scale, self.head.weight)
        y: Tensor = self.head(x * self.scale)
        return y

    def _around_block(self, block: nn.Module, x: Tensor) -> Any:
        with self.around():
            return block(x)


def loss_of(model: nn.Module, step: int, around: Around) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    ids, targets = torch.randint(0, 11, (2, 3, 7), generator=draw)
    with around():
        return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


WHERE = ("model", "block", "operators", "checkpoint in it", "in a checkpoint")


@pytest.mark.few(5)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("cap", ["all", "smallest"])
def test_hooks_get_activations_only(where: str, cap: str) -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    def hooks() -> saved_tensors_hooks:
        return saved_tensors_hooks(pack, lambda kept: kept)

    outside: Around = hooks if where == "model" else nullcontext
    torch.manual_seed(0)
    plain = Net(where, nullcontext)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
    losses = []
    for step in range(5):
        loss = loss_of(plain, step, nullcontext)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    # The smallest cap: what a training without any hooks needs, the largest module's weights and a gradient.
    device_nbytes = (1 << 20) if cap == "all" else 3 * 4 * CHUNK_NUMEL
    config = {"default_chunk_size": CHUNK_NUMEL, "memory": {"device": device_nbytes, "host": 8 << 20}}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(config)) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Net(where, hooks)
        managed = chunkmem.AdamW(model.parameters(), manager=manager, lr=0.01)
        is_chunk = manager.runtime.modules.declared.is_chunk
        for step in range(5):
            loss = loss_of(model, step, outside)
            assert packed
            assert [tuple(t.shape) for t in packed if is_chunk(t.untyped_storage()._cdata)] == []
            manager.backward(loss)
            packed.clear()
            assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
            chunks = manager.runtime.memory.store.chunks.values()
            num_staying = len(manager.runtime.modules.access.resident)
            assert sum(replica.pins for chunk in chunks for replica in chunk.replicas.values()) == num_staying
            managed.step()
            managed.zero_grad()
            assert loss.item() == losses[step]
        state = manager.state_dict()
        assert [key for key, value in plain.state_dict().items() if not torch.equal(value, state[key])] == []


def managed_net(where: str = "model", around: Around = nullcontext) -> tuple[chunkmem.ChunkManager, nn.Module, Any]:
    config = {"default_chunk_size": CHUNK_NUMEL, "memory": {"device": 3 * 4 * CHUNK_NUMEL, "host": 8 << 20}}
    manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(config))
    torch.manual_seed(0)
    with manager.init():
        model = Net(where, around)
    return manager, model, chunkmem.AdamW(model.parameters(), manager=manager, lr=0.01)


def test_save_on_cpu_and_weights_that_have_changed() -> None:
    """Kept by reference, weights are checked as autograd checks what it keeps itself."""
    manager, model, optimizer = managed_net()
    with manager:
        kept = loss_of(model, 0, save_on_cpu)
        kept.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(StateError, match=r"saved for backward was modified in place since, as by optimizer.step"):
            kept.backward()


def test_an_interrupted_call_leaves_no_hooks() -> None:
    class Interrupting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    manager, model, _ = managed_net("block", save_on_cpu)
    with manager:
        forward = model.blocks[1].down.forward
        model.blocks[1].down.forward = Interrupting(1, 1).forward
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, 0, nullcontext)
        model.blocks[1].down.forward = forward
        loss_of(model, 0, nullcontext).backward()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def cloning() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda t: t.clone(), lambda t: t)  # save_on_cpu keeps tensors of a CPU themselves


class Twice(nn.Module):
    """Operators in a `with` of its own forward use a weight twice, and one that a module uses later."""

    def __init__(self, around: Around = cloning) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        with self.around():
            y = torch.relu(F.linear(x, self.first.weight, self.first.bias))
            y = F.linear(y, self.first.weight) @ self.second.weight.t()
        result: Tensor = self.norm(y) + self.second(x)
        return result


def kept_graph(model: nn.Module, x: Tensor) -> None:
    with save_on_cpu():
        loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def gradient_of_a_gradient(model: nn.Module, x: Tensor) -> None:
    with save_on_cpu():
        y = model(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = grad.square().sum() + y.square().mean()
    loss.backward()


def gradient_of_the_input_only(model: nn.Module, x: Tensor) -> None:
    with save_on_cpu():
        y = model(x)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    y.square().mean().backward()


def outside_of_modules(model: nn.Module, x: Tensor) -> None:
    with save_on_cpu():
        loss = F.linear(model(x), model.first.weight).square().mean()
    loss.backward()


def two_levels(model: nn.Module, x: Tensor) -> None:
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        with save_on_cpu():
            y = model(x)
        z = chunkmem.checkpoint(model, y)
    z.square().mean().backward()


def frozen(model: nn.Module, x: Tensor) -> None:
    model.first.requires_grad_(False)
    with save_on_cpu():
        y = model(model(x))
    y.square().mean().backward()


@pytest.mark.parametrize(
    "step", [kept_graph, gradient_of_a_gradient, gradient_of_the_input_only, outside_of_modules, two_levels, frozen]
)
def test_graphs_under_hooks_are_as_in_plain_pytorch(step: Callable[[nn.Module, Tensor], None]) -> None:
    def train(model: nn.Module, optimizer: Any) -> None:
        torch.manual_seed(1)
        for _ in range(4):
            step(model, torch.randn(4, 8, requires_grad=True))
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    plain = Twice()
    train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True))
    config = {"default_chunk_size": 160, "memory": {"device": 8 << 10, "host": 8 << 20}}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(config)) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Twice()
        train(model, chunkmem.AdamW(model.parameters(), manager=manager, lr=0.01))
        manager.runtime.modules.access.relieve()
        chunks = manager.runtime.memory.store.chunks.values()
        assert sum(replica.pins for chunk in chunks for replica in chunk.replicas.values()) == 0
        state = manager.state_dict()
        assert [key for key, value in plain.state_dict().items() if not torch.equal(value, state[key])] == []


@pytest.mark.parametrize("is_outside", [False, True], ids=["in forward", "in the loop"])
def test_every_operator_keeps_chunk_memory_from_hooks(is_outside: bool) -> None:
    """The second one on a parameter, too, and one that gets a view of it; and no hooks stay behind."""
    packed: list[Tensor] = []

    def hooks() -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t)

    def use(model: nn.Module, x: Tensor) -> Tensor:
        if not is_outside:
            return model(x)  # type: ignore[no-any-return]
        with hooks():
            y = model(x)
            flipped = model.second.weight.t()
            y = F.linear(F.linear(y, model.first.weight), model.first.weight).tanh()
            return (y @ flipped @ flipped).exp()

    config = {"default_chunk_size": 160, "memory": {"device": 8 << 10, "host": 8 << 20}}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(config)) as one, chunkmem.ChunkManager(one.config) as other:
        models = []
        for manager in (one, other):
            with manager.init():
                models.append(Twice(nullcontext if is_outside else hooks))
        with hooks():
            for _ in range(3):
                x = torch.randn(4, 8)
                for model in models:
                    use(model, x).square().mean().backward()
            depth, top = 0, torch._C._autograd._top_saved_tensors_default_hooks(False)[0]
            while (owner := getattr(top, "__self__", None)) is not None:
                depth, top = depth + 1, owner.inner
            assert depth <= 2, "one for each manager"
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        for manager in (one, other):
            is_chunk = manager.runtime.modules.declared.is_chunk
            assert [tuple(t.shape) for t in packed if is_chunk(t.untyped_storage()._cdata)] == []
        assert packed


class Deep(nn.Module):
    """Many modules in one checkpoint."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(num))

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch_checkpoint(self.run, self.first(x), use_reentrant=False)
        return y


def test_a_checkpoint_is_around_any_number_of_modules() -> None:
    """Ours were put in place of ours at each read in a checkpoint: so many calls deep was what backward asked for."""
    torch.manual_seed(0)
    plain = Deep(400)
    model, x = copy.deepcopy(plain), torch.full((1, 2), 1e-3)
    plain(x).sum().backward()
    with chunkmem.ChunkManager(chunkmem.Config.from_dict({"memory": {"device": "1MiB", "host": "1MiB"}})) as manager:
        manager.wrap(model)
        manager.backward(model(x).sum())
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(param.grad.clone(), expected.grad)
