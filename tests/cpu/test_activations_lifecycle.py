"""Activations of blocks over many steps: what interrupts a step, what changes between steps, what ends a training."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import chunkmem
from chunkmem.data.errors import CapacityError, StateError, TierIOError
from chunkmem.data.types import Role, Tier
from chunkmem.runtime.queues import Lanes
from chunkmem.runtime.store import ChunkStore
from tests.cpu.test_activations_hostile import (
    OFFLOAD,
    STEPS,
    Mlp,
    activations,
    assert_nothing_left,
    managed,
    required_nbytes,
    same,
    stack,
    train,
)
from tests.helpers.audit import audit_ledgers, audit_pins
from tests.helpers.pins import pinned_by_backward
from tests.helpers.spread import spread
from tests.helpers.twins import AMPLE_NBYTES, WIDTH, Blocks, Twin, config, cpu_only, features

pytestmark = cpu_only


def losses(twin: Twin) -> list[float]:
    return train(twin, lambda seed: twin.loss(features(seed)))


# Kinds of blocks.


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[None, None].chunk(3, dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        return x + self.drop(self.out(out[0, 0]))


class Complex(nn.Module):
    """Complex numbers, with lazy conjugates and negative bits."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(self.lin(x).view(-1, WIDTH, 2))
        return x + (torch.fft.fft(z * z.conj().exp()) * z.conj().imag).real.tanh()


class Odd(nn.Module):
    """Nothing, one number, numbers without memory of their own, other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        none = y[:0].exp().sum()
        scale = y.mean().exp()
        wide = scale.expand(x.shape[0], WIDTH) * y
        double = y.double().exp().float()
        best, at = y.topk(3, dim=-1)
        return wide + double * 1e-3 + none + y.gather(-1, at).sum(-1, keepdim=True) + best.prod(-1, keepdim=True)


class Empty(nn.Module):
    """Saves nothing but tensors without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + x[:0].exp().sum() + self.scale


class Quantized(torch.autograd.Function):
    """Saves tensors that are no ordinary memory: quantized, sparse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        small = torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8)
        ctx.save_for_backward(small, (x * (x > 0)).to_sparse())
        return x.relu()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        small, sparse = ctx.saved_tensors
        return grad * (sparse.to_dense() > 0) + small.dequantize() * 1e-3


class Marks(torch.autograd.Function):
    """Writes in place, and keeps a number and a tensor on its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.sign, ctx.factor = x.sign(), 2.0
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.factor + 0 * ctx.sign * ctx.saved_tensors[0]


class Tagged(Tensor):
    """A subclass that does nothing."""


class Subclassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x).exp().as_subclass(Tagged)
        return x + (y.sin() * y).as_subclass(Tensor)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.nested.as_nested_tensor([x[:1], x[1:]]) * 2
        z = (self.lin(x).sigmoid() * x).exp()
        return x + torch.cat(list(torch.relu(y).unbind())) * z


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mix = torch.eye(x.shape[0]).to_sparse()
        return x + torch.sparse.mm(mix, self.lin(x).tanh())


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rnn(x[:, None])[0][:, 0]


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x[:, None])), inplace=True).mean(1)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10, WIDTH, mode="max")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bag(x.detach().abs().mul(4).long().clamp(max=9))


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).float()


