"""Metrics: their names do not change, and the table of the documentation has each of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from chunkmem.data.memory import MemoryReport, MovedReport, TierReport
from chunkmem.data.types import ChunkId, Role, Tier
from chunkmem.plan.model import Lane
from chunkmem.plan.timeline import Span, Timeline
from chunkmem.report.metrics import NAMES, metrics_of

ROOT = Path(__file__).parents[2]

DEVICE = TierReport(100, 60, 90, 80, 0, {})
HOST = TierReport(1000, 600, 900, 800, 0, {})
DISK = TierReport(10_000, 6000, 9000, 8000, 0, {})
MOVED = MovedReport({"h2d": 11, "d2h": 22, "disk-read": 33, "disk-write": 44})
MEMORY = MemoryReport({Tier.DEVICE: DEVICE, Tier.HOST: HOST}, MOVED, padding_nbytes=0, non_model_nbytes=55)
CHUNK = ChunkId(Role.PARAM, 0)
STEP = Timeline(
    (
        Span(Lane.COMPUTE, "", 0.0, 2.0, 0),
        Span(Lane.H2D, "", 0.0, 1.0, 0, CHUNK, 7),
        Span(Lane.H2D, "", 1.0, 2.0, 0, CHUNK, 7),
        Span(Lane.D2H, "", 0.0, 1.0, 0, CHUNK, 5),
        Span(Lane.COLLECTIVE, "", 0.0, 1.0, 0, CHUNK, 3),
        Span(Lane.COMPUTE, "waits for h2d", 0.5, 1.0, 0, is_stall=True),
    ),
    step_s=2.5,
    peak_nbytes={Tier.DEVICE: 80},
    role_peak_nbytes={},
    cap_nbytes={Tier.DEVICE: 100, Tier.HOST: 1000},
    plan_misses=4,
    prefetched=1,
    fetched=2,
)
OF_MEMORY = {
    "memory/device_bytes": 60,
    "memory/device_step_peak_bytes": 80,
    "memory/device_peak_bytes": 90,
    "memory/device_cap_bytes": 100,
    "memory/host_bytes": 600,
    "memory/host_step_peak_bytes": 800,
    "memory/host_peak_bytes": 900,
    "memory/host_cap_bytes": 1000,
    "memory/non_model_bytes": 55,
    "total/h2d_bytes": 11,
    "total/d2h_bytes": 22,
}
OF_DISK = {
    "memory/disk_bytes": 6000,
    "memory/disk_step_peak_bytes": 8000,
    "memory/disk_peak_bytes": 9000,
    "memory/disk_cap_bytes": 10_000,
    "total/disk_read_bytes": 33,
    "total/disk_write_bytes": 44,
}
OF_STEP = {
    "step/seconds": 2.5,
    "step/stall_seconds": 0.5,
    "step/h2d_bytes": 14,
    "step/d2h_bytes": 5,
    "step/exchanged_bytes": 3,
    "step/copies_to_device": 2,
    "step/copies_in_time": 1,
    "step/plan_misses": 4,
}
OF_PLAN = {"plan/seconds": 1.25, "plan/stall_seconds": 0.5}
OF_FP16 = {"fp16/loss_scale": 1024.0, "fp16/skipped_steps": 6}


def test_what_is_known_before_the_first_step() -> None:
    assert metrics_of(MEMORY, None, None) == OF_MEMORY


def test_every_metric_by_its_name() -> None:
    """Dashboards are made of these names."""
    planned = replace(STEP, step_s=1.25)
    assert metrics_of(MEMORY, STEP.figures, planned.figures) == OF_MEMORY | OF_STEP | OF_PLAN
    assert metrics_of(MEMORY, None, None, scaled=(1024.0, 6)) == OF_MEMORY | OF_FP16
    with_disk = replace(STEP, cap_nbytes={**STEP.cap_nbytes, Tier.DISK: 10_000})
    read = Span(Lane.DISK_READ, "", 0.0, 1.0, 0, CHUNK, 9)
    with_disk = replace(with_disk, spans=(*STEP.spans, read))
    moved = {"step/disk_read_bytes": 9, "step/disk_write_bytes": 0}
    memory = replace(MEMORY, tiers={**MEMORY.tiers, Tier.DISK: DISK})
    assert metrics_of(memory, with_disk.figures, None) == OF_MEMORY | OF_DISK | OF_STEP | moved


def test_the_documentation_has_every_metric() -> None:
    known = OF_MEMORY | OF_DISK | OF_STEP | OF_PLAN | OF_FP16
    known |= {"step/disk_read_bytes": 0, "step/disk_write_bytes": 0}
    page = (ROOT / "docs" / "timeline.md").read_text(encoding="utf-8")
    section = page.partition("\n## Metrics\n")[2].partition("\n## ")[0]
    told = [name for line in section.splitlines() if line.startswith("|") for name in re.findall(r"`(\w+/\w+)`", line)]
    assert sorted(told) == sorted(known)
    assert set(known) == NAMES
