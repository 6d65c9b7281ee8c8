"""No copy, update or computing is without the order it needs; and every missing wait is found in a single run.

See [Note: Happens before]. COMPUTE is a lane of its own here, as on an accelerator.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chunkmem
from chunkmem.data.types import Tier
from chunkmem.optim.speculative import SpeculativeUpdater
from chunkmem.plan.model import Lane, Plan, Wait
from chunkmem.runtime.actions import PlanActions
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.copy_order import CopyOrder
from chunkmem.runtime.events import Event
from chunkmem.runtime.pool import Slab
from tests.cpu.test_precision import LOWERED
from tests.cpu.test_precision import chunked as chunked_low
from tests.cpu.test_precision import plain as plain_low
from tests.cpu.test_zoo import matrix
from tests.helpers.happens_before import HappensBefore
from tests.helpers.loops import LOOPS, WIDTH, Dropped, Loop, Side, mlp, trained
from tests.helpers.orders import Reading
from tests.helpers.overlapped import Run
from tests.helpers.rehearsal import cap_nbytes
from tests.helpers.scenes import FOLLOWED, Scene, Undisturbed, unread_until_covered
from tests.helpers.simulated import ClockedEvent, ClockedLanes, SimulatedAccelerator
from tests.helpers.spread import spread
from tests.helpers.training import (
    AMPLE_NBYTES,
    HOST_NBYTES,
    STEPS,
    VARIANTS,
    Trainer,
    Variant,
    assert_same,
    compute_device,
    train_plain,
)
from tests.helpers.vector_clocks import Actor
from tests.helpers.zoo import ZOO, ZooModel

pytestmark = pytest.mark.skipif(compute_device().type != "cpu", reason="the accelerator is simulated in RAM")


def nothing(*_: object, **__: object) -> None:
    """Do not wait."""


# The checker itself.


def slabs_of(checker: HappensBefore, *, capacity: int) -> Any:
    """Return a pool of DEVICE that a checker watches; entered, it makes every manager's pools."""
    from chunkmem.runtime import tiers
    from chunkmem.runtime.device import ComputeDevice
    from chunkmem.runtime.ledger import Ledger

    return tiers.DevicePool(Ledger(Tier.DEVICE, 1 << 20, 1 << 20), ComputeDevice.default(), capacity=capacity)


@pytest.mark.parametrize("waits", [False, True])
def test_new_memory_was_computed_in(waits: bool) -> None:
    """A copy to a slab that has just been allocated comes after what torch had in its memory before."""
    with HappensBefore() as checker:
        lanes = checker.lanes()
        slab = slabs_of(checker, capacity=0).alloc("param", 256)
        after = [lanes.compute_event()] if waits else []
        lanes.copy(Lane.H2D, [(slab.bytes, torch.zeros(256, dtype=torch.uint8))], after=after, label="fetch")
        assert bool(checker.races) is not waits


@pytest.mark.parametrize("waits", [False, True])
def test_freed_memory_is_computed_in(waits: bool) -> None:
    """A copy that reads a slab is over before torch's allocator may hand its memory out again."""
    with HappensBefore() as checker:
        lanes, pool = checker.lanes(), slabs_of(checker, capacity=1)
        slab, other = pool.alloc("param", 256), pool.alloc("param", 512)
        ready = [lanes.compute_event()]
        evicted = lanes.copy(Lane.D2H, [(torch.zeros(256, dtype=torch.uint8), slab.bytes)], after=ready, label="evict")
        slab.events = (evicted,) if waits else ()
        pool.free("param", slab)
        pool.free("param", other)  # one is kept, so the first one goes
        assert bool(checker.races) is not waits


# No race.

CAPS = {"smallest": 0.0, "roomy": 3.6}
"""Shares of the PARAM bytes; with 3.6 some groups are updated on DEVICE. Where all fits, nothing is copied."""


