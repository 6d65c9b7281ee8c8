"""torch.compile over managed modules: the bits and graphs of plain compiled PyTorch, however it was asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import chunkmem
from chunkmem.modules.compiled import _OPAQUE
from tests.helpers.low_precision import LowPlain
from tests.helpers.ranks import Team
from tests.helpers.shared_training import Outcome, Task, serial, train
from tests.helpers.spread import spread
from tests.helpers.twins import (
    AMPLE_NBYTES,
    CHUNK_NUMEL,
    WIDTH,
    Blocks,
    Twin,
    assert_equal,
    config,
    copied,
    cpu_only,
    features,
    same,
)

pytestmark = cpu_only
Options = dict[str, Any]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Each test compiles for itself."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A residual block with something to fuse."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def blocks(kind: Callable[[], nn.Module] = Block) -> Blocks:
    return Blocks(*(kind() for _ in range(3)), num_blocks=0)


# Ways to ask for it.


def manager_compiles_model(manager: chunkmem.ChunkManager, model: Any, options: Options) -> Any:
    return manager.compile(model, **options)


def manager_compiles_blocks(manager: chunkmem.ChunkManager, model: Any, options: Options) -> Any:
    for block in model.blocks:
        manager.compile(block, **options)
    return model


def blocks_compile_themselves(_manager: chunkmem.ChunkManager, model: Any, options: Options) -> Any:
    for block in model.blocks:
        block.compile(**options)
    return model


def torch_compiles_model(_manager: chunkmem.ChunkManager, model: Any, options: Options) -> Any:
    return torch.compile(model, **options)


def torch_compiles_blocks(_manager: chunkmem.ChunkManager, model: Any, options: Options) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, **options)
    return model


def model_compiles_itself(_manager: chunkmem.ChunkManager, model: Any, options: Options) -> Any:
    model.compile(**options)
    return model


WAYS: dict[str, Callable[[chunkmem.ChunkManager, Any, Options], Any]] = {
    way.__name__: way
    for way in (
        manager_compiles_model,
        torch_compiles_model,
        model_compiles_itself,
        manager_compiles_blocks,
        blocks_compile_themselves,
        torch_compiles_blocks,
    )
}
WHEN = ("after", "inside init", "before wrap")


class Compiled(Twin):
    """A twin whose blocks are compiled: in plain PyTorch each by itself."""

    def __init__(
        self,
        manager: chunkmem.ChunkManager | None,
        build: Callable[[], nn.Module],
        *,
        way: str = "manager_compiles_model",
        when: str = "after",
        compiler: Options | None = None,
        **options: Any,
    ) -> None:
        torch._dynamo.reset()
        counters.clear()
        self.compiler = {"backend": "aot_eager"} | (compiler or {})
        self.way, self.when = way, when
        self.called: Any = None
        if manager is None:
            super().__init__(None, build, **options)
            self.compile()
            return
        self.manager = manager
        made = partial(self._built, build)
        if when == "before wrap":
            torch.manual_seed(11)
            model = made()
            params = lambda _: manager.wrap(model).parameters()  # noqa: E731
            super().__init__(manager, nn.Identity, params=params, **options)
            self.model = model
        else:
            super().__init__(manager, made, **options)
        if when == "after":
            self.called = WAYS[way](manager, self.model, self.compiler)
        elif is_wrapped(self.model):
            self.called, self.model = self.model, self.model._orig_mod

    def compile(self) -> None:
        """In plain PyTorch."""
        self.called = self.model
        for block in self.model.blocks:
            block.compile(**self.compiler)

    def _built(self, build: Callable[[], nn.Module]) -> nn.Module:
        model = build()
        if self.when != "after":
            self.called = WAYS[self.way](self.manager, model, self.compiler)
            return self.called
        return model

    def loss(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.called(*args, **kwargs).square().mean()

    def weights(self) -> dict[str, Tensor]:
        return {key.replace("_orig_mod.", ""): value for key, value in super().weights().items()}


def is_wrapped(model: nn.Module) -> bool:
    return isinstance(model, torch._dynamo.OptimizedModule)


def stats() -> tuple[int, int]:
    """Graphs made since the twin was, and breaks."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def steps(twin: Twin, num: int = 5) -> Any:
    return twin.steps(*range(num))


