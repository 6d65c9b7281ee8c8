"""Demand movement: what moves for an access, what never does, what an error says; and a model of it all."""

from __future__ import annotations

import re
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from chunkmem.errors import CapacityError, StateError
from chunkmem.runtime.store import NO_CONTENT, Chunk, Replica
from chunkmem.types import ChunkId, Role, Tier
from tests.helpers.world import NO_LIMIT, SLAB, World, values_on

DEVICE, HOST = Tier.DEVICE, Tier.HOST
OTHER = {DEVICE: HOST, HOST: DEVICE}


def packed(sizes: list[int], **caps: Any) -> World:
    """A world whose PARAM chunks are on HOST, chunk i full of i + 1."""
    world = World(sizes, **caps)
    for index in range(len(sizes)):
        world.param(index, index + 1.0)
    return world


def use(world: World, *groups: int) -> None:
    for group in groups:
        world.executor.use(world.param(group), DEVICE, reader="forward")


def test_an_access_brings_the_chunk_and_the_least_recently_used_one_goes() -> None:
    # cap 2     | 0 |      | 0 1 |      | 1 2 |     1 again     | 0 1 |
    world = packed([1, 1, 1], device=2)
    use(world, 0, 1, 2)
    assert world.on(DEVICE) == ["param chunk 1", "param chunk 2"]
    use(world, 1, 0)
    assert world.on(DEVICE) == ["param chunk 0", "param chunk 1"]
    assert [values_on(world.param(group), DEVICE) for group in (0, 1)] == [[1.0] * 7, [2.0] * 7]


def test_what_is_clean_is_dropped_and_what_was_written_is_copied() -> None:
    world = packed([1, 1], device=1)
    use(world, 0, 1, 0)
    assert (world.store.moved.h2d_nbytes, world.store.moved.d2h_nbytes) == (3 * SLAB, 0)
    with torch.no_grad():
        world.parameters[0][0].param.fill_(7.0)
    use(world, 1)
    assert world.store.moved.d2h_nbytes == SLAB
    assert values_on(world.param(0), HOST) == [7.0] * 6 + [1.0]


def test_what_is_there_is_not_brought_again() -> None:
    world = packed([1], device=1)
    use(world, 0, 0)
    world.executor.pin(world.param(0), DEVICE, reader="forward")
    assert world.store.moved.h2d_nbytes == SLAB


def test_a_pinned_chunk_stays_and_an_older_pin_is_not_ended_by_a_newer_one() -> None:
    world = packed([1, 1, 1], device=2)
    for _ in range(2):
        world.executor.pin(world.param(0), DEVICE, reader="forward")
    world.executor.unpin(world.param(0), DEVICE)
    use(world, 1, 2)
    assert world.on(DEVICE) == ["param chunk 0", "param chunk 2"]
    world.executor.unpin(world.param(0), DEVICE)
    use(world, 1)
    assert world.on(DEVICE) == ["param chunk 1", "param chunk 2"]


def test_a_large_chunk_takes_the_room_of_several() -> None:
    world = packed([1, 1, 3], device=4)
    use(world, 0, 1, 2)
    assert world.on(DEVICE) == ["param chunk 1", "param chunk 2"]


def test_kept_slabs_count_as_room() -> None:
    world = packed([1, 1, 2], device=2, cached=2)
    use(world, 0, 1, 2)
    assert world.on(DEVICE) == ["param chunk 2"]
    assert world.device.now["cache"] == 0
    world.check()


def test_the_source_survives_when_its_tier_makes_room() -> None:
    # HOST is full of 0 and 1; 2 is newest on DEVICE. For 1 to come, 2 leaves; for 2, HOST drops the copy of 0.
    world = packed([1, 1, 1], device=3, host=3)
    use(world, 0, 2)
    world.fill(world.param(2), DEVICE, 9.0)
    world.store.mark_written(world.param(2), DEVICE)
    world.cap(DEVICE, 2)
    world.cap(HOST, 2)
    world.executor.pin(world.param(0), DEVICE, reader="forward")
    use(world, 1)
    assert world.on(DEVICE) == ["param chunk 0", "param chunk 1"]
    assert world.on(HOST) == ["param chunk 1", "param chunk 2"]
    assert values_on(world.param(2), HOST) == [9.0] * 7
    world.check()