class Cached(nn.Module):
    """Appends to a cache that outlives the call, as attention does with keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.cache: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        key = self.lin(x).tanh()
        self.cache.append(key.detach())
        del self.cache[:-3]
        return x + key * torch.stack(self.cache).mean(0)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "attention with dropout": Attention,
    "complex": Complex,
    "odd sizes": Odd,
    "nothing": Empty,
    "quantized and sparse": lambda: Mlp(lambda t: Quantized.apply(t)),
    "mark_dirty": lambda: Mlp(lambda t: Marks.apply(t * 1)),
    "subclass": Subclassed,
    "nested": Nested,
    "sparse": Sparse,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "conv and batch norm": Convolved,
    "embedding bag": Bag,
    "autocast": Autocast,
    "a cache": Cached,
    "identity": nn.Identity,
}


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Please use `torch.ao")
@pytest.mark.parametrize("name", BLOCKS)
def test_kinds_of_blocks(name: str) -> None:
    same(stack(BLOCKS[name]), losses)


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(precision: str) -> None:
    """Whose numbers plain PyTorch does not have: those with ample room."""
    found = []
    least = AMPLE_NBYTES
    for seed in (None, None, 1):
        with managed(stack(Mlp, Attention), least, seed, precision=precision) as twin:
            seen = []
            torch.manual_seed(3)
            for step in STEPS:
                loss = twin.loss(features(step))
                twin.backward(loss)
                twin.update()
                seen.append(loss.item())
            found.append((seen, twin.weights()))
            least = required_nbytes(twin)
    for seen, weights in found[1:]:
        assert seen == found[0][0]
        assert all(torch.equal(weights[name], value) for name, value in found[0][1].items())


# Steps that differ.


def test_layers_that_are_dropped() -> None:
    class Dropped(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            for block in self.blocks:
                if torch.rand(()) > 0.3:
                    x = x + block(x)
            return self.head(x)

    def scenario(twin: Twin) -> list[float]:
        torch.manual_seed(5)
        return twin.steps(*range(12))

    same(lambda: Dropped(num_blocks=5), scenario)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "sizes", [[4, 4, 4, 4, 2, 4, 4, 2], [4, 4, 4, 4, 8, 4, 4, 8, 4], [4, 2] * 5, [2, 3, 4, 5, 6, 7]]
)
def test_batches_of_changing_size(sizes: list[int]) -> None:
    def scenario(twin: Twin) -> list[float]:
        return [twin.step(features(seed, shape=(size, WIDTH))) for seed, size in enumerate(sizes)]

    same(stack(Mlp), scenario)


def test_sizes_that_come_again_make_no_new_chunks() -> None:
    with managed(stack(Mlp), AMPLE_NBYTES) as twin:
        counts = []
        for seed in range(24):
            twin.step(features(seed, shape=((4, 2, 8)[seed % 3], WIDTH)))
            counts.append(len(activations(twin)))
        assert counts[3:] == counts[3:4] * len(counts[3:])


def test_micro_batches() -> None:
    def scenario(twin: Twin) -> list[float]:
        def loss_of(seed: int) -> Tensor:
            for part in range(2):
                twin.loss(features(seed + 10 * part)).backward()
            return twin.loss(features(seed + 50))

        return train(twin, loss_of)

    same(stack(Mlp), scenario)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, nullcontext], ids=["no_grad", "inference", "grad"]
)
def test_evaluation_between(mode: Callable[[], Any]) -> None:
    def scenario(twin: Twin) -> list[float]:
        def loss_of(seed: int) -> Tensor:
            twin.model.eval()
            with mode():
                seen.append(twin.loss(features(seed + 30)).item())
            twin.model.train()
            return twin.loss(features(seed))

        seen: list[float] = []
        return [*train(twin, loss_of), *seen]

    same(stack(Attention, Mlp), scenario)


def test_freezing_and_unfreezing() -> None:
    def scenario(twin: Twin) -> list[float]:
        seen = twin.steps(0, 1, 2)
        for frozen in (True, False):
            for block in list(twin.model.blocks)[:2]:
                block.requires_grad_(not frozen)
            twin.model.inner.requires_grad_(not frozen)
            seen += twin.steps(3, 4, 5)
        return seen

    same(stack(Mlp), scenario)


def test_two_models_in_turn() -> None:
    """As a generator and its critic are trained."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made, self.judged = Blocks(Mlp(), Mlp(), num_blocks=0), Blocks(Mlp(), Mlp(), num_blocks=0)
            self.back = nn.Linear(4, WIDTH)

        def forward(self, x: Tensor, *, detached: bool) -> Tensor:
            made = self.back(self.made(x))
            return self.judged(made.detach() if detached else made)

    def scenario(twin: Twin) -> list[float]:
        model = twin.model
        groups = [[*model.made.parameters(), *model.back.parameters()], list(model.judged.parameters())]
        optimizers = [twin.make("AdamW", group, lr=1e-2) for group in groups]
        twin.optimizer = optimizers[0]
        seen = []
        for seed in STEPS:
            for optimizer, detached in zip(optimizers, (False, True), strict=True):
                loss = model(features(seed), detached=detached).square().mean()
                loss.backward()
                optimizer.step()
                for each in optimizers:
                    each.zero_grad()
                seen.append(loss.item())
        return seen

    same(Pair, scenario)


