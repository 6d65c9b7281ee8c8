"""A snapshot of chunks: who waits for whom, one thread after the other, and what is read where."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from chunkmem.data.errors import CheckpointError, TierIOError
from chunkmem.data.types import Tier
from chunkmem.runtime.chunk import NO_CONTENT, Chunk, Replica
from chunkmem.runtime.disk_pool import DiskPool, DiskSlab
from chunkmem.runtime.events import DoneEvent
from chunkmem.runtime.ledger import Ledger
from chunkmem.runtime.snapshot import Snapshot, Taken
from tests.helpers.world import World

DEVICE, HOST = Tier.DEVICE, Tier.HOST
SOON_S = 0.05
LATE_S = 20.0


class Gate:
    """Reads as the thread does, but not before it is opened."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.was_reached = threading.Event()
        self.num_reads = 0

    def __call__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.num_reads += 1
        self.was_reached.set()
        assert self.is_open.wait(LATE_S)
        target.copy_(source)


def opened() -> Gate:
    gate = Gate()
    gate.is_open.set()
    return gate


class Later:
    """Does something in a thread."""

    def __init__(self, do: Callable[[], Any]) -> None:
        self.result: Any = None
        self._do = do
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._do()
        except Exception as error:
            self.result = error

    def waits(self) -> bool:
        self._thread.join(SOON_S)
        return self._thread.is_alive()

    def end(self) -> Any:
        self._thread.join(LATE_S)
        assert not self._thread.is_alive()
        return self.result


def world_of(*fills: float, on_host: bool = False) -> tuple[World, list[Chunk]]:
    """Weights on DEVICE, group by group, which are `on_host`, too."""
    world = World([1] * len(fills), device=len(fills) + 1)
    chunks = [world.param(group, fill) for group, fill in enumerate(fills)]
    for chunk in chunks:
        world.pager.pin(chunk, DEVICE, reader="test")
        world.pager.unpin(chunk, DEVICE)
        if not on_host:
            world.store.drop(chunk, HOST)
    return world, chunks


def snapshot_of(world: World, chunks: list[Chunk], read: Gate) -> Snapshot:
    made = world.store.snapshot = Snapshot(dict.fromkeys(chunks, (0, 1)), read)
    return made


def value(taken: Taken | None) -> tuple[int, float]:
    """The group that was taken, and the number that all of its elements are."""
    assert taken is not None
    (found,) = {float(each) for slot in taken.slots.values() for each in slot.reshape(-1)}
    return taken.chunk.id.group, found


def write(chunk: Chunk, fill: float) -> None:
    """As an operator does: autograd's counters tell of it, and nothing else."""
    home: Any = chunk.home
    with torch.no_grad():
        for managed in home.parameters:
            managed.param.fill_(fill)


def test_chunks_come_in_order_each_once() -> None:
    world, chunks = world_of(1, 2, 3)
    snapshot = snapshot_of(world, [chunks[2], chunks[0], chunks[1]], opened())
    assert [value(snapshot.take()) for _ in chunks] == [(2, 3.0), (0, 1.0), (1, 2.0)]
    assert snapshot.take() is None
    assert snapshot.take() is None


def test_slots_are_copies_in_their_shapes() -> None:
    world, (chunk,) = world_of(1)
    snapshot = snapshot_of(world, [chunk], opened())
    taken = snapshot.take()
    assert taken is not None
    assert [tuple(slot.shape) for slot in taken.slots.values()] == [(2, 3), ()]
    assert [slot.untyped_storage().nbytes() for slot in taken.slots.values()] == [6 * 4, 4]
    chunk.replicas[DEVICE].flat.fill_(7)
    assert value(taken) == (0, 1.0)


def test_a_change_hands_over_one_chunk_and_waits_with_the_next() -> None:
    world, chunks = world_of(1, 2, 3)
    snapshot = snapshot_of(world, chunks, Gate())  # nothing is read in the thread

    def change(chunk: Chunk, fill: float) -> None:
        world.store.before_change(chunk)
        chunk.replicas[DEVICE].flat.fill_(fill)
        world.store.mark_written(chunk, DEVICE)

    change(chunks[1], 20)
    second = Later(lambda: change(chunks[2], 30))
    assert second.waits()
    assert value(snapshot.take()) == (1, 2.0)
    second.end()
    assert value(snapshot.take()) == (2, 3.0)
    change(chunks[0], 10)
    change(chunks[0], 11)
    change(chunks[1], 21)  # was taken
    assert value(snapshot.take()) == (0, 1.0)
    assert snapshot.take() is None


