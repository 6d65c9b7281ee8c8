"""Chunks of averages of weights: where they live, and how they are read and written there.

[Note: Averages] A chunk of averages belongs to a group, as one of optimizer states, but no update touches it. So it is
in no trace, and no plan moves it: it stays where it was made (on HOST, with a disk on DISK), and is read and written
there, between steps. Plans leave it its room: `ChunkStore.kept_nbytes` tells how much that is. Where DEVICE and HOST
are one piece of RAM it is on DEVICE, like everything else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from chunkmem.nn.binding import ManagedParameter
from chunkmem.optim.claims import Claims
from chunkmem.optim.rule import StateSpec
from chunkmem.runtime.chunk import slot_views
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.failed import lost_error
from chunkmem.runtime.pager import Pager
from chunkmem.types import MEMORY, Role

_READER = "averages of weights"


class AverageChunks:
    """The averages of some groups that this rank owns."""

    def __init__(
        self, pager: Pager, claims: Claims, groups: Collection[int], role: Role, *, is_blank: bool = False
    ) -> None:
        """Have chunks, of zeros if `is_blank`, else without content so far.

        Args:
            pager: of the chunks.
            claims: tell which groups are trained.
            groups: of the weights.
            role: of kind `AVERAGES`, the same on all ranks.
            is_blank: see above.

        Raises:
            CapacityError: the tiers have no room for them; nothing has been made.
        """
        self._store = store = pager.store
        self.tier = store.staying_tier
        self._of = {group: StateSpec(role).chunk(store.weights(group)) for group in groups}
        """By group."""
        for chunk in self._of.values():
            store.add(chunk)
        try:
            claims.require_room({}, name="averages")
            for chunk in self._of.values() if is_blank else ():
                pager.create(chunk, self.tier, reader=_READER, zero=True, elastic=True, is_of_step=False)
                if self.tier not in MEMORY:
                    chunk.replicas[self.tier].write(torch.zeros(chunk.group.numel, dtype=chunk.dtype, device="cpu"))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the memory back."""
        for chunk in self._of.values():
            self._store.remove(chunk)
        self._of = {}

    @contextmanager
    def opened(self, group: int) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield one tensor a slot, to be read and written; of DISK they are a copy meanwhile.

        Raises:
            TierIOError: DISK cannot be read or written.
        """
        chunk, store = self._of[group], self._store
        store.before_change(chunk)
        if not chunk.ready(self.tier):
            raise lost_error(_READER, chunk)
        replica = chunk.replicas[self.tier]
        with runtime_mode():
            flat = replica.read()
            slots = store.views(chunk, self.tier) if flat is replica.flat else slot_views(chunk, flat)
        yield slots
        replica.write(flat)
        store.mark_written(chunk, self.tier)

    def read(self, managed: ManagedParameter) -> torch.Tensor:
        """Return a CPU copy of the average of a parameter."""
        return self._store.read_slot(self._of[managed.group], managed.position)
