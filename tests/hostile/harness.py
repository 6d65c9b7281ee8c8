"""Scripts as users write them, and the calls in them that differ between plain PyTorch and chunkmem.

A script is a function of a `User`: it trains, looks at and changes parameters, gradients, optimizers and modules, and
records what it sees. It runs in plain PyTorch and in each of `MODES`; what it recorded and left has to be equal bit
for bit, or be refused with the error that it declares. `worker` runs scripts, `judge` says what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.data.types import Tier
from chunkmem.plan.machine import Machine, host_links, links_below
from tests.helpers.excluded import partly_excluded
from tests.helpers.hearing import WAYS
from tests.helpers.lanes import adversarial  # the one place where this suite takes lanes from
from tests.hostile.models import WIDTH, Net

SEED = 11
CHUNK_NUMEL = 256
"""Small, so that models of a few thousand parameters take a dozen chunks."""
AMPLE_NBYTES = 8 << 20


@dataclass(frozen=True)
class Mode:
    """One way to run a script in chunkmem."""

    room: float | None
    """The cap on DEVICE as a multiple of the smallest one; None: room for everything."""
    seed: int | None = None
    """Of lanes that hold copies back as long as their events allow; None: the manager's own lanes."""
    bare: bool = False
    """Backward starts by `loss.backward()` and not by `manager.backward(loss)`."""


MODES = {
    "ample": Mode(None),
    "small": Mode(1.0),
    "adversarial": Mode(1.0, seed=3, bare=True),
    "some room": Mode(1.75, bare=True),
    **{f"some room, late {seed}": Mode(1.0 + 0.25 * seed, seed=seed, bare=seed % 2 == 0) for seed in range(1, 5)},
}
ORDINARY = ("ample", "small", "adversarial")
"""The first is run with every script, the others in turn; all modes with `--full`. With some room there are prefetches,
which late copies show most of."""


@dataclass(frozen=True)
class Axis:
    """A feature that every script can be run with, whatever it is about: with room for all, and at a small cap."""

    keys: Mapping[str, Any] = field(default_factory=dict)
    """Of the configuration, in addition to the script's."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the optimizers."""
    any_class: bool = False
    """`chunkmem.Optimizer` over torch's class in place of the one that torch and chunkmem name alike."""
    excludes: bool = False
    """Every second `nn.Linear` and each norm is built in `manager.exclude()`."""
    host_share: float | None = None
    """HOST is this share of what a script takes of it, and there is a disk; None: ample, and none."""
    own_bits: bool = False
    """Its numbers are not those of plain PyTorch: the small cap is compared with room for all."""
    refusals: str = r"(?!)"
    """What it refuses by name, as its documentation says: found in the message of an error of chunkmem."""
    ways: tuple[str, ...] = ()
    """In which steps are heard of, one after the other and over again; none: as the manager chooses."""
    not_for: frozenset[str] = frozenset()
    """Scripts that look at what the feature changes, as it should."""


ALONE = r"in_backward|inside backward|in backward|options were changed between backward and step"
WHOLE = r"whole matri|8bit|all parameters at once"
RUNS_TWICE = frozenset(
    {
        "flops_counted",
        "forward_hooks_that_read_weights",
        "keyboard_interrupt_in_forward",
        "bf16_weight_written_inside_of_forward",
        "weight_written_inside_of_forward",
        "curvature_from_hooks",
        "saved_weight_modified_before_backward",
    }
)
"""Scripts that see whether a forward runs again, as they do with torch's checkpoint."""
AXES = {
    "disk": Axis(host_share=0.5),
    **{policy: Axis({"activations": {"policy": policy}}) for policy in ("keep", "offload")},
    **{policy: Axis({"activations": {"policy": policy}}, not_for=RUNS_TWICE) for policy in ("recompute", "auto")},
    "in backward": Axis(options={"in_backward": True}, refusals=ALONE),
    "any class": Axis(any_class=True, refusals=WHOLE),
    "8-bit states": Axis({"optimizer": {"params": {"states": "8bit"}}}, own_bits=True, refusals=WHOLE),
    "excluded": Axis(excludes=True),
    "hooks come and go": Axis({"default_chunk_size": 8 * CHUNK_NUMEL}, ways=(*WAYS, *reversed(WAYS))),
}


@dataclass(frozen=True)
class Refused:
    """In chunkmem the script ends in this error of `chunkmem.data.errors`, with a message that `phrase` is found in."""

    error: str
    phrase: str


@dataclass(frozen=True)
class Equal:
    """The script does in chunkmem what it does in plain PyTorch, bit for bit."""

    or_too_small: bool = False
    """At the smallest cap, a CapacityError will do: what the script holds on to has to fit."""


