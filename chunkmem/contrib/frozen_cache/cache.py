"""What frozen layers make of each sample, kept from one epoch to the next."""

from __future__ import annotations

import contextlib
import os
import warnings
import zlib
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import get_device_states

from chunkmem.contrib.frozen_cache.joining import Wanted, open_values
from chunkmem.contrib.frozen_cache.kept import AskedSamples, Found
from chunkmem.contrib.frozen_cache.prefix import StepCache
from chunkmem.contrib.frozen_cache.shared_levels import said_of_disk
from chunkmem.contrib.frozen_cache.tags import ModuleTags
from chunkmem.data.errors import ConfigError, StateError, TierIOError
from chunkmem.data.layout import ALIGN_NBYTES
from chunkmem.data.sizes import parse_nbytes
from chunkmem.freezing.follows import HasRuntime
from chunkmem.runtime.disk_file import folder_at, is_full

_DROPOUT: Any = nn.modules.dropout._DropoutNd
_NORM: Any = nn.modules.batchnorm._NormBase


@dataclass(slots=True)
class CacheReport:
    """Samples since the cache was made. `str()` is one line."""

    num_found: int = 0
    num_computed: int = 0
    """From the start, or from where an earlier, shorter prefix had ended."""
    num_of_others: int = 0
    """Of those found, what other ranks have computed."""
    num_ranks: int = 1
    """That have the same copy: those of this machine."""

    def __str__(self) -> str:
        others = f" ({self.num_of_others} by other ranks of {self.num_ranks})" if self.num_ranks > 1 else ""
        return f"{self.num_found} samples from the cache{others}, {self.num_computed} computed"


