"""Make parameters, and their gradients, present and writable for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from chunkmem.errors import CapacityError, StateError
from chunkmem.nn.access import AccessTracker
from chunkmem.nn.binding import ManagedParameter
from chunkmem.nn.gradients import GradientBook
from chunkmem.nn.reduction import Reduction
from chunkmem.runtime.executor import DemandExecutor
from chunkmem.runtime.store import Chunk
from chunkmem.shard.shards import ShardStore
from chunkmem.types import ChunkId, Role, Tier
from chunkmem.units import format_nbytes


@contextmanager
def gathered(
    params: Iterable[ManagedParameter],
    *,
    grads: bool,
    executor: DemandExecutor,
    access: AccessTracker,
    gradients: GradientBook,
    take_up: Callable[[Iterable[int]], None],
    reduction: Reduction | None = None,
) -> Iterator[None]:
    """Pin the chunks of `params` on DEVICE; with `grads`, `.grad` is the gradient's slot meanwhile.

    `take_up` has the master copies of these groups, where there are some, follow what was written. With `reduction`,
    all ranks call it, weights and means of gradients come from their owners, and what an owner has written to its own
    is kept.

    Raises:
        CapacityError: they do not fit DEVICE together; nothing has been moved.
    """
    wanted = list(params)
    shards = None if reduction is None else reduction.shards
    exposed = [m for m in wanted if grads and m not in gradients.exposed]  # the others are, by a block around this one
    gradients.settle(exposed)
    landed = [m for m in exposed if m in gradients.landed.get(m.group, ())]
    if reduction is not None and grads:
        landed = reduction.reduce_early(exposed)
    weights = [executor.store.chunks[group] for group in dict.fromkeys(ChunkId(Role.PARAM, m.group) for m in wanted)]
    grad_chunks = [gradients.chunks[group] for group in dict.fromkeys(m.group for m in landed)]
    _require_room([*weights, *grad_chunks], executor)
    with ExitStack() as stack:
        if shards is not None:
            stack.enter_context(_shared([chunk.id.group for chunk in weights], shards, executor))
        own = [chunk for chunk in weights if not chunk.is_remote]
        stack.enter_context(_pinned(own, executor))
        stack.callback(_hold_kept, own, executor, access)
        stack.callback(_take_writes, own, executor, take_up)
        stack.enter_context(_open(wanted))
        lent = [m for m in landed if shards is not None and not shards.owns(m.group)]
        others = {m.group for m in lent}
        stack.enter_context(_pinned((chunk for chunk in grad_chunks if chunk.id.group not in others), executor))
        stack.enter_context(gradients.borrowing(lent, reader="gather"))
        if shards is not None and grad_chunks:
            shards.gather_chunks(grad_chunks, reader="gather")
        with gradients.exposing([m for m in exposed if m not in lent], [m for m in landed if m not in lent]):
            yield


def _hold_kept(own: list[Chunk], executor: DemandExecutor, access: AccessTracker) -> None:
    if executor.closed is None:
        access.hold_kept(chunk.id.group for chunk in own)


@contextmanager
def _open(params: Iterable[ManagedParameter]) -> Iterator[None]:
    """Let `params`, whose chunks are pinned on DEVICE, be ordinary ones."""
    opened: list[ManagedParameter] = []
    try:
        for managed in params:
            managed.open()
            opened.append(managed)
        yield
    finally:
        for managed in opened:
            managed.close()


@contextmanager
def _shared(groups: list[int], shards: ShardStore, executor: DemandExecutor) -> Iterator[None]:
    shards.hold(groups, reader="gather")
    try:
        shards.gather(groups, reader="gather")
        yield
    finally:
        if executor.closed is None:
            shards.renew(groups)  # whoever goes on holding them reads what was written
            shards.release(groups)


def _take_writes(own: list[Chunk], executor: DemandExecutor, take_up: Callable[[Iterable[int]], None]) -> None:
    if executor.closed is None:
        executor.policy.before_demand()
        for chunk in own:
            # What was written through `.data` or numpy passed autograd's version counter by.
            assert chunk.home is not None
            chunk.home.take_written()
            executor.store.mark_written(chunk, Tier.DEVICE)
        take_up(chunk.id.group for chunk in own)


@contextmanager
def _pinned(chunks: Iterable[Chunk], executor: DemandExecutor) -> Iterator[None]:
    pinned: list[Chunk] = []
    try:
        for chunk in chunks:
            executor.pin(chunk, Tier.DEVICE, reader="gather", elastic=True)
            pinned.append(chunk)
        yield
    finally:
        for chunk in pinned if executor.closed is None else ():
            executor.unpin(chunk, Tier.DEVICE)


def _require_room(chunks: list[Chunk], executor: DemandExecutor) -> None:
    store = executor.store
    cap = store.pools[Tier.DEVICE].ledger.limit_nbytes
    while True:
        extra = sum(c.nbytes for c in chunks if Tier.DEVICE not in c.replicas or c.replicas[Tier.DEVICE].pins == 0)
        needed = executor.pinned_nbytes[Tier.DEVICE] + extra
        if needed <= cap or not executor.holder.relieve():
            break
    if needed > cap:
        raise CapacityError(
            f"gather: {len(chunks)} chunks need {format_nbytes(needed)} on DEVICE and the cap is {format_nbytes(cap)}; "
            "gather fewer parameters at a time, use manager.state_dict() to read them, or raise memory.device",
            needed_nbytes=needed,
            cap_nbytes=cap,
        )


def parameters_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the parameters a caller may mean: a Parameter, a Module, or an iterable of either."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for item in value:
            yield from parameters_in(item)
    else:
        raise StateError(f"manager.gather() takes parameters, modules or a list of them, not a {type(value).__name__}")