def test_a_change_waits_for_the_thread_that_reads_the_chunk() -> None:
    world, chunks = world_of(1, 2)
    gate = Gate()
    snapshot = snapshot_of(world, chunks, gate)
    thread = Later(snapshot.take)
    assert gate.was_reached.wait(LATE_S)
    change = Later(lambda: world.store.before_change(chunks[0]))
    assert change.waits()
    world.store.before_change(chunks[1])  # another one
    gate.is_open.set()
    assert value(thread.end()) == (0, 1.0)
    change.end()
    assert value(snapshot.take()) == (1, 2.0)


def test_a_replica_stays_until_it_is_read() -> None:
    world, (chunk,) = world_of(1, on_host=True)
    gate = Gate()
    snapshot = snapshot_of(world, [chunk], gate)
    thread = Later(snapshot.take)
    assert gate.was_reached.wait(LATE_S)
    world.store.drop(chunk, DEVICE)  # it is read on HOST
    world.store.take_slab(chunk, DEVICE)
    world.store.copy(chunk, HOST, DEVICE)
    drop = Later(lambda: world.store.drop(chunk, HOST))
    assert drop.waits()
    gate.is_open.set()
    assert value(thread.end()) == (0, 1.0)
    drop.end()
    assert HOST not in chunk.replicas


def test_the_last_replica_is_read_before_it_goes() -> None:
    world, (chunk,) = world_of(1)
    snapshot = snapshot_of(world, [chunk], Gate())
    world.store.remove(chunk)
    assert not chunk.replicas
    assert value(snapshot.take()) == (0, 1.0)


def test_what_a_copy_fills_is_not_read() -> None:
    world, (chunk,) = world_of(1, on_host=True)
    world.store.drop(chunk, DEVICE)

    class UnderWay(DoneEvent):
        is_over = False

        def done(self) -> bool:
            return self.is_over

    event = UnderWay(DoneEvent.now().start, DoneEvent.now().end)
    chunk.replicas[HOST].slab.events = (event,)
    gate = opened()
    thread = Later(snapshot_of(world, [chunk], gate).take)
    assert thread.waits()
    assert gate.num_reads == 0
    event.is_over = True
    assert value(thread.end()) == (0, 1.0)


def test_a_slab_without_memory_is_read(tmp_path: Path) -> None:
    world, (chunk,) = world_of(1, on_host=True)
    world.store.drop(chunk, DEVICE)
    pool = DiskPool(Ledger(HOST, 1 << 20, 1 << 20), tmp_path)
    memory, slab = chunk.replicas[HOST].flat, pool.alloc("param", chunk.nbytes)
    assert isinstance(slab, DiskSlab)
    slab.write(memory)
    memory.fill_(2)
    chunk.replicas[HOST] = Replica(slab, slab.bytes, version=chunk.version)
    gate = opened()
    assert value(snapshot_of(world, [chunk], gate).take()) == (0, 1.0)
    assert gate.num_reads == 0
    pool.close()


# Modules that write to their weights.


def test_a_pinned_chunk_is_not_read_where_modules_compute() -> None:
    world, chunks = world_of(1, 2)
    gate = opened()
    snapshot = snapshot_of(world, chunks, gate)
    world.pager.pin(chunks[0], DEVICE, reader="module")
    assert value(snapshot.take()) == (1, 2.0)
    thread = Later(snapshot.take)
    assert thread.waits()
    world.pager.unpin(chunks[0], DEVICE)
    assert value(thread.end()) == (0, 1.0)


def test_without_training_it_is() -> None:
    world, (chunk,) = world_of(1)
    snapshot = snapshot_of(world, [chunk], opened())
    world.pager.pin(chunk, DEVICE, reader="an interrupted call")
    thread = Later(snapshot.take)
    assert thread.waits()
    with snapshot.without_training():
        assert value(thread.end()) == (0, 1.0)


def test_who_pins_a_chunk_waits_until_it_is_read() -> None:
    world, (chunk,) = world_of(1)
    gate = Gate()
    thread = Later(snapshot_of(world, [chunk], gate).take)
    assert gate.was_reached.wait(LATE_S)
    pin = Later(lambda: world.pager.pin(chunk, DEVICE, reader="module"))
    assert pin.waits()
    gate.is_open.set()
    assert value(thread.end()) == (0, 1.0)
    pin.end()


def test_a_write_that_nobody_has_noticed_fails_it() -> None:
    world, chunks = world_of(1, 2)
    snapshot = snapshot_of(world, chunks, opened())
    world.pager.pin(chunks[0], DEVICE, reader="module")
    write(chunks[0], 10)
    world.pager.unpin(chunks[0], DEVICE)
    with pytest.raises(CheckpointError, match=r"param chunk 0.* was written to inside of a module"):
        snapshot.take()
    with pytest.raises(CheckpointError, match=r"param chunk 0.* was written to inside of a module"):
        snapshot.take()
    world.store.before_change(chunks[1])  # nobody waits