# Interruptions.


class Interrupted(Exception):
    pass


class Raises(nn.Module):
    """Raises in the middle, when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.forward_error: type[BaseException] | None = None
        self.backward_error: type[BaseException] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x))
        error, self.forward_error = self.forward_error, None
        if error is not None:
            raise error("in forward")
        y.register_hook(self.look)
        return x + self.down(y)

    def look(self, grad: Tensor) -> None:
        error, self.backward_error = self.backward_error, None
        if error is not None:
            raise error("in backward")


@pytest.mark.few(1)
@spread(
    keeps_graph=(False, True),
    place=("forward_error", "backward_error"),
    error=(Interrupted, KeyboardInterrupt),
)
def test_a_clean_step_after_an_error(error: type[BaseException], place: str, keeps_graph: bool) -> None:
    def scenario(twin: Twin) -> list[float]:
        seen = []
        for seed in range(6):
            setattr(twin.model.blocks[1], place, error)
            loss = None
            with pytest.raises(error):
                loss = twin.loss(features(seed))
                loss.backward(retain_graph=keeps_graph)
            if not keeps_graph:
                del loss
            twin.optimizer.zero_grad()
            seen.append(twin.step(features(seed)))
            loss = None
        return seen

    same(stack(Raises), scenario)


def test_other_training_after_an_interrupted_forward() -> None:
    """A notebook: the cell is interrupted, and another model is trained, before this one again."""

    def scenario(twin: Twin) -> list[Any]:
        torch.manual_seed(4)
        other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        seen: list[Any] = []
        for seed in STEPS:
            twin.model.blocks[1].forward_error = KeyboardInterrupt
            with pytest.raises(KeyboardInterrupt):
                twin.loss(features(seed))
            value = other(features(seed)).sum()
            seen.append(twin.step(features(seed)))
            value.backward()
            seen.append(other[0].weight.grad)
        return seen

    same(stack(Raises), scenario)


def test_a_smaller_batch_after_one_that_does_not_fit() -> None:
    with managed(stack(Mlp), AMPLE_NBYTES) as twin:
        expected = twin.steps(*range(6))
        least = required_nbytes(twin)
    with managed(stack(Mlp), least) as twin:
        seen = []
        for seed in range(6):
            with pytest.raises(CapacityError, match=r"activations of blocks\.\d forward|blocks"):
                twin.loss(features(seed, shape=(64, WIDTH)))
            seen.append(twin.step(features(seed)))
        assert seen == expected
        assert_nothing_left(twin)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("keys", [OFFLOAD, {}], ids=["activations", "weights alone"])
def test_steps_that_did_not_fit_at_first_are_planned_later(keys: dict[str, Any]) -> None:
    """As where a batch size is tried out: whichever access fails, the steps that follow are recorded and planned."""
    model = lambda: Blocks(Mlp(), nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(64 * WIDTH, WIDTH), num_blocks=1)  # noqa: E731
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, **keys)) as manager:
        twin = Twin(manager, model)
        twin.step(features(0))
        least = required_nbytes(twin)
    with chunkmem.ChunkManager(config(least, **keys)) as manager:
        twin = Twin(manager, model)
        store, kinds = manager.runtime.memory.store, set()
        take = store.take_slab
        for seed in range(12):
            left = seed

            def take_slab(chunk: Any, tier: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    kinds.add(chunk.id.role)
                    store.take_slab = take
                    raise CapacityError("tried", needed_nbytes=least, cap_nbytes=least)
                return take(chunk, tier)

            store.take_slab = take_slab  # type: ignore[method-assign]
            with pytest.raises(CapacityError, match="tried"):
                twin.loss(features(seed)).backward()
            store.take_slab = take  # type: ignore[method-assign]
            twin.optimizer.zero_grad()
            twin.step(features(seed))
        assert len(kinds) > 1
        for seed in range(4):
            twin.step(features(seed))
        timeline = manager.timeline()
        assert timeline is not None
        assert timeline.plan_misses == 0


# What autograd keeps when a step is over, and what a user gets hold of.


@pytest.mark.parametrize("error", [TierIOError("tried"), CapacityError("tried", needed_nbytes=1, cap_nbytes=1)])
@pytest.mark.parametrize("end", ["step", "close"])
def test_a_graph_that_is_kept_raises_nothing_at_the_end(
    error: Exception, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its activations are on HOST, and cannot be brought."""
    with managed(stack(Mlp), AMPLE_NBYTES) as twin:
        least = [twin.step(features(0)), required_nbytes(twin)][1]
    with managed(stack(Mlp), int(least)) as twin:
        twin.steps(0, 1, 2)
        loss, other = twin.loss(features(3)), twin.loss(features(4))
        other.backward()
        assert twin.manager is not None
        copy_of, tried = ChunkStore.copy, []

        def copy_one(store: ChunkStore, chunk: Any, source: Any, target: Any) -> None:
            if chunk.id.role is Role.ACTIVATION and target is Tier.DEVICE:
                tried.append(chunk)
                raise error
            copy_of(store, chunk, source, target)

        monkeypatch.setattr(ChunkStore, "copy", copy_one)
        if end == "close":
            twin.manager.close()
            with pytest.raises(StateError, match="closed"):
                loss.backward()
        else:
            twin.optimizer.step()
            twin.optimizer.zero_grad()
            with pytest.raises((type(error), RuntimeError), match=r"tried|modified by an inplace"):
                loss.backward()
            twin.optimizer.zero_grad()
            monkeypatch.undo()
            del loss
            twin.steps(4, 5)
            assert_nothing_left(twin)
        assert tried


