"""What a manager tells of memory and of steps."""

from __future__ import annotations

import os
from pathlib import Path

from chunkmem.assembly.runtime import Runtime
from chunkmem.data.errors import StateError
from chunkmem.data.memory import MemoryReport
from chunkmem.data.sizes import format_nbytes
from chunkmem.data.trace import Trace
from chunkmem.plan.model import Plan
from chunkmem.plan.timeline import Timeline
from chunkmem.report.metrics import metrics_of
from chunkmem.runtime.report import memory_report


class Reporting:
    """The methods of `ChunkManager` that tell what happened, and take what is known from earlier runs."""

    runtime: Runtime

    def __repr__(self) -> str:
        """Say in one line what it holds, and where."""
        runtime = self.runtime
        if runtime.memory.pager.closed is not None:
            return "ChunkManager(closed)"
        params = runtime.registry.parameters
        numel = sum(managed.shape.numel() for managed in params)
        held = f"{len(params)} parameters of {numel:,} elements in {len({m.group for m in params})} chunk groups"
        tiers = [
            f"{ledger.tier.name} {format_nbytes(ledger.total_nbytes)} of {format_nbytes(ledger.limit_nbytes)}"
            for ledger in runtime.tiers.ledgers
        ]
        ranks = [] if runtime.ranks.size == 1 else [f"rank {runtime.ranks.rank} of {runtime.ranks.size}"]
        state = "nothing recorded yet" if self.trace is None else "recorded" if self.plan is None else "planned"
        return f"ChunkManager({', '.join([held, *tiers, *ranks, state])})"

    def memory(self) -> MemoryReport:
        """Return bytes by tier and role, now and at the peak, and what has been moved. `str()` is a table."""
        sharing, units = self.runtime.sharding.shards, self.runtime.sharding.units
        return memory_report(
            self.runtime.tiers,
            self.runtime.memory.pager,
            traces=[] if units.any_stay else self.runtime.controller.known.traces,  # they hold more than they have to
            padding_nbytes=self.runtime.registry.padding_nbytes,
            exchange_nbytes=(0, 0) if sharing is None else sharing.buffered_nbytes,
            left_nbytes=self.runtime.modules.regions.left.nbytes,
        )

    def metrics(self) -> dict[str, float]:
        """Return plain numbers by name for wandb, TensorBoard or any logger; docs/timeline.md says what each one is.

        Those of steps are of the last training step, and are left out if it was neither recorded nor planned; those of
        DISK are there if there is one. On an accelerator this waits until that step has been computed, as `loss.item()`
        does. Over ranks each has its own.
        """
        controller, scaler = self.runtime.controller, self.runtime.scaler
        return metrics_of(
            self.memory(),
            controller.timelines.figures(),
            None if controller.known.predicted is None else controller.known.predicted.figures,
            scaled=None if scaler is None else (scaler.loss_scale, scaler.num_skipped),
        )

    @property
    def trace(self) -> Trace | None:
        """The training step as it was recorded; None before one was. Set one that was saved to spare the recording.

        Raises:
            TraceError: what is set is of another model or layout, or several ranks train together.
        """
        return self.runtime.controller.known.trace

    @trace.setter
    def trace(self, trace: Trace) -> None:
        self.runtime.require_open()
        self.runtime.controller.adopt_trace(trace)

    @property
    def plan(self) -> Plan | None:
        """The plan that training follows; None before there is one. Set one that was saved, after its trace.

        Raises:
            PlanError: what is set is of another trace or for other caps.
        """
        return self.runtime.controller.known.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self.runtime.require_open()
        self.runtime.controller.known.adopt_plan(plan)

    def timeline(self) -> Timeline | None:
        """Return what happened in the last step that is over; `str()` is one line. None before the first.

        Nothing is waited for but the step's own computation: copies and updates that are under way for the next step
        still are spans of no length at its end, and have their length when asked again later. Where all fits DEVICE,
        steps that are known are one span, without moments.
        """
        return self.runtime.controller.timelines.last()

    def record(self, directory: str | os.PathLike[str]) -> None:
        """Write a run directory: `trace.json`, `plan.json`, and the last training step as `timeline.json`.

        The directory is made if it is not there; files of an earlier run are replaced, each as a whole.

        Raises:
            StateError: there is no plan yet, or the directory cannot be made.
            TraceError, PlanError: a file cannot be written.
        """
        self.runtime.require_open()
        trace, plan, timeline = self.trace, self.plan, self.runtime.controller.timelines.last_training()
        if trace is None or plan is None or timeline is None:
            raise StateError("there is nothing to record yet: the first step is traced and the second one planned")
        folder = Path(directory)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StateError(f"{folder} cannot be made: {error.strerror}; name another directory") from None
        trace.save(folder / "trace.json")
        plan.save(folder / "plan.json")
        timeline.save(folder / "timeline.json")
