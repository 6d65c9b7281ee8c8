"""A pipeline that is divided into another number of stages in the middle of a run, and what that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import chunkmem
from chunkmem.assembly import inventory
from chunkmem.data.types import Role
from chunkmem.plan.moves import HeldGroup, Moves, WantedGroup, plan_moves
from chunkmem.ranks.neighbours import Message, Neighbours
from chunkmem.runtime.ledger import Ledger
from tests.helpers.audit import audit_declared
from tests.helpers.shared_training import WIDTH, WORDS
from tests.helpers.staged_training import AMPLE, Head, Net, StagedTask, loss_of

CONFIGS: dict[str, dict[str, Any]] = {
    "on host": {"use_cpu_embedding": True},
    "tiled": {"with_tiling_linear": 200},
    "offloaded": {"activations": {"policy": "offload"}},
    "clipped": {"gradient_clipping": 0.1},
    "overlapped": {"client": {"opts": {"overlap_optimizer": True, "undo_log_ratio": 1.0}}},
}
"""Keys of the configuration by the kind of a run."""


@dataclass(frozen=True)
class Change:
    """A run that is divided into other stages in the middle."""

    task: StagedTask
    stages: int = 1
    """From the middle on."""
    optimizer: str = "AdamW"
    kind: str = "plain"
    """One of `CONFIGS`; "excluded", "first excluded": a module is; "averaged", "averaged excluded": there are averages
    of weights, of the first stage alone and of all; "two": optimizers; "scheduled": learning rates;
    "frozen late": a parameter, in a chunk with others, is frozen until the last step."""
    before: int = 3
    """Steps."""
    after: int = 3
    chunk_numel: int = 1600
    device_nbytes: int | None = AMPLE

    @property
    def width(self) -> tuple[int, int]:
        """Stages, and data-parallel ranks, from the middle on."""
        return self.stages, self.task.sizes[0] * self.task.sizes[1] // self.stages

    def batches(self, rank: int, sizes: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        task = replace(self.task, steps=self.before + self.after)
        return list(task.batches(rank % sizes[1]))

    def make_config(self) -> chunkmem.Config:
        values = self.task.make_config().to_dict() | {"default_chunk_size": self.chunk_numel}
        values["memory"]["device"] = self.device_nbytes
        return chunkmem.Config.from_dict(values | CONFIGS.get(self.kind, {}))


@dataclass
class Outcome:
    """What one rank ends with."""

    losses: list[float]
    weights: dict[str, Tensor]
    states: list[dict[str, Any]]
    scale: float


class Training:
    """A model, as a pipeline, on one rank."""

    def __init__(self, change: Change, sizes: tuple[int, ...]) -> None:
        torch.set_num_threads(1)
        task = change.task
        names = ("stage", "replicate", "shard") if len(sizes) > 2 else ("stage", "shard")
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        self.manager = chunkmem.ChunkManager(change.make_config(), mesh=mesh)
        torch.manual_seed(0)
        with self.manager.init(), torch.device("meta" if task.on_meta else "cpu"):
            self.model = Net(task.model)
            with self.manager.exclude():
                if change.kind in ("excluded", "averaged excluded"):
                    self.model.head = Head(WIDTH, WORDS, bias=False)
                if change.kind == "first excluded":
                    self.model.words = nn.Embedding(WORDS, WIDTH)
        self.pipe: Any = self.manager.pipeline(
            self.model.blocks,
            first=self.model.words,
            last=self.model.head,
            loss_fn=loss_of,
            micro_batches=task.micro_batches,
            checkpoint=task.checkpoint,
            schedule=task.schedule if change.task.sizes[0] > 1 and sizes[0] > 1 else "auto",
        )
        params = list(self.model.parameters())
        parts = [params[::2], params[1::2]] if change.kind == "two" else [params]
        self.optimizers: list[Any] = [self._optimizer(change, part) for part in parts]
        self.schedulers = [
            torch.optim.lr_scheduler.StepLR(one, 2) for one in self.optimizers if change.kind == "scheduled"
        ]
        self.losses: list[float] = []
        self.averages: list[chunkmem.EMA] = []
        if change.kind.startswith("averaged"):
            first = [*self.model.words.parameters(), *self.model.blocks[0].parameters()]
            self.averages = [chunkmem.EMA(self.manager, 0.5, first), chunkmem.EMA(self.manager, 0.9)]
        self.late = self.model.blocks[1].up.weight if change.kind == "frozen late" else None
        self.num_left = change.before + change.after
        if self.late is not None:
            self.late.requires_grad_(False)

    def _optimizer(self, change: Change, params: list[Any]) -> Any:
        if change.optimizer == "SGD":
            return chunkmem.SGD(params, manager=self.manager, lr=1e-2, momentum=0.9)
        if change.optimizer == "Adafactor":
            return chunkmem.Optimizer(torch.optim.Adafactor, params, manager=self.manager, lr=1e-2)
        if change.optimizer == "Muon and NAdam":
            matrices = [param for param in params if param.dim() == 2]
            rest = [param for param in params if param.dim() != 2]
            return chunkmem.Optimizer(
                [(torch.optim.Muon, matrices), (torch.optim.NAdam, rest)], manager=self.manager, lr=1e-2
            )
        return chunkmem.AdamW(params, manager=self.manager, lr=1e-2)

    def steps(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        for x, y in batches:
            self.num_left -= 1
            if self.late is not None and self.num_left == 0:
                self.late.requires_grad_(True)
            self.losses.append(self.pipe.step(x, y).item())
            for each in (*self.optimizers, *self.schedulers):
                each.step()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            for ema in self.averages:
                ema.update()

    def saved(self) -> Any:
        return (
            self.manager.state_dict(),
            [optimizer.state_dict() for optimizer in self.optimizers],
            [scheduler.state_dict() for scheduler in self.schedulers],
            [ema.state_dict() for ema in self.averages],
        )

    def load(self, saved: Any) -> None:
        weights, *states = saved
        self.manager.load_state_dict(weights)
        loading = [*self.optimizers, *self.schedulers, *self.averages]
        for each, state in zip(loading, [state for kind in states for state in kind], strict=True):
            each.load_state_dict(state)

    def outcome(self) -> Outcome:
        weights, states, _, averages = self.saved()
        weights |= {f"{name} of EMA {at}": value for at, each in enumerate(averages) for name, value in each.items()}
        return Outcome(self.losses, weights, states, self.manager.loss_scale)


def divided(rank: int, change: Change) -> Outcome:
    """Divide a pipeline after some steps."""
    sizes = change.task.sizes
    training = Training(change, sizes)
    with training.manager:
        training.steps(change.batches(rank, sizes)[: change.before])
        before = list(training.model.parameters())
        training.pipe = training.pipe.repartition(stages=change.stages)
        assert all(one is other for one, other in zip(before, training.model.parameters(), strict=True))
        audit_declared(training.manager)
        training.steps(change.batches(rank, change.width)[change.before :])
        return training.outcome()


def resumed(rank: int, change: Change) -> Outcome:
    """Do the same by a checkpoint, loaded into another manager."""
    sizes = change.task.sizes
    training = Training(change, sizes)
    with training.manager:
        training.steps(change.batches(rank, sizes)[: change.before])
        saved, losses = training.saved(), training.losses
    training = Training(change, change.width)
    with training.manager:
        training.load(saved)
        training.losses, training.num_left = losses, change.after
        training.steps(change.batches(rank, change.width)[change.before :])
        return training.outcome()


def differences(found: list[Outcome], expected: list[Outcome]) -> list[str]:
    """The names of what differs in a bit."""
    names = []
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        names += [f"rank {rank}: losses {one.losses} {other.losses}"] * (one.losses != other.losses)
        names += [f"rank {rank}: scale {one.scale} {other.scale}"] * (one.scale != other.scale)
        assert one.weights.keys() == other.weights.keys()
        names += [
            f"rank {rank}: {key}" for key, value in other.weights.items() if not torch.equal(one.weights[key], value)
        ]
        for mine, theirs in zip(one.states, other.states, strict=True):
            assert mine["state"].keys() == theirs["state"].keys()
            for index, state in theirs["state"].items():
                own = mine["state"][index]
                assert own.keys() == state.keys()
                names += [f"rank {rank}: {key} of {index}" for key in state if not torch.equal(own[key], state[key])]
    return names


@dataclass
class Cost:
    """What dividing a pipeline takes on one rank."""

    before_nbytes: int
    """Of all chunks on all tiers, but those of gradients."""
    owned: dict[str, tuple[int, tuple[str, ...]]]
    """By parameter that this rank owned before: its elements, and the roles it has."""
    peak_nbytes: int = 0
    after_nbytes: int = 0
    largest: dict[str, int] = field(default_factory=dict)
    """The largest chunk of each role."""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes that this rank has sent, by label."""
    wanted: list[str] = field(default_factory=list)
    """Parameters that this rank owns afterwards."""


