"""How fast it trains, beside what the hardware would allow, what no offload gives, and what the others reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.gpu import rows as saved
from benchmarks.gpu.harness import Task
from benchmarks.gpu.machine import speeds
from benchmarks.gpu.model import Size, preset
from benchmarks.gpu.peers import PEERS
from benchmarks.gpu.rows import Store
from benchmarks.gpu.setting import Cap, Setting
from benchmarks.gpu.table import Rows, gib, page
from benchmarks.gpu.work import CLIPPING_NORM, ENVIRONMENT, MODEL_DATA_NBYTES, Work
from chunkmem.estimate.gpt import VOCAB

NAME = "speed"
SUMMARY = "tokens/s and TFLOP/s at 1-13 B parameters, beside lower bounds, no offload and the others"
MODELS, LARGE_MODELS = ("2.7b", "1.3b", "6.7b", "13b"), ("6.7b", "2.7b", "1.3b", "13b")
"""Those first that plain PyTorch has room for on the card, to compare with; `Setting.is_large` tells which."""
SMALL = ("1.3b", 4096, 8)
"""A small step under a small cap, where what a step costs in addition to arithmetic shows."""
TOKENS = (16384, 4096, 65536)
GIB_CAPS = (24, 80)
NO_OFFLOAD, CLIPPING = "plain", "chunkmem, clipping"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "chunkmem, 8-bit states": {"options": {"optimizer": {"params": {"states": "8bit"}}}},
    "chunkmem, in backward": {"options": {"optimizer": {"params": {"in_backward": True}}}, "max_norm": 0.0},
    "chunkmem, activations auto": {"options": {"activations": {"policy": "auto"}}, "recomputed": False},
    "chunkmem, compiled": {"options": {"activations": {"policy": "recompute"}}, "compiled": True, "recomputed": False},
    "chunkmem, disk": {"on_disk": True},
}
"""What chunkmem alone does, one feature a row, as changes to `Work`."""
DISK_HOST_SHARE, DRY_DISK_HOST_SHARE = 0.5, 1.0
"""Of the model data, what HOST may hold where there is a disk. A toy's embedding is most of it, and updated at once."""
START_S, PLAIN_S, OTHER_S = 10.0, 8.0, 24.0
"""What a row takes: its process, and for each billion parameters plain PyTorch and the others, with a dozen steps.

Seen on an H100 with 16 cores: 44 s for 1.3 billion under 8 GiB, of which building takes 9 s, and the two steps before a
plan is settled 15 s.
"""
LEAST_LIMIT_S, MOST_LIMIT_S = 150.0, 400.0
LOGIT_NBYTES = 8
"""Of each token and each entry of the vocabulary: bf16 logits, what their loss keeps, and their gradient."""
HEADER = ("trainer / model / tokens a step / cap", "tokens/s", "TFLOP/s", "of no offload", "step, s",
          "fastest – slowest", "estimated, s", "planned, s", "stalls, s", "disk, GiB", "lower bound, s",
          "× lower bound", "bound by",
          "device, reserved GiB", "retries", "plan misses", "rolled back", "micro-batches",
          "warm-up steps")  # fmt: skip
COUNTS = ("num_alloc_retries", "plan_misses", "rolled_back", "num_micro_batches", "num_warm_up")
Combination = tuple[str, int, Cap]


def tasks(setting: Setting, _store: Store) -> Iterator[Task]:
    """Yield rows so that each prefix of them is a comparison: one model and cap with all trainers, then the next."""
    rates = probed(setting)
    done: set[tuple[str, int]] = set()
    for index, (model, tokens, cap) in enumerate(_combinations(setting)):
        if (model, tokens) not in done:  # Without offload there is one row, under the largest cap.
            done.add((model, tokens))
            yield task(setting, NO_OFFLOAD, model, tokens, setting.caps()[-1], rates)
        variants = VARIANTS if setting.dry or (model, tokens, cap.label) == (*SMALL[:2], f"{SMALL[2]} GiB") else ()
        for trainer in ("chunkmem", *((CLIPPING,) if index == 0 else ()), *variants, *PEERS):
            yield task(setting, trainer, model, tokens, cap, rates)


def _combinations(setting: Setting) -> list[Combination]:
    if setting.dry:
        return [("toy", 64, setting.caps()[0])]
    caps = setting.caps(*GIB_CAPS)
    models = LARGE_MODELS if setting.is_large else MODELS
    first, *others = [(model, tokens, cap) for tokens in TOKENS for cap in caps for model in models]
    model, tokens, gib = SMALL
    return [first, *((model, tokens, cap) for cap in setting.caps(gib)[:-1]), *others]


def probed(setting: Setting) -> dict[str, Any]:
    """Return the rates that a probe beside these rows found; what there is none of is assumed, and named."""
    path = setting.folder / "probe.json"
    return speeds(saved.read(path)["rows"] if path.exists() else None, hardware=setting.hardware)


