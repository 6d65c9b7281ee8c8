"""Move the parameters of built modules into chunks, one chunk at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from chunkmem.data.errors import CapacityError
from chunkmem.data.layout import Group, Layout, MasterCopy, TensorSpec
from chunkmem.data.sizes import format_nbytes
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.modules.binding import BoundChunk, ManagedParameter, move_to
from chunkmem.packing.built import Built, FreedRam
from chunkmem.packing.precision import AS_BUILT, Precision
from chunkmem.runtime.chunk import FIRST_CONTENT, Chunk, SlotForms
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.pager import Pager

_FP32_NBYTES = 4
_BAR_DELAY_S = 2.0
"""What is packed by then has no progress bar."""


def tensor_specs(
    named: Sequence[tuple[str, nn.Parameter]],
    precision: Precision = AS_BUILT,
    *,
    on_host: Collection[int] = (),
    each_ranks: Collection[int] = (),
) -> list[TensorSpec]:
    """Describe parameters to the packer.

    Args:
        named: parameters and their names.
        precision: theirs.
        on_host: identities of those whose modules compute there.
        each_ranks: identities of those of which each rank has its own.
    """
    specs = []
    for name, param in named:
        dtype = precision.of(param)
        specs.append(
            TensorSpec(
                name,
                tuple(param.shape),
                str(dtype).removeprefix("torch."),
                dtype.itemsize,
                precision.masters.get(id(param), MasterCopy.NONE),
                is_frozen=not param.requires_grad,
                is_on_host=id(param) in on_host,
                is_each_ranks=id(param) in each_ranks,
            )
        )
    return specs


def groups_by_role(group: Group) -> dict[Role, Group]:
    """Return what the chunk of each role is made of that a group has before any optimizer."""
    masters = {} if group.master is MasterCopy.NONE else {Role.MASTER: group.in_float32()}
    return {Role.PARAM: group, Role.GRAD: group} | masters


def packed_nbytes(group: Group) -> int:
    """Return the bytes of a group's weights from packing on."""
    return group.nbytes + (group.in_float32().nbytes if group.master is MasterCopy.PACKED else 0)


