"""What is gathered or written over two ranks between backward and step: such steps are recorded, planned and exact."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import chunkmem
from tests.cpu.test_frozen_stages import Here
from tests.helpers.ranks import Team
from tests.helpers.shared_training import Block, mean_of
from tests.helpers.spread import spread

NUM_BLOCKS = 3
CHUNK_NUMEL = 1104
"""One block is one chunk, and one unit; so are stem and head."""
NUM_STEPS = 8
FROZEN_FROM = 5
"""The step from which on there is something frozen, if there is."""
AMPLE_NBYTES = 1 << 20
TIGHT_NBYTES = 2 * (NUM_BLOCKS + 3) * 4 * CHUNK_NUMEL
"""Weights and gradients of all, and a little."""
PARTS = {"pipeline": 4, "loop": 1}
"""Micro-batches."""
MOST = 0.05
"""Of a gradient's element, where gradients are clipped by hand."""
WHEN: dict[str, Callable[[int], bool]] = {
    "each": lambda step: True,
    "first": lambda step: step < NUM_STEPS // 2,
    "last": lambda step: step >= NUM_STEPS // 2,
    "third": lambda step: step % 3 == 0,
}
"""Steps with gathers."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.head(x)
        return result

    @property
    def first(self) -> list[nn.Module]:
        """What is frozen."""
        return [self.stem, self.blocks[0]]


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(16, 8, generator=generator), torch.randint(4, (16,), generator=generator)


@dataclass
class Found:
    """What one rank ends with, what it saw in gathers, and how many steps followed a plan."""

    weights: dict[str, Tensor]
    seen: list[Tensor]
    num_planned: int


def between(manager: chunkmem.ChunkManager | None, model: Net, what: str) -> list[Tensor]:
    """Do what training loops do between backward and step; return what was seen."""
    seen: list[Tensor] = []
    if what == "observed":
        schedule = chunkmem.FreezeSchedule(model.blocks, adaptive=True)
        schedule.observe(Here() if manager is None else manager)
        return [torch.tensor(schedule.state_dict()["squares"], dtype=torch.float64)]
    modules: list[nn.Module] = list(model.blocks) if what == "blocks" else [model]
    for module in modules:
        gathered: Any = nullcontext() if manager is None else manager.gather(module, grads=what != "weights")
        with gathered, torch.no_grad():
            for param in module.parameters():
                if what == "weights":
                    seen.append(param.detach().clone())
                elif param.grad is not None:
                    if what == "clipped":
                        param.grad.clamp_(-MOST, MOST)
                    seen.append(param.grad.clone())
    return seen


def made(manager: chunkmem.ChunkManager) -> tuple[Net, chunkmem.AdamW]:
    torch.manual_seed(0)
    with manager.init():
        model = Net()
        manager.unit(model.stem)
        manager.unit(model.head)
    return model, chunkmem.AdamW(model.parameters(), manager=manager, lr=1e-2)


def train(
    rank: int, what: str, when: str, way: str, policy: str, device_nbytes: int, *, freezes: bool = False
) -> Found:
    torch.set_num_threads(1)
    values: dict[str, Any] = {"default_chunk_size": CHUNK_NUMEL, "memory": {"device": device_nbytes, "host": 8 << 20}}
    if way == "loop" and policy != "off":
        values["activations"] = {"policy": policy}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(values)) as manager:
        model, optimizer = made(manager)
        pipe = None
        if way == "pipeline":
            ends = {"first": model.stem, "last": model.head, "loss_fn": F.cross_entropy}
            pipe = manager.pipeline(model.blocks, **ends, micro_batches=PARTS[way], checkpoint=policy)
        seen, num_planned = [], 0
        for step in range(NUM_STEPS):
            if freezes and step == FROZEN_FROM:
                manager.freeze(model.first)
            x, y = batch(step, rank)
            if pipe is None:
                manager.backward(F.cross_entropy(model(x), y))
            else:
                pipe.step(x, y)
            if WHEN[when](step):
                seen += between(manager, model, what)
            optimizer.step()
            optimizer.zero_grad()
            num_planned += manager.plan is not None
        return Found(manager.state_dict(), seen, num_planned)


def serial(what: str, when: str, num_parts: int, *, freezes: bool = False) -> Found:
    """Do that in plain PyTorch, with means over both ranks."""
    torch.manual_seed(0)
    model = Net()
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-2, fused=True)
    seen = []
    for step in range(NUM_STEPS):
        if freezes and step == FROZEN_FROM:
            for module in model.first:
                module.requires_grad_(False)
        grads = []
        for rank in range(2):
            optimizer.zero_grad()
            x, y = batch(step, rank)
            pairs = zip(x.chunk(num_parts), y.chunk(num_parts), strict=True)
            for part in reversed([F.cross_entropy(model(a), b) / num_parts for a, b in pairs]):
                part.backward()
            grads.append([param.grad for param in params])
        for param, *each in zip(params, *grads, strict=True):
            param.grad = mean_of(param, each)
        if WHEN[when](step):
            seen += between(None, model, what)
        optimizer.step()
    return Found({key: value.detach() for key, value in model.state_dict().items()}, seen, 0)


def assert_equal(found: list[Found], expected: Found) -> None:
    for each in found:
        assert [key for key, value in expected.weights.items() if not torch.equal(value, each.weights[key])] == []
        assert len(each.seen) == len(expected.seen)
        assert all(map(torch.equal, each.seen, expected.seen))
        assert each.num_planned > 0


@pytest.mark.few(1)
@spread(
    how=[("loop", "off"), ("loop", "auto"), ("pipeline", "auto")],
    what=["weights", "blocks", "clipped", "read"],
    when=WHEN,
    device_nbytes=[AMPLE_NBYTES, TIGHT_NBYTES],
)
def test_means_are_exact(pair: Team, how: tuple[str, str], what: str, when: str, device_nbytes: int) -> None:
    """Gradients come back to ranks that do not own them, which steps to come plan for."""
    expected = serial(what, when, PARTS[how[0]])
    assert_equal(pair.run(train, what, when, *how, device_nbytes), expected)


@pytest.mark.parametrize("how", [("loop", "off"), pytest.param(("pipeline", "auto"), marks=pytest.mark.full)])
def test_steps_that_a_schedule_looks_at_are_planned(pair: Team, how: tuple[str, str]) -> None:
    expected = serial("observed", "each", PARTS[how[0]])
    assert_equal(pair.run(train, "observed", "each", *how, AMPLE_NBYTES), expected)


@pytest.mark.full
@spread(
    how=[("pipeline", "always"), ("pipeline", "never"), ("loop", "keep"), ("loop", "recompute"), ("loop", "offload")],
    what=["clipped", "weights"],
    device_nbytes=[AMPLE_NBYTES, TIGHT_NBYTES],
)
def test_means_are_exact_where_nothing_is_chosen(
    pair: Team, how: tuple[str, str], what: str, device_nbytes: int
) -> None:
    expected = serial(what, "each", PARTS[how[0]])
    assert_equal(pair.run(train, what, "each", *how, device_nbytes), expected)


@pytest.mark.few(1)
@spread(
    how=[("loop", "off"), ("pipeline", "auto"), ("loop", "auto")], what=["clipped", "blocks"], when=["each", "first"]
)
def test_frozen_after_steps_with_gathers(pair: Team, how: tuple[str, str], what: str, when: str) -> None:
    """What the step after a freeze is made from has gradients that come back to ranks."""
    expected = serial(what, when, PARTS[how[0]], freezes=True)
    assert_equal(pair.run(train_frozen, what, when, *how, AMPLE_NBYTES), expected)


def train_frozen(rank: int, *args: Any) -> Found:
    return train(rank, *args, freezes=True)


# Weights that are written between the backwards of a step, when the next unit may have been gathered already.

WRITES = ("gathered", "module", "manager", "checkpoint", "averages")


def changed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: 1.5 * value + 0.01 for key, value in state.items()}


def write(manager: chunkmem.ChunkManager, model: Net, ema: chunkmem.EMA, what: str, folder: str) -> list[Tensor]:
    """Have other weights from now on; with averages, for one evaluation, whose results are returned."""
    state = changed(manager.state_dict())
    if what == "gathered":
        with manager.gather(), torch.no_grad():
            for key, param in model.named_parameters():
                param.copy_(state[key])
    elif what == "module":
        model.load_state_dict(state)
    elif what == "manager":
        manager.load_state_dict(state)
    elif what == "checkpoint":
        manager.load(folder)
    else:
        with ema.swapped(), torch.no_grad():
            return [model(batch(0, 0)[0])]
    return []


def train_written(rank: int, what: str, device_nbytes: int, folder: str) -> Found:
    torch.set_num_threads(1)
    values: dict[str, Any] = {"default_chunk_size": CHUNK_NUMEL, "memory": {"device": device_nbytes, "host": 8 << 20}}
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(values)) as manager:
        model, optimizer = made(manager)
        ema = chunkmem.EMA(manager, 0.9)
        manager.accumulate(2)
        manager.save(folder)
        seen = []
        for step in range(NUM_STEPS):
            for half in range(2):
                x, y = (each.chunk(2)[half] for each in batch(step, rank))
                manager.backward(F.cross_entropy(model(x), y))
                if half == 0 and step > NUM_STEPS // 2:
                    seen += write(manager, model, ema, what, folder)
            optimizer.step()
            ema.update()
            optimizer.zero_grad()
        return Found(manager.state_dict(), seen, 1)


def serial_written(what: str) -> Found:
    torch.manual_seed(0)
    model = Net()
    start = {key: value.clone() for key, value in model.state_dict().items()}
    averages = start
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-2, fused=True)
    seen = []
    for step in range(NUM_STEPS):
        grads: list[list[Tensor]] = [[torch.zeros_like(param) for param in params] for _ in range(2)]
        for half in range(2):
            for rank in range(2):
                x, y = (each.chunk(2)[half] for each in batch(step, rank))
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                for total, param in zip(grads[rank], params, strict=True):
                    assert param.grad is not None
                    total += param.grad
            if half == 0 and step > NUM_STEPS // 2:
                now = {key: value.clone() for key, value in model.state_dict().items()}
                if what == "averages":
                    model.load_state_dict(averages)
                    seen.append(model(batch(0, 0)[0]).detach())
                    model.load_state_dict(now)
                else:
                    model.load_state_dict(start if what == "checkpoint" else changed(now))
        for param, *each in zip(params, *grads, strict=True):
            param.grad = mean_of(param, each)
        optimizer.step()
        now = {key: value.clone() for key, value in model.state_dict().items()}
        averages = now if step == 0 else {key: value.lerp(now[key], 1 - 0.9) for key, value in averages.items()}
    return Found({key: value.detach() for key, value in model.state_dict().items()}, seen, 0)


@pytest.mark.few(1)
@spread(what=WRITES, device_nbytes=[AMPLE_NBYTES, TIGHT_NBYTES])
def test_weights_are_written_between_backwards(pair: Team, tmp_path: Path, what: str, device_nbytes: int) -> None:
    """With room for all, where units stay, and with little, where they come and go."""
    assert_equal(pair.run(train_written, what, device_nbytes, str(tmp_path / "checkpoint")), serial_written(what))