@pytest.mark.parametrize("on_host", [False, True])
def test_a_write_that_is_noticed_is_read_elsewhere_or_fails_it(on_host: bool) -> None:
    world, (chunk,) = world_of(1, on_host=on_host)
    snapshot = snapshot_of(world, [chunk], Gate())
    world.pager.pin(chunk, DEVICE, reader="module")
    write(chunk, 10)
    world.pager.notice_writes(chunk)
    assert chunk.is_written_inside
    if on_host:
        assert value(snapshot.take()) == (0, 1.0)
    else:
        with pytest.raises(CheckpointError, match=r"was written to inside of a module"):
            snapshot.take()


def test_a_write_that_is_noticed_while_the_chunk_is_read_fails_it() -> None:
    world, (chunk,) = world_of(1)
    world.pager.pin(chunk, DEVICE, reader="module")
    write(chunk, 10)
    world.pager.unpin(chunk, DEVICE)
    gate = Gate()
    snapshot = snapshot_of(world, [chunk], gate)
    thread = Later(snapshot.take)
    assert gate.was_reached.wait(LATE_S)
    notice = Later(lambda: world.pager.notice_writes(chunk))
    assert not notice.waits()
    gate.is_open.set()
    thread.end()
    with pytest.raises(CheckpointError, match=r"was written to inside of a module"):
        snapshot.take()


def test_a_chunk_that_modules_write_to_is_handed_over_when_it_is_pinned() -> None:
    world, (chunk,) = world_of(1)
    chunk.is_written_inside = True
    snapshot = snapshot_of(world, [chunk], Gate())
    world.pager.pin(chunk, DEVICE, reader="module")
    write(chunk, 10)
    assert value(snapshot.take()) == (0, 1.0)


# What goes wrong.


def test_nobody_waits_for_one_that_was_given_up() -> None:
    world, chunks = world_of(1, 2)
    snapshot = snapshot_of(world, chunks, Gate())
    world.store.before_change(chunks[0])
    change = Later(lambda: world.store.before_change(chunks[1]))
    assert change.waits()
    snapshot.give_up(OSError("full"))
    assert change.end() is None
    with pytest.raises(OSError, match="full"):
        snapshot.take()


def test_a_chunk_that_is_lost_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chunkmem.runtime.snapshot._LOST_S", 0.1)
    world, (chunk,) = world_of(1)
    snapshot = snapshot_of(world, [chunk], opened())
    chunk.replicas[DEVICE].version = NO_CONTENT  # as after a failed copy
    with pytest.raises(CheckpointError, match=r"param chunk 0 is lost"):
        snapshot.take()
    world.store.before_change(chunk)


def test_a_chunk_that_is_brought_back_is_read() -> None:
    world, (chunk,) = world_of(1)
    snapshot = snapshot_of(world, [chunk], opened())
    chunk.replicas[DEVICE].version = NO_CONTENT
    thread = Later(snapshot.take)
    assert thread.waits()
    chunk.replicas[DEVICE].version = chunk.version
    assert value(thread.end()) == (0, 1.0)


def test_read_all_waits_for_the_thread_alone() -> None:
    world, chunks = world_of(1, 2)
    gate = Gate()
    snapshot = snapshot_of(world, chunks, gate)
    world.pager.pin(chunks[0], DEVICE, reader="an interrupted call")
    world.store.before_change(chunks[1])
    end = Later(snapshot.read_all)
    assert value(snapshot.take()) == (1, 2.0)
    thread = Later(snapshot.take)
    assert gate.was_reached.wait(LATE_S)
    assert end.waits()
    gate.is_open.set()
    assert value(thread.end()) == (0, 1.0)
    assert end.end() is None


def test_a_read_that_fails_fails_it() -> None:
    world, chunks = world_of(1, 2)

    def read(target: torch.Tensor, source: torch.Tensor) -> None:
        raise MemoryError("none")

    snapshot = world.store.snapshot = Snapshot(dict.fromkeys(chunks, (0,)), read)
    for _ in range(2):
        with pytest.raises(MemoryError):
            snapshot.take()
    world.store.before_change(chunks[1])
    assert world.store.chunks[chunks[1].id].ready(DEVICE)


def test_a_copy_that_has_failed_fails_it_and_not_who_changes_the_chunk() -> None:
    world, (chunk,) = world_of(1)

    class Failed(DoneEvent):
        def wait(self) -> None:
            raise self.failure  # type: ignore[misc]

    error: Any = TierIOError("torn")
    chunk.replicas[DEVICE].slab.events = (Failed(DoneEvent.now().start, DoneEvent.now().end, error),)
    snapshot = snapshot_of(world, [chunk], opened())
    world.store.before_change(chunk)
    with pytest.raises(TierIOError, match="torn"):
        snapshot.take()
