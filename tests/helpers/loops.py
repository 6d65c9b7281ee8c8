"""Training loops whose steps are not all alike, for plain PyTorch and chunkmem."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.plan.machine import Machine, host_links
from chunkmem.runtime.queues import Lanes

WIDTH = 32
SLAB_NUMEL = WIDTH * WIDTH + WIDTH
FAST = Machine(device_nbytes=0, host_nbytes=0, links=host_links(h2d_Bps=1e10, d2h_Bps=1e10))


class Side:
    """What a loop trains with: plain PyTorch, or a manager with room for so many chunks of 4224 bytes on DEVICE.

    With `disk`, a folder, there is as little room on HOST.
    """

    def __init__(
        self,
        num_chunks: float | None,
        *,
        lanes: Callable[[Any], Lanes] | None = None,
        disk: Path | None = None,
        **options: Any,
    ) -> None:
        self.manager: chunkmem.ChunkManager | None = None
        if num_chunks is not None:
            device_nbytes = int(num_chunks * 4 * SLAB_NUMEL)
            memory: dict[str, Any] = {"device": device_nbytes, "host": 16 << 20}
            if disk is not None:
                memory |= {"host": device_nbytes, "disk": {"path": str(disk), "capacity": 16 << 20}}
            values = {"memory": memory, "default_chunk_size": SLAB_NUMEL, **options}
            config = chunkmem.Config.from_dict(values)
            self.manager = chunkmem.ChunkManager(config, machine=FAST, make_lanes=lanes)
        self.losses: list[float] = []
        self.rows = 4
        """Of a batch."""
        self._batches = 0

    def building(self) -> Any:
        return nullcontext() if self.manager is None else self.manager.init()

    def outside(self) -> Any:
        return nullcontext() if self.manager is None else self.manager.exclude()

    def optimizer(self, *models: nn.Module) -> Any:
        params = [param for model in models for param in model.parameters()]
        if self.manager is None:
            return torch.optim.AdamW(params, lr=1e-2, fused=True)
        return chunkmem.AdamW(params, manager=self.manager, lr=1e-2)

    def batch(self, rows: int | None = None) -> Tensor:
        self._batches += 1
        return torch.randn(rows or self.rows, WIDTH, generator=torch.Generator().manual_seed(self._batches))

    def step(self, loss: Tensor, *optimizers: Any) -> None:
        """Backward, and a step of each optimizer, whose gradients are discarded."""
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.losses.append(loss.item())


Loop = Callable[[Side], Iterator[None]]
"""Yields after each step and each evaluation, for ever."""


def mlp(depth: int) -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def discriminator_and_generator(side: Side, *, steps_each: Sequence[int] = (1, 1)) -> Iterator[None]:
    with side.building():
        generator, discriminator = mlp(3), mlp(3)
    of_generator, of_discriminator = side.optimizer(generator), side.optimizer(discriminator)
    while True:
        for _ in range(steps_each[0]):
            with torch.no_grad():
                fake = generator(side.batch())
            loss = (discriminator(side.batch()) - discriminator(fake)).square().mean()
            side.step(loss, of_discriminator)
            yield
        for _ in range(steps_each[1]):
            side.step(discriminator(generator(side.batch())).square().mean(), of_generator)
            discriminator.zero_grad()
            yield


def two_discriminator_steps(side: Side) -> Iterator[None]:
    return discriminator_and_generator(side, steps_each=(2, 1))


def gradients_left_over(side: Side) -> Iterator[None]:
    """The generator's step leaves gradients on the discriminator, which that discards when it is trained next."""
    with side.building():
        generator, discriminator = mlp(3), mlp(3)
    of_generator, of_discriminator = side.optimizer(generator), side.optimizer(discriminator)
    while True:
        fake = generator(side.batch())
        of_discriminator.zero_grad()
        side.step((discriminator(side.batch()) - discriminator(fake.detach())).square().mean(), of_discriminator)
        yield
        of_generator.zero_grad()
        side.step(discriminator(generator(side.batch())).square().mean(), of_generator)
        yield


def second_optimizer_every(steps: int) -> Loop:
    def loop(side: Side) -> Iterator[None]:
        with side.building():
            first, second = mlp(3), mlp(3)
        of_first, of_second = side.optimizer(first), side.optimizer(second)
        while True:
            for number in range(steps):
                both = (of_first, of_second) if number == steps - 1 else (of_first,)
                side.step(second(first(side.batch())).square().mean(), *both)
                yield

    return loop


