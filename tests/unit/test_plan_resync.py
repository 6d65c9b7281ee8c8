"""The way into a plan where both tiers are nearly full: which copies come first decides whether there is one."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from chunkmem.data.errors import PlanError
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.plan.model import Alloc, Copy, Free
from chunkmem.plan.resync import resync
from chunkmem.plan.semantics import Residency
from tests.helpers.traces import grad, param

DEVICE, HOST = Tier.DEVICE, Tier.HOST
OTHER = {DEVICE: HOST, HOST: DEVICE}
Replicas = dict[tuple[ChunkId, Tier], bool]


def ends_at(now: Replicas, wanted: Replicas, *, sizes: Mapping[ChunkId, int], caps: Mapping[Tier, int]) -> Replicas:
    """Ask for the way and walk it: no step passes a cap or loses the only copy."""
    contents = {chunk for (chunk, _), newest in now.items() if newest}
    way = resync(
        Residency(now),
        Residency(wanted),
        held=frozenset(),
        chunk_nbytes=sizes,
        free_nbytes={tier: caps[tier] - used(now, sizes, tier) for tier in caps},
        peak_nbytes=caps,
        keep_duplicates=False,
    )
    replicas = dict(now)
    for action in way:
        if isinstance(action, Alloc):
            assert (action.chunk, action.tier) not in replicas, action
            replicas[action.chunk, action.tier] = False
        elif isinstance(action, Free):
            del replicas[action.chunk, action.tier]
        else:
            assert isinstance(action, Copy), action
            assert replicas[action.chunk, action.source], action
            replicas[action.chunk, action.target] = True
        assert {chunk for (chunk, _), newest in replicas.items() if newest} == contents, action
        assert all(used(replicas, sizes, tier) <= caps[tier] for tier in caps), action
    return replicas


def used(replicas: Replicas, sizes: Mapping[ChunkId, int], tier: Tier) -> int:
    return sum(sizes[chunk] for chunk, at in replicas if at is tier)


@pytest.mark.parametrize("free_on", [DEVICE, HOST])
def test_two_full_tiers_change_places_through_one_free_slab(free_on: Tier) -> None:
    # DEVICE  p0 p1 p2 p3 .          g0 g1 g2 g3 .
    # HOST    g0 g1 g2 g3      to    p0 p1 p2 p3       one slab is free, on DEVICE or on HOST
    ours, theirs = [param(n) for n in range(4)], [grad(n) for n in range(4)]
    now = {(c, DEVICE): True for c in ours} | {(c, HOST): True for c in theirs}
    wanted = {(c, HOST): True for c in ours} | {(c, DEVICE): True for c in theirs}
    caps = {tier: 4 + (tier is free_on) for tier in (DEVICE, HOST)}
    assert ends_at(now, wanted, sizes=dict.fromkeys((*ours, *theirs), 1), caps=caps) == wanted


def test_without_a_free_slab_there_is_no_way_and_it_is_said_what_is_missing() -> None:
    now = {(param(0), DEVICE): True, (grad(0), HOST): True}
    wanted = {(param(0), HOST): True, (grad(0), DEVICE): True}
    with pytest.raises(
        PlanError, match=r"param chunk 0 takes 3 bytes on HOST, and 0 of 3 are free.* raise memory.host by 3"
    ):
        ends_at(now, wanted, sizes={param(0): 3, grad(0): 3}, caps={DEVICE: 3, HOST: 3})


@pytest.mark.parametrize("is_newest", [True, False])
def test_what_can_be_had_again_gives_way_for_a_while(is_newest: bool) -> None:
    """A second copy, or a slab that waits for its content, is wanted where it is, and in the way."""
    a, b, spare = param(0), param(1), grad(0)
    now = {(a, DEVICE): True, (spare, DEVICE): is_newest, (b, HOST): True}
    wanted = {(b, DEVICE): True, (spare, DEVICE): is_newest, (a, HOST): True}
    host = 1
    if is_newest:
        now[spare, HOST] = wanted[spare, HOST] = True
        host = 2
    assert ends_at(now, wanted, sizes={a: 1, b: 1, spare: 1}, caps={DEVICE: 2, HOST: host}) == wanted


def test_two_small_rooms_hold_nothing_large() -> None:
    """States take two slabs, weights in bf16 one: one free slab on each tier holds no states: the pager serves."""
    a, b = ChunkId(Role("exp_avg"), 0), ChunkId(Role("exp_avg"), 1)
    small = [param(n) for n in range(2)]
    now = {(a, DEVICE): True, (b, HOST): True, (small[0], DEVICE): True, (small[1], HOST): True}
    wanted = now | {(a, HOST): True, (b, DEVICE): True}
    del wanted[a, DEVICE], wanted[b, HOST]
    sizes = {a: 2, b: 2} | dict.fromkeys(small, 1)
    with pytest.raises(PlanError, match="takes 2 bytes on HOST, and 1 of 4 are free there"):
        ends_at(now, wanted, sizes=sizes, caps={DEVICE: 4, HOST: 4})
    assert ends_at(now, wanted, sizes=sizes, caps={DEVICE: 4, HOST: 5}) == wanted


def test_with_one_free_slab_there_always_is_a_way() -> None:
    """Any two places of chunks of one size, contents once or twice, and one slab more than contents: 500 of them."""
    for seed in range(500):
        rng = random.Random(seed)
        chunks = [param(n) for n in range(rng.randint(1, 12))]
        device = rng.randint(0, len(chunks))
        caps = {DEVICE: device + 1, HOST: len(chunks) - device}
        if rng.random() < 0.5:
            caps = {DEVICE: device, HOST: len(chunks) - device + 1}
        now, wanted = drawn(rng, chunks, caps), drawn(rng, chunks, caps)
        assert ends_at(now, wanted, sizes=dict.fromkeys(chunks, 1), caps=caps) == wanted, f"seed {seed}"


def drawn(rng: random.Random, chunks: list[ChunkId], caps: Mapping[Tier, int]) -> Replicas:
    """Every chunk on a tier, some on both, as far as there is room."""
    left, found = dict(caps), Replicas()
    for chunk in rng.sample(chunks, len(chunks)):
        tier = rng.choice([tier for tier in left if left[tier]])
        found[chunk, tier] = True
        left[tier] -= 1
    for chunk in chunks:
        for tier in (DEVICE, HOST):
            if left[tier] and (chunk, tier) not in found and rng.random() < 0.5:
                found[chunk, tier] = True
                left[tier] -= 1
    return found


@pytest.mark.parametrize("seed", range(40))
def test_every_chunk_gets_to_all_tiers_that_are_to_have_it_and_leaves_the_others(seed: int) -> None:
    """Also to two tiers at once: passing HOST on the way to DISK, it is brought there."""
    draw = random.Random(seed)
    disk = Tier.DISK
    chunks = [param(n) for n in range(6)] + [grad(n) for n in range(6)]
    now: Replicas = {}
    wanted: Replicas = {}
    for chunk in chunks:
        now |= {(chunk, tier): True for tier in draw.choice([(DEVICE,), (HOST,), (disk,), (HOST, disk)])}
        places = draw.choice([(DEVICE,), (HOST,), (disk,), (HOST, disk), (DEVICE, HOST), (DEVICE, HOST, disk)])
        wanted |= {(chunk, tier): True for tier in places}
    sizes = dict.fromkeys(chunks, 10)
    spare = draw.choice((10, 40))
    caps = {tier: max(used(now, sizes, tier), used(wanted, sizes, tier)) + spare for tier in (DEVICE, HOST, disk)}
    assert ends_at(now, wanted, sizes=sizes, caps=caps) == wanted
