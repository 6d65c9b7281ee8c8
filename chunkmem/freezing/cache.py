"""What frozen layers make of each sample, kept from one epoch to the next."""

from __future__ import annotations

import contextlib
import os
import shutil
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import get_device_states

from chunkmem.errors import ConfigError, StateError
from chunkmem.freezing.follows import HasRuntime
from chunkmem.freezing.levels import Levels
from chunkmem.layout.spec import ALIGN_NBYTES
from chunkmem.sizes import parse_nbytes
from chunkmem.types import ChunkId, Role

_DROPOUT: Any = nn.modules.dropout._DropoutNd
_NORM: Any = nn.modules.batchnorm._NormBase


@dataclass(frozen=True, slots=True)
class _Kept:
    """What is known of a sample's value."""

    depth: int
    """Modules that have run."""
    crc: int
    """Of the sample as it came in."""


@dataclass(frozen=True, slots=True)
class CachedSamples:
    """Samples that a cache was asked for."""

    keys: Sequence[Hashable]
    crcs: Sequence[int]
    """Of the samples as they came in."""
    depth: int
    """Modules whose values of all of them are there."""


@dataclass(slots=True)
class CacheReport:
    """Samples since the cache was made. `str()` is one line."""

    num_found: int = 0
    num_computed: int = 0
    """From the start, or from where an earlier, shorter prefix had ended."""

    def __str__(self) -> str:
        return f"{self.num_found} samples from the cache, {self.num_computed} computed"


