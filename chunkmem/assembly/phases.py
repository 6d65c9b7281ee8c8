"""DEVICE given back between steps, for another program or engine, and taken again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from chunkmem.assembly.runtime import Runtime
from chunkmem.data.errors import CapacityError, StateError
from chunkmem.data.sizes import format_nbytes
from chunkmem.data.types import Tier
from chunkmem.runtime.device import give_back_freed_ram
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.store import ChunkStore


def offload(runtime: Runtime) -> None:
    """Have nothing of chunks on DEVICE; see `ChunkManager.offload`, which says what is raised, too."""
    if runtime.tiers.caps.shared:
        return
    call = "manager.offload()"
    with _between_calls(runtime, call):
        runtime.modules.access.reset(step=False)
        runtime.modules.backward.reset(step=False)
        if kept := runtime.modules.access.referenced():
            more = f" and {len(kept) - 1} more chunks" if len(kept) > 1 else ""
            raise StateError(
                f"{call}: somebody keeps the memory of {kept[0]}{more} on DEVICE (a view, .data, or the graph of a "
                "loss); call backward() first, let go of it, or keep a clone()"
            )
        runtime.controller.learn_from_last()
        # In the middle of a step, what was not heard of may be there, and the step is not like others.
        runtime.controller.residence.leave()
        runtime.controller.excuse_running()
        runtime.gradients.sync_with_grad(runtime.registry.parameters)
        _leave_device(runtime.memory.pager, call)
        runtime.tiers.leave_device_to_others()
    give_back_freed_ram()


def onload(runtime: Runtime) -> None:
    """Have chunks where the next step begins; see `ChunkManager.onload`."""
    with _between_calls(runtime, "manager.onload()"):
        runtime.controller.learn_from_last()
        runtime.controller.go_to_start()


@contextmanager
def _between_calls(runtime: Runtime, call: str) -> Iterator[None]:
    runtime.require_open()
    with runtime.together(call):
        if where := runtime.entry_points.phase or "manager.gather()" * bool(runtime.entry_points.gathers_open):
            raise StateError(f"{call} inside of {where}: call it between two steps")
        runtime.entry_points.require_drained(call)
        yield


def _leave_device(pager: Pager, call: str) -> None:
    """Drop what DEVICE has, and copy to HOST what is nowhere else.

    Raises:
        CapacityError: HOST and DISK have no room for it.
    """
    store = pager.store
    pager.policy.before_demand()
    for chunk in list(store.resident[Tier.DEVICE].values()):
        pager.notice_writes(chunk)
        if not chunk.is_last(Tier.DEVICE):
            store.drop(chunk, Tier.DEVICE)
    leaving = list(store.resident[Tier.DEVICE].values())
    if not store.host_is_gateway:
        _make_room(store, sum(chunk.nbytes for chunk in leaving if Tier.HOST not in chunk.replicas), call)
    for chunk in leaving:
        pager.pin(chunk, Tier.HOST, reader=call, elastic=True)
        pager.unpin(chunk, Tier.HOST)
        store.drop(chunk, Tier.DEVICE)


def _make_room(store: ChunkStore, nbytes: int, call: str) -> None:
    """Have so much free on HOST: what it has that is nowhere else cannot leave it for DEVICE now."""
    host = store.pools[Tier.HOST].ledger
    for chunk in list(store.resident[Tier.HOST].values()):
        is_spare = not (chunk.stays or chunk.is_last(Tier.HOST) or Tier.DEVICE in chunk.replicas)
        if nbytes > host.spare_nbytes and is_spare:
            store.drop(chunk, Tier.HOST)
    if (short_nbytes := nbytes - host.spare_nbytes) > 0:
        needed_nbytes = host.cap_nbytes + short_nbytes
        raise CapacityError(
            f"{call}: DEVICE holds {format_nbytes(nbytes)} that is nowhere else, and HOST has room for "
            f"{format_nbytes(host.spare_nbytes)}; raise memory.host from {format_nbytes(host.cap_nbytes)} to at least "
            f"{format_nbytes(needed_nbytes)} ({needed_nbytes} bytes), or give it a memory.disk",
            needed_nbytes=needed_nbytes,
            cap_nbytes=host.cap_nbytes,
            tier=Tier.HOST,
        )
