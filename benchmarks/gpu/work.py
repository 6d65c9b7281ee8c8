"""A training that is measured, as plain data, and one that runs, whoever holds its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.model import Size

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MAX_NORM, CLIPPING_NORM = 1e3, 1.0
"""The norm that gradients are clipped to: never reached, and reached in each step."""
ENVIRONMENT = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")
"""Of every trainer: slabs and activations then share all that the cap allows. The second is the older name."""
NUM_BATCHES = 2
MODEL_DATA_NBYTES = 16
"""Of each parameter: bf16 weight and gradient, fp32 master weight and two fp32 states."""
DEVICE_SHARE = 0.95
"""Of the cap on torch's allocator, what chunkmem is told it may use: the rest is for the allocator's own gaps."""


@dataclass(frozen=True)
class Work:
    """A training that is measured; plain data."""

    trainer: str
    size: Size
    batch: int
    """Sequences a step."""
    micro_batch: int
    """Sequences at once; a step has as many as it takes."""
    cap_nbytes: int | None
    """What torch may allocate; None: on the CPU, see `toy_cap_nbytes`."""
    host_nbytes: int | None = None
    """What chunkmem may use of the RAM; None: what it takes by default."""
    max_norm: float = MAX_NORM
    num_warm_up: int = 4
    """At least: the first is recorded, the second follows a plan made from it, and it is made again from the next."""
    most_warm_up: int = 8
    """At most; see `benchmarks.gpu.warm_up`."""
    num_timed: int = 8
    timed_s: float = 30.0
    """No further step is begun after this long, but for the first `least_timed`."""
    least_timed: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further configuration, of chunkmem only."""
    recomputed: bool = True
    """Backward computes the blocks again; False: chunkmem decides, by `options`."""
    compiled: bool = False
    """torch.compile runs the blocks; of chunkmem only."""
    on_disk: bool = False
    """A file is the third tier; of chunkmem only."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Work:
        """Make it of what JSON has left of it."""
        return cls(**{**arguments, "size": Size(**arguments["size"])})

    @property
    def num_micro_batches(self) -> int:
        return -(-self.batch // self.micro_batch)

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.num_micro_batches * self.micro_batch * self.size.seq

    @property
    def is_ordinary(self) -> bool:
        """It trains as the other trainers do, and as estimates and lower bounds assume."""
        return self.recomputed and not (self.options or self.compiled or self.on_disk)

    @property
    def device_nbytes(self) -> int:
        """Return chunkmem's cap."""
        if self.cap_nbytes is None:
            return toy_cap_nbytes(self.size)
        return int(DEVICE_SHARE * self.cap_nbytes)

    @property
    def estimated_nbytes(self) -> int:
        """Return the cap to ask an estimate about: non-model data counts there, and on a CPU it does not."""
        return self.device_nbytes + (TOY_ACTIVATION_NBYTES if self.cap_nbytes is None else 0)


TOY_ACTIVATION_NBYTES = 64 << 20


def toy_cap_nbytes(size: Size) -> int:
    """Return a cap in RAM under which a toy has to move its chunks: 60 % of its model data, never below two slabs."""
    return max(int(0.6 * MODEL_DATA_NBYTES * size.num_params), 4 << 20)


@dataclass(frozen=True)
class Training:
    """A model under training, whoever holds its parameters."""

    model: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, bool], None]
    """Of a loss; whether it is the last of the step."""
    update: Callable[[], None]
    """Also drops the gradients."""
    has_settled: Callable[[], bool] = lambda: True
    """Nothing that it does of itself, such as planning, makes steps longer any more."""
    told: Callable[[], dict[str, Any]] = dict
    """What only this trainer knows, when all steps are over."""
    close: Callable[[], None] = lambda: None
    manager: Any = None
    """chunkmem's, for what it knows of the step."""

    def step(self, micro_batches: list[Tensor], *, passed: Callable[[str], object] = lambda part: None) -> Tensor:
        """Train one step; return the sum of the losses, not waited for.

        Args:
            micro_batches: of the step.
            passed: is told when the host has issued a forward, a backward, or the update.
        """
        losses = []
        for index, batch in enumerate(micro_batches):
            loss = self.model(batch) / len(micro_batches)
            passed("forward")
            self.backward(loss, index == len(micro_batches) - 1)
            passed("backward")
            losses.append(loss.detach())
        self.update()
        passed("step()")
        return torch.stack(losses).sum()


def compute_device() -> torch.device:
    """Return the CUDA device, or the CPU of a dry run."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