def counted(scenario: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What a scenario returns, and what the compiler has counted."""
    return lambda twin: (scenario(twin), stats())


def same_compiled(
    scenario: Callable[[Any], Any] = steps,
    build: Callable[[], nn.Module] = blocks,
    *,
    keys: Options | None = None,
    **options: Any,
) -> None:
    """The same bits, and as many graphs, as of blocks compiled in plain PyTorch; with ample room and the least."""
    same(build, counted(scenario), keys=keys, twin=partial(Compiled, **options))  # type: ignore[arg-type]


@pytest.mark.few(1)
@spread(way=WAYS, when=WHEN)
def test_however_and_whenever(way: str, when: str) -> None:
    same_compiled(way=way, when=when)
    assert stats() == (1, 0)


# What a step may be.


def accumulated(twin: Twin) -> Any:
    losses = []
    for step in range(4):
        for part in range(3):
            loss = twin.loss(features(3 * step + part))
            twin.backward(loss)
            losses.append(loss.item())
        twin.update()
    return losses


def evaluated(twin: Any) -> Any:
    found = []
    for step in range(4):
        found.append(twin.step(features(step)))
        twin.model.eval()
        with torch.no_grad():
            found.append(twin.called(features(10 + step)))
        found.append(twin.called(features(20 + step)).detach())
        twin.model.train()
    return found


def accumulated_and_evaluated(twin: Any) -> Any:
    """What is compiled while gradients wait for their step."""
    found = []
    for step in range(3):
        twin.backward(twin.loss(features(step)))
        with torch.no_grad():
            found.append(twin.called(features(10 + step)))
        twin.backward(twin.loss(features(step, shape=(6, 16))))
        twin.update()
    return found


def of_many_shapes(twin: Twin) -> Any:
    return [twin.step(features(step, shape=(3 + step, 16))) for step in range(6)]


def random(twin: Twin) -> Any:
    torch.manual_seed(5)
    return [*twin.steps(0, 1, 2, 3), torch.rand(1)]


def in_autocast(twin: Any) -> Any:
    found = []
    for step in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = twin.loss(features(step))
        twin.backward(loss)
        twin.update()
        found.append(loss.item())
    return found


def clipped(twin: Any) -> Any:
    found = []
    for step in range(4):
        twin.backward(twin.loss(features(step)))
        found.append(torch.nn.utils.clip_grad_norm_(twin.model.parameters(), 0.01).clone())
        twin.update()
    return found


def frozen_later(twin: Any) -> Any:
    found = [twin.steps(0, 1, 2)]
    twin.model.blocks[0].up.weight.requires_grad_(False)
    twin.model.blocks[1].requires_grad_(False)
    return [*found, twin.steps(3, 4, 5)]


def gradients_of_inputs(twin: Any) -> Any:
    found = []
    for step in range(4):
        x = features(step).requires_grad_()
        (grad,) = torch.autograd.grad(twin.loss(x), x)
        found += [grad, twin.step(features(step))]
    return found


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        accumulated,
        evaluated,
        accumulated_and_evaluated,
        of_many_shapes,
        random,
        in_autocast,
        clipped,
        frozen_later,
        gradients_of_inputs,
    )
}


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:a managed model was called inside torch.autocast")
@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(
            name, marks=[] if name in ("accumulated_and_evaluated", "random", "frozen_later") else pytest.mark.full
        )
        for name in SCENARIOS
    ],
)
def test_what_a_step_may_be(scenario: str) -> None:
    build = partial(blocks, partial(Block, 0.3)) if scenario == "random" else blocks
    same_compiled(SCENARIOS[scenario], build)


@pytest.mark.full
def test_dynamic_shapes() -> None:
    same_compiled(of_many_shapes, compiler={"dynamic": True})
    assert stats() == (1, 0)


# What blocks may be.


class Checkpointed(Blocks):
    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__(*(Block(0.3) for _ in range(3)), num_blocks=0)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class Tied(Blocks):
    """Blocks share a weight, and the head has that of the first layer."""

    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(3)), num_blocks=0)
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.inner.weight


class Repeated(Blocks):
    """Each block is called twice."""

    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(3)), num_blocks=0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)


class Normed(nn.Module):
    """Running statistics are written in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.relu(self.norm(self.linear(x)))


class OwnWeight(nn.Module):
    """Reads weights of its own, and those of a layer that it never calls; returns several things."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + F.linear(x, self.layer.weight.t(), self.layer.bias)


class FrozenPart(nn.Module):
    """A frozen weight in a module with children, and an input that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.trained(torch.tanh(self.frozen(x)))


class Attention(nn.Module):
    """Reads the output projection of torch's attention without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = x[None]
        return x + self.attention(y, y, y, need_weights=False)[0][0]


class Breaking(nn.Module):
    """Python in between that no compiler follows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return torch.tanh(self.second(x)) + x


class CheckpointInside(Block):
    """As layers of transformers with gradient checkpointing: the graph has an operator that keeps random numbers."""

    def __init__(self) -> None:
        super().__init__(0.3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class BreakingInCheckpoint(nn.Module):
    """What is not compiled saves frozen weights, of which a checkpoint shows nothing: "setStorage: out of bounds"."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.requires_grad_(False)

    def body(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        result: Tensor = self.third(torch.tanh(self.second(x))) + x
        return result

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.body, x, use_reentrant=False)
        return result


class Hooked(Block):
    """A user's hooks, on the module and inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(lambda _module, args: (args[0] * 2,))
        self.register_forward_hook(lambda _module, _args, out: out + 1)
        self.up.register_forward_hook(lambda _module, _args, out: out * 1.5)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "checkpointed": Checkpointed,
    "checkpointed reentrant": partial(Checkpointed, reentrant=True),
    "tied": Tied,
    "repeated": Repeated,
    "normed": partial(blocks, Normed),
    "own weight": partial(blocks, OwnWeight),
    "frozen part": partial(blocks, FrozenPart),
    "attention": partial(blocks, Attention),
    "breaking": partial(blocks, Breaking),
    "checkpoint inside": partial(blocks, CheckpointInside),
    "breaking in a checkpoint": partial(blocks, BreakingInCheckpoint),
    "hooked": partial(blocks, Hooked),
}


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(name, marks=[] if name in ("checkpointed", "tied", "normed", "breaking") else pytest.mark.full)
        for name in MODELS
    ],
)
def test_what_blocks_may_be(model: str) -> None:
    same_compiled(random, MODELS[model])