def task(
    setting: Setting, trainer: str, model: str, tokens: int, cap: Cap, rates: Mapping[str, Any], **changes: Any
) -> Task:
    """Return the row of a trainer on a preset; `changes` are to its `Work`."""
    size = preset(model, dry=setting.dry)
    batch = max(1, tokens // size.seq)
    micro_batch = first_micro_batch(size, batch, cap.nbytes)
    if setting.dry:
        changes = {"num_warm_up": 3, "most_warm_up": 3, "num_timed": 3, **changes}
    if not setting.dry:
        changes = {"host_nbytes": setting.host_nbytes, **changes}
    if trainer == CLIPPING:
        changes = {"max_norm": CLIPPING_NORM, **changes}
    changes |= VARIANTS.get(trainer, {})
    if changes.get("on_disk"):
        share = DRY_DISK_HOST_SHARE if setting.dry else DISK_HOST_SHARE
        changes["host_nbytes"] = int(share * MODEL_DATA_NBYTES * size.num_params)
    name = trainer.partition(",")[0]
    work = Work(name, size, batch=batch, micro_batch=micro_batch, cap_nbytes=cap.nbytes, **changes)
    needs_s = START_S + (PLAIN_S if name == NO_OFFLOAD else OTHER_S) * size.num_params / 1e9
    smaller = sorted({micro_batch // 2, micro_batch // 4, 1} - {0, micro_batch}, reverse=True)
    return Task(
        key_of(trainer, model, tokens, cap),
        "benchmarks.gpu.train:measure",
        {"work": asdict(work), "speeds": dict(rates)},
        limit_s=60 if setting.dry else min(max(LEAST_LIMIT_S, 2 * needs_s), MOST_LIMIT_S),
        needs_s=None if setting.dry else needs_s,
        environment=ENVIRONMENT,
        needs_gpu=name not in ("chunkmem", NO_OFFLOAD),
        alternatives=[{"work": {**asdict(work), "micro_batch": smaller_one}} for smaller_one in smaller],
    )


def key_of(trainer: str, model: str, tokens: int, cap: Cap) -> str:
    """Return the key of a row."""
    return f"{trainer} / {model} / {tokens} / {cap.label}"


def first_micro_batch(size: Size, batch: int, cap_nbytes: int | None) -> int:
    """Return how many sequences to try at once: as many as leave half of the cap beside logits and kept inputs.

    The same for all trainers. A row that has no room tries half, a quarter, and one.
    """
    if cap_nbytes is None:
        return batch
    kept_nbytes = size.layers * size.width * 2  # the input of each recomputed block, in bf16
    per_sequence = size.seq * (VOCAB * LOGIT_NBYTES + kept_nbytes)
    most = max(1, cap_nbytes // 2 // per_sequence)
    micro_batch = batch
    while micro_batch > most and micro_batch > 1:
        micro_batch //= 2
    return micro_batch


def table(content: Mapping[str, Any]) -> str:
    """Return the Markdown of a file of rows."""
    note = (
        "Model FLOP are 6 × parameters × tokens: what is recomputed is not counted. All recompute their blocks. “Of no "
        "offload” divides by the row of plain PyTorch with as many tokens, which may use the whole card; where that "
        "has no room, there is nothing to divide by. “Estimated” and “planned” give a predicted time of a step and how "
        "much more was measured: by `chunkmem estimate` for assumed hardware, and by the plan at measured rates. "
        "“Rolled back” counts steps whose speculative updates were thrown away. The lower bound is max(compute, link, "
        "host) + tail of chunkmem's own plan, from the rates of `probe`; rows of one feature have neither it nor an "
        "estimate. “Disk” is what was read and written there in a step. Warm-up steps come before the timed ones, "
        "until no plan is made any more and two steps differ by less than 10%: at least 4, at most 8."
    )
    return f"{page(content, HEADER, cells)}\n\n{note}{_assumed(content['rows'])}"


def _assumed(rows: Rows) -> str:
    names = {
        name for row in rows.values() for name in (_lower_bounds(row.get("figures") or {}) or {}).get("assumed", ())
    }
    return f" Assumed, as no probe found them: {', '.join(sorted(names))}." if names else ""


def _lower_bounds(figures: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] | None = figures.get("lower_bounds")
    return found


def cells(key: str, figures: Mapping[str, Any], rows: Rows) -> list[str]:
    """Return the cells of a row of training."""
    _, model, tokens, _ = key.split(" / ")
    base = [row["figures"] for other, row in rows.items() if row.get("figures")
            and other.startswith(f"{NO_OFFLOAD} / {model} / {tokens} / ")]  # fmt: skip
    share = f"{figures['tokens_per_s'] / base[0]['tokens_per_s']:.0%}" if base else "–"
    lower_bounds = _lower_bounds(figures)
    step_s = sum(figures["step_s"]) / len(figures["step_s"])
    return [
        f"{figures['tokens_per_s']:,.0f}",
        f"{figures['model_flop_per_s'] / 1e12:.3g}",
        share,
        f"{step_s:.3f}",
        f"{min(figures['step_s']):.3f} – {max(figures['step_s']):.3f}",
        error_of(figures, "estimate"),
        error_of(figures, "plan"),
        f"{figures['stall_s']:.3f}" if "stall_s" in figures else "–",
        gib(figures.get("disk_nbytes")),
        "–" if lower_bounds is None else f"{lower_bounds['floor_s']:.3f}",
        "–" if lower_bounds is None else f"{step_s / lower_bounds['floor_s']:.2f}",
        "–" if lower_bounds is None else str(lower_bounds["binding"]),
        gib(figures["device_reserved_nbytes"]),
        *("–" if figures.get(name) is None else str(figures[name]) for name in COUNTS),
    ]


def error_of(figures: Mapping[str, Any], of: str) -> str:
    """Return what was predicted of a step, and how much longer it took: by "estimate", or by the "plan" it followed."""
    said = figures.get("estimate") or {}
    if of == "estimate" and said.get("fits") is False:
        return f"does not fit: {said['limit']}"
    step_s = said.get("step_s") if of == "estimate" else figures.get("planned_step_s")
    return "–" if not step_s else f"{step_s:.3f} s, {figures['median_step_s'] / step_s - 1:+.0%}"