class FrozenCache:
    """Runs frozen modules, and keeps what they make of each sample: on HOST, then on DISK.

        cache = chunkmem.FrozenCache(manager, host="8GiB", disk="/mnt/nvme")
        for ids, x, y in loader:
            h = cache(schedule.frozen, x, ids)
            loss = loss_fn(rest(h), y)

    Values are those of the first time, to the bit. They are found again as long as the modules, their weights and the
    sample are the same; all three are compared. More modules than the last time begin where those had ended.

    Args:
        manager: of the modules.
        host: bytes on HOST, which are taken now, and count in its cap as role "frozen_cache".
        disk: a folder for what does not fit there; None: it is forgotten.
        disk_capacity: the most bytes of the file there; None: half of what is free.

    Raises:
        ConfigError: a size is none, or the folder cannot be used.
        CapacityError: HOST has no room.
    """

    def __init__(
        self,
        manager: HasRuntime,
        *,
        host: str | int,
        disk: str | os.PathLike[str] | None = None,
        disk_capacity: str | int | None = None,
    ) -> None:
        self._runtime = runtime = manager.runtime
        runtime.require_open()
        folder = None if disk is None else Path(disk)
        host_nbytes = parse_nbytes(host)
        if host_nbytes < ALIGN_NBYTES:
            raise ConfigError(
                f"FrozenCache: host is {host_nbytes} bytes; give at least {ALIGN_NBYTES}: a few samples have to fit"
            )
        disk_nbytes = _free_nbytes(folder) // 2 if disk_capacity is None else parse_nbytes(disk_capacity)
        runtime.forget_plans()  # HOST has less room for what they move
        self._levels = Levels(runtime.memory.pager, host_nbytes, folder, disk_nbytes)
        self._kept: dict[Hashable, _Kept] = {}
        self._modules: tuple[nn.Module, ...] = ()
        """Of the last call."""
        self._form: tuple[torch.Size, torch.dtype] | None = None
        """Of the value of one sample."""
        self._digests: dict[int, tuple[int, int]] = {}
        """By the identity of a parameter: what had changed when it was looked at, and the checksum of its values."""
        self.report = CacheReport()

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
            TierIOError: DISK failed.
        """
        self._runtime.require_open()
        is_one = isinstance(modules, nn.Module) and not isinstance(modules, nn.ModuleList)
        chain: tuple[nn.Module, ...] = (modules,) if is_one else tuple(modules)  # type: ignore[arg-type, assignment]
        if not chain:
            _keys(ids, x)
            return x
        self.follow(chain)
        samples = self.find(x, ids)
        value = self.read(samples, x.device) if samples.depth else x
        if samples.depth == len(chain):
            return value
        with torch.no_grad(), self.computing(x):
            for module in chain[samples.depth :]:
                value = module(value)
        self.keep(samples, value)
        return value

    # What a pipeline does in turn for each of its micro-batches.

    def follow(self, chain: tuple[nn.Module, ...], *, agree: Callable[[int], int] = lambda least: least) -> None:
        """Have values of these modules from now on, and forget what other modules, or other weights, have made.

        Args:
            chain: frozen modules, of which each is given what the one before returns.
            agree: given how many of them are as they were on this rank, returns that of all ranks.

        Raises:
            StateError: a module is trained, drops values at random or collects statistics.
        """
        for number, module in enumerate(chain):
            _require_frozen(module, number)
        common = 0
        for old, new in zip(self._modules, chain, strict=False):
            if old is not new:
                break
            common += 1
        have_changed = [self._has_changed(module) for module in chain]  # each of them is looked at
        least = agree(min(common, have_changed.index(True) if any(have_changed) else len(chain)))
        if least < len(self._modules):
            for key in [key for key, kept in self._kept.items() if kept.depth > least]:
                del self._kept[key]
                self._levels.forget(key)
        self._modules = chain

    def find(self, x: torch.Tensor, ids: Sequence[Hashable]) -> CachedSamples:
        """Return how far the modules have come with some samples; arguments and errors are those of a call.

        Nothing is kept of them before `keep`, and all of them may be read until then.
        """
        keys = _keys(ids, x)
        samples = x.detach().to("cpu").contiguous()
        crcs = [zlib.crc32(sample.reshape(-1).view(torch.uint8).numpy()) for sample in samples]
        for key, crc in zip(keys, crcs, strict=True):
            if key in self._kept and self._kept[key].crc != crc:
                raise StateError(
                    f"sample {key!r} is not what it was the last time: with augmentation, or ids that are not the same "
                    "in each epoch, what frozen layers have made of it cannot be used again. Call the modules without "
                    "the cache, or transform after them"
                )
        # Where some have come further than others, there are no values of all of them that one module could be given.
        depths = {self._depth(key) for key in keys}
        depth = depths.pop() if len(depths) == 1 else 0
        if depth == len(self._modules):
            self.report.num_found += len(keys)
        else:
            self.report.num_computed += len(keys)
        return CachedSamples(keys, crcs, depth)

    def _depth(self, key: Hashable) -> int:
        return self._kept[key].depth if key in self._kept and key in self._levels else 0

    def _has_changed(self, module: nn.Module) -> bool:
        """Tell whether a module has other values than the last time it was asked about."""
        found = False
        tensors = [*module.parameters(), *module.buffers()]
        for tensor in tensors:
            managed = self._runtime.registry.find(tensor)
            if tensor.is_meta or (managed is not None and not self._runtime.owns(managed)):
                continue  # the rank that has its values looks at them
            tag, before = self._tag(tensor), self._digests.get(id(tensor))
            if before is not None and before[0] == tag:
                continue
            crc = self._checksum(tensor)
            found = found or before is None or before[1] != crc
            self._digests[id(tensor)] = tag, crc
        return found

    def _tag(self, tensor: torch.Tensor) -> int:
        """Return what changes whenever values may have."""
        managed = self._runtime.registry.find(tensor)
        if managed is None:
            return hash((tensor._version, tensor.data_ptr()))
        return hash((self._runtime.memory.store.chunks[ChunkId(Role.PARAM, managed.group)].version, managed.group))

    def _checksum(self, tensor: torch.Tensor) -> int:
        managed = self._runtime.registry.find(tensor)
        values = tensor.detach().to("cpu") if managed is None else self._runtime.updater.read_weight(managed)
        return zlib.crc32(values.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]

    def read(self, samples: CachedSamples, device: torch.device) -> torch.Tensor:
        """Return on a device what the first `samples.depth` modules, at least one, have made of samples.

        Raises:
            TierIOError: DISK failed.
        """
        assert self._form is not None
        shape, dtype = self._form
        batch = torch.empty((len(samples.keys), *shape), dtype=dtype, device="cpu")
        for row, key in zip(batch, samples.keys, strict=True):
            self._levels.read(key, row.reshape(-1).view(torch.uint8))
        return batch.to(device)

    def computing(self, x: torch.Tensor) -> AbstractContextManager[None]:
        """Surround what computes a value of samples from `x`, on whose device it does.

        Raises:
            StateError: random numbers were drawn.
        """
        return _without_random_numbers(x)

    def keep(self, samples: CachedSamples, value: Any) -> None:
        """Keep what all of the modules have made of samples.

        Raises:
            ConfigError: it is not one tensor with a row for each.
            TierIOError: DISK failed.
        """
        if not samples.keys:  # then there is nothing to keep
            return
        if not isinstance(value, torch.Tensor) or value.shape[:1] != (len(samples.keys),):
            what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise ConfigError(
                f"FrozenCache: the modules returned {what} for {len(samples.keys)} samples; one tensor, samples first, "
                "can be kept"
            )
        rows = value.detach().to("cpu").contiguous()
        form = rows.shape[1:], rows.dtype
        size_nbytes = rows[0].numel() * rows.dtype.itemsize
        if form != self._form or size_nbytes != self._levels.size_nbytes:
            self._form = form
            self._kept.clear()
            self._levels.clear(size_nbytes)
        for key, crc, row in zip(samples.keys, samples.crcs, rows, strict=True):
            if self._levels.write(key, row.reshape(-1).view(torch.uint8)):
                self._kept[key] = _Kept(len(self._modules), crc)
        for key in [key for key in self._kept if key not in self._levels]:
            del self._kept[key]

    def __len__(self) -> int:
        """Samples that are kept."""
        return len(self._levels)

    @property
    def num_on_disk(self) -> int:
        """Of those, the ones that are not on HOST."""
        return self._levels.num_on_disk

    def close(self) -> None:
        """Give all memory back. Idempotent."""
        self._kept.clear()
        self._levels.close()


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


def _free_nbytes(folder: Path | None) -> int:
    """Return the bytes that are free where a folder is, or is going to be."""
    if folder is None:
        return 0
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), folder)
    return shutil.disk_usage(there).free


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