@pytest.mark.parametrize("model", ["normed", "repeated", "checkpointed"])
@pytest.mark.parametrize("scenario", ["evaluated", "accumulated"])
@pytest.mark.full
def test_what_blocks_may_be_in_other_steps(model: str, scenario: str) -> None:
    same_compiled(SCENARIOS[scenario], MODELS[model])


@pytest.mark.few(1)
@spread(policy=["keep", "recompute", "offload", "auto"], model=["random", "normed", "repeated"])
def test_activation_policies(policy: str, model: str) -> None:
    build = partial(blocks, partial(Block, 0.3)) if model == "random" else MODELS[model]
    same_compiled(lambda twin: random(twin) + twin.steps(4, 5, 6), build, keys={"activations": {"policy": policy}})


# Over ranks.


def compiled_train(rank: int, task: Task) -> tuple[Outcome, int]:
    """Train on one rank; the graphs that were made, too."""
    torch._dynamo.reset()
    counters.clear()
    outcome = train(rank, task)
    assert not counters["graph_break"], counters["graph_break"]
    return outcome, counters["stats"]["unique_graphs"]


SAVING = {"client": {"opts": {"with_mem_saving_comm": True}}}


@pytest.mark.full
@pytest.mark.few(1)
@spread(
    model=["checkpointed", "reused", "frozen"],
    config=[{}, SAVING, {"activations": {"policy": "auto"}}],
    micro_batches=[1, 3],
)
def test_over_ranks(pair: Team, model: str, config: Options, micro_batches: int) -> None:
    task = Task(model, steps=7, config=config, micro_batches=micro_batches, compiler={"backend": "aot_eager"})
    losses, weights, states = serial(task, 2)
    for rank, (outcome, num_graphs) in enumerate(pair.run(compiled_train, task)):
        assert_equal(outcome.losses, losses[rank])
        assert_equal(outcome.weights, weights)
        assert_equal(outcome.states, states)
        assert num_graphs == (3 if model == "frozen" else 1)  # a block is frozen, another one in part


