"""The iteration that runs, or ran last: a training step or an evaluation, and how it is served."""

from __future__ import annotations

from dataclasses import dataclass, field

from chunkmem.runtime.plan_executor import PlanExecutor
from chunkmem.runtime.policy import OnDemand
from chunkmem.runtime.step_log import StepLog
from chunkmem.steps.cached_plan import CachedPlan
from chunkmem.steps.plan_cache import Key
from chunkmem.trace.model import Mode
from chunkmem.tracing.recorder import Recorder
from chunkmem.tracing.watch import Watch


@dataclass(slots=True)
class Iteration:
    """At most one of `recorder` and `plan_executor` is set while it runs; with neither it is served on demand."""

    mode: Mode | None = None
    """None before the first one, and after one that has been learnt from."""
    key: Key = field(default_factory=Key)
    is_running: bool = False
    is_settled: bool = False
    """It is over, and has been learnt from."""
    is_prelude: bool = False
    """Parameters have been used outside of models, and no model has been called yet."""
    recorder: Recorder | None = None
    watch: Watch | None = None
    """Watches memory while it is recorded."""
    entry: CachedPlan | None = None
    """The trace and plan that it follows."""
    plan_executor: PlanExecutor | None = None
    """Follows the plan of `entry`."""
    on_demand: OnDemand | None = None
    """Serves it if it neither is recorded nor follows a plan."""
    step_log: StepLog | None = None
    is_excused: bool = False
    """Nothing is to be learnt from it."""
    has_compiled: bool = False
    """torch's compiler has worked in it."""
