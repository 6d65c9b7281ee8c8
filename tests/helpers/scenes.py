"""Models trained by one plan that is the same in every run, and by that plan without one of its waits."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import chunkmem
from chunkmem.data.trace import Kind, Trace
from chunkmem.plan.model import Lane, Plan, Wait
from chunkmem.plan.planner import make_plan
from tests.helpers.orders import Race, Reading
from tests.helpers.rehearsal import cap_nbytes, plans, rehearsed
from tests.helpers.training import STEPS, VARIANTS, Chunked, Trainer, capped
from tests.helpers.zoo import ZOO

FOLLOWED = STEPS - 1
"""Steps that follow the plan from start to end: the first one makes the optimizer states."""


@dataclass(frozen=True)
class Scene:
    """A model, how it is trained, and a cap that makes its plan what it is."""

    model: str
    way: str
    share: float
    """The cap, as a share of the PARAM bytes."""

    def __str__(self) -> str:
        return f"{self.model}-{self.way}-{self.share}"

    @functools.cached_property
    def case(self) -> Any:
        return next(case for case in ZOO if case.name == self.model)

    @functools.cached_property
    def variant(self) -> Any:
        return next(variant for variant in VARIANTS if variant.name == self.way)

    @functools.cached_property
    def device_nbytes(self) -> int:
        return cap_nbytes(self.case, self.variant, self.share)

    @functools.cached_property
    def trace(self) -> Trace:
        return rehearsed(self.case, self.variant, self.device_nbytes)

    @functools.cached_property
    def plan(self) -> Plan:
        """The one that the planner likes best."""
        machine = plans(self.case, self.variant, self.device_nbytes)[0].machine
        return make_plan(self.trace, machine)

    @functools.cached_property
    def reading(self) -> Reading:
        return Reading(self.plan, self.trace, iterations=FOLLOWED)

    @functools.cached_property
    def slots(self) -> dict[str, tuple[int, int, int]]:
        """By parameter: its group, and where in the group's chunks it begins and ends."""
        with chunkmem.ChunkManager(capped(self.case, self.device_nbytes)) as manager:
            Trainer(self.case, self.variant, Chunked(manager))
            groups = {chunk.id.group: chunk.group for chunk in manager.runtime.memory.store.chunks.values()}
            found = {}
            for managed in manager.runtime.registry.parameters:
                slot = groups[managed.group].slots[managed.position]
                found[managed.name] = managed.group, slot.offset, slot.offset + slot.numel
            return found

    def waits(self) -> Iterator[tuple[str, Plan]]:
        """Yield every Wait by name, and the plan without it."""
        for at, actions in enumerate(self.plan.actions):
            for index, action in enumerate(actions):
                if isinstance(action, Wait):
                    lists = list(self.plan.actions)
                    lists[at] = (*actions[:index], *actions[index + 1 :])
                    name = f"{at} {self.trace.moments[at]}: {action.lane.value} on {action.on.value}"
                    yield name, replace(self.plan, actions=tuple(lists))


class Undisturbed(Chunked):
    """Without an audit, which would wait for all copies."""

    def after_step(self) -> None:
        pass


def unread_until_covered(scene: Scene, races: list[Race]) -> bool:
    """The module waits for further chunks before it computes anything, and that Wait covers this one.

    HOLDs of one module follow one another as it reads its parameters; computing starts behind the last.
    """
    moments = scene.trace.moments
    late = [race.second for race in races]
    return all(
        operation.lane is Lane.COMPUTE
        and moments[operation.moment].kind is Kind.HOLD
        and moments[operation.moment + 1].kind is Kind.HOLD
        and moments[operation.moment].label == moments[operation.moment + 1].label
        for operation in late
    )


def writes_beside(scene: Scene, races: list[Race]) -> bool:
    """What is computed meanwhile goes to other slots of the slab than the copy reads."""
    ends = {group: max(stop for g, _, stop in scene.slots.values() if g == group) for group, *_ in scene.slots.values()}
    for race in races:
        moment = scene.trace.moments[race.second.moment]
        name = moment.label.removesuffix(" gradient")
        if race.first.lane is not Lane.D2H or name not in scene.slots:
            return False
        group, start, _ = scene.slots[name]
        # Beginning a chunk zeroes its pads too, which are behind all slots.
        if start < ends[race.first.chunk.group] or ends[group] < ends[race.first.chunk.group]:
            return False
    return True


def is_the_first_layer(scene: Scene, races: list[Race]) -> bool:
    """The backward of the first layer holds its weights, and reads nothing of them: images want no gradient."""
    label = scene.trace.moments[min(race.second.moment for race in races)].label
    return (scene.model, label) == ("cnn", "stem backward")
