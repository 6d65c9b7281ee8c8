"""What every rank has a copy of: buffers, and parameters that no chunk holds. Those of rank 0 count.

Ranks draw the same random numbers while a model is built, rank 0's, whatever their seeds are. When it is packed, rank 0
sends its buffers and the excluded parameters whose gradients are averaged. Buffers that a step has changed on any rank,
such as a batch norm's running means, are sent again at its end, as DistributedDataParallel does before each forward.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from chunkmem.ranks.ranks import Ranks
from chunkmem.runtime.device import runtime_mode
from chunkmem.runtime.values import storage_id

_BUILDING = "the random numbers that a model is built with"
_BUFFERS = "buffers of modules"


@contextmanager
def same_random_numbers(ranks: Ranks) -> Iterator[None]:
    """Draw inside what rank 0 draws. A rank with another seed has its own again afterwards, unless it seeds inside.

    Raises:
        RankError: a rank is missing, or somewhere else.
    """
    own = torch.get_rng_state()
    first = ranks.broadcast_object(own, label=_BUILDING)
    if torch.equal(own, first):
        yield
        return
    torch.set_rng_state(first)
    seed = torch.initial_seed()
    try:
        yield
    finally:
        if torch.initial_seed() == seed:
            torch.set_rng_state(own)


def send_parameters(params: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Have all ranks train what rank 0 has in the parameters of a model that each of them has built.

    Those on the meta device have no values yet.

    Raises:
        ConfigError: they are no copies of one model.
        RankError: a rank is missing, or somewhere else.
    """
    forms = [(param, is_lazy(param)) for param in params]
    told = "".join("lazy" if lazy else f"{tuple(p.shape)} {p.dtype} {p.is_meta}\n" for p, lazy in forms)
    ranks.agree("the layout of the chunks", hashlib.sha256(told.encode()).hexdigest()[:16])
    sent = [param for param, lazy in forms if not lazy and not param.is_meta and _is_dense(param)]
    ranks.broadcast_tensors(sent, label="parameters of a model that is wrapped")


class OrdinaryTensors:
    """Copies that ranks have of the same tensors."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._modules: list[weakref.ref[nn.Module]] = []
        self._versions: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """By the identity of a buffer: its version when it was sent last."""

    def add(self, roots: Iterable[nn.Module], excluded: Iterable[nn.Module], *, kept: Iterable[nn.Module]) -> None:
        """Send rank 0's copies, once a model was packed. Those of modules in `kept` are each rank's own.

        Raises:
            RankError: a rank is missing, or has other buffers.
        """
        own = {id(module) for root in kept for module in root.modules()}
        modules = dict.fromkeys(module for root in (*roots, *excluded) for module in root.modules())
        shared = [module for module in modules if id(module) not in own]
        self._modules += map(weakref.ref, shared)
        averaged = [p for module in excluded if id(module) not in own for p in module.parameters(recurse=False)]
        buffers = self._buffers()
        self._ranks.broadcast_tensors([*averaged, *buffers], label=_BUFFERS)
        self._note(buffers)

    def follow(self) -> None:
        """Send what has changed since on any rank. Raises what `add` does."""
        buffers = self._buffers() if self._modules else {}
        if not buffers:
            return
        changed = self._ranks.any_over([self._has_changed(*each) for each in buffers.items()], label=_BUFFERS)
        wanted = [buffer for buffer, has in zip(buffers, changed, strict=True) if has]
        self._ranks.broadcast_tensors(wanted, label=_BUFFERS)
        self._note(wanted)

    def _buffers(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return buffers, each with the one whose version tells of changes."""
        found = {}
        for module in (module for ref in self._modules if (module := ref()) is not None):
            for buffer in module._buffers.values():
                if buffer is not None and _is_dense(buffer):
                    found[buffer] = _told_by(module, buffer)
        return found

    def _has_changed(self, buffer: torch.Tensor, told_by: torch.Tensor) -> bool:
        return any(
            known is None or known[0]() is not tensor or known[1] != tensor._version
            for tensor in (buffer, told_by)
            for known in (self._versions.get(id(tensor)),)
        )

    def _note(self, buffers: Iterable[torch.Tensor]) -> None:
        self._versions.update({id(buffer): (weakref.ref(buffer), buffer._version) for buffer in buffers})


def _told_by(module: nn.Module, buffer: torch.Tensor) -> torch.Tensor:
    """Return the buffer whose version tells when another one has changed.

    The kernels of batch and instance norms write running statistics past their version counters; the number of batches
    is counted in a buffer of its own.
    """
    counter = module.num_batches_tracked if isinstance(module, _NormBase) else None
    return counter if isinstance(counter, torch.Tensor) else buffer


def _is_dense(tensor: torch.Tensor) -> bool:
    with runtime_mode():
        return storage_id(tensor) != 0 and not tensor.is_inference()