class FrozenCache(StepCache):
    """Runs frozen modules, and keeps what they make of each sample: on HOST, then on DISK.

        cache = chunkmem.FrozenCache(manager, host="8GiB", disk="/mnt/nvme")
        for ids, x, y in loader:
            h = cache(schedule.frozen, x, ids)
            loss = loss_fn(rest(h), y)

    Values are those of the first time, to the bit. They are found again as long as the modules, their weights and the
    sample are the same; all three are compared. More modules than the last time begin where those had ended.

    Over ranks, all make the cache together. Those of one machine have one copy: what one of them has computed, the
    others find, also after `pipe.repartition()`. Each of them counts its share of `host` in its cap.

    Args:
        manager: of the modules.
        host: bytes on HOST, for all ranks of a machine, which are taken now, and count in its cap as role
            "frozen_cache".
        disk: a folder for what does not fit there; None: it is forgotten.
        disk_capacity: the most bytes of the file there, for all ranks of a machine; None: half of what is free.

    Raises:
        ConfigError: a size is none, the folder cannot be used, or the ranks of a machine ask for different sizes.
        CapacityError: HOST has no room.
        StateError: another rank has raised one of these.
    """

    def __init__(
        self,
        manager: HasRuntime,
        *,
        host: str | int,
        disk: str | os.PathLike[str] | None = None,
        disk_capacity: str | int | None = None,
    ) -> None:
        self._manager = manager
        runtime = manager.runtime
        runtime.require_open()
        folder = None if disk is None else folder_at(disk)
        host_nbytes = parse_nbytes(host)
        if host_nbytes < ALIGN_NBYTES:
            raise ConfigError(
                f"FrozenCache: host is {host_nbytes} bytes; give at least {ALIGN_NBYTES}: a few samples have to fit"
            )
        disk_nbytes = None if disk_capacity is None else parse_nbytes(disk_capacity)
        runtime.forget_plans()  # HOST has less room for what they move
        self._values = open_values(runtime, Wanted(host_nbytes, folder, disk_nbytes))
        self._tags = ModuleTags()
        self._asked_tags: tuple[bytes, ...] = ()
        """Of the modules of the last call."""
        self.report = CacheReport(num_ranks=self._values.num_ranks)
        self._is_closed = False
        self._was_full = False
        """The disk was once, and that was said."""

    def __repr__(self) -> str:
        return f"FrozenCache({'closed' if self._is_closed else self.report})"

    def __call__(
        self, modules: nn.Module | Iterable[nn.Module], x: torch.Tensor, ids: Sequence[Hashable]
    ) -> torch.Tensor:
        """Return what the modules, one after the other, make of a batch; it requires no gradients.

        Args:
            modules: frozen ones.
            x: a batch, samples first.
            ids: of each sample, the same in each epoch: a list, or a 1-D tensor of integers.

        Raises:
            StateError: a module is trained, draws random numbers or collects statistics; or a sample is not what it was
                the last time, as after augmentation: what is kept would be of another one.
            ConfigError: `ids` are not one a sample.
            TierIOError: DISK failed. That it is full is a warning, once.
        """
        is_one = isinstance(modules, nn.Module) and not isinstance(modules, nn.ModuleList)
        chain: tuple[nn.Module, ...] = (modules,) if is_one else tuple(modules)  # type: ignore[arg-type, assignment]
        runtime = self._manager.runtime
        runtime.require_open()
        if not chain:
            _keys(ids, x)
            return x
        with runtime.ranks.telling():
            self.follow(chain)
            samples = self.find(x, ids)
            value = self.read(samples, x.device) if samples.depth else x
            start = self._agreed_start(samples.depth, len(chain))
            if start == len(chain):
                return value
            with torch.no_grad(), self.computing(x):
                given = x if start == 0 else value
                for module in chain[start:]:
                    given = module(given)
            if samples.depth == len(chain):  # other ranks had to compute theirs
                return value
            self.keep(samples, given)
            return given

    def _agreed_start(self, depth: int, num: int) -> int:
        """Return the first of `num` modules to run, where this rank has values of the first `depth`.

        Ranks that share chunks run the same ones, as all of them gather what these read.
        """
        runtime = self._manager.runtime
        ranks = runtime.ranks
        if ranks.size == 1:
            return depth
        if runtime.sharding.units.agree("FrozenCache: all samples are there", holds=depth == num):
            return num
        most, minus_least = ranks.max_over([depth, -depth], label="FrozenCache: modules that have run")
        return depth if most == -minus_least else 0

    # What a pipeline does in turn for each of its micro-batches.

    def follow(
        self,
        chain: tuple[nn.Module, ...],
        *,
        agree: Callable[[int], int] = lambda least: least,
        over_stages: bool = False,
    ) -> None:
        """Have values of these modules from now on, and forget what other modules, or other weights, have made.

        Args:
            chain: frozen modules, of which each is given what the one before returns.
            agree: given how many of them are as they were on this rank, returns that of all ranks. Not called where
                nothing has changed on any of them.
            over_stages: the ranks of all pipeline stages call it at the same time.

        Raises:
            StateError: a module is trained, drops values at random or collects statistics; or the cache is closed.
        """
        if self._is_closed:
            raise StateError("FrozenCache: it is closed; make another one, or leave it out of the pipeline")
        for number, module in enumerate(chain):
            _require_frozen(module, number)
        runtime = self._manager.runtime
        self._values.follow(runtime.memory.pager)
        tags = self._tags.of(chain, runtime, over_stages=over_stages)
        if tags is self._asked_tags:
            return
        same = (number for number, (old, new) in enumerate(zip(self._asked_tags, tags, strict=False)) if old != new)
        least = next(same, min(len(self._asked_tags), len(tags)))
        agreed = agree(least)
        self._asked_tags = tags if agreed == least else self._tags.renew(agreed)

    def find(self, x: torch.Tensor, ids: Sequence[Hashable], *, own: Container[int] | None = None) -> Found:
        """Return how far the modules have come with some samples; arguments and errors are those of a call.

        Nothing is kept of them before `keep`, and all of them may be read until then.

        Args:
            x: see there.
            ids: see there.
            own: numbers of modules after which this rank would read the values, as others do the rest; None: all. Only
                a rank that would read what all of the modules make counts the samples.
        """
        keys = _keys(ids, x)
        samples = x.detach().to("cpu").contiguous()
        crcs = [zlib.crc32(sample.reshape(-1).view(torch.uint8).numpy()) for sample in samples]
        asked = AskedSamples(keys, crcs, self._asked_tags, own)
        found = self._values.find(asked)
        if own is None or len(self._asked_tags) in own:
            is_found = found.depth == len(self._asked_tags)
            self.report.num_found += len(keys) * is_found
            self.report.num_of_others += found.num_of_others * is_found
            self.report.num_computed += len(keys) * (not is_found)
        return found

    def read(self, samples: Found, device: torch.device) -> torch.Tensor:
        """Return on a device, once, what the first `samples.depth` modules, at least one, have made of samples."""
        values, samples.values = samples.values, None
        assert values is not None
        return values.to(device)

    def computing(self, x: torch.Tensor) -> AbstractContextManager[None]:
        """Surround what computes a value of samples from `x`, on whose device it does.

        Raises:
            StateError: random numbers were drawn.
        """
        return _without_random_numbers(x)

    def keep(self, samples: Found, value: Any) -> None:
        """Keep what all of the modules have made of samples; what a full disk has no room for is not kept.

        Raises:
            ConfigError: it is not one tensor with a row for each.
            TierIOError: DISK failed, and is not full.
        """
        if not samples.asked.keys:  # then there is nothing to keep
            return
        if not isinstance(value, torch.Tensor) or value.shape[:1] != (len(samples.asked.keys),):
            what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            num = len(samples.asked.keys)
            raise ConfigError(
                f"FrozenCache: the modules returned {what} for {num} samples; one tensor, samples first, can be kept"
            )
        try:
            self._values.keep(samples.asked, value.detach().to("cpu").contiguous())
        except TierIOError as error:
            if not is_full(error):
                raise
            if not self._was_full:
                self._was_full = True
                what = "the disk is full; what it has no room for is computed each time"
                warnings.warn(f"FrozenCache: {what} ({said_of_disk(error)})", stacklevel=2)

    def __len__(self) -> int:
        """Samples that are kept."""
        return len(self._values)

    def __bool__(self) -> bool:
        """There is a cache (`if cache:`), be it that nothing is kept yet."""
        return True

    @property
    def num_on_disk(self) -> int:
        """Of those, the ones that are not on HOST."""
        return self._values.num_on_disk

    def close(self) -> None:
        """Give all memory back. Idempotent."""
        self._is_closed = True
        self._values.follow(self._manager.runtime.memory.pager)
        self._values.close()


