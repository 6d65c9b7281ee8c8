"""Have the weights of a stage be others for a while: their chunks exchange slabs of HOST with what is kept there.

No element is copied for that, and DEVICE fetches the other weights as it does its own. A chunk stays on HOST meanwhile,
so that nobody drops what it has there as a copy of something newer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from chunkmem.assembly.runtime import Runtime
from chunkmem.data.errors import CapacityError, StateError
from chunkmem.data.sizes import format_nbytes
from chunkmem.data.types import Tier
from chunkmem.modules.binding import ManagedParameter
from chunkmem.pipeline.modules import StageModule
from chunkmem.runtime.chunk import Chunk, slot_views
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.pool import Slab

_READER = "weight versions"

Slabs = dict[int, Slab]
"""Of HOST, by group: weights of a stage, laid out as its PARAM chunks."""


class OtherWeights:
    """Exchanges the weights of a stage, between steps or while none of its modules runs."""

    def __init__(self, runtime: Runtime, module: StageModule, *, role: str) -> None:
        """Exchange those of `module`, which is packed; ledgers count what is kept under `role`."""
        self._memory = runtime.memory
        self._role = role
        self.managed: list[ManagedParameter] = list(runtime.registry.managed_under(module).values())
        self.chunks: dict[int, Chunk] = {
            managed.group: runtime.modules.access.chunks[managed.group] for managed in self.managed
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(chunk.nbytes for chunk in self.chunks.values())

    def alloc(self, num: int) -> list[Slabs]:
        """Return memory for so many versions of the weights, contents undefined.

        Raises:
            CapacityError: HOST has no room for all of them; nothing has been taken.
        """
        sizes = {group: chunk.nbytes for group, chunk in self.chunks.items()}
        return self._alloc(self._role, sizes, num)

    def alloc_zeros(self, role: str) -> Slabs:
        """Return memory for a float32 value of each element of the weights, all 0, under a role of its own.

        Raises:
            CapacityError: as `alloc`.
        """
        size = torch.float32.itemsize
        sizes = {group: chunk.nbytes // chunk.dtype.itemsize * size for group, chunk in self.chunks.items()}
        (slabs,) = self._alloc(role, sizes, 1)
        with runtime_mode():
            for slab in slabs.values():
                slab.bytes.zero_()
        return slabs

    def _alloc(self, role: str, sizes: dict[int, int], num: int) -> list[Slabs]:
        pool, needed_nbytes = self._memory.store.pools[Tier.HOST], num * sum(sizes.values())
        self._memory.pager.policy.drain()
        if pool.ledger.free_nbytes < needed_nbytes:
            self._memory.pager.shrink(Tier.HOST, needed_nbytes)
        if (free_nbytes := pool.ledger.free_nbytes) < needed_nbytes:
            raise CapacityError(
                f"HOST: {num} version{'s' * (num > 1)} of a stage's weights take {format_nbytes(needed_nbytes)}, and "
                f"{format_nbytes(free_nbytes)} are free; raise memory.host by the difference, or use more ranks",
                needed_nbytes=pool.ledger.total_nbytes + needed_nbytes,
                cap_nbytes=pool.ledger.cap_nbytes,
                tier=Tier.HOST,
            )
        return [{group: pool.alloc(role, nbytes) for group, nbytes in sizes.items()} for _ in range(num)]

    def free(self, slabs: Slabs, role: str | None = None) -> None:
        """Give such memory back."""
        for slab in slabs.values():
            self._memory.store.pools[Tier.HOST].free(role or self._role, slab)

    def copy_to(self, slabs: Slabs) -> None:
        """Copy the weights as they are now.

        Raises:
            CapacityError: they are on DEVICE alone, and HOST has no room for them.
        """
        for group, chunk in self.chunks.items():
            with self._on_host(chunk), runtime_mode():
                slabs[group].flat(chunk.dtype).copy_(chunk.replicas[Tier.HOST].flat)

    def slots(self, slabs: Slabs, dtype: torch.dtype | None = None) -> Iterator[tuple[ManagedParameter, torch.Tensor]]:
        """Yield each parameter with its slot in such memory, of elements of `dtype`; None: of the weights' own."""
        with runtime_mode():
            views = {
                group: slot_views(chunk, slabs[group].flat(dtype or chunk.dtype))
                for group, chunk in self.chunks.items()
            }
        yield from ((managed, views[managed.group][managed.position]) for managed in self.managed)

    @contextlib.contextmanager
    def exchanged(self, slabs: Slabs) -> Iterator[None]:
        """Have the weights be those of `slabs`, and `slabs` have the weights, until the block ends.

        Raises:
            StateError: somebody keeps memory of the weights, or has written to them inside.
            CapacityError: the weights are on DEVICE alone, and HOST has no room for them.
        """
        with contextlib.ExitStack() as stack:
            for chunk in self.chunks.values():
                stack.enter_context(self._on_host(chunk))
            self._exchange(slabs)
            try:
                yield
            finally:
                written = self._written()
                self._exchange(slabs)
        if written:
            raise StateError(
                f"{written[0].label} was written to while a stage with a delay ran on another version of it: modules "
                'may not change their weights there; use schedule="1f1b"'
            )

    def _exchange(self, slabs: Slabs) -> None:
        store = self._memory.store
        for group, chunk in self.chunks.items():
            if Tier.DEVICE in chunk.replicas:
                if chunk.replicas[Tier.DEVICE].pins:
                    raise StateError(
                        f"{chunk.label} is in use where the weights of a stage change their version; drop what was "
                        "kept of its parameters (a view, a detach()) before pipe.step()"
                    )
                store.drop(chunk, Tier.DEVICE)
            store.before_change(chunk)
            slabs[group] = store.exchange(chunk, Tier.HOST, slabs[group])

    def _written(self) -> list[Chunk]:
        """Return the chunks that were written to on DEVICE, which count as not written to from now on."""
        found = []
        for chunk in self.chunks.values():
            self._memory.pager.notice_writes(chunk)
            if not chunk.ready(Tier.HOST):
                found.append(chunk)
                chunk.replicas[Tier.HOST].version = chunk.version
        return found

    @contextlib.contextmanager
    def _on_host(self, chunk: Chunk) -> Iterator[None]:
        """Keep the newest weights on HOST."""
        pager = self._memory.pager
        pager.policy.drain()
        pager.notice_writes(chunk)
        pager.pin(chunk, Tier.HOST, reader=_READER, elastic=True)
        try:
            yield
        finally:
            pager.unpin(chunk, Tier.HOST)


