"""Whether a model can be trained at all on these tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import chain
from math import gcd
from statistics import mode

from chunkmem.data.errors import CapacityError
from chunkmem.data.sizes import format_nbytes
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.runtime.chunk import NO_CONTENT
from chunkmem.runtime.store import ChunkStore


def require_room(
    groups: Collection[int],
    states_nbytes: Mapping[int, Collection[int]],
    store: ChunkStore,
    *,
    name: str,
    in_backward: Collection[int] = (),
) -> None:
    """Check that all weights, and gradients and states of `groups`, fit the tiers together.

    Args:
        groups: that are trained, of those that this rank owns.
        states_nbytes: by group, trained or not, what each chunk of its optimizer states takes, or will.
        store: has all other chunks; those of states are not looked at, but for averages.
        name: begins the message of the error.
        in_backward: those of `groups` whose gradients need never exist together.

    Raises:
        CapacityError: they cannot, whatever is moved.
    """
    ledgers = {tier: pool.ledger for tier, pool in store.pools.items()}
    sizes = {key: c.nbytes for key, c in store.chunks.items() if not c.is_remote and not key.role.is_state}
    on_host = {key: nbytes for key, nbytes in sizes.items() if store.chunks[key].compute_tier is Tier.HOST}
    sizes = {key: nbytes for key, nbytes in sizes.items() if key not in on_host}
    need = _in_training(sizes, groups, states_nbytes, store)
    # Gradients take the place of weights that can be rounded again; while a group is updated it has both.
    twice = [sizes[ChunkId(Role.PARAM, group)] for group in groups if ChunkId(Role.MASTER, group) in sizes]
    need -= sum(twice) - max(twice, default=0)
    one_by_one = [nbytes for key, nbytes in sizes.items() if key.role is Role.GRAD and key.group in in_backward]
    need -= sum(one_by_one) - max(one_by_one, default=0)
    # What is computed with on HOST never leaves it: it takes room of HOST, and none is needed to move it.
    on_host_nbytes = _in_training(on_host, groups, states_nbytes, store)
    limits = {tier: ledger.limit_nbytes for tier, ledger in ledgers.items()}
    kept_nbytes = sum(chunk.nbytes for key, chunk in store.chunks.items() if key.role.kind.stays)
    for_good = Counter({store.staying_tier: kept_nbytes}) + Counter({Tier.HOST: on_host_nbytes})
    left = {tier: max(0, limit - for_good[tier]) for tier, limit in limits.items()}
    states = (states_nbytes[group] for group in states_nbytes if ChunkId(Role.PARAM, group) in sizes)
    need, cap = room_for(need, sizes=[*sizes.values(), *chain(*states)], limits=left.values())
    need, cap = need + for_good.total(), cap + sum(limits.values()) - sum(left.values())
    if need > cap:
        # Where both tiers are one piece of RAM, HOST is empty and memory.host is the cap of DEVICE.
        host_cap = ledgers[Tier.HOST].limit_nbytes or ledgers[Tier.DEVICE].limit_nbytes
        host_need = host_cap + need - cap
        said = f", and averages of {format_nbytes(kept_nbytes)}," if kept_nbytes else ""
        raise CapacityError(
            f"{name}: weights, gradients and states of {len(groups)} chunk groups{said} take {format_nbytes(need)}, "
            f"and DEVICE and HOST together may hold {format_nbytes(cap)}; raise memory.host from "
            f"{format_nbytes(host_cap)} to at least {format_nbytes(host_need)} ({host_need} bytes)",
            needed_nbytes=host_need,
            cap_nbytes=host_cap,
            tier=Tier.HOST,
        )


def _in_training(
    sizes: Mapping[ChunkId, int],
    groups: Collection[int],
    states_nbytes: Mapping[int, Collection[int]],
    store: ChunkStore,
) -> int:
    """Return the bytes of weights among `sizes`, and of gradients and states of those of them that are trained."""
    # Master copies of groups that are frozen so far have no content, and may never have.
    weights = (
        nbytes
        for key, nbytes in sizes.items()
        if key.role is Role.PARAM
        or (key.role is Role.MASTER and (key.group in groups or store.chunks[key].version != NO_CONTENT))
    )
    trained = [group for group in groups if ChunkId(Role.GRAD, group) in sizes]
    return sum(weights) + sum(sizes[ChunkId(Role.GRAD, group)] + sum(states_nbytes[group]) for group in trained)


def room_for(need_nbytes: int, *, sizes: Collection[int], limits: Collection[int]) -> tuple[int, int]:
    """Return the bytes that have to find room so that each chunk can be where it is needed, and the bytes there are.

    Args:
        need_nbytes: of chunks, and of what else there has to be room for.
        sizes: of chunks, in bytes.
        limits: what each tier may hold, in bytes.
    """
    cap_nbytes = sum(limits)
    if min(limits) > 0 and need_nbytes > max(limits):
        need_nbytes += _room_to_exchange(sizes)
        # A tier's last bytes, which no chunk fits, are no room.
        cap_nbytes -= sum(limit % gcd(*sizes) for limit in limits)
    return need_nbytes, cap_nbytes


def _room_to_exchange(sizes: Collection[int]) -> int:
    """Return the bytes that have to be free on two tiers together, so that any chunk can go to the other one.

    The largest may have to, and what leaves for it are chunks of the usual size: of those, the other tier may lack all
    but one step in which sizes differ. Where all are of one size, that is one chunk.
    """
    return max(sizes) + mode(sizes) - gcd(*sizes)
