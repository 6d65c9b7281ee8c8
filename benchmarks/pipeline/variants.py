"""What is measured: ways to train one GPT by micro-batches, each in a process of its own."""

from __future__ import annotations

import hashlib
import importlib.util
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import chunkmem
from benchmarks.pipeline.models import NUM_BATCHES, Workload, loss_of, parts_of
from chunkmem.data.errors import CapacityError
from chunkmem.data.types import Role
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.model import Lane
from chunkmem.plan.timeline import Timeline
from chunkmem.testing import ThrottledLanes

ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
NUM_WARMUP_STEPS = 16
"""Of chunkmem's variants: random numbers are counted in the first, the next two are recorded, then plans get better."""
AMPLE_NBYTES = 1 << 40


@dataclass(frozen=True)
class Variant:
    """A way to train."""

    name: str
    title: str
    trainer: str
    """"plain", "accumulating", "by-layer" or "torchgpipe"."""
    checkpoint: str = ""
    """Of the last two."""
    is_exact: bool = True
    """Its bits are those of plain PyTorch."""


PLAIN = Variant("plain", "plain PyTorch accumulating, all resident", "plain")
ACCUMULATING = Variant("accumulating", "chunkmem accumulating", "accumulating")
BY_LAYER = tuple(
    Variant(f"by-layer-{checkpoint}", f"chunkmem by layer, `{checkpoint}`", "by-layer", checkpoint)
    for checkpoint in ("never", "always", "auto")
)
NEVER, ALWAYS, AUTO = BY_LAYER
# torchgpipe gets the loss of the whole batch, which is rounded otherwise.
TORCHGPIPE = tuple(
    Variant(f"torchgpipe-{checkpoint}", f"torchgpipe, `{checkpoint}`", "torchgpipe", checkpoint, is_exact=False)
    for checkpoint in ("never", "always")
)
VARIANTS = (
    PLAIN,
    Variant("plain-again", "plain PyTorch accumulating, again (A/A)", "plain"),
    ACCUMULATING,
    *BY_LAYER,
    *TORCHGPIPE,
)


def is_installed(variant: Variant) -> bool:
    """Tell whether a variant can run here."""
    return variant.trainer != "torchgpipe" or importlib.util.find_spec("torchgpipe") is not None


@dataclass(frozen=True)
class Setting:
    """What a variant is started with."""

    num: int
    """Micro-batches."""
    param_share: float = 1.0
    """The cap of chunkmem's variants without activations, as a share of PARAM bytes."""
    activation_nbytes: int = AMPLE_NBYTES
    """What the cap has in addition to that for activations, where it covers them."""
    num_resident: int = 0
    """The micro-batches whose activations that is for."""
    link_Bps: float | None = None
    """Of throttled links between the tiers; None: as fast as memory is."""


@dataclass(frozen=True)
class Step:
    """One training step as it was measured."""

    step_s: float
    cpu_s: float
    """Of all threads of the process."""
    loss: float


@dataclass(frozen=True)
class Traffic:
    """What moved in a step."""

    param_copies: int
    """Of PARAM to DEVICE."""
    param_nbytes: int
    grad_copies: int
    """Of GRAD to HOST."""
    activation_nbytes: int
    """To DEVICE and to HOST."""
    moved_nbytes: int
    """All, both ways."""


@dataclass(frozen=True)
class Summary:
    """How training ended; of chunkmem's variants, what the last step moved, too."""

    weights: str
    """Digest of the weights."""
    first_s: tuple[float, ...]
    """Steps before those that are timed."""
    device_peak_nbytes: int | None = None
    activation_peak_nbytes: int | None = None
    required_nbytes: int | None = None
    num_groups: int | None = None
    traffic: Traffic | None = None
    recomputed: int | None = None
    """Calls of blocks that are recomputed."""
    num_planned: int | None = None
    """Steps until its plan was the last one: before those that are timed, planning is not part of their time."""


