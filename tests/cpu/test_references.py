"""What a graph or somebody outside keeps of a chunk's memory stays, and nothing else does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import chunkmem
from chunkmem.runtime.chunk import Chunk
from tests.helpers.twins import (
    AMPLE_NBYTES,
    CHUNK_NUMEL,
    WIDTH,
    Blocks,
    Twin,
    assert_equal,
    config,
    cpu_only,
    features,
    mlp,
    same,
)

CHUNK_NBYTES = 4 * CHUNK_NUMEL


class Weight(nn.Module):
    """Reads a weight of its own."""

    def __init__(self, *, trains: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4, requires_grad=trains)


class DetachedAndLive(Weight):
    """The node that has saved `weight.detach()` leads to the input only: the weight's gradient lands before it runs."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight.detach())), self.weight)


class Masked(Weight):
    """A frozen weight under a trained mask: the node that has saved it does not lead to the input."""

    def __init__(self) -> None:
        super().__init__(trains=False)
        self.scores = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * torch.sigmoid(self.scores))


class Closure(Weight):
    def forward(self, x: Tensor) -> Callable[[], Tensor]:
        made = x @ torch.tanh(self.weight)
        return lambda: made


class UsesClosure(nn.Module):
    """Gets a result that no search of outputs finds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Closure()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)()


class HiddenLoss(Weight):
    """Leaves a loss where nobody looks, beside a visible output."""

    def __init__(self, left: list[Tensor]) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)
        self.left = lambda: left

    def forward(self, x: Tensor) -> Tensor:
        self.left().append(self.child.weight.square().sum() + self.weight.abs().sum())
        return self.child(x) @ self.weight


class Scripted(Blocks):
    """The block under test three times, with others between."""

    def __init__(self, make: Callable[[], nn.Module], *, recompute: bool = False) -> None:
        super().__init__(*(module for _ in range(3) for module in (make(), mlp())), num_blocks=0)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def steps(twin: Twin, *, leaf: bool = True, extra: Callable[[], Any] = lambda: 0.0) -> list[Any]:
    """Train four steps by a bare `loss.backward()`; `leaf` inputs require grad."""
    seen: list[Any] = []
    for seed in range(4):
        x = features(seed).requires_grad_(leaf)
        loss = twin.loss(x) + 1e-2 * extra()
        loss.backward()
        twin.optimizer.step()  # without an audit, which does not allow for what is kept
        twin.optimizer.zero_grad()
        seen += [loss.item(), None if x.grad is None else x.grad]
    return seen


@pytest.mark.few(1)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize(("make", "most"), [(DetachedAndLive, 4), (Masked, 5), (UsesClosure, 4)])
def test_a_weight_stays_until_its_last_user_has_run(
    make: Callable[[], nn.Module], most: int, leaf: bool, recompute: bool
) -> None:
    """The call used to let go when the gradients of its reads had landed: SIGSEGV, NaN, or numbers of another chunk."""
    nbytes = same(lambda: Scripted(make, recompute=recompute), lambda twin: steps(twin, leaf=leaf))
    if not torch.accelerator.is_available():
        assert nbytes <= most * CHUNK_NBYTES


def test_a_hidden_loss_keeps_what_it_needs() -> None:
    left: list[Tensor] = []

    def extra() -> Tensor:
        total = torch.stack(left).sum()
        left.clear()
        return total

    same(lambda: Scripted(lambda: HiddenLoss(left)), lambda twin: steps(twin, extra=extra))


@cpu_only
def test_looking_at_weights_between_steps_costs_no_room() -> None:
    """`[layer.weight.norm().item() for layer in layers]`, gradients enabled: each was pinned until the step after."""

    def scenario(twin: Twin, *, look: bool = True) -> list[Any]:
        seen = steps(twin)
        layers = [module for module in twin.model.modules() if isinstance(module, nn.Linear)]
        for _ in range(2):
            norms = [layer.weight.norm().item() for layer in layers]
            seen += [norms if look else None, *steps(twin)]
        return seen

    with_norms = same(Blocks, scenario)
    assert with_norms == same(Blocks, lambda twin: scenario(twin, look=False))


def test_a_penalty_on_all_weights_needs_no_room_for_all() -> None:
    """Each comes back for the backward of its own operator, and goes when that has run."""

    def scenario(twin: Twin) -> list[Any]:
        return steps(twin, extra=lambda: sum(param.pow(2).sum() for param in twin.model.parameters()))

    plain = Twin(None, Blocks)
    expected = scenario(plain), plain.left()
    with chunkmem.ChunkManager(config(4 * CHUNK_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        assert_equal((scenario(twin), twin.left()), expected)


class Keeps(Weight):
    """Keeps an alias of its weight, which nothing but the use of memory tells of."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = [self.weight.data, lambda: None]
        return x @ self.weight


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "data": lambda w: w.data,
    "detach": lambda w: w.detach(),
    "numpy": lambda w: torch.from_numpy(w.detach().numpy()),
    "view": lambda w: w.view(-1)[3:40].detach(),
    "storage": lambda w: torch.empty(0).set_(w.untyped_storage()),
    "dlpack": lambda w: torch.from_dlpack(w.detach()),
}


