"""What one step's trace tells at a glance: are launches ahead, does the host wait, do updates take the cores."""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

LAUNCHES = ("cuda_runtime", "cuda_driver")
WAITS = ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize")
COPIES = ("gpu_memcpy", "gpu_memset")
Event = Mapping[str, Any]
"""Of a chrome trace, as torch's profiler writes it; times are in microseconds."""
Interval = tuple[float, float]


def of_trace(events: Sequence[Event]) -> dict[str, Any] | None:
    """Return how launches, waits and copies overlapped with computing; None if no kernel ran on a device.

    COMPUTE is the stream with most kernels. Whenever it idles, either the host had not launched the next kernel yet,
    or that kernel was there and waited for something, such as a copy.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    kernels = [event for event in spans if event.get("cat") == "kernel"]
    if not kernels:
        return None
    calls = [event for event in spans if event.get("cat") in LAUNCHES]
    launches = {number: event for event in calls if (number := event.get("args", {}).get("correlation"))}
    launched_at = {number: _end(event) for number, event in launches.items()}
    by_stream: dict[Any, list[Event]] = defaultdict(list)
    for kernel in kernels:
        by_stream[kernel["args"]["stream"]].append(kernel)
    computing = sorted(max(by_stream.values(), key=len), key=lambda event: event["ts"])
    leads = [kernel["ts"] - at for kernel in computing if (at := launched_at.get(kernel["args"]["correlation"]))]
    idle = {"late_launch_s": 0.0, "waited_s": 0.0}
    free_at = computing[0]["ts"]
    for kernel in computing:
        if kernel["ts"] > free_at:
            launched = launched_at.get(kernel["args"]["correlation"], free_at)
            late = min(max(launched - free_at, 0.0), kernel["ts"] - free_at)
            idle["late_launch_s"] += 1e-6 * late
            idle["waited_s"] += 1e-6 * (kernel["ts"] - free_at - late)
        free_at = max(free_at, _end(kernel))
    copies = [(event["ts"], _end(event)) for event in spans if event.get("cat") in COPIES]
    busy = [(kernel["ts"], _end(kernel)) for kernel in computing]
    issued = [launches[number] for kernel in computing if (number := kernel["args"]["correlation"]) in launches]
    # Threads that launch what is computed, until the last of it: other threads wait for copies, and that is their work.
    threads, last = {event["tid"] for event in issued}, max((event["ts"] for event in issued), default=0.0)
    waits = [event for event in calls if event["name"] in WAITS and event["tid"] in threads and event["ts"] < last]
    return {
        "num_kernels": len(computing),
        "span_s": 1e-6 * (free_at - computing[0]["ts"]),
        "median_lead_s": 1e-6 * statistics.median(leads) if leads else None,
        **idle,
        "copies_s": 1e-6 * _length(copies),
        "copies_hidden_s": 1e-6 * (_length(copies) + _length(busy) - _length([*copies, *busy])),
        "host_waits": {
            name: [sum(event["name"] == name for event in waits), 1e-6 * sum(_dur(waits, name))]
            for name in sorted({event["name"] for event in waits})
        },
    }


def busiest(events: Sequence[Event], num: int = 3) -> list[list[Any]]:
    """Return the names of the kernels that took the device most time, and how many seconds."""
    took_s: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("cat") == "kernel":
            took_s[event["name"][:60]] += 1e-6 * event["dur"]
    return [[name, took_s[name]] for name in sorted(took_s, key=lambda name: -took_s[name])[:num]]


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _dur(events: Iterable[Event], name: str) -> list[float]:
    return [event["dur"] for event in events if event["name"] == name]


def _length(intervals: Iterable[Interval]) -> float:
    """Return the length of the union."""
    length, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        length += max(0.0, end - max(begin, until))
        until = max(until, end)
    return length


def cores_now() -> dict[str, tuple[float, float]]:
    """Return for each thread of this process the seconds that it ran and that it was ready but had no core.

    Empty where the system does not tell.
    """
    found = {}
    for thread in psutil.Process().threads():
        with contextlib.suppress(OSError, ValueError):
            ran_ns, waited_ns, _ = Path(f"/proc/self/task/{thread.id}/schedstat").read_text().split()
            found[str(thread.id)] = (1e-9 * int(ran_ns), 1e-9 * int(waited_ns))
    return found


def of_cores(before: Mapping[str, Any], after: Mapping[str, Any], *, launching: str, step_s: float) -> dict[str, Any]:
    """Return how many cores were busy between two looks, and how long the launching thread ran and had to wait."""
    nothing = (0.0, 0.0)
    ran = {name: after[name][0] - before.get(name, nothing)[0] for name in after}
    waited = {name: after[name][1] - before.get(name, nothing)[1] for name in after}
    return {
        "cores_busy": sum(ran.values()) / step_s,
        "launching_ran_s": ran.get(launching),
        "launching_waited_s": waited.get(launching),
        "worst_waited_s": max(waited.values(), default=None),
    }


def told(trace: Mapping[str, Any] | None, cores: Mapping[str, Any], *, num_cpus: int) -> str:
    """Return both in words."""
    parts = []
    if trace is not None:
        lead = "?" if trace["median_lead_s"] is None else f"{1e3 * trace['median_lead_s']:.2f} ms"
        idle = ", ".join(
            f"{why} {trace[name] / trace['span_s']:.1%}"
            for why, name in (("launched late", "late_launch_s"), ("waited for copies or updates", "waited_s"))
        )
        waits = ", ".join(f"{num} {name} {1e3 * took_s:.1f} ms" for name, (num, took_s) in trace["host_waits"].items())
        hidden = f"{trace['copies_hidden_s'] / trace['copies_s']:.0%}" if trace["copies_s"] else "–"
        parts += [f"launches lead by {lead} (median)", f"device idle: {idle}", f"host waits: {waits or 'none'}"]
        parts += [f"copies {trace['copies_s']:.3f} s, {hidden} behind kernels"]
    if cores["launching_waited_s"] is not None:
        parts.append(
            f"{cores['cores_busy']:.1f} of {num_cpus} cores busy; no core for the main thread "
            f"{1e3 * cores['launching_waited_s']:.1f} ms, for any thread at most {1e3 * cores['worst_waited_s']:.1f} ms"
        )
    return "; ".join(parts) or "–"
