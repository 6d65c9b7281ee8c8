"""Scripts as users write them for several ranks, and the calls in them that differ between plain PyTorch and chunkmem.

A script is a function of a `User`, called on every rank at once. In plain PyTorch every rank has the whole model, and
`step()` updates with the mean of the gradients of all ranks, added in the order of the ranks, where a rank without a
gradient adds zeros: the numbers of one process that has all the batches. In chunkmem the script ends as it declares:
with those numbers, or with an error that all ranks get.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import chunkmem
from tests.hostile.harness import copied
from tests.hostile.models import WIDTH, Net
from tests.hostile_ranks.reference import MeanAdamW, average_gradients

SEED = 11
CHUNK_NUMEL = 256
"""Small, so that models of a few thousand parameters take a dozen chunks."""
AMPLE_NBYTES = 8 << 20
TIMEOUT_S = 16.0
"""`distributed.timeout_s`. gloo itself gives up after three quarters of it."""
EXCHANGES: dict[str, bool | None] = {"point to point": None, "grouped": False, "memory-saving": True}
"""`client.opts.with_mem_saving_comm`."""


@dataclass(frozen=True)
class Equal:
    """Every rank has in chunkmem what it has in plain PyTorch, and all have the same weights.

    Bit for bit with point to point; within `LIBRARY_TOLERANCE` where the library adds up.
    """

    tolerance: float = 0.0
    """With point to point."""


@dataclass(frozen=True)
class Alike:
    """All ranks end with the same weights bit for bit; there are no numbers of plain PyTorch to compare with."""


@dataclass(frozen=True)
class Refused:
    """Every rank ends in this error of `chunkmem.errors`, in the same words but for times, and without waiting."""

    error: str
    """A regular expression, as is `phrase`, which is found in the message."""
    phrase: str


@dataclass(frozen=True)
class Leaves:
    """One rank ends in an error of its own; all others in the same RankError, which names it, and without waiting."""

    rank: int
    error: str


@dataclass(frozen=True)
class Either:
    """`Equal`, or the same error on every rank: which of them depends on how exchanges are arranged."""

    error: str
    phrase: str


Expected = Equal | Alike | Refused | Leaves | Either
EQUAL = Equal()
EQUAL_BUT_FOR_ORDER = Equal(tolerance=1e-6)
"""A step has other backwards than the one before: means of parts are added up, and not parts."""
ALIKE = Alike()
DIVERGED = Refused("RankError", "the ranks are in different places: ranks? 0 .*ranks? 1 ")
"""The ranks' programs do different things."""
NOT_OWNED = Refused("StateError", "belongs to another rank|outside of its unit")
"""Values of parameters are used where no unit has brought them."""
LIBRARY_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Script:
    """One script, what it is about, and what has to come of it."""

    name: str
    theme: str
    run: Callable[[User], Any]
    model: Callable[[], nn.Module] | None
    expect: Expected
    keys: tuple[tuple[str, Any], ...]


SCRIPTS: dict[str, Script] = {}
"""By name; filled when the files of scripts are imported."""


def script(
    *, model: Callable[[], nn.Module] | None = Net, expect: Expected = EQUAL, **keys: Any
) -> Callable[[Callable[[User], Any]], Callable[[User], Any]]:
    """Register a script. `model`: how `user.model` is built; None: by the script. `keys` go to the configuration."""

    def register(run: Callable[[User], Any]) -> Callable[[User], Any]:
        name, theme = run.__name__, run.__module__.rpartition(".")[2]
        assert name not in SCRIPTS, f"two scripts are called {name}"
        SCRIPTS[name] = Script(name, theme, run, model, expect, tuple(keys.items()))
        return run

    return register


class WrongError(Exception):
    """Something that has to hold does not."""


