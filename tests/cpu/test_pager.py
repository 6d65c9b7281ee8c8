"""Demand movement: what moves for an access, what never does, what an error says, and the smallest cap."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkmem.data.errors import CapacityError, StateError
from chunkmem.data.types import Role, Tier
from chunkmem.plan.model import Lane
from chunkmem.runtime.chunk import NO_CONTENT
from tests.helpers.world import NO_LIMIT, SLAB, World, packed, values_on

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def use(world: World, *groups: int) -> None:
    for group in groups:
        world.pager.use(world.param(group), DEVICE, reader="forward")


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
    assert (world.store.moved[Lane.H2D], world.store.moved[Lane.D2H]) == (3 * SLAB, 0)
    with torch.no_grad():
        world.parameters[0][0].param.fill_(7.0)
    use(world, 1)
    assert world.store.moved[Lane.D2H] == SLAB
    assert values_on(world.param(0), HOST) == [7.0] * 6 + [1.0]


def test_what_is_there_is_not_brought_again() -> None:
    world = packed([1], device=1)
    use(world, 0, 0)
    world.pager.pin(world.param(0), DEVICE, reader="forward")
    assert world.store.moved[Lane.H2D] == SLAB


def test_a_pinned_chunk_stays_and_an_older_pin_is_not_ended_by_a_newer_one() -> None:
    world = packed([1, 1, 1], device=2)
    for _ in range(2):
        world.pager.pin(world.param(0), DEVICE, reader="forward")
    world.pager.unpin(world.param(0), DEVICE)
    use(world, 1, 2)
    assert world.on(DEVICE) == ["param chunk 0", "param chunk 2"]
    world.pager.unpin(world.param(0), DEVICE)
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
    world.pager.pin(world.param(0), DEVICE, reader="forward")
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
    world.pager.pin(world.param(0), DEVICE, reader="forward")
    use(world, 2)
    assert world.on(DEVICE) == ["param chunk 0", "param chunk 2"]
    assert values_on(world.param(0), DEVICE) == [1.0] * 6 + [7.0]
    world.check()


def test_new_content_takes_over_the_slab_of_the_consumed_one() -> None:
    world = World([1], device=1)
    world.pager.create(world.grad(0), DEVICE, reader="gradient", zero=True)
    slab = world.grad(0).replicas[DEVICE].slab
    world.store.consume(world.grad(0))
    assert world.pager.create(world.grad(0), DEVICE, reader="gradient", zero=True).slab is slab


def test_consumed_content_goes_before_anything_else_and_is_not_copied() -> None:
    world = packed([1, 1], device=2)
    use(world, 0)
    world.pager.create(world.grad(0), DEVICE, reader="gradient", zero=True)
    world.store.consume(world.grad(0))
    use(world, 1)
    assert world.on(DEVICE) == ["param chunk 0", "param chunk 1"]
    assert world.store.moved[Lane.D2H] == 0


def test_a_gradient_that_awaits_its_update_leaves_before_parameters_and_those_before_states() -> None:
    world = packed([1, 1, 1, 1], device=3)
    world.pager.create(world.chunk(Role("exp_avg"), 0), DEVICE, reader="states", zero=True)
    use(world, 0)
    world.pager.create(world.grad(0), DEVICE, reader="gradient", zero=True)
    world.store.mark_for_update(world.grad(0))
    use(world, 1)
    assert world.on(DEVICE) == ["exp_avg chunk 0", "param chunk 0", "param chunk 1"]
    use(world, 2)
    assert world.on(DEVICE) == ["exp_avg chunk 0", "param chunk 1", "param chunk 2"]


def test_a_gradient_that_is_complete_leaves_before_what_was_to_leave_before_it() -> None:
    world = packed([1, 1, 1], device=3)
    use(world, 0)
    world.pager.create(world.grad(0), DEVICE, reader="gradient", zero=True)
    use(world, 1)
    use(world, 2)  # as it was then, the weights of group 0 had to leave, and the gradient was next
    assert world.on(DEVICE) == ["grad chunk 0", "param chunk 1", "param chunk 2"]
    world.pager.use(world.grad(0), DEVICE, reader="a further gradient")
    use(world, 0)
    assert world.on(DEVICE) == ["grad chunk 0", "param chunk 0", "param chunk 2"]
    world.store.mark_for_update(world.grad(0))
    world.check()
    use(world, 1)
    assert world.on(DEVICE) == ["param chunk 0", "param chunk 1", "param chunk 2"]


def test_packing_prefers_host() -> None:
    world = World([1, 1, 1], device=2, host=1)
    for group in range(3):
        world.pager.place(world.param(group), reader="packing")
    assert (world.on(HOST), world.on(DEVICE)) == (["param chunk 0"], ["param chunk 1", "param chunk 2"])


def test_too_much_pinned_names_what_is_needed() -> None:
    world = packed([1, 1, 2], device=3)
    world.pager.pin(world.param(0), DEVICE, reader="blocks.0 forward")
    world.pager.pin(world.param(1), DEVICE, reader="blocks.1 forward")
    with pytest.raises(CapacityError) as raised:
        world.pager.pin(world.param(2), DEVICE, reader="blocks.2 forward")
    assert str(raised.value) == (
        "blocks.2 forward: 256 B more needed on DEVICE for param chunk 2, only 128 B can be made free (256 B in use); "
        "raise memory.device from 384 B to at least 512 B (512 bytes) now, and later accesses may need more; "
        "768 B (768 bytes) is certain to do, or lower default_chunk_size"
    )
    assert (raised.value.needed_nbytes, raised.value.cap_nbytes) == (4 * SLAB, 3 * SLAB)
    assert world.pager.required_nbytes[DEVICE] == 4 * SLAB


def test_a_full_host_is_named_when_it_is_what_is_missing() -> None:
    world = packed([1, 1], device=1, host=2)
    use(world, 0)
    world.store.mark_written(world.param(0), DEVICE)
    world.cap(HOST, 1)
    with pytest.raises(CapacityError) as raised:
        use(world, 1)
    assert str(raised.value) == (
        "forward: 128 B more needed on DEVICE for param chunk 1, but what would leave it finds no room on HOST, which "
        "is 128 B short; raise memory.host from 128 B to 256 B (256 bytes) now, and later accesses may need more; "
        "768 B (768 bytes) is certain to do, or memory.device from 128 B to 256 B"
    )
    assert (raised.value.needed_nbytes, raised.value.cap_nbytes) == (2 * SLAB, SLAB)


def test_tiers_that_share_their_ram_speak_of_one_cap() -> None:
    world = World([1, 1], device=1, host=0)
    world.pager.place(world.param(0), reader="packing")
    with pytest.raises(CapacityError) as raised:
        world.pager.create(world.grad(0), DEVICE, reader="p0 gradient", zero=True)
    assert str(raised.value) == (
        "p0 gradient: 128 B more needed for grad chunk 0, and 0 B of 128 B RAM is left; raise memory.host (or "
        "client.mem_tracer.overall_cpu_mem_ratio) to at least 256 B (256 bytes) now, and later accesses may need more; "
        "768 B (768 bytes) is certain to do"
    )


def test_the_warm_up_share_gives_way_to_the_largest_moment_but_the_limit_does_not() -> None:
    world = packed([1, 1, 2], device=1, limit=3)
    use(world, 0, 1)
    assert world.on(DEVICE) == ["param chunk 1"]
    world.pager.pin(world.param(1), DEVICE, reader="forward")
    use(world, 2)
    assert world.device.cap_nbytes == 3 * SLAB
    world.pager.pin(world.param(2), DEVICE, reader="forward")
    with pytest.raises(CapacityError, match=r"raise memory.device from 384 B to at least 512 B"):
        use(world, 0)
    assert world.device.cap_nbytes == 3 * SLAB


def test_a_closed_executor_serves_nothing() -> None:
    world = packed([1], device=1)
    world.pager.close("its manager is closed")
    for access in (
        lambda: use(world, 0),
        lambda: world.pager.pin(world.param(0), DEVICE, reader="forward"),
        lambda: world.pager.create(world.grad(0), DEVICE, reader="forward", zero=True),
    ):
        with pytest.raises(StateError, match="forward: its manager is closed"):
            access()


def test_an_access_that_could_be_served_elsewhere_does_not_raise_the_required_cap() -> None:
    world = packed([1, 1], device=2)
    world.pager.pin(world.param(0), DEVICE, reader="gather", elastic=True)
    assert world.pager.required_nbytes[DEVICE] == 0
    use(world, 1)
    assert world.pager.required_nbytes[DEVICE] == 2 * SLAB


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
            world.pager.pin(param, DEVICE, reader="forward")
        elif kind == "unpin":
            world.pager.unpin(param, DEVICE)
        elif kind == "use":
            world.pager.use(param, DEVICE, reader="forward")
        elif kind == "write":
            world.pager.use(param, DEVICE, reader="step")
            world.store.mark_written(param, DEVICE)
        elif kind == "consume":
            world.store.consume(grad)
        elif grad.version == NO_CONTENT:
            world.pager.create(grad, DEVICE, reader="gradient", zero=True)
        else:
            world.pager.use(grad, DEVICE, reader="gradient")
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
    required = ample.pager.required_nbytes[DEVICE]
    tight = packed(sizes, device=required // SLAB, cached=cached)
    play(tight, events)
    assert tight.pager.required_nbytes[DEVICE] == required == tight.device.peak_nbytes
    if required > 0:
        below = packed(sizes, device=required // SLAB - 1, cached=cached)
        with pytest.raises(CapacityError) as raised:
            play(below, events)
        assert below.device.cap_nbytes < raised.value.needed_nbytes <= required
