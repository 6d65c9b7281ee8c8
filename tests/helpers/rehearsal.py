"""Plans to train by that are the same in every run: from one recorded step, with its times evened out."""

from __future__ import annotations

import functools
from dataclasses import replace

import chunkmem
from chunkmem.data.trace import Trace
from chunkmem.plan.candidate import PlanOptions
from chunkmem.plan.candidates import candidates
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.model import Plan
from tests.helpers.training import HOST_NBYTES, Chunked, Trainer, Variant, capped, footprint
from tests.helpers.zoo import ZooModel

_MOMENT_S = 1e-3
_MOMENTS_A_COPY = 2.0
"""Slow enough that a plan has to prefetch, and copies of both links and computing overlap."""


def cap_nbytes(case: ZooModel, variant: Variant, share: float) -> int:
    """Return a cap of `share` of the PARAM bytes, or the smallest that works if that is more."""
    sizes = footprint(case, variant)
    return max(sizes.required_nbytes, int(share * sizes.param_nbytes))


@functools.cache
def rehearsed(case: ZooModel, variant: Variant, device_nbytes: int) -> Trace:
    """Record one training step; every moment takes as long as any other."""
    with chunkmem.ChunkManager(capped(case, device_nbytes)) as manager:
        trainer = Trainer(case, variant, Chunked(manager))
        trainer.step()
        trainer.evaluate()  # which ends the record
        trace = manager.trace
    assert trace is not None
    return replace(trace, moments=tuple(replace(moment, duration_s=_MOMENT_S) for moment in trace.moments))


@functools.cache
def plans(case: ZooModel, variant: Variant, device_nbytes: int) -> tuple[Plan, ...]:
    """Every different plan that the planner tries, in its order."""
    Bps = case.slab_nbytes / (_MOMENTS_A_COPY * _MOMENT_S)
    machine = Machine(device_nbytes, HOST_NBYTES, links=host_links(h2d_Bps=Bps, d2h_Bps=Bps))
    found: dict[object, Plan] = {}
    for candidate in candidates(rehearsed(case, variant, device_nbytes), machine, options=PlanOptions()):
        found.setdefault((candidate.plan.start, candidate.plan.actions), candidate.plan)
    return tuple(found.values())