@dataclass(eq=False)
class Packer:
    """Makes chunks of all roles for a model and fills those of PARAM."""

    pager: Pager
    """Brings chunks to tiers."""
    make_home: Callable[[torch.dtype, Tier], BoundChunk]
    """Makes the side of a PARAM chunk that its parameters are views of; see `Memory`."""
    states_nbytes: Callable[[Group], int]
    """Returns what the states of a group's optimizer are likely to take."""
    shows_progress: bool
    """There is a bar on a terminal while a large model is packed, and its memory pinned."""

    def pack(
        self, named: Sequence[tuple[str, nn.Parameter]], layout: Layout, built: Built
    ) -> tuple[ManagedParameter, ...]:
        """Pack parameters as they are laid out. The values move chunk by chunk, each source freed on the way.

        Where `built` is that of several ranks, only the chunks of own groups get content.

        Raises:
            CapacityError: the weights do not fit the tiers; the model is as it was.
            ConfigError, RankError: not all ranks pack the same.
        """
        built.agree(layout)
        if not built.is_put_off:
            self._prepare_room(layout, built)
        managed: dict[int, ManagedParameter] = {}
        freed = FreedRam()
        try:
            with self._bar(sum(group.nbytes for group in layout.groups)) as bar:
                for group in layout.groups:
                    for parameter in self._pack_group(group, named, built):
                        managed[parameter.slot.tensor] = parameter
                    bar.update(group.nbytes)
                    freed.add(group.nbytes)
        except BaseException:
            self.unpack(layout, built)
            raise
        return tuple(managed[i] for i in range(len(named)))

    def _prepare_room(self, layout: Layout, built: Built) -> None:
        own = [group for group in layout.groups if built.owns(group)]
        others = [group for group in layout.groups if group.is_on_host and not built.owns(group)]
        nbytes = sum(packed_nbytes(group) for group in own) + sum(group.nbytes for group in others)
        self._require_room(nbytes, built, in_training=sum(map(self._nbytes_in_training, own)))
        if any(group.is_on_host for group in layout.groups):
            self._require_host(layout, built)
        self.pager.store.pools[Tier.HOST].expect(nbytes)

    def _bar(self, nbytes: int) -> Any:
        from tqdm import tqdm

        class Bar(tqdm):  # type: ignore[misc]
            # tqdm's own lock is a semaphore of the system, which a process that is killed leaves behind.
            _lock = getattr(tqdm, "_lock", None) or threading.RLock()
            monitor_interval = 0  # its monitor is a thread that stays

        options = {"desc": "packing", "unit": "B", "unit_scale": True, "unit_divisor": 1024, "leave": False}
        return Bar(total=nbytes, delay=_BAR_DELAY_S, disable=None if self.shows_progress else True, **options)

    def _nbytes_in_training(self, group: Group) -> int:
        return sum(form.nbytes for form in groups_by_role(group).values()) + self.states_nbytes(group)

    def unpack(self, layout: Layout, built: Built) -> None:
        """Undo `pack`, also one that was interrupted: parameters get memory of their own again, chunks are gone."""
        store = self.pager.store
        for group in layout.groups:
            keys = [ChunkId(role, group.id) for role in groups_by_role(group)]
            chunks = [store.chunks[key] for key in keys if key in store.chunks]
            for chunk in chunks:
                if isinstance(chunk.home, BoundChunk):
                    source = chunk if chunk.master is None or not chunk.can_be_rounded else chunk.master
                    self._give_back(source, chunk.home, built)
            for chunk in chunks:
                store.remove(chunk)

    def _give_back(self, chunk: Chunk, home: BoundChunk, built: Built) -> None:
        """Let the parameters have the chunk's values in memory of their own."""
        tier, store = chunk.newest_tier(), self.pager.store
        for parameter in home.parameters:
            if built.give_back(parameter) or tier is None:
                continue
            at = parameter.position
            with runtime_mode():
                parameter.param.data = store.slot(chunk, tier, at).to(parameter.built_dtype, copy=True)

    def _require_room(self, nbytes: int, built: Built, *, in_training: int) -> None:
        """Raise if there is no room for `nbytes` of weights, which take `in_training` with gradients and states."""
        ledgers = {tier: pool.ledger for tier, pool in self.pager.store.pools.items()}
        free = sum(ledger.limit_nbytes - ledger.total_nbytes for ledger in ledgers.values())
        lacking = built.largest(nbytes - free)
        if lacking > 0:
            # Where both tiers are one piece of RAM, HOST is empty and memory.host is the cap of DEVICE.
            cap = ledgers[Tier.HOST].limit_nbytes or ledgers[Tier.DEVICE].limit_nbytes
            needed = cap + lacking
            before = sum(c.nbytes for c in self.pager.store.chunks.values() if not c.is_remote)
            enough = max(needed, built.largest(before + in_training))
            where = "" if nbytes - free == lacking else f", and another rank lacks {format_nbytes(lacking)}"
            raise CapacityError(
                f"packing: the weights take {format_nbytes(nbytes)} in chunks, and DEVICE and HOST "
                f"together have {format_nbytes(free)} free{where}; raise memory.host from {format_nbytes(cap)} to at "
                f"least {format_nbytes(needed)} ({needed} bytes); training takes gradients and optimizer states too, "
                f"for which {format_nbytes(enough)} ({enough} bytes) is certain to do",
                needed_nbytes=needed,
                cap_nbytes=cap,
                enough_nbytes=enough,
                tier=Tier.HOST,
            )

    def _require_host(self, layout: Layout, built: Built) -> None:
        """Raise if HOST has no room for the weights that are computed with there."""
        groups = [group for group in layout.groups if group.is_on_host]
        nbytes = sum(packed_nbytes(group) if built.owns(group) else group.nbytes for group in groups)
        cap, there = (
            self.pager.store.pools[Tier.HOST].ledger.limit_nbytes,
            self.pager.store.kept_nbytes(Tier.HOST).total(),
        )
        lacking = built.largest(there + nbytes - cap)
        if lacking > 0:
            enough = built.largest(there + sum(self._nbytes_in_training(group) for group in layout.groups))
            raise CapacityError(
                f"packing: modules that compute on HOST have {format_nbytes(there + nbytes)} of weights, and HOST may "
                f"hold {format_nbytes(cap)}; raise memory.host to at least {format_nbytes(cap + lacking)} "
                f"({cap + lacking} bytes), or leave them on DEVICE; training takes gradients and optimizer states, "
                f"too, for which {format_nbytes(enough)} ({enough} bytes) is certain to do",
                needed_nbytes=cap + lacking,
                cap_nbytes=cap,
                enough_nbytes=enough,
                tier=Tier.HOST,
            )

    def _pack_group(
        self, group: Group, named: Sequence[tuple[str, nn.Parameter]], built: Built
    ) -> list[ManagedParameter]:
        params = [named[slot.tensor] for slot in group.slots]
        forms = tuple((param.shape, built.stride(param)) for _, param in params)
        inside = [name for name, _ in params]
        if built.is_put_off:
            chunk, views = self._register(group, inside, forms), _elsewhere([])
        else:
            chunk, views = self.make_chunks(group, inside, forms, is_own=built.owns(group))
        home = cast(BoundChunk, chunk.home)
        packed = []
        for position, (slot, (name, param)) in enumerate(zip(group.slots, params, strict=True)):
            values = built.take(param, group.id, name=name)
            with runtime_mode():
                for each in views if built.owns(group) else ():
                    each[position].copy_(values)
                parameter = ManagedParameter(
                    param, name, slot, position, home, stride=forms[position][1], dtype=chunk.dtype
                )
                home.add(parameter)
            packed.append(parameter)
        if chunk.newest_tier() is chunk.compute_tier:
            with runtime_mode():
                home.bind()
        return packed

    def make_chunks(
        self,
        group: Group,
        inside: Sequence[str],
        forms: SlotForms = (),
        *,
        is_own: bool,
    ) -> tuple[Chunk, list[tuple[torch.Tensor, ...]]]:
        """Register the chunks of all roles of a group, and begin the content of its weights.

        Args:
            group: what is packed together.
            inside: names of its parameters.
            forms: shape and strides of each.
            is_own: it has content on this rank.

        Returns:
            The PARAM chunk, and slots of each chunk that is to be filled, before anything else is placed.
        """
        chunk = self._register(group, inside, forms)
        filled = [chunk]
        if chunk.master is not None and group.master is MasterCopy.PACKED:
            filled.append(chunk.master)
        if not is_own and chunk.compute_tier is Tier.HOST:  # weights there are sent to all ranks
            return chunk, [*self._place([chunk]), *_elsewhere(filled[1:])]
        return chunk, self._place(filled) if is_own else _elsewhere(filled)

    def _register(self, group: Group, inside: Sequence[str], forms: SlotForms) -> Chunk:
        """Register the chunks of all roles, without content; return that of PARAM. The arguments are as above."""
        store = self.pager.store
        what = inside[0] if len(inside) == 1 else f"{inside[0]} .. {inside[-1]}"
        for role, form in groups_by_role(group).items():
            key, dtype = ChunkId(role, group.id), getattr(torch, form.dtype)
            chunk = Chunk(key, form, dtype, f"{key} ({what})", forms)
            if role is Role.PARAM:
                chunk.home = self.make_home(dtype, chunk.compute_tier)
            store.add(chunk)
        chunk = store.weights(group.id)
        chunk.master = store.chunks.get(ChunkId(Role.MASTER, group.id))
        return chunk

    def _place(self, chunks: Sequence[Chunk]) -> list[tuple[torch.Tensor, ...]]:
        """Begin the content of chunks; return views of their slots, to be written before anything else is placed."""
        store, held = self.pager.store, []
        try:
            for chunk in chunks:
                replica = self.pager.place(chunk, reader="packing")
                if store.host_is_gateway:  # where it could not be written to
                    replica.pins += 1
                    held.append(replica)
        finally:
            for replica in held:
                replica.pins -= 1
        # The first may have made way for the second.
        tiers = [chunk.newest_tier() for chunk in chunks]
        return [store.views(chunk, tier) for chunk, tier in zip(chunks, tiers, strict=True) if tier]


def _elsewhere(chunks: Sequence[Chunk]) -> list[tuple[torch.Tensor, ...]]:
    """Another rank begins the content of chunks."""
    for chunk in chunks:
        chunk.version = FIRST_CONTENT
    return []


def move_ordinary_tensors(
    module: nn.Module, excluded: Iterable[nn.Module], device: torch.device, *, on_host: Collection[nn.Module]
) -> None:
    """Put buffers, but those of modules that compute on HOST, and parameters of excluded modules on the device."""
    for child in module.modules():
        if child in on_host:
            continue
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.device != device:
                child._buffers[name] = buffer.to(device)
    for child in excluded:
        for param in child.parameters(recurse=False):
            move_to(param, param.data.to(device))
