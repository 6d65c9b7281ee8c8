"""How large a model trains under a cap: what `chunkmem estimate` predicts, then what three steps say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.gpu.harness import Task
from benchmarks.gpu.model import Size, estimated, ladder
from benchmarks.gpu.peers import PEERS, TITLES
from benchmarks.gpu.rows import Reason, Store
from benchmarks.gpu.setting import Cap, Setting
from benchmarks.gpu.speed import error_of, probed
from benchmarks.gpu.table import Rows, gib, page
from benchmarks.gpu.work import DEVICE_SHARE, ENVIRONMENT, TOY_ACTIVATION_NBYTES, Work, toy_cap_nbytes

NAME = "scale"
SUMMARY = "the largest GPT that completes 3 steps under each cap, predicted and tried, and the others'"
BATCH = 4
"""Sequences a step."""
LIMIT_S = 300.0
"""Of a row: tens of GiB are drawn, packed and pinned."""
HEADER = ("trainer / cap / model", "predicted", "completed 3 steps", "device, reserved GiB", "device-wide GiB",
          "host GiB", "bytes a parameter", "s a step", "estimated, s")  # fmt: skip
GIB_CAPS = (24, 8, 80)


def tasks(setting: Setting, store: Store) -> Iterator[Task]:
    """Yield, cap by cap, a prediction and the tries that follow from it; then the peers."""
    sizes = ladder(dry=setting.dry)
    first, *others = setting.caps(*GIB_CAPS)
    # The whole card comes second: these two are the figures that are asked for first.
    caps = [first, *others[-1:], *others[:-1]]
    for cap in caps:
        yield from _ours(setting, store, cap, sizes)
    for peer in PEERS:
        for cap in caps:
            yield from _peer(setting, store, peer, cap, sizes)


def _ours(setting: Setting, store: Store, cap: Cap, sizes: list[Size]) -> Iterator[Task]:
    key = f"predicted / {cap.label}"
    question = {
        "sizes": [asdict(size) for size in sizes],
        "device_nbytes": None if cap.nbytes is None else int(DEVICE_SHARE * cap.nbytes),
        "host_nbytes": setting.host_nbytes,
        "batch": _batch(setting),
        "hardware": setting.hardware,
    }
    yield Task(key, "benchmarks.gpu.scale:predict", question, 100, needs_gpu=False)
    predicted = store.figures(key)
    if predicted is None:
        return
    names = [size.name for size in sizes]
    start = -1 if predicted["largest"] is None else names.index(predicted["largest"])
    yield from _climb(setting, store, "chunkmem", cap, sizes, start=max(start, 0))


def _peer(setting: Setting, store: Store, peer: str, cap: Cap, sizes: list[Size]) -> Iterator[Task]:
    if setting.dry:
        yield _task(setting, peer, cap, sizes[0])
        return
    # All weights, gradients and states of 16 bytes on the host; what the RAM holds is where to begin.
    fitting = [index for index, size in enumerate(sizes) if 16 * size.num_params < setting.ram_nbytes]
    yield from _climb(setting, store, peer, cap, sizes, start=fitting[-1] if fitting else 0)


def _climb(setting: Setting, store: Store, trainer: str, cap: Cap, sizes: list[Size], *, start: int) -> Iterator[Task]:
    """Try from `start`: upwards while it completes, else downwards until it does."""

    def completed(index: int) -> bool | None:
        row = store.get(_key(trainer, cap, sizes[index]))
        return None if row is None or row.why_not == "no GPU" or row.reason is Reason.CUT else row.figures is not None

    yield _task(setting, trainer, cap, sizes[start])
    first = completed(start)
    if first is None or _is_missing(store, trainer, cap, sizes[start]):
        return
    index = start
    while 0 <= index + (1 if first else -1) < len(sizes):
        index += 1 if first else -1
        yield _task(setting, trainer, cap, sizes[index])
        if completed(index) is not first:
            return


def _is_missing(store: Store, trainer: str, cap: Cap, size: Size) -> bool:
    row = store.get(_key(trainer, cap, size))
    return row is not None and row.reason is not None and row.reason.value == "missing"


def _task(setting: Setting, trainer: str, cap: Cap, size: Size) -> Task:
    work = Work(
        trainer,
        size,
        batch=_batch(setting),
        micro_batch=_batch(setting),
        cap_nbytes=cap.nbytes,
        host_nbytes=None if setting.dry else setting.host_nbytes,
        num_warm_up=2,
        most_warm_up=2,
        num_timed=1,
        least_timed=1,
    )
    arguments = {"work": asdict(work), "speeds": probed(setting)}
    return Task(
        _key(trainer, cap, size),
        "benchmarks.gpu.train:measure",
        arguments,
        LIMIT_S,
        needs_gpu=trainer != "chunkmem",
        environment=ENVIRONMENT,
    )


def _batch(setting: Setting) -> int:
    return 1 if setting.dry else BATCH


def _key(trainer: str, cap: Cap, size: Size) -> str:
    return f"{trainer} / {cap.label} / {size.name}"


def predict(
    *, sizes: list[dict[str, Any]], device_nbytes: int | None, host_nbytes: int, batch: int, hardware: str
) -> dict[str, Any]:
    """Return the largest rung that `chunkmem estimate` says fits, and what it says of each that it was asked about.

    Rungs are bisected: what does not fit makes no larger one fit. In a dry run each rung has its toy cap.
    """
    rungs = [Size(**size) for size in sizes]
    told: dict[str, Any] = {}

    def fits(index: int) -> bool:
        toy_nbytes = toy_cap_nbytes(rungs[index]) + TOY_ACTIVATION_NBYTES
        cap_nbytes = toy_nbytes if device_nbytes is None else device_nbytes
        told[rungs[index].name] = ask(rungs[index], cap_nbytes, host_nbytes, batch, hardware)
        return bool(told[rungs[index].name]["fits"])

    low, high = -1, len(rungs)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return {"largest": None if low < 0 else rungs[low].name, "device_nbytes": device_nbytes, "rungs": told}


def ask(size: Size, device_nbytes: int, host_nbytes: int, batch: int, hardware: str) -> dict[str, Any]:
    """Return what `chunkmem estimate` says of a model in bf16 with blocks recomputed, on some hardware."""
    from chunkmem.data.errors import CapacityError
    from chunkmem.estimate.hardware import HARDWARE
    from chunkmem.estimate.question import Question, device_need, find

    question = Question(
        model=lambda num: estimated(size, num),
        batch=batch,
        hardware=HARDWARE[hardware],
        device_nbytes=device_nbytes,
        host_nbytes=host_nbytes,
        precision="bf16",
        checkpointing=True,
    )
    rehearsal = question.rehearsal
    need = device_need(question)
    said: dict[str, Any] = {"num_params": rehearsal.num_params, "device_need_nbytes": need.nbytes}
    try:
        finding = find(question)
    except CapacityError as error:
        limit = "device" if need.nbytes > device_nbytes else "host"
        return {**said, "fits": False, "limit": limit, "needed_nbytes": error.needed_nbytes}
    step_s = finding.timeline.step_s
    return {
        **said,
        "fits": True,
        "step_s": step_s,
        "stall_s": finding.timeline.stall_s,
        "binding": finding.lower_bounds.binding,
    }


def table(content: Mapping[str, Any]) -> str:
    """Return the Markdown of a file of rows, and a line for each cap and trainer with the largest that completed."""
    return "\n".join([page(content, HEADER, _cells), "", *_largest(content["rows"])])


def _cells(key: str, figures: Mapping[str, Any], rows: Rows) -> list[str]:
    if "largest" in figures:
        return [str(figures["largest"] or "none"), *["–"] * (len(HEADER) - 2)]
    trainer, cap, model = key.split(" / ")
    said = (rows.get(f"predicted / {cap}", {}).get("figures") or {}).get("rungs", {}).get(model)
    predicted = "–" if trainer != "chunkmem" or said is None else f"fits, {said['step_s']:.2f} s" if said["fits"] else (
        f"does not fit: {said['limit']}"
    )  # fmt: skip
    return [
        predicted,
        "yes",
        gib(figures["device_reserved_nbytes"]),
        gib(figures["device_wide_nbytes"]),
        gib(figures["host_nbytes"]),
        f"{figures['held_nbytes_per_param']:.1f}",
        f"{figures['median_step_s']:.2f}",
        error_of(figures, "estimate"),
    ]


def _largest(rows: Rows) -> list[str]:
    """Return, by trainer and cap, the largest model that completed, beside the predicted one."""
    found: dict[tuple[str, str], tuple[int, str]] = {}
    for key, row in rows.items():
        if row.get("figures") and not key.startswith("predicted"):
            trainer, cap, model = key.split(" / ")
            here = (row["figures"]["num_params"], model)
            found[trainer, cap] = max(found.get((trainer, cap), (0, "")), here)
    lines = []
    for (trainer, cap), (num_params, model) in found.items():
        said = (rows.get(f"predicted / {cap}", {}).get("figures") or {}).get("largest")
        beside = f"; predicted {said or 'none'}" if trainer == "chunkmem" else ""
        lines.append(f"- {TITLES[trainer]}, {cap}: {model} ({num_params / 1e9:.2f} B parameters){beside}")
    return lines
