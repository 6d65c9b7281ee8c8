"""Does it fit, what does a step take, and if it does not fit, what is the smallest change that makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from chunkmem.errors import CapacityError
from chunkmem.estimate.floors import Floors, floors_of
from chunkmem.estimate.hardware import Hardware
from chunkmem.estimate.model import Model
from chunkmem.estimate.ranks import exchanged_nbytes, share_of
from chunkmem.estimate.rehearse import Rehearsal, Setting, rehearse
from chunkmem.plan.gaps import find_gaps
from chunkmem.plan.model import Plan
from chunkmem.plan.planner import PlanOptions, make_plan
from chunkmem.plan.simulate import simulate
from chunkmem.plan.timeline import Timeline
from chunkmem.trace.model import Trace
from chunkmem.types import Tier

UNLIMITED_NBYTES = 2**60
"""A HOST that nobody has said the size of."""


@dataclass(frozen=True)
class Question:
    """A model, a way to train it, and a machine."""

    model: Callable[[int], Model]
    """Returns the model with a batch of so many samples."""
    batch: int
    hardware: Hardware
    device_nbytes: int
    host_nbytes: int | None = None
    """None: as much as it takes."""
    dtype: torch.dtype = torch.float32
    checkpointing: bool = False
    world: int = 1
    chunk_numel: int | None = None
    options: PlanOptions = field(default_factory=PlanOptions)

    def rehearse(self) -> Rehearsal:
        """Return the step of one rank as if it were alone."""
        return rehearse(
            self.model(self.batch),
            Setting(
                dtype=self.dtype,
                checkpointing=self.checkpointing,
                chunk_numel=self.chunk_numel,
                device_nbytes=self.device_nbytes,
                flop_per_s=self.hardware.flop_rate(self.dtype),
                memory_Bps=self.hardware.memory_Bps,
            ),
        )


@dataclass(frozen=True)
class Need:
    """What DEVICE has to hold at least, if HOST takes everything that nobody uses."""

    nbytes: int
    moment: str
    """When it needs most."""


@dataclass(frozen=True)
class Change:
    """One thing to change so that it fits."""

    what: str
    """"device", "host", "batch", "checkpointing", "precision" or "world"; several joined by " + "."""
    options: tuple[str, ...]
    """Of the command line, to add or to replace: ``("--batch", "2")``."""
    question: Question
    """The question after the change; the answer to it is that it fits."""


@dataclass(frozen=True)
class Finding:
    """The answer, where it fits."""

    trace: Trace
    plan: Plan
    timeline: Timeline
    floors: Floors


def device_need(question: Question, rehearsal: Rehearsal) -> Need:
    """Return the smallest cap on DEVICE that a plan for one rank can have."""
    trace = _own(question, rehearsal)
    problem = find_gaps(trace, {moment.chunk.group: Tier.HOST for moment in trace.moments})
    beside = [moment.non_model_peak_nbytes for moment in trace.moments]
    sums = [chunks + others for chunks, others in zip(problem.required, beside, strict=True)]
    at = max(range(len(sums)), key=lambda i: (sums[i], -i))
    return Need(sums[at], str(trace.moments[at]))


def host_need(question: Question, rehearsal: Rehearsal) -> int:
    """Return the smallest cap on HOST, in bytes, that the planner finds a plan for on a DEVICE as large as asked about.

    Raises:
        CapacityError: DEVICE is too small whatever HOST has.
    """
    need = device_need(question, rehearsal)
    if need.nbytes > question.device_nbytes:
        raise CapacityError(
            f"{need.moment}: DEVICE needs {need.nbytes} bytes and has {question.device_nbytes}; raise it first",
            needed_nbytes=need.nbytes,
            cap_nbytes=question.device_nbytes,
        )
    host_nbytes = 1  # 0 would be one tier
    while True:
        try:
            find(replace(question, host_nbytes=host_nbytes), rehearsal)
        except CapacityError as error:
            host_nbytes = error.needed_nbytes
        else:
            return host_nbytes


def find(question: Question, rehearsal: Rehearsal) -> Finding:
    """Plan and time the step.

    Raises:
        CapacityError: it does not fit.
    """
    trace = _own(question, rehearsal)
    host_nbytes = UNLIMITED_NBYTES if question.host_nbytes is None else question.host_nbytes
    plan = make_plan(trace, question.hardware.machine(question.device_nbytes, host_nbytes), options=question.options)
    exchange_s = exchanged_nbytes(rehearsal.trace, question.world) / question.hardware.exchange_Bps(question.world)
    floors = floors_of(plan, trace, question.hardware, exchange_s=exchange_s)
    return Finding(trace, plan, simulate(plan, trace), floors)


def fits(question: Question, rehearsal: Rehearsal) -> bool:
    """Tell whether there is a plan."""
    try:
        find(question, rehearsal)
    except CapacityError:
        return False
    return True


def _own(question: Question, rehearsal: Rehearsal) -> Trace:
    return share_of(rehearsal.trace, question.world, slab_nbytes=rehearsal.layout.slab_nbytes)
