"""What no schedule of a step can beat, from the rates of this machine and the plan that was followed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.gpu.work import Work
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.estimate.hardware import HARDWARE
from chunkmem.estimate.needs import lower_bounds_of

FLOP_PER_PARAM_AND_TOKEN = 8
"""Forward 2, forward again while blocks are recomputed 2, backward 4. Attention's own products are left out."""
UPDATE_NBYTES = 28
"""An update reads and writes so much for each parameter."""


def bounds_of_step(manager: Any, work: Work, speeds: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return max(compute, link, host) + tail in seconds, and each of them; None if no plan was followed.

    The tail is what cannot hide behind backward, because backward is over: the last chunk's gradients on their way to
    the host, and their update there. Which chunk is last is the plan's affair, so it is taken to be the smallest.
    """
    plan, trace = manager.plan, manager.trace
    if plan is None or trace is None:
        return None
    rates = {name: speeds[name] for name in ("link_Bps", "duplex_Bps", "host_memory_Bps", "flop_per_s", "memory_Bps")}
    found = lower_bounds_of(plan, trace, replace(HARDWARE[speeds["hardware"]], **rates))
    on_host = [group for group, tier in plan.update_tiers.items() if tier is Tier.HOST]
    numel_of = {group: trace.chunk_nbytes.get(ChunkId(Role("exp_avg"), group), 0) // 4 for group in plan.update_tiers}
    on_device_numel = sum(numel for group, numel in numel_of.items() if group not in set(on_host))
    compute_s = FLOP_PER_PARAM_AND_TOKEN * work.size.num_params * work.tokens / rates["flop_per_s"]
    compute_s += on_device_numel * UPDATE_NBYTES / rates["memory_Bps"]
    smallest = min((group for group in on_host), key=lambda group: numel_of[group], default=None)
    tail_s = 0.0
    if smallest is not None:
        grad_nbytes = trace.chunk_nbytes.get(ChunkId(Role.GRAD, smallest), 0)
        update_s = numel_of[smallest] * UPDATE_NBYTES / rates["host_memory_Bps"]
        tail_s = grad_nbytes / rates["link_Bps"] + update_s
    parts = {"compute_s": compute_s, "link_s": found.link_s, "host_s": found.host_memory_s}
    return {
        **parts,
        "tail_s": tail_s,
        "floor_s": max(parts.values()) + tail_s,
        "binding": max(parts, key=lambda name: parts[name]).removesuffix("_s"),
        "assumed": list(speeds.get("assumed", ())),
    }
