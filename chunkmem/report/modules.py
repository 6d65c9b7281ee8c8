"""Which modules a step computes, and when: the names of layers under forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from chunkmem.report.clock import STEP, phases
from chunkmem.trace.layers import in_layer, layer_of, module_named
from chunkmem.trace.model import Moment, Trace


@dataclass(frozen=True, slots=True)
class ModuleRun:
    """Moments in a row that one module computes in one phase."""

    name: str
    phase: str
    first: int
    stop: int
    """One past the last moment."""


def layer_runs(trace: Trace) -> list[ModuleRun]:
    """Return the layers as they run: ``"blocks.0"``, ``"model.layers.11"``, or the name of a module in no list."""
    return list(_runs(trace, [layer_of(path) for path in _paths(trace)]))


def submodule_runs(trace: Trace) -> list[ModuleRun]:
    """Return what runs inside layers: ``"attention.qkv"`` of ``"blocks.0.attention.qkv"``."""
    paths = _paths(trace)
    return [
        ModuleRun(in_layer(run.name)[1], run.phase, run.first, run.stop)
        for run in _runs(trace, paths)
        if in_layer(run.name)[1]
    ]


def layer_named(moment: Moment) -> str:
    """Return the layer whose module a moment names; empty if it names none."""
    return layer_of(module_named(moment.label))


def _paths(trace: Trace) -> list[str]:
    """Return the module of each moment; one that names none, as most releases do, belongs to the module before it."""
    found: list[str] = []
    for _, first, stop in phases(trace):
        path = ""
        for moment in trace.moments[first:stop]:
            path = module_named(moment.label) or path
            found.append(path)
    return found


def _runs(trace: Trace, names: Sequence[str]) -> Iterator[ModuleRun]:
    for phase, first, stop in phases(trace):
        for name, moments in groupby(range(first, stop), key=names.__getitem__):
            if name and phase != STEP:
                inside = list(moments)
                yield ModuleRun(name, phase, inside[0], inside[-1] + 1)
