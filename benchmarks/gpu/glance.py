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
SECONDS = {
    "kernels_s": "kernels",
    "copies_s": "copies, both ways, beside kernels or not",
    "late_launch_s": "no kernel: launched late",
    "waited_s": "no kernel: waits for copies or updates",
    "host_waits_s": "the launching threads wait in CUDA",
    "host_calls_s": "they launch, copy and ask",
    "python_s": "they are in Python and torch",
}
"""What `seconds_of` returns, in words."""
Event = Mapping[str, Any]
"""Of a chrome trace, as torch's profiler writes it; times are in microseconds."""
Interval = tuple[float, float]


def of_trace(events: Sequence[Event]) -> dict[str, Any] | None:
    """Return how launches, waits and copies overlapped with computing; None if no kernel ran on a device.

    COMPUTE is the stream with most kernels. Whenever it idles, either the host had not launched the next kernel yet,
    or that kernel was there and waited for something, such as a copy.
    """
    spans = [event for event in events if event.get("ph") == "X"]
    computing = _computing(spans)
    if not computing:
        return None
    calls = [event for event in spans if event.get("cat") in LAUNCHES]
    launched_at = {number: _end(event) for event in calls if (number := event.get("args", {}).get("correlation"))}
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
    waits = [call for call in _launching(calls, computing) if call["name"] in WAITS]
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


def seconds_of(events: Sequence[Event]) -> dict[str, float]:
    """Return where the time of one step went, on the device and on the host; each is 0 where nothing of it was.

    Args:
        events: of a trace with CUDA's calls, or, where there is no device, with operators.

    Returns:
        Kernels of COMPUTE, which without a device are the operators; copies; COMPUTE idle as the next kernel was
        launched late, and as it waited for something; and of the threads that launch what is computed, of which one
        works at a time: CUDA's calls that wait, others, and the rest, which is Python and what it calls in torch.
    """
    spans, device = [event for event in events if event.get("ph") == "X"], of_trace(events)
    if device is None:
        operators = [event for event in spans if event.get("cat") == "cpu_op"]
        kernels_s = 1e-6 * _length(map(_interval, operators))
        return {**dict.fromkeys(SECONDS, 0.0), "kernels_s": kernels_s, "python_s": _span_s(operators) - kernels_s}
    launching = _launching([event for event in spans if event.get("cat") in LAUNCHES], _computing(spans))
    waits, others = ([call for call in launching if (call["name"] in WAITS) is waits] for waits in (True, False))
    return {
        "kernels_s": device["span_s"] - device["late_launch_s"] - device["waited_s"],
        **{name: device[name] for name in ("copies_s", "late_launch_s", "waited_s")},
        "host_waits_s": 1e-6 * _length(map(_interval, waits)),
        "host_calls_s": 1e-6 * _length(map(_interval, others)),
        "python_s": _span_s(launching) - 1e-6 * _length(map(_interval, launching)),
    }


def busiest(events: Sequence[Event], num: int = 3) -> list[list[Any]]:
    """Return the names of the kernels that took the device most time, and how many seconds."""
    took_s: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("cat") == "kernel":
            took_s[event["name"][:60]] += 1e-6 * event["dur"]
    return [[name, took_s[name]] for name in sorted(took_s, key=lambda name: -took_s[name])[:num]]


def _computing(spans: Sequence[Event]) -> list[Event]:
    """Return the kernels of the stream with most of them, in order."""
    by_stream: dict[Any, list[Event]] = defaultdict(list)
    for span in spans:
        if span.get("cat") == "kernel":
            by_stream[span["args"]["stream"]].append(span)
    return sorted(max(by_stream.values(), key=len, default=[]), key=lambda event: event["ts"])


def _launching(calls: Sequence[Event], computing: Sequence[Event]) -> list[Event]:
    """Return the calls of threads that launch what is computed, until the last launch.

    Other threads wait for copies, and that is their work.
    """
    numbers = {kernel["args"]["correlation"] for kernel in computing}
    issued = [call for call in calls if call.get("args", {}).get("correlation") in numbers]
    threads, last = {call["tid"] for call in issued}, max((call["ts"] for call in issued), default=0.0)
    return [call for call in calls if call["tid"] in threads and call["ts"] <= last]


def _interval(event: Event) -> Interval:
    return float(event["ts"]), _end(event)


def _span_s(events: Sequence[Event]) -> float:
    """Return the seconds from the first begin to the last end."""
    return 1e-6 * (max(map(_end, events), default=0.0) - min((event["ts"] for event in events), default=0.0))


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
