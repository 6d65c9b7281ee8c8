"""A small model trained as an asynchronous pipeline, and a serial simulation of it in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import chunkmem
from chunkmem.contrib.async_pipeline.pipeline import AsynchronousPipeline
from chunkmem.optim.scaler import LossScaler
from tests.helpers.low_precision import LowPlain
from tests.helpers.shared_training import WORDS
from tests.helpers.staged_training import Net, loss_of

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"lr": 1e-2, "weight_decay": 0.1}),
    # With torch's eps of 1e-8 a last bit of a gradient next to 0 is a whole step.
    "adam": ("Adam", {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-4}),
    "adam without decay": ("Adam", {"lr": 1e-2, "eps": 1e-4}),
    "sgd": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "sgd with decay": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
}


@dataclass(frozen=True)
class AsynchronousTask:
    """What all ranks do."""

    versions: str = "stash"
    stages: int = 2
    optimizer: str = "adamw"
    model: str = "plain"
    checkpoint: str = "auto"
    micro_batches: int = 2
    batch: int = 4
    steps: int = 7
    flush_after: tuple[int, ...] = ()
    """Steps after which the pipeline is drained; it is after the last one."""
    freeze_after: int | None = None
    """Step of `flush_after` after which the embedding and the first block are frozen."""
    keep_states: bool = False
    """Of what is frozen."""
    begin: int = 0
    """Steps that were trained before."""
    loads: str = ""
    """The checkpoint of these."""
    scheduled: bool = True
    precision: str = "fp32"
    initial_scale_power: int = 14
    """Of fp16: gradients of the model "hot" overflow in the first batches."""
    clip: float = 0.0
    overlaps: bool = False
    """The optimizer overlaps with backward, where a stage has no delay."""
    two_groups: bool = False
    """Every other parameter has a third of the learning rate, and weight decay of its own."""
    device_nbytes: int = 4 << 20

    def make_config(self) -> chunkmem.Config:
        memory = {"device": self.device_nbytes, "host": 8 << 20}
        base: dict[str, Any] = {"default_chunk_size": 1600, "memory": memory, "distributed": {"timeout_s": 60.0}}
        if self.overlaps:
            base |= {"client": {"opts": {"overlap_optimizer": True}}}
        low: dict[str, Any] = {} if self.precision == "fp32" else {"precision": self.precision}
        if self.precision == "fp16":
            low |= {"fp16": {"initial_scale_power": self.initial_scale_power, "loss_scale_window": 2}}
        return chunkmem.Config.from_dict({**base, **low, "gradient_clipping": self.clip})

    def lowered(self) -> LowPlain:
        """Return this precision in plain PyTorch."""
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]
        return LowPlain(dtype, LossScaler(self.make_config().fp16) if self.precision == "fp16" else None)

    def low_optimizer(self, low: LowPlain, model: nn.Module) -> torch.optim.Optimizer:
        """Return Adam or AdamW over the master weights of a lowered model."""
        name, options = OPTIMIZERS[self.optimizer]
        optimizer = low.optimizer(self.groups(model.parameters()), **options)
        for group in optimizer.param_groups:
            group["decoupled_weight_decay"] = {"Adam": False, "AdamW": True}[name]
        return optimizer

    def groups(self, params: Iterable[nn.Parameter]) -> Any:
        """Return what optimizers are given."""
        params = list(params)
        if not self.two_groups:
            return params
        lr, decay = OPTIMIZERS[self.optimizer][1]["lr"] / 3, 0.05
        return [{"params": params[::2]}, {"params": params[1::2], "lr": lr, "weight_decay": decay}]

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(7)
        for step in range(self.steps):
            x, y = (torch.randint(0, WORDS, (self.batch, 5), generator=draw) for _ in range(2))
            if step >= self.begin:
                yield x, y

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) if self.scheduled else None


@dataclass
class AsynchronousOutcome:
    """What one rank, or one process, ends with."""

    losses: list[float]
    weights: dict[str, Tensor]
    host: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Bytes by role on HOST, now and at the peak, before the pipeline drains at the end."""
    param_nbytes: int = 0
    """Of the chunks of this rank's weights."""
    required_nbytes: int = 0
    device_roles: tuple[str, ...] = ()
    scale: float = 1.0
    num_skipped: int = 0


Watch = Callable[[AsynchronousPipeline, chunkmem.ChunkManager, int], None]


