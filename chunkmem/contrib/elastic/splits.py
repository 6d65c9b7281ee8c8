"""Which samples each data-parallel rank gets: the same batches however many ranks divide them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from chunkmem.data.errors import CheckpointError, ConfigError
from chunkmem.freezing.follows import HasRuntime

_STATE = ("epoch", "next_batch", "num_samples", "batch_size", "seed", "shuffle", "drop_last")
_SETTINGS = _STATE[2:]
"""What has to be the same where a state is loaded."""


class SplitSampler(Sampler[list[int]]):
    """Batches of sample ids for one data-parallel rank, as a `batch_sampler=` of `torch.utils.data.DataLoader`.

    Samples, and the batches that all ranks have together, depend on the seed and the epoch alone; each rank gets
    consecutive samples of each batch, as many as the others. So another number of ranks, also in the middle of an
    epoch, trains on the same batches, and leaves out or repeats no sample. The order is that of torch's
    `DistributedSampler`. All stages of one pipeline get the same ids.

        sampler = chunkmem.SplitSampler(dataset, batch_size=64, seed=0, manager=manager)
        loader = DataLoader(dataset, batch_sampler=sampler)
        for epoch in range(20):
            sampler.set_epoch(epoch)
            for x, y in loader:
                ...
            pipe = pipe.repartition(stages=1)

    Iterating continues where the epoch is, and at its end returns to its first batch; `len()` counts all of them.

    Args:
        dataset: or its number of samples.
        batch_size: samples that all ranks have together.
        seed: of the order.
        width: data-parallel ranks.
        rank: among them, from 0.
        manager: whose ranks are meant, at each batch those that there are then; in place of `width` and `rank`.
        shuffle: False: in the order of the dataset.
        drop_last: leave samples out that do not fill a batch. Else the first ones of the epoch fill it.

    Raises:
        ConfigError: a number is none, or `batch_size` does not divide into `width`.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        batch_size: int,
        seed: int = 0,
        width: int = 1,
        rank: int = 0,
        manager: HasRuntime | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.num_samples = _require("a number of samples", dataset if isinstance(dataset, int) else len(dataset), 0)
        self.batch_size = _require("batch_size", batch_size, 1)
        self.seed = _require("seed", seed, 0)
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.epoch = 0
        self._next = 0
        """Batch of the epoch."""
        self._order: tuple[int, list[int]] | None = None
        """That of an epoch."""
        self._manager = manager
        if manager is not None and (width, rank) != (1, 0):
            raise ConfigError("SplitSampler: manager says what the ranks are; leave width and rank out")
        self._split = self._checked(rank, width) if manager is None else self._split_of(manager)

    def __repr__(self) -> str:
        part = f"part {self.rank + 1} of {self.width}, " if self.width > 1 else ""
        return f"SplitSampler({self.num_samples} samples, batches of {self.batch_size}, {part}epoch {self.epoch})"

    @property
    def width(self) -> int:
        """Data-parallel ranks."""
        return self._current()[1]

    @property
    def rank(self) -> int:
        """This one among them, from 0."""
        return self._current()[0]

    def set_width(self, rank: int, width: int, *, next_batch: int | None = None) -> None:
        """Divide the batches to come over another number of ranks.

        Args:
            rank: this one, from 0.
            width: data-parallel ranks.
            next_batch: the first of them, counted in the epoch: those before it were trained on. None: what was not
                given out yet. Workers of a DataLoader ask ahead, so name it, and iterate over the loader again.

        Raises:
            ConfigError: the batches cannot be divided so, or the ranks are those of a manager.
        """
        if self._manager is not None:
            raise ConfigError("SplitSampler: its ranks are those of the manager; set_width() is for one without")
        split = self._checked(rank, width)
        self._next = self._position(next_batch)
        self._split = split

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; of the one that is under way, nothing changes."""
        if _require("epoch", epoch, 0) != self.epoch:
            self.epoch, self._next = epoch, 0

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.num_samples // self.batch_size if self.drop_last else -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        while self._next < len(self):
            number, self._next = self._next, self._next + 1
            yield self._part(number)
        self._next = 0

    def state_dict(self, *, next_batch: int | None = None) -> dict[str, Any]:
        """Return what `load_state_dict` continues from, on any number of ranks: for `manager.save(extra=)`.

        Args:
            next_batch: see `set_width`.
        """
        values = (self.epoch, self._position(next_batch), *(getattr(self, name) for name in _SETTINGS))
        return dict(zip(_STATE, values, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken.

        Raises:
            CheckpointError: it is of other samples, batches or another order.
        """
        missing = [name for name in _STATE if name not in state]
        if missing:
            raise CheckpointError(f"SplitSampler: the state has no {', '.join(missing)}; is it one of this class?")
        for name in _SETTINGS:
            if state[name] != getattr(self, name):
                raise CheckpointError(
                    f"SplitSampler: {name} is {getattr(self, name)!r} here and {state[name]!r} in the state: the rest "
                    "of the epoch would be other samples. Make the sampler as it was, or begin an epoch"
                )
        self.epoch, self._next = state["epoch"], self._position(state["next_batch"])

    def _position(self, next_batch: int | None) -> int:
        if next_batch is None:
            return self._next
        if _require("next_batch", next_batch, 0) > len(self):
            raise ConfigError(f"SplitSampler: next_batch is {next_batch}, and an epoch has {len(self)} batches")
        return next_batch

    def _current(self) -> tuple[int, int]:
        return self._split if self._manager is None else self._split_of(self._manager)

    def _split_of(self, manager: HasRuntime) -> tuple[int, int]:
        ranks = manager.runtime.ranks
        return self._checked(ranks.rank, ranks.size)

    def _checked(self, rank: int, width: int) -> tuple[int, int]:
        if _require("rank", rank, 0) >= _require("width", width, 1):
            raise ConfigError(f"SplitSampler: rank is {rank} of {width}; ranks count from 0")
        if self.batch_size % width:
            raise ConfigError(
                f"SplitSampler: batches of {self.batch_size} samples cannot be divided over {width} ranks: with parts "
                "of several sizes, the mean over ranks is not that over samples. Give a batch_size that "
                f"{width} divides"
            )
        return rank, width

    def _part(self, number: int) -> list[int]:
        """Return what this rank has of a batch."""
        rank, width = self._current()
        order = self._ids()
        part = self.batch_size // width
        first = number * self.batch_size + rank * part
        return [order[at % len(order)] for at in range(first, first + part)]

    def _ids(self) -> list[int]:
        if self._order is None or self._order[0] != self.epoch:
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            order = torch.randperm(self.num_samples, generator=generator) if self.shuffle else range(self.num_samples)
            self._order = self.epoch, [int(one) for one in order]
        return self._order[1]


def _require(name: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"SplitSampler: {name} is {value!r}; give a whole number of at least {least}")
    return value
