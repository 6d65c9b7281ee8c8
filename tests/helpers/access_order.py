"""Who used which memory of slabs, and what was ordered before what: the state behind [Note: Happens before]."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from chunkmem.data.types import Tier
from tests.helpers.recorded_group import RecordedGroup
from tests.helpers.vector_clocks import Actor, Operation, ShadowMemory, VectorClocks


class AccessOrder:
    """Told of every operator and of memory that comes and goes; `memory.races` is what was found."""

    def __init__(self) -> None:
        self.clocks = VectorClocks()
        self.memory = ShadowMemory(self.clocks)
        self.caller = Actor.HOST
        """Who runs what touches memory of HOST alone."""
        self.computing = Actor.COMPUTE
        """The current stream of the program's."""
        self.groups: list[RecordedGroup] = []
        """What chunks are exchanged over, as they were first used."""
        self._lane: Actor | None = None
        """Who runs all operators at present, if it is a copy."""
        self.runtime_depth = 0
        """How many `runtime_mode` are open: operators are the runtime's own, not a user's."""
        self._computed = _Storages()
        """What the runtime has had COMPUTE make of chunks, such as norms."""

    def launch(self, actor: Actor, label: str) -> Operation:
        """Begin an operation that HOST, or who acts for it, issues."""
        if actor is not self.caller:
            self.clocks.wait(actor, self.clocks.of(self.caller))
        return self.clocks.begin(actor, label)

    @contextlib.contextmanager
    def copying(self, actor: Actor) -> Iterator[None]:
        """Surround the operators of a copy."""
        self._lane = actor
        try:
            yield
        finally:
            self._lane = None

    @contextlib.contextmanager
    def calling(self, actor: Actor) -> Iterator[None]:
        """Surround what another thread would run."""
        before, self.caller = self.caller, actor
        try:
            yield
        finally:
            self.caller = before

    def ran(
        self, label: str, reads: Sequence[Any], writes: Sequence[Any], results: Sequence[Any], *, blocks: bool
    ) -> None:
        """An operator has run; the arguments are its name and tensors, and whether HOST waits for what it returns."""
        spans = [[span for tensor in tensors if (span := _span(tensor))] for tensors in (reads, writes)]
        tiers = {self.memory.name(address) for each in spans for address, _ in each} - {None}
        of_compute = Tier.DEVICE.name in tiers or (self.runtime_depth and any(map(self._computed.has, reads)))
        if of_compute and self.runtime_depth and self._lane is None:
            self._computed.add([result for result in results if not self._is_slab(result)])
        if tiers:
            actor = (self.computing if of_compute else self.caller) if self._lane is None else self._lane
            operation = self.launch(actor, label)
            self.memory.access(operation, spans[0], writes=False)
            self.memory.access(operation, spans[1], writes=True)
        if of_compute and self._lane is None and (blocks or Tier.HOST.name in tiers):
            self.clocks.wait(self.caller, self.clocks.of(self.computing))

    def transferred(self, label: str, stored: Sequence[tuple[int, int]], memory: torch.Tensor, *, fills: bool) -> None:
        """A thread has read what is stored on DISK, which `fills` memory of HOST, or written it."""
        span = _span(memory)
        operation = self.launch(self.caller, label)
        self.memory.access(operation, stored, writes=not fills)
        self.memory.access(operation, [] if span is None else [span], writes=fills)

    def _is_slab(self, tensor: Any) -> bool:
        """Tell whether a tensor's memory is followed by itself."""
        span = _span(tensor)
        return span is not None and self.memory.name(span[0]) is not None

    def took(self, tier: Tier, memory: torch.Tensor) -> None:
        """A tier has got memory from the system, or from torch's allocator."""
        self.memory.add(memory.data_ptr(), memory.nbytes, tier.name)
        if tier is Tier.DEVICE:
            self._computes_in(memory.data_ptr(), memory.nbytes, "what was computed in the memory of a new slab")

    def gave_up(self, address: int, nbytes: int) -> None:
        """DEVICE gave a slab's memory back to torch's allocator: the next operator may get it."""
        self._computes_in(address, nbytes, "what is computed next in the memory of a freed slab")
        self.memory.remove(address)

    def _computes_in(self, address: int, nbytes: int, label: str) -> None:
        self.memory.access(self.launch(self.computing, label), [(address, nbytes)], writes=True)


class _Storages:
    """A set of storages that holds none of them."""

    def __init__(self) -> None:
        self._live: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._live[storage._cdata] = storage

    def has(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return self._live.get(storage._cdata) is storage


def _span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the address and the bytes of an ordinary tensor, from its first element to its last."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # of wrappers
        return None
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return address, (reach + 1) * tensor.element_size()
