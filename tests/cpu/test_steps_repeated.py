"""`step()` raises an error when some groups are updated, and is called again: the bits are those of a step without one.

Whatever a step has decided before (the norm, the loss scale, learning rates) is that of the step, and not asked again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.data.errors import StateError, TierIOError
from tests.helpers.audit import audit
from tests.helpers.faulty_disk import Fault, FaultKind, FaultyDisk
from tests.helpers.plain_chain import WIDTH, batch_of, model_of
from tests.helpers.spread import spread
from tests.helpers.twins import cpu_only

SLAB = 4 * WIDTH * WIDTH
NUM_STEPS = 5
FAILS_IN = (0, 3)
"""The first step is served on demand, the others follow a plan."""


@dataclass(frozen=True)
class Kind:
    """How a model is trained."""

    make: Callable[..., torch.optim.Optimizer] = chunkmem.AdamW
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    clips: bool = False
    """By a call of its own."""
    closes: bool = False
    """A closure runs forward and backward."""


def of_class(kind: type[torch.optim.Optimizer], **options: Any) -> Kind:
    return Kind(chunkmem.Optimizer, (kind,), options)


KINDS = {
    "AdamW": Kind(),
    "clipped in the step": Kind(options={"max_grad_norm": 0.01}),
    "clipped before": Kind(clips=True),
    "closure": Kind(closes=True),
    "8 bits": Kind(options={"states": "8bit"}),
    "bf16": Kind(keys={"precision": "bf16"}, options={"max_grad_norm": 0.01}),
    "fp16": Kind(keys={"precision": "fp16", "fp16": {"initial_scale_power": 14, "loss_scale_window": 2}}),
    "SGD": Kind(chunkmem.SGD, options={"momentum": 0.9}),
    "NAdam": of_class(torch.optim.NAdam),
    "Adafactor": of_class(torch.optim.Adafactor),
    "Muon": of_class(torch.optim.Muon),
}


class Outside(nn.Module):
    """Blocks in chunks, and a layer outside of them, which is updated last."""

    def __init__(self, manager: chunkmem.ChunkManager) -> None:
        super().__init__()
        self.blocks = model_of()
        with manager.exclude():
            self.outside = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(self.blocks(x))


@dataclass
class Run:
    manager: chunkmem.ChunkManager
    model: nn.Module
    optimizer: Any
    disk: FaultyDisk

    def forward_backward(self, step: int) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(batch_of(step)).float().square().mean() * 1e-2
        self.manager.backward(loss)
        return loss.detach()

    def fail_in(self, call: str, number: int | None) -> None:
        """Have the n-th call from now on fail; None: no more."""
        at = 0 if number is None else self.disk.num_calls[call] + number
        self.disk.faults = () if number is None else (Fault(FaultKind.ERROR, call, at=at),)

    def left(self) -> list[Any]:
        """What training has made."""
        states = self.optimizer.state_dict()
        found = [*self.manager.state_dict().values(), states.get("loss_scaler")]
        for index in sorted(states["state"]):
            found += [states["state"][index][key] for key in sorted(states["state"][index])]
        return found


@contextmanager
def run_of(kind: Kind, path: Path) -> Iterator[Run]:
    disk = FaultyDisk()
    config = chunkmem.Config.from_dict(
        {
            "default_chunk_size": WIDTH * WIDTH,
            "memory": {"device": 4 * SLAB, "host": 7 * SLAB, "disk": {"path": str(path), "capacity": "1GiB"}},
            **kind.keys,
        }
    )
    with chunkmem.ChunkManager(config, disk_calls=disk) as manager:
        with manager.init():
            model = Outside(manager)
        optimizer = kind.make(*kind.args, model.parameters(), manager=manager, lr=1e-2, **kind.options)
        yield Run(manager, model, optimizer, disk)


def repeated(call: Callable[[], Any], *, meanwhile: Callable[[], None]) -> Any:
    """Make a call until it raises no error of the disk."""
    for _ in range(4):
        try:
            return call()
        except TierIOError:
            meanwhile()
    raise AssertionError("one call of the disk fails")


def is_half(run: Run) -> bool:
    """Tell whether a step has updated some groups: then only going on is right, and all else is refused."""
    try:
        run.manager.state_dict()
    except StateError:
        refused = (run.manager.state_dict, run.optimizer.zero_grad, lambda: run.model(batch_of(0)))
        for each in refused:
            with pytest.raises(StateError, match=r"call optimizer\.step\(\) again"):
                each()
        return True
    return False


def train(kind: Kind, path: Path, *, call: str, fails_at: int | None) -> tuple[list[Any], dict[str, int]]:
    """Train, and have a call of the disk fail in some steps; return what is left, and what has happened."""
    seen = dict.fromkeys(("calls", "half"), 0)
    with run_of(kind, path) as run:
        groups = run.optimizer.param_groups

        def change_rates() -> None:
            """The step that goes on does so with those that it began with."""
            if is_half(run):
                seen["half"] += 1
                for group in groups:
                    group["lr"] *= 3

        for step in range(NUM_STEPS):
            rates = [group["lr"] for group in groups]
            closure = partial(run.forward_backward, step) if kind.closes else None
            if closure is None:  # a copy for which the last step did not wait may have failed since
                repeated(partial(run.forward_backward, step), meanwhile=lambda: None)
            before = run.disk.num_calls[call]
            run.fail_in(call, fails_at if step in FAILS_IN else None)
            if kind.clips:
                repeated(partial(run.optimizer.clip_grad_norm_, 1e-3), meanwhile=lambda: None)
            result = repeated(partial(run.optimizer.step, closure), meanwhile=change_rates)
            assert closure is None or math.isfinite(result)
            seen["calls"] = max(seen["calls"], run.disk.num_calls[call] - before)
            run.fail_in(call, None)
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * 0.9
        left = run.left()
        run.manager.runtime.memory.pager.policy.drain()
        audit(run.manager)
        return left, seen


def same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.few(1)
@cpu_only
@spread(name=KINDS, call=["preadv", "pwritev"])
@pytest.mark.parametrize("stride", [8, *(pytest.param(stride, marks=pytest.mark.full) for stride in (3, 1))])
def test_each_call_of_the_disk_in_a_step(name: str, call: str, stride: int, tmp_path: Path) -> None:
    kind = KINDS[name]
    expected, undisturbed = train(kind, tmp_path, call=call, fails_at=None)
    num_half = 0
    for at in range(1, undisturbed["calls"] + 1, stride):
        left, seen = train(kind, tmp_path, call=call, fails_at=at)
        assert all(same(one, other) for one, other in zip(left, expected, strict=True)), (name, call, at, seen)
        num_half += seen["half"]
    assert num_half > 0
