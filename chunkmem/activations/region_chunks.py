"""The chunks of regions: one for each thing that is kept of a call, reused from step to step."""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import takewhile

import torch

from chunkmem.activations.region_policies import RegionPolicies
from chunkmem.activations.saved_storages import SavedStorages
from chunkmem.data.activations import STASHED, Content, activation_contents
from chunkmem.data.errors import TraceError
from chunkmem.data.layout import Group, Slot
from chunkmem.data.trace import Kind, Moment, Trace
from chunkmem.data.types import ACTIVATION_POLICIES, ActivationPolicy, ChunkId, Role, Tier
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.pager import Pager
from chunkmem.runtime.store import ChunkStore

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
        contents = activation_contents(trace)
        if policies.by_name and not contents:
            raise _of_other_policy(policies.default, "")
        is_by_layer = any(held.content in STASHED for held in contents.values())
        for key, held in contents.items():
            found = policies.by_name.get(held.region, set())
            if is_by_layer and (held.content in STASHED or not found):
                continue  # a pipeline says itself what its blocks save
            saved = held.content is Content.ACTIVATIONS
            stays = _stays(key, held.region, trace.moments) if saved else None
            if not any(_fits(ACTIVATION_POLICIES[name], saved=saved, stays=stays) for name in found):
                raise _of_other_policy(next(iter(found), None), f" for {held.region}")
        chunks = self._store.chunks
        for key, held in contents.items():
            if key in chunks and (chunks[key].label, chunks[key].nbytes) != (str(held), trace.chunk_nbytes[key]):
                raise TraceError(
                    f"{key} has {chunks[key].label} here, and in the trace {held}; set the trace before training"
                )
            if key not in chunks:
                chunk = self._make(key.group, str(held), trace.chunk_nbytes[key])
                chunk.saved = SavedStorages()


def use_up(chunk: Chunk, pager: Pager) -> None:
    """The content of a chunk of activations is used up. Its memory on DEVICE goes at once, unless a plan says when."""
    pager.consume(chunk)
    if Tier.DEVICE in chunk.replicas and not pager.policy.is_planned:
        pager.store.drop(chunk, Tier.DEVICE)


def _fits(policy: ActivationPolicy, *, saved: bool, stays: bool | None) -> bool:
    """Tell whether a chunk may be of a region with a policy: one that was `saved` in forward, and `stays` or not."""
    if not saved:
        return policy.recomputes
    return policy.saves and (policy.recomputes or stays is None or policy.stays is stays)


def _stays(chunk: ChunkId, region: str, moments: Sequence[Moment]) -> bool | None:
    """Tell whether a chunk of activations is held from where it is made; None: nobody can tell.

    What is held at once until the region's own backward is over may be that of the last region in forward, whose
    backward comes next whatever its policy is.
    """
    made = next(at for at, moment in enumerate(moments) if (moment.kind, moment.chunk) == (Kind.CREATE, chunk))
    following = moments[made + 1 :]
    if not following or (following[0].kind, following[0].chunk) != (Kind.HOLD, chunk):
        return False
    held = takewhile(lambda moment: (moment.kind, moment.chunk) != (Kind.RELEASE, chunk), following)
    readers = (moment.label for moment in held if moment.kind is Kind.HOLD)
    return True if any(not f"{reader} ".startswith((f"{region} ", f"{region}.")) for reader in readers) else None


def _of_other_policy(policy: str | None, where: str) -> TraceError:
    return TraceError(
        f"the trace is of a run with another activations.policy, and here it is {policy or 'null'}{where}: set it, and "
        "those that manager.region() has set, as they were, or leave the trace out"
    )


def activation_chunk(group: int, label: str, nbytes: int) -> Chunk:
    """Return a chunk of activations, without content."""
    spec = Group(group, "uint8", 1, 1, nbytes, (Slot(0, group, 0, nbytes),))
    return Chunk(ChunkId(Role.ACTIVATION, group), spec, torch.uint8, label, ())
