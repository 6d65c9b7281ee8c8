"""`chunkmem.checkpoint` without a manager: losses, gradients, buffers and all other state as without checkpointing."""

from __future__ import annotations

import copy
import functools
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, set_checkpoint_early_stop

import chunkmem
from chunkmem.activations.random_sources import RandomStates, global_sources
from chunkmem.data.errors import ConfigError, StateError

Run = Callable[..., Any]


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stands for `chunkmem.checkpoint` on the side that keeps its activations."""
    return function(*args, **kwargs)


class NormBlock(nn.Module):
    """Running statistics of three kinds, spectral norm, dropout and two states of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.utils.parametrizations.spectral_norm(nn.Conv1d(6, 6, 3, padding=1))
        self.batch = nn.BatchNorm1d(6)
        self.average = nn.BatchNorm1d(6, momentum=None)
        self.instance = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)
        self.linear = torch.nn.utils.spectral_norm(nn.Linear(5, 5))
        self.drop = nn.Dropout(0.3)
        self.register_buffer("ema", torch.zeros(6))
        self.register_buffer("table", torch.zeros(40_000))
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        x = self.instance(self.average(self.batch(self.conv(x)))) * self.num_calls
        with torch.no_grad():
            self.ema = 0.9 * self.ema + 0.1 * x.mean((0, 2))
            self.table[self.num_calls] += x.std()
        return self.drop(self.linear(F.gelu(x + self.ema[:, None] + self.table.max())))


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def trained(model: nn.Module, step: Callable[[nn.Module, torch.Tensor], torch.Tensor], *, num_steps: int = 3) -> Any:
    """Return the losses, gradients of the input and state after some steps."""
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for _ in range(num_steps):
        x = torch.randn(4, 6, 5, requires_grad=True)
        loss = step(model, x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), x.grad]
    return found, state_of(model), torch.get_rng_state()


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