@dataclass(frozen=True)
class Raises:
    """Plain PyTorch raises an error of this type, and chunkmem raises too."""

    error: str


Expected = Equal | Refused | Raises
EQUAL = Equal()
EQUAL_IF_ROOM = Equal(or_too_small=True)


@dataclass(frozen=True)
class Script:
    """One script, what it is about, and what has to come of it."""

    name: str
    theme: str
    run: Callable[[Any], Any]
    model: Callable[[], nn.Module] | None
    expect: Any
    """One of the outcomes that the suite has; here, `Expected`."""
    keys: tuple[tuple[str, Any], ...]

    @property
    def is_lowered(self) -> bool:
        """Mixed precision, whose bits plain PyTorch does not have: small caps are compared with ample room."""
        return "precision" in dict(self.keys)


SCRIPTS: dict[str, Script] = {}
"""By name; filled when the files of scripts are imported."""


def script(
    *, model: Callable[[], nn.Module] | None = Net, expect: Expected = EQUAL, **keys: Any
) -> Callable[[Callable[[User], Any]], Callable[[User], Any]]:
    """Register a script. `model`: how `user.model` is built; None: by the script. `keys` go to the configuration."""
    return registering(SCRIPTS, model, expect, keys)


def registering(
    scripts: dict[str, Script], model: Callable[[], nn.Module] | None, expect: Any, keys: dict[str, Any]
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Add a function to `scripts`, under its name and that of its file."""

    def register(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        name, theme = run.__name__, run.__module__.rpartition(".")[2]
        assert name not in scripts, f"two scripts are called {name}"
        scripts[name] = Script(name, theme, run, model, expect, tuple(keys.items()))
        return run

    return register


class NotRefusedError(Exception):
    """A call that chunkmem has to refuse was served."""


class WrongError(Exception):
    """Something that has to hold does not."""


class User:
    """One run of a script: in plain PyTorch (no manager), or in chunkmem."""

    def __init__(self, manager: chunkmem.ChunkManager | None, *, bare: bool = False, axis: Axis | None = None) -> None:
        """`bare`: backward starts by `loss.backward()` and not by `manager.backward(loss)`."""
        self.manager = manager
        self.bare = bare
        self.axis = Axis() if axis is None else axis
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        self.seen: list[Any] = []
        self.closed = False
        self._default: Any = None

    @property
    def model(self) -> Any:
        """The model that was built first."""
        return self.models[0]

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def opt(self) -> Any:
        """An AdamW over all of the first model, made when it is first asked for."""
        if self._default is None:
            self._default = self.adamw()
        return self._default

    def building(self) -> AbstractContextManager[None]:
        """`manager.init()`."""
        if self.manager is None:
            return nullcontext()
        return partly_excluded(self.manager) if self.axis.excludes else self.manager.init()

    def build(self, build: Callable[[], nn.Module], *, seed: int | None = None) -> Any:
        """Build a model, from a seed of its own unless one is given."""
        torch.manual_seed(SEED + len(self.models) if seed is None else seed)
        with self.building():
            model = build()
        self.models.append(model)
        return model

    def wrap(self, model: nn.Module) -> Any:
        """`manager.wrap()`."""
        self.models.append(model if self.manager is None else self.manager.wrap(model))
        return model

    def adamw(self, params: Any = None, **options: Any) -> Any:
        return self.make("AdamW", params, **options)

    def adam(self, params: Any = None, **options: Any) -> Any:
        return self.make("Adam", params, **options)

    def make(self, kind: str, params: Any = None, **options: Any) -> Any:
        """Make an optimizer of a class that torch and chunkmem name alike."""
        params = self.params if params is None else params
        options.setdefault("lr", 1e-2)
        if self.manager is None:
            optimizer = getattr(torch.optim, kind)(params, fused=True, **options)
        else:
            options = {**options, **self.axis.options}
            optimizer = (
                chunkmem.Optimizer(getattr(torch.optim, kind), params, manager=self.manager, fused=True, **options)
                if self.axis.any_class
                else getattr(chunkmem, kind)(params, manager=self.manager, **options)
            )
        self.optimizers.append(optimizer)
        return optimizer

    def draw(self, seed: int) -> torch.Generator:
        """A generator for one batch, a function of the seed alone."""
        return torch.Generator().manual_seed(1000 + seed)

    def batch(self, seed: int = 0, *shape: int) -> Tensor:
        """Random features."""
        return torch.randn(shape or (4, WIDTH), generator=self.draw(seed))

    def tokens(self, seed: int = 0, *shape: int, vocab: int = 20) -> Tensor:
        return torch.randint(vocab, shape or (4, 6), generator=self.draw(seed))

    def loss(self, seed: int = 0, model: Any = None) -> Tensor:
        """The mean squared output for the batch of that seed."""
        return (self.model if model is None else model)(self.batch(seed)).square().mean()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        if self.manager is None or self.bare:
            loss.backward(**kwargs)
        else:
            self.manager.backward(loss, **kwargs)

    def update(self) -> None:
        """`step()` and `zero_grad()` of the default optimizer."""
        self.opt.step()
        self.opt.zero_grad()

    def step(self, seed: int = 0) -> float:
        """One ordinary training step; its loss is recorded."""
        _ = self.opt
        loss = self.loss(seed)
        self.backward(loss)
        self.update()
        self.record(loss.item())
        return loss.item()

    def train(self, *seeds: int) -> None:
        for seed in seeds:
            self.step(seed)

    def gathered(self, params: Any = None) -> AbstractContextManager[None]:
        """`manager.gather(params)`."""
        return nullcontext() if self.manager is None else self.manager.gather(params)

    def clip(self, max_norm: float) -> Tensor:
        """Clip by the optimizer's own method, where it has one."""
        if self.manager is None:
            return torch.nn.utils.clip_grad_norm_(self.params, max_norm)
        return self.opt.clip_grad_norm_(max_norm)

    def state_dict(self, model: Any = None) -> dict[str, Any]:
        model = self.model if model is None else model
        return model.state_dict() if self.manager is None else self.manager.state_dict(model)

    def close(self) -> None:
        """`manager.close()`: what the models and optimizers hold is not compared."""
        self.closed = True
        if self.manager is not None:
            self.manager.close()

    def record(self, *values: Any) -> None:
        """Add numbers, tensors, or trees of them to what is compared; copies are taken now."""
        self.seen.extend(copied(value) for value in values)

    def check(self, holds: Any, what: str) -> None:
        """Fail the script unless something holds that is true in plain PyTorch, too."""
        if not bool(holds):
            raise WrongError(what)

    def refused(self, error: str, phrase: str, call: Callable[[], Any]) -> None:
        """A call that only chunkmem refuses; the script goes on as if it had not been made."""
        if self.manager is None:
            return
        try:
            call()
        except chunkmem.ChunkmemError as raised:
            if type(raised).__name__ == error and re.search(phrase, str(raised)):
                return
            raise
        raise NotRefusedError(f"there should have been a {error} with {phrase!r}")

    def left(self) -> Any:
        """What the script has made of its models and optimizers, and all it recorded."""
        if self.closed:
            return {"seen": self.seen}
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        return {
            "seen": self.seen,
            "weights": [copied(dict(self.state_dict(model))) for model in self.models],
            "states": [copied(dict(sorted(state["state"].items()))) for state in states],
            "lrs": [copied([group["lr"] for group in state["param_groups"]]) for state in states],
        }


def copied(tree: Any) -> Any:
    """The same tree of copies: tensors, and what behaves like them, on the CPU; anything else as it is."""
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [copied(value) for value in tree]
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True)
    return tree


