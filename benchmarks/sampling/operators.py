"""Operators with a large temporary that lives for a time within them, and a model that calls one of them."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

_PART_NUMEL = 1 << 18
"""A kernel over so many elements takes a fraction of a millisecond."""


@dataclass(frozen=True)
class Kind:
    """How a temporary comes to be, and what the operator does while it lives."""

    name: str
    title: str
    nbytes: int
    is_sudden: bool
    """It is there within a millisecond or so; else the memory is new and page after page is written first."""
    keeps_lock: bool
    """The operator computes in Python; else in kernels, which let go of Python's lock."""


KINDS = (
    Kind("written", "new memory, written; kernels", 64 << 20, is_sudden=False, keeps_lock=False),
    Kind("sudden", "there at once; kernels", 16 << 20, is_sudden=True, keeps_lock=False),
    Kind("python", "there at once; Python", 16 << 20, is_sudden=True, keeps_lock=True),
)


@dataclass
class Operator:
    """A custom operator of torch, `life_s` of which is the time that its temporary is whole."""

    kind: Kind
    life_s: float = 0.0
    """As asked for; set it before each call."""
    made_s: float = 0.0
    """In the last call, from asking for the memory until it was whole."""
    lived_s: float = 0.0
    """In the last call, from then until it was let go of."""
    call: Callable[[Tensor], Tensor] = field(init=False)

    def __post_init__(self) -> None:
        make = _sudden(self.kind.nbytes) if self.kind.is_sudden else lambda: torch.ones(self.kind.nbytes // 4)
        wait = _in_python if self.kind.keeps_lock else _in_kernels

        @torch.library.custom_op(f"chunkmem_benchmark::{self.kind.name}", mutates_args=())
        def operator(x: Tensor) -> Tensor:
            asked_s = time.perf_counter()
            temporary = make()
            whole_s = time.perf_counter()
            wait(temporary, whole_s + self.life_s)
            self.made_s, self.lived_s = whole_s - asked_s, time.perf_counter() - whole_s
            return x.clone()

        self.call = operator


class Caller(nn.Module):
    """Two small layers, and the operator between them."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(64, 64), nn.Linear(64, 64)
        self._operator = operator

    def forward(self, x: Tensor, *, calls: bool = True) -> Tensor:  # (batch, 64) -> the same
        x = self.before(x)
        if calls:
            x = x + self._operator.call(x.detach())
        return self.after(x)


def _sudden(nbytes: int) -> Callable[[], Tensor]:
    """Return what maps memory that is written already: resident at once, as an accelerator's allocations are."""
    file = os.memfd_create("chunkmem benchmark")
    os.ftruncate(file, nbytes)
    with mmap.mmap(file, nbytes) as region:
        region.write(b"\1" * nbytes)

    def make() -> Tensor:
        region = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        temporary: Tensor = torch.frombuffer(region, dtype=torch.float32)
        return temporary

    return make


def _in_kernels(temporary: Tensor, until_s: float) -> None:
    part = temporary[:_PART_NUMEL]
    while time.perf_counter() < until_s:
        part.sin_()


def _in_python(temporary: Tensor, until_s: float) -> None:
    while time.perf_counter() < until_s:
        pass
