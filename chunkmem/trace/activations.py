"""Which region each chunk of activations belongs to, and what of it the chunk holds: read off a trace. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from chunkmem.trace.model import Kind, Trace
from chunkmem.types import ChunkId, Role


class Content(enum.Enum):
    """What a chunk of activations holds."""

    ACTIVATIONS = "activations"
    """What a call has saved, until backward."""
    INPUTS = "inputs"
    """What a call is recomputed from."""
    RECOMPUTED = "recomputed activations"
    """What it saves when it is recomputed."""

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Contents:
    """Of one chunk."""

    region: str
    """Its name."""
    content: Content

    def __str__(self) -> str:
        return f"{self.content.value} of {self.region}"


def activation_contents(trace: Trace) -> dict[ChunkId, Contents]:
    """Return what the ACTIVATION chunks of a step hold, in the order in which they get it.

    A chunk of a region is filled in forward, or when the region is recomputed; then those that are held are its inputs.
    """
    found: dict[ChunkId, Contents] = {}
    held: set[ChunkId] = set()
    for moment in trace.moments:
        chunk, kind = moment.chunk, moment.kind
        if chunk.role is not Role.ACTIVATION:
            continue
        if kind is Kind.CREATE:
            name, _, when = moment.label.rpartition(" ")
            is_again = when == "backward"
            found[chunk] = Contents(name, Content.RECOMPUTED if is_again else Content.ACTIVATIONS)
            for inputs in held if is_again else ():
                if found[inputs] == Contents(name, Content.ACTIVATIONS):
                    found[inputs] = Contents(name, Content.INPUTS)
        elif kind is Kind.HOLD:
            held.add(chunk)
        elif kind is Kind.RELEASE:
            held.discard(chunk)
    return found
