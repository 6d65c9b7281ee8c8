"""What modules are, weights included: in a few bytes, the same on all ranks.

The tag of a module says what comes out of it, for a given sample: it is a digest of its name in the model,
the values of its parameters and buffers, and the tag of the module before. Where two ranks, or one rank at two times,
have the same tag, what one has computed the other may use. A module that is in no model has no name that other ranks
know it by: its values are for this process alone, but for an `nn.Sequential` of modules that have names.

Over ranks that share chunks, the owner of a parameter looks at its values, and tells the others; all of them ask for
tags at the same time. Where the ranks of all pipeline stages do, they tell each other, too, so that a tag does not
depend on which stage has a weight: what stages have kept is found after `pipe.repartition()`.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn

from chunkmem.assembly.runtime import Runtime
from chunkmem.ranks.ranks import Ranks


class ModuleTags:
    """Tags of the modules that a cache was asked for last."""

    def __init__(self) -> None:
        self._modules: tuple[nn.Module, ...] = ()
        self._tags: tuple[bytes, ...] = ()
        self._runtime: Runtime | None = None
        self._known: dict[int, tuple[int, int]] = {}
        """By the identity of a tensor: what had changed when it was looked at, and the checksum of its values."""
        self._elsewhere: dict[int, int] = {}
        """The checksums of tensors of other stages, if these were asked."""
        self._over_stages = False
        self._numbers: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        """Of modules in no model, in the order in which they came."""
        self._names: dict[nn.Module, str] = {}
        """Of the others."""
        self._renewed: Counter[int] = Counter()
        """By the place of a module: how often `renew` was called."""
        self._token = os.urandom(8).hex()
        """Of this process."""

    def of(self, modules: tuple[nn.Module, ...], runtime: Runtime, *, over_stages: bool = False) -> tuple[bytes, ...]:
        """Return the tags of modules, of which each is given what the one before returns; 16 bytes each.

        Args:
            modules: see there.
            runtime: of the manager.
            over_stages: the ranks of all pipeline stages ask at the same time. Else nothing is known of weights of
                other stages, and the tags are of use on this stage alone.

        Returns:
            The same tuple as the last time if nothing has changed on any of the ranks that ask.

        Raises:
            RankError: a rank is missing, or asks for other modules.
        """
        tensors = list(dict.fromkeys(t for module in modules for t in (*module.parameters(), *module.buffers())))
        stale = [tensor for tensor in tensors if self._is_stale(tensor, runtime)]
        is_new = bool(stale) or modules != self._modules or runtime is not self._runtime
        is_new |= over_stages != self._over_stages
        is_same = runtime.sharding.units.agree("FrozenCache: the modules are as they were", holds=not is_new)
        stages = runtime.ranks.stages if over_stages else None
        if stages is not None:
            (is_other,) = stages.max_over([float(not is_same)], label="FrozenCache: the modules are as they were")
            is_same = not is_other
        if is_same:
            return self._tags
        if runtime is not self._runtime:
            stale, self._known = tensors, {}
        self._names = names_of(runtime)
        for tensor in stale:
            self._known[id(tensor)] = _change_count(tensor, runtime), _checksum(tensor, runtime)
        self._tell(tensors, runtime)
        self._elsewhere = {} if stages is None else self._of_other_stages(tensors, stages, runtime)
        self._modules, self._runtime, self._over_stages = modules, runtime, over_stages
        self._tags = self._described()
        return self._tags

    def renew(self, first: int) -> tuple[bytes, ...]:
        """Return other tags of the modules from `first` on: on other ranks, something of them is not as it was."""
        for number in range(first, len(self._modules)):
            self._renewed[number] += 1
        self._tags = self._described()
        return self._tags

    def _described(self) -> tuple[bytes, ...]:
        before, found = b"", []
        for number, module in enumerate(self._modules):
            digest = hashlib.blake2b(before, digest_size=16)
            digest.update(f"{self._renewed[number]}\n".encode())
            self._describe(module, digest)
            before = digest.digest()
            found.append(before)
        return tuple(found)

    def _is_stale(self, tensor: torch.Tensor, runtime: Runtime) -> bool:
        """Tell whether a tensor may have other values than when it was looked at."""
        known = self._known.get(id(tensor))
        if known is None:
            return True
        return _is_own(tensor, runtime) and known[0] != _change_count(tensor, runtime)

    def _tell(self, tensors: Sequence[torch.Tensor], runtime: Runtime) -> None:
        """Have all ranks know the checksums of what each of them owns."""
        managed = [tensor for tensor in tensors if runtime.registry.find(tensor) is not None]
        if runtime.ranks.size == 1 or not managed:
            return
        own = [float(self._known[id(tensor)][1]) if _is_own(tensor, runtime) else -1.0 for tensor in managed]
        found = runtime.ranks.max_over(own, label="FrozenCache: checksums of weights")
        for tensor, crc in zip(managed, found, strict=True):
            self._known[id(tensor)] = self._known[id(tensor)][0], int(crc)

    def _of_other_stages(self, tensors: Sequence[torch.Tensor], stages: Ranks, runtime: Runtime) -> dict[int, int]:
        """Return the checksums of what other stages have; they are told those of this one."""
        away = [tensor.is_meta and runtime.registry.find(tensor) is None for tensor in tensors]
        own = [-1.0 if is_away else float(self._known[id(t)][1]) for t, is_away in zip(tensors, away, strict=True)]
        found = stages.max_over(own, label="FrozenCache: checksums of weights of other stages")
        return {id(t): int(crc) for t, crc, is_away in zip(tensors, found, away, strict=True) if is_away}

    def _describe(self, module: nn.Module, digest: hashlib.blake2b) -> None:
        name = self._names.get(module)
        if name is None and type(module) is nn.Sequential:
            for inner in module:
                self._describe(inner, digest)
            return
        if name is None:
            number = self._numbers.setdefault(module, len(self._numbers))
            name = f"{number} of process {self._token}"
        digest.update(f"{type(module).__module__}.{type(module).__qualname__} {name}\n".encode())
        for key, tensor in (*module.named_parameters(), *module.named_buffers()):
            crc = self._elsewhere.get(id(tensor), self._known[id(tensor)][1])
            # Where a parameter is on another stage, its dtype here is not the one that is computed with.
            dtype = "" if isinstance(tensor, nn.Parameter) else tensor.dtype
            digest.update(f"{key} {tuple(tensor.shape)} {dtype} {crc}\n".encode())


def names_of(runtime: Runtime) -> dict[nn.Module, str]:
    """Return the names that modules have in the models of a manager, the same on all ranks."""
    roots = [root for unpacked in runtime.built.added for root in unpacked.roots]
    found: dict[nn.Module, str] = {}
    for number, root in enumerate(roots):
        for name, module in root.named_modules():
            found.setdefault(module, f"{number}.{name}")
    return found


def _is_own(tensor: torch.Tensor, runtime: Runtime) -> bool:
    """Tell whether a tensor's values are on this rank: else, one of its stage owns it, or another stage has it."""
    managed = runtime.registry.find(tensor)
    return not tensor.is_meta if managed is None else runtime.owns(managed)


def _change_count(tensor: torch.Tensor, runtime: Runtime) -> int:
    """Return what changes whenever values may have."""
    if not _is_own(tensor, runtime):
        return 0
    managed = runtime.registry.find(tensor)
    if managed is None:
        return hash((tensor._version, tensor.data_ptr()))
    return hash((runtime.memory.store.weights(managed.group).version, managed.group))


def _checksum(tensor: torch.Tensor, runtime: Runtime) -> int:
    if not _is_own(tensor, runtime):
        return 0  # the rank that has its values looks at them
    managed = runtime.registry.find(tensor)
    if managed is None:
        values = tensor.detach().to("cpu")
    else:  # in the dtype that is computed with, to which a frozen master weight was rounded: it may be gone elsewhere
        dtype = runtime.memory.store.weights(managed.group).dtype
        values = runtime.updater.read_weight(managed).to(dtype)
    return zlib.crc32(values.contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
