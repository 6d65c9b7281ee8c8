"""Which region each chunk of activations belongs to, and what of it the chunk holds: read off a trace. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from chunkmem.trace.model import Kind, Trace
from chunkmem.types import ChunkId


class Content(enum.Enum):
    """What a chunk of activations holds."""

    ACTIVATIONS = "activations"
    """What a call has saved, until backward."""
    INPUTS = "inputs"
    """What a call is recomputed from."""
    RECOMPUTED = "recomputed activations"
    """What it saves when it is recomputed."""
    OUTPUTS = "outputs"
    """What a call has returned, until the next block is called with it."""
    GRADIENTS = "gradients"
    """Of what a call is given, until the backward of the block before."""

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class ActivationContents:
    """Of one chunk."""

    region: str
    """Its name."""
    content: Content

    def __str__(self) -> str:
        return f"{self.content.value} of {self.region}"


_BY_LABEL = {"backward": Content.RECOMPUTED, "output": Content.OUTPUTS, "gradient": Content.GRADIENTS}
"""By the last word of what creates the chunk."""
PARKED = frozenset({Content.OUTPUTS, Content.GRADIENTS})
"""On its way from block to block, and no part of a region."""


def activation_contents(trace: Trace) -> dict[ChunkId, ActivationContents]:
    """Return what the ACTIVATION chunks of a step hold, in the order in which they get it.

    A chunk of a region is filled in forward, or when the region is recomputed; then those that are held are its inputs.
    """
    found: dict[ChunkId, ActivationContents] = {}
    held: set[ChunkId] = set()
    for moment in trace.moments:
        chunk, kind = moment.chunk, moment.kind
        if not chunk.role.kind.is_of_call:
            continue
        if kind is Kind.CREATE:
            name, _, when = moment.label.rpartition(" ")
            content = found[chunk] = ActivationContents(name, _BY_LABEL.get(when, Content.ACTIVATIONS))
            for inputs in held if content.content is Content.RECOMPUTED else ():
                if found[inputs] == ActivationContents(name, Content.ACTIVATIONS):
                    found[inputs] = ActivationContents(name, Content.INPUTS)
        elif kind is Kind.HOLD:
            held.add(chunk)
        elif kind is Kind.RELEASE:
            held.discard(chunk)
    return found
