"""A pipeline whose number of stages changes while its layers are frozen, and the same runs by checkpoints."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import chunkmem
from chunkmem.assembly.runtime import Runtime
from chunkmem.contrib.elastic.block_times import BlockTimes, LastSteps, SampleCost, kinds_of
from chunkmem.contrib.elastic.costs import WidthCosts
from tests.helpers.staged_training import Net, StagedTask, loss_of

NUM_STEPS = 3
"""In each phase."""
FAST_BPS = 1e12
MIDDLE_BPS = 1e6
SLOW_BPS = 3e5
CRAWLING_BPS = 3e4


@dataclass(frozen=True)
class Elastic:
    """A run in phases: some steps, then something is frozen, and the number of stages is chosen."""

    sizes: tuple[int, ...]
    """Stages and data-parallel ranks at the beginning; or stages, replicas and ranks that share each."""
    frozen: tuple[tuple[int, ...], ...]
    """By phase but the first: the blocks that are frozen when it begins."""
    precision: str = "fp32"
    model: str = "plain"
    schedule: str = "1f1b"
    speeds: tuple[float, ...] = (FAST_BPS,)
    """By change: bytes a second between ranks."""
    batch: int = 16
    """Samples of a global batch."""

    def batches(self, phase: int) -> list[tuple[Tensor, Tensor]]:
        task = StagedTask(batch=self.batch, steps=NUM_STEPS * (1 + len(self.frozen)))
        return list(task.batches())[NUM_STEPS * phase :][:NUM_STEPS]


@dataclass
class Ended:
    """What one rank ends with."""

    shapes: list[tuple[int, ...]]
    """By phase: stages and width."""
    losses: list[float]
    weights: dict[str, Tensor]
    states: dict[int, Any]
    reasons: list[str]
    num_modules: int = 0
    """In the stages of this rank, if there are any."""


class Run:
    """A model as an elastic pipeline, on one rank."""

    def __init__(
        self,
        run: Elastic,
        sizes: tuple[int, ...],
        *,
        timeout_s: float = 60.0,
        freeze: bool = False,
        cached_nbytes: int = 0,
    ) -> None:
        torch.set_num_threads(1)
        task = StagedTask(precision=run.precision, timeout_s=timeout_s)
        names = ("stage", "replicate", "shard") if len(sizes) > 2 else ("stage", "shard")
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        self.run = run
        self.manager = chunkmem.ChunkManager(task.make_config(), mesh=mesh)
        torch.manual_seed(0)
        with self.manager.init():
            self.model = Net(run.model)
        self.cache = chunkmem.FrozenCache(self.manager, host=cached_nbytes) if cached_nbytes else None
        self.pipe: Any = self.manager.pipeline(
            self.model.blocks,
            first=self.model.words,
            last=self.model.head,
            loss_fn=loss_of,
            micro_batches=4,
            checkpoint="never",
            schedule=run.schedule,
            width="auto",
            freeze=chunkmem.FreezeSchedule(self.model.blocks, alpha=0.5, first=self.model.words) if freeze else None,
            cache=self.cache,
        )
        self.optimizer = chunkmem.AdamW(self.model.parameters(), manager=self.manager, lr=1e-2)
        self.losses: list[float] = []

    def steps(self, phase: int) -> None:
        for x, y in self.run.batches(phase):
            self.losses.append(self.pipe.step(*self.pipe.share(x, y)).item())
            self.optimizer.step()
            self.optimizer.zero_grad()

    def freeze(self, phase: int) -> None:
        blocks = [self.model.blocks[at] for at in self.run.frozen[phase - 1]]
        first = [self.model.words] if 0 in self.run.frozen[phase - 1] else []
        self.manager.freeze([*first, *blocks])

    def ended(self, shapes: list[tuple[int, ...]], reasons: list[str]) -> Ended:
        weights = {key: value.clone() for key, value in self.manager.state_dict().items()}
        return Ended(shapes, self.losses, weights, self.optimizer.state_dict()["state"], reasons)


@contextlib.contextmanager
def fixed(speed_Bps: float, steps_s: Mapping[int, float] | None = None) -> Iterator[None]:
    """Have blocks take 1 ms a sample forward, and 2 backward where they are trained, and exchanges a known time.

    By number of stages, `steps_s` is what the last steps took; None: what was predicted.
    """

    def last(self: WidthCosts, runtime: Runtime) -> LastSteps | None:
        if steps_s is None:
            return None
        stages = runtime.ranks.stages
        step_s = steps_s[1 if stages is None else stages.size]
        return LastSteps(step_s, 0.0, self._times.trained())

    def per_sample(self: BlockTimes, *, then: bool = False) -> Mapping[int, SampleCost]:
        found = usual(self, then=then)
        return {
            at: SampleCost(1e-3, 1e-3 * kinds_of(self.trained())[at], each.output_nbytes) for at, each in found.items()
        }

    usual = BlockTimes.per_sample
    with (
        patch.object(BlockTimes, "per_sample", per_sample),
        patch.object(WidthCosts, "_last", last),
        patch.object(WidthCosts, "_speed", lambda *_: speed_Bps),
        patch.object(WidthCosts, "_latency_s", lambda *_: 0.0),
    ):
        yield


def elastic(rank: int, run: Elastic) -> Ended:
    """Train, freeze and resize."""
    one = Run(run, run.sizes)
    with one.manager:
        shapes: list[tuple[int, ...]] = [run.sizes]
        reasons: list[str] = []
        one.steps(0)
        for phase in range(1, 1 + len(run.frozen)):
            one.freeze(phase)
            params = list(one.model.parameters())
            with fixed(run.speeds[(phase - 1) % len(run.speeds)]):
                is_changed = one.pipe.resize()
            assert all(mine is other for mine, other in zip(params, one.model.parameters(), strict=True))
            shapes.append((one.pipe.num_stages, one.pipe.width))
            assert is_changed or shapes[-1] == shapes[-2]
            reasons.append(one.pipe.reason)
            with fixed(run.speeds[(phase - 1) % len(run.speeds)]):
                assert not one.pipe.resize(), f"{reasons[-1]}, and then {one.pipe.reason}"
            assert "inf" not in one.pipe.reason, "what runs now can be predicted"
            one.steps(phase)
        ended = one.ended(shapes, reasons)
        if one.pipe.num_stages > 1:
            ended.num_modules = sum(len(stage.submod.blocks) for stage in one.pipe._pipeline.stages)
        return ended


def in_epochs(rank: int, run: Elastic, cached_nbytes: int) -> tuple[list[int], list[float], int, int]:
    """Train on the same batches in four epochs; return stages, losses, and how many samples were found and computed.

    Layers freeze after the first one, and the stages become data-parallel ranks after the second.
    """
    one = Run(run, run.sizes, freeze=True, cached_nbytes=cached_nbytes)
    with one.manager:
        num_stages = []
        for epoch in range(4):
            num_stages.append(one.pipe.num_stages)
            for number, (x, y) in enumerate(run.batches(0)):
                ids = torch.arange(number * run.batch, (number + 1) * run.batch)
                x, y, ids = one.pipe.share(x, y, ids)
                named = {} if one.cache is None else {"ids": ids}
                one.losses.append(one.pipe.step(x, y, **named).item())
                one.optimizer.step()
                one.optimizer.zero_grad()
            with fixed(FAST_BPS if epoch else CRAWLING_BPS):
                if epoch == 0:
                    one.pipe.end_epoch()
                one.pipe.resize()
        if one.cache is None:
            return num_stages, one.losses, 0, 0
        return num_stages, one.losses, one.cache.report.num_found, one.cache.report.num_computed


def by_checkpoints(rank: int, run: Elastic, shapes: list[tuple[int, ...]], folder: str) -> Ended:
    """Do the same by a checkpoint before each change, which another run continues from at the width that is next."""
    losses: list[float] = []
    for phase, sizes in enumerate(shapes):
        one = Run(run, sizes)
        with one.manager:
            if phase:
                one.manager.load(f"{folder}/{phase}", one.optimizer)
                for earlier in range(1, phase + 1):
                    one.freeze(earlier)
            one.losses = losses
            one.steps(phase)
            if phase + 1 == len(shapes):
                return one.ended(shapes, [])
            one.manager.save(f"{folder}/{phase + 1}", one.optimizer)
    raise AssertionError("a run has a phase")


def different(found: list[Ended], expected: list[Ended]) -> list[str]:
    """The names of what differs in a bit."""
    names = []
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        names += [f"rank {rank}: losses {one.losses} {other.losses}"] * (one.losses != other.losses)
        names += [
            f"rank {rank}: {key}" for key, value in other.weights.items() if not torch.equal(one.weights[key], value)
        ]
        names += [f"rank {rank}: state {index}" for index in one.states.keys() ^ other.states.keys()]
        for index in one.states.keys() & other.states.keys():
            mine, theirs = one.states[index], other.states[index]
            names += [f"rank {rank}: {key} of {index}" for key in theirs if not torch.equal(mine[key], theirs[key])]
    return names


def killed(rank: int, run: Elastic, folder: str, point: str, bad: int) -> str:
    """Save, then lose a rank while the ranks are divided again; return what this one says."""
    from chunkmem.assembly.moving import ChunkMover
    from chunkmem.assembly.runtime import Runtime
    from chunkmem.pipeline import build

    def die_at(owner: Any, name: str, call: int) -> Callable[..., Any]:
        usual, calls = getattr(owner, name), []

        def dying(*args: Any, **options: Any) -> Any:
            calls.append(name)
            if rank == bad and len(calls) == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return usual(*args, **options)

        return dying

    owner, name, call = {
        "before": (build, "_refuse", 1),
        "undone": (Runtime, "end_groups", 1),
        "moving": (ChunkMover, "_move", 7),
        "at the end": (ChunkMover, "_begin_remote", 1),
    }[point]
    one = Run(run, run.sizes, timeout_s=20.0)
    with one.manager, patch.object(owner, name, die_at(owner, name, call)):
        one.steps(0)
        one.manager.save(f"{folder}/saved", one.optimizer, extra={"losses": one.losses})
        one.freeze(1)
        try:
            with fixed(FAST_BPS):
                one.pipe.resize()
            one.steps(1)
        except chunkmem.RankError as error:
            return str(error)
    return "nothing"


def taken_up(rank: int, run: Elastic, folder: str) -> Ended:
    """Continue from the checkpoint of a run that was killed."""
    one = Run(run, run.sizes)
    with one.manager:
        one.losses = one.manager.load(f"{folder}/saved", one.optimizer)["losses"]
        one.freeze(1)
        shapes = [run.sizes]
        one.pipe.repartition(stages=1)
        shapes.append((one.pipe.num_stages, one.pipe.width))
        one.steps(1)
        return one.ended(shapes, [])
