"""Does it fit, what does a step take, and if it does not fit, what is the smallest change that makes it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from chunkmem.activations.plan_regions import choose_regions
from chunkmem.activations.shared_regions import kept_nbytes
from chunkmem.data.errors import CapacityError
from chunkmem.data.layout_pack import SLAB_FLOOR_NBYTES, SLABS_PER_CAP
from chunkmem.data.trace import Trace
from chunkmem.data.types import BELOW, PLACE, Role, Tier
from chunkmem.estimate.hardware import FASTER, SLOWER, Hardware
from chunkmem.estimate.model import Model
from chunkmem.estimate.needs import (
    DeviceNeed,
    LowerBounds,
    least_as_gateway,
    least_on_device,
    least_on_host,
    lower_bounds_of,
)
from chunkmem.estimate.rank_stage import RankStage, RankSteps, Step
from chunkmem.estimate.rehearse import Rehearsal, Setting, rehearse
from chunkmem.estimate.weightless import counted_memory
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.candidates import candidates
from chunkmem.plan.machine import Machine
from chunkmem.plan.model import Plan
from chunkmem.plan.planner import make_plan
from chunkmem.plan.simulate import simulate
from chunkmem.plan.timeline import Timeline
from chunkmem.ranks.exchange import Traffic
from chunkmem.report.regions import RegionPolicy, region_policies
from chunkmem.runtime.ledger import Ledger

UNLIMITED_NBYTES = 2**60
"""A HOST that nobody has said the size of."""
_PLANNED = PlanOptions()
_NUM_TRIED = 8
"""Ranks whose first steps are served on demand, those that own most."""


@dataclass(frozen=True, kw_only=True)
class Question(Setting):
    """A model, a way to train it, and a machine."""

    model: Callable[[int], Model]
    """Returns the model with a batch of so many samples."""
    batch: int
    host_nbytes: int | None = None
    """None: as much as it takes."""
    disk_nbytes: int = 0
    """Cap on DISK; 0: there is none."""
    is_accumulating: bool = False
    """`manager.accumulate(1)` is called, so that the first step knows that its backward is the last one, too."""
    rehearse: Callable[[Question], Rehearsal] = field(
        default_factory=lambda: made_once(rehearsed), repr=False, compare=False
    )
    """How a question's step is rehearsed; questions that differ from this one have it from it."""

    @property
    def name(self) -> str:
        """Of the model."""
        return self.model(self.batch).name

    @property
    def peers(self) -> Hardware:
        """The hardware as ranks see it that have the same part of the model."""
        return self.hardware.divided(self.mesh.tp)

    @property
    def rehearsal(self) -> Rehearsal:
        """The step of one rank, of whatever number of them."""
        return self.rehearse(self)

    def rehearsed_as(self, other: Question) -> Question:
        """Return this question, to be answered by the rehearsal of another one."""
        return replace(self, rehearse=lambda _: other.rehearsal)

    @property
    def below_nbytes(self) -> dict[Tier, int]:
        """The caps of those tiers below HOST that there are."""
        return {tier: nbytes for tier in BELOW if (nbytes := getattr(self, f"{tier.value}_nbytes"))}

    @property
    def total_nbytes(self) -> int:
        """The caps of all tiers together; HOST has one."""
        assert self.host_nbytes is not None
        return self.device_nbytes + self.host_nbytes + sum(self.below_nbytes.values())

    @property
    def room_nbytes(self) -> int:
        """Of the cap on DEVICE, what chunks may take."""
        beside_nbytes = self.rehearsal.activation_nbytes if self.hardware.is_accelerator else 0
        return max(1, self.device_nbytes - beside_nbytes)


def rehearsed(question: Question, *, kept: frozenset[int] = frozenset()) -> Rehearsal:
    """Rehearse a question's step; under "auto", all but `kept` is recomputed."""
    return rehearse(question.model(question.batch), question, kept=kept)


def made_once(rehearse: Callable[[Question], Rehearsal]) -> Callable[[Question], Rehearsal]:
    """Return what rehearses each question once; those that differ in what no rehearsal looks at are one."""
    made = functools.cache(rehearse)

    def rehearsal_of(question: Question) -> Rehearsal:
        device_nbytes = min(question.device_nbytes, SLABS_PER_CAP * SLAB_FLOOR_NBYTES)
        return made(
            replace(question, device_nbytes=device_nbytes, host_nbytes=None, disk_nbytes=0, is_accumulating=False)
        )

    return rehearsal_of