def measured(rank: int, change: Change) -> Cost:
    """Divide a pipeline, and look on."""
    sizes = change.task.sizes
    training = Training(change, sizes)
    manager = training.manager
    with manager:
        training.steps(change.batches(rank, sizes)[: change.before])
        tiers = manager.runtime.tiers
        tiers.device_pool.poison = tiers.host_pool.poison = True
        for nbytes in {chunk.nbytes for chunk in manager.runtime.memory.store.chunks.values()}:
            for slab in [tiers.host_pool.alloc("test", nbytes) for _ in range(8)] if tiers.caps.host_nbytes else ():
                tiers.host_pool.free("test", slab)  # what comes next has memory with something in it

        def total() -> int:
            others = ("cache", "grad")  # memory that is free in between, which nothing is lost of
            ledgers = (tiers.device, tiers.host)
            return sum(nbytes for one in ledgers for role, nbytes in one.now.items() if role not in others)

        if training.late is not None:  # then it is packed with others, and has no states yet
            training.late.requires_grad_(True)
        cost = Cost(total(), _owned_by(manager))
        with _watched(cost, total) as planned:
            training.pipe.repartition(stages=change.stages)
        if change.task.precision == "fp32":
            _, wanted = planned[1]
            expected = {group.group: sum(group.nbytes) for group in wanted if group.rank == rank}
            assert _nbytes_by_group(manager) == expected
        assert pads_that_are_not_zero(manager) == []
        assert states_of_nobody(training) == []
        cost.after_nbytes, cost.wanted = total(), list(_owned_by(manager))
        chunks = manager.runtime.memory.store.chunks.values()
        assert cost.after_nbytes == sum(c.nbytes * len(c.replicas) for c in chunks if c.id.role is not Role.GRAD)
        for chunk in chunks:
            if chunk.id.role is not Role.GRAD:
                cost.largest[str(chunk.id.role)] = max(chunk.nbytes, cost.largest.get(str(chunk.id.role), 0))
    return cost


