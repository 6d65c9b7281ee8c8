"""Updates overlapped with backward one by one: when one is begun, what it holds, and when it is believed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from chunkmem.data.types import Role, Tier
from chunkmem.modules.binding import ManagedParameter
from chunkmem.optim.adam_rule import AdamHyper
from chunkmem.optim.native import NativeUpdate
from chunkmem.optim.rule import UpdateItem, UpdateRule
from chunkmem.optim.speculative import Intent, NormParts, SpeculativeUpdater
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.events import Event
from chunkmem.runtime.queues import Lanes
from chunkmem.runtime.shadow import ShadowBuffers
from tests.helpers.world import SLAB, World, values_on

ROLES = (Role.PARAM, Role.GRAD, Role("exp_avg"))
WRITTEN = (Role.PARAM, Role("exp_avg"))
HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, decoupled=True)


class Later:
    """Work that is done when it is waited for, and not before."""

    started_s = ended_s = 0.0
    failure = None

    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work

    def done(self) -> bool:
        return self._work is None

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


class LazyLanes:
    def __init__(self) -> None:
        self.issued: list[Later] = []

    def work(self, work: Callable[[], object], *, after: Sequence[Event], label: str) -> Event:
        self.issued.append(Later(work))
        return self.issued[-1]


class PlusTen:
    """An update that adds 10 to whatever it reads."""

    def can_update_into(self, dtype: torch.dtype, *, is_master: bool) -> bool:
        return True

    def update_into(self, old: Any, new: Any, items: Sequence[UpdateItem], **how: object) -> None:
        with runtime_mode():
            for role, memory in new.items():
                memory.flat.copy_(old[role].flat + 10)

    def take_over(self, items: Sequence[UpdateItem]) -> None:
        pass


class Rig:
    """Two groups whose weights, gradient and moment are on HOST, full of 1, 2 and 3."""

    def __init__(self, *, reserve: int = 4) -> None:
        self.world = World([1, 1], device=6)
        for group in (0, 1):
            for value, role in enumerate(ROLES, start=1):
                chunk = self.world.chunk(role, group)
                self.world.pager.create(chunk, Tier.HOST, reader="test", zero=False, elastic=True)
                self.world.fill(chunk, Tier.HOST, value)
        self.lanes = LazyLanes()
        self.log = ShadowBuffers(self.world.store.pools[Tier.HOST])
        self.intent: Intent | None = Intent(cast(UpdateRule[Any], PlusTen()), self.items(0), 0.5, needs_norm=True)
        self.ahead = SpeculativeUpdater(
            self.world.store,
            cast(Lanes, self.lanes),
            self.log,
            cast(NativeUpdate, None),
            intent_of=lambda group: self.intent,
            chunks_of=lambda group: [self.chunk(role, group) for role in ROLES],
            num_threads=1,
        )
        self.ahead.reserve({SLAB: reserve})
        self.reserved = reserve

    def items(self, group: int) -> list[UpdateItem]:
        params = list(self.world.parameters[group])
        return [UpdateItem(HYPER, params, [torch.tensor(1.0)] * len(params), [0] * len(params))]

    def chunk(self, role: Role, group: int = 0) -> Chunk:
        return self.world.chunk(role, group)

    @property
    def num_idle(self) -> int:
        """Slabs of the log that nobody has."""
        taken = []
        while (slab := self.log.take(SLAB)) is not None:
            taken.append(slab)
        for slab in taken:
            self.log.give(slab)
        return len(taken)

    def take_over(self, tier: Tier = Tier.HOST, multiplier: float | None = 0.5) -> bool:
        return self.ahead.take_over(0, tier, Intent(cast(UpdateRule[Any], None), self.items(0), multiplier))

    def weights(self) -> float:
        return values_on(self.chunk(Role.PARAM), Tier.HOST)[0]


def test_its_results_are_taken_over_and_not_seen_before() -> None:
    rig = Rig()
    assert rig.ahead.begin(0, ()) is rig.lanes.issued[0]
    assert rig.num_idle == rig.reserved - len(WRITTEN)
    rig.lanes.issued[0].wait()
    assert rig.weights() == 1
    assert rig.take_over()
    assert rig.weights() == 11
    assert values_on(rig.chunk(Role("exp_avg")), Tier.HOST) == [13] * 7
    assert rig.num_idle == rig.reserved
    assert not rig.take_over(), "once only"


def test_one_that_is_under_way_is_not_begun_again() -> None:
    rig = Rig()
    rig.ahead.begin(0, ())
    assert rig.ahead.begin(0, ()) is None
    assert len(rig.lanes.issued) == 1


def test_one_whose_gradient_has_changed_since_is_begun_anew() -> None:
    rig = Rig()
    rig.ahead.begin(0, ())
    rig.world.store.mark_written(rig.chunk(Role.GRAD), Tier.HOST)
    assert rig.ahead.begin(0, ()) is rig.lanes.issued[1]
    assert rig.lanes.issued[0].done(), "its slabs are not lent again while it writes to them"
    assert rig.num_idle == rig.reserved - len(WRITTEN)
    assert rig.take_over()


def test_a_log_that_has_too_little_left_keeps_it() -> None:
    rig = Rig(reserve=1)
    assert rig.ahead.begin(0, ()) is None
    assert rig.num_idle == 1
    assert not rig.take_over()


@pytest.mark.parametrize("role", ROLES)
def test_what_is_not_on_host_is_left_to_the_step(role: Role) -> None:
    rig = Rig()
    chunk = rig.chunk(role)
    rig.world.store.take_slab(chunk, Tier.DEVICE)
    rig.world.store.copy(chunk, Tier.HOST, Tier.DEVICE)
    assert rig.ahead.begin(0, ()) is not None
    rig.ahead.forget()
    rig.world.store.mark_written(chunk, Tier.DEVICE)
    assert rig.ahead.begin(0, ()) is None
    rig.world.store.take_slab(chunk, Tier.HOST)  # there, with an older content or none
    assert rig.ahead.begin(0, ()) is None


@pytest.mark.parametrize("how", [{"tier": Tier.DEVICE}, {"multiplier": 0.25}, {"multiplier": None}])
def test_a_step_that_is_another_than_was_guessed_gets_nothing(how: dict[str, Any]) -> None:
    rig = Rig()
    rig.ahead.begin(0, ())
    assert not rig.take_over(**how)
    assert rig.weights() == 1
    assert rig.num_idle == rig.reserved
    rig.ahead.end_step()
    assert rig.ahead.guesses.num_wrong == 1


@pytest.mark.parametrize("forget", [SpeculativeUpdater.forget, SpeculativeUpdater.roll_back])
def test_what_is_forgotten_is_over_before_its_slabs_are_lent_again(
    forget: Callable[[SpeculativeUpdater], None],
) -> None:
    rig = Rig()
    rig.ahead.begin(0, ())
    forget(rig.ahead)
    assert rig.lanes.issued[0].done()
    assert rig.num_idle == rig.reserved
    assert not rig.take_over()
    assert rig.weights() == 1


def test_its_norms_are_those_of_gradients_that_are_still_there() -> None:
    rig = Rig()
    assert rig.ahead.norm_parts(0) == NormParts()
    rig.ahead.begin(0, ())
    norms: dict[ManagedParameter, torch.Tensor] = rig.ahead.norm_parts(0).norms
    assert {managed.name: float(norm) for managed, norm in norms.items()} == {
        "p0.0": pytest.approx(24**0.5),
        "p0.1": 2.0,
    }
    rig.world.store.mark_written(rig.chunk(Role.GRAD), Tier.HOST)
    assert rig.ahead.norm_parts(0) == NormParts()


def test_nothing_is_begun_that_cannot_be_known() -> None:
    rig = Rig()
    rig.intent = None
    assert rig.ahead.begin(0, ()) is None
    assert rig.num_idle == rig.reserved