WAYS: dict[str, Callable[[Run, nn.Module, torch.Tensor], torch.Tensor]] = {
    "module": lambda run, model, x: run(model, x),
    "keyword": lambda run, model, x: run(model, x=x),
    "method": lambda run, model, x: run(model.forward, x),
    "partial": lambda run, model, x: run(functools.partial(model, x)),
    "closure": lambda run, model, x: run(lambda value: model(value) * 2, x),
    "list in a closure": lambda run, model, x: (lambda blocks: run(lambda value: blocks[0](value), x))([model]),
    "argument": lambda run, model, x: run(lambda block, value: block(value), model, x),
    "default": lambda run, model, x: run(lambda value, block=model: block(value), x),
    "nested": lambda run, model, x: run(lambda value: run(model, run(torch.sin, value)), x),
    "twice": lambda run, model, x: run(model, run(model, x)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("early_stop", [True, False])
def test_state_counts_once(way: str, early_stop: bool) -> None:
    plain = NormBlock()
    again = copy.deepcopy(plain)
    expected = trained(plain, functools.partial(WAYS[way], plainly))
    with set_checkpoint_early_stop(early_stop):
        found = trained(again, functools.partial(WAYS[way], chunkmem.checkpoint))
    assert_same(found, expected)
    assert again.num_calls == plain.num_calls
    assert int(again.batch.num_batches_tracked) == (6 if way == "twice" else 3)


class Grows(nn.Module):
    """Appends to what it has and to what it is given, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.seen: list[torch.Tensor] = []
        self.last = {"value": torch.ones(5)}
        self.queue: deque[int] = deque(maxlen=3)
        self.names: set[int] = set()

    def forward(self, x: torch.Tensor, cache: Any, stats: dict[str, Any] | None = None) -> torch.Tensor:
        y = self.linear(x)
        self.seen.append(y.detach())
        self.queue.append(len(self.seen))
        self.names.add(len(self.names))
        cache.add(y) if isinstance(cache, Cache) else cache.append(y)
        past = cache.layers if isinstance(cache, Cache) else cache
        y = (y + torch.stack(list(past)).sum(0)).tanh() * self.last["value"] * sum(self.queue) * len(self.names)
        self.last["value"] = self.last["value"] + y.detach().mean()
        if stats is not None:
            stats["num"] = stats.get("num", 0) + 1
        return y


class Cache:
    def __init__(self) -> None:
        self.layers: tuple[torch.Tensor, ...] = ()

    def add(self, value: torch.Tensor) -> None:
        self.layers = (*self.layers, value)


@pytest.mark.parametrize("kind", [list, Cache])
def test_what_grows_is_as_without_checkpointing(kind: type[Any]) -> None:
    plain = Grows()
    again = copy.deepcopy(plain)
    stats: dict[Run, dict[str, Any]] = {plainly: {}, chunkmem.checkpoint: {}}
    length: dict[Run, int] = {}

    def step(run: Run, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        cache = kind()
        for _ in range(3):
            x = run(model, x, cache, stats=stats[run])
        length[run] = len(cache.layers if kind is Cache else cache)
        return x

    expected = trained(plain, functools.partial(step, plainly))
    found = trained(again, functools.partial(step, chunkmem.checkpoint))
    assert_same(found, expected)
    assert_same(again.seen, plain.seen)
    assert_same(again.last, plain.last)
    assert (again.queue, again.names) == (plain.queue, plain.names)
    assert stats[plainly] == stats[chunkmem.checkpoint] == {"num": 9}
    assert length == {plainly: 3, chunkmem.checkpoint: 3}


class Counts(nn.Module):
    """Computes with what it has noted so far, and notes something more."""

    def __init__(self, noted: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.noted = noted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noted = self.noted
        x = x * (1 + max(noted) / 10_000)
        if isinstance(noted, dict):
            noted[max(noted) + 1] = None
        else:
            (noted.add if isinstance(noted, set) else noted.append)(max(noted) + 1)
        return self.linear(x).tanh()


@pytest.mark.parametrize(
    "noted",
    [list(range(2000)), dict.fromkeys(range(2000)), deque(range(2000), 2000), set(range(2000))],
    ids=lambda noted: type(noted).__name__,
)
def test_what_long_containers_are_given_is_taken_back_for_a_while(noted: Any) -> None:
    plain = Counts(noted)
    again = copy.deepcopy(plain)

    def step(run: Run, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return run(model, run(model, x))

    expected = trained(plain, functools.partial(step, plainly))
    assert_same(trained(again, functools.partial(step, chunkmem.checkpoint)), expected)
    assert again.noted == plain.noted
    assert max(plain.noted) > 2000


class WritesTo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.memory = torch.zeros(40_000)

    def forward(self, x: torch.Tensor, others: Any = (), *, what: str) -> torch.Tensor:
        y = self.linear(x)
        with torch.no_grad():
            if what == "input":
                x.view(-1).add_(1)
            elif what in ("in a tuple", "in a list"):
                others[0].add_(1)
            elif what == "in a cache":
                others.layers[0].add_(1)
            elif what == "attribute":
                self.memory.add_(1)
        return y.tanh()


@pytest.mark.parametrize(
    ("what", "others", "named"),
    [
        ("input", (), r"argument 0 in place \(float32 of shape \(2, 5\)"),
        ("in a tuple", (torch.zeros(3),), r"argument 1\[0\] in place"),
        ("in a list", [torch.zeros(20_000)], r"argument 1\[0\] in place"),
        ("in a cache", "cache", r"argument 1.layers\[0\] in place"),
        ("attribute", (), r"WritesTo.memory in place"),
    ],
)
def test_a_write_to_what_a_call_is_given_is_an_error(what: str, others: Any, named: str) -> None:
    if others == "cache":
        others = Cache()
        others.add(torch.zeros(3))
    with pytest.raises(StateError, match="WritesTo is to be recomputed in backward, but wrote to " + named):
        chunkmem.checkpoint(WritesTo(), torch.randn(2, 5), others, what=what)
    with torch.no_grad():  # nothing is recomputed
        chunkmem.checkpoint(WritesTo(), torch.randn(2, 5), others, what=what)


def test_a_write_after_the_call_is_an_error() -> None:
    values = [torch.ones(20_000)]
    y = chunkmem.checkpoint(lambda x, given: (x * given[0]).tanh(), torch.ones(20_000, requires_grad=True), values)
    values[0].mul_(2)
    with pytest.raises(StateError, match=r"argument 1\[0\] .* was written to in place after the forward"):
        y.sum().backward()


@pytest.mark.parametrize("flip", ["functional_call", "frozen after forward", "unfrozen after forward"])
def test_the_second_run_has_the_weights_of_the_first(flip: str) -> None:
    """Tensors that stood in for weights are gone by then, and what needs a gradient may be something else."""

    def gradients(run: Run) -> Any:
        torch.manual_seed(3)
        block, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4, requires_grad=True)
        leaves = [param.detach().clone().requires_grad_() for param in block.parameters()]
        if flip == "functional_call":
            fast = {name: 2 * leaf for (name, _), leaf in zip(block.named_parameters(), leaves, strict=True)}
            model = nn.Module()
            model.block, model.forward = block, lambda x: run(block, x)
            loss = torch.func.functional_call(model, {f"block.{k}": v for k, v in fast.items()}, (x,)).square().sum()
        else:
            block[0].requires_grad_(flip == "frozen after forward")
            loss = run(block, x).square().sum()
            block[0].requires_grad_(flip != "frozen after forward")
        loss.backward()
        after = [param.requires_grad for param in block.parameters()]
        return x.grad, after, [None if leaf.grad is None else leaf.grad for leaf in (*leaves, *block.parameters())]

    expected, found = gradients(plainly), gradients(chunkmem.checkpoint)
    assert expected[1] == found[1]
    for one, other in zip([expected[0], *expected[2]], [found[0], *found[2]], strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def noisy(block: nn.Module, generator: torch.Generator, x: torch.Tensor) -> torch.Tensor:
    scale = random.random() + np.random.default_rng(0).random() + np.random.rand() + torch.rand((), generator=generator)
    return block(x * scale).tanh() * scale


def test_random_numbers_of_all_sources_are_repeated() -> None:
    def run(checkpoint: Run) -> Any:
        torch.manual_seed(0)
        random.seed(1)
        np.random.seed(2)
        generator = torch.Generator().manual_seed(3)
        block = nn.Linear(5, 5)
        x = torch.randn(2, 5, requires_grad=True)
        y = x
        for _ in range(3):
            y = checkpoint(noisy, block, generator, y)
        y.sum().backward()
        return [x.grad, block.weight.grad, torch.tensor(random.random()), torch.tensor(np.random.rand())]

    expected = run(plainly)

    def with_all(function: Any, block: Any, generator: torch.Generator, y: torch.Tensor) -> Any:
        return chunkmem.checkpoint(function, block, generator, y, rng=("python", "numpy", generator))

    assert_same(run(with_all), expected)
    with pytest.raises(AssertionError):
        assert_same(run(chunkmem.checkpoint), expected)
    with pytest.raises(ConfigError, match="'cupy' is no source"):
        chunkmem.checkpoint(torch.sin, torch.ones(2), rng=("cupy",))


def test_an_error_in_the_recomputation_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    block = NormBlock()
    fails = iter([False, True, False])  # an iterator goes on in the second run, where a list is as it was

    def call(x: torch.Tensor) -> torch.Tensor:
        y = block.batch(block.conv(x))
        block.num_calls += 1
        if next(fails):
            raise ArithmeticError("injected")
        return F.gelu(y)

    x = torch.randn(4, 6, 5, requires_grad=True)
    y = chunkmem.checkpoint(call, x)
    state = state_of(block)
    rng = torch.get_rng_state()
    buffers = dict(block.named_buffers())
    with pytest.raises(ArithmeticError):
        y.sum().backward(retain_graph=True)
    assert_same(state_of(block), state)
    assert block.num_calls == 1
    assert all(buffers[name] is buffer for name, buffer in block.named_buffers())
    y.sum().backward()
    assert_same(state_of(block), state)
    assert_same(torch.get_rng_state(), rng)


def test_graphs_that_are_kept() -> None:
    """Backward twice through one graph, and the gradient of a gradient: the same numbers, and state counted once."""
    found = []
    for run in (plainly, chunkmem.checkpoint):
        torch.manual_seed(0)
        block = NormBlock()
        x = torch.randn(4, 6, 5, requires_grad=True)
        y = run(block, x)
        y.sum().backward(retain_graph=True)
        first, x.grad = x.grad, None
        (y.square().sum() + y.sum()).backward()
        y = run(block, x)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (grad.square().sum() + run(block, x + grad).sum()).backward()
        found.append([first, x.grad, *[p.grad for p in block.parameters()], *block.buffers()])
        assert int(block.batch.num_batches_tracked) == 3
    assert_same(found[1], found[0])


def test_a_selection_of_operators_is_kept() -> None:
    saved: list[str] = []

    def policy(_context: object, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        keeps = operator in (torch.ops.aten.addmm.default, torch.ops.aten.clone.default)
        saved.append(str(operator)) if keeps else None
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    run = functools.partial(
        chunkmem.checkpoint, context_fn=functools.partial(create_selective_checkpoint_contexts, policy)
    )
    plain = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(5, 5))
    plain[0] = nn.Flatten(0, 0)
    again = copy.deepcopy(plain)
    expected = trained(plain, functools.partial(WAYS["module"], plainly))
    assert_same(trained(again, functools.partial(WAYS["module"], run)), expected)
    assert saved


def test_the_mode_of_the_first_run_counts() -> None:
    """Between forward and backward a model is put into evaluation, and a list that was read is emptied."""
    torch.manual_seed(0)
    block = NormBlock()
    scales = [torch.full((5,), 2.0)]
    x = torch.randn(4, 6, 5, requires_grad=True)
    other = copy.deepcopy(block)
    rng = torch.get_rng_state()
    (block(x) * scales[0]).tanh().sum().backward()
    expected, x.grad = x.grad, None
    torch.set_rng_state(rng)
    y = chunkmem.checkpoint(lambda value: (other(value) * scales[0]).tanh(), x)
    other.eval()
    scales.clear()
    y.sum().backward()
    assert_same(x.grad, expected)
    assert not other.training
    assert scales == []
    assert_same(state_of(other), state_of(block))


def test_tied_weights_views_and_values_without_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 6)
            self.head = nn.Linear(6, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor, scale: float, mask: torch.Tensor | None, *, run: Run) -> Any:
            h = run(self.embed, ids)
            a, b = run(lambda value: (value[:, :3], value[:, 3:].t()), h)
            h = run(lambda pair, s, m: torch.cat([pair[0], pair[1].t()], 1).tanh() * s * m, (a, b), scale, mask)
            return run(self.head, h)

    found = []
    for run in (plainly, chunkmem.checkpoint):
        torch.manual_seed(0)
        model = Tied()
        model(torch.tensor([0, 3, 5]), 2.0, torch.rand(3, 6), run=run).square().sum().backward()
        found.append(model.embed.weight.grad)
    assert_same(found[1], found[0])


def test_a_counter_in_a_closure_counts_once() -> None:
    count = 0

    def call(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return (x * count).tanh()

    x = torch.ones(3, requires_grad=True)
    y = chunkmem.checkpoint(call, x)
    y = chunkmem.checkpoint(call, y)
    y.sum().backward()
    x.grad, found = None, x.grad
    count = 0
    call(call(x)).sum().backward()
    assert_same(found, x.grad)
    assert count == 2


def test_reentrant_is_refused() -> None:
    with pytest.raises(ConfigError, match="non-reentrant"):
        chunkmem.checkpoint(torch.sin, torch.ones(2), use_reentrant=True)
    assert_same(chunkmem.checkpoint(torch.sin, torch.ones(2), use_reentrant=False), torch.ones(2).sin())


class Masked(nn.Module):
    """Takes and returns several values, of which only the first has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.block = NormBlock()

    def forward(self, x: torch.Tensor, mask: torch.Tensor, position: int, nothing: None) -> tuple[Any, ...]:
        assert nothing is None
        return self.block(x).masked_fill(mask, 0.5) * position, mask.roll(1, 0), position + 1, None


@pytest.mark.parametrize("segments", [1, 2, 3, 4, 5])
def test_any_number_of_segments(segments: int) -> None:
    plain = nn.ModuleList(Masked() for _ in range(5))
    again = copy.deepcopy(plain)

    def step(run: Run, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y, mask, position, nothing = run(model, x, torch.arange(6)[:, None] > 3, 1, None)
        assert (position, nothing) == (6, None)
        return torch.where(mask, y, 2 * y)

    def in_order(blocks: Any, *values: Any) -> Any:
        for block in blocks:
            values = block(*values)
        return values

    expected = trained(plain, functools.partial(step, in_order))
    sequential = lambda model, *inputs: chunkmem.checkpoint_sequential(model, segments, *inputs)  # noqa: E731
    assert_same(trained(again, functools.partial(step, sequential)), expected)


def test_segments_as_torch_cuts_them_and_inputs_without_gradient() -> None:
    calls: list[int] = []

    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(7)))
    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    x = torch.randn(2, 3)
    y = chunkmem.checkpoint_sequential(blocks, 3, x)
    assert_same(y, blocks(x))
    calls.clear()
    y.sum().backward()
    assert calls == [3, 4, 0, 1, 2]
    assert chunkmem.checkpoint_sequential([], 1, 5) == 5
    for segments in (0, 8):
        with pytest.raises(ConfigError, match=f"segments: {segments}, for 7 blocks; give 1 to 7"):
            chunkmem.checkpoint_sequential(blocks, segments, x)


class Statistics(nn.Module):
    """Keeps them where no module has them as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)
        self.register_buffer("sums", torch.zeros(6))
        self.register_buffer("first_sums", self.sums[:3])
        self.counts = np.zeros(2)
        self.slots = Slots()

    def forward(self, x: torch.Tensor, mean: torch.Tensor, stats: dict[str, torch.Tensor]) -> torch.Tensor:
        self.first_sums += 1
        self.counts[0] += 1
        self.slots.count += 1
        scale = float(self.sums.sum() * self.counts[0] * self.slots.count)
        x = F.batch_norm(x, mean, stats["var"], training=True)
        return (x * scale * torch.rand(x.shape, generator=self.generator)).tanh() + mean[:, None]


class Slots:
    __slots__ = ("count", "empty")

    def __init__(self) -> None:
        self.count = 0


def test_small_state_counts_once_wherever_it_is() -> None:
    """Arguments that BatchNorm's kernels write to, a dict, views of a buffer, an array, slots, a generator."""
    found = []
    for run in (plainly, chunkmem.checkpoint):
        model, linear = Statistics(), nn.Linear(5, 5)
        torch.manual_seed(0)
        nn.init.normal_(linear.weight)
        nn.init.zeros_(linear.bias)
        mean, stats = torch.zeros(6), {"var": torch.ones(6)}
        closure = torch.zeros(6)

        def call(x: torch.Tensor, linear: nn.Module = linear, closure: torch.Tensor = closure) -> torch.Tensor:
            return F.batch_norm(linear(x), closure, torch.ones(6), training=True)

        def closed(x: torch.Tensor, call: Any = call, **given: Any) -> torch.Tensor:
            return call(x, closure=given["closure"])

        x = torch.randn(4, 6, 5, requires_grad=True)
        y = run(closed, run(model, run(model, x, mean, stats=stats), mean, stats=stats), closure=closure)
        y.square().sum().backward()
        tensors = [x.grad, linear.weight.grad, mean, stats["var"], closure, model.sums, model.generator.get_state()]
        found.append([*tensors, torch.tensor([*model.counts, model.slots.count])])
    assert_same(found[1], found[0])


def test_what_cannot_be_run_twice_alike_is_refused() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    lazy = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with pytest.raises(StateError, match=r"Sequential.1.running_mean has no values yet .* call the module once before"):
        chunkmem.checkpoint(lazy, x)
    lazy(x)
    chunkmem.checkpoint(lazy, x).sum().backward()
    assert int(lazy[1].num_batches_tracked) == 2


def test_arguments_that_are_one_tensor_are_one_again() -> None:
    """`nn.MultiheadAttention` projects query, key and value together if they are."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    same: list[bool] = []

    def call(first: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], *, last: torch.Tensor) -> torch.Tensor:
        same.append(first is pair[0] and first is last and first is not pair[1])
        mean: torch.Tensor = attention(first, pair[0], last, need_weights=False)[0].mean() + pair[1].mean()
        return mean

    x = torch.randn(2, 5, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t.view_as(t)):  # as of activations
        loss = chunkmem.checkpoint(call, x, (x, x.detach()), last=x, use_reentrant=False)
    loss.backward()
    recomputed = x.grad
    x.grad = None
    call(x, (x, x.detach()), last=x).backward()
    assert torch.equal(recomputed, x.grad)
    assert same == [True] * 2  # the second run leaves no trace


@pytest.mark.parametrize("source", ["python", "numpy"])
def test_sources_that_a_call_has_not_drawn_from_are_left_alone(source: Literal["python", "numpy"]) -> None:
    """Their states are long, and are set for nothing."""
    draw, seed = (random.random, random.seed) if source == "python" else (np.random.random, np.random.seed)
    seed(3)
    expected = [draw() for _ in range(2)]
    seed(3)
    silent, drawing = RandomStates((source,)), RandomStates((source,))
    silent.forget_undrawn()
    first = draw()
    drawing.forget_undrawn()
    with silent.restored():
        second = draw()
    assert [first, second] == expected
    with drawing.restored():
        assert draw() == first


def test_states_of_numpy_that_are_known_from_the_call_before() -> None:
    """Every second normal number is kept from the draw before, which numpy's twister does not show."""
    sources = global_sources()
    np.random.seed(3)
    expected = [np.random.randn() for _ in range(6)]
    np.random.seed(3)
    for number in range(6):
        silent, drawing = RandomStates(sources), RandomStates(sources)
        silent.forget_undrawn()
        assert np.random.randn() == expected[number]
        drawing.forget_undrawn()
        with silent.restored(), drawing.restored():
            assert np.random.randn() == expected[number]
