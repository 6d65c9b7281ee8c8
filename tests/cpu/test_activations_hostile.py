"""What users do to what autograd has saved in blocks: plain PyTorch's numbers or errors, and nothing is left."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import chunkmem
from chunkmem.data.types import Role
from chunkmem.runtime.chunk import NO_CONTENT
from tests.helpers.lanes import adversarial
from tests.helpers.pins import pinned_by_backward
from tests.helpers.twins import (
    AMPLE_NBYTES,
    WIDTH,
    Blocks,
    Twin,
    assert_equal,
    config,
    copied,
    cpu_only,
    features,
)

pytestmark = cpu_only

OFFLOAD = {"activations": {"policy": "offload"}}
STEPS = range(5)
"""By the last ones a plan is followed."""
SEEDS = (None, None, 1, 2) if "TESTS_ARE_FULL" in os.environ else (None, None, 1)
"""Of a scenario's runs: with ample room, at the smallest cap, and there with late copies, of one order or two."""
Scenario = Callable[[Twin], Any]


@contextmanager
def managed(build: Callable[[], nn.Module], device_nbytes: int, seed: int | None = None, **keys: Any) -> Iterator[Twin]:
    """A model whose freed memory is overwritten with NaN; with a seed, copies are as late as events allow."""
    lanes = None if seed is None else adversarial(seed)
    with chunkmem.ChunkManager(config(device_nbytes, **(OFFLOAD | keys)), make_lanes=lanes) as manager:
        twin = Twin(manager, build)
        for pool in manager.runtime.memory.store.pools.values():
            pool.poison = True
        yield twin


def required_nbytes(twin: Twin) -> int:
    assert twin.manager is not None
    return twin.manager.memory().device.required_nbytes


def same(build: Callable[[], nn.Module], scenario: Scenario, **keys: Any) -> None:
    """A scenario returns, and leaves, what it does in plain PyTorch: with ample room, and at the smallest cap."""
    plain = Twin(None, build)
    expected = copied(scenario(plain)), plain.left()
    least = AMPLE_NBYTES
    for seed in SEEDS:
        with managed(build, least, seed, **keys) as twin:
            assert_equal((copied(scenario(twin)), twin.left()), expected)
            assert_nothing_left(twin)
            least = required_nbytes(twin)


def activations(twin: Twin) -> list[Any]:
    """The chunks that have content, or room."""
    assert twin.manager is not None
    chunks = twin.manager.runtime.memory.store.chunks.values()
    return [chunk for chunk in chunks if chunk.id.role is Role.ACTIVATION]


def assert_nothing_left(twin: Twin) -> None:
    """No content and no pin: every graph is gone."""
    assert twin.manager is not None
    assert pinned_by_backward(twin.manager) == ()
    twin.manager.runtime.modules.regions.pack_last()
    for chunk in activations(twin):
        assert chunk.version == NO_CONTENT, chunk.label


def followed(twin: Twin) -> bool:
    """The last step had a plan, and no plan miss."""
    if twin.manager is None:
        return True
    timeline = twin.manager.timeline()
    return twin.manager.plan is not None and timeline is not None and timeline.plan_misses == 0


def train(twin: Twin, loss: Callable[[int], Tensor], *, is_followed: bool = True) -> list[float]:
    """Ordinary steps; the last one follows its plan."""
    seen = []
    for seed in STEPS:
        value = loss(seed)
        value.backward()
        twin.update()
        seen.append(value.item())
    assert not is_followed or followed(twin)
    return seen


