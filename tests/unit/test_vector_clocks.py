"""Two accesses to memory that nothing orders are a race, and no others."""

from __future__ import annotations

import pytest

from tests.helpers.vector_clocks import CELL_NBYTES, Access, Actor, Operation, ShadowMemory, VectorClocks

START, NBYTES = 1 << 20, 8 * CELL_NBYTES


class Shadow:
    """One piece of memory and who uses it."""

    def __init__(self) -> None:
        self.clocks = VectorClocks()
        self.memory = ShadowMemory(self.clocks)
        self.memory.add(START, NBYTES, "slab")

    def use(self, actor: Actor, *, writes: bool, offset: int = 0, nbytes: int = NBYTES) -> Operation:
        operation = self.clocks.begin(actor, "writes" if writes else "reads")
        self.memory.access(operation, [(START + offset, nbytes)], writes=writes)
        return operation

    def order(self, before: Actor, after: Actor) -> None:
        self.clocks.wait(after, self.clocks.now(before))


@pytest.mark.parametrize(("first", "second", "expected"), [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 1)])
def test_two_actors_without_an_edge_race_if_one_writes(first: int, second: int, expected: int) -> None:
    shadow = Shadow()
    one = shadow.use(Actor.H2D, writes=bool(first))
    other = shadow.use(Actor.COMPUTE, writes=bool(second))
    assert len(shadow.memory.races) == expected
    for race in shadow.memory.races:
        assert race.first == Access(one, writes=bool(first))
        assert race.second == Access(other, writes=bool(second))


@pytest.mark.parametrize("writes", [False, True])
def test_an_edge_orders_what_came_before_it_alone(writes: bool) -> None:
    """
    H2D      write ─┐        write again
    COMPUTE         └─ use                use: a race
    """
    shadow = Shadow()
    shadow.use(Actor.H2D, writes=True)
    shadow.order(Actor.H2D, Actor.COMPUTE)
    shadow.use(Actor.COMPUTE, writes=writes)
    assert not shadow.memory.races
    shadow.order(Actor.COMPUTE, Actor.H2D)
    shadow.use(Actor.H2D, writes=True)
    assert not shadow.memory.races
    shadow.use(Actor.COMPUTE, writes=writes)
    assert len(shadow.memory.races) == 1


def test_edges_add_up() -> None:
    """D2H knows of H2D's write by way of COMPUTE."""
    shadow = Shadow()
    shadow.use(Actor.H2D, writes=True)
    shadow.order(Actor.H2D, Actor.COMPUTE)
    shadow.order(Actor.COMPUTE, Actor.D2H)
    shadow.use(Actor.D2H, writes=True)
    assert not shadow.memory.races


def test_a_write_comes_after_every_read() -> None:
    shadow = Shadow()
    for actor in (Actor.COMPUTE, Actor.D2H):
        shadow.use(actor, writes=False)
    shadow.order(Actor.COMPUTE, Actor.H2D)
    shadow.use(Actor.H2D, writes=True)
    (race,) = shadow.memory.races
    assert race.first.operation.actor is Actor.D2H


def test_cells_are_used_by_themselves() -> None:
    """Neighbours do not conflict; what reaches into a cell does, and there alone."""
    shadow = Shadow()
    shadow.use(Actor.H2D, writes=True, nbytes=2 * CELL_NBYTES)
    shadow.use(Actor.COMPUTE, writes=True, offset=2 * CELL_NBYTES, nbytes=CELL_NBYTES)
    assert not shadow.memory.races
    shadow.use(Actor.D2H, writes=False, offset=2 * CELL_NBYTES - 4, nbytes=4)
    (race,) = shadow.memory.races
    assert race.address == START + CELL_NBYTES
    assert race.first.operation.actor is Actor.H2D


def test_memory_that_is_not_registered_is_nobodys() -> None:
    shadow = Shadow()
    for actor in (Actor.H2D, Actor.COMPUTE):
        shadow.use(actor, writes=True, offset=NBYTES)
    assert not shadow.memory.races
    assert shadow.memory.name(START + NBYTES) is None


def test_memory_that_is_registered_again_is_new() -> None:
    shadow = Shadow()
    shadow.use(Actor.H2D, writes=True)
    shadow.memory.remove(START)
    shadow.memory.add(START, NBYTES, "another")
    shadow.use(Actor.COMPUTE, writes=True)
    assert not shadow.memory.races
