"""Scripts as users write them for several ranks, and the calls in them that differ between plain PyTorch and chunkmem.

A script is a function of a `User`, called on every rank at once. In plain PyTorch every rank has the whole model, and
`step()` updates with the mean of the gradients of all ranks, added in the order of the ranks, where a rank without a
gradient adds zeros: the numbers of one process that has all the batches. In chunkmem the script ends as it declares:
with those numbers, or with an error that all ranks get.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import chunkmem
from chunkmem.ranks import connection
from tests.hostile.harness import AMPLE_NBYTES, CHUNK_NUMEL, Script, registering
from tests.hostile.harness import User as OneProcess
from tests.hostile.models import Net
from tests.hostile_ranks.reference import MeanAdamW, average_gradients

TIMEOUT_S = 240.0
"""`distributed.timeout_s`: longer than any script takes, however busy the machine is."""
DETECTION_S = 4.0
"""How long ranks wait for the answer of one that left without a word."""
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
    """Every rank ends in this error of `chunkmem.data.errors`, in the same words but for times, and without waiting."""

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
    """`Equal`, or the same error on every rank, each with its own bytes: how exchanges are arranged decides which."""

    error: str
    phrase: str


Expected = Equal | Alike | Refused | Leaves | Either
EQUAL = Equal()
EQUAL_BUT_FOR_ORDER = Equal(tolerance=1e-6)
"""A step has other backwards than the one before: means of parts are added up, and not parts."""
ALIKE = Alike()
PARTED = r"the ranks are in different places: ranks? 0 .*, ranks? [12] "
"""Two or three ranks, whoever of them are in one place."""
DIVERGED = Refused("RankError", PARTED)
"""The ranks' programs do different things."""
NOT_OWNED = Refused("StateError", "belongs to another rank|outside of its unit")
"""Values of parameters are used where no unit has brought them."""
LIBRARY_TOLERANCE = 1e-5


SCRIPTS: dict[str, Script] = {}
"""By name; filled when the files of scripts are imported."""


def script(
    *, model: Callable[[], nn.Module] | None = Net, expect: Expected = EQUAL, **keys: Any
) -> Callable[[Callable[[User], Any]], Callable[[User], Any]]:
    """Register a script. `model`: how `user.model` is built; None: by the script. `keys` go to the configuration."""
    return registering(SCRIPTS, model, expect, keys)


class User(OneProcess):
    """One rank's run of a script: in plain PyTorch (no manager), or in chunkmem."""

    def __init__(self, manager: chunkmem.ChunkManager | None, rank: int, size: int) -> None:
        super().__init__(manager)
        self.rank = rank
        self.size = size

    def unit(self, module: nn.Module) -> nn.Module:
        return module if self.manager is None else self.manager.unit(module)

    @contextmanager
    def excluding(self) -> Iterator[None]:
        with nullcontext() if self.manager is None else self.manager.exclude():
            yield

    def adamw(self, params: Any = None, **options: Any) -> Any:
        """AdamW, with an `eps` that keeps the last bits of a tiny gradient from deciding about its update."""
        options = {"lr": 1e-2, "eps": 1e-4} | options
        if self.manager is not None:
            return super().adamw(params, **options)
        self.optimizers.append(MeanAdamW(self.params if params is None else params, fused=True, **options))
        return self.optimizers[-1]

    def draw(self, seed: int) -> torch.Generator:
        """A generator for one batch of this rank."""
        return torch.Generator().manual_seed(1000 + 100 * seed + self.rank)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """`kwargs` are those of `manager.backward()`."""
        if self.manager is None:
            loss.backward()
        else:
            self.manager.backward(loss, **kwargs)

    def evaluate(self, *seeds: int) -> None:
        """Record the losses of batches that nothing is learnt from."""
        self.model.eval()
        with torch.no_grad():
            for seed in seeds:
                self.record(self.loss(seed).item())
        self.model.train()

    def clip(self, max_norm: float) -> Tensor:
        """Clip by the optimizer's own method; in plain PyTorch the mean gradients, which `step()` then finds."""
        if self.manager is None:
            average_gradients(self.params)
        return super().clip(max_norm)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.manager is None:
            self.model.load_state_dict(state)
        else:
            self.manager.load_state_dict(state, self.model)

    def shared(self, left: dict[str, Any]) -> list[Any]:
        """Of what is left, that which has to be the same on all ranks: parameters, but no buffers, and states."""
        names = [[name for name, _ in model.named_parameters()] for model in self.models]
        weights = [[w[name] for name in each] for each, w in zip(names, left["weights"], strict=True)]
        return [weights, left["states"]]


def config(exchange: str, keys: tuple[tuple[str, Any], ...]) -> chunkmem.Config:
    """Two ample tiers on any machine, and one of the exchanges."""
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
    manager.runtime.tiers.device_pool.poison = manager.runtime.tiers.host_pool.poison = True
    return manager


def short_roll_calls() -> AbstractContextManager[Any]:
    """Else they take ten seconds with a long `distributed.timeout_s`."""
    return patch.object(connection, "_MAX_DETECTION_S", DETECTION_S)


def without_times(message: str) -> str:
    """A message with every time in seconds taken out, which differ from rank to rank."""
    return re.sub(r"\d+(\.\d+)? s\b", "… s", message)
