"""Shadow buffers take all that a plan leaves of HOST, and give way to whatever else needs it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.data.types import Role, Tier
from chunkmem.optim.state_placement import StatePlacement
from chunkmem.plan.ahead import SHADOW
from chunkmem.plan.simulate import peak_nbytes
from chunkmem.runtime.shadow import ShadowBuffers
from chunkmem.runtime.tiers import TierCaps
from tests.helpers.audit import assert_as_predicted, audit
from tests.helpers.overlapped import WIDTH, Block, Run, assert_alike
from tests.helpers.twins import cpu_only
from tests.helpers.world import SLAB, World

LEARNED = 4
"""Steps until plans are followed and states exist."""
GROUP_NBYTES = 3 * 5008 * 4
"""What an update of one group writes in fp32."""


def shadow_nbytes(manager: chunkmem.ChunkManager) -> int:
    return manager.runtime.tiers.host.now.get(SHADOW, 0)


@cache
def plan_peak_nbytes(precision: str) -> int:
    """Return what the chunks of `Run` take of HOST at most, under a plan for all of them."""
    run = Run(overlap=False, precision=precision)
    for seed in range(LEARNED):
        run.step(seed)
    assert run.manager.plan is not None
    assert run.manager.trace is not None
    return peak_nbytes(run.manager.plan, run.manager.trace)[Tier.HOST]


def full_host(num_slabs: float, precision: str = "fp32") -> int:
    """Return a cap on HOST with room for shadow buffers of so many groups."""
    return plan_peak_nbytes(precision) + int(num_slabs * GROUP_NBYTES)


@cpu_only
def test_by_default_all_of_host_that_a_plan_leaves_is_used() -> None:
    run = Run(overlap=True, undo_log_ratio=None, host_nbytes=full_host(2.5))
    for seed in range(LEARNED + 2):
        run.step(seed)
    assert shadow_nbytes(run.manager) == 2 * GROUP_NBYTES
    assert_as_predicted(run.manager)
    audit(run.manager)


@pytest.mark.few(1)
@cpu_only
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("num_slabs", [0, 0.4, 1, 2.5, 40])
def test_bits_do_not_depend_on_how_many_updates_find_room(num_slabs: float, precision: str) -> None:
    """Gradients are clipped in every third step; at 0, HOST is exactly what the plan takes."""
    runs = (
        Run(overlap=True, precision=precision, max_norm=2.0, undo_log_ratio=None,
            host_nbytes=full_host(num_slabs, precision)),
        Run(overlap=False, precision=precision, max_norm=2.0),
    )  # fmt: skip
    for seed in range(12):
        losses = [run.step(seed, factor=30.0 if seed % 3 == 2 else 0.1) for run in runs]
        assert losses[0] == losses[1]
        audit(runs[0].manager)
    assert_alike(*runs)
    assert_as_predicted(runs[0].manager)


def test_a_ratio_of_zero_is_none() -> None:
    run = Run(overlap=True, undo_log_ratio=0.0)
    for seed in range(LEARNED + 2):
        run.step(seed)
    assert shadow_nbytes(run.manager) == 0
    assert run.num_ahead == 0


class TestGivingWay:
    """One slab more than chunks have is needed on a HOST that shadow buffers fill."""

    def full(self) -> tuple[World, ShadowBuffers]:
        world = World([1, 1], device=2, host=4)
        log = ShadowBuffers(world.store.pools[Tier.HOST])

        class Buffers:
            def reserve(self, counts: dict[int, int]) -> None:
                log.reserve(counts)

        world.pager.speculative = world.pager._evictor.speculative = Buffers()  # type: ignore[assignment]
        return world, log

    def test_new_states_are_made_on_host(self) -> None:
        world, log = self.full()
        log.reserve({SLAB: 4})
        state_placement = StatePlacement(world.store, TierCaps(2 * SLAB, 4 * SLAB, shared=False), margin_use_ratio=0.0)
        chunk = world.chunk(Role("exp_avg"), 0)
        state_placement.decide({0: [world.chunk(role, 0) for role in (Role.PARAM, Role.GRAD, Role("exp_avg"))]})
        assert state_placement.tier_for(chunk) is Tier.HOST
        world.pager.create(chunk, Tier.HOST, reader="test", zero=True, elastic=True)
        assert chunk.ready(Tier.HOST)

    def test_what_is_packed_goes_to_host(self) -> None:
        world, log = self.full()
        log.reserve({SLAB: 4})
        chunk = world.chunk(Role("exp_avg"), 0)
        world.pager.place(chunk, reader="test")
        assert chunk.ready(Tier.HOST)

    def test_they_go_before_a_copy_that_spares_a_fetch(self) -> None:
        world, log = self.full()
        there = world.chunk(Role("exp_avg"), 0)
        world.pager.create(there, Tier.HOST, reader="test", zero=True, elastic=True)
        world.pager.pin(there, Tier.DEVICE, reader="test")
        world.pager.unpin(there, Tier.DEVICE)
        log.reserve({SLAB: 3})
        world.pager.create(world.chunk(Role("exp_avg"), 1), Tier.HOST, reader="test", zero=True, elastic=True)
        assert there.ready(Tier.HOST)
        assert log.reserved_nbytes == 0


def change_lr(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 0.5


def load(run: Run) -> None:
    run.manager.load_state_dict({key: value + 0.125 for key, value in run.manager.state_dict().items()})
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def gather(run: Run) -> None:
    with run.manager.gather(run.model), torch.no_grad():
        run.model[3].up.weight[1] += 0.25


def gather_one(run: Run) -> None:
    weight = run.model[3].up.weight
    with run.manager.gather(weight), torch.no_grad():
        weight[1] += 0.25


def evaluate(run: Run) -> None:
    with torch.no_grad():
        run.model(torch.ones(2, WIDTH))


def freeze(run: Run) -> None:
    block = run.model[1]
    block.requires_grad_(not block.up.weight.requires_grad)


def skip(run: Run) -> None:
    run.optimizer.zero_grad()
    run.backward(1000)


HOSTILE = (change_lr, load, gather, gather_one, evaluate, freeze, skip)


@pytest.mark.few(1)
@cpu_only
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.full)])
@pytest.mark.parametrize("num_slabs", [0, 2.5, 40])
@pytest.mark.parametrize("between", HOSTILE, ids=lambda function: function.__name__)
def test_a_hostile_loop_on_a_host_that_shadow_buffers_fill(
    between: Callable[[Run], None], num_slabs: float, precision: str
) -> None:
    # Gathered at once, a model takes all of DEVICE: then HOST has to take what was there.
    device_nbytes = 400 << 10 if between in (gather, load) else 72 << 10
    runs = (
        Run(overlap=True, precision=precision, undo_log_ratio=None, device_nbytes=device_nbytes,
            host_nbytes=full_host(num_slabs, precision)),
        Run(overlap=False, precision=precision, device_nbytes=device_nbytes),
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of assumptions that are wrong
        for seed in range(14):
            for run in runs:
                run.backward(seed)
                if seed % 3 == 2:
                    between(run)
                run.optimizer.step()
                if seed % 4 == 3:
                    between(run)
                run.optimizer.zero_grad()
            audit(runs[0].manager)
    assert_alike(*runs)


def train_in_turn(host_nbytes: int, *, overlap: bool, precision: str = "fp32") -> tuple[list[float], list[int], int]:
    """Train two models in turn, each with its own optimizer; return losses, misses of the last steps, updates ahead."""
    values = {"precision": precision, "default_chunk_size": 5000, "memory": {"device": 100 << 10, "host": host_nbytes}}
    values["client"] = {"opts": {"overlap_optimizer": overlap}}
    values["optimizer"] = {"params": {"use_hybrid_adam": False}}
    losses, missed, ahead = [], [], 0
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(values)) as manager:
        torch.manual_seed(0)
        with manager.init():
            halves = [nn.Sequential(*(Block(WIDTH) for _ in range(3))) for _ in range(2)]
        optimizers = [chunkmem.AdamW(half.parameters(), manager=manager, lr=1e-3) for half in halves]
        for step in range(14):
            half, optimizer = halves[step % 2], optimizers[step % 2]
            loss = half(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean()
            losses.append(loss.item())
            manager.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            audit(manager)
            timeline = manager.timeline()
            if step >= 8:
                assert timeline is not None
                missed.append(timeline.plan_misses)
                ahead += shadow_nbytes(manager) > 0
    return losses, missed, ahead


@pytest.mark.full
@cpu_only
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_plans_of_two_kinds_of_steps_share_host(precision: str) -> None:
    expected, _, _ = train_in_turn(8 << 20, overlap=False, precision=precision)
    ample, missed, ahead = train_in_turn(8 << 20, overlap=True, precision=precision)
    assert ample == expected
    assert not any(missed)
    assert ahead == 6
    followed = 0
    for host_nbytes in range(500 << 10, 900 << 10, 50 << 10):
        try:
            tight, missed, _ = train_in_turn(host_nbytes, overlap=True, precision=precision)
        except chunkmem.CapacityError:
            with pytest.raises(chunkmem.CapacityError):  # not for shadow buffers
                train_in_turn(host_nbytes, overlap=False, precision=precision)
            continue
        assert tight == expected
        _, without, _ = train_in_turn(host_nbytes, overlap=False, precision=precision)
        assert missed == without
        followed += not any(missed)
    assert followed >= 3


@cpu_only
def test_two_managers_fill_each_its_own_host() -> None:
    both = [Run(overlap=True, undo_log_ratio=None, host_nbytes=full_host(2.5)) for _ in range(2)]
    plain = Run(overlap=False)
    for seed in range(8):
        for run in (*both, plain):
            run.step(seed)
    for run in both:
        assert_alike(run, plain)
        assert shadow_nbytes(run.manager) == 2 * GROUP_NBYTES
        assert_as_predicted(run.manager)