class Trainee:
    """A model under training."""

    def __init__(self, variant: Variant, work: Workload) -> None:
        self._variant, self._work = variant, work
        self._batches = work.batches()
        self._manager: chunkmem.ChunkManager | None = None

    def start(self, setting: Setting) -> bool:
        """Build the model and train the first steps; False: it does not fit."""
        self.close()
        self._num, self._num_steps, self._num_planned = setting.num, 0, 0
        try:
            self._build(setting)
            num_warmup = 1 if self._manager is None else NUM_WARMUP_STEPS
            self._first_s = tuple(self.step().step_s for _ in range(num_warmup))
        except CapacityError:
            return False
        return True

    def _build(self, setting: Setting) -> None:
        variant = self._variant
        if variant.trainer in ("plain", "torchgpipe"):
            self._model = self._work.build()
            self._optimizer: Any = torch.optim.AdamW(self._model.parameters(), fused=True, **ADAMW)
        else:
            # By default no activations count on a CPU; by layer they do.
            counts = variant.trainer == "by-layer" or setting.activation_nbytes == AMPLE_NBYTES
            device_nbytes = int(setting.param_share * self._work.param_nbytes)
            device_nbytes += setting.activation_nbytes if counts else 0
            values = {"memory": {"device": device_nbytes, "host": AMPLE_NBYTES}}
            self._manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(values), **_throttled(setting.link_Bps))
            with self._manager.init():
                self._model = self._work.build()
            self._optimizer = chunkmem.AdamW(self._model.parameters(), manager=self._manager, **ADAMW)
        self._backward_of = getattr(self, "_" + variant.trainer.replace("-", "_"))()

    def _plain(self) -> Any:
        return lambda batch: self._accumulate(batch, Tensor.backward)

    def _accumulating(self) -> Any:
        assert self._manager is not None
        backward = self._manager.backward
        return lambda batch: self._accumulate(batch, backward)

    def _accumulate(self, batch: Tensor, backward: Any) -> float:
        total = 0.0
        for tokens, targets in parts_of(batch, self._num):
            loss = loss_of(self._model(tokens), targets) / self._num
            backward(loss)
            total += loss.item()
        return total

    def _by_layer(self) -> Any:
        assert self._manager is not None
        model = self._model
        pipe = self._manager.pipeline(
            model.blocks,
            first=model.embeddings,
            last=model.head,
            loss_fn=loss_of,
            micro_batches=self._num,
            checkpoint=self._variant.checkpoint,
        )
        return lambda batch: pipe.step(batch[:, :-1], batch[:, 1:]).item()

    def _torchgpipe(self) -> Any:
        from torchgpipe import GPipe

        parts = self._model.in_turn()
        balance = [len(part) for part in torch.arange(len(parts)).chunk(4)]
        gpipe = GPipe(
            parts, balance, devices=["cpu"] * len(balance), chunks=self._num, checkpoint=self._variant.checkpoint
        )

        def run(batch: Tensor) -> float:
            loss = loss_of(gpipe(batch[:, :-1]), batch[:, 1:])
            loss.backward()
            return loss.item()

        return run

    def step(self) -> Step:
        """Train one step."""
        batch = self._batches[self._num_steps % NUM_BATCHES]
        self._num_steps += 1
        plan = None if self._manager is None else self._manager.plan
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        loss = self._backward_of(batch)
        self._optimizer.step()
        self._optimizer.zero_grad()
        step = Step(time.perf_counter() - began_s, time.process_time() - cpu_began_s, loss)
        if self._manager is not None and self._manager.plan is not plan:
            self._num_planned = self._num_steps
        return step

    def forward_s(self) -> float:
        """Return the seconds of CPU of the forward of a micro-batch, the least of several."""
        found = []
        for batch in self._batches * 2:
            tokens, _ = next(parts_of(batch, self._num))
            began_s = time.process_time()
            self._model(tokens)
            found.append(time.process_time() - began_s)
        return min(found)

    def activation_nbytes(self) -> int:
        """Return the bytes that autograd saves in the forward of a micro-batch, without weights."""
        found: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
            return tensor

        tokens, targets = next(parts_of(self._batches[0], self._num))
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(self._model(tokens), targets)
        for parameter in self._model.parameters():
            found.pop(parameter.untyped_storage().data_ptr(), None)
        del loss
        return sum(found.values())

    def summary(self) -> Summary:
        """Return how training ended."""
        manager, digest = self._manager, hashlib.sha256()
        timeline = None if manager is None else manager.timeline()
        weights = self._model.state_dict() if manager is None else manager.state_dict(self._model)
        for tensor in weights.values():
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        if manager is None:
            return Summary(digest.hexdigest(), self._first_s)
        report, trace = manager.memory(), manager.trace
        assert timeline is not None
        recomputed = None if trace is None else sum(region.recomputed is not None for region in trace.regions)
        return Summary(
            digest.hexdigest(),
            self._first_s,
            report.device.peak_nbytes,
            report.device.by_role.get("activation", (0, 0))[1],
            report.device.required_nbytes,
            None if trace is None else sum(chunk.role is Role.PARAM for chunk in trace.chunk_nbytes),
            traffic(timeline),
            recomputed,
            self._num_planned,
        )

    def close(self) -> None:
        """Let go of the model."""
        if self._manager is not None:
            self._manager.close()
        self._manager = None


def _throttled(link_Bps: float | None) -> dict[str, Any]:
    if link_Bps is None:
        return {}
    machine = Machine(0, 0, host_links(h2d_Bps=link_Bps, d2h_Bps=link_Bps))
    return {"machine": machine, "make_lanes": lambda compute: ThrottledLanes(link_Bps)}


def traffic(timeline: Timeline) -> Traffic:
    """Count the copies of a step."""
    copies = [span for span in timeline.spans if span.nbytes and not span.is_stall and span.chunk is not None]
    role = {id(span): span.chunk.role.value for span in copies if span.chunk is not None}
    weights = [span for span in copies if role[id(span)] == "param" and span.lane is Lane.H2D]
    gradients = [span for span in copies if role[id(span)] == "grad" and span.lane is Lane.D2H]
    activations = [span for span in copies if role[id(span)] == "activation"]
    return Traffic(
        len(weights),
        sum(span.nbytes for span in weights),
        len(gradients),
        sum(span.nbytes for span in activations),
        sum(timeline.moved_nbytes.values()),
    )