@pytest.mark.few(1)
@cpu_only
@pytest.mark.parametrize("how", list(ALIASES))
def test_an_alias_that_outlives_its_moment_sees_every_update(how: str) -> None:
    def scenario(twin: Twin) -> list[Any]:
        kept = ALIASES[how](twin.model.blocks[1][0].weight)
        seen: list[Any] = []
        for _ in range(3):
            seen += [*steps(twin), kept.clone()]
            with torch.no_grad():
                kept[0] = 0.25
        del kept
        return [*seen, *steps(twin)]

    same(Blocks, scenario)


@cpu_only
@pytest.mark.parametrize("how", list(ALIASES))
def test_an_alias_outlives_the_manager(how: str) -> None:
    """It is its memory then; all other memory is given back."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        twin.train()
        with manager.gather(twin.model):
            kept = [ALIASES[how](param) for param in twin.model.parameters()]
        twin.model(features(0))
        expected = [alias.clone() for alias in kept]
        pools = manager.runtime.memory.store.pools
    others = [torch.full((1 << 16,), 7.0) for _ in range(8)]  # would take memory that was given back
    assert all(map(torch.equal, kept, expected))
    assert {tier: pool.ledger.total_nbytes for tier, pool in pools.items() if pool.ledger.total_nbytes} == {}
    del others


@cpu_only
def test_an_alias_made_inside_of_a_forward_is_one_too() -> None:
    same(lambda: Scripted(Keeps), lambda twin: [*steps(twin), twin.model.blocks[0].kept[0].clone()])


@cpu_only
def test_too_many_aliases_are_named() -> None:
    with chunkmem.ChunkManager(config(4 * CHUNK_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        twin.train()
        with pytest.raises(chunkmem.CapacityError, match=r"The memory of .*inner\.weight.* is kept by a tensor"):
            kept = [param.detach() for param in twin.model.parameters()]
        kept = []
        assert not kept
        twin.train()


@cpu_only
def test_what_a_module_writes_past_the_counters_is_kept() -> None:
    """`self.weight.data.clamp_()` in forward moves no version counter."""

    class Clamps(Weight):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.clamp_(-0.2, 0.2)
            return x @ self.weight

    same(lambda: Scripted(Clamps), steps)


def test_threads_that_evaluate_one_model_take_turns() -> None:
    with chunkmem.ChunkManager(config(4 * CHUNK_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        twin.train()
        with torch.no_grad():
            expected = [twin.model(features(seed)).clone() for seed in range(4)]
        found: dict[int, list[Tensor]] = {seed: [] for seed in range(4)}
        errors: list[BaseException] = []

        def evaluate(seed: int) -> None:
            try:
                for _ in range(8):
                    with torch.no_grad():
                        found[seed].append(twin.model(features(seed)))
                    twin.model.head.weight.norm().item()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=evaluate, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert all(torch.equal(out, expected[seed]) for seed, outs in found.items() for out in outs)
        twin.train()


def test_a_thread_that_fails_lets_others_have_their_turn() -> None:
    class Spoils(Weight):
        spoils = False

        def forward(self, x: Tensor) -> Tensor:
            out = x @ self.weight
            if self.spoils:
                self.weight.data = torch.zeros(3, device=x.device)
            return out

    with chunkmem.ChunkManager(config(8 * CHUNK_NBYTES)) as manager:
        twin = Twin(manager, Spoils)
        twin.train()
        before = twin.weights()
        Spoils.spoils = True
        with pytest.raises(chunkmem.StateError, match=r"weight \(16, 16\).*keeps its shape and dtype"):
            twin.model(features(0))
        Spoils.spoils = False
        assert_equal(twin.weights(), before)
        seen: list[Tensor] = []
        other = threading.Thread(target=lambda: seen.append(twin.model(features(0)).detach()), daemon=True)
        other.start()
        other.join(timeout=30)
        assert len(seen) == 1
        assert torch.equal(seen[0], twin.model(features(0)))
        twin.train()


class HandsOver(nn.Module):
    """Uses what a child returns of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.child = ReturnsWeight()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.child())


