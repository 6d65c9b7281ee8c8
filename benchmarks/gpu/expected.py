"""What to expect of one H200 before anything is measured: ``python -m benchmarks.gpu.expected``. Needs no GPU."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from benchmarks.gpu import scale, speed
from benchmarks.gpu.model import ladder, preset
from benchmarks.gpu.scale import BATCH, HOST_SHARE
from benchmarks.gpu.setting import GIB, Cap, Card, Setting
from benchmarks.gpu.work import DEVICE_SHARE

H200 = Setting(Card("NVIDIA H200", 140 * GIB, 139 * GIB, "9.0", 132, 60 << 20, "?"), 128 * GIB, 16, Path())
"""139 GiB free, 128 GiB of RAM; speeds are `chunkmem.estimate.hardware`'s."""
TOKENS = (4096, 16384)


def scale_lines() -> list[str]:
    """Return the largest rung that is said to fit under each cap, and what the next one lacks."""
    sizes = [asdict(size) for size in ladder(dry=False)]
    names = [size["name"] for size in sizes]
    lines = ["| cap | largest that fits | step, s | what the next lacks |", "|---|---|---|---|"]
    for cap in tqdm(H200.caps(*scale.GIB_CAPS), unit="cap", disable=None):
        found = scale.predict(sizes=sizes, device_nbytes=_told(cap), host_nbytes=_host_nbytes(), batch=BATCH)
        largest, rungs = found["largest"], found["rungs"]
        after = names[0 if largest is None else names.index(largest) + 1]
        lacks = rungs.get(after, {}).get("limit", "–")
        step = "–" if largest is None else f"{rungs[largest]['step_s']:.2f}"
        lines.append(f"| {cap.label} | {largest or 'none'} | {step} | {after}: {lacks} |")
    return lines


def speed_lines() -> list[str]:
    """Return the estimated rate of each model and cap; steps of several micro-batches are not estimated."""
    lines = ["| model | tokens a step | cap | tokens/s | TFLOP/s | step, s | stalls, s | bound by |", "|---" * 8 + "|"]
    combinations = [(m, t, c) for m in sorted(speed.MODELS, key=_billions) for t in TOKENS for c in H200.caps(24, 80)]
    for model, tokens, cap in tqdm(combinations, unit="row", disable=None):
        size = preset(model, dry=False)
        batch = tokens // size.seq
        head = f"| {model} | {tokens} | {cap.label} |"
        if speed.first_micro_batch(size, batch, cap.nbytes) < batch:
            lines.append(f"{head} several micro-batches |" + " – |" * 4)
            continue
        said = scale.ask(size, _told(cap), _host_nbytes(), batch)
        if not said["fits"]:
            lines.append(f"{head} does not fit: {said['limit']} |" + " – |" * 4)
            continue
        rate = tokens / said["step_s"]
        lines.append(
            f"{head} {rate:,.0f} | {6 * size.num_params * rate / 1e12:.0f} | {said['step_s']:.3f} | "
            f"{said['stall_s']:.3f} | {said['binding']} |"
        )
    return lines


def _billions(name: str) -> float:
    return float(name.removesuffix("b"))


def _told(cap: Cap) -> int:
    assert cap.nbytes is not None
    return int(DEVICE_SHARE * cap.nbytes)


def _host_nbytes() -> int:
    return int(HOST_SHARE * H200.ram_nbytes)


if __name__ == "__main__":
    print("\n".join([*scale_lines(), "", *speed_lines()]))
    sys.exit(0)
