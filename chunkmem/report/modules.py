"""Which modules a step computes, and when: the names of layers under forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from chunkmem.data.labels import in_layer, layer_of, module_named
from chunkmem.data.trace import Moment, Trace
from chunkmem.report.clock import STEP, phase_names, runs


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
    return _runs((phase, layer_of(path)) for phase, path in _paths(trace))


def submodule_runs(trace: Trace) -> list[ModuleRun]:
    """Return what runs inside layers: ``"attention.qkv"`` of ``"blocks.0.attention.qkv"``."""
    return [replace(run, name=name) for run in _runs(_paths(trace)) if (name := in_layer(run.name)[1])]


def layer_named(moment: Moment) -> str:
    """Return the layer whose module a moment names; empty if it names none."""
    return layer_of(module_named(moment.label))


def _paths(trace: Trace) -> list[tuple[str, str]]:
    """Return by moment its phase and module; one that names none, as most releases do, belongs to the one before."""
    found = [("", "")]
    for phase, moment in zip(phase_names(trace), trace.moments, strict=True):
        before, path = found[-1]
        found.append((phase, module_named(moment.label) or (path if before == phase else "")))
    return found[1:]


def _runs(modules: Iterable[tuple[str, str]]) -> list[ModuleRun]:
    found = runs(modules)
    return [ModuleRun(name, phase, first, stop) for (phase, name), first, stop in found if name and phase != STEP]
