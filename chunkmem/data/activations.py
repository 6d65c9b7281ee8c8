"""Which region each chunk of activations belongs to, and what of it the chunk holds: read off a trace. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from chunkmem.data.trace import Kind, Trace
from chunkmem.data.types import ChunkId


class Content(enum.Enum):
    """What a chunk of activations holds."""

    ACTIVATIONS = "activations"
    """Tensors that a call has saved, until its backward."""
    INPUTS = "inputs"
    """Inputs from which a call is recomputed."""
    RECOMPUTED = "recomputed activations"
    """Tensors that a recomputed call saves."""
    OUTPUTS = "outputs"
    """Outputs of a call, until the next block is called with them."""
    GRADIENTS = "gradients"
    """Gradients of a call's inputs, until the backward of the block before."""

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class ActivationContents:
    """Of one chunk."""

    region: str
    """Name of the region."""
    content: Content

    def __str__(self) -> str:
        return f"{self.content.value} of {self.region}"


_BY_LABEL = {"backward": Content.RECOMPUTED, "output": Content.OUTPUTS, "gradient": Content.GRADIENTS}
"""Content by the last word of the label that creates the chunk."""
STASHED = frozenset({Content.OUTPUTS, Content.GRADIENTS})
"""Contents that are on their way from block to block, and belong to no region."""


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
