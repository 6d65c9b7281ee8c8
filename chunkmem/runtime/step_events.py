"""What happens in a step, for parts that are made after those in which it happens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class StepEvents:
    """Who is told of what, in the order of a step.

    A part is made of earlier ones and calls them. Where an earlier one has something to tell a later one, it calls all
    that is listed here, and the later one has put a method of its own into the list when it was made. What nobody
    listens to costs a look at an empty list.
    """

    used: list[Callable[[int], object]] = field(default_factory=list)
    """A parameter, of which this is the identity, is about to be used outside of models: a step may begin with it."""
    activation_taken: list[Callable[[torch.UntypedStorage], object]] = field(default_factory=list)
    """A storage is about to become part of an activation chunk."""
    activation_left: list[Callable[[torch.UntypedStorage], object]] = field(default_factory=list)
    """A storage was part of one, and is others' now."""
    reducing: list[Callable[[str], AbstractContextManager[object]]] = field(default_factory=list)
    """All ranks ask for the means of gradients before the step, by a call of this name: surrounds that."""
    reduced: list[Callable[[int], object]] = field(default_factory=list)
    """The reduction of a group's gradients over ranks is over: its owner has the means."""
    failed: list[Callable[[], object]] = field(default_factory=list)
    """An access that the step's policy was told of has raised an error: it has not happened."""
    has_inner_hooks: list[Callable[[], bool]] = field(default_factory=list)
    """Tells whether somebody has to hear of calls inside of models, and of gradients: [Note: Resident models]."""
    resident: list[Callable[[bool], object]] = field(default_factory=list)
    """All chunks are on DEVICE, and stay there (True), or may leave it again: [Note: Resident models]."""
    by_block: list[Callable[[bool], object]] = field(default_factory=list)
    """Blocks are heard of as a whole from now on (True), or module by module: [Note: Blocks as a whole]."""
    num_in_blocks: list[Callable[[], int]] = field(default_factory=list)
    """Returns how many modules are in blocks that can be heard of as a whole."""
    read_in_part: list[Callable[[], object]] = field(default_factory=list)
    """Inside of models, a weight of a block that is heard of as a whole was read outside of the block's own calls."""
    compiled: list[Callable[[], object]] = field(default_factory=list)
    """A module of a packed model is about to be compiled: steps read weights in another order from then on."""
