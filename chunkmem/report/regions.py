"""Which regions keep their activations on DEVICE, offload or recompute them: read off a planned step. Pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType

from chunkmem.plan.model import Copy, Plan
from chunkmem.report.clock import recomputations
from chunkmem.trace.activations import Content, activation_contents
from chunkmem.trace.model import Kind, Trace
from chunkmem.types import DEVICE_LINKS, ChunkId


class Policy(enum.Enum):
    """What becomes of a region's activations between forward and backward."""

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class RegionPolicy:
    """What becomes of one region's activations."""

    name: str
    policy: Policy
    nbytes: int
    """Of activations."""
    seconds: float
    """Of computing again, or of copying to HOST and back; 0 if kept."""


DONE: Mapping[Policy, str] = MappingProxyType(
    {Policy.KEEP: "kept", Policy.OFFLOAD: "offloaded", Policy.RECOMPUTE: "recomputed"}
)


def region_policies(plan: Plan, trace: Trace) -> tuple[RegionPolicy, ...]:
    """Return what a plan does with each call of a region, in the order of their forward.

    What a recomputed region keeps for that, and where it is, does not count; the activations are those it makes again.
    """
    found: dict[ChunkId, RegionPolicy] = {}
    inputs: dict[str, list[ChunkId]] = {}
    copied = _copied(plan)
    again_s = {stop: sum(m.duration_s for m in trace.moments[start:stop]) for start, stop in recomputations(trace)}
    begins = {m.chunk: at for at, m in enumerate(trace.moments) if m.kind is Kind.CREATE}
    for chunk, held in activation_contents(trace).items():
        nbytes, policy, seconds = trace.chunk_nbytes[chunk], Policy.KEEP, 0.0
        if held.content is Content.RECOMPUTED:
            policy, seconds = Policy.RECOMPUTE, again_s.get(begins[chunk], 0.0)
        elif chunk in copied:
            policy, seconds = Policy.OFFLOAD, sum(plan.machine.links[link].copy_s(nbytes) for link in DEVICE_LINKS)
        if held.content is Content.INPUTS:
            inputs.setdefault(held.region, []).append(chunk)
        # In the place of its inputs, those of the last call first, as backward goes.
        of_inputs = inputs.get(held.region) if held.content is Content.RECOMPUTED else None
        found[of_inputs.pop() if of_inputs else chunk] = RegionPolicy(held.region, policy, nbytes, seconds)
    first = _first_moments(trace)
    return tuple(sorted(found.values(), key=lambda region: first.get(region.name, 0)))


def _first_moments(trace: Trace) -> dict[str, int]:
    """Return the first moment of each module, those around it included."""
    found: dict[str, int] = {}
    for index, moment in enumerate(trace.moments):
        path = moment.label.partition(" ")[0].split(".")
        for depth in range(len(path)):
            found.setdefault(".".join(path[: depth + 1]), index)
    return found


def region_names(trace: Trace) -> dict[ChunkId, str]:
    """Return by ACTIVATION chunk the region it belongs to."""
    return {chunk: held.region for chunk, held in activation_contents(trace).items()}


def chunk_names(plan: Plan, trace: Trace) -> dict[ChunkId, str]:
    """Return by ACTIVATION chunk its region, and what becomes of it: ``"blocks.0, offloaded"``."""
    copied, found = _copied(plan), {}
    for chunk, held in activation_contents(trace).items():
        fate = DONE[Policy.OFFLOAD if chunk in copied else Policy.KEEP]
        if held.content is Content.RECOMPUTED:
            fate = DONE[Policy.RECOMPUTE]
        elif held.content is Content.INPUTS:
            fate = f"inputs, {fate}"
        found[chunk] = f"{held.region}, {fate}"
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