class Dropped(nn.Module):
    """Blocks of which each is left out at random."""

    def __init__(self, share: float, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.share = share
        self.random = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.random.random() >= self.share:
                x = x + torch.tanh(block(x))
        return x


def trained(build: Callable[[Side], nn.Module], *, rows: int | None = None) -> Loop:
    def loop(side: Side) -> Iterator[None]:
        with side.building():
            model = build(side)
        optimizer = side.optimizer(model)
        while True:
            side.step(model(side.batch(rows)).square().mean(), optimizer)
            yield

    return loop


def layer_drop(_side: Side) -> nn.Module:
    return Dropped(0.2, [nn.Linear(WIDTH, WIDTH) for _ in range(6)])


def small_layer_drop(_side: Side) -> nn.Module:
    """Several blocks share a chunk."""
    layers = [nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)) for _ in range(6)]
    return Dropped(0.2, layers)


class Experts(nn.Module):
    """Each row goes to one of four; with so few rows, some have none now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        gate = self.gate(x).softmax(-1)
        chosen = gate.argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * gate[rows, index, None])
        return self.last(out) - 1


class Normed(nn.Module):
    """Each forward writes to the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH, max_norm=1.0)
        self.rest = mlp(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.table(x.abs().mul(7).long().clamp(max=WIDTH - 1)[:, 0]))


def frozen_at_times(side: Side) -> Iterator[None]:
    with side.building():
        model = mlp(6)
    optimizer = side.optimizer(model)
    while True:
        for is_trained in (True, True, False, False):
            model[4].requires_grad_(is_trained)
            side.step(model(side.batch()).square().mean(), optimizer)
            yield


class LowRank(nn.Module):
    """A frozen layer in chunks, and what is trained of it outside of them."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        with side.outside():
            self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def low_rank(num_micro_batches: int) -> Loop:
    def loop(side: Side) -> Iterator[None]:
        with side.building():
            model = nn.Sequential(*[LowRank(side) for _ in range(6)])
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        while True:
            for _ in range(num_micro_batches - 1):
                model(side.batch()).square().mean().backward()
            side.step(model(side.batch()).square().mean(), optimizer)
            yield

    return loop


def evaluations_of_both(side: Side) -> Iterator[None]:
    with side.building():
        first, second = mlp(3), mlp(3)
    optimizer = side.optimizer(first, second)
    while True:
        side.step(second(first(side.batch())).square().mean(), optimizer)
        yield
        for model in (first, second):
            with torch.no_grad():
                side.losses.append(model(side.batch()).sum().item())
            yield


def accumulated(side: Side) -> Iterator[None]:
    with side.building():
        model = mlp(6)
    optimizer = side.optimizer(model)
    while True:
        model(side.batch()).square().mean().backward()
        side.step(model(side.batch()).square().mean(), optimizer)
        yield


def larger_now_and_then(side: Side) -> Iterator[None]:
    """Steps of one model that differ: each fourth has a second pass."""
    with side.building():
        model = mlp(3)
    optimizer = side.optimizer(model)
    while True:
        for number in range(4):
            loss = model(side.batch()).square().mean()
            if number == 3:
                loss = loss + model(side.batch()).square().mean()
            side.step(loss, optimizer)
            yield


def given_up_now_and_then(side: Side) -> Iterator[None]:
    """In each third step the gradients are discarded instead, as where a loss was not finite."""
    with side.building():
        model = mlp(6)
    optimizer = side.optimizer(model)
    while True:
        for number in range(3):
            side.step(model(side.batch()).square().mean(), *[optimizer] * (number < 2))
            optimizer.zero_grad()
            yield


def averaged_by_hand(side: Side) -> Iterator[None]:
    """All weights are read, one after the other, and some are written to, between two steps."""
    with side.building():
        model = mlp(6)
    optimizer = side.optimizer(model)
    averages = [torch.zeros(param.shape) for param in model.parameters()]
    while True:
        side.step(model(side.batch()).square().mean(), optimizer)
        with torch.no_grad():
            for average, param in zip(averages, model.parameters(), strict=True):
                average.lerp_(param, 0.1)
            next(model.parameters()).lerp_(averages[0], 0.1)
        yield


LOOPS: dict[str, Loop] = {
    "steady": trained(lambda _: mlp(6)),
    "GAN": discriminator_and_generator,
    "GAN, 2:1": two_discriminator_steps,
    "GAN, gradients left over": gradients_left_over,
    "second optimizer 1:2": second_optimizer_every(2),
    "second optimizer 1:3": second_optimizer_every(3),
    "LayerDrop": trained(layer_drop),
    "LayerDrop, shared chunks": trained(small_layer_drop),
    "experts": trained(lambda _: Experts(), rows=6),
    "max_norm": trained(lambda _: Normed()),
    "frozen at times": frozen_at_times,
    "LoRA": low_rank(1),
    "LoRA, micro-batches": low_rank(3),
    "evaluations": evaluations_of_both,
    "micro-batches": accumulated,
    "one in four is larger": larger_now_and_then,
    "one in three is given up": given_up_now_and_then,
    "averages by hand": averaged_by_hand,
}
