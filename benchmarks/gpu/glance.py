"""What one step's trace tells at a glance: are launches ahead, does the host wait, do updates take the cores."""

from __future__ import annotations

import contextlib
import resource
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import torch

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


@dataclass(frozen=True)
class Cpu:
    """What a thread has had of the cores so far."""

    name: str
    core_s: float
    """It ran."""
    ready_s: float
    """It could have run, and had no core."""


@dataclass(frozen=True)
class Look:
    """What a step has come to, without waiting for it."""

    at_s: float
    """By `time.perf_counter()`."""
    threads: Mapping[int, Cpu]
    """By what the system calls each; empty where it does not tell."""
    computed: torch.cuda.Event | None
    """On COMPUTE: the end of what was launched so far; None without CUDA."""

    @classmethod
    def now(cls, device: torch.device) -> Self:
        """Take it; that costs a millisecond or so, which is part of what comes next."""
        event = None
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return cls(time.perf_counter(), cpu_now(), event)


def cpu_now() -> dict[int, Cpu]:
    """Return what each thread of this process has had so far, those that have ended not included."""
    named = {each.native_id: each.name for each in threading.enumerate() if not each.name.startswith("Dummy")}
    found = {}
    for thread in psutil.Process().threads():
        place = Path(f"/proc/self/task/{thread.id}")
        with contextlib.suppress(OSError, ValueError):
            ran_ns, ready_ns, _ = (place / "schedstat").read_text().split()
            name = named.get(thread.id) or (place / "comm").read_text().strip()
            found[thread.id] = Cpu(name, 1e-9 * int(ran_ns), 1e-9 * int(ready_ns))
    return found


def cores_s() -> float:
    """Return the seconds that all threads of this process had a core, those that have ended included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def launching_threads(events: Sequence[Event]) -> set[int]:
    """Return the threads that launch what is computed; without a device, those that call operators."""
    spans = [event for event in events if event.get("ph") == "X"]
    computing = _computing(spans)
    if not computing:
        return {event["tid"] for event in spans if event.get("cat") == "cpu_op"}
    return {call["tid"] for call in _launching([event for event in spans if event.get("cat") in LAUNCHES], computing)}


def part_of(begin: Look, end: Look, launching: Set[int]) -> dict[str, Any]:
    """Return what a part of a step took between two looks, once the device has come to the second.

    Args:
        begin, end: around it.
        launching: the threads that are told of.

    Returns:
        Seconds of the host, and of COMPUTE (None without CUDA), and for each thread those on a core, those ready
        without a core, and those that were neither: it was waiting for Python's lock, for the device, or for work.
    """
    took_s = end.at_s - begin.at_s
    threads = {}
    for number in sorted(launching & end.threads.keys()):
        now, before = end.threads[number], begin.threads.get(number, Cpu("", 0.0, 0.0))
        ran_s, ready_s = now.core_s - before.core_s, now.ready_s - before.ready_s
        threads[now.name] = [ran_s, ready_s, max(0.0, took_s - ran_s - ready_s)]
    device_s = None
    if begin.computed is not None and end.computed is not None:
        device_s = 1e-3 * begin.computed.elapsed_time(end.computed)
    return {"host_s": took_s, "device_s": device_s, "threads": threads}


def of_cores(begin: Look, end: Look, launching: Set[int], *, used_s: float) -> dict[str, Any]:
    """Return how many cores were busy between two looks, and how long threads were ready and had none.

    Args:
        begin, end: around a step.
        launching: the threads that launch.
        used_s: of cores, by all threads, those included that ended meanwhile.
    """
    ready_s = {
        number: now.ready_s - (begin.threads[number].ready_s if number in begin.threads else 0.0)
        for number, now in end.threads.items()
    }
    return {
        "cores_busy": used_s / (end.at_s - begin.at_s),
        "launching_ready_s": sum((ready_s[number] for number in launching & ready_s.keys()), 0.0) if ready_s else None,
        "worst_ready_s": max(ready_s.values(), default=None),
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
    parts.append(f"{cores['cores_busy']:.1f} of {num_cpus} cores busy")
    if cores["launching_ready_s"] is not None:
        parts.append(
            f"no core for the threads that launch {1e3 * cores['launching_ready_s']:.1f} ms, for any thread at most "
            f"{1e3 * cores['worst_ready_s']:.1f} ms"
        )
    return "; ".join(parts)


def told_of_parts(parts: Mapping[str, Any]) -> dict[str, str]:
    """Return in words what the parts of a step took: each line and its seconds."""
    lines = {}
    for part, took in parts.items():
        lines[f"{part}: by the host"] = f"{took['host_s']:.4f}"
        if took["device_s"] is not None:
            lines[f"{part}: on COMPUTE"] = f"{took['device_s']:.4f}"
        for name, seconds in took["threads"].items():
            line = f"{part}: {name} on a core, ready without one, neither"
            lines[line] = ", ".join(f"{each:.4f}" for each in seconds)
    return lines