@dataclass(frozen=True)
class Finding:
    """The answer, where it fits: for the rank that owns most bytes."""

    question: Question
    trace: Trace
    plan: Plan
    timeline: Timeline
    lower_bounds: LowerBounds
    exchanged: Traffic
    on_host_nbytes: int
    """What modules that compute on HOST take there."""
    first_host_nbytes: int
    """What the first step needs on HOST, where gradients may wait for the optimizer's step."""
    across_nbytes: int
    """What a rank sends to other replicas, and receives from them; not in `exchanged`."""

    @property
    def step_s(self) -> float:
        """What a step takes on the hardware that is assumed."""
        return max(self.timeline.step_s, self.lower_bounds.network_s)

    @property
    def device_peak_nbytes(self) -> int:
        """Most bytes on DEVICE at a time, of chunks and of non-model data."""
        moments = zip(self.timeline.device_nbytes, self.trace.moments, strict=True)
        return max(chunks + moment.non_model_peak_nbytes for chunks, moment in moments)

    @property
    def host_peak_nbytes(self) -> int:
        """Most bytes on HOST at a time."""
        return self.timeline.peak_nbytes.get(Tier.HOST, 0) + self.on_host_nbytes

    @property
    def regions(self) -> tuple[RegionPolicy, ...]:
        """What becomes of activations that are managed."""
        return region_policies(self.plan, self.trace)


def device_need(question: Question) -> DeviceNeed:
    """Return the smallest cap on DEVICE under which a rank trains, if HOST takes everything that nobody uses."""
    return least_on_device(_lazy_steps(question), charges_non_model=question.hardware.is_accelerator)


def host_need(question: Question) -> int:
    """Return the smallest cap on HOST, in bytes, that the planner finds a plan for on a DEVICE as large as asked about.

    Raises:
        CapacityError: DEVICE is too small whatever HOST has.
    """
    return _raised(replace(question, host_nbytes=max(1, _least_on_host(question))), Tier.HOST)  # 0 would be one tier


def disk_need(question: Question) -> int | None:
    """Return a cap on DISK, in bytes, that makes it fit; None: none does, as HOST or DEVICE is too small for that."""
    try:
        # What a plan has on DISK if it has all the room it likes.
        disk_nbytes = require_plan(replace(question, disk_nbytes=UNLIMITED_NBYTES)).peak_nbytes[Tier.DISK]
    except CapacityError:
        return None
    return _raised(replace(question, disk_nbytes=max(1, disk_nbytes)), Tier.DISK)


def with_third_tier(question: Question) -> Iterator[Question]:
    """Yield the question with a DISK under HOST, if there is none and one makes it fit."""
    if question.host_nbytes and not question.disk_nbytes and (disk_nbytes := disk_need(question)) is not None:
        yield replace(question, disk_nbytes=disk_nbytes)


def below_raised(question: Question) -> Question:
    """Return the question with small caps on HOST and, where there is one, on DISK that work."""
    if not question.disk_nbytes:
        return replace(question, host_nbytes=host_need(question))
    if (disk_nbytes := disk_need(question)) is not None:
        return replace(question, disk_nbytes=disk_nbytes)
    host_nbytes = host_need(replace(question, disk_nbytes=UNLIMITED_NBYTES))
    return below_raised(replace(question, host_nbytes=host_nbytes))


def _raised(question: Question, tier: Tier) -> int:
    """Return the cap on a tier below DEVICE, raised until there is a plan. What DISK lacks, HOST may have."""
    cap, has_room = f"{tier.value}_nbytes", False
    while True:
        nbytes: int = getattr(question, cap)
        try:
            if not has_room:  # with a larger cap there is, too
                _require_steps(question)
                has_room = True
            _first_timeline(question)
        except CapacityError as error:
            if PLACE[error.tier] < PLACE[tier]:
                raise
            short_nbytes = max(1, error.needed_nbytes - error.cap_nbytes)
            caps: dict[str, Any] = {cap: error.needed_nbytes if error.tier is Tier.HOST else nbytes + short_nbytes}
            question = replace(question, **caps)
        else:
            return nbytes