class User:
    """One rank's run of a script: in plain PyTorch (no manager), or in chunkmem."""

    def __init__(self, manager: chunkmem.ChunkManager | None, rank: int, size: int) -> None:
        self.manager = manager
        self.rank = rank
        self.size = size
        self.models: list[Any] = []
        self.optimizers: list[Any] = []
        self.seen: list[Any] = []
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

    def build(self, build: Callable[[], nn.Module], *, seed: int | None = None) -> Any:
        """Build a model inside of `manager.init()`, from a seed that is the same on all ranks unless one is given."""
        torch.manual_seed(SEED + len(self.models) if seed is None else seed)
        with nullcontext() if self.manager is None else self.manager.init():
            model = build()
        self.models.append(model)
        return model

    def wrap(self, model: nn.Module) -> Any:
        """`manager.wrap()`."""
        self.models.append(model if self.manager is None else self.manager.wrap(model))
        return model

    def unit(self, module: nn.Module) -> nn.Module:
        return module if self.manager is None else self.manager.unit(module)

    @contextmanager
    def excluding(self) -> Iterator[None]:
        with nullcontext() if self.manager is None else self.manager.exclude():
            yield

    def adamw(self, params: Any = None, **options: Any) -> Any:
        """AdamW, with an `eps` that keeps the last bits of a tiny gradient from deciding about its update."""
        params = self.params if params is None else params
        options = {"lr": 1e-2, "eps": 1e-4} | options
        if self.manager is None:
            optimizer: Any = MeanAdamW(params, fused=True, **options)
        else:
            optimizer = chunkmem.AdamW(params, manager=self.manager, **options)
        self.optimizers.append(optimizer)
        return optimizer

    def batch(self, seed: int = 0, *shape: int) -> Tensor:
        """Random features, another batch on every rank."""
        return torch.randn(shape or (4, WIDTH), generator=self.draw(seed))

    def tokens(self, seed: int = 0, vocab: int = 20) -> Tensor:
        return torch.randint(vocab, (4, 6), generator=self.draw(seed))

    def draw(self, seed: int) -> torch.Generator:
        """A generator for one batch of this rank."""
        return torch.Generator().manual_seed(1000 + 100 * seed + self.rank)

    def loss(self, seed: int = 0, model: Any = None) -> Tensor:
        """The mean squared output for this rank's batch of that seed."""
        return (self.model if model is None else model)(self.batch(seed)).square().mean()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        if self.manager is None:
            loss.backward()
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

    def evaluate(self, *seeds: int) -> None:
        """Record the losses of batches that nothing is learnt from."""
        self.model.eval()
        with torch.no_grad():
            for seed in seeds:
                self.record(self.loss(seed).item())
        self.model.train()

    def gathered(self, params: Any = None) -> Any:
        """`manager.gather(params)`."""
        return nullcontext() if self.manager is None else self.manager.gather(params)

    def clip(self, max_norm: float) -> Tensor:
        """Clip by the optimizer's own method; in plain PyTorch the mean gradients, which `step()` then finds."""
        if self.manager is not None:
            return self.opt.clip_grad_norm_(max_norm)
        average_gradients(self.params)
        return nn.utils.clip_grad_norm_(self.params, max_norm)

    def state_dict(self, model: Any = None) -> dict[str, Any]:
        model = self.model if model is None else model
        return model.state_dict() if self.manager is None else self.manager.state_dict(model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.manager is None:
            self.model.load_state_dict(state)
        else:
            self.manager.load_state_dict(state, self.model)

    def record(self, *values: Any) -> None:
        """Add numbers, tensors, or trees of them to what is compared; copies are taken now."""
        self.seen.extend(copied(value) for value in values)

    def check(self, holds: Any, what: str) -> None:
        """Fail the script unless something holds that is true in plain PyTorch, too."""
        if not bool(holds):
            raise WrongError(what)

    def left(self) -> dict[str, Any]:
        """What the script has made of its models and optimizers on this rank, and all it recorded."""
        states = [optimizer.state_dict()["state"] for optimizer in self.optimizers]
        return {
            "seen": self.seen,
            "weights": [copied(dict(self.state_dict(model))) for model in self.models],
            "states": [copied(dict(sorted(state.items()))) for state in states],
        }

    def shared(self, left: dict[str, Any]) -> list[Any]:
        """Of what is left, that which has to be the same on all ranks: parameters, but no buffers, and states."""
        names = [[name for name, _ in model.named_parameters()] for model in self.models]
        weights = [[w[name] for name in each] for each, w in zip(names, left["weights"], strict=True)]
        return [weights, left["states"]]


def config(exchange: str, keys: tuple[tuple[str, Any], ...]) -> chunkmem.Config:
    """Two ample tiers on any machine, one of the exchanges, and a short wait for ranks that do not come."""
    base: dict[str, Any] = {
        "memory": {"device": AMPLE_NBYTES, "host": AMPLE_NBYTES},
        "default_chunk_size": CHUNK_NUMEL,
        "distributed": {"timeout_s": TIMEOUT_S},
    }
    if EXCHANGES[exchange] is not None:
        base["client"] = {"opts": {"with_mem_saving_comm": EXCHANGES[exchange]}}
    return chunkmem.Config.from_dict(base | dict(keys))


def manager_for(exchange: str, keys: tuple[tuple[str, Any], ...] = ()) -> chunkmem.ChunkManager:
    """A manager over the default process group, whose freed memory is overwritten with NaN."""
    manager = chunkmem.ChunkManager(config(exchange, keys))
    manager._tiers.device_pool.poison = manager._tiers.host_pool.poison = True
    return manager


def without_times(message: str) -> str:
    """A message with every time in seconds taken out, which differ from rank to rank."""
    return re.sub(r"\d+(\.\d+)? s\b", "… s", message)
