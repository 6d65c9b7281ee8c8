"""The chunks of regions: one for each thing that is kept of a call, reused from step to step."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch

from chunkmem.errors import TraceError
from chunkmem.layout.spec import Group, Slot
from chunkmem.nn.region_policies import RegionPolicies
from chunkmem.nn.saved_storages import SavedStorages
from chunkmem.runtime.store import Chunk, ChunkStore
from chunkmem.trace.activations import Content, Contents, activation_contents
from chunkmem.trace.model import Trace
from chunkmem.types import ChunkId, Role

_CONTENTS: Mapping[str | None, set[Content]] = {
    "keep": {Content.ACTIVATIONS},
    "offload": {Content.ACTIVATIONS},
    "recompute": {Content.INPUTS, Content.RECOMPUTED},
}
"""By policy: what chunks may hold."""
FIRST_GROUP = 1 << 20
"""Groups of activations are numbered from here on, those of parameters from 0."""


class RegionChunks:
    """Chunks of activations, by what they hold."""

    def __init__(self, store: ChunkStore) -> None:
        """Begin with none; they are added to `store`."""
        self._store = store
        self._known: dict[str, list[Chunk]] = {}
        """By label."""
        self._next_group = FIRST_GROUP

    def get(self, label: str, nbytes: int, *, live: Container[ChunkId]) -> Chunk:
        """Return the first chunk that is not `live` and is large enough, so that steps alike have the same ones."""
        for chunk in self._known.setdefault(label, []):
            if chunk.id not in live and chunk.nbytes >= nbytes:
                return chunk
        return self._make(self._next_group, label, nbytes)

    def _make(self, group: int, label: str, nbytes: int) -> Chunk:
        self._next_group = max(self._next_group, group + 1)
        chunk = activation_chunk(group, label, nbytes)
        self._store.add(chunk)
        self._known.setdefault(label, []).append(chunk)
        return chunk

    @property
    def num_made(self) -> int:
        """How many there have ever been."""
        return self._next_group - FIRST_GROUP

    def forget(self, chunk: Chunk) -> None:
        """Do not use a chunk again: it does not fit."""
        self._known[chunk.label].remove(chunk)

    def adopt(self, trace: Trace, policies: RegionPolicies) -> None:
        """Have the chunks that a training step of an earlier run names, before there are others.

        Raises:
            TraceError: other regions were managed in it, or others have been here.
        """
        contents, policy = activation_contents(trace), policies.default
        is_alike = bool(contents) is not (policy is None) and _of_all(contents) <= _CONTENTS.get(policy, set(Content))
        if not (policies.has_marked or is_alike):
            raise TraceError(
                f"the trace is of a run with another activations.policy, and here it is {policy or 'null'}: set it as "
                "it was, or leave the trace out"
            )
        chunks = self._store.chunks
        for key, held in contents.items():
            if key in chunks and (chunks[key].label, chunks[key].nbytes) != (str(held), trace.chunk_nbytes[key]):
                raise TraceError(
                    f"{key} has {chunks[key].label} here, and in the trace {held}; set the trace before training"
                )
            if key not in chunks:
                chunk = self._make(key.group, str(held), trace.chunk_nbytes[key])
                chunk.saved = SavedStorages()


def _of_all(contents: Mapping[ChunkId, Contents]) -> set[Content]:
    return {held.content for held in contents.values()}


def activation_chunk(group: int, label: str, nbytes: int) -> Chunk:
    """Return a chunk of activations, without content."""
    spec = Group(group, "uint8", 1, 1, nbytes, (Slot(0, group, 0, nbytes),))
    return Chunk(ChunkId(Role.ACTIVATION, group), spec, torch.uint8, label, ())