def find(question: Question) -> Finding:
    """Plan and time the step.

    Raises:
        CapacityError: it does not fit.
    """
    _require_steps(question)
    step, plan, timeline = _planned(question)
    most_nbytes = max(step.exchanged.sent_nbytes, step.exchanged.received_nbytes)
    mesh, peers = question.mesh, question.peers
    exchange_s = most_nbytes / peers.exchange_Bps(mesh.shard)
    gradients = sum(nbytes for chunk, nbytes in step.trace.chunk_nbytes.items() if chunk.role is Role.GRAD)
    across_nbytes = int(mesh.across_share * question.sent_share * gradients)
    exchange_s += across_nbytes / peers.across_Bps(mesh.world)
    lower_bounds = lower_bounds_of(
        plan, step.trace, question.hardware, exchange_s=exchange_s, stalled_s=question.rehearsal.exchange_s
    )
    least, taken = _least_on_host(question), step.on_host_nbytes.total()
    return Finding(question, step.trace, plan, timeline, lower_bounds, step.exchanged, taken, least, across_nbytes)


def find_chosen(finding: Finding) -> Finding:
    """Return the step that training would choose, if it fits; given is one that recomputes all."""
    question = finding.question
    if question.rehearsal.step.regions and (kept := _kept(question)):
        with contextlib.suppress(CapacityError):
            return find(replace(question, rehearse=made_once(partial(rehearsed, kept=kept))))
    return finding


def step_range_s(finding: Finding) -> tuple[float, float]:
    """Return how long a step takes by the same plan on what else may have the hardware's name: `FASTER`, `SLOWER`."""
    question = finding.question

    def timed_s(factors: Mapping[str, float]) -> float:
        hardware = question.hardware.scaled(**factors)
        machine = _machine(replace(question, hardware=hardware))
        slowdown = question.hardware.eager_share / hardware.eager_share
        moments = tuple(replace(moment, duration_s=slowdown * moment.duration_s) for moment in finding.trace.moments)
        timeline = simulate(finding.plan, replace(finding.trace, moments=moments), machine=machine)
        return replace(finding, timeline=timeline).step_s

    return timed_s(FASTER), timed_s(SLOWER)


def fits(question: Question) -> bool:
    """Tell whether there is a plan."""
    if question.host_nbytes is not None and question.host_nbytes < _least_on_host(question):
        return False  # before the steps of several ranks are tried
    try:
        require_plan(question)
    except CapacityError:
        return False
    return True


def require_plan(question: Question) -> Timeline:
    """Return how a step goes by the first plan that there is, without looking for a better one.

    Raises:
        CapacityError: it does not fit.
    """
    _require_steps(question)
    return _first_timeline(question)


def _first_timeline(question: Question) -> Timeline:
    step = _lazy_steps(question).later
    with _on_host_counted(step):
        return next(candidates(step.trace, _machine(question, step), options=_PLANNED)).timeline


def _require_steps(question: Question) -> None:
    need = device_need(question)
    if need.nbytes > question.device_nbytes:
        raise CapacityError(
            f"{need.moment}: DEVICE needs {need.nbytes} bytes and has {question.device_nbytes}; raise it first",
            needed_nbytes=need.nbytes,
            cap_nbytes=question.device_nbytes,
        )
    require_room(question)


def _kept(question: Question) -> frozenset[int]:
    """Return the calls that are not recomputed, by number, chosen as in training: by a step that recomputes all."""
    trace = _lazy_steps(question).later.trace
    machine = _machine(question)
    sizes = partial(kept_nbytes, trace, {}, charges_non_model=machine.charges_non_model)
    try:
        choice = choose_regions(trace, machine, sizes, options=_PLANNED)
    except CapacityError:
        return frozenset()
    return frozenset(trace.regions[at].number for at in choice.kept)


def _steps(question: Question, device_nbytes: int | None = None) -> RankSteps:
    rehearsal, shards = question.rehearsal, question.mesh.shard
    return rehearsal.over(
        shards,
        rank=rehearsal.fullest_ranks(shards)[0],
        is_accelerator=question.hardware.is_accelerator,
        is_accumulating=question.is_accumulating,
        device_nbytes=device_nbytes or question.room_nbytes,
    )


