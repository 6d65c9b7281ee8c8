"""What is kept of samples, and what is asked about them."""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass

import torch

from chunkmem.data.errors import StateError


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known of a value."""

    depth: int
    """Modules that have run."""
    crc: int
    """Of the sample as it came in."""
    tag: bytes
    """Of those modules and their weights, 16 bytes; see `chunkmem.contrib.frozen_cache.tags`."""
    rank: int = 0
    """Has computed it; counted among those that share the copy."""


@dataclass(frozen=True, slots=True)
class AskedSamples:
    """What is asked about samples."""

    keys: Sequence[Hashable]
    crcs: Sequence[int]
    """Of the samples as they came in."""
    tags: Sequence[bytes]
    """By the number of modules that have run, from 1: what they are."""
    own: Container[int] | None = None
    """Numbers of modules after which this rank would read the values; None: after any."""

    def depth_of(self, number: int, kept: Kept | None) -> int:
        """Return how many modules have run for a sample, where its value is as said; 0: what is kept is of no use.

        Raises:
            StateError: it is of another sample.
        """
        if kept is None or kept.depth > len(self.tags) or self.tags[kept.depth - 1] != kept.tag:
            return 0
        if self.own is not None and kept.depth not in self.own:
            return 0
        if kept.crc != self.crcs[number]:
            raise StateError(
                f"sample {self.keys[number]!r} is not what it was the last time: with augmentation, or ids that are "
                "not the same in each epoch, what frozen layers have made of it cannot be used again. Call the modules "
                "without the cache, or transform after them"
            )
        return kept.depth


@dataclass(slots=True)
class Found:
    """What is there of samples."""

    asked: AskedSamples
    depth: int = 0
    """Modules that have run for all of them; 0 where some have come further than others: no module could be given
    their values together."""
    values: torch.Tensor | None = None
    """On the CPU, samples first; None: there are none, or they were taken."""
    num_of_others: int = 0
    """Values that other ranks have computed."""


@dataclass(frozen=True, slots=True)
class ValueForm:
    """The value of one sample."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def empty(self, num: int) -> torch.Tensor:
        """Return memory for values, samples first."""
        return torch.empty((num, *self.shape), dtype=self.dtype, device="cpu")