@contextlib.contextmanager
def _without_random_numbers(x: torch.Tensor) -> Iterator[None]:
    """Raise a StateError if random numbers were drawn: what comes of them is not a function of the sample."""
    before = _random_states(x)
    yield
    if any(not torch.equal(a, b) for a, b in zip(before, _random_states(x), strict=True)):
        raise StateError(
            "FrozenCache: the modules draw random numbers, so what they make of a sample differs each time; put them "
            "into evaluation mode, module.eval()"
        )


def _random_states(x: torch.Tensor) -> list[torch.Tensor]:
    """Return the states of torch's generators, of the CPU and of the device of `x`."""
    return [torch.get_rng_state(), *get_device_states(x)[1]]


def _require_frozen(module: nn.Module, number: int) -> None:
    for name, param in module.named_parameters():
        if param.requires_grad:
            raise StateError(
                f"FrozenCache: parameter {name} of module {number} ({type(module).__name__}) is trained; call "
                "manager.freeze() before, or leave the module out"
            )
    for name, inner in module.named_modules():
        where = f"{name or 'module'} of module {number} ({type(inner).__name__})"
        if inner.training and isinstance(inner, _DROPOUT) and inner.p > 0:
            raise StateError(f"FrozenCache: {where} drops values at random; put it into evaluation mode, .eval()")
        if inner.training and isinstance(inner, _NORM) and inner.track_running_stats:
            raise StateError(
                f"FrozenCache: {where} collects statistics of the batch, and its outputs depend on other samples; "
                "put it into evaluation mode, .eval()"
            )


def _keys(ids: Sequence[Hashable], x: torch.Tensor) -> list[Hashable]:
    found: list[Hashable] = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
    if not isinstance(x, torch.Tensor) or x.ndim == 0:
        raise ConfigError("FrozenCache takes a batch as one tensor, samples first")
    if len(found) != len(x):
        raise ConfigError(f"FrozenCache: there are {len(found)} ids for {len(x)} samples; give one each")
    return found