class Generations:
    """What autograd's version counters of a stage's parameters were when a forward ran.

    An update moves them, so that a backward of an older graph is an error. That of a batch for which
    other weights are meant has to find the counters of its forward.
    """

    def __init__(self, managed: list[ManagedParameter]) -> None:
        """Watch some parameters."""
        self._managed = managed
        self._versions: dict[int, list[int]] = {}
        """By batch."""

    def note(self, batch: int) -> None:
        """The forward of a batch is about to run."""
        self._versions[batch] = self._now()

    def forget(self, batch: int) -> None:
        """The backward of a batch is over."""
        self._versions.pop(batch, None)

    @contextlib.contextmanager
    def of(self, batch: int) -> Iterator[None]:
        """Inside, counters are those of the forward of a batch."""
        now = self._now()
        self._set(self._versions[batch])
        try:
            yield
        finally:
            self._set(now)

    def _now(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            return [managed.param._version for managed in self._managed]

    def _set(self, versions: list[int]) -> None:
        if not versions:
            return
        with torch._C.DisableTorchFunctionSubclass():
            params = tuple(managed.param for managed in self._managed)
            torch._C._autograd._unsafe_set_version_counter(params, tuple(versions))
        for managed, version in zip(self._managed, versions, strict=True):
            managed.version = version
