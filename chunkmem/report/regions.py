"""Which regions keep their activations on DEVICE, offload or recompute them: read off a planned step. Pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

from chunkmem.data.activations import Content, activation_contents
from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import DEVICE_LINKS, ChunkId
from chunkmem.plan.model import Copy, Plan
from chunkmem.report.clock import recomputations


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
    policies = _policies(plan, trace)
    again_s = {stop: sum(m.duration_s for m in trace.moments[start:stop]) for start, stop in recomputations(trace)}
    begins = {m.chunk: at for at, m in enumerate(trace.moments) if m.kind is Kind.CREATE}
    for chunk, held in activation_contents(trace).items():
        nbytes, policy, seconds, place = trace.chunk_nbytes[chunk], policies[chunk], 0.0, chunk
        if held.content is Content.INPUTS:
            inputs.setdefault(held.region, []).append(chunk)
        if policy is Policy.RECOMPUTE:
            seconds = again_s.get(begins[chunk], 0.0)
            # In the place of its inputs, those of the last call first, as backward goes.
            if of_inputs := inputs.get(held.region):
                place = of_inputs.pop()
        elif policy is Policy.OFFLOAD:
            seconds = sum(plan.machine.links[link].copy_s(nbytes) for link in DEVICE_LINKS)
        found[place] = RegionPolicy(held.region, policy, nbytes, seconds)
    return tuple(sorted(found.values(), key=lambda region: _first_moment(trace, region.name)))


def region_data(region: RegionPolicy) -> dict[str, Any]:
    """Return one as JSON-serialisable data."""
    return asdict(region) | {"policy": region.policy.value}


def _first_moment(trace: Trace, name: str) -> int:
    """Return the first moment of a module, or of one in it."""
    paths = (moment.label.partition(" ")[0] for moment in trace.moments)
    return next((at for at, path in enumerate(paths) if f"{path}.".startswith(f"{name}.")), 0)


def chunk_names(plan: Plan, trace: Trace) -> dict[ChunkId, str]:
    """Return by ACTIVATION chunk its region, and what becomes of it: ``"blocks.0, offloaded"``."""
    policies = _policies(plan, trace)
    return {
        chunk: f"{held.region}, {'inputs, ' if held.content is Content.INPUTS else ''}{DONE[policies[chunk]]}"
        for chunk, held in activation_contents(trace).items()
    }


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


def _policies(plan: Plan, trace: Trace) -> dict[ChunkId, Policy]:
    """Return what becomes of each ACTIVATION chunk."""
    copied = {action.chunk for actions in plan.actions for action in actions if isinstance(action, Copy)}
    found = {}
    for chunk, held in activation_contents(trace).items():
        found[chunk] = Policy.OFFLOAD if chunk in copied else Policy.KEEP
        if held.content is Content.RECOMPUTED:
            found[chunk] = Policy.RECOMPUTE
    return found
