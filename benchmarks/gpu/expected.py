"""What to expect before anything is measured: ``python -m benchmarks.gpu.expected h100``, or h200. Needs no GPU."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from benchmarks.gpu import scale, speed
from benchmarks.gpu.model import ladder, preset
from benchmarks.gpu.scale import BATCH
from benchmarks.gpu.setting import GIB, Cap, Card, Setting
from benchmarks.gpu.work import DEVICE_SHARE

SETTINGS = {
    "h100": Setting(Card("NVIDIA H100", 79 * GIB, 78 * GIB, "9.0", 132, 50 << 20, "?"), 128 * GIB, 16, Path()),
    "h200": Setting(Card("NVIDIA H200", 140 * GIB, 139 * GIB, "9.0", 132, 60 << 20, "?"), 128 * GIB, 16, Path()),
}
"""78 or 139 GiB free, 128 GiB of RAM; speeds are `chunkmem.estimate.hardware`'s."""
TOKENS = (4096, 16384)


def scale_lines(setting: Setting) -> list[str]:
    """Return the largest rung that is said to fit under each cap, and what the next one lacks."""
    sizes = [asdict(size) for size in ladder(dry=False)]
    names = [size["name"] for size in sizes]
    lines = ["| cap | largest that fits | step, s | what the next lacks |", "|---|---|---|---|"]
    for cap in tqdm(setting.caps(*scale.GIB_CAPS), unit="cap", disable=None):
        host_nbytes, hardware = setting.host_nbytes, setting.hardware
        found = scale.predict(
            sizes=sizes, device_nbytes=_told(cap), host_nbytes=host_nbytes, batch=BATCH, hardware=hardware
        )
        largest, rungs = found["largest"], found["rungs"]
        after = names[0 if largest is None else names.index(largest) + 1]
        lacks = rungs.get(after, {}).get("limit", "–")
        step = "–" if largest is None else f"{rungs[largest]['step_s']:.2f}"
        lines.append(f"| {cap.label} | {largest or 'none'} | {step} | {after}: {lacks} |")
    return lines


def speed_lines(setting: Setting) -> list[str]:
    """Return the estimated rate of each model and cap; steps of several micro-batches are not estimated."""
    lines = ["| model | tokens a step | cap | tokens/s | TFLOP/s | step, s | stalls, s | bound by |", "|---" * 8 + "|"]
    models = sorted(speed.MODELS, key=_billions)
    combinations = [(model, tokens, cap) for model in models for tokens in TOKENS for cap in setting.caps(24, 80)]
    for model, tokens, cap in tqdm(combinations, unit="row", disable=None):
        size = preset(model, dry=False)
        batch = tokens // size.seq
        head = f"| {model} | {tokens} | {cap.label} |"
        if speed.first_micro_batch(size, batch, cap.nbytes) < batch:
            lines.append(f"{head} several micro-batches |" + " – |" * 4)
            continue
        said = scale.ask(size, _told(cap), setting.host_nbytes, batch, setting.hardware)
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


if __name__ == "__main__":
    asked = SETTINGS[sys.argv[1] if len(sys.argv) > 1 else "h200"]
    print("\n".join([*scale_lines(asked), "", *speed_lines(asked)]))
