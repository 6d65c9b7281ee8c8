"""What the log tells of plans."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from chunkmem.data.trace import Mode
from chunkmem.plan.model import Plan
from chunkmem.plan.timeline import Timeline

LOG: Final = logging.getLogger("chunkmem.plan")


def log_planning(
    mode: Mode, why: str, *, took_s: float, before: Plan | None, after: Plan | None, step: Callable[[], Timeline | None]
) -> None:
    """Tell of a plan that was made.

    Args:
        mode: of the steps that follow it.
        why: it was made.
        took_s: how long that took.
        before: the plan until then; None: there was none.
        after: the plan from now on; nothing is told if it is None or `before`.
        step: returns what the plan predicts.
    """
    if after is None or after is before or not LOG.isEnabledFor(logging.INFO):
        return
    if before is not None and (after.actions, after.start) == (before.actions, before.start):
        LOG.info("%s step: planned again in %.3f s, as %s; the plan is the same", mode.value, took_s, why)
        return
    predicted = step()
    assert predicted is not None
    LOG.info(
        "%s step: planned in %.3f s, as %s; plan %s predicts %.4g s a step, of which %.4g s stalled",
        mode.value,
        took_s,
        why,
        after.name or "without a name",
        predicted.step_s,
        predicted.stall_s,
    )