def test_a_write_is_noticed_before_room_is_counted() -> None:
    """A user writes to 0, so its copy on HOST is stale: those bytes are there for 1 to be spilled to.

    DEVICE | 0 written | 1 newest |     2 is asked for, and 1 is the oldest that may leave
    HOST   | 0 stale   | 2        |     full, as long as nobody has noticed
    """
    world = packed([1, 1, 1], device=2, host=3)
    use(world, 1, 0)
    world.store.mark_written(world.param(1), DEVICE)
    world.cap(HOST, 2)
    with torch.no_grad():
        world.parameters[0][1].param.fill_(7.0)
    world.executor.pin(world.param(0), DEVICE, reader="forward")
    use(world, 2)
    assert world.on(DEVICE) == ["param chunk 0", "param chunk 2"]
    assert values_on(world.param(0), DEVICE) == [1.0] * 6 + [7.0]
    world.check()


def test_new_content_takes_over_the_slab_of_the_consumed_one() -> None:
    world = World([1], device=1)
    world.executor.create(world.grad(0), DEVICE, reader="gradient", zero=True)
    slab = world.grad(0).replicas[DEVICE].slab
    world.store.consume(world.grad(0))
    assert world.executor.create(world.grad(0), DEVICE, reader="gradient", zero=True).slab is slab


def test_consumed_content_goes_before_anything_else_and_is_not_copied() -> None:
    world = packed([1, 1], device=2)
    use(world, 0)
    world.executor.create(world.grad(0), DEVICE, reader="gradient", zero=True)
    world.store.consume(world.grad(0))
    use(world, 1)
    assert world.on(DEVICE) == ["param chunk 0", "param chunk 1"]
    assert world.store.moved.d2h_nbytes == 0


def test_a_settled_gradient_leaves_before_parameters_and_those_before_states() -> None:
    world = packed([1, 1, 1, 1], device=3)
    world.executor.create(world.chunk(Role.EXP_AVG, 0), DEVICE, reader="states", zero=True)
    use(world, 0)
    world.executor.create(world.grad(0), DEVICE, reader="gradient", zero=True)
    world.grad(0).settled = True
    use(world, 1)
    assert world.on(DEVICE) == ["exp_avg chunk 0", "param chunk 0", "param chunk 1"]
    use(world, 2)
    assert world.on(DEVICE) == ["exp_avg chunk 0", "param chunk 1", "param chunk 2"]


def test_packing_prefers_host() -> None:
    world = World([1, 1, 1], device=2, host=1)
    for group in range(3):
        world.executor.place(world.param(group), reader="packing")
    assert (world.on(HOST), world.on(DEVICE)) == (["param chunk 0"], ["param chunk 1", "param chunk 2"])


def test_what_is_written_to_an_absent_single_element_arrives() -> None:
    world = packed([1], device=1)
    single = world.parameters[0][1].param
    with torch.no_grad():
        single.fill_(7.0)
    use(world, 0)
    assert single.item() == 7.0
    assert values_on(world.param(0), DEVICE) == [1.0] * 6 + [7.0]


def test_what_is_written_to_an_absent_single_element_goes_along_when_host_makes_room() -> None:
    world = packed([1, 1], device=2, host=2)
    single = world.parameters[0][1].param
    with torch.no_grad():
        single.fill_(7.0)
    world.executor.create(world.grad(1), HOST, reader="gradient", zero=True)
    assert world.on(DEVICE) == ["param chunk 0"]
    assert single.item() == 7.0
    assert values_on(world.param(0), DEVICE) == [1.0] * 6 + [7.0]


def test_too_much_pinned_names_what_is_needed() -> None:
    world = packed([1, 1, 2], device=3)
    world.executor.pin(world.param(0), DEVICE, reader="blocks.0 forward")
    world.executor.pin(world.param(1), DEVICE, reader="blocks.1 forward")
    with pytest.raises(CapacityError) as raised:
        world.executor.pin(world.param(2), DEVICE, reader="blocks.2 forward")
    assert str(raised.value) == (
        "blocks.2 forward: 256 B more needed on DEVICE for param chunk 2, only 128 B can be made free (256 B in use); "
        "raise memory.device from 384 B to at least 512 B (512 bytes), or lower default_chunk_size"
    )
    assert (raised.value.needed_nbytes, raised.value.cap_nbytes) == (4 * SLAB, 3 * SLAB)
    assert world.executor.required_nbytes[DEVICE] == 4 * SLAB