class ReturnsWeight(Weight):
    def forward(self) -> Tensor:
        return self.weight.t()


@cpu_only
def test_what_a_module_returns_of_its_weight_needs_no_room_until_its_backward() -> None:
    """It counts as read by the caller. As somebody's alias it would stay on DEVICE from forward to backward."""
    assert same(lambda: Scripted(HandsOver), steps) <= 4 * CHUNK_NBYTES


@cpu_only
def test_operators_over_lists_need_room_for_one() -> None:
    def scenario(twin: Twin) -> list[Any]:
        seen = steps(twin)
        params = list(twin.model.parameters())
        average = [param.detach().clone() for param in params]
        with torch.no_grad():
            torch._foreach_mul_(params, 0.9)
            torch._foreach_lerp_(average, params, 0.5)
            norms = torch._foreach_norm(params)
        return [*seen, average, norms, *steps(twin)]

    plain = Twin(None, Blocks)
    expected = scenario(plain), plain.left()
    with chunkmem.ChunkManager(config(4 * CHUNK_NBYTES)) as manager:
        twin = Twin(manager, Blocks)
        assert_equal((scenario(twin), twin.left()), expected)


class KeepsAlias(Blocks):
    """Keeps memory of its own parameter; layers inside have their own saved, and all are in one chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(*(nn.LayerNorm(WIDTH) for _ in range(4)))
        self.shift = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms(x + self.shift)
        self.kept = self.shift.detach()
        return super().forward(x)


@cpu_only
def test_what_calls_inside_have_left_of_other_parameters_hides_no_alias() -> None:
    """Once the layers' references were taken off those of the model, which then seemed to keep nothing."""

    with chunkmem.ChunkManager(config(1 << 20)) as manager:
        twin = Twin(manager, KeepsAlias)
        twin.loss(features(0)).backward()
        assert manager.runtime.modules.access.holders() != ()
        del twin.model.kept
        twin.update()
        assert manager.runtime.modules.access.holders() == ()


def test_a_finalizer_may_use_a_parameter_while_held_chunks_are_looked_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's collector runs finalizers at any allocation: between two looks at what is held, one lets go of some."""
    manager = chunkmem.ChunkManager(chunkmem.Config.from_dict({"default_chunk_size": 64}))
    model = manager.wrap(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))))
    views = [layer.weight.data for layer in model]
    access = manager.runtime.modules.access
    assert len(access.holders()) == 3
    is_kept, num_calls = access._is_kept, iter(range(1000))

    def interrupted(chunk: Chunk) -> bool:
        if next(num_calls) == 0:
            views[0] = views[2] = torch.empty(0)
            model[0].weight.sum()
            views[0] = model[0].weight.data
        return is_kept(chunk)

    monkeypatch.setattr(access, "_is_kept", interrupted)
    assert torch.equal(model[1].weight.sum(), views[1].sum())
    assert set(access.holders()) == {"param chunk 0 (0.weight)", "param chunk 1 (1.weight)"}
    assert torch.equal(views[0], manager.state_dict()["0.weight"])
