"""One running call of a module, and what it has read."""

from __future__ import annotations

import threading

import torch
from torch import nn

from chunkmem.data.types import Tier
from chunkmem.modules.binding import ManagedParameter
from chunkmem.modules.guard import AccessGuard
from chunkmem.ranks.units import Unit

Referred = int | ManagedParameter
"""What there are references to: the memory of a group's chunk, or a parameter itself."""


class Frame:
    """One running call of a module, or of an operator outside of modules: what it has read, and so what it pins."""

    def __init__(self, name: str, module: nn.Module | None = None, *, recomputing: bool = False) -> None:
        self.name = name
        self.module = module
        self.recomputing = recomputing
        self.thread = threading.get_ident()
        self.took_lock = False
        """This call is to release the lock; see `chunkmem.runtime.step_lock`."""
        self.tier = Tier.DEVICE
        """Where a module computes."""
        self.reads: dict[ManagedParameter, int] = {}
        """With the references to each when it was first read here."""
        self.groups: dict[int, int] = {}
        """By group: references to the chunk's memory when it was first read here; see [Note: References]."""
        self.left_inside: dict[Referred, int] = {}
        """References that calls inside of this one have left since then."""
        self.first_node = torch._C._autograd._get_sequence_nr()
        """Autograd's number of the next node when the call began."""
        self.end_node = self.first_node
        """The same when it ended."""
        self.inside: list[tuple[int, int]] = []
        """Numbers of the nodes that calls inside of this one have made: from, to below."""
        self.unit: Unit | None = None
        """The unit of exchange that the module belongs to; None with one rank."""
        self.opened: Unit | None = None
        """The same if it was entered by this call."""
        self.guard: AccessGuard | None = None
        """The check that runs while this frame does."""
        self.inputs: list[tuple[torch.Tensor, int]] = []
        """(input that requires grad, its version at entry); noted where a frozen read ends with its gradient."""
        self.containers: list[object] = []
        """Lists and dicts it was given: it may put outputs into them."""
        self.given: dict[int, torch.Tensor] = {}
        """The tensors that were in them at entry, by id."""

    def __str__(self) -> str:
        if self.module is None:
            return self.name
        return f"{self.name} {'recomputation' if self.recomputing else 'forward'}"
