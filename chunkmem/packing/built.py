"""Where packing finds the values of the parameters that were built."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import nn

from chunkmem.data.layout import EACH, Group, Layout, MasterCopy, digest
from chunkmem.data.layout_pack import SLAB_FLOOR_NBYTES
from chunkmem.modules.binding import ManagedParameter, dense_stride
from chunkmem.ranks.shards import ShardStore
from chunkmem.runtime.device import give_back_freed_ram


class FreedRam:
    """RAM that was freed piece by piece, and is given back to the system as soon as it is as much as a slab."""

    def __init__(self) -> None:
        """Nothing was freed."""
        self._nbytes = 0

    def add(self, nbytes: int) -> None:
        """So much was freed."""
        self._nbytes += nbytes
        if self._nbytes >= SLAB_FLOOR_NBYTES:
            give_back_freed_ram()
            self._nbytes = 0


class Built:
    """Where packing finds the values of what was built: all of them are on this rank."""

    has_memory = True
    """Tensors have addresses; those that are only counted have none."""
    is_put_off = False
    """Values come later: chunks are made without content."""
    slab_nbytes: int | None = None
    """Of a slab; None: as the configuration means."""
    masters: Mapping[int, MasterCopy] = MappingProxyType({})
    """Which parameters in a low dtype have master weights, by the identity of each; of others the dtypes tell."""
    strides: Mapping[int, tuple[int, ...]] = MappingProxyType({})
    """Those that parameters without values on this rank have in their slots, by the identity of each."""

    def __init__(self, shards: ShardStore | None = None) -> None:
        """Take what tells which rank owns which group; None: this rank packs all of them."""
        self._shards = shards

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look on while modules are built."""
        yield

    def check(self, excluded: Collection[nn.Module]) -> None:
        """Find out which values are where, all modules having been built.

        Raises:
            ConfigError, RankError: the ranks have not built the same.
        """

    def agree(self, layout: Layout) -> None:
        """Raise a ConfigError if the ranks are not about to pack the same."""
        if self._shards is not None:
            self._shards.ranks.agree("the layout of the chunks", digest([layout]))

    def largest(self, value: int) -> int:
        """Return the largest over the ranks that pack together."""
        if self._shards is None:
            return value
        return int(self._shards.ranks.max_over((float(value),), label="packing: comparing what is free")[0])

    def owns(self, group: Group) -> bool:
        """Tell whether the chunks of a group have content on this rank."""
        return self._shards is None or group.owner in (EACH, self._shards.ranks.shard.rank)

    def is_released(self, param: nn.Parameter) -> bool:
        """Tell whether this rank need not have the values of a parameter; it was found fit to be packed."""
        return id(param) in self.strides

    def comes_later(self, param: nn.Parameter) -> bool:
        """Tell whether a parameter is on the meta device, and gets values when it is packed."""
        return False

    def stride(self, param: nn.Parameter) -> tuple[int, ...]:
        """Return the strides a parameter has in its slot."""
        return self.strides[id(param)] if id(param) in self.strides else dense_stride(param)

    def take(self, param: nn.Parameter, group: int, *, name: str) -> torch.Tensor:
        """Return the values of a parameter, to be packed into a group that this rank `owns`; else anything.

        All ranks call it for every parameter, in one order.
        """
        return param

    def complete(self, parameters: Sequence[ManagedParameter]) -> None:
        """Give values to those that come later, all models having been packed.

        Raises:
            LayoutError: nothing has given a tensor values; it is as it was.
        """

    def give_back(self, managed: ManagedParameter) -> bool:
        """Packing is undone: tell whether a parameter has no values, and has been made what it was."""
        return False


HERE = Built()
"""Every value is on this rank."""


class PutOff(Built):
    """Values come later, chunk by chunk: packing makes chunks that have no content yet."""

    has_memory = False
    is_put_off = True

    def __init__(
        self,
        strides: Mapping[int, tuple[int, ...]],
        *,
        slab_nbytes: int | None = None,
        masters: Mapping[int, MasterCopy] = MappingProxyType({}),
    ) -> None:
        """Take the strides that parameters have in their slots, by the identity of each; see `Built` for the others."""
        super().__init__()
        self.strides = strides
        self.slab_nbytes = slab_nbytes
        self.masters = masters
