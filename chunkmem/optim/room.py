"""Whether a model can be trained at all on these tiers."""

from __future__ import annotations

from collections.abc import Collection
from math import gcd
from statistics import mode

from chunkmem.errors import CapacityError
from chunkmem.optim.checks import STATE_ROLES
from chunkmem.runtime.store import NO_CONTENT, ChunkStore
from chunkmem.sizes import format_nbytes
from chunkmem.types import ChunkId, Role, Tier


def require_room(groups: Collection[int], store: ChunkStore) -> None:
    """Check that all weights, and gradients and states of `groups`, fit the tiers together.

    Raises:
        CapacityError: they cannot, whatever is moved.
    """
    ledgers = {tier: pool.ledger for tier, pool in store.pools.items()}
    sizes = {key: chunk.nbytes for key, chunk in store.chunks.items() if not chunk.is_remote}
    # Master copies of groups that are frozen so far have no content, and may never have.
    weights = [
        nbytes
        for key, nbytes in sizes.items()
        if key.role is Role.PARAM
        or (key.role is Role.MASTER and (key.group in groups or store.chunks[key].version != NO_CONTENT))
    ]
    need = sum(weights) + sum(
        sizes.get(ChunkId(role, group), 0) for group in groups for role in (Role.GRAD, *STATE_ROLES)
    )
    # Gradients take the place of weights that can be rounded again; while a group is updated it has both.
    twice = [sizes[ChunkId(Role.PARAM, group)] for group in groups if ChunkId(Role.MASTER, group) in sizes]
    need -= sum(twice) - max(twice, default=0)
    need, cap = room_for(need, sizes=sizes.values(), limits=[ledger.limit_nbytes for ledger in ledgers.values()])
    if need > cap:
        # Where both tiers are one piece of RAM, HOST is empty and memory.host is the cap of DEVICE.
        host_cap = ledgers[Tier.HOST].limit_nbytes or ledgers[Tier.DEVICE].limit_nbytes
        host_need = host_cap + need - cap
        raise CapacityError(
            f"optimizer: weights, gradients and states of {len(groups)} chunk groups take {format_nbytes(need)}, "
            f"and DEVICE and HOST together may hold {format_nbytes(cap)}; raise memory.host from "
            f"{format_nbytes(host_cap)} to at least {format_nbytes(host_need)} ({host_need} bytes)",
            needed_nbytes=host_need,
            cap_nbytes=host_cap,
        )


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
