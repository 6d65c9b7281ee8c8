"""One step to look at: a chrome trace of what the device did, and chunkmem's own timeline page."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from benchmarks.gpu import glance
from benchmarks.gpu.harness import Task
from benchmarks.gpu.machine import num_cpus
from benchmarks.gpu.model import preset
from benchmarks.gpu.rows import Store
from benchmarks.gpu.setting import GIB, Cap, Setting
from benchmarks.gpu.table import Rows, page
from benchmarks.gpu.train import batches_of, hold_to, open_training
from benchmarks.gpu.warm_up import warm_up
from benchmarks.gpu.work import ENVIRONMENT, Work, compute_device

NAME = "profile"
SUMMARY = "one step: are launches ahead, does the host wait, do updates take the cores; chrome trace and timeline"
MODEL, TOKENS, GIB_CAP = "1.3b", 4096, 8
MOST_TRACE_NBYTES = 6 << 20
"""Of a compressed trace; above it, only what touches the device is kept."""
ON_DEVICE = ("kernel", "cuda_runtime", "cuda_driver", "gpu_memcpy", "gpu_memset", "user_annotation")
HEADER = ("row", "step, s", "stalls, s", "at a glance", "busiest on the device", "files")


def tasks(setting: Setting, _store: Store) -> Iterator[Task]:
    """Yield the one row."""
    size = preset(MODEL, dry=setting.dry)
    cap = setting.caps()[0] if setting.dry else min(
        (Cap(f"{GIB_CAP} GiB", GIB_CAP * GIB), setting.caps()[-1]), key=lambda cap: cap.nbytes or 0
    )  # fmt: skip
    batch = 2 if setting.dry else TOKENS // size.seq
    host_nbytes = None if setting.dry else setting.host_nbytes
    work = Work("chunkmem", size, batch=batch, micro_batch=batch, cap_nbytes=cap.nbytes, host_nbytes=host_nbytes)
    key = f"profile / {MODEL if not setting.dry else 'toy'} / {cap.label}"
    arguments = {"work": asdict(work), "folder": str(setting.folder / "profile")}
    yield Task(key, "benchmarks.gpu.profile:profile", arguments, 110, needs_gpu=False, environment=ENVIRONMENT)


def profile(*, work: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Train until the plan is settled, look at a step, then write others down as torch's profiler sees them."""
    from chunkmem.report.files import write_report
    from chunkmem.report.run import load_run

    asked = Work.of(work)
    device = compute_device()
    hold_to(asked.cap_nbytes)
    training = open_training(asked)
    steps = batches_of(asked, device)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)

    def step(passed: Callable[[str], object] = lambda part: None) -> None:
        training.step(steps[0], passed=passed)
        if device.type == "cuda":
            torch.cuda.synchronize()
        passed("until the device is done")

    warm = warm_up(training, steps[:1], least=asked.num_warm_up, most=asked.most_warm_up)
    # Without any profiler, and before there is one: what it leaves behind is work for Python's collector of garbage.
    looks = {"": glance.Look.now(device)}
    used_s = -glance.cores_s()
    step(lambda part: looks.update({part: glance.Look.now(device)}))
    used_s += glance.cores_s()
    told = training.told()
    training.manager.record(place / "run")
    traces = {"trace.json.gz": [ProfilerActivity.CPU]}
    if device.type == "cuda":
        # To note each operator slows the host down: how far launches are ahead is read off the other one.
        traces = {
            "trace.json.gz": [ProfilerActivity.CPU, ProfilerActivity.CUDA],
            "launches.json.gz": [ProfilerActivity.CUDA],
        }
    for name, activities in traces.items():
        write_trace(place / name, activities, step)
    training.close()
    for name in traces:
        events = cut(place / name)
    files, notes = write_report([load_run(place / "run")], place)
    names = [*traces, *(path.name for path in files.values() if path is not None)]
    launching = glance.launching_threads(events)
    begin, *_, end = looks.values()
    return {
        "files": {name: (place / name).stat().st_size for name in names},
        "notes": notes,
        "step_s": end.at_s - begin.at_s,
        "warm_up_s": warm.step_s,
        "has_settled": warm.has_settled,
        "parts": {part: glance.part_of(looks[before], looks[part], launching) for before, part in pairwise(looks)},
        "trace": glance.of_trace(events),
        "seconds": glance.seconds_of(events),
        "cores": glance.of_cores(begin, end, launching, used_s=used_s),
        "num_cpus": num_cpus(),
        "stall_s": told.get("stall_s"),
        "busiest": glance.busiest(events),
    }


def write_trace(path: Path, activities: Sequence[ProfilerActivity], step: Callable[[], object]) -> None:
    """Write down what torch's profiler sees of a step; nothing of that is kept."""
    with torch.profiler.profile(activities=activities) as profiler:
        step()
    profiler.export_chrome_trace(str(path))


def cut(path: Path) -> list[Any]:
    """Return the events of a compressed trace; a file that is too large is written again with fewer."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        content = json.load(file)
    events: list[Any] = content["traceEvents"]
    if path.stat().st_size > MOST_TRACE_NBYTES:
        kept = [event for event in events if event.get("ph") == "M" or event.get("cat") in ON_DEVICE]
        with gzip.open(path, "wt", encoding="utf-8") as file:
            json.dump({**content, "traceEvents": kept}, file)
    return events


def table(content: Mapping[str, Any]) -> str:
    """Return the Markdown of a file of rows."""
    rows = {key: row["figures"] for key, row in content["rows"].items() if row.get("figures")}
    lines = [f"| where the time went, s | {' | '.join(rows)} |", "|---" * (len(rows) + 1) + "|"]
    for name, told in glance.SECONDS.items():
        cells = " | ".join(f"{figures['seconds'][name]:.4f}" for figures in rows.values())
        lines.append(f"| {told} | {cells} |")
    parts = {key: glance.told_of_parts(figures["parts"]) for key, figures in rows.items()}
    for told in dict.fromkeys(line for lines_of_row in parts.values() for line in lines_of_row):
        cells = " | ".join(lines_of_row.get(told, "–") for lines_of_row in parts.values())
        lines.append(f"| without a profiler, {told} | {cells} |")
    return "\n\n".join([page(content, HEADER, _cells), *(["\n".join(lines)] if rows else [])])


def _cells(_key: str, figures: Mapping[str, Any], _rows: Rows) -> list[str]:
    return [
        f"{figures['step_s']:.3f}",
        "–" if figures["stall_s"] is None else f"{figures['stall_s']:.3f}",
        glance.told(figures["trace"], figures["cores"], num_cpus=figures["num_cpus"]),
        "; ".join(f"`{name}` {seconds:.3f} s" for name, seconds in figures["busiest"]) or "–",
        ", ".join(f"`{name}` ({nbytes / 2**20:.1f} MiB)" for name, nbytes in figures["files"].items()),
    ]