def pads_that_are_not_zero(manager: chunkmem.ChunkManager) -> list[str]:
    """The chunks that have something else than 0 where no parameter is."""
    chunks = manager.runtime.memory.store.chunks.values()
    contents = [(c, replica.flat) for c in chunks for tier, replica in c.replicas.items() if c.ready(tier)]
    return [c.label for c, flat in contents if any(bool(flat[start:stop].any()) for start, stop in c.group.pads)]


def states_of_nobody(training: Training) -> list[str]:
    """The states other than 0 of parameters that were never updated."""
    runtime, found = training.manager.runtime, []
    counts = {managed for optimizer in training.optimizers for managed in optimizer.updates.states.held()}
    for managed in set(filter(runtime.owns, runtime.registry.parameters)) - counts:
        chunks = (chunk for key, chunk in runtime.memory.store.chunks.items() if key.group == managed.group)
        states = (chunk for chunk in chunks if chunk.id.role.is_state and not chunk.id.role.kind.stays)
        for chunk in (chunk for chunk in states if chunk.newest_tier() is not None):
            values = runtime.memory.store.views(chunk, chunk.newest_tier())[managed.position]
            found += [f"{chunk.id.role} of {managed}"] * bool(values.ne(0).any())
    return found


def _owned_by(manager: chunkmem.ChunkManager) -> dict[str, tuple[int, tuple[str, ...]]]:
    runtime = manager.runtime
    chunks, found = runtime.memory.store.chunks, {}
    for name, param in runtime.root(None).named_parameters():
        managed = runtime.registry.find(param)
        if managed is not None and runtime.owns(managed):
            roles = [str(key.role) for key, c in chunks.items() if key.group == managed.group and c.version >= 0]
            found[name] = param.numel(), tuple(sorted(roles))
    return found


def _nbytes_by_group(manager: chunkmem.ChunkManager) -> dict[int, int]:
    """By group that this rank owns: the bytes of its weights and states, once each."""
    found: dict[int, int] = {}
    for key, chunk in manager.runtime.memory.store.chunks.items():
        is_own = chunk.version >= 0 and not (chunk.is_remote or chunk.is_copy)
        if is_own and key.role not in (Role.GRAD, Role.ACTIVATION):
            found[key.group] = found.get(key.group, 0) + chunk.nbytes
    return found


@contextmanager
def _watched(cost: Cost, total: Callable[[], int]) -> Iterator[list[Any]]:
    def charge(self: Ledger, role: str, nbytes: int) -> None:
        usual_charge(self, role, nbytes)
        cost.peak_nbytes = max(cost.peak_nbytes, total())

    def send(self: Neighbours, tensors: Sequence[Tensor], message: Message, **options: Any) -> Any:
        assert message.label not in cost.sent, "sent twice"
        cost.sent[message.label] = sum(tensor.nbytes for tensor in tensors)
        return usual_send(self, tensors, message, **options)

    def plan(held: list[HeldGroup], wanted: list[WantedGroup]) -> Moves:
        planned.append((held, wanted))
        return plan_moves(held, wanted)

    planned: list[Any] = []
    usual_charge, usual_send = Ledger.charge, Neighbours.send
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "charge", charge)
        patch.setattr(Neighbours, "send", send)
        patch.setattr(inventory, "plan_moves", plan)
        yield planned
    assert len(planned) == 2
    assert planned[0] == planned[1], "what was checked to have room is not what was packed"
