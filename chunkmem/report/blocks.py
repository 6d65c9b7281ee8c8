"""What the blocks of a model cost, read off a recorded step: what stages of a pipeline are cut from. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from chunkmem.data.errors import TraceError
from chunkmem.data.labels import layer_of
from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import Role
from chunkmem.plan.balance import Block
from chunkmem.report.clock import BACKWARD, FORWARD, STEP, phase_names
from chunkmem.report.modules import layer_named


@dataclass
class _Cost:
    """Of one layer."""

    seconds: dict[str, float] = field(default_factory=lambda: {FORWARD: 0.0, BACKWARD: 0.0})
    nbytes: int = 0
    weight_nbytes: int = 0
    shared: dict[str, int] = field(default_factory=dict)
    groups: set[int] = field(default_factory=set)
    """Whose weights its forward reads."""


def blocks_of(trace: Trace, *, numels: Mapping[str, int] | None = None) -> tuple[Block, ...]:
    """Return the layers of the recorded model, in the order in which forward comes to them.

    A layer without parameters counts to the one before it, and so does what no module computes. What a layer computes
    before it reads a parameter, in forward or in backward, is its own: modules are entered within moments. Chunks that
    hold parameters of several layers count for each of them in part. A layer that reads a chunk in which no gradient of
    its own lands, such as a tied head, shares those weights with the first one whose gradients do.

    Args:
        trace: times are those of its machine, of all calls of a layer in the step.
        numels: elements of parameters by name; None: layers have equal parts of a chunk.

    Raises:
        TraceError: no moment names a module.
    """
    costs = _timed(trace)
    if not costs:
        raise TraceError("the trace names no modules, so there are no blocks to cut; record a training step")
    owned, latest = _owned(trace, costs), next(iter(costs))
    for group in sorted({chunk.group for chunk in trace.chunk_nbytes if chunk.role.kind.is_weights}):
        # What no forward has read, such as an expert, was packed next to what its layer reads.
        readers = [name for name, cost in costs.items() if group in cost.groups] or [latest]
        owners = owned.get(group) or {name: set[str]() for name in readers}
        latest = next(reversed(owners))
        _charge(trace, group, costs, readers, owners, {name: _numel(owners[name], numels) for name in owners})
    return tuple(
        Block(name, cost.seconds[FORWARD], cost.seconds[BACKWARD], cost.nbytes, cost.shared, cost.weight_nbytes)
        for name, cost in costs.items()
    )


def _timed(trace: Trace) -> dict[str, _Cost]:
    computed = [(at, phase) for at, phase in enumerate(phase_names(trace)) if phase != STEP]
    # Some have a gradient, and are never called: their parent reads their parameters.
    named = (layer_named(trace.moments[at]) for at, phase in computed if phase == FORWARD)
    costs = {name: _Cost() for name in named if name}
    name, now, before = next(iter(costs), ""), FORWARD, ""
    if costs:
        costs[name].seconds[FORWARD] += trace.before_s
    for at, phase in computed if costs else ():
        moment = trace.moments[at]
        name = said if (said := layer_named(moment)) in costs else name
        now, before = (phase if phase != before else now), phase
        if phase == FORWARD and moment.kind is Kind.HOLD and moment.chunk.role.kind.is_weights:
            costs[name].groups.add(moment.chunk.group)
        passed = 0.0
        for entry in (*moment.entered, None):
            until = 1.0 if entry is None else max(passed, entry.share)
            costs[name].seconds[now] += (until - passed) * moment.duration_s
            passed = until
            if entry is not None:
                path, _, what = entry.label.partition(" ")
                name = layer if (layer := layer_of(path)) in costs else name
                now = FORWARD if what == "forward" else BACKWARD
    return costs


def _owned(trace: Trace, costs: Mapping[str, _Cost]) -> dict[int, dict[str, set[str]]]:
    """Return by group and layer the parameters whose gradients land there, layers in the order of forward."""
    params: dict[int, dict[str, set[str]]] = {}
    for moment in trace.moments:
        if moment.kind in (Kind.CREATE, Kind.WRITE) and moment.chunk.role is Role.GRAD:
            param, _, what = moment.label.partition(" ")
            if what == "gradient":
                layer = layer_of(param.rpartition(".")[0])
                params.setdefault(moment.chunk.group, {}).setdefault(layer, set()).add(param)
    layers = {layer for of_group in params.values() for layer in of_group}
    found: dict[int, dict[str, set[str]]] = {}
    for group, of_group in params.items():
        for name, cost in costs.items():
            own = of_group.get(name, set())
            # The model itself has the name of its class; what it reads belongs to modules that are never called.
            if name not in layers and group in cost.groups:
                own = own.union(*(of_group[layer] for layer in of_group if layer not in costs))
            if own:
                found.setdefault(group, {})[name] = own
    return found


def _charge(
    trace: Trace,
    group: int,
    costs: Mapping[str, _Cost],
    readers: Iterable[str],
    owners: Mapping[str, Iterable[str]],
    shares: Mapping[str, int],
) -> None:
    """Add the bytes of a group's chunks to the layers that have them."""
    chunks = trace.update(group).chunks
    total_nbytes = trace.nbytes(chunks)
    of_weights = trace.nbytes(chunk for chunk in chunks if chunk.role.kind.is_weights)
    parts = {name: total_nbytes * share // sum(shares.values()) for name, share in shares.items()}
    first = next(iter(parts))
    parts[first] += total_nbytes - sum(parts.values())  # what rounding leaves
    borrowers = [name for name in readers if name not in owners]
    for name, part in parts.items():
        users = [name, *borrowers] if name == first else [name]
        params = sorted(owners[name])
        for user in users:
            costs[user].weight_nbytes += of_weights * part // total_nbytes
            if len(users) > 1:
                costs[user].shared[params[0] if len(params) == 1 else f"{name}, chunk {group}"] = part
            else:
                costs[user].nbytes += part


def _numel(params: Iterable[str], numels: Mapping[str, int] | None) -> int:
    return max(1, sum(numels.get(param, 0) for param in params)) if numels else 1
