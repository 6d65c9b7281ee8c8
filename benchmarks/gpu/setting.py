"""Where a part runs: the card, if there is one, the RAM, and the caps that make sense there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
WHOLE = "whole card"
KEPT_FREE_NBYTES = GIB
"""Of the whole card: what CUDA itself, its libraries and loaded kernels take beside torch's allocator."""


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

    @property
    def dry(self) -> bool:
        """There is no GPU: everything is tried at toy sizes on the CPU, and means nothing."""
        return self.card is None

    def caps(self, *gib: int) -> list[Cap]:
        """Return those of these caps that the card is larger than, and the whole card."""
        if self.card is None:
            return [Cap("toy cap", None)]
        whole = self.card.whole_nbytes
        return [*(Cap(f"{g} GiB", g * GIB) for g in gib if g * GIB < whole), Cap(WHOLE, whole)]

    def threads(self, *counts: int) -> list[int]:
        """Return those of these numbers of threads that there are cores for."""
        return [count for count in counts if count <= self.num_cpus]