@dataclass(frozen=True)
class Setting:
    """How a model of the zoo is trained."""

    case: ZooModel
    variant: Variant
    cap: str = "smallest"
    precision: str = "fp32"
    overlap: bool = False

    def __str__(self) -> str:
        overlap = "overlap" if self.overlap else "no_overlap"
        return f"{self.case.name}-{self.variant.name}-{self.cap}-{self.precision}-{overlap}"

    @property
    def device_nbytes(self) -> int:
        if self.precision == "fp32":
            return cap_nbytes(self.case, self.variant, CAPS[self.cap])
        required_nbytes = chunked_low(self.case, self.variant, AMPLE_NBYTES, self.precision)[1]
        share_nbytes = cap_nbytes(self.case, self.variant, CAPS[self.cap])
        return required_nbytes if self.cap == "smallest" else share_nbytes

    @property
    def config(self) -> chunkmem.Config:
        return chunkmem.Config.from_dict(
            {
                "precision": self.precision,
                "memory": {"device": self.device_nbytes, "host": HOST_NBYTES},
                "default_chunk_size": self.case.chunk_numel * (1 if self.precision == "fp32" else 2),
                "client": {"opts": {"overlap_optimizer": self.overlap, "undo_log_ratio": 0.5}},
            }
        )


def train(setting: Setting) -> HappensBefore:
    """Train as plain PyTorch does, to the bit, and return what was seen of it."""
    config = setting.config
    low = setting.precision != "fp32"
    args = setting.case, setting.variant
    expected = plain_low(*args, setting.precision) if low else train_plain(*args)
    with HappensBefore() as checker, chunkmem.ChunkManager(config, make_lanes=checker.lanes) as manager:
        outcome = Trainer(*args, Undisturbed(manager)).run()
    assert_same(outcome, expected)
    return checker


def model(name: str) -> ZooModel:
    return next(case for case in ZOO if case.name == name)


PLAIN = VARIANTS[0]
ORDINARY = (
    Setting(model("gpt"), PLAIN, overlap=True),
    Setting(model("cnn"), PLAIN, cap="roomy"),
    Setting(model("loose"), VARIANTS[1], overlap=True),
    Setting(model("moe"), PLAIN, overlap=True),
    Setting(model("keyword"), PLAIN, precision="bf16", overlap=True),
    Setting(model("sliced"), PLAIN, precision="bf16", cap="roomy"),
)


def settings() -> list[Any]:
    found = [pytest.param(setting, id=str(setting)) for setting in ORDINARY]
    chosen = [(param.values[0], param.values[1]) for param in matrix() if pytest.mark.full not in param.marks]
    for case, variant in chosen:
        for precision in ("fp32", "bf16") if case in LOWERED else ("fp32",):
            for cap in CAPS:
                for overlap in (False, True):
                    setting = Setting(case, variant, cap, precision, overlap)
                    if setting not in ORDINARY:
                        found.append(pytest.param(setting, id=str(setting), marks=pytest.mark.full))
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("setting", settings())
def test_no_race_in_the_zoo(setting: Setting) -> None:
    train(setting).assert_ordered()


def run_loop(checker: HappensBefore, loop: Loop, *, num_chunks: float = 5.5, **options: Any) -> None:
    """Train in chunks, with what computes there late: the losses are those of plain PyTorch."""
    sides = Side(None), Side(num_chunks, lanes=checker.lanes, **options)
    for side in sides:
        torch.manual_seed(0)
        going = loop(side)
        for _ in range(14):
            next(going)
    assert sides[0].losses == sides[1].losses


def accumulated_layer_drop(side: Side) -> Iterator[None]:
    """Two micro-batches, several blocks a chunk: gradients leave and come back between them, if there are any."""
    with side.building():
        blocks = [nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)) for _ in range(8)]
        model = Dropped(0.1, blocks)
    optimizer = side.optimizer(model)
    while True:
        model(side.batch()).square().mean().backward()
        side.step(model(side.batch()).square().mean(), optimizer)
        yield


def opts(**values: Any) -> dict[str, Any]:
    return {"client": {"opts": values | {"undo_log_ratio": 0.5}}}


ON_HOST: dict[str, Any] = {"optimizer": {"params": {"use_hybrid_adam": False}}, **opts(overlap_optimizer=True)}


