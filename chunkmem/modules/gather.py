"""Make parameters, and their gradients, present and writable for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import nn

from chunkmem.data.errors import CapacityError, StateError
from chunkmem.data.sizes import format_nbytes
from chunkmem.data.types import Tier
from chunkmem.modules.access import AccessTracker
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.gradients import GradientBook
from chunkmem.modules.reduction import Reduction
from chunkmem.modules.whole import WholeParameter
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.pager import Pager


class _Block(ExitStack):
    """What is done inside of it is undone at its end, in the other order."""

    def __init__(self, pager: Pager) -> None:
        super().__init__()
        self._pager = pager

    def at_end(self, call: Callable[..., object], *args: object) -> None:
        """Make a call at its end, unless the manager is closed by then."""
        self.callback(lambda: call(*args) if self._pager.closed is None else None)

    def pin(self, chunk: Chunk) -> None:
        """Have a chunk where modules compute with it, to be written to."""
        self._pager.pin(chunk, reader="gather", elastic=True)
        self.at_end(self._pager.unpin, chunk)
        self._pager.store.before_change(chunk)


@contextmanager
def gathered(
    params: Iterable[ManagedParameter],
    *,
    grads: bool,
    pager: Pager,
    access: AccessTracker,
    gradients: GradientBook,
    sync_masters: Callable[[Iterable[int]], None],
    reduction: Reduction | None,
) -> Iterator[None]:
    """Pin the chunks of `params` on DEVICE; with `grads`, `.grad` is the gradient's slot meanwhile.

    `sync_masters` has the master copies of these groups, where there are some, follow what was written. With
    `reduction`, all ranks call it, weights and means of gradients come from their owners, and what an owner has written
    to its own is kept.

    Raises:
        CapacityError: they do not fit DEVICE together; nothing has been moved.
    """
    wanted = list(params)
    shards = None if reduction is None else reduction.shards
    exposed = [m for m in wanted if grads and m not in gradients.exposed]  # the others are, by a block around this one
    gradients.sync_with_grad(exposed)
    landed = [m for m in exposed if m in gradients.slots.landed.get(m.group, ())]
    if reduction is not None and grads:
        landed = reduction.reduce_early(exposed)
    weights = [pager.store.weights(group) for group in dict.fromkeys(m.group for m in wanted)]
    grad_chunks = [gradients.slots.groups[group].chunk for group in dict.fromkeys(m.group for m in landed)]
    _require_room([chunk for chunk in (*weights, *grad_chunks) if chunk.compute_tier is Tier.DEVICE], pager)
    with _Block(pager) as block:
        if shards is not None:
            on_device = [chunk.id.group for chunk in weights if chunk.compute_tier is Tier.DEVICE]
            shards.hold(on_device, reader="gather")
            block.at_end(shards.release, on_device)
            block.at_end(shards.renew, on_device)  # other holders read what was written
            shards.gather(on_device, reader="gather")
            block.at_end(partial(shards.send_on_host, {chunk.id.group for chunk in weights}, reader="gather"))
        own = [chunk for chunk in weights if not chunk.is_remote]
        for chunk in own:
            block.pin(chunk)
        block.at_end(access.hold_kept, weights)  # of other ranks, too: the memory is here
        block.at_end(_take_writes, own, pager, sync_masters)
        for managed in wanted:
            managed.open()
            block.callback(managed.close)
        lent = [m for m in landed if shards is not None and not shards.owns(m.group)]
        others = {m.group for m in lent}
        for chunk in grad_chunks:
            if chunk.id.group not in others:
                block.pin(chunk)
        block.enter_context(gradients.borrowing(lent))
        if shards is not None and grad_chunks:
            shards.gather_chunks(grad_chunks, reader="gather")
        with gradients.exposing([m for m in exposed if m not in lent], [m for m in landed if m not in lent]):
            yield


def _take_writes(own: list[Chunk], pager: Pager, sync_masters: Callable[[Iterable[int]], None]) -> None:
    pager.policy.before_demand()
    for chunk in own:
        # What was written through `.data` or numpy passed autograd's version counter by.
        assert chunk.home is not None
        chunk.home.take_written()
        pager.store.mark_written(chunk)
    sync_masters(chunk.id.group for chunk in own)


def _require_room(chunks: list[Chunk], pager: Pager) -> None:
    store = pager.store
    cap = store.pools[Tier.DEVICE].ledger.limit_nbytes
    while True:
        extra = sum(c.nbytes for c in chunks if Tier.DEVICE not in c.replicas or c.replicas[Tier.DEVICE].pins == 0)
        needed = pager.pinned_nbytes[Tier.DEVICE] + extra
        if needed <= cap or not pager.holder.relieve():
            break
    if needed > cap:
        raise CapacityError(
            f"gather: {len(chunks)} chunks need {format_nbytes(needed)} on DEVICE and the cap is {format_nbytes(cap)}; "
            "gather fewer parameters at a time, use manager.state_dict() to read them, or raise memory.device",
            needed_nbytes=needed,
            cap_nbytes=cap,
        )


def parameters_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the parameters a caller may mean: a Parameter, a Module, or an iterable of either.

    Raises:
        StateError: it is something else, or a tiled layer's weight or bias, which is no parameter.
    """
    if isinstance(value, WholeParameter):
        raise StateError(
            f"the weight or bias {tuple(value.shape)} of a tiled layer is in {len(value.tiles)} parameters, "
            f"{', '.join(value.tiles)}: gather the layer, manager.gather(layer), and write to those; to read the "
            "whole, layer.weight.clone() needs no gather"
        )
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for item in value:
            yield from parameters_in(item)
    else:
        raise StateError(f"manager.gather() takes parameters, modules or a list of them, not a {type(value).__name__}")
