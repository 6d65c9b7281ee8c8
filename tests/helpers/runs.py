"""Run directories made by arithmetic, for what reads them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from chunkmem.data.trace import Trace
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.planner import make_plan
from chunkmem.plan.simulate import simulate
from chunkmem.plan.timeline import Span, Timeline
from chunkmem.report.run import Run
from tests.helpers.traces import training_trace

MIB = 2**20


def machine_of(
    num_slabs: int, *, Bps: float = 3e9, host_slabs: int = 10**4, charges_non_model: bool = False, nbytes: int = MIB
) -> Machine:
    """Return an accelerator with room for this many chunks, whose host runs ahead of it."""
    return Machine(
        device_nbytes=num_slabs * nbytes,
        host_nbytes=host_slabs * nbytes,
        links=host_links(h2d_Bps=Bps, d2h_Bps=Bps, latency_s=20e-6),
        device_update_Bps=40e9,
        host_update_Bps=10e9,
        charges_non_model=charges_non_model,
        one_processor=False,
    )


def slower(timeline: Timeline, factor: float) -> Timeline:
    """Return what happened, if it was as predicted but for everything taking longer."""

    def stretched(span: Span) -> Span:
        return replace(span, start_s=factor * span.start_s, end_s=factor * span.end_s)

    return replace(timeline, step_s=factor * timeline.step_s, spans=tuple(map(stretched, timeline.spans)))


def make_run(
    path: Path,
    *,
    num_groups: int = 6,
    modules_per_group: int = 2,
    num_slabs: int = 4,
    Bps: float = 3e9,
    trace: Trace | None = None,
    factor: float = 1.25,
    activation_nbytes: int = 0,
) -> Run:
    """Write a run directory of a deep model's step, and return what is in it.

    Args:
        num_slabs: chunks that fit on DEVICE.
        Bps: of each link; a slow one makes stalls.
        factor: how much longer everything took than predicted.
    """
    if trace is None:
        trace = training_trace(
            num_groups, MIB, modules_per_group=modules_per_group, activation_nbytes=activation_nbytes
        )
    plan = make_plan(trace, machine_of(num_slabs, Bps=Bps))
    predicted = simulate(plan, trace)
    run = Run(path, trace, plan, slower(predicted, factor), predicted)
    path.mkdir(parents=True, exist_ok=True)
    trace.save(path / "trace.json")
    plan.save(path / "plan.json")
    run.happened.save(path / "timeline.json")
    return run
