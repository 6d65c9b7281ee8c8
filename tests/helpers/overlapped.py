"""Small models that train with and without speculative updates, on the same data, with the same
accidents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.data.trace import Kind
from chunkmem.optim.speculative import Speculation
from chunkmem.plan.model import Lane
from chunkmem.runtime.device import ComputeDevice
from chunkmem.runtime.queues import Lanes
from tests.helpers.training import compute_device

WIDTH = 32
NEVER_OFF = 11
"""More wrong guesses than a window has steps."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Run:
    """A stack of blocks on a DEVICE that a few chunks fit, all updates on HOST."""

    def __init__(
        self,
        *,
        overlap: bool,
        precision: str = "fp32",
        max_norm: float = 0.0,
        num_blocks: int = 5,
        chunk_numel: int = 5000,
        device_nbytes: int = 72 << 10,
        threads: int | None = None,
        undo_log_ratio: float | None = 0.5,
        host_nbytes: int = 4 << 20,
        make_lanes: Callable[[ComputeDevice], Lanes] | None = None,
        never_off: bool = True,
    ) -> None:
        opts = {"overlap_optimizer": overlap, "undo_log_ratio": undo_log_ratio, "update_threads": threads}
        self.manager = chunkmem.ChunkManager(
            chunkmem.Config.from_dict(
                {
                    "precision": precision,
                    "fp16": {"enabled": precision == "fp16", "initial_scale_power": 10, "loss_scale_window": 5},
                    "default_chunk_size": chunk_numel,
                    "memory": {"device": device_nbytes, "host": host_nbytes},
                    "gradient_clipping": max_norm,
                    "optimizer": {"params": {"use_hybrid_adam": False}},
                    "client": {"opts": opts},
                }
            ),
            make_lanes=make_lanes,
        )
        torch.manual_seed(0)
        with self.manager.init():
            self.model = nn.Sequential(*(Block(WIDTH) for _ in range(num_blocks)))
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        self.optimizer = chunkmem.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            manager=self.manager,
            lr=3e-3,
        )
        if never_off:
            self.manager.runtime.updater.ahead.guesses = Speculation(NEVER_OFF)

    def backward(self, seed: int, *, factor: float = 1.0) -> float:
        draw = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(16, WIDTH, generator=draw).to(compute_device()) for _ in range(2))
        loss = (self.model(x) - y).square().mean() * factor
        self.manager.backward(loss)
        return loss.item()

    def step(self, seed: int, *, factor: float = 1.0) -> float:
        loss = self.backward(seed, factor=factor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    @property
    def num_ahead(self) -> int:
        """Updates of the last step that were begun beside its backward."""
        return self._num_updates(ahead=True)

    @property
    def num_left(self) -> int:
        """Updates of the last step that `step()` has left to their lane."""
        return self._num_updates(ahead=False)

    def _num_updates(self, *, ahead: bool) -> int:
        timeline = self.manager.timeline()
        assert timeline is not None
        spans = [span for span in timeline.spans if span.lane is Lane.HOST_UPDATE]
        if not spans:
            return 0
        assert self.manager.trace is not None
        moments = self.manager.trace.moments
        return sum(
            (moments[s.moment].kind is Kind.UPDATE and moments[s.moment].chunk == s.chunk) != ahead for s in spans
        )

    @property
    def num_wrong(self) -> int:
        return self.manager.runtime.updater.ahead.guesses.num_wrong

    def everything(self) -> dict[str, Any]:
        """Weights, moments and counts of updates, by name."""
        found: dict[str, Any] = dict(self.manager.state_dict())
        for index, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{index}.{key}": value for key, value in state.items()}
        return found


def assert_alike(one: Run, other: Run) -> None:
    """Assert that weights, moments and counts are equal to the bit."""
    ours, theirs = one.everything(), other.everything()
    assert ours.keys() == theirs.keys()
    different = [key for key, value in ours.items() if not torch.equal(value, theirs[key])]
    assert not different
