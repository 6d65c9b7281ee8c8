"""A run directory as `ChunkManager.record` wrote it, read whole and checked: its three files belong together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from chunkmem.data.errors import PlanError, TraceError
from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import ChunkId, Tier
from chunkmem.plan.model import DIRECTIONS, Lane, Plan
from chunkmem.plan.simulate import simulate
from chunkmem.plan.timeline import Span, Timeline
from chunkmem.report.replay import ChunkHistory, replay

LANE_NAMES = {
    Lane.COMPUTE: "compute",
    **{lane: f"copies {direction}" for lane, direction in DIRECTIONS.items()},
    Lane.HOST_UPDATE: "updates on HOST",
    Lane.COLLECTIVE: "between ranks",
}
"""In the order in which they are drawn."""


@dataclass(frozen=True)
class Run:
    """One recorded step: what the program asked for, what was planned for it, and what came of it."""

    path: Path
    trace: Trace
    plan: Plan
    happened: Timeline
    predicted: Timeline
    """What the simulator says of the plan, with the speeds it was made for."""

    @property
    def name(self) -> str:
        """The directory's own name, also where it was given as a dot."""
        return os.path.basename(os.path.abspath(self.path)) or str(self.path)

    @cached_property
    def histories(self) -> dict[ChunkId, ChunkHistory]:
        """Where each chunk was, if the plan was followed."""
        return replay(self.plan, self.trace)

    @cached_property
    def measured_nbytes(self) -> list[int | None]:
        """Chunk bytes on DEVICE by moment, as they were; None where nobody wrote them down, or it never came."""
        nbytes, num_moments = self.happened.device_nbytes, len(self.trace.moments)
        if len(nbytes) == num_moments:
            return [*nbytes]
        computed, found = visits(self.happened), dict[int, int]()
        if len(computed) == len(nbytes):  # after a plan miss some moments never came
            found = {span.moment: n for span, n in zip(computed, nbytes, strict=True)}
        return [found.get(at) for at in range(num_moments)]


def load_run(path: Path) -> Run:
    """Return the run in a directory.

    Raises:
        TraceError, PlanError: there is no such directory, a file of it is missing or damaged, or they do not belong
            together; names the file and the next step.
    """
    advice = "give a directory that manager.record() wrote"
    try:
        is_there, is_directory = path.exists(), path.is_dir()
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}; {advice}") from None
    if not is_there:
        raise PlanError(f"{path} does not exist; {advice}")
    if not is_directory:
        raise PlanError(f"{path} is not a directory; {advice}")
    trace = Trace.load(path / "trace.json")
    plan = Plan.load(path / "plan.json")
    happened = Timeline.load(path / "timeline.json")
    if not trace.moments:
        raise TraceError(f"{path / 'trace.json'} has no moments, so there is nothing to report; record a step")
    if plan.trace_digest != trace.digest:
        raise PlanError(
            f"{path / 'plan.json'} was made from trace {plan.trace_digest}, and trace.json next to it is "
            f"{trace.digest}; record both at once with manager.record()"
        )
    try:
        predicted = simulate(plan, trace)
    except PlanError as error:
        raise PlanError(f"{path / 'plan.json'} cannot be followed: {error}") from None
    if why := _other_step(trace, happened):
        raise PlanError(
            f"{path / 'timeline.json'} is of another step than trace.json: {why}; call manager.record() right after a "
            "training step"
        )
    return Run(path, trace, plan, happened, predicted)


def label_of(span: Span, trace: Trace) -> str:
    """Return what a span is called; in a step that was recorded, and not followed, moments had no names yet."""
    return span.label or str(trace.moments[max(0, span.moment)])


def lane_of(span: Span, run: Run) -> Lane:
    """Return the lane a span is shown on: updates on HOST have one of their own, whichever thread made them."""
    moment = run.trace.moments[span.moment]
    is_update = span.lane is Lane.COMPUTE and moment.kind is Kind.UPDATE and not span.is_stall
    if is_update and run.plan.update_tiers.get(moment.chunk.group) is Tier.HOST:
        return Lane.HOST_UPDATE
    return span.lane


def visits(timeline: Timeline) -> list[Span]:
    """Return the spans of moments, in the order in which they were computed."""
    spans = [span for span in timeline.spans if span.lane is Lane.COMPUTE and not span.is_stall]
    return sorted(spans, key=lambda span: span.start_s)


def _other_step(trace: Trace, timeline: Timeline) -> str:
    """Return what shows that a timeline is not of the trace's step; empty if nothing does."""
    num_moments = len(trace.moments)
    for span in timeline.spans:
        # Copies for the step may have been issued before its first moment.
        if not -1 <= span.moment < num_moments:
            return f"it has a moment {span.moment}, and the trace has {num_moments}"
    for span in visits(timeline):
        if span.moment < 0:
            return "it computes before its first moment"
        moment = trace.moments[span.moment]
        if span.chunk not in (None, moment.chunk):
            return f"its moment {span.moment} is of {span.chunk}, and the trace's is of {moment.chunk}"
        if span.label not in ("", str(moment)):
            return f'its moment {span.moment} is "{span.label}", and the trace\'s is "{moment}"'
    strangers = {span.chunk for span in timeline.spans if span.chunk} - trace.chunk_nbytes.keys()
    if strangers:
        return f"it names {min(strangers, key=str)}, which the trace does not"
    if timeline.plan_misses:
        return ""
    num_seen = len(timeline.device_nbytes) or len({span.moment for span in visits(timeline)})
    if num_seen != num_moments:
        return f"it has {num_seen} moments, and the trace has {num_moments}"
    return ""
