"""Training in which hardly two steps are alike, drawn from a seed, for plain PyTorch and chunkmem in the same way.

Layers are left out, repeated and called in other orders; optimizers step or do not; hooks, forwards and backwards
raise; weights are loaded, written to, frozen and trained again between steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.twins import WIDTH, Twin, features

NUM_STEPS = 16
_NUM_BLOCKS = 6


class Interrupted(Exception):
    """What is raised in the middle of a step."""


class _Scaled(nn.Module):
    """Reads parameters of its own beside those of its layer, which share a chunk with all the other small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x * self.scale + self.scale * self.shift.tanh()) * self.scale


class _Normed(nn.Module):
    """Writes to its weight in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(x.detach().abs().mul(7).long().clamp(max=WIDTH - 1)[:, 0])


def _thin() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, WIDTH))


class AnyOrder(nn.Module):
    """Calls its blocks in the order it is told; some of them in checkpoints."""

    def __init__(self, kinds: Sequence[Callable[[], nn.Module]]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for kind in kinds)
        self.last = nn.Linear(WIDTH, 4)
        self.order: Sequence[int] = range(len(kinds))
        self.checkpointed: frozenset[int] = frozenset()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.order:
            block = self.blocks[index]
            made = checkpoint(block, x, use_reentrant=False) if index in self.checkpointed else block(x)
            x = torch.tanh(x + made)
        return self.last(x)


class _Fault:
    """Raises once, when so many more hooks have run."""

    def __init__(self, model: nn.Module) -> None:
        self._left: int | None = None
        self._error: type[BaseException] = Interrupted
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: self._pass())
            module.register_forward_hook(lambda module, args, out: self._made(out))

    def arm(self, left: int, error: type[BaseException]) -> None:
        self._left, self._error = left, error

    def disarm(self) -> None:
        self._left = None

    def _made(self, out: Tensor) -> None:
        if out.requires_grad and self._left is not None:
            out.register_hook(lambda _: self._pass())
        self._pass()

    def _pass(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._left = None
                raise self._error("in the middle")


class Disorder:
    """One training; the same seed makes the same for every twin."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        draw = random.Random(seed)
        kinds = (_Scaled, _thin, _thin, lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.LayerNorm(WIDTH), _Normed)
        self._kinds = [draw.choice(kinds) for _ in range(_NUM_BLOCKS)]
        self._orders = [self._order(draw) for _ in range(draw.choice((1, 2, 3)))]
        """What most steps do, in turn."""
        self._disorder = draw.choice((0.0, 0.1, 0.3, 1.0))
        """How many of them do anything else instead."""
        self._is_split = draw.random() < 0.4
        """There are two optimizers."""
        self._deeds = draw.choice((0.0, 0.15, 0.4))
        """How many steps are interrupted, or have something done to the weights before them."""
        self._overlaps = draw.random() < 0.5
        self._tight = draw.random()

    def keys(self) -> dict[str, Any]:
        """What a manager is configured with."""
        opts = {"overlap_optimizer": self._overlaps, "undo_log_ratio": 0.5}
        return {"client": {"opts": opts}, "optimizer": {"params": {"use_hybrid_adam": False}}}

    def cap_nbytes(self, required_nbytes: int) -> int:
        """Return a cap on DEVICE: often the smallest, at times some more."""
        return required_nbytes if self._tight < 0.5 else int(required_nbytes * (1 + 2 * (self._tight - 0.5)))

    def build(self) -> AnyOrder:
        return AnyOrder(self._kinds)

    def play(self, twin: Twin) -> list[Any]:
        """Train; return losses, and gradients as they were seen."""
        draw = random.Random(self.seed + 1_000_000)
        model: AnyOrder = twin.model
        fault = _Fault(model)
        optimizers = self._optimizers(twin)
        saved = twin.weights()
        left: list[Any] = []
        for step in range(NUM_STEPS):
            if draw.random() < self._deeds:
                left += self._between(draw, twin, saved)
            if draw.random() < self._deeds / 2:
                saved = twin.weights()
            model.checkpointed = frozenset(i for i in range(_NUM_BLOCKS) if draw.random() < 0.1 * (self.seed % 2))
            if draw.random() < self._deeds / 2 and step < NUM_STEPS - 1:  # the next call clears up after it
                fault.arm(draw.randrange(60), draw.choice((Interrupted, KeyboardInterrupt)))
            for micro in range(draw.choice((1, 1, 1, 2))):
                is_odd = draw.random() < self._disorder
                model.order = self._order(draw) if is_odd else self._orders[step % len(self._orders)]
                try:
                    loss = model(features(100 * step + micro)).square().mean()
                    loss.backward()
                    left.append(loss.item())
                except (Interrupted, KeyboardInterrupt):
                    left.append("interrupted")
                    for optimizer in optimizers:
                        optimizer.zero_grad()
            fault.disarm()
            if draw.random() < 0.1:
                left.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            for optimizer in optimizers:
                has_gradient = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
                if has_gradient and (len(optimizers) == 1 or draw.random() < 0.6):
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=draw.random() < 0.9)
        return left

    def _optimizers(self, twin: Twin) -> list[Any]:
        if not self._is_split:
            return [twin.optimizer]
        params = list(twin.model.parameters())
        options = {"lr": 1e-2, "weight_decay": 0.1}
        halves = params[::2], params[1::2]
        return [twin.make("AdamW", half, **options) for half in halves]

    def _between(self, draw: random.Random, twin: Twin, saved: dict[str, Tensor]) -> list[Any]:
        model = twin.model
        param = draw.choice(list(model.parameters()))
        deed = draw.randrange(6)
        if deed == 0:
            model.load_state_dict(saved)
        elif deed == 1 and twin.manager is not None:
            twin.manager.load_state_dict(saved)
        elif deed == 1:
            model.load_state_dict(saved)
        elif deed == 2:
            param.requires_grad_(not param.requires_grad)
            if not param.requires_grad:
                param.grad = None
        elif deed == 3:
            with torch.no_grad():
                param.mul_(0.75)
        elif deed == 4:
            with torch.no_grad():
                return [model(features(7)).sum().item()]
        else:
            return [param.detach().sum().item()]
        return []

    def _order(self, draw: random.Random) -> list[int]:
        """Return block numbers: all in order, some left out, some repeated, or in any order."""
        way = draw.randrange(4)
        order = list(range(_NUM_BLOCKS))
        if way == 1:
            order = [index for index in order if draw.random() < 0.7]
        elif way == 2:
            draw.shuffle(order)
        elif way == 3:
            order += draw.choices(order, k=draw.randrange(4))
            order.sort()
        return order
