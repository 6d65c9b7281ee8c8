"""Replicas of chunks: what taking, copying, writing and dropping them does to bytes, versions and parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from chunkmem.data.errors import StateError
from chunkmem.data.types import Role, Tier
from chunkmem.plan.model import Lane
from chunkmem.runtime.chunk import NO_CONTENT, Chunk
from tests.helpers.world import SLAB, World, values_on

DEVICE, HOST = Tier.DEVICE, Tier.HOST


@pytest.fixture
def world() -> World:
    """Three groups of 1, 2 and 1 slabs; nothing has content."""
    return World([1, 2, 1], device=4)


def loaded(world: World, group: int = 0, fill: float = 5.0) -> Chunk:
    """A PARAM chunk with content on HOST and a copy on DEVICE."""
    chunk = world.param(group, fill)
    world.store.take_slab(chunk, DEVICE)
    world.store.copy(chunk, HOST, DEVICE)
    return chunk


@pytest.mark.parametrize("tier", [DEVICE, HOST])
@pytest.mark.parametrize("zero", [True, False])
def test_new_content_has_pads_of_zero(world: World, tier: Tier, zero: bool) -> None:
    chunk = world.grad(1)
    world.store.take_slab(chunk, tier).flat.fill_(float("nan"))
    world.store.create(chunk, tier, zero=zero)
    assert chunk.ready(tier)
    written = torch.zeros(chunk.group.numel, dtype=torch.bool)
    for start, stop in chunk.group.pads:
        written[start:stop] = True
    flat = chunk.replicas[tier].flat
    assert not flat[written].any()
    assert flat[~written].isnan().all() if not zero else not flat.any()
    assert written.sum() == 64 - 7


def test_views_have_the_shapes_of_the_parameters_and_share_the_slab(world: World) -> None:
    chunk = loaded(world)
    for tier in (DEVICE, HOST):
        views = world.store.views(chunk, tier)
        assert [tuple(view.shape) for view in views] == [(2, 3), ()]
        views[0][1, 2] = 9.0
        assert chunk.replicas[tier].flat[5] == 9.0
        assert world.store.views(chunk, tier) is views


def test_views_keep_the_strides_of_the_parameters(world: World) -> None:
    chunk = world.grad(0)
    chunk.forms = ((torch.Size((2, 3)), (1, 2)), chunk.forms[1])
    world.store.create(chunk, HOST, zero=True)
    world.store.views(chunk, HOST)[0].copy_(torch.tensor([[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]))
    assert chunk.replicas[HOST].flat[:6].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_copy_is_of_the_same_version_and_counted_once(world: World) -> None:
    chunk = loaded(world, 1)
    assert chunk.ready(DEVICE)
    assert chunk.ready(HOST)
    assert values_on(chunk, DEVICE) == [5.0] * 7
    assert (world.store.moved[Lane.H2D], world.store.moved[Lane.D2H]) == (2 * SLAB, 0)
    world.store.copy(chunk, DEVICE, HOST)
    assert (world.store.moved[Lane.H2D], world.store.moved[Lane.D2H]) == (
        2 * SLAB,
        2 * SLAB,
    )
    world.check()


def test_a_write_makes_the_other_copy_stale_and_frees_it(world: World) -> None:
    chunk = loaded(world)
    world.store.mark_written(chunk, DEVICE)
    assert list(chunk.replicas) == [DEVICE]
    assert world.host.total_nbytes == 0
    assert chunk.newest_tier() is DEVICE


def test_a_stale_copy_that_is_pinned_stays_until_it_is_brought_up_to_date(world: World) -> None:
    chunk = loaded(world)
    chunk.replicas[DEVICE].pins = 1
    world.fill(chunk, HOST, 6.0)
    world.store.mark_written(chunk, HOST)
    assert not chunk.ready(DEVICE)
    assert chunk.newest_tier() is HOST
    stale = chunk.replicas[DEVICE]
    assert world.pager.pin(chunk, DEVICE, reader="forward") is stale
    assert values_on(chunk, DEVICE) == [6.0] * 7


def test_the_only_newest_and_the_pinned_are_never_dropped(world: World) -> None:
    chunk = loaded(world)
    chunk.replicas[DEVICE].pins = 1
    with pytest.raises(AssertionError, match="param chunk 0 is pinned on device"):
        world.store.drop(chunk, DEVICE)
    chunk.replicas[DEVICE].pins = 0
    world.store.drop(chunk, DEVICE)
    with pytest.raises(AssertionError, match="param chunk 0: its only newest replica is on host"):
        world.store.drop(chunk, HOST)
    assert values_on(chunk, HOST) == [5.0] * 7


def test_consumed_content_leaves_a_slab_on_device_only(world: World) -> None:
    on_device, on_host = world.grad(0), world.grad(2)
    world.store.create(on_device, DEVICE, zero=True)
    world.store.create(on_host, HOST, zero=True)
    for chunk in (on_device, on_host):
        world.store.mark_for_update(chunk)
        world.store.consume(chunk)
        assert chunk.version == NO_CONTENT
        assert not chunk.awaits_update
        assert chunk.newest_tier() is None
    assert (world.on(DEVICE), world.on(HOST)) == (["grad chunk 0"], [])
    world.store.drop(on_device, DEVICE)
    assert world.device.total_nbytes == 0


def test_parameters_stand_on_the_slab_while_it_is_there_and_read_nan_while_it_is_not(world: World) -> None:
    matrix, single = (managed.param for managed in world.parameters[0])
    identities = id(matrix), id(single)
    chunk = loaded(world)
    assert matrix.tolist() == [[5.0] * 3] * 2
    assert single.item() == 5.0
    assert matrix.untyped_storage()._cdata == single.untyped_storage()._cdata
    world.store.drop(chunk, DEVICE)
    assert matrix.isnan().all()
    assert single.isnan()
    assert (matrix.shape, single.shape) == ((2, 3), ())
    assert (id(matrix), id(single)) == identities


@pytest.mark.parametrize("leaves", [True, False])
def test_other_memory_given_to_a_parameter_is_told_though_its_chunk_has_moved_since(world: World, leaves: bool) -> None:
    """Coming and going must not put it back without a word: what the user assigned would be lost."""
    chunk = loaded(world)
    managed = world.parameters[0][0]
    if not leaves:
        world.store.drop(chunk, DEVICE)
    managed.param.data = torch.zeros(2, 3)
    if leaves:
        world.store.drop(chunk, DEVICE)
    else:
        world.pager.use(chunk, DEVICE, reader="forward")
    with pytest.raises(StateError, match=r"parameter p0.0 \(2, 3\) was given other memory after it was packed"):
        managed.bound.check()
    managed.bound.check()
    world.pager.use(chunk, DEVICE, reader="forward")
    assert managed.param.tolist() == [[5.0] * 3] * 2


def test_an_evicted_chunk_holds_no_device_memory(world: World) -> None:
    chunk = loaded(world)
    storage = world.parameters[0][0].param.untyped_storage()
    assert storage.nbytes() == SLAB
    world.store.drop(chunk, DEVICE)
    assert storage.nbytes() == 0
    assert world.device.total_nbytes == 0


def test_closing_gives_everything_back(world: World) -> None:
    loaded(world, 0)
    loaded(world, 1)
    world.store.create(world.chunk(Role("exp_avg"), 2), HOST, zero=True)
    world.store.close()
    assert (world.device.total_nbytes, world.host.total_nbytes) == (0, 0)
    assert all(managed.param.isnan().all() for group in world.parameters.values() for managed in group)


def test_a_chunk_is_registered_once(world: World) -> None:
    with pytest.raises(AssertionError):
        world.store.add(world.param(0))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad, lambda: torch.device("meta")])
def test_chunks_come_and_go_whatever_mode_the_user_is_in(world: World, mode: Callable[[], object]) -> None:
    """What is first allocated or bound under `inference_mode`, or with a default device, must train afterwards."""
    with mode():  # type: ignore[attr-defined]
        chunk = loaded(world)
    matrix = world.parameters[0][0].param
    assert not matrix.is_inference()
    (matrix * 2).sum().backward()
    assert matrix.grad is not None
    assert matrix.grad.tolist() == [[2.0] * 3] * 2
    with mode():  # type: ignore[attr-defined]
        world.store.drop(chunk, DEVICE)
        world.store.take_slab(chunk, DEVICE)
    world.store.copy(chunk, HOST, DEVICE)
    assert matrix.tolist() == [[5.0] * 3] * 2
