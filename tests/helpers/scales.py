"""The bytes that a rank holds while it builds a model and packs it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import chunkmem
from chunkmem.packing import released
from chunkmem.packing.built import Built
from chunkmem.packing.released import BuiltOverRanks
from chunkmem.packing.released_memory import ReleasedMemory
from chunkmem.ranks.exchange import Shard, Work, hand_over
from chunkmem.ranks.groups import RankGroup


@dataclass
class Scales:
    """Weighs what parameters hold, and what chunks do."""

    manager: chunkmem.ChunkManager
    params: list[weakref.ref[nn.Parameter]] = field(default_factory=list)
    peak_nbytes: int = 0
    on_its_way_nbytes: int = 0

    def params_nbytes(self) -> int:
        """Return the bytes of storages that are no chunks; parameters that are away have one element."""
        chunks = {
            chunk.home.storage_id
            for chunk in self.manager.runtime.memory.store.chunks.values()
            if chunk.home is not None
        }
        with torch._C.DisableTorchFunction():  # of the memory that they stand on now, which none is brought for
            found = [param for ref in self.params if (param := ref()) is not None and any(param.stride())]
            storages = {param.untyped_storage()._cdata: param.untyped_storage() for param in found}
        return sum(storage.nbytes() for memory, storage in storages.items() if memory not in chunks)

    def chunks_nbytes(self) -> int:
        return sum(pool.ledger.total_nbytes for pool in self.manager.runtime.memory.store.pools.values())

    def weigh(self) -> None:
        now_nbytes = self.params_nbytes() + self.chunks_nbytes() + self.on_its_way_nbytes
        self.peak_nbytes = max(self.peak_nbytes, now_nbytes)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Weigh whenever something is registered, attached, opened, emptied, sent, or moved into a chunk."""

        def on_parameter(_module: nn.Module, _name: str, param: nn.Parameter | None) -> None:
            if param is not None:
                self.params.append(weakref.ref(param))
            self.weigh()

        def on_module(_module: nn.Module, _name: str, _child: nn.Module | None) -> None:
            self.weigh()

        def weighed(take: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def weighed_take(*args: Any, **keys: Any) -> Tensor:
                self.weigh()
                return take(*args, **keys)

            return weighed_take

        def weighed_hand_over(ranks: RankGroup, shard: Shard, to: int, *, label: str) -> Work:
            self.on_its_way_nbytes = shard.flat.nbytes if to == ranks.rank else 0
            self.weigh()
            self.on_its_way_nbytes = 0
            return hand_over(ranks, shard, to, label=label)

        empty, opened = ReleasedMemory._empty, ReleasedMemory.open

        def weighed_empty(*args: Any, **keys: Any) -> None:
            self.weigh()
            empty(*args, **keys)

        def weighed_open(*args: Any, **keys: Any) -> None:
            opened(*args, **keys)
            self.weigh()

        handles = [
            torch_module.register_module_parameter_registration_hook(on_parameter),
            torch_module.register_module_module_registration_hook(on_module),
        ]
        try:
            with (
                patch.object(Built, "take", weighed(Built.take)),
                patch.object(BuiltOverRanks, "take", weighed(BuiltOverRanks.take)),
                patch.object(released, "hand_over", weighed_hand_over),
                patch.object(ReleasedMemory, "_empty", weighed_empty),
                patch.object(ReleasedMemory, "open", weighed_open),
            ):
                yield
        finally:
            for handle in handles:
                handle.remove()
