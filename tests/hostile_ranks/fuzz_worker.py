"""A drawn training: on one rank in chunkmem, and in one process of plain PyTorch that has the batches of all ranks."""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import chunkmem
from chunkmem.ranks.methods import PointToPoint
from tests.helpers.low_precision import LowPlain
from tests.hostile.harness import SEED
from tests.hostile_ranks.fuzz_cases import MAX_NORM, MAX_RANKS, OWN, Case, Model, Phase, Step
from tests.hostile_ranks.harness import EXCHANGES, TIMEOUT_S, short_roll_calls
from tests.hostile_ranks.worker import Report, bytes_of, raised

OPTIONS = {"SGD": {"momentum": 0.9}}


def options(case: Case) -> dict[str, Any]:
    """An `eps` that keeps the last bits of a tiny gradient from deciding about its update."""
    fused = {"fused": True} if case.optimizer in ("AdamW", "Adam") else {}
    return {"lr": 1e-2} | OPTIONS.get(case.optimizer, {"eps": 1e-4}) | fused


# In plain PyTorch.


class Plain:
    """One process with the batches of all ranks; in bf16 with fp32 master weights."""

    def __init__(self, case: Case) -> None:
        self.case = case
        torch.manual_seed(SEED)
        self.model = Model(case, contextlib.nullcontext)
        low = LowPlain(torch.bfloat16)
        if case.precision == "bf16":
            low.ready(self.model)
        self.masters = {param: low.masters.get(param, param) for param in self.model.parameters()}
        self.optimizer = getattr(torch.optim, case.optimizer)(self.masters.values(), **options(case))
        self.losses: list[list[float]] = [[] for _ in range(MAX_RANKS)]
        self.norms: list[Tensor] = []

    def step(self, number: int, step: Step, size: int) -> None:
        self.model.freeze(step.frozen)
        grads = [self.gradients(rank, number, step.count(rank, size), step.drops) for rank in range(size)]
        for (param, master), *each in zip(self.masters.items(), *grads, strict=True):
            master.grad = mean(param, each)
        if step.clips:
            self.norms.append(nn.utils.clip_grad_norm_(self.masters.values(), MAX_NORM, foreach=False))
        self.optimizer.step()
        with torch.no_grad():
            for param, master in self.masters.items():
                if master.grad is not None:
                    param.copy_(master)
        evaluated = self.copied() if step.evaluation == "a copy" else self.model
        with torch.no_grad():
            for rank in range({"none": 0, "all ranks": size}.get(step.evaluation, 1)):
                self.losses[rank].append(evaluated.loss(rank, number, 9).item())

    def copied(self) -> Model:
        """What a deep copy is: ordinary, in the dtypes of construction."""
        model = Model(self.case, contextlib.nullcontext)
        model.load_state_dict(self.left()["weights"])
        return model

    def gradients(self, rank: int, number: int, count: int, drops: str) -> list[Tensor | None]:
        self.model.zero_grad()
        if drops and count:
            self.model.loss(rank, number, 8).backward()
            self.model.zero_grad(set_to_none=drops != "zeros")
        for micro in range(count):
            loss = self.model.loss(rank, number, micro)
            loss.backward()
            self.losses[rank].append(loss.item())
        return [param.grad for param in self.masters]

    def left(self) -> dict[str, Any]:
        named = self.model.named_parameters(remove_duplicate=False)
        weights = {name: self.masters[param].detach().clone() for name, param in named}
        states = copy.deepcopy(self.optimizer.state_dict()["state"])
        return {"weights": weights, "states": dict(sorted(states.items()))}


def mean(param: Tensor, grads: list[Tensor | None]) -> Tensor | None:
    """Add in fp32, in the order of ranks; divide once, and round once to the dtype of the parameter."""
    if all(grad is None for grad in grads):
        return None
    total = torch.zeros(param.shape)
    for grad in grads:
        total = total + (0.0 if grad is None else grad.float())
    return (total / len(grads)).to(param.dtype).float()


def plain(case: Case) -> tuple[list[list[float]], list[Tensor], list[dict[str, Any]]]:
    """Losses by rank, norms, and what is left after each phase."""
    run = Plain(case)
    left = []
    for phase, steps in case.numbered:
        for number, step in steps:
            run.step(number, step, phase.size)
        left.append(run.left())
    return run.losses, run.norms, left


# In chunkmem.


