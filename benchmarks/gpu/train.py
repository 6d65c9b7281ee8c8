"""Train one GPT under a cap for some steps, and tell how long they took and what they held."""

from __future__ import annotations

import contextlib
import logging
import math
import resource
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from benchmarks.gpu import peers
from benchmarks.gpu.lower_bounds import bounds_of_step
from benchmarks.gpu.model import build, tokens
from benchmarks.gpu.scale import ask
from benchmarks.gpu.timing import full_collections
from benchmarks.gpu.warm_up import WarmUp, warm_up
from benchmarks.gpu.work import ADAMW, MODEL_DATA_NBYTES, NUM_BATCHES, Training, Work, compute_device
from chunkmem.data.errors import ChunkmemError
from chunkmem.estimate.model import checkpointed

DRY_BACKEND = "aot_eager"
"""Of torch.compile without a card: compiling for a CPU takes half a minute and tells nothing."""


class Meter:
    """Looks at memory between steps: torch's allocator, the whole device, the whole machine.

    The allocator's own peaks are asked at every look and kept here: chunkmem resets them at the end of each of its
    steps, so a peak of allocated bytes within its step is not seen. What is reserved does not shrink and is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._available_nbytes = psutil.virtual_memory().available
        self._peaks: dict[str, int] = {}

    def look(self) -> None:
        """Note what is in use now, and what the allocator says was since somebody reset its peaks."""
        # Page-locked memory of the driver is in no process's own count, so the machine's is asked, too.
        used = self._available_nbytes - psutil.virtual_memory().available
        seen = {"host_nbytes": max(used, psutil.Process().memory_info().rss)}
        if self._on_cuda:
            free, total = torch.cuda.mem_get_info(self._device)
            seen |= {
                "device_allocated_nbytes": torch.cuda.max_memory_allocated(self._device),
                "device_reserved_nbytes": torch.cuda.max_memory_reserved(self._device),
                "device_wide_nbytes": total - free,
            }
        self._peaks = {name: max(nbytes, self._peaks.get(name, 0)) for name, nbytes in seen.items()}

    def reset(self) -> None:
        """Forget the peaks: building is over."""
        self._peaks = {}
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def figures(self) -> dict[str, Any]:
        """Return the peaks of all looks since `reset`; None where there is no device."""
        nowhere = dict.fromkeys(("device_allocated_nbytes", "device_reserved_nbytes", "device_wide_nbytes"))
        retries = torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0) if self._on_cuda else None
        return {
            **nowhere,
            **self._peaks,
            "process_peak_nbytes": _process_peak_nbytes(),
            "num_alloc_retries": retries,
        }


def _process_peak_nbytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def hold_to(cap_nbytes: int | None) -> None:
    """Have torch's allocator refuse what is above the cap, whoever asks."""
    if cap_nbytes is not None:
        _, total_nbytes = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_nbytes / total_nbytes))


def open_training(work: Work) -> Training:
    """Build the model and whatever trains it.

    Raises:
        NotHereError: the trainer's library is not here, or does not work.
    """
    makers = {"chunkmem": train_chunkmem, **peers.TRAINERS}
    return makers[work.trainer](work)


def train_chunkmem(work: Work) -> Training:
    """chunkmem in bf16 with fp32 master weights, blocks recomputed, under the cap; it says when it plans, and why."""
    import chunkmem

    logging.basicConfig(format="%(relativeCreated)d ms: %(message)s")
    logging.getLogger("chunkmem.plan").setLevel(logging.INFO)
    memory: dict[str, Any] = {"device": work.device_nbytes}
    if work.host_nbytes is not None:
        memory["host"] = work.host_nbytes
    folder = tempfile.TemporaryDirectory(prefix="chunkmem-gpu-", dir=Path.cwd()) if work.on_disk else None
    if folder is not None:
        memory["disk"] = {"path": folder.name, "capacity": MODEL_DATA_NBYTES * work.size.num_params}
    keys = {"precision": "bf16", "gradient_clipping": work.max_norm, "memory": memory, **work.options}
    manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(keys))
    with manager.init():
        model = build(work.size)
    # Not before it is packed: what manages modules has to see them as they were built.
    if work.compiled:
        manager.compile(model, backend="inductor" if work.cap_nbytes else DRY_BACKEND)
    if work.recomputed:
        checkpointed(model)
    optimizer = chunkmem.AdamW(model.parameters(), manager=manager, **ADAMW)
    manager.accumulate(work.num_micro_batches)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def close() -> None:
        manager.close()
        if folder is not None:
            folder.cleanup()

    def has_settled() -> bool:
        controller = manager.runtime.controller
        entry = controller.known.training
        return controller.residence.is_on or (entry is not None and entry.is_final)

    return Training(
        model,
        lambda loss, last: manager.backward(loss, last=last),
        update,
        has_settled=has_settled,
        told=lambda: _of_manager(manager),
        close=close,
        manager=manager,
    )


def _of_manager(manager: Any) -> dict[str, Any]:
    from chunkmem.plan.model import Lane

    timeline, memory = manager.timeline(), manager.memory()
    found: dict[str, Any] = {
        "chunk_peak_nbytes": memory.device.peak_nbytes,
        "host_chunk_nbytes": memory.host.peak_nbytes,
        # Steps whose speculative updates were thrown away, of all.
        "rolled_back": manager.runtime.updater.ahead.guesses.num_wrong,
    }
    if timeline is not None:
        found |= {
            "stall_s": timeline.stall_s,
            "plan_misses": timeline.plan_misses,
            "h2d_nbytes": timeline.moved_nbytes.get(Lane.H2D, 0),
            "d2h_nbytes": timeline.moved_nbytes.get(Lane.D2H, 0),
            "disk_nbytes": sum(timeline.moved_nbytes.get(lane, 0) for lane in (Lane.DISK_READ, Lane.DISK_WRITE)),
        }
    return found


