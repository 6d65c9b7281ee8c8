"""Numbers for loggers: of memory, of the last training step, of what was planned for it. Pure."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from chunkmem.data.memory import MemoryReport, TierReport
from chunkmem.data.types import TIERS
from chunkmem.plan.model import LANE_LINKS, LANES
from chunkmem.plan.timeline import StepFigures

_LINKS: Final = MappingProxyType({lane: f"{lane.value.replace('-', '_')}_bytes" for lane in LANE_LINKS})
NAMES: Final = frozenset(
    {
        *(f"memory/{tier.value}_{kind}bytes" for tier in TIERS for kind in ("", "step_peak_", "peak_", "cap_")),
        "memory/non_model_bytes",
        *(f"{of}/{link}" for of in ("total", "step") for link in _LINKS.values()),
        *(f"step/{name}" for name in ("seconds", "stall_seconds", "exchanged_bytes", "plan_misses")),
        *("step/copies_to_device", "step/copies_in_time"),
        *("plan/seconds", "plan/stall_seconds"),
        *("fp16/loss_scale", "fp16/skipped_steps"),
    }
)
"""Of all metrics that there may be."""


def metrics_of(
    memory: MemoryReport,
    step: StepFigures | None,
    predicted: StepFigures | None,
    *,
    scaled: tuple[float, int] | None = None,
) -> dict[str, float]:
    """Return metrics by name.

    Args:
        memory: where the bytes are.
        step: what happened in the last training step; None: nobody knows.
        predicted: what its plan says; None: there is none.
        scaled: in fp16 the loss scale, and how many steps were skipped.
    """
    tiers = memory.tiers
    found: dict[str, float] = {}
    for tier, report in tiers.items():
        found |= _of_tier(tier.value, report)
    found["memory/non_model_bytes"] = memory.non_model_nbytes
    for tier in [*tiers][1:]:
        found |= {f"total/{_LINKS[lane]}": memory.moved.by_lane[lane.value] for lane in LANES[tier]}
    if step is not None:
        found |= _of_step(step)
    if predicted is not None:
        found |= {"plan/seconds": predicted.step_s, "plan/stall_seconds": predicted.stall_s}
    if scaled is not None:
        found["fp16/loss_scale"], found["fp16/skipped_steps"] = scaled
    return found


def _of_tier(name: str, tier: TierReport) -> dict[str, float]:
    return {
        f"memory/{name}_bytes": tier.now_nbytes,
        f"memory/{name}_step_peak_bytes": tier.step_peak_nbytes,
        f"memory/{name}_peak_bytes": tier.peak_nbytes,
        f"memory/{name}_cap_bytes": tier.cap_nbytes,
    }


def _of_step(step: StepFigures) -> dict[str, float]:
    moved = step.moved_nbytes
    return {
        "step/seconds": step.step_s,
        "step/stall_seconds": step.stall_s,
        **{f"step/{name}": moved[lane] for lane, name in _LINKS.items() if lane in moved},
        "step/exchanged_bytes": step.exchanged_nbytes,
        "step/copies_to_device": step.fetched,
        "step/copies_in_time": step.prefetched,
        "step/plan_misses": step.plan_misses,
    }