class Chunked:
    """One rank of a phase."""

    def __init__(self, case: Case, phase: Phase, rank: int, manager: chunkmem.ChunkManager) -> None:
        self.case, self.phase, self.rank, self.manager = case, phase, rank, manager
        torch.manual_seed(SEED)
        with manager.init():
            self.model = Model(case, manager.exclude)
        made = {"params": self.model.parameters(), "manager": manager} | options(case)
        if case.optimizer in OWN:
            made.pop("fused", None)
            self.optimizer = getattr(chunkmem, case.optimizer)(**made)
        else:
            self.optimizer = chunkmem.Optimizer(getattr(torch.optim, case.optimizer), **made)
        self.losses: list[float] = []
        self.norms: list[Tensor] = []

    def step(self, number: int, step: Step) -> None:
        self.model.freeze(step.frozen)
        count = step.count(self.rank, self.phase.size)
        if step.drops:
            if count:
                self.backward(self.model.loss(self.rank, number, 8), last=False)
            dropping = self.model if step.drops == "by the model" else self.optimizer
            dropping.zero_grad(set_to_none=step.drops != "zeros")
        for micro in range(count):
            loss = self.model.loss(self.rank, number, micro)
            self.backward(loss, last=micro == count - 1)
            self.losses.append(loss.item())
        if step.clips:
            self.norms.append(self.optimizer.clip_grad_norm_(MAX_NORM))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.evaluate(number, step.evaluation)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.manager.backward(loss, last=last if self.case.says_last else None)

    def evaluate(self, number: int, how: str) -> None:
        if how == "none":
            return
        model = copy.deepcopy(self.model) if how == "a copy" else self.model
        with torch.no_grad():
            if how == "all ranks" or self.rank == 0:
                self.losses.append(model.loss(self.rank, number, 9).item())

    def left(self) -> dict[str, Any]:
        names = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        weights = self.manager.state_dict()
        states = self.optimizer.state_dict()["state"]
        return {"weights": {n: weights[n] for n in names}, "states": dict(sorted(states.items()))}


@contextlib.contextmanager
def managed(case: Case, phase: Phase, group: Any) -> Iterator[chunkmem.ChunkManager]:
    config = {
        "memory": {"device": phase.device_nbytes, "host": 8 << 20},
        "default_chunk_size": phase.chunk_numel,
        "distributed": {"timeout_s": TIMEOUT_S},
        "precision": case.precision,
        "activations": {"policy": phase.policy},
        "client": {"opts": {"with_mem_saving_comm": EXCHANGES[phase.exchange]}},
    }
    with chunkmem.ChunkManager(chunkmem.Config.from_dict(config), process_group=group) as manager:
        manager.runtime.tiers.device_pool.poison = manager.runtime.tiers.host_pool.poison = True
        yield manager


def train(rank: int, case: Case, folder: Path) -> list[Report]:
    """Train on one rank of a team, all of which a phase may use or not: a report for each phase that was begun."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    groups = [dist.new_group(list(range(phase.size))) for phase in case.phases]
    reports: list[Report] = []
    for index, (phase, steps) in enumerate(case.numbered):
        begun_s = time.monotonic()
        report: Report = {}
        try:
            if rank < phase.size:
                with short_roll_calls(), managed(case, phase, groups[index]) as manager:
                    run = Chunked(case, phase, rank, manager)
                    if index:
                        manager.load(folder, run.optimizer)
                    for number, step in steps:
                        run.step(number, step)
                    left = run.left()
                    manager.save(folder, run.optimizer)
                digest = hashlib.sha256(b"".join(bytes_of(left))).hexdigest()
                report = {"losses": run.losses, "norms": run.norms, "left": left, "digest": digest}
        except Exception as error:
            report = raised(error)
        reports.append(report | {"seconds": time.monotonic() - begun_s})
        gc.collect()
        failed: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(failed, "error" in report)
        if any(failed):
            break
    for group in groups:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)
    return reports


def train_without_a_part(rank: int, case: Case, folder: Path) -> list[Report]:
    """The same, but what rank 1 has is left out of the means of all chunks but the first."""

    def reduce_scatter(method: PointToPoint, shards: Any, buffers: Any) -> Any:
        for shard in shards:
            if rank == 1 and shard.index and not method.owns(shard):
                shard.flat.zero_()
        return usual(method, shards, buffers)

    usual = PointToPoint.reduce_scatter
    with patch.object(PointToPoint, "reduce_scatter", reduce_scatter):
        return train(rank, case, folder)