def test_what_autograd_keeps_after_a_step_is_in_the_report() -> None:
    with managed(stack(Mlp), AMPLE_NBYTES) as twin:
        manager = twin.manager
        assert manager is not None
        twin.steps(0, 1, 2)
        assert manager.memory().left_nbytes == 0
        loss = twin.loss(features(3))
        manager.runtime.modules.regions.pack_last()
        nbytes = manager.memory().device.by_role["activation"][0]
        assert nbytes > 0
        twin.loss(features(4)).backward()
        twin.optimizer.step()
        twin.optimizer.zero_grad()
        assert manager.memory().left_nbytes == nbytes
        assert "held by others" in str(manager.memory())
        del loss
        assert manager.memory().left_nbytes == 0
        twin.steps(4, 5)
        assert "held by others" not in str(manager.memory())


class HandsOn(torch.autograd.Function):
    """Its backward shows a user what was saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: list[Tensor]) -> Tensor:
        ctx.kept = kept
        y = x.exp()
        ctx.save_for_backward(y)
        return y * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        ctx.kept.append(y)
        return grad * y, None


def test_what_a_user_got_hold_of_is_in_the_report_and_in_the_trace() -> None:
    kept: list[Tensor] = []
    with managed(stack(lambda: Mlp(lambda t: HandsOn.apply(t, kept))), AMPLE_NBYTES) as twin:
        manager = twin.manager
        assert manager is not None
        twin.step(features(0))
        nbytes = sum(tensor.untyped_storage().nbytes() for tensor in kept)
        assert manager.memory().left_nbytes == nbytes > 0
        assert manager.trace is None or manager.trace.moments[-1].non_model_peak_nbytes >= nbytes
        twin.step(features(1))
        assert manager.trace is not None
        assert manager.trace.moments[-1].non_model_peak_nbytes >= nbytes
        kept.clear()
        assert manager.memory().left_nbytes == 0


# The end.


def test_a_backward_after_close() -> None:
    with managed(stack(Mlp), AMPLE_NBYTES) as twin:
        least = [twin.step(features(0)), required_nbytes(twin)][1]
    with managed(stack(Mlp), int(least)) as twin:
        twin.steps(0, 1, 2)
        loss = twin.loss(features(3))
        twin.manager.close()  # type: ignore[union-attr]
        with pytest.raises(StateError, match="closed"):
            loss.backward()


def test_a_deep_copy() -> None:
    """Is an ordinary model, and never a part of the first one's activations."""
    with managed(stack(Mlp), AMPLE_NBYTES) as twin:
        loss = twin.loss(features(0))
        assert torch.equal(copy.deepcopy(twin.model)(features(0)).square().mean(), loss)
        loss.backward()
        twin.update()