def batches_of(work: Work, device: torch.device) -> list[list[Tensor]]:
    """Return the micro-batches of each of the steps that are repeated."""
    return [
        [
            tokens(work.size, work.micro_batch, device=device, seed=step * work.num_micro_batches + index)
            for index in range(work.num_micro_batches)
        ]
        for step in range(NUM_BATCHES)
    ]


def measure(work: Mapping[str, Any], speeds: Mapping[str, Any]) -> dict[str, Any]:
    """Train as a `Work` says; return its figures, for chunkmem with their lower bounds and what was expected.

    A row's process calls it.

    Raises:
        ValueError: a loss is not finite.
    """
    asked = Work.of(work)
    training, figures = run(asked)
    if training.manager is not None:
        if asked.is_ordinary:
            figures["lower_bounds"] = bounds_of_step(training.manager, asked, speeds)
        figures["planned_step_s"] = planned_step_s(training.manager)
    training.close()
    if training.manager is not None and asked.is_ordinary and asked.num_micro_batches == 1:
        figures["estimate"] = estimate_of(asked, str(speeds["hardware"]))
    return figures


def planned_step_s(manager: Any) -> float | None:
    """Return what a step takes by the plan that was followed, at this machine's measured rates; None without one."""
    from chunkmem.plan.simulate import simulate

    with contextlib.suppress(ChunkmemError):
        return None if manager.plan is None else simulate(manager.plan, manager.trace).step_s
    return None


def estimate_of(work: Work, hardware: str) -> dict[str, Any]:
    """Return what `chunkmem estimate` says of this row, or why it says nothing."""
    host_nbytes = psutil.virtual_memory().total if work.host_nbytes is None else work.host_nbytes
    try:
        return ask(work.size, work.estimated_nbytes, host_nbytes, work.batch, hardware)
    except Exception as error:  # What was measured is worth more.
        traceback.print_exc()
        return {"error": repr(error)[:200]}


def run(work: Work) -> tuple[Training, dict[str, Any]]:
    """Train; return the training, still open, and the figures."""
    device = compute_device()
    meter = Meter(device)
    hold_to(work.cap_nbytes)
    began_s = time.perf_counter()
    training = open_training(work)
    build_s = time.perf_counter() - began_s
    print(f"built after {build_s:.1f} s", flush=True)
    steps = batches_of(work, device)
    first: dict[str, Any] = {}

    def passed(so_far: WarmUp) -> None:
        number = len(so_far.step_s)
        print(f"step {number} is done after {time.perf_counter() - began_s:.1f} s", flush=True)
        meter.look()
        if number == 1:
            # What building took is over; what the first step takes is part of what training needs.
            first.update(meter.figures())
            meter.reset()

    warm = warm_up(training, steps, least=work.num_warm_up, most=work.most_warm_up, passed=passed)
    with full_collections() as collections_s:
        step_s, loss = _timed(training, steps, work, meter, device)
    losses = [*warm.losses, float(loss)]
    if not all(math.isfinite(value) for value in losses):
        raise ValueError(f"{work.trainer}: a loss is not finite: {losses}")
    total_s = sum(step_s)
    num_params = work.size.num_params
    per_s = work.tokens * len(step_s) / total_s
    told = training.told()
    found = meter.figures()
    held_nbytes = (found["device_reserved_nbytes"] or told.get("chunk_peak_nbytes") or 0) + found["host_nbytes"]
    return training, {
        "num_params": num_params,
        "tokens": work.tokens,
        "micro_batch": work.micro_batch,
        "num_micro_batches": work.num_micro_batches,
        "cap_nbytes": work.cap_nbytes,
        "host_cap_nbytes": work.host_nbytes,
        "max_norm": work.max_norm,
        "build_s": build_s,
        "num_warm_up": len(warm.step_s),
        "warm_up_s": warm.step_s,
        "has_settled": warm.has_settled,
        "full_collections_s": collections_s,
        "step_s": step_s,
        "median_step_s": statistics.median(step_s),
        "tokens_per_s": per_s,
        "model_flop_per_s": 6 * num_params * per_s,
        "losses": losses,
        "first_step": first,
        **found,
        "held_nbytes_per_param": held_nbytes / num_params,
        **told,
    }


def _timed(
    training: Training, steps: list[list[Tensor]], work: Work, meter: Meter, device: torch.device
) -> tuple[list[float], Tensor]:
    """Return the seconds of each timed step, which add up to those of all, and the last loss.

    On CUDA the device is waited for at the beginning and the end only; a step lasts from one event to the next.
    """
    on_cuda = device.type == "cuda"
    ends: list[Any] = []

    def mark() -> None:
        if on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            ends.append(event)
        else:
            ends.append(time.perf_counter())

    if on_cuda:
        torch.cuda.synchronize()
    began_s = time.perf_counter()
    mark()
    loss = torch.zeros(())
    for index in range(work.num_timed):
        loss = training.step(steps[index % NUM_BATCHES])
        mark()
        meter.look()
        if index + 1 >= work.least_timed and time.perf_counter() - began_s > work.timed_s:
            break
    if on_cuda:
        torch.cuda.synchronize()
        return [1e-3 * a.elapsed_time(b) for a, b in pairwise(ends)], loss
    return [b - a for a, b in pairwise(ends)], loss
