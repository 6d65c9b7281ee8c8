"""What is measured: ways to train one model, each in a process of its own that builds it again for every cap."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import chunkmem
from benchmarks.activations.models import NUM_BATCHES, Workload
from chunkmem.data.errors import CapacityError
from chunkmem.plan.machine import Machine, host_links
from chunkmem.plan.simulate import simulate
from chunkmem.report.regions import region_policies
from chunkmem.testing import ThrottledLanes

ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
NUM_WARMUP_STEPS = 30
"""The first is recorded, what is recomputed is chosen then, and up to twice again while plans get better."""
AMPLE_NBYTES = 1 << 40


@dataclass(frozen=True)
class Variant:
    """A way to train."""

    name: str
    title: str
    chunked: bool = True
    policy: str | None = None
    checkpointed: bool = False
    """torch's checkpoint around every block."""
    on_cpu: bool = False
    """What autograd saves is copied to HOST and back, as `save_on_cpu` does."""

    @property
    def is_counted(self) -> bool:
        """The cap covers its activations."""
        return self.policy is not None


PLAIN = Variant("plain", "plain PyTorch, all resident", chunked=False)
KEEP, OFFLOAD, RECOMPUTE = UNIFORM = tuple(
    Variant(policy, f"chunkmem, {policy}", policy=policy) for policy in ("keep", "offload", "recompute")
)
AUTO = Variant("auto", "chunkmem, auto", policy="auto")
PLAIN_CHECKPOINT = Variant("plain-checkpoint", "plain PyTorch, torch's checkpoint", chunked=False, checkpointed=True)
CHECKPOINT = Variant("checkpoint", "chunkmem, null + torch's checkpoint", checkpointed=True)
ON_CPU = Variant("save-on-cpu", "chunkmem, null + save_on_cpu", on_cpu=True)
VARIANTS = (
    PLAIN,
    Variant("plain-again", "plain PyTorch, again (A/A)", chunked=False),
    PLAIN_CHECKPOINT,
    *UNIFORM,
    AUTO,
    CHECKPOINT,
    ON_CPU,
)


@dataclass(frozen=True)
class Step:
    """One training step as it was measured."""

    forward_s: float
    step_s: float
    cpu_s: float
    """Of all threads of the process."""
    loss: float


@dataclass(frozen=True)
class Start:
    """The first steps under a cap; those of plain PyTorch have no memory to tell of."""

    first_s: tuple[float, ...]
    required_nbytes: int = 0
    """The smallest cap of the plan that is followed."""
    peak_nbytes: int = 0
    activations_nbytes: int = 0


@dataclass(frozen=True)
class Summary:
    """What does not change from step to step."""

    weights: str
    """Digest of the weights."""
    predicted_s: float | None = None
    """The step, as the plan's simulation has it."""
    peak_nbytes: int | None = None
    policies: dict[str, int] | None = None
    """Of `auto`: how many regions have which."""


class SavedOnHost(saved_tensors_hooks):
    """torch's `save_on_cpu` as an accelerator has it: on a CPU it copies nothing.

    The step waits for each copy, as there without pinned memory.
    """

    def __init__(self, link_Bps: float | None) -> None:
        def copy(tensor: Tensor) -> Tensor:
            began_s = time.perf_counter()
            found = tensor.clone()
            if link_Bps is not None:
                # The rest of what the copy takes over the link that is played.
                time.sleep(max(0.0, began_s + tensor.nbytes / link_Bps - time.perf_counter()))
            return found

        super().__init__(copy, copy)


class Trainee:
    """A model under training; `link_Bps`: of throttled links between the tiers, None: as fast as memory is."""

    def __init__(self, variant: Variant, work: Workload) -> None:
        self._variant, self._work = variant, work
        self._batches = work.batches()
        self._manager: chunkmem.ChunkManager | None = None

    def start(self, device_nbytes: int, link_Bps: float | None) -> Start | None:
        """Build the model under a cap and train the first steps; None: it does not fit."""
        self.close()
        self._saving: Callable[[], Any] = lambda: SavedOnHost(link_Bps) if self._variant.on_cpu else nullcontext()
        self._num_steps = 0
        try:
            self._build(device_nbytes, link_Bps)
            torch.manual_seed(2)
            first_s = tuple(self.step().step_s for _ in range(NUM_WARMUP_STEPS))
        except CapacityError:
            return None
        if self._manager is None:
            return Start(first_s)
        device = self._manager.memory().device
        return Start(first_s, device.required_nbytes, device.peak_nbytes, device.by_role.get("activation", (0, 0))[1])

    def _build(self, device_nbytes: int, link_Bps: float | None) -> None:
        variant = self._variant
        if not variant.chunked:
            self._model = self._work.build(checkpointed=variant.checkpointed)
            self._optimizer: Any = torch.optim.AdamW(self._model.parameters(), fused=True, **ADAMW)
            return
        values = {
            "memory": {"device": device_nbytes, "host": AMPLE_NBYTES},
            "activations": {"policy": variant.policy},
        }
        throttled: dict[str, Any] = {}
        if link_Bps is not None:
            throttled["machine"] = Machine(0, 0, host_links(h2d_Bps=link_Bps, d2h_Bps=link_Bps))
            throttled["make_lanes"] = lambda compute: ThrottledLanes(link_Bps)
        self._manager = chunkmem.ChunkManager(chunkmem.Config.from_dict(values), **throttled)
        with self._manager.init():
            self._model = self._work.build(checkpointed=variant.checkpointed)
        self._optimizer = chunkmem.AdamW(self._model.parameters(), manager=self._manager, **ADAMW)

    def step(self) -> Step:
        """Train one step."""
        batch = self._batches[self._num_steps % NUM_BATCHES]
        self._num_steps += 1
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        with self._saving():
            loss = self._model(batch)
        forward_s = time.perf_counter() - began_s
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return Step(forward_s, time.perf_counter() - began_s, time.process_time() - cpu_began_s, loss.item())

    def summary(self) -> Summary:
        """Return what the plan promises, and how training ended."""
        digest = hashlib.sha256()
        with self._readable() as parameters:
            for parameter in parameters:
                digest.update(parameter.detach().contiguous().numpy().tobytes())
        manager = self._manager
        if manager is None or manager.plan is None or manager.trace is None:
            return Summary(digest.hexdigest())
        plan, trace = manager.plan, manager.trace
        policies = None
        if self._variant == AUTO:
            policies = dict(Counter(region.policy.value for region in region_policies(plan, trace)))
        return Summary(digest.hexdigest(), simulate(plan, trace).step_s, manager.memory().device.peak_nbytes, policies)

    @contextmanager
    def _readable(self) -> Iterator[list[nn.Parameter]]:
        with nullcontext() if self._manager is None else self._manager.gather():
            yield list(self._model.parameters())

    def close(self) -> None:
        """Let go of the model."""
        if self._manager is not None:
            self._manager.close()
        self._manager = None