def test_two_managers() -> None:
    builds = [stack(Mlp), stack(Attention)]
    plain = [Twin(None, build) for build in builds]
    torch.manual_seed(1)
    expected = [[twin.step(features(seed)) for twin in plain] for seed in STEPS]
    with managed(builds[0], AMPLE_NBYTES) as one, managed(builds[1], AMPLE_NBYTES) as other:
        torch.manual_seed(1)
        assert [[twin.step(features(seed)) for twin in (one, other)] for seed in STEPS] == expected


def test_two_threads() -> None:
    """Each trains by turns; what one has saved is not touched while the other runs."""
    with managed(stack(Mlp), AMPLE_NBYTES) as twin:
        expected = [twin.loss(features(seed)).item() for seed in range(8)]
        twin.step(features(0))
        least = required_nbytes(twin)
    with managed(stack(Mlp), 2 * least) as twin:
        found: dict[int, float] = {}
        grads: list[Tensor] = []

        def work(seeds: range) -> None:
            for seed in seeds:
                x = features(seed).requires_grad_()
                loss = twin.loss(x)
                found[seed] = loss.item()
                grads.append(*torch.autograd.grad(loss, x))

        threads = [threading.Thread(target=work, args=(range(at, 8, 2),)) for at in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [found[seed] for seed in range(8)] == expected
        assert not any(grad.isnan().any() for grad in grads)
        assert_nothing_left(twin)


class Pausing(nn.Module):
    """Calls somebody in the middle of its backward, which needs its weight at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.pause: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight)
        y.register_hook(lambda _: self.pause())
        return x + y.exp() @ self.weight


@pytest.mark.parametrize("takes_gradient", [False, True], ids=["forward", "forward and backward"])
def test_another_thread_in_the_middle_of_a_backward(takes_gradient: bool) -> None:
    """Its calls drop what an interrupted one has left, and nothing that the running backward has pinned."""
    build = lambda: Blocks(Mlp(), Pausing(), Mlp(), num_blocks=0)  # noqa: E731
    with managed(build, AMPLE_NBYTES) as twin:
        x = features(0).requires_grad_()
        twin.loss(x).backward()
        expected = x.grad
        twin.update()
        least = required_nbytes(twin)
    with managed(build, 2 * least, seed=1) as twin:
        model, pinning = twin.model, lambda: pinned_by_backward(twin.manager)  # type: ignore[arg-type]
        seen: list[tuple[str, ...]] = []

        def other() -> None:
            y = features(1).requires_grad_()
            loss = twin.loss(y)
            if takes_gradient:
                torch.autograd.grad(loss, y)

        def pause() -> None:
            model.blocks[1].pause = lambda: None
            seen.append(pinning())
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(60)
            seen.append(pinning())
            if seen[0] != seen[1]:
                raise AssertionError(f"pinned were {seen[0]}, and are {seen[1]}")  # before memory that is gone is used

        x = features(0).requires_grad_()
        loss = twin.loss(x)
        model.blocks[1].pause = pause
        loss.backward()
        assert torch.equal(x.grad, expected)
        assert len(seen) == 2
        assert seen[0] == ("blocks.1 backward", "activations of blocks.1")
        del loss
        twin.update()
        assert_nothing_left(twin)


@pytest.mark.full
def test_a_fork_in_the_middle() -> None:
    """As of a DataLoader's worker, between forward and backward."""

    def scenario(twin: Twin) -> list[float]:
        def loss_of(seed: int) -> Tensor:
            loss = twin.loss(features(seed))
            child = os.fork()
            if child == 0:
                del loss
                gc.collect()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            return loss

        return train(twin, loss_of)

    same(stack(Mlp), scenario)


# Nothing grows, and all is counted.


@pytest.mark.parametrize("num_steps", [90, pytest.param(200, marks=pytest.mark.full)])
def test_many_steps_leave_nothing_behind(num_steps: int) -> None:
    with managed(stack(Mlp), AMPLE_NBYTES) as twin:
        least = [twin.step(features(0)), required_nbytes(twin)][1]
    with managed(stack(Mlp), int(1.2 * least), seed=3) as twin:
        twin.steps(*range(50))
        store = twin.manager.runtime.memory.store  # type: ignore[union-attr]
        gc.collect()
        before = len(store.chunks), len(gc.get_objects())
        for seed in range(50, num_steps):
            twin.step(features(seed))
            audit_pins(twin.manager)  # type: ignore[arg-type]
            timeline = twin.manager.timeline()  # type: ignore[union-attr]
            assert timeline is not None
            assert timeline.plan_misses == 0, seed
        del timeline
        gc.collect()
        assert len(store.chunks) == before[0]
        assert len(gc.get_objects()) - before[1] < 150
        audit_ledgers(store)
        assert_nothing_left(twin)


def test_what_the_ledger_has_freed_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """In ordinary training nobody gets hold of a region's memory: all of it is emptied."""
    from chunkmem.activations.saved_storages import SavedStorages

    empty, sizes = SavedStorages.empty, []

    def emptied(saved: SavedStorages) -> None:
        before = list(saved._storages)
        empty(saved)
        sizes.extend(each.storage.nbytes() for _, _, each in before)

    monkeypatch.setattr(SavedStorages, "empty", emptied)
    with managed(stack(Mlp, Attention), AMPLE_NBYTES) as twin:
        least = [twin.step(features(0)), required_nbytes(twin)][1]
        losses(twin)
    for seed in (None, 1):
        with managed(stack(Mlp, Attention), least, seed) as twin:
            losses(twin)
    assert len(sizes) > 100
    assert not any(sizes)


# Copies that fail.


class Disk:
    """Copies of activations in RAM, of which the n-th fails."""

    def __init__(self) -> None:
        self.fails_at: int | None = None
        self.count = 0

    def move(self, target: int, source: int, nbytes: int) -> None:
        at, self.count = self.count, self.count + 1
        if at == self.fails_at:
            ctypes.memmove(target, source, nbytes // 2)
            raise OSError(5, "Input/output error")
        ctypes.memmove(target, source, nbytes)


@pytest.mark.filterwarnings("error:no plan is followed")
@pytest.mark.parametrize(
    ("fails_in", "stride"), [(3, 3), *(pytest.param(step, 1, marks=pytest.mark.full) for step in (0, 3))]
)
def test_each_copy_of_a_step_fails(fails_in: int, stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is named, the step can be repeated, and nothing but the step is lost. Copies are a stride apart."""
    disk = Disk()

    def transfer(store: ChunkStore, target: Tensor, source: Tensor) -> None:
        disk.move(target.data_ptr(), source.data_ptr(), target.nbytes)

    monkeypatch.setattr(ChunkStore, "transfer", transfer)
    build = lambda: Blocks(Mlp(), Mlp(), Mlp(), num_blocks=0)  # noqa: E731
    plain = Twin(None, build)
    expected = plain.steps(*range(6))
    with managed(build, AMPLE_NBYTES) as twin:
        least = [twin.step(features(0)), required_nbytes(twin)][1]
    total, at, told = 1, 0, set()
    while at < total:
        disk.fails_at, lanes = None, lambda compute: Lanes(move=disk.move)
        with chunkmem.ChunkManager(config(least, **OFFLOAD), make_lanes=lanes) as manager:
            twin = Twin(manager, build)
            seen = []
            for seed in range(6):
                disk.count, disk.fails_at = 0, at if seed == fails_in else None
                try:
                    loss = twin.loss(features(seed))
                    loss.backward()
                except TierIOError as error:
                    disk.fails_at, loss = None, None
                    told.add(str(error))
                    twin.optimizer.zero_grad()
                    loss = twin.loss(features(seed))
                    loss.backward()
                num_copies = disk.count
                try:
                    twin.update()
                except TierIOError:  # of a gradient or a weight, seen late: some groups are updated
                    break
                disk.fails_at = None
                seen.append(loss.item())
                if seed == fails_in and at == 0:
                    total = num_copies
            assert seen == expected[: len(seen)], at
        at += stride
    assert any("activation" in text for text in told), told