def _lazy_steps(question: Question) -> RankSteps:
    """Return the steps of a rank that holds no unit longer than it has to."""
    steps = _steps(question)
    return _steps(question, 1) if steps.has_room else steps


def _least_on_host(question: Question) -> int:
    first, charges = _steps(question).first, question.hardware.is_accelerator
    least_nbytes = least_on_host(first.trace, device_nbytes=question.device_nbytes, charges_non_model=charges)
    if below_nbytes := sum(question.below_nbytes.values()):
        least_nbytes = min(least_nbytes, max(least_nbytes - below_nbytes, least_as_gateway(first.trace)))
    return least_nbytes + first.on_host_nbytes.total()


def _machine(question: Question, step: Step | None = None) -> Machine:
    """Return what plans are made for: a rank's caps, less what modules take that compute on HOST in `step`."""
    taken_nbytes = 0 if step is None else step.on_host_nbytes.total()
    host_nbytes = UNLIMITED_NBYTES if question.host_nbytes is None else question.host_nbytes
    return question.peers.machine(
        question.device_nbytes,
        max(0, host_nbytes - taken_nbytes),
        below_nbytes=question.below_nbytes,
        mesh=question.mesh,
        sent_share=question.sent_share,
    )


@contextlib.contextmanager
def _on_host_counted(step: Step) -> Iterator[None]:
    """Have errors about HOST count what modules take that compute there."""
    try:
        yield
    except CapacityError as error:
        if error.tier is Tier.HOST:
            error.needed_nbytes += step.on_host_nbytes.total()
            error.cap_nbytes += step.on_host_nbytes.total()
        raise


def require_room(question: Question) -> None:
    """Have the first steps, which no plan has been made for yet, served on demand under the caps asked about.

    Raises:
        CapacityError: they do not fit.
    """
    host_nbytes = question.host_nbytes
    if not host_nbytes:
        return  # everything finds room, or only a plan tells
    rehearsal, shards = question.rehearsal, question.mesh.shard
    below = {Tier.HOST: host_nbytes, **question.below_nbytes}
    # Ranks with equally many bytes differ in what lies where, so a few are looked at.
    for rank in rehearsal.fullest_ranks(shards)[:_NUM_TRIED]:
        device = Ledger(Tier.DEVICE, question.room_nbytes, question.device_nbytes)
        ledgers = [device, *(Ledger(tier, nbytes, nbytes) for tier, nbytes in below.items())]
        try:
            stage = RankStage(
                rehearsal.step,
                rank,
                shards,
                counted_memory(ledgers),
                is_accelerator=False,
                is_accumulating=question.is_accumulating,
                margin_use_ratio=_PLANNED.margin_use_ratio,
            )
            stage.step()
            stage.step()  # with the states that the first one has made
        except CapacityError as error:
            # All tiers together are too small. More of the last will do, unless HOST is smaller than what it has at a
            # time.
            tier = [*below][-1] if least_as_gateway(_steps(question).first.trace) <= host_nbytes else Tier.HOST
            where = f"rank {rank}: " if shards > 1 else ""
            raise CapacityError(
                f"{where}{error}",
                needed_nbytes=below[tier] + error.needed_nbytes - error.cap_nbytes,
                cap_nbytes=below[tier],
                tier=tier,
            ) from error


def trains_on_demand(question: Question) -> bool:
    """Tell whether steps run where HOST is too small for a plan: every access is served on demand, which is slower."""
    try:
        _require_steps(question)
    except CapacityError:
        return False
    return True


def _planned(question: Question) -> tuple[Step, Plan, Timeline]:
    """Plan the way that ranks keep: gathering ahead, if there is a plan for it."""

    def planned(step: Step) -> tuple[Step, Plan, Timeline]:
        with _on_host_counted(step):
            plan = make_plan(step.trace, _machine(question, step), options=_PLANNED)
        return step, plan, simulate(plan, step.trace)

    steps = _steps(question)
    if steps.has_room:
        with contextlib.suppress(CapacityError):
            return planned(steps.later)
    return planned(_lazy_steps(question).later)