class Mlp(nn.Module):
    """A block with activations of its own; `wrap` makes its output of its input, and of what is inside."""

    def __init__(self, act: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


def stack(*blocks: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """How a model of blocks is built: those given, each twice, between ordinary ones."""
    return lambda: Blocks(Mlp(), *(block() for block in (*blocks, *blocks)), Mlp(), num_blocks=0)


def plain_step(twin: Twin, seed: int = 0) -> float:
    return twin.step(features(seed))


# Who else has the memory.


class Leaking(nn.Module):
    """Gives what it computes inside, and saves, to somebody."""

    def __init__(self, leak: Callable[[Tensor], object], kept: list[Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.leak, self.kept = leak, kept

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.up(x))
        with torch.no_grad():
            self.kept.append((self.leak(inner), inner.clone()))
        return x + self.down(inner)


def as_tensor(kept: Any) -> Tensor:
    """The values that somebody sees in what was kept."""
    if isinstance(kept, Tensor):
        return kept.detach()
    if isinstance(kept, torch.TypedStorage):
        kept = kept.untyped()
    if isinstance(kept, torch.UntypedStorage):
        return torch.empty(0).set_(kept)  # type: ignore[call-overload]
    return torch.as_tensor(kept)


LEAKS: dict[str, Callable[[Tensor], Any]] = {
    "the tensor": lambda t: t,
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "a view": lambda t: t[:, 0],
    "a view of a detached view": lambda t: t.detach()[1:].t(),
    "numpy": lambda t: t.detach().numpy(),
    "a view in numpy": lambda t: t.detach().numpy()[:, 1],
    "dlpack": lambda t: torch.from_dlpack(t.detach()),
    "a capsule": lambda t: torch.utils.dlpack.to_dlpack(t.detach()),
    "storage": lambda t: t.untyped_storage(),
    "typed storage": lambda t: t.detach().storage(),
    "as a parameter": lambda t: nn.Parameter(t.detach()),
    "a closure": lambda t: lambda: t,
    "shared memory": lambda t: t.detach().share_memory_(),
}


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("leak", LEAKS)
def test_what_a_user_keeps_stays(leak: str) -> None:
    kept: list[Any] = []

    def scenario(twin: Twin) -> None:
        train(twin, lambda seed: twin.loss(features(seed)))
        for held, expected in kept:
            held = held() if callable(held) and not isinstance(held, Tensor) else held
            seen = torch.from_dlpack(held) if "PyCapsule" in str(type(held)) else as_tensor(held)
            if leak.endswith("storage"):
                expected = expected.flatten()
            elif "view" in leak:
                expected = as_tensor(LEAKS[leak](expected))
            assert torch.equal(seen.reshape(expected.shape), expected)
        kept.clear()

    same(stack(lambda: Leaking(LEAKS[leak], kept)), scenario)


@pytest.mark.few(1)
@pytest.mark.parametrize("when", ["forward", "before backward", "after backward"])
def test_what_a_graph_shows_of_what_it_saved_stays(when: str) -> None:
    """`grad_fn._saved_result` is the memory itself."""

    class Saves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            inner = torch.tanh(self.up(x))
            self.node, self.expected = inner.grad_fn, inner.detach().clone()
            return x + self.down(inner)

    def scenario(twin: Twin) -> None:
        block = twin.model.blocks[1]
        for seed in STEPS:
            loss = twin.loss(features(seed))
            if when == "before backward":
                seen = block.node._saved_result
            loss.backward(retain_graph=True)
            if when == "after backward":
                seen = block.node._saved_result
            twin.update()
            del loss
            if when != "forward":
                plain_step(twin, seed)
                assert torch.equal(seen.detach(), block.expected) or block.expected is not None
        block.node = None

    same(stack(Saves), scenario)


class GivesSaved(torch.autograd.Function):
    """What is saved is the gradient itself, as of fused losses that compute it in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        return saved.mul_(grad)


def test_a_gradient_that_is_a_saved_tensor_stays() -> None:
    """It outlives the graph that it was saved in: `.grad` of an input, and a hook, have it."""
    seen: list[Tensor] = []

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            scaled = x * 1
            scaled.register_hook(seen.append)
            return self.lin(GivesSaved.apply(scaled))

    def scenario(twin: Twin) -> list[Any]:
        out: list[Any] = []
        for seed in STEPS:
            seen.clear()
            x = features(seed).requires_grad_()
            twin.loss(x).backward()
            twin.update()
            plain_step(twin, seed + 10)
            out += [x.grad, *copied(seen)]
        return out

    same(stack(Fused), scenario)


class Keeps(torch.autograd.Function):
    """Keeps what it has saved when backward comes."""

    kept: list[Tensor]

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[Tensor]) -> Tensor:
        ctx.kept = kept
        ctx.save_for_backward(x.exp())
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        ctx.kept.append((saved, saved.clone()))
        return grad * saved, None


def test_saved_tensors_that_a_backward_keeps_stay() -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    def scenario(twin: Twin) -> None:
        kept.clear()
        train(twin, lambda seed: twin.loss(features(seed)))
        assert all(torch.equal(seen, expected) for seen, expected in kept)

    same(stack(lambda: Mlp(lambda t: Keeps.apply(t * 0.1, kept))), scenario)


def test_a_mask_of_all_layers_stays() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, mask: Tensor, rate: Tensor) -> Tensor:
            return x + self.lin(x * mask * rate)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Masked() for _ in range(4))
            self.head = nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            mask, rate = (x > 0).float(), torch.arange(WIDTH).float().cos()
            for block in self.blocks:
                x = block(x, mask, rate)
            return self.head(x)

    same(Model, lambda twin: train(twin, lambda seed: twin.loss(features(seed))))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "way", [lambda t: t, lambda t: t[:, :4], lambda t: t.detach()], ids=["all", "views", "detached"]
)
def test_outputs_of_blocks_that_are_kept(way: Callable[[Tensor], Tensor]) -> None:
    def scenario(twin: Twin) -> list[Any]:
        states: list[Tensor] = []
        for block in twin.model.blocks:
            block.register_forward_hook(lambda module, args, out: states.append(way(out)))
        seen = []
        for seed in STEPS:
            states.clear()
            loss = twin.loss(features(seed)) + sum(state.square().mean() for state in states)
            loss.backward()
            twin.update()
            seen += [copied(state) for state in states]
        return seen

    same(stack(Mlp), scenario)


# Graphs.


def test_two_backwards_of_a_graph() -> None:
    def loss_of(twin: Twin, seed: int) -> Tensor:
        loss = twin.loss(features(seed))
        loss.backward(retain_graph=True)
        return loss

    same(stack(Mlp), lambda twin: train(twin, lambda seed: loss_of(twin, seed)))


def test_two_losses_over_one_trunk() -> None:
    def scenario(twin: Twin) -> list[float]:
        def loss_of(seed: int) -> Tensor:
            out = twin.model(features(seed))
            out[:, 0].square().mean().backward(retain_graph=True)
            return out[:, 1].exp().mean()

        return train(twin, loss_of)

    same(stack(Mlp), scenario)


def test_a_gradient_penalty() -> None:
    def scenario(twin: Twin) -> list[float]:
        def loss_of(seed: int) -> Tensor:
            x = features(seed).requires_grad_()
            out = twin.model(x).square().mean()
            (grad,) = torch.autograd.grad(out, x, create_graph=True)
            plain = features(seed + 1)
            return out + grad.square().sum() + twin.model(plain).mean()

        return train(twin, loss_of)

    same(stack(Mlp, lambda: Mlp(F.silu)), scenario)


def test_a_gradient_penalty_through_a_second_call() -> None:
    """Between the first backward and the second, other blocks need the room."""

    def scenario(twin: Twin) -> list[float]:
        def loss_of(seed: int) -> Tensor:
            x = features(seed).requires_grad_()
            (grad,) = torch.autograd.grad(twin.model(x).square().sum(), x, create_graph=True)
            return twin.model(grad).square().mean()

        return train(twin, loss_of)

    same(stack(Mlp), scenario)


def test_autograd_grad_alone() -> None:
    def scenario(twin: Twin) -> list[Tensor]:
        found = []
        for seed in STEPS:
            x = features(seed).requires_grad_()
            found += torch.autograd.grad(twin.loss(x), x)
        return found

    same(stack(Mlp), scenario)


def test_a_loss_that_is_dropped() -> None:
    def scenario(twin: Twin) -> list[float]:
        def loss_of(seed: int) -> Tensor:
            twin.loss(features(seed + 50))
            return twin.loss(features(seed))

        return train(twin, loss_of)

    same(stack(Mlp), scenario)


def test_a_loss_that_is_kept_and_never_backwarded() -> None:
    losses: list[Tensor] = []

    def scenario(twin: Twin) -> list[float]:
        def loss_of(seed: int) -> Tensor:
            losses.append(twin.loss(features(seed + 50)))
            return twin.loss(features(seed))

        seen = train(twin, loss_of)
        losses.clear()
        return seen

    same(stack(Mlp), scenario)


class Frozen(nn.Module):
    """No parameter of its own that a step writes to: a graph through it is good for ever."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * 2).exp().sin()


def test_a_graph_that_outlives_the_step() -> None:
    """It has saved no weight: plain PyTorch has nothing against a backward after the step."""

    def scenario(twin: Twin) -> list[Any]:
        seen: list[Any] = []
        for seed in STEPS:
            x = features(seed).requires_grad_()
            kept = twin.model.blocks[1](x).sum()
            whole = twin.loss(features(seed + 20))
            whole.backward()
            twin.update()
            plain_step(twin, seed + 10)
            kept.backward()
            seen.append(x.grad)
        return seen

    same(stack(Frozen), scenario)


def test_a_graph_of_the_model_that_outlives_the_step_raises_what_torch_does() -> None:
    with managed(stack(Mlp), AMPLE_NBYTES) as twin:
        for _ in range(3):
            kept = twin.loss(features(0))
            plain_step(twin)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                kept.backward()
            twin.optimizer.zero_grad()
            del kept
        plain_step(twin)
        assert_nothing_left(twin)


@pytest.mark.parametrize("num_calls", [2, 3])
@pytest.mark.few(1)
def test_several_calls_before_one_backward(num_calls: int) -> None:
    def scenario(twin: Twin) -> list[float]:
        return train(twin, lambda seed: sum(twin.loss(features(seed + 10 * n)) for n in range(num_calls)))  # type: ignore[arg-type, misc]

    same(stack(Mlp), scenario)


def test_a_block_that_is_called_several_times() -> None:
    class Loops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Mlp(), Mlp()])
            self.head = nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                for block in self.blocks:
                    x = block(x)
            return self.head(x)

    same(Loops, lambda twin: train(twin, lambda seed: twin.loss(features(seed))))


def test_blocks_in_blocks() -> None:
    def build() -> nn.Module:
        inner = [nn.Sequential(Mlp(), nn.ModuleList([Mlp()])[0], Mlp()) for _ in range(2)]
        return Blocks(*inner, num_blocks=1)

    same(build, lambda twin: train(twin, lambda seed: twin.loss(features(seed))))


# Other people's saved-tensor hooks.


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.more = Mlp(), Mlp()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.more(checkpoint(self.inner, x * 1, use_reentrant=self.reentrant))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.few(1)
def test_checkpoints_inside_of_blocks(reentrant: bool) -> None:
    same(
        stack(lambda: Checkpointed(reentrant=reentrant)),
        lambda twin: train(twin, lambda seed: twin.loss(features(seed).requires_grad_())),
    )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.few(1)
def test_checkpoints_around_blocks(reentrant: bool) -> None:
    class Model(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            for index, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=reentrant) if index % 2 else block(x)
            return self.head(x)

    same(lambda: Model(num_blocks=4), lambda twin: train(twin, lambda seed: twin.loss(features(seed))))


TERMS: list[Tensor] = []
"""Of a loss; no module leads to it."""


class Penalised(nn.Module):
    """Gives the loss terms that no module returns: of what it computes, and of its own and its children's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lin = Mlp(), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.lin(x)) * self.scale
        weights = self.lin.weight, self.inner.up.weight, self.scale
        TERMS.extend([y.square().mean(), *(weight.square().sum() * 1e-3 for weight in weights)])
        return y


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["recompute", "keep", "auto", "offload"])
@pytest.mark.parametrize("checkpoints", [True, False])
def test_terms_of_the_loss_that_no_module_returns(policy: str, checkpoints: bool) -> None:
    """Nobody announced their backward, which used weights that a recomputation had let go of."""

    class Model(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if checkpoints else block(x)
            return self.head(x)

    def scenario(twin: Twin) -> list[float]:
        seen = []
        for seed in STEPS:
            TERMS.clear()
            loss = twin.loss(features(seed))
            loss = loss + sum(TERMS)
            twin.backward(loss)
            TERMS.clear()
            twin.update()
            seen.append(loss.item())
        return seen

    build = lambda: Model(Penalised(), Penalised(), num_blocks=1)  # noqa: E731
    same(build, scenario, activations={"policy": policy})


HOOKS: dict[str, Callable[[], Any]] = {
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "clones": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t),
    "disabled": lambda: torch.autograd.graph.disable_saved_tensors_hooks("no hooks"),
}


class WithHooks(nn.Module):
    """Has somebody else's saved-tensor hooks inside."""

    def __init__(self, context: Callable[[], Any]) -> None:
        super().__init__()
        self.inner, self.more, self.context = Mlp(), Mlp(), context

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            x = self.inner(x)
        return self.more(x)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_around_the_model(name: str) -> None:
    def scenario(twin: Twin) -> list[float]:
        def loss_of(seed: int) -> Tensor:
            with HOOKS[name]():
                return twin.loss(features(seed))

        return train(twin, loss_of)

    same(stack(Mlp), scenario)


@pytest.mark.parametrize("name", ["save_on_cpu", "clones"])
@pytest.mark.few(1)
def test_hooks_in_a_block(name: str) -> None:
    same(stack(lambda: WithHooks(HOOKS[name])), lambda twin: train(twin, lambda seed: twin.loss(features(seed))))


def test_a_block_that_forbids_hooks_is_told_so_by_torch() -> None:
    """Its saved tensors are ours to look over by then: such a block cannot be a region."""
    with managed(stack(lambda: WithHooks(HOOKS["disabled"])), AMPLE_NBYTES) as twin:
        with pytest.raises(RuntimeError, match="no hooks"):
            twin.loss(features(0))
        assert_nothing_left(twin)


# Writes.


def written(build: Callable[[], nn.Module], between: Callable[[Twin], Any] | None = None) -> None:
    """Plain PyTorch raises its version error in backward; so do we, and a clean step follows."""
    plain = Twin(None, build)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain.loss(features(0)).backward()
    for rounds in (1, 4):
        with managed(build, AMPLE_NBYTES) as twin:
            for _ in range(rounds):
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    twin.loss(features(0)).backward()
                twin.optimizer.zero_grad()
            twin.manager.runtime.modules.regions.pack_last()  # type: ignore[union-attr]


class Writes(nn.Module):
    """Writes to what it has saved, in place."""

    def __init__(self, write: Callable[[Tensor], object], *, after: bool = False) -> None:
        super().__init__()
        self.lin, self.write, self.after = nn.Linear(WIDTH, WIDTH), write, after

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(self.lin(x))
        z = y * y.sigmoid()
        self.write(y)
        return z + y.sum() if self.after else z


@pytest.mark.parametrize("write", [lambda t: t.add_(1), lambda t: t[:, 0].zero_(), lambda t: t.detach().mul_(2)])
@pytest.mark.few(2)
@pytest.mark.parametrize("after", [False, True])
def test_a_write_to_what_was_saved_in_the_block(write: Callable[[Tensor], object], after: bool) -> None:
    written(stack(lambda: Writes(write, after=after)))


def test_a_write_through_data_is_seen_by_nobody() -> None:
    """Neither does plain PyTorch."""
    same(
        stack(lambda: Writes(lambda t: t.data.mul_(0.5))),
        lambda twin: train(twin, lambda seed: twin.loss(features(seed))),
    )


def test_a_write_to_a_block_s_output_between_blocks() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
            self.head = nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                x.mul_(2)
            return self.head(x)

    written(Model)


def test_writes_that_plain_pytorch_allows() -> None:
    """In place before anything is saved, on a view of the output, on the residual stream."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = F.relu_(self.lin(x))
            out = torch.zeros_like(x)
            out[:, ::2] = y[:, ::2] * 2
            out += x
            return out

    class Model(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            for block in self.blocks:
                y = block(x)
                y[:, 0].add_(1)
                x = y
            return self.head(x)

    same(lambda: Model(InPlace(), InPlace(), num_blocks=1), lambda t: train(t, lambda seed: t.loss(features(seed))))


class Scaled(nn.Module):
    """Saves nothing of its input, which others may then write to."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x * 0.5).tanh()


class WritesFirst(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x.mul_(1.5)) * 0.5


class Residual(Blocks):
    """Writes to what it gives blocks: `x += block(x)`, and later still."""

    def __init__(self, *, is_late: bool) -> None:
        super().__init__(*(Scaled() for _ in range(4)), num_blocks=0)
        self.is_late = is_late

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.is_late:
            y = self.blocks[0](x)
            z = self.blocks[2](self.blocks[1](y * 1))
            x[:, ::2] += y[:, ::2]
            x = x + y * z
        for block in self.blocks[-2:]:
            x += block(x)
        return self.head(x)


def convolutions() -> nn.Module:
    """As of VGG and AlexNet: each child is a block, and activations write to what they are given."""
    layers = [nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Dropout(0.2, inplace=True), nn.Linear(32, WIDTH), nn.Sequential(nn.SiLU(inplace=True))]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


WRITING: dict[str, Callable[[], nn.Module]] = {
    "convolutions": convolutions,
    "a block first": lambda: Blocks(WritesFirst(), WritesFirst(), num_blocks=1),
    "x += block(x)": lambda: Residual(is_late=False),
    "later": lambda: Residual(is_late=True),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("model", WRITING)
@pytest.mark.parametrize("policy", ["recompute", "keep", "auto", "offload"])
def test_writes_to_inputs_of_blocks(model: str, policy: str) -> None:
    """Those that are recomputed begin with a copy. Steps are planned all the same."""
    same(WRITING[model], lambda t: train(t, lambda seed: t.loss(features(seed))), activations={"policy": policy})


def test_a_step_that_follows_a_plan_from_before_freezing_copies_too() -> None:
    with managed(lambda: Residual(is_late=False), AMPLE_NBYTES, activations={"policy": "recompute"}) as twin:
        plain = Twin(None, lambda: Residual(is_late=False))
        for each in (plain, twin):
            each.steps(*STEPS)
        assert twin.manager is not None
        twin.manager.freeze(twin.model.inner)
        plain.model.inner.requires_grad_(False)
        assert twin.steps(7, 8) == plain.steps(7, 8)