def test_a_full_host_is_named_when_it_is_what_is_missing() -> None:
    world = packed([1, 1], device=1, host=2)
    use(world, 0)
    world.store.mark_written(world.param(0), DEVICE)
    world.cap(HOST, 1)
    with pytest.raises(CapacityError) as raised:
        use(world, 1)
    assert str(raised.value) == (
        "forward: 128 B more needed on DEVICE for param chunk 1, but what would leave it finds no room on HOST, which "
        "is 128 B short; raise memory.host from 128 B to 256 B (256 bytes), or memory.device from 128 B to 256 B"
    )
    assert (raised.value.needed_nbytes, raised.value.cap_nbytes) == (2 * SLAB, SLAB)


def test_tiers_that_share_their_ram_speak_of_one_cap() -> None:
    world = World([1, 1], device=1, host=0)
    world.executor.place(world.param(0), reader="packing")
    with pytest.raises(CapacityError) as raised:
        world.executor.create(world.grad(0), DEVICE, reader="p0 gradient", zero=True)
    assert str(raised.value) == (
        "p0 gradient: 128 B more needed for grad chunk 0, and 0 B of 128 B RAM is left; raise memory.host (or "
        "client.mem_tracer.overall_cpu_mem_ratio) to at least 256 B (256 bytes)"
    )


def test_the_warm_up_share_gives_way_to_the_largest_moment_but_the_limit_does_not() -> None:
    world = packed([1, 1, 2], device=1, limit=3)
    use(world, 0, 1)
    assert world.on(DEVICE) == ["param chunk 1"]
    world.executor.pin(world.param(1), DEVICE, reader="forward")
    use(world, 2)
    assert world.device.cap_nbytes == 3 * SLAB
    world.executor.pin(world.param(2), DEVICE, reader="forward")
    with pytest.raises(CapacityError, match=r"raise memory.device from 384 B to at least 512 B"):
        use(world, 0)
    assert world.device.cap_nbytes == 3 * SLAB


def test_a_closed_executor_serves_nothing() -> None:
    world = packed([1], device=1)
    world.executor.closed = "its manager is closed"
    for access in (
        lambda: use(world, 0),
        lambda: world.executor.pin(world.param(0), DEVICE, reader="forward"),
        lambda: world.executor.create(world.grad(0), DEVICE, reader="forward", zero=True),
    ):
        with pytest.raises(StateError, match="forward: its manager is closed"):
            access()


def test_an_access_that_could_be_served_elsewhere_does_not_raise_the_required_cap() -> None:
    world = packed([1, 1], device=2)
    world.executor.pin(world.param(0), DEVICE, reader="gather", elastic=True)
    assert world.executor.required_nbytes[DEVICE] == 0
    use(world, 1)
    assert world.executor.required_nbytes[DEVICE] == 2 * SLAB


# The smallest cap


@st.composite
def event_sequences(draw: st.DrawFn) -> tuple[list[int], list[tuple[str, int]]]:
    """Sizes of groups, and accesses on DEVICE in an order that could happen."""
    sizes = draw(st.lists(st.sampled_from((1, 1, 2, 3)), min_size=1, max_size=5))
    events: list[tuple[str, int]] = []
    pinned: list[int] = []
    for _ in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from(("pin", "unpin", "use", "land", "consume", "write")))
        if kind == "unpin":
            if pinned:
                events.append((kind, pinned.pop(draw(st.integers(0, len(pinned) - 1)))))
            continue
        group = draw(st.integers(0, len(sizes) - 1))
        if kind == "pin":
            pinned.append(group)
        events.append((kind, group))
    return sizes, events


