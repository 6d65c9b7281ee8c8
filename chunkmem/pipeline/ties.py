"""Parameters that stages on different ranks share, such as an embedding that is the head too.

Each of these ranks has a copy and updates it. Their gradients are added up, in the order of the stages, so that all
copies get the same bits. Norms count the first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from chunkmem.assembly.runtime import Runtime
from chunkmem.modules.binding import ManagedParameter
from chunkmem.ranks.exchange import sum_dtype
from chunkmem.ranks.neighbours import Message, Neighbours
from chunkmem.ranks.ranks import Ranks

_FIRST_TAG = 1 << 29
"""First tag of these messages: above the tags of activations."""


@dataclass(frozen=True)
class Tie:
    """A parameter that several ranks have, this one included."""

    managed: ManagedParameter
    ranks: tuple[int, ...]
    """Ranks of the pipeline that have the parameter, in the order of their stages."""
    number: int
    """Number among the tied parameters, the same on all ranks."""


def holders_of(stages: Sequence[nn.Module], num_ranks: int) -> dict[nn.Parameter, tuple[int, ...]]:
    """Return the ranks that have each parameter, in the order of their stages; stage k is on rank k % num_ranks."""
    found: dict[nn.Parameter, dict[int, None]] = {}
    for number, stage in enumerate(stages):
        for param in stage.parameters():
            found.setdefault(param, {})[number % num_ranks] = None
    return {param: tuple(holders) for param, holders in found.items()}


class TiedParameters:
    """Sums up their gradients."""

    def __init__(self, stages: Sequence[nn.Module], runtime: Runtime, *, ranks: Ranks) -> None:
        """Find the parameters that stages on different ranks have in common, once those of this rank are packed."""
        self._ranks = ranks
        self._gradients = runtime.gradients
        self._neighbours = Neighbours(ranks, torch.device("cpu"))
        self._before: dict[Tie, torch.Tensor] = {}
        """By tie: the gradient that had landed when the step began, already summed over ranks."""
        self._ties: list[Tie] = []
        shared = [(param, found) for param, found in holders_of(stages, ranks.size).items() if len(found) > 1]
        for number, (param, found) in enumerate(shared):
            managed = runtime.registry.find(param) if ranks.rank in found else None
            if managed is not None:
                self._ties.append(Tie(managed, found, number))
        runtime.registry.counted_elsewhere.update(tie.managed for tie in self._ties if tie.ranks[0] != ranks.rank)

    def begin(self) -> None:
        """A step begins: set aside the gradients of earlier ones, which have been summed up."""
        for tie in self._ties:
            if self._gradients.slots.any_landed((tie.managed,)):
                self._before[tie] = self._gradients.slots.value(tie.managed).clone()
                self._gradients.slots.zero_landed(tie.managed)

    def end(self) -> None:
        """Backward is over: have the sum over all ranks.

        Raises:
            RankError: a rank is missing.
        """
        for tie in (tie for tie in self._ties if tie.managed.requires_grad):
            total = self._sum(tie)
            before = self._before.pop(tie, None)
            if before is not None:
                total += before.to(total)
            self._gradients.slots.land({tie.managed: total})
            self._gradients.show_mean(tie.managed)

    def _sum(self, tie: Tie) -> torch.Tensor:
        if self._gradients.slots.any_landed((tie.managed,)):
            own = self._gradients.slots.value(tie.managed).cpu()
        else:
            own = torch.zeros(tie.managed.shape, dtype=tie.managed.placeholder.dtype, device="cpu")
        here = self._ranks.rank
        found = {rank: own if rank == here else torch.empty_like(own) for rank in tie.ranks}
        messages = {rank: self._message(tie, sender=rank, peer=rank) for rank in tie.ranks if rank != here}
        for rank, message in messages.items():
            self._neighbours.receive([found[rank]], message)
        for rank in messages:
            self._neighbours.send([own], self._message(tie, sender=here, peer=rank))
        for message in messages.values():
            self._neighbours.wait(message.tag)
        self._neighbours.wait_until_sent()
        total = torch.zeros_like(own, dtype=sum_dtype(own.dtype))
        for part in found.values():
            total += part
        return total

    def _message(self, tie: Tie, *, sender: int, peer: int) -> Message:
        tag = _FIRST_TAG + tie.number * self._ranks.size + sender
        return Message(peer, tag, f"summing up the gradients of {tie.managed.name}, which several stages have")
