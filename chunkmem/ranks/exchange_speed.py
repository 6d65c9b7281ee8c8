"""How fast ranks exchange: gathers and reductions of what a step exchanges at once, measured as the step does them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from math import inf

from chunkmem.data.errors import CapacityError
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.ranks.shards import ShardStore
from chunkmem.runtime.chunk import NO_CONTENT, Chunk
from chunkmem.runtime.pager import Pager

_READER = "measuring the links between ranks"
NUM_TRIALS = 3
_LEAST_S = 1e-9

TimeS = Callable[[Callable[[], object]], float]
"""Does what it is given, and returns how many seconds that took."""


def measure_exchanges(shards: ShardStore, pager: Pager, groups: Sequence[int], *, time_s: TimeS) -> tuple[float, float]:
    """Use the way to exchange that takes least for these groups from now on; all ranks call it, and choose alike.

    Gradients are reduced in GRAD chunks that no rank has content in, as the first step leaves them.

    Args:
        shards: of the ranks.
        pager: of their chunks.
        groups: that a step gathers at once, at least one.
        time_s: measures on this rank.

    Returns:
        The bytes of chunks a second that it gathers, and that it reduces. inf: a rank has no room to measure that, or
        there is nothing to reduce.

    Raises:
        RankError: a rank is missing, or somewhere else.
    """
    gradients = _without_content(shards, pager, groups)
    with pager.measuring(), ExitStack() as held:
        takes = partial(_hold, held, shards, groups), partial(_create, held, pager, gradients)
        is_short, is_short_of_gradients = shards.ranks.any_over([*map(_lacks_room, takes)], label=_READER)
        tasks: list[Callable[[], object]] = []
        if not is_short:
            tasks.append(lambda: _gather(shards, groups))
        if gradients and not is_short_of_gradients:
            tasks.append(lambda: _reduce(shards, gradients))
        own = [_best_s(shards, task, time_s) for shards.exchange in shards.exchanges for task in tasks]
    found = shards.ranks.max_over(own, label=_READER)
    by_exchange = [found[at * len(tasks) : (at + 1) * len(tasks)] for at in range(len(shards.exchanges))]
    fastest = min(range(len(by_exchange)), key=lambda at: sum(by_exchange[at]))
    shards.exchange, times = shards.exchanges[fastest], iter(by_exchange[fastest])
    gather_Bps = inf if is_short else shards.nbytes(groups) / max(next(times), _LEAST_S)
    reduced_nbytes = sum(chunk.nbytes for chunk in gradients)
    return gather_Bps, next((reduced_nbytes / max(seconds, _LEAST_S) for seconds in times), inf)


def _without_content(shards: ShardStore, pager: Pager, groups: Sequence[int]) -> list[Chunk]:
    """Return the GRAD chunks of groups that no rank has any gradients in; the same on all ranks."""
    ids = [ChunkId(Role.GRAD, group) for together in shards.together(groups) for group in together]
    found = [chunk for chunk in map(pager.store.chunks.get, ids) if chunk is not None]
    chunks = [chunk for chunk in found if chunk.dtype.is_floating_point]
    in_use = shards.ranks.any_over([chunk.version != NO_CONTENT for chunk in chunks], label=_READER)
    return [chunk for chunk, is_used in zip(chunks, in_use, strict=True) if not is_used]


def _lacks_room(take: Callable[[], object]) -> bool:
    try:
        take()
    except CapacityError:
        return True
    return False


def _hold(held: ExitStack, shards: ShardStore, groups: Sequence[int]) -> None:
    """Hold groups until the end of `held`."""
    shards.hold(groups, reader=_READER)
    held.callback(shards.release, groups)


def _create(held: ExitStack, pager: Pager, chunks: Sequence[Chunk]) -> None:
    """Pin chunks, with zeros in them, that have no content again at the end of `held`."""

    def end(chunk: Chunk) -> None:
        pager.consume(chunk)
        pager.discard_remote(chunk)

    for chunk in chunks:
        pager.create(chunk, Tier.DEVICE, reader=_READER, zero=True, is_of_step=False)
        held.callback(end, chunk)
        pager.pin(chunk, reader=_READER)
        held.callback(pager.unpin, chunk)


def _gather(shards: ShardStore, groups: Sequence[int]) -> None:
    shards.renew(groups)
    shards.gather(groups, reader=_READER)


def _reduce(shards: ShardStore, gradients: Sequence[Chunk]) -> None:
    by_group = {chunk.id.group: chunk for chunk in gradients}
    lists = [[by_group[group] for group in together] for together in shards.together(by_group)]
    under_way = [shards.begin_reduction(chunks, reader=_READER) for chunks in lists]
    for wait in under_way:
        wait()


def _best_s(shards: ShardStore, exchange: Callable[[], object], time_s: TimeS) -> float:
    """Return the shortest time of a few that this rank's part in an exchange takes."""
    times = []
    for _ in range(NUM_TRIALS):
        shards.ranks.barrier(label=_READER)
        times.append(time_s(exchange))
    return min(times)