def config(device_nbytes: int, keys: tuple[tuple[str, Any], ...] = ()) -> chunkmem.Config:
    """Two tiers on any machine: an explicit cap on DEVICE, ample HOST."""
    values: dict[str, Any] = {
        "memory": {"device": device_nbytes, "host": AMPLE_NBYTES},
        "default_chunk_size": CHUNK_NUMEL,
    }
    for key, value in keys:
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return chunkmem.Config.from_dict(values)


def manager_for(
    device_nbytes: int, *, seed: int | None = None, keys: tuple[tuple[str, Any], ...] = ()
) -> chunkmem.ChunkManager:
    """A manager whose freed memory is overwritten with NaN; with a seed, its lanes hold copies back."""
    chosen = config(device_nbytes, keys)
    links, disk = host_links(h2d_Bps=2e9, d2h_Bps=2e9, latency_s=1e-5), chosen.memory.disk
    if disk is not None:
        links = {**links, **links_below(Tier.HOST, Tier.DISK, read_Bps=1e9, write_Bps=1e9, latency_s=1e-5)}
    disk_nbytes = 0 if disk is None else disk.capacity
    speeds = Machine(device_nbytes, chosen.memory.host or 0, links=links, disk_nbytes=disk_nbytes)
    lanes = None if seed is None else adversarial(seed)
    manager = chunkmem.ChunkManager(chosen, machine=speeds, make_lanes=lanes)
    manager.runtime.tiers.device_pool.poison = manager.runtime.tiers.host_pool.poison = True
    return manager
