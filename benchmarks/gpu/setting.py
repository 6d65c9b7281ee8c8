"""Where a part runs: the card, if there is one, the RAM, and the caps that make sense there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
WHOLE = "whole card"
LARGE_NBYTES = 110 * GIB
DRY_HARDWARE = "h200"
"""Assumed where there is no card, and no figure means anything."""
HOST_SHARE = 0.8
"""`overall_cpu_mem_ratio`: what chunkmem takes of the RAM unless told otherwise."""
KEPT_FREE_NBYTES = GIB
"""Of the whole card: what CUDA itself, its libraries and loaded kernels take beside torch's allocator."""

_BY_NAME = ("v100", "a100", "h100", "h200", "gh200", "gb200", "l40s", "mi300x")


@dataclass(frozen=True)
class Card:
    """A CUDA device as it was found, before anything of ours ran on it."""

    name: str
    nbytes: int
    free_nbytes: int
    capability: str
    num_multiprocessors: int
    l2_nbytes: int
    driver: str

    @property
    def hardware(self) -> str:
        """The name in `chunkmem.estimate.hardware` of what comes closest."""
        known = [name for name in _BY_NAME if re.search(rf"\b{name}", self.name, re.IGNORECASE)]
        is_old = int(self.capability.partition(".")[0]) < 9
        other = "a100" if is_old else "h100" if self.nbytes < LARGE_NBYTES else "h200"
        consumer = [f"rtx{number}" for number in ("3090", "4090", "5090") if number in self.name]
        return (*consumer, *known, other)[0]

    @property
    def whole_nbytes(self) -> int:
        """The largest cap that is given to a row."""
        return self.free_nbytes - KEPT_FREE_NBYTES


@dataclass(frozen=True)
class Cap:
    """What torch may allocate on the device, and what that is called."""

    label: str
    nbytes: int | None
    """None, without a card: each row has a toy cap of its own."""


@dataclass(frozen=True)
class Setting:
    """Where a part runs and where its files go."""

    card: Card | None
    ram_nbytes: int
    num_cpus: int
    folder: Path
    told_host_nbytes: int | None = None
    """What chunkmem may use of the RAM, if that was said."""

    @property
    def dry(self) -> bool:
        """There is no GPU: everything is tried at toy sizes on the CPU, and means nothing."""
        return self.card is None

    @property
    def hardware(self) -> str:
        """What `chunkmem.estimate` takes this machine for."""
        return DRY_HARDWARE if self.card is None else self.card.hardware

    @property
    def is_large(self) -> bool:
        """Plain PyTorch trains seven billion parameters on the card."""
        return self.card is not None and self.card.nbytes >= LARGE_NBYTES

    @property
    def host_nbytes(self) -> int:
        """What chunkmem may use of the RAM."""
        return int(HOST_SHARE * self.ram_nbytes) if self.told_host_nbytes is None else self.told_host_nbytes

    def caps(self, *gib: int) -> list[Cap]:
        """Return those of these caps that the card is larger than, and the whole card."""
        if self.card is None:
            return [Cap("toy cap", None)]
        whole = self.card.whole_nbytes
        return [*(Cap(f"{g} GiB", g * GIB) for g in gib if g * GIB < whole), Cap(WHOLE, whole)]

    def threads(self, *counts: int) -> list[int]:
        """Return those of these numbers of threads that there are cores for."""
        return [count for count in counts if count <= self.num_cpus]
