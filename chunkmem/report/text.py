"""Lines for people, from what `summarize` returned. Tables are rows; the caller aligns the columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chunkmem.data.sizes import format_nbytes
from chunkmem.plan.model import DIRECTIONS
from chunkmem.report.regions import DONE, RegionPolicy, alike

Row = tuple[str, ...]
REGION_COLUMNS = ("activations", "", "bytes", "to recompute or copy")
_LINKS = {lane.value: f"moved {direction}" for lane, direction in DIRECTIONS.items()}
_MOST_LAYERS = 3
"""Told of those after which Python runs longest."""


def format_s(seconds: float | None) -> str:
    """Return a time for people: ``"3.21 s"``, ``"45.6 ms"``, ``"789 us"``; None: it was not measured."""
    if seconds is None:
        return "not measured"
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.1f} ms" if abs(seconds) >= 1e-3 or seconds == 0 else f"{1e6 * seconds:.0f} us"


def plan_misses(number: int) -> str:
    """Return how often a step missed its plan, to begin a sentence with; empty for never."""
    if not number:
        return ""
    return "once" if number == 1 else f"{number} times"


def step_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    """Yield (what, predicted, happened, cap)."""
    views = predicted, happened = summary["predicted"], summary["happened"]
    caps = summary["cap_nbytes"]
    yield ("step time", *(format_s(view["step_s"]) for view in views), "")
    yield ("stalls", *(f"{format_s(view['stall_s'])} in {view['num_stalls']}" for view in views), "")
    yield ("Python between units", *(format_s(view["python_s"]) for view in views), "")
    python = [view["python_by_layer"] for view in views]
    told = python[1] or python[0] or {}
    for layer in sorted(told, key=told.__getitem__, reverse=True)[:_MOST_LAYERS]:
        yield (f"  after {layer}", *(format_s((by_layer or {}).get(layer)) for by_layer in python), "")
    for lane in dict.fromkeys([*predicted["moved_nbytes"], *happened["moved_nbytes"]]):
        moved = (format_nbytes(view["moved_nbytes"].get(lane, 0)) for view in views)
        yield (_LINKS.get(lane, f"moved on {lane}"), *moved, "")
    if any(view["exchanged_nbytes"] for view in views):
        yield ("exchanged between ranks", *(format_nbytes(view["exchanged_nbytes"]) for view in views), "")
    for tier in dict.fromkeys([*predicted["peak_nbytes"], *happened["peak_nbytes"]]):
        peaks = (format_nbytes(view["peak_nbytes"].get(tier, 0)) for view in views)
        yield (f"peak on {tier.upper()}", *peaks, format_nbytes(caps[tier]) if tier in caps else "")
    yield ("copies in time", *(f"{view['prefetched']} of {view['fetched']}" for view in views), "")
    yield ("plan misses", *(str(view["plan_misses"]) for view in views), "")


def role_rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    """Yield (tier and role, predicted, happened) for each role's own peak."""
    views = [summary[name]["role_peak_nbytes"] for name in ("predicted", "happened")]
    for tier in dict.fromkeys([*views[0], *views[1]]):
        for role in dict.fromkeys([*views[0].get(tier, {}), *views[1].get(tier, {})]):
            peaks = [view.get(tier, {}).get(role, 0) for view in views]
            if any(peaks):
                yield (f"{tier.upper()} {role}", *map(format_nbytes, peaks))


def region_rows(regions: Sequence[RegionPolicy]) -> Iterator[Row]:
    """Yield (regions, what becomes of their activations, bytes, seconds of that); those that are alike as one."""
    for name, region in alike(regions):
        took = format_s(region.seconds) if region.seconds else ""
        yield (name, DONE[region.policy], format_nbytes(region.nbytes), took)


def difference_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was not as predicted, and why that may be."""
    yield from summary["differences"] or ["bytes on each link and the peak of each tier are as predicted"]
    if times := plan_misses(summary["happened"]["plan_misses"]):
        yield f"{times} the step missed its plan, and was served on demand until it fitted again"


def non_model_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the bytes of non-model data: activations, gradients being computed, temporaries."""
    found = summary["non_model"]
    yield f"highest at operator boundaries: {_at(found['probe'])}"
    interval_s = found["sampling_interval_s"]
    if found["sampled"] is None:
        why = "did not run, or saw nothing (client.mem_tracer.use_async_mem_monitor)"
        yield f"the sampling thread {why if interval_s is None else 'saw no non-model data'}"
    else:
        yield f"highest by the sampling thread: {_at(found['sampled'])}"
        most = found["differ_most"]
        yield (
            f"they differ most in moment {most['moment']}, {most['label']}: {format_nbytes(most['probe_nbytes'])} at "
            f"boundaries, {format_nbytes(most['sampled_nbytes'])} sampled"
        )
    if interval_s is not None:
        yield f"the sampling thread looked at least every {format_s(interval_s)}; what lives shorter may be missed"
    elif found["sampled"] is not None:
        yield "how often the sampling thread looked is not in this trace, so neither is what it may have missed"
    covers = "covers them, too" if found["is_charged"] else "does not cover them"
    yield f"the cap of {format_nbytes(found['cap_nbytes'])} on DEVICE {covers}"


def _at(peak: Mapping[str, Any]) -> str:
    return f"{format_nbytes(peak['nbytes'])} in moment {peak['moment']}, {peak['label']}"
