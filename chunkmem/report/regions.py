"""Which regions keep their activations on DEVICE, which offload them, and which recompute them: read off a step. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType

from chunkmem.plan.model import LINK_LANES, Copy, Plan
from chunkmem.plan.regions import Policy, RegionPolicy
from chunkmem.report.clock import recomputations
from chunkmem.trace.model import Kind, Trace
from chunkmem.types import ChunkId, Role

DONE: Mapping[Policy, str] = MappingProxyType(
    {Policy.KEEP: "kept", Policy.OFFLOAD: "offloaded", Policy.RECOMPUTE: "recomputed"}
)


def region_policies(plan: Plan, trace: Trace) -> tuple[RegionPolicy, ...]:
    """Return what a plan does with each call of a region, in the order of their forward.

    What a recomputed region keeps for that, and where it is, does not count; the activations are those it makes again.
    """
    found: dict[ChunkId, RegionPolicy] = {}
    latest: dict[str, ChunkId] = {}
    copied = _copied(plan)
    again_s = {stop: sum(m.duration_s for m in trace.moments[start:stop]) for start, stop in recomputations(trace)}
    for index, moment in enumerate(trace.moments):
        if moment.kind is not Kind.CREATE or moment.chunk.role is not Role.ACTIVATION:
            continue
        name, nbytes = _name(moment.label), trace.chunk_nbytes[moment.chunk]
        if moment.label.endswith(" backward"):
            recomputed = RegionPolicy(name, Policy.RECOMPUTE, nbytes, again_s.get(index, 0.0))
            found[latest.pop(name, moment.chunk)] = recomputed
            continue
        policy, seconds = Policy.KEEP, 0.0
        if moment.chunk in copied:
            policy, seconds = Policy.OFFLOAD, sum(plan.machine.links[link].copy_s(nbytes) for link in LINK_LANES)
        found[moment.chunk] = RegionPolicy(name, policy, nbytes, seconds)
        latest[name] = moment.chunk
    return tuple(found.values())


def region_names(trace: Trace) -> dict[ChunkId, str]:
    """Return by ACTIVATION chunk the region it belongs to."""
    return {
        moment.chunk: _name(moment.label)
        for moment in trace.moments
        if moment.kind is Kind.CREATE and moment.chunk.role is Role.ACTIVATION
    }


def chunk_names(plan: Plan, trace: Trace) -> dict[ChunkId, str]:
    """Return by ACTIVATION chunk its region, and what becomes of it: ``"blocks.0, offloaded"``."""
    names, copied = region_names(trace), _copied(plan)
    recomputed = {
        (_name(moment.label), moment.chunk)
        for moment in trace.moments
        if moment.kind is Kind.CREATE and moment.chunk in names and moment.label.endswith(" backward")
    }
    again = {name for name, _ in recomputed}
    found = {}
    for chunk, name in names.items():
        fate = DONE[Policy.OFFLOAD if chunk in copied else Policy.KEEP]
        if (name, chunk) in recomputed:
            fate = DONE[Policy.RECOMPUTE]
        elif name in again:
            fate = f"inputs, {fate}"
        found[chunk] = f"{name}, {fate}"
    return found


def alike(regions: Sequence[RegionPolicy]) -> Iterator[tuple[str, RegionPolicy]]:
    """Yield regions in a row of which the same becomes as one: ``"blocks.0-31"``, with bytes and seconds of all."""

    def key(region: RegionPolicy) -> tuple[str, Policy]:
        return re.sub(r"\d+$", "", region.name), region.policy

    for (stem, _), run in groupby(regions, key):
        row = list(run)
        first, last = row[0].name, row[-1].name
        name = first if len(row) == 1 or first == last else f"{first}-{last[len(stem) :]}"
        total = replace(row[0], nbytes=sum(r.nbytes for r in row), seconds=sum(r.seconds for r in row))
        yield name, total


def _copied(plan: Plan) -> set[ChunkId]:
    return {action.chunk for actions in plan.actions for action in actions if isinstance(action, Copy)}


def _name(label: str) -> str:
    """Return the region that a moment of its chunk names."""
    return label.rpartition(" ")[0]
