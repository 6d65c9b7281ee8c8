"""Accesses in any order, on two small tiers, beside a model of what every slot should hold."""

from __future__ import annotations

import re
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from chunkmem.data.errors import CapacityError, StateError
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.runtime.chunk import Chunk, Replica
from tests.helpers.world import NO_LIMIT, SLAB, packed, values_on

DEVICE, HOST = Tier.DEVICE, Tier.HOST
OTHER = {DEVICE: HOST, HOST: DEVICE}


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
            self.world.pager.notice_writes(self.chunk(key))
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
        pager = self.world.pager
        access = lambda: pager.pin(chunk, tier, reader="test", elastic=elastic)  # noqa: E731
        self.attempt(access, chunk.nbytes, tier)
        self.pinned.append((key, tier))
        replica = chunk.replicas[tier]
        self.addresses[key, tier] = replica, replica.flat.data_ptr()
        self.read(key, tier)

    @precondition(lambda self: self.pinned)
    @rule(index=st.integers(0, 99))
    def unpin(self, index: int) -> None:
        key, tier = self.pinned.pop(index % len(self.pinned))
        self.world.pager.unpin(self.chunk(key), tier)
        if (key, tier) not in self.pinned:
            del self.addresses[key, tier]

    @rule(index=st.integers(0, 99), tier=st.sampled_from((DEVICE, HOST)))
    def use(self, index: int, tier: Tier) -> None:
        key = self.key(index, list(self.values))
        self.request(key, tier)
        chunk = self.chunk(key)
        self.attempt(lambda: self.world.pager.use(chunk, tier, reader="test"), chunk.nbytes, tier)
        self.read(key, tier)

    @rule(index=st.integers(0, 99), tier=st.sampled_from((DEVICE, HOST)), zero=st.booleans())
    def create(self, index: int, tier: Tier, zero: bool) -> None:
        key = self.key(index, [k for k in self.world.store.chunks if k.role is not Role.PARAM])
        if key in self.values:
            return
        self.request(key, tier)
        chunk = self.chunk(key)
        access = lambda: self.world.pager.create(chunk, tier, reader="test", zero=zero)  # noqa: E731
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
    @rule(index=st.integers(0, 99), is_complete=st.booleans())
    def update(self, index: int, is_complete: bool) -> None:
        """The runtime writes to a pinned replica, as an optimizer step does."""
        key, tier = self.pinned[index % len(self.pinned)]
        if (key, OTHER[tier]) in self.pinned:
            return
        chunk = self.chunk(key)
        self.world.store.mark_for_update(chunk, awaits_update=is_complete and key.role is Role.GRAD)
        self.world.fill(chunk, tier, self.tick())
        self.world.store.mark_written(chunk, tier)
        self.values[key] = [self.clock] * 7

    @rule(index=st.integers(0, 99))
    def user_writes(self, index: int) -> None:
        """To a present parameter, whole or in part."""
        group = index % len(self.world.parameters)
        key = ChunkId(Role.PARAM, group)
        if (key, HOST) in self.pinned or DEVICE not in self.chunk(key).replicas:
            return
        matrix, single = (managed.param for managed in self.world.parameters[group])
        self.unnoticed.add(key)
        with torch.no_grad():
            single.fill_(self.tick())
            self.values[key] = [*self.values[key][:6], self.clock]
            matrix[1, 1] = self.tick()
            self.values[key][4] = self.clock

    @rule(index=st.integers(0, 99))
    def user_writes_to_an_absent_parameter(self, index: int) -> None:
        """By code that passes by what serves it. It cannot be kept, and has to be told: the values stay."""
        group = index % len(self.world.parameters)
        if DEVICE not in self.chunk(ChunkId(Role.PARAM, group)).replicas:
            managed = self.world.parameters[group][0]
            with torch.no_grad():
                managed.param.fill_(self.tick())
            if managed.name not in self.broken:
                self.broken.append(managed.name)

    @rule()
    def check_parameters(self) -> None:
        """Every written-to absent parameter is named in an error, once."""
        for group, (matrix, _) in self.world.parameters.items():
            name = f"p{group}.0"
            if name in self.broken:
                words = rf"parameter {name} \(2, 3\) (\(and 1 more\) )?was written to past torch"
                with pytest.raises(StateError, match=words):
                    matrix.bound.check()
            matrix.bound.check()
        self.broken.clear()

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "world"):
            return
        self.world.check()
        assert self.world.pager.required_nbytes == self.required
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
            self.world.pager.unpin(self.chunk(key), tier)
        for tier in Tier.DEVICE, Tier.HOST:
            self.world.cap(tier, NO_LIMIT)
        for key in self.values:
            self.world.pager.use(self.chunk(key), DEVICE, reader="end")
            self.read(key, DEVICE)
        self.world.store.close()
        assert self.world.device.total_nbytes == self.world.host.total_nbytes == 0


def _subsets(chunks: list[Chunk]) -> Any:
    return chain.from_iterable(combinations(chunks, count) for count in range(len(chunks) + 1))


def test_any_order_keeps_contents_caps_and_pins() -> None:
    run_state_machine_as_test(AnyOrder, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


@pytest.mark.parametrize("sizes", [[1, 2], [1, 2, 1]])
def test_what_finds_no_room_moves_nothing_to_the_tier_it_would_leave_for(sizes: list[int]) -> None:
    """Without DISK, what leaves HOST goes to DEVICE, from where nothing can go on."""
    machine = AnyOrder()
    machine.begin(sizes=sizes, device=2, spare=0, cached=0)
    machine.pin(elastic=False, index=0, tier=DEVICE)
    machine.create(index=0, tier=DEVICE, zero=False)
    machine.create(index=2, tier=HOST, zero=False)
    machine.holds()
    machine.teardown()


@pytest.mark.full
def test_any_order_at_length() -> None:
    run_state_machine_as_test(AnyOrder, settings=settings(max_examples=1500, stateful_step_count=80, deadline=None))