def play(world: World, events: list[tuple[str, int]]) -> None:
    for kind, group in events:
        param, grad = world.param(group), world.grad(group)
        if kind == "pin":
            world.executor.pin(param, DEVICE, reader="forward")
        elif kind == "unpin":
            world.executor.unpin(param, DEVICE)
        elif kind == "use":
            world.executor.use(param, DEVICE, reader="forward")
        elif kind == "write":
            world.executor.use(param, DEVICE, reader="step")
            world.store.mark_written(param, DEVICE)
        elif kind == "consume":
            world.store.consume(grad)
        elif grad.version == NO_CONTENT:
            world.executor.create(grad, DEVICE, reader="gradient", zero=True)
        else:
            world.executor.use(grad, DEVICE, reader="gradient")
        world.check()


@given(sequence=event_sequences(), cached=st.integers(0, 2))
@settings(deadline=None)
def test_required_nbytes_is_exactly_the_smallest_cap(
    sequence: tuple[list[int], list[tuple[str, int]]], cached: int
) -> None:
    """The same accesses fit a cap of that size, whatever was kept before; and no smaller one."""
    sizes, events = sequence
    ample = packed(sizes, device=NO_LIMIT, cached=cached)
    play(ample, events)
    required = ample.executor.required_nbytes[DEVICE]
    tight = packed(sizes, device=required // SLAB, cached=cached)
    play(tight, events)
    assert tight.executor.required_nbytes[DEVICE] == required == tight.device.peak_nbytes
    if required > 0:
        below = packed(sizes, device=required // SLAB - 1, cached=cached)
        with pytest.raises(CapacityError) as raised:
            play(below, events)
        assert below.device.cap_nbytes < raised.value.needed_nbytes <= required


# Anything in any order


class AnyOrder(RuleBasedStateMachine):
    """Random accesses to a few chunks on two small tiers, beside a dictionary of what every slot should hold."""

    @initialize(
        sizes=st.lists(st.sampled_from((1, 1, 1, 2)), min_size=1, max_size=4),
        device=st.integers(2, 5),
        spare=st.integers(0, 4),
        cached=st.integers(0, 2),
    )
    def begin(self, sizes: list[int], device: int, spare: int, cached: int) -> None:
        # HOST holds the weights at first, and little more.
        self.world = packed(sizes, device=device, host=sum(sizes) + spare, cached=cached)
        self.values = {ChunkId(Role.PARAM, group): [group + 1.0] * 7 for group in range(len(sizes))}
        self.unnoticed: set[ChunkId] = set()
        """Chunks a user has written to, whose copies on HOST may be older than they know."""
        self.pinned: list[tuple[ChunkId, Tier]] = []
        self.addresses: dict[tuple[ChunkId, Tier], tuple[Replica, int]] = {}
        self.required = {DEVICE: 0, HOST: 0}
        self.clock = 100.0
        self.broken: list[str] = []
        """Names of parameters that were written to while they were away."""

    def key(self, index: int, among: list[ChunkId]) -> ChunkId:
        return among[index % len(among)]

    def tick(self) -> float:
        self.clock += 1.0
        return self.clock

    def chunk(self, key: ChunkId) -> Chunk:
        return self.world.store.chunks[key]

    def request(self, key: ChunkId, tier: Tier, *, elastic: bool = False) -> None:
        """What an access to a chunk that is not pinned counts for."""
        if (key, tier) not in self.pinned and not elastic:
            pinned = sum(self.chunk(k).nbytes for k in {k for k, t in self.pinned if t is tier})
            self.required[tier] = max(self.required[tier], pinned + self.chunk(key).nbytes)

    def residency(self) -> dict[tuple[ChunkId, Tier], tuple[int, int]]:
        return {
            (key, tier): (id(replica), replica.version)
            for key, chunk in self.world.store.chunks.items()
            for tier, replica in chunk.replicas.items()
        }

    def attempt(self, access: Any, nbytes: int, tier: Tier) -> bool:
        """Serve an access; if there is no room, make sure that is so, that nothing changed, and how much is missing."""
        for key in self.unnoticed:
            self.world.executor.notice_writes(self.chunk(key))
        self.unnoticed.clear()
        before = self.residency()
        try:
            access()
        except CapacityError as error:
            assert self.residency() == before, "an access that failed has moved something"
            assert not self.can_make_room(nbytes, tier)
            self.raise_cap(error, access)
            return False
        return True

    def raise_cap(self, error: CapacityError, access: Any) -> None:
        """With a slab less than it says the access fails again, with what it says it is served."""
        (name,) = re.findall(r"raise memory\.(\w+)", str(error))
        tier = {"device": DEVICE, "host": HOST}[name]
        assert self.world.store.pools[tier].ledger.cap_nbytes == error.cap_nbytes
        self.world.cap(tier, error.needed_nbytes // SLAB - 1)
        with pytest.raises(CapacityError):
            access()
        self.world.cap(tier, error.needed_nbytes // SLAB)
        access()

    def can_make_room(self, nbytes: int, tier: Tier) -> bool:
        """By brute force over what may leave this tier and what may be dropped on the other one."""
        chunks = self.world.store.chunks.values()
        here = [c for c in chunks if tier in c.replicas and c.replicas[tier].pins == 0]
        there = [c for c in chunks if OTHER[tier] in c.replicas and c.replicas[OTHER[tier]].pins == 0]
        droppable = [c for c in there if c.ready(tier) or not c.ready(OTHER[tier])]
        ledgers = {DEVICE: self.world.device, HOST: self.world.host}
        free = {t: book.free_nbytes + book.now.get("cache", 0) for t, book in ledgers.items()}
        for leaving in _subsets(here):
            if free[tier] + sum(c.nbytes for c in leaving) < nbytes:
                continue
            spilled = sum(c.nbytes for c in leaving if c.ready(tier) and not c.ready(OTHER[tier]))
            clean = [c for c in leaving if c.ready(OTHER[tier])]
            room = free[OTHER[tier]] + sum(c.nbytes for c in droppable if c not in clean)
            if spilled <= room:
                return True
        return False

    def read(self, key: ChunkId, tier: Tier) -> None:
        assert values_on(self.chunk(key), tier) == self.values[key]

    @rule(index=st.integers(0, 99), tier=st.sampled_from((DEVICE, DEVICE, HOST)), elastic=st.booleans())
    def pin(self, index: int, tier: Tier, elastic: bool) -> None:
        key = self.key(index, list(self.values))
        self.request(key, tier, elastic=elastic)
        chunk = self.chunk(key)
        executor = self.world.executor
        access = lambda: executor.pin(chunk, tier, reader="test", elastic=elastic)  # noqa: E731
        self.attempt(access, chunk.nbytes, tier)
        self.pinned.append((key, tier))
        replica = chunk.replicas[tier]
        self.addresses[key, tier] = replica, replica.flat.data_ptr()
        self.read(key, tier)

    @precondition(lambda self: self.pinned)
    @rule(index=st.integers(0, 99))
    def unpin(self, index: int) -> None:
        key, tier = self.pinned.pop(index % len(self.pinned))
        self.world.executor.unpin(self.chunk(key), tier)
        if (key, tier) not in self.pinned:
            del self.addresses[key, tier]

    @rule(index=st.integers(0, 99), tier=st.sampled_from((DEVICE, HOST)))
    def use(self, index: int, tier: Tier) -> None:
        key = self.key(index, list(self.values))
        self.request(key, tier)
        chunk = self.chunk(key)
        self.attempt(lambda: self.world.executor.use(chunk, tier, reader="test"), chunk.nbytes, tier)
        self.read(key, tier)

    @rule(index=st.integers(0, 99), tier=st.sampled_from((DEVICE, HOST)), zero=st.booleans())
    def create(self, index: int, tier: Tier, zero: bool) -> None:
        key = self.key(index, [k for k in self.world.store.chunks if k.role is not Role.PARAM])
        if key in self.values:
            return
        self.request(key, tier)
        chunk = self.chunk(key)
        access = lambda: self.world.executor.create(chunk, tier, reader="test", zero=zero)  # noqa: E731
        self.attempt(access, chunk.nbytes, tier)
        self.values[key] = [0.0] * 7
        if not zero:
            self.values[key] = [self.tick()] * 7
            self.world.fill(chunk, tier, self.clock)

    @precondition(lambda self: any(k.role is Role.GRAD for k in self.values))
    @rule(index=st.integers(0, 99))
    def consume(self, index: int) -> None:
        key = self.key(index, [k for k in self.values if k.role is Role.GRAD])
        if all(k != key for k, _ in self.pinned):
            self.world.store.consume(self.chunk(key))
            del self.values[key]

    @precondition(lambda self: self.pinned)
    @rule(index=st.integers(0, 99), settled=st.booleans())
    def update(self, index: int, settled: bool) -> None:
        """The runtime writes to a pinned replica, as an optimizer step does."""
        key, tier = self.pinned[index % len(self.pinned)]
        if (key, OTHER[tier]) in self.pinned:
            return
        chunk = self.chunk(key)
        chunk.settled = settled and key.role is Role.GRAD
        self.world.fill(chunk, tier, self.tick())
        self.world.store.mark_written(chunk, tier)
        self.values[key] = [self.clock] * 7

    @rule(index=st.integers(0, 99))
    def user_writes(self, index: int) -> None:
        """To a present parameter, whole or in part, or to an absent one of a single element."""
        group = index % len(self.world.parameters)
        key = ChunkId(Role.PARAM, group)
        if (key, HOST) in self.pinned:
            return
        matrix, single = (managed.param for managed in self.world.parameters[group])
        self.unnoticed.add(key)
        with torch.no_grad():
            single.fill_(self.tick())
            self.values[key] = [*self.values[key][:6], self.clock]
            if DEVICE in self.chunk(key).replicas:
                matrix[1, 1] = self.tick()
                self.values[key][4] = self.clock

    @rule(index=st.integers(0, 99), through_data=st.booleans())
    def user_writes_to_an_absent_parameter(self, index: int, through_data: bool) -> None:
        """It cannot be kept, and has to be told: the values stay what they were."""
        group = index % len(self.world.parameters)
        if DEVICE not in self.chunk(ChunkId(Role.PARAM, group)).replicas:
            managed = self.world.parameters[group][0]
            with torch.no_grad():
                (managed.param.data if through_data else managed.param).fill_(self.tick())
            if managed.name not in self.broken:
                self.broken.append(managed.name)

    @rule()
    def check_parameters(self) -> None:
        """Every written-to absent parameter is named in an error, once."""
        for group, (matrix, _) in self.world.parameters.items():
            name = f"p{group}.0"
            if name in self.broken:
                with pytest.raises(StateError, match=rf"parameter {name} \(2, 3\) was written to while it was not on"):
                    matrix.bound.check()
            matrix.bound.check()
        self.broken.clear()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.check()
        assert self.world.executor.required_nbytes == self.required
        for (key, tier), (replica, address) in self.addresses.items():
            assert self.chunk(key).replicas[tier] is replica
            assert replica.flat.data_ptr() == address, "a pinned chunk was moved"
        for key, values in self.values.items():
            chunk = self.chunk(key)
            for tier in chunk.replicas:
                if chunk.ready(tier) and (tier is DEVICE or key not in self.unnoticed):
                    assert values_on(chunk, tier) == values, f"{chunk.label} on {tier.value}"
        for group, parameters in self.world.parameters.items():
            values = self.values[ChunkId(Role.PARAM, group)]
            present = DEVICE in self.chunk(ChunkId(Role.PARAM, group)).replicas
            for managed, expected in zip(parameters, (values[:6], values[6:]), strict=True):
                if present:
                    assert managed.param.flatten().tolist() == expected
                elif managed.name not in self.broken and ChunkId(Role.PARAM, group) not in self.unnoticed:
                    assert managed.param.isnan().all()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for key, tier in self.pinned:
            self.world.executor.unpin(self.chunk(key), tier)
        for tier in Tier.DEVICE, Tier.HOST:
            self.world.cap(tier, NO_LIMIT)
        for key in self.values:
            self.world.executor.use(self.chunk(key), DEVICE, reader="end")
            self.read(key, DEVICE)
        self.world.store.close()
        assert self.world.device.total_nbytes == self.world.host.total_nbytes == 0


def _subsets(chunks: list[Chunk]) -> Any:
    return chain.from_iterable(combinations(chunks, count) for count in range(len(chunks) + 1))


def test_any_order_keeps_contents_caps_and_pins() -> None:
    run_state_machine_as_test(AnyOrder, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


@pytest.mark.full
def test_any_order_at_length() -> None:
    run_state_machine_as_test(AnyOrder, settings=settings(max_examples=1500, stateful_step_count=80, deadline=None))