def leave_out(checker: HappensBefore) -> None:
    """What gradients have on DEVICE and HOST is not what the plan has, and slabs are used again."""
    run_loop(checker, accumulated_layer_drop, num_chunks=4.5, **opts(mem_cache_capacity=8, overlap_optimizer=True))


LEAVING_OUT: dict[str, Callable[[HappensBefore], None]] = {
    "micro-batches of LayerDrop": leave_out,
    "LayerDrop": lambda checker: run_loop(checker, LOOPS["LayerDrop, shared chunks"], **ON_HOST),
    "experts": lambda checker: run_loop(checker, LOOPS["experts"], **ON_HOST),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LEAVING_OUT)
def test_no_race_where_slabs_order_what_is_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    busy, found = CopyOrder._busy, []

    def noted(self: CopyOrder, *chunks: Chunk, tiers: Any) -> list[Any]:
        events = busy(self, *chunks, tiers=tiers)
        found.extend(events)
        return events

    monkeypatch.setattr(CopyOrder, "_busy", noted)
    with HappensBefore() as checker:
        LEAVING_OUT[name](checker)
    checker.assert_ordered()
    assert found, "every step had all of its plan"


def in_an_ordinary_run(*names: str) -> list[Any]:
    """Return all loops: of these an ordinary run has no others."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.full) for name in LOOPS]


ALL_FROZEN = ("LoRA", "LoRA, micro-batches")
"""Six weights that nothing trains are all that these loops have in chunks."""


@pytest.mark.parametrize("name", in_an_ordinary_run("one in three is given up"))
def test_no_race_where_host_is_too_small(name: str, tmp_path: Path) -> None:
    """An update that did not come was to come between a read of DISK and a write: these ran side by side.

    DISK_READ    ─ states of group 1 ──┐
    HOST_UPDATE                        └ (update of group 1) ──┐
    DISK_WRITE                                                 └ states of group 1 ─

    Weights that nothing trains are on DISK once the model is built, and never written again.
    """
    num_chunks = 2.5 if name in ALL_FROZEN else 5.5  # on DEVICE and HOST each: fewer than the loop has
    with HappensBefore() as checker:
        run_loop(checker, LOOPS[name], num_chunks=num_chunks, disk=tmp_path, **ON_HOST)
    checker.assert_ordered()
    assert checker.was_active(Actor.DISK_READ)
    assert checker.was_active(Actor.DISK_WRITE) is (name not in ALL_FROZEN)


class Towers(nn.Module):
    """Two, with a few layers in common. The second one computes on a stream of its own, overlapped with the first."""

    def __init__(self, checker: HappensBefore | None) -> None:
        super().__init__()
        self.first, self.common, self.second = mlp(2), mlp(2), mlp(2)
        self.checker = checker

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forked = None if self.checker is None else self.checker.clocks.now(Actor.COMPUTE)
        first = self.common(self.first(x))
        with contextlib.nullcontext() if forked is None else self.checker.second_stream(forked):
            second = self.common(self.second(x))
        return first * second


def two_streams(checker: HappensBefore) -> None:
    towers = trained(lambda side: Towers(None if side.manager is None else checker))
    run_loop(checker, towers, **opts(mem_cache_capacity=8))


def test_no_race_on_several_streams_of_the_program() -> None:
    """A plan's waits were put on the stream that was current; another one read the same weights before they had come.

    H2D       ─ weights ─┐
    COMPUTE              └ first tower ...
    COMPUTE_2   second tower, with some of the weights of the first
    """
    with HappensBefore() as checker:
        two_streams(checker)
    checker.assert_ordered()
    assert checker.was_active(Actor.COMPUTE_2)


@pytest.mark.full
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("on_host", [False, True])
def test_no_race_in_loops_whose_steps_differ(name: str, on_host: bool) -> None:
    with HappensBefore() as checker:
        run_loop(checker, LOOPS[name], **(ON_HOST if on_host else opts(mem_cache_capacity=8, overlap_optimizer=True)))
    checker.assert_ordered()


def train_with_calls(*, checker: HappensBefore | None, overlap: bool, precision: str) -> Run:
    """What users do between backward and step, and between steps; every fourth step clips its gradients."""
    run = Run(overlap=overlap, precision=precision, max_norm=0.5, make_lanes=checker and checker.lanes)
    weight = run.model[0].up.weight
    for seed in range(12):
        run.backward(seed, factor=100.0 if seed % 4 == 3 else 0.01)
        if seed % 3 == 1:
            run.manager.state_dict()
        run.optimizer.step()
        run.optimizer.zero_grad()
        if seed % 3 == 0:
            with run.manager.gather(run.model[0]), torch.no_grad():
                weight.mul_(0.5)
        elif seed % 3 == 1:
            run.optimizer.state_dict()
            run.manager.state_dict()
        else:
            run.model.load_state_dict(run.manager.state_dict())
    return run


@pytest.mark.few(1)
@spread(precision=("fp32", "bf16"), overlap=(False, True))
def test_no_race_around_gather_and_state_dicts(precision: str, overlap: bool) -> None:
    with HappensBefore() as checker:
        seen = train_with_calls(checker=checker, overlap=overlap, precision=precision).everything()
    checker.assert_ordered()
    expected = train_with_calls(checker=None, overlap=False, precision=precision).everything()
    assert seen.keys() == expected.keys()
    assert [key for key, value in expected.items() if not torch.equal(seen[key], value)] == []


def clip(run: Run) -> None:
    run.optimizer.clip_grad_norm_(1e-3)


def scale_gradients(run: Run) -> None:
    for param in run.model.parameters():
        param.grad.mul_(0.5)


def copy_gradients(run: Run) -> list[torch.Tensor]:
    return [param.grad.clone() for param in run.model.parameters()]


def norms_of_gradients(run: Run) -> list[torch.Tensor]:
    return [param.grad.norm() for param in run.model.parameters()]


def use_gradients(
    checker: HappensBefore, between: Callable[[Run], object] = norms_of_gradients, *, overlap: bool = True, **keys: Any
) -> None:
    run = Run(overlap=overlap, make_lanes=checker.lanes, **keys)
    for seed in range(5):
        run.backward(seed)
        between(run)
        run.optimizer.step()
        run.optimizer.zero_grad()


@pytest.mark.few(2)
@spread(
    between=(nothing, clip, scale_gradients, copy_gradients, norms_of_gradients),
    way=(("fp32", "overlapped"), ("bf16", "in the step")),
)
def test_gradients_used_before_the_step_are_not_overwritten_meanwhile(
    between: Callable[[Run], object], way: tuple[str, str]
) -> None:
    """No moment of a plan tells of that use, so none of its waits did: weights were prefetched to the same memory.

    COMPUTE  ... last gradient ──┐              clip: writes the slab of a gradient
    H2D                          └ fetch weights to that slab, which the plan has freed
    """
    with HappensBefore() as checker:
        use_gradients(
            checker,
            between,
            max_norm=1e-3 if between is nothing else 0.0,
            precision=way[0],
            overlap=way[1] == "overlapped",
        )
    checker.assert_ordered()


# Mutants.

TIGHT = Setting(model("cnn"), PLAIN)
BESIDE = replace(TIGHT, overlap=True)


def of_updates(wait: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a wait that does nothing for updates."""
    return lambda event: None if event.actor is Actor.HOST_UPDATE else wait(event)