def _made_inside_init(rank: int) -> dict[str, Tensor]:
    torch._dynamo.reset()  # processes are kept
    counters.clear()
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        torch.manual_seed(11)
        with manager.init():
            model = torch.compile(blocks(), backend="aot_eager")
        optimizer = chunkmem.AdamW(model.parameters(), manager=manager)
        for step in range(6):
            manager.backward(model(features(2 * step + rank)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert counters["stats"]["unique_graphs"] == 1
        timeline = manager.timeline()
        assert timeline is not None
        assert timeline.plan_misses == 0
        return {key.replace("_orig_mod.", ""): value for key, value in manager.state_dict().items()}


def test_over_ranks_compiled_inside_init(pair: Team) -> None:
    weights = pair.run(_made_inside_init)
    torch.manual_seed(11)
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(6):
        grads = []
        for rank in range(2):
            optimizer.zero_grad()
            model(features(2 * step + rank)).square().mean().backward()
            grads.append([param.grad for param in model.parameters()])
        for param, first, second in zip(model.parameters(), *grads, strict=True):
            param.grad = (first + second) / 2
        optimizer.step()
    assert_equal(weights[0], copied(dict(model.state_dict())))
    assert_equal(weights[1], weights[0])


# Plans.


def test_plans_are_made_when_compiling_is_done() -> None:
    """The first step compiles, and is not learnt from; the second is recorded; no other has an access of its own."""
    with chunkmem.ChunkManager(config(8 * 4 * CHUNK_NUMEL)) as manager:
        twin = Compiled(manager, blocks)
        twin.steps(0)
        assert manager.trace is None
        with torch._dynamo.config.patch(error_on_recompile=True):
            twin.steps(1)
            assert manager.plan is None
            for step in range(2, 52):
                twin.steps(step)
                timeline = manager.timeline()
                assert timeline is not None
                assert timeline.plan_misses == 0, step
        assert stats() == (1, 0)


# Mixed precision.


class Masters(Compiled):
    """Plain PyTorch with float32 master weights, or chunkmem in bf16."""

    def __init__(self, manager: chunkmem.ChunkManager | None, build: Callable[[], nn.Module], **options: Any) -> None:
        self.low = None if manager is not None else LowPlain(torch.bfloat16)
        super().__init__(manager, build if self.low is None else lambda: self.low.ready(build()), **options)

    def make(self, kind: str, params: Any, **options: Any) -> Any:
        return super().make(kind, params, **options) if self.low is None else self.low.optimizer(params, **options)

    def left(self) -> dict[str, Any]:
        return {"weights": copied(self.weights() if self.low is None else self.low.state_dict(self.model))}


class Uncompiled(Masters):
    def compile(self) -> None:
        self.called = self.model


class Positions(nn.Module):
    """Computes in float32, since it has a table in float32, and so do the modules below it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype is torch.float32
        return self.linear(x) * self.table


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.positions, self.last = nn.Linear(WIDTH, WIDTH), Positions(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(torch.tanh(self.positions(self.first(x))))


@pytest.mark.few(1)
@spread(
    policy=[None, "auto"],
    backend=["aot_eager", "inductor"],
)
def test_bf16(backend: str, policy: str | None) -> None:
    keys = {"precision": "bf16", "activations": {"policy": policy}}
    build = partial(blocks, partial(Block, 0.3))
    same(build, counted(random), keys=keys, twin=partial(Masters, compiler={"backend": backend}))  # type: ignore[arg-type]
    assert stats() == (1, 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [Mixed, Normed])
def test_bf16_with_modules_in_float32_inside(kind: type[nn.Module]) -> None:
    """Casts are in the graph. Plain PyTorch's casts here are hooks that break it: those of blocks are not compiled."""

    with chunkmem.ChunkManager(config(AMPLE_NBYTES, precision="bf16")) as manager:
        twin = Masters(manager, partial(blocks, kind))
        found = twin.steps(*range(5)), twin.left()
        assert stats() == (1, 0)
    torch._dynamo.reset()
    plain = Masters(None, partial(blocks, kind), compiler={"disable": True})
    assert_equal(found, (plain.steps(*range(5)), plain.left()))


class WithoutLists(nn.Module):
    """One unit: there is nothing to divide it by."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.middle, self.head = nn.Linear(WIDTH, WIDTH), Positions(), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.inner(x))))


@spread(precision=["fp32", "bf16"], when=WHEN)
def test_a_model_without_lists(precision: str, when: str) -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES, precision=precision)) as manager:
        twin = Masters(manager, WithoutLists, way="torch_compiles_model", when=when)
        found = twin.steps(*range(5)), twin.left()
        assert stats() == (1, 0)
    plain = Uncompiled(None, WithoutLists) if precision == "bf16" else Twin(None, WithoutLists)
    assert_equal(found[0], plain.steps(*range(5)))
    assert_equal(found[1]["weights"], plain.left()["weights"])


# Inductor.


@spread(
    model=["random", "tied", "normed", "repeated", "checkpointed", "attention"],
    policy=[None, "recompute", "offload", "auto"],
)
@pytest.mark.full
def test_inductor(model: str, policy: str | None) -> None:
    build = partial(blocks, partial(Block, 0.3)) if model == "random" else MODELS[model]
    keys = {"activations": {"policy": policy}}
    same_compiled(lambda twin: random(twin) + twin.steps(4, 5, 6), build, keys=keys, compiler={"backend": "inductor"})


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.filterwarnings("ignore:a managed model was called inside torch.autocast")
@pytest.mark.full
def test_steps_with_inductor(scenario: str) -> None:
    build = partial(blocks, partial(Block, 0.3)) if scenario == "random" else blocks
    same_compiled(SCENARIOS[scenario], build, compiler={"backend": "inductor"})


def test_inductor_once() -> None:
    same_compiled(random, partial(blocks, partial(Block, 0.3)), compiler={"backend": "inductor"})
    assert stats() == (1, 0)


def test_modules_of_torch_that_compile_themselves() -> None:
    """torch runs these as they are; they were compiled, and a fused GELU has other bits."""

    def compiled(twin: Twin) -> Any:
        for child in twin.model:
            child.compile()
        return twin.steps(0, 1, 2), stats()

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))

    same(build, compiled)


def test_a_compiled_backward_has_its_weights_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its products was a call of its own, which pinned weights that are pinned."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Compiled(manager, blocks, compiler={"backend": "inductor"})
        twin.steps(0, 1)
        calls: list[Any] = []
        operators = manager.runtime.modules.operators
        run = operators._run
        monkeypatch.setattr(operators, "_run", lambda *args: calls.append(args[1]) or run(*args))
        twin.steps(2, 3)
        assert calls == []


# Who else is there.


class ReadsAnother(nn.Module):
    """Reads a weight of a module that is no child of it."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.others: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.own(x) + F.linear(x, self.others[0].weight))


class CallsAnother(ReadsAnother):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.own(x) + self.others[0](x))


def referring(kind: type[ReadsAnother]) -> Blocks:
    model = Blocks(kind(), kind(), num_blocks=0)
    for block in model.blocks:
        block.others.append(model.inner)
    return model


def test_a_block_that_reads_a_weight_of_another_module() -> None:
    """It is served, and the block runs as it is; the compiler follows none of the code that serves it."""
    same(partial(referring, ReadsAnother), steps, twin=Compiled)
    assert counters["frames"]["total"] <= 2


def test_a_block_that_calls_another_module() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Compiled(manager, partial(referring, CallsAnother))
        with pytest.raises(chunkmem.StateError, match=r"^inner is managed and runs inside of torch.compile"):
            twin.steps(0)
        for block in twin.model.blocks:
            block.others[0] = nn.Identity()
        assert len(twin.steps(1, 2, 3)) == 3


def test_weights_read_in_a_compiled_function() -> None:
    def scenario(twin: Any) -> Any:
        penalty = torch.compile(
            lambda: sum(block.up.weight.square().sum() for block in twin.model.blocks), backend="eager"
        )
        found = []
        for step in range(4):
            loss = twin.loss(features(step)) + 1e-3 * penalty()
            twin.backward(loss)
            twin.update()
            found.append(loss.item())
        return found

    same(blocks, scenario, twin=Compiled)


@pytest.mark.few(1)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_compiled_step_calls_the_model_where_its_graph_breaks(is_compiled: bool) -> None:
    """As the error about a model that is called without that says."""

    def scenario(twin: Any) -> Any:
        call = torch.compiler.disable(lambda x: (twin.called if is_compiled else twin.model)(x))

        @torch.compile(backend="aot_eager")
        def loss_of(x: Tensor) -> Tensor:
            return call(2 * x).square().mean()

        found = []
        for step in range(5):
            loss = loss_of(features(step))
            twin.backward(loss)
            twin.update()
            found.append(loss.item())
        return found

    same(blocks, scenario, twin=Compiled if is_compiled else Twin)


def test_a_compiled_loss() -> None:
    def scenario(twin: Any) -> Any:
        loss_of = torch.compile(F.mse_loss, backend="aot_eager")
        found = []
        for step in range(5):
            loss = loss_of(twin.called(features(step)), features(10 + step)[:, :4])
            twin.backward(loss)
            twin.update()
            found.append(loss.item())
        return found

    same(blocks, scenario, twin=Compiled)


def test_a_block_that_raises() -> None:
    class Failing(Block):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("as asked")
            return super().forward(x)

    def scenario(twin: Any) -> Any:
        found = [twin.steps(0, 1, 2)]
        twin.model.blocks[1].fails = True
        with pytest.raises(ValueError, match="as asked"):
            twin.loss(features(3))
        twin.model.blocks[1].fails = False
        return [*found, twin.steps(4, 5)]

    same(partial(blocks, Failing), scenario, twin=Compiled)


def test_stances_and_resets() -> None:
    def scenario(twin: Any) -> Any:
        found = [twin.steps(0, 1)]
        with torch.compiler.set_stance("force_eager"):
            found.append(twin.steps(2, 3))
        torch._dynamo.reset()
        return [*found, twin.steps(4, 5)]

    same(blocks, scenario, twin=Compiled)


def test_compiled_when_plans_are_followed() -> None:
    """And twice, and not at all any more."""

    def scenario(twin: Any) -> Any:
        found = [twin.steps(0, 1, 2, 3)]
        if twin.manager is not None:
            twin.manager.compile(twin.model.blocks[0], backend="aot_eager")
            found.append(twin.steps(4, 5, 6))
            twin.manager.compile(twin.model, backend="aot_eager")
            torch.compile(twin.model, backend="aot_eager")
            found.append(twin.steps(7, 8, 9))
            assert twin.manager.timeline().plan_misses == 0
            for block in twin.model.blocks:
                block._compiled_call_impl = None
            return [*found, twin.steps(10, 11)]
        return [*found, twin.steps(4, 5, 6), twin.steps(7, 8, 9), twin.steps(10, 11)]

    same(blocks, scenario)


def test_states_and_checkpoints(tmp_path: Path) -> None:
    """Names are those of the model; what torch.compile has returned has its own prefix, as ever."""
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        twin = Compiled(manager, blocks, way="torch_compiles_model")
        twin.steps(0, 1, 2)
        plain = blocks()
        names = list(plain.state_dict())
        assert list(manager.state_dict()) == names == list(twin.model.state_dict())
        assert list(twin.called.state_dict()) == [f"_orig_mod.{name}" for name in names]
        assert [name for name, _ in twin.model.named_parameters()] == [name for name, _ in plain.named_parameters()]
        assert repr(twin.model.blocks[0]) == repr(plain.blocks[0])
        manager.save(tmp_path / "saved", twin.optimizer)
        expected = twin.steps(3, 4), twin.left()
        manager.load(tmp_path / "saved", twin.optimizer)
        assert_equal((twin.steps(3, 4), twin.left()), expected)
        plain.load_state_dict(manager.state_dict())
        manager.load_state_dict(plain.state_dict())
        assert_equal(twin.weights(), expected[1]["weights"])
        with manager.gather(twin.model.blocks[0]):
            assert torch.equal(twin.model.blocks[0].up.weight, plain.blocks[0].up.weight)
        with pytest.raises(chunkmem.StateError, match="moving or converting it is refused"):
            twin.model.half()


def test_by_layer_pipelines() -> None:
    def scenario(twin: Any) -> Any:
        if twin.manager is None:
            found = []
            for step in range(5):
                losses = [twin.called(features(2 * step + part)).square().mean() / 2 for part in range(2)]
                for loss in losses:
                    loss.backward()
                twin.update()
                found.append(sum(losses).detach())
            return found
        model = twin.model
        pipe = twin.manager.pipeline(
            model.blocks,
            first=model.inner,
            last=model.head,
            loss_fn=lambda out, _: out.square().mean(),
            micro_batches=2,
        )
        found = []
        for step in range(5):
            x = torch.cat([features(2 * step), features(2 * step + 1)])
            found.append(pipe.step(x, torch.zeros(8)))
            twin.update()
        return found

    same(blocks, scenario, twin=Compiled)
    assert stats() == (1, 0)


# What is refused.


def managed(build: Callable[[], nn.Module], manager: chunkmem.ChunkManager) -> Any:
    with manager.init():
        return build()


def test_what_is_no_module() -> None:
    message = r"manager.compile\(\) takes a torch.nn.Module, not a function"
    with chunkmem.ChunkManager() as manager, pytest.raises(chunkmem.LayoutError, match=message):
        manager.compile(lambda x: x)  # type: ignore[arg-type]


def test_a_region_inside() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        with manager.init():
            model = blocks()
            manager.region(model.blocks[1].up, policy="offload")
        message = r"^blocks.1 cannot be compiled as one graph: blocks.1.up in it is a region, whose activations"
        with pytest.raises(chunkmem.StateError, match=message):
            manager.compile(model, backend="aot_eager")


def test_a_module_on_host() -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        with manager.init():
            model = blocks()
            manager.on_host(model.blocks[1].up)
        with pytest.raises(
            chunkmem.StateError, match=r"^blocks.1 cannot be compiled .*: blocks.1.up in it computes on HOST"
        ):
            manager.compile(model.blocks[1], backend="aot_eager")


def test_an_embedding_on_host_stays_outside() -> None:
    class Words(Blocks):
        def __init__(self) -> None:
            super().__init__(*(Block() for _ in range(2)), num_blocks=0)
            self.words = nn.Embedding(8, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.words(x.abs().long() % 8))

    same_compiled(steps, Words, keys={"use_cpu_embedding": True})


def test_recorded_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        model = managed(blocks, manager)
        monkeypatch.setattr(manager.runtime.modules.compiled, "_is_accelerator", True)
        for way in ("mode", "options"):
            with pytest.raises(chunkmem.ConfigError, match="CUDA graphs, which keep the addresses of weights"):
                manager.compile(
                    model,
                    **({"mode": "reduce-overhead"} if way == "mode" else {"options": {"triton.cudagraphs": True}}),
                )
        with pytest.raises(chunkmem.ConfigError, match="freezing, which keeps values"):
            manager.compile(model, options={"freezing": True})
        manager.compile(model, mode="max-autotune-no-cudagraphs")


def test_a_unit_of_exchange_inside(pair: Team) -> None:
    messages = pair.run(_unit_inside)
    assert all("blocks.0.up in it is exchanged between ranks as a unit of its own" in message for message in messages)


def _unit_inside(rank: int) -> str:
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        with manager.init():
            model = blocks()
            manager.unit(model.blocks[0].up)
        try:
            manager.compile(model, backend="aot_eager")
        except chunkmem.StateError as error:
            return str(error)
    return ""


def test_a_compile_method_of_the_users_own() -> None:
    class Own(Blocks):
        def compile(self, optimizer: str) -> str:  # type: ignore[override]
            return f"compiled for {optimizer}"

    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        assert managed(Own, manager).compile("SGD") == "compiled for SGD"


def test_closed_managers_hear_no_more() -> None:
    handler = torch._dynamo.callback.callback_handler
    before = len(handler.start_callbacks), len(torch.nn.modules.module._global_module_registration_hooks)
    with chunkmem.ChunkManager(config(AMPLE_NBYTES)) as manager:
        Compiled(manager, blocks).steps(0)
        assert len(handler.start_callbacks) == before[0] + 1
    after = len(handler.start_callbacks), len(torch.nn.modules.module._global_module_registration_hooks)
    assert after[0] == before[0] == len(handler.end_callbacks)
    assert after[1] <= before[1]


def test_what_the_compiler_does_not_look_into_is_there() -> None:
    assert [name for name in _OPAQUE if importlib.util.find_spec(name) is None] == []