def train(
    rank: int,
    task: AsynchronousTask,
    watch: Watch | None = None,
    before: Callable[[AsynchronousPipeline, chunkmem.ChunkManager, Net], None] | None = None,
) -> AsynchronousOutcome:
    """Train; `watch` is called after each step, and `before` when the pipeline is there, but no optimizer."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (task.stages,), mesh_dim_names=("stage",))
    with chunkmem.ChunkManager(task.make_config(), mesh=mesh) as manager:
        torch.manual_seed(0)
        with manager.init():
            model = Net(task.model)
        pipe = manager.pipeline(
            model.blocks,
            first=model.words,
            last=model.head,
            loss_fn=loss_of,
            micro_batches=task.micro_batches,
            checkpoint=task.checkpoint,
            schedule="async-1f1b",
            versions=task.versions,
        )
        assert isinstance(pipe, AsynchronousPipeline)
        if before is not None:
            before(pipe, manager, model)
        name, options = OPTIMIZERS[task.optimizer]
        optimizer = getattr(chunkmem, name)(task.groups(model.parameters()), manager=manager, **options)
        scheduler = task.make_scheduler(optimizer)
        losses: list[float] = []
        if task.loads:
            manager.load(task.loads, optimizer)
        for step, (x, y) in enumerate(task.batches(), start=task.begin):
            losses.append(pipe.step(x, y, optimizer=optimizer, scheduler=scheduler).item())
            if watch is not None:
                watch(pipe, manager, step)
            if step in task.flush_after:
                losses += [loss.item() for loss in pipe.flush()]
            if step == task.freeze_after:
                manager.freeze(frozen_of(model), keep_states=task.keep_states)
        memory = manager.memory()
        losses += [loss.item() for loss in pipe.flush()]
        weights = {key: value.clone() for key, value in manager.state_dict().items()}
        chunks, scaler = manager.runtime.modules.access.chunks.values(), manager.runtime.scaler
        return AsynchronousOutcome(
            [loss for loss in losses if not math.isnan(loss)],
            weights,
            dict(memory.host.by_role),
            sum(chunk.nbytes for chunk in chunks),
            memory.device.required_nbytes,
            tuple(memory.device.by_role),
            manager.loss_scale,
            0 if scaler is None else scaler.num_skipped,
        )


def frozen_of(model: Net) -> list[nn.Module]:
    """What `freeze_after` freezes."""
    return [model.words, model.blocks[0]]


class Stages(nn.Module):
    """A model cut into as many stages as a pipeline has."""

    def __init__(self, model: Net, num: int) -> None:
        super().__init__()
        blocks = [[block] for block in model.blocks]
        blocks[0].insert(0, model.words)
        blocks[-1].append(model.head)
        count = len(blocks)
        parts = [blocks[count * k // num : count * (k + 1) // num] for k in range(num)]
        self.stages = nn.ModuleList(nn.Sequential(*(m for block in part for m in block)) for part in parts)

    def params_of(self, stage: int) -> list[nn.Parameter]:
        return list(self.stages[stage].parameters())


def stashed(task: AsynchronousTask) -> AsynchronousOutcome:
    """One process: the gradient of a batch is that at weights from as many updates ago as each stage has a delay."""
    torch.manual_seed(0)
    model = Net(task.model)
    name, options = OPTIMIZERS[task.optimizer]
    low = task.lowered()
    if task.precision == "fp32":
        fused = {"fused": True} if "Adam" in name else {}
        optimizer: Any = getattr(torch.optim, name)(task.groups(model.parameters()), **options, **fused)
    else:
        model = low.ready(model)
        optimizer = task.low_optimizer(low, model)
    stages = Stages(model, task.stages)
    scheduler = task.make_scheduler(optimizer)
    now = [param.detach().clone() for param in model.parameters()]
    history = [[p.detach().clone() for p in model.parameters()]]
    losses = []
    for step, (x, y) in enumerate(task.batches()):
        index = {id(param): place for place, param in enumerate(model.parameters())}
        for stage in range(task.stages):
            delay = task.stages - 1 - stage
            old = history[max(0, len(history) - 1 - delay)]
            for param in stages.params_of(stage):
                param.data.copy_(old[index[id(param)]])
        pairs = zip(x.chunk(task.micro_batches), y.chunk(task.micro_batches), strict=True)
        parts = [loss_of(model(a), b) / (len(x) / len(a)) for a, b in pairs]
        losses.append(float(sum(part.detach() for part in parts)))
        for part in parts:
            low.backward(part, last=True, by_manager=True)
        for param, value in zip(model.parameters(), now, strict=True):
            param.data.copy_(value)
        if task.clip:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        now = [param.detach().clone() for param in model.parameters()]
        history.append(now)
        if step in task.flush_after:
            history = [now]
        for module in frozen_of(model) if step == task.freeze_after else ():
            module.requires_grad_(False)
    weights = model.state_dict() if task.precision == "fp32" else low.state_dict(model)
    return outcome_of(losses, weights, low)


def outcome_of(losses: list[float], weights: dict[str, Tensor], low: LowPlain) -> AsynchronousOutcome:
    """Return what a simulation ends with."""
    found = AsynchronousOutcome(losses, {key: value.detach() for key, value in weights.items()})
    if low.scaler is not None:
        found.scale, found.num_skipped = low.scaler.loss_scale, low.scaler.num_skipped
    return found