def without_events_of_slabs(alloc: Callable[..., None]) -> Callable[..., None]:
    def mutant(self: PlanActions, chunk: Chunk, tier: Tier) -> None:
        before = list(self._order._pending[Lane.H2D])
        alloc(self, chunk, tier)
        self._order._pending[Lane.H2D] = before

    return mutant


def nothing_followed(self: SimulatedAccelerator) -> Any:
    self._streams = [self._current_stream()]
    return self._streams[-1]


def wrong_guesses(checker: HappensBefore) -> None:
    """The plan begins all updates ahead, but too many have been in vain: the step makes them."""
    run = Run(overlap=True, make_lanes=checker.lanes, never_off=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that guesses are wrong is said
        for seed in range(12):
            run.backward(seed)
            run.optimizer.param_groups[0]["lr"] = 1e-3 * (1 + seed % 7)
            run.optimizer.step()
            run.optimizer.zero_grad()


def draining_alone(_: object) -> Callable[[PlanActions], None]:
    return lambda actions: actions._order.lanes.drain()


@dataclass(frozen=True)
class Mutant:
    """Something that waits, what it is replaced by, and where that has to be found."""

    name: str
    owner: type
    method: str
    instead: Callable[[Any], Any]
    """Given what there was."""
    run: Setting | Callable[[HappensBefore], None] = TIGHT

    def __str__(self) -> str:
        return self.name


MUTANTS = (
    Mutant("copies are not held back", ClockedLanes, "_hold_back", lambda _: nothing),
    Mutant("copies are not held back, overlap", ClockedLanes, "_hold_back", lambda _: nothing, BESIDE),
    Mutant("new slabs are not waited for", PlanActions, "_alloc", without_events_of_slabs),
    Mutant("updates do not wait", CopyOrder, "wait_for_update", lambda _: nothing),
    Mutant("updates left to the step do not wait", CopyOrder, "_update_comes_after", lambda _: nothing, wrong_guesses),
    Mutant("computing does not wait", CopyOrder, "_compute_waits", lambda _: nothing),
    Mutant("lanes do not wait", CopyOrder, "_lane_waits", lambda _: nothing),
    Mutant("slabs are never busy", CopyOrder, "_busy", lambda _: lambda *_, **__: [], leave_out),
    Mutant("the executor does not drain", PlanActions, "drain", lambda _: nothing),
    Mutant("uses outside of a plan are not waited for", PlanActions, "drain", draining_alone, use_gradients),
    Mutant("the lanes do not drain", ClockedLanes, "drain", lambda _: nothing),
    Mutant("slabs do not rest", Slab, "rest", lambda _: nothing),
    Mutant("nobody waits for updates", ClockedEvent, "wait", of_updates, BESIDE),
    Mutant("streams are not followed", SimulatedAccelerator, "current_stream", lambda _: nothing_followed, two_streams),
    Mutant("speculative updates begin at once", CopyOrder, "_update_comes_after", lambda _: nothing, BESIDE),
)


@pytest.mark.few(1)
@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a single run, which has the right bits: all is done in the order in which it is issued."""
    assert isinstance(mutant.run, Setting) or not found_in(mutant.run), "as it is, nothing is found"
    if isinstance(mutant.run, Setting):
        train(mutant.run).assert_ordered()
    monkeypatch.setattr(mutant.owner, mutant.method, mutant.instead(getattr(mutant.owner, mutant.method)))
    assert train(mutant.run).races if isinstance(mutant.run, Setting) else found_in(mutant.run)


def found_in(run: Callable[[HappensBefore], None]) -> Any:
    with HappensBefore() as checker:
        run(checker)
    return checker.kinds()


def test_an_update_that_is_taken_over_has_waited_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every update was begun ahead, that `_wait_for_update` does nothing is no mutant that can be found.

    HOST_UPDATE   ... the same copies ── update of the group ──┐
    HOST          (_wait_for_update)              take_over ───┴── touches the group
    """
    begun: dict[int, list[Event]] = {}
    skipped: list[Event] = []
    begin, take_over = SpeculativeUpdater.begin, SpeculativeUpdater.take_over

    def begin_and_note(self: SpeculativeUpdater, group: int, after: Sequence[Event]) -> Event | None:
        event = begin(self, group, after)
        if event is not None:
            begun[group] = list(after)
        return event

    def skip(self: CopyOrder) -> None:
        handed_over = [event for after in begun.values() for event in after]
        skipped.extend(event for _, event in self._update_after if not event.done())
        assert all(event.done() or event in handed_over for _, event in self._update_after)
        self._update_after, self._ahead_after = [], []

    def take_over_and_look(self: SpeculativeUpdater, group: int, *args: Any) -> bool:
        was = take_over(self, group, *args)
        assert all(event.done() for event in begun.pop(group, ())), "HOST goes on and does not know of what it skipped"
        return was

    monkeypatch.setattr(CopyOrder, "wait_for_update", skip)
    monkeypatch.setattr(SpeculativeUpdater, "begin", begin_and_note)
    monkeypatch.setattr(SpeculativeUpdater, "take_over", take_over_and_look)
    train(BESIDE).assert_ordered()
    assert skipped


# Every Wait of a plan.


def follow(scene: Scene, plan: Plan, *, to_the_end: bool = False) -> HappensBefore:
    """Train by a plan that no simulator has seen, or until something is found. Freed slabs are kept for the next chunk.

    Where they are not, a slab waits for its copies when it is given back, and a new one for COMPUTE: most waits of a
    plan on D2H, and those of H2D on COMPUTE, are implied there.
    """
    memory = {"device": scene.device_nbytes, "host": HOST_NBYTES}
    keys = {"memory": memory, "default_chunk_size": scene.case.chunk_numel, **opts(mem_cache_capacity=1000)}
    config = chunkmem.Config.from_dict(keys)
    lanes = HappensBefore()
    with lanes as checker, chunkmem.ChunkManager(config, machine=plan.machine, make_lanes=lanes.lanes) as manager:
        trainer = Trainer(scene.case, scene.variant, Undisturbed(manager))
        manager.trace = scene.trace
        manager.runtime.controller.known.training.adopt(scene.trace, plan)
        for step in range(STEPS):
            trainer.step()
            timeline = manager.timeline()
            assert timeline is not None
            assert step == 0 or timeline.plan_misses == 0
            if checker.races and not to_the_end:
                break
    return checker


SCENES = [
    Scene("loose", "plain", 0.4),
    Scene("cnn", "plain", 1.6),
    *(
        pytest.param(scene, marks=pytest.mark.full, id=str(scene))
        for scene in (
            Scene("cnn", "plain", 0.4),
            Scene("cnn", "plain", 3.6),
            Scene("loose", "micro_batches", 3.6),
            Scene("lstm", "plain", 1.6),
            Scene("gpt", "plain", 1.6),
        )
    ),
]


def is_on_host_updates(action: object) -> bool:
    return isinstance(action, Wait) and action.on is Lane.HOST_UPDATE


@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_no_wait_on_host_updates_is_needed(scene: Scene) -> None:
    """HOST issues a copy once it has made the update, or taken it over: all of them may go at once."""
    lists = [tuple(action for action in actions if not is_on_host_updates(action)) for actions in scene.plan.actions]
    assert sum(map(len, lists)) < sum(map(len, scene.plan.actions))
    follow(scene, replace(scene.plan, actions=tuple(lists))).assert_ordered()


@pytest.mark.full
@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_every_other_wait_that_is_removed_is_found(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it is implied: a slab that gives way to one of another size waits for its copy, a new one for COMPUTE.

    What is implied is found if slabs do not wait either: there is a race more than with the plan as it is. A few are
    for what nobody reads before another one covers it.
    """
    follow(scene, scene.plan).assert_ordered()
    removed = [(name, plan) for name, plan in scene.waits() if not name.endswith(f"on {Lane.HOST_UPDATE.value}")]
    unfound = [(name, plan) for name, plan in removed if not follow(scene, plan).races]
    assert len(unfound) < 0.25 * len(removed), [name for name, _ in unfound]
    monkeypatch.setattr(Slab, "rest", nothing)
    monkeypatch.setattr(PlanActions, "_alloc", without_events_of_slabs(PlanActions._alloc))
    implied = follow(scene, scene.plan, to_the_end=True).kinds()
    left = [(name, plan) for name, plan in unfound if not follow(scene, plan, to_the_end=True).kinds() - implied]
    races = {name: Reading(plan, scene.trace, iterations=FOLLOWED).races for name, plan in left}
    assert [name for name, found in races.items() if not unread_until_covered(scene, found)] == []
