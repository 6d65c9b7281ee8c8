"""What one step does to memory, as plain data: the moments of a trace.

A group that another rank owns has weights here only while they are held: a HOLD begins with none, an exchange brings
them, the RELEASE ends them. Gradients that land here end with the CONSUME after their exchange. All ranks have the same
exchanges in the same order; what lies between them may differ.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated

from chunkmem.data.codec import Label, Mark, Positive, Seconds
from chunkmem.data.errors import TraceError
from chunkmem.data.json_files import Saved
from chunkmem.data.labels import layer_of, module_named
from chunkmem.data.sizes import format_nbytes
from chunkmem.data.types import ChunkId, Role, UpdateForm

UPDATES = "updates"
"""In place of a layer: of groups, by the optimizer."""


class Kind(enum.Enum):
    """What begins a moment."""

    HOLD = "hold"
    """A chunk is read on DEVICE and stays in use until its RELEASE: a module is entered, its backward begins."""
    RELEASE = "release"
    """Nothing uses the chunk any more."""
    CREATE = "create"
    """New content of a chunk begins on DEVICE; nothing of the old is read. In use for this moment only."""
    WRITE = "write"
    """A chunk is read and written on DEVICE, for this moment only: a further gradient lands in it."""
    UPDATE = "update"
    """The optimizer updates a group: reads GRAD, reads and writes PARAM and the states, all on one tier.
    Where there is a MASTER, PARAM is only written."""
    CONSUME = "consume"
    """A chunk's content is used up: gradients after the update. A slab on DEVICE stays, empty."""
    EXCHANGE = "exchange"
    """A held chunk begins to be exchanged with other ranks: weights go from their owner to all, gradients' mean to
    their owner."""
    ARRIVE = "arrive"
    """An exchange is over: computing from now on comes after it."""

    __hash__ = object.__hash__


class Mode(enum.Enum):
    """Training and evaluation have traces of their own."""

    TRAIN = "train"
    EVAL = "eval"

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Entry:
    """A module is entered: its forward begins, or its backward."""

    label: Label
    """Module and pass, such as "blocks.3 forward"."""
    share: float
    """Share of the moment's time that has passed at the entry."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The interval from one event to the next."""

    kind: Kind
    chunk: ChunkId
    """The chunk concerned; of an UPDATE, the group's PARAM chunk."""
    label: Label = ""
    """Module and pass, such as "blocks.3.mlp forward"."""
    duration_s: Seconds = 0.0
    """Time computed in it, waiting for copies not included."""
    non_model_peak_nbytes: int = 0
    """Peak bytes of non-model data on DEVICE: activations, gradients in flight, temporaries."""
    sampled_peak_nbytes: int = 0
    """Peak bytes of non-model data as the sampling thread saw it; 0: none ran."""
    entered: Annotated[tuple[Entry, ...], Mark.LEFT_OUT] = field(default=(), compare=False)
    """Modules that are entered in it: what they compute before they read a parameter is in no moment of their own."""

    def __str__(self) -> str:
        return self.label or f"{self.kind.value} {self.chunk}"

    def longer(self, seconds: float, entered: Sequence[Entry] = (), *, peak_nbytes: int = 0) -> Moment:
        """Return it with so many seconds more at its end, of that peak of non-model data, in which modules are
        `entered`."""
        total_s, peak_nbytes = self.duration_s + seconds, max(self.non_model_peak_nbytes, peak_nbytes)
        if not total_s:
            return replace(self, non_model_peak_nbytes=peak_nbytes)
        own = (Entry(each.label, each.share * self.duration_s / total_s) for each in self.entered)
        more = (Entry(each.label, (self.duration_s + each.share * seconds) / total_s) for each in entered)
        return replace(self, duration_s=total_s, entered=(*own, *more), non_model_peak_nbytes=peak_nbytes)


@dataclass(frozen=True, slots=True)
class GroupUpdate:
    """The chunks of one group that an optimizer's update touches, in the order of their roles."""

    chunks: tuple[ChunkId, ...] = ()
    reads: tuple[ChunkId, ...] = ()
    """Chunks that the update reads: all but weights that are rounded from their master copy."""
    writes: tuple[ChunkId, ...] = ()
    """All but gradients."""


_NO_UPDATE = GroupUpdate()


Moments = tuple[int, int]
"""A range `[start, stop)` of a trace's moments."""


@dataclass(frozen=True, slots=True)
class Region:
    """One call of a block whose activations are kept as one chunk, or computed again in backward."""

    name: Label
    """Name of the block."""
    chunk: ChunkId
    """Chunk of role ACTIVATION. If the region is recomputed, the chunk has content from then on."""
    nbytes: int
    """Saved by the call."""
    forward: Moments
    backward: Moments
    recomputed: Moments | None = None
    """Moments within backward in which the block's forward runs again; None: it does not."""
    inputs: ChunkId | None = None
    """Chunk of the inputs from which the region is recomputed; None: it is kept, or they are in no chunk."""
    number: int = 0
    """Number of the call among the calls of all regions in the step."""


@dataclass(frozen=True)
class Trace(
    Saved,
    name="chunkmem trace",
    error=TraceError,
    again="record it again",
    tables=("chunks", "labels"),
    optional=("regions", "before_s", "update_form", "by_block"),
):
    """The moments of one step, which is the body of a loop: after the last comes the first again."""

    mode: Mode
    layout: str
    """Digest of the layout the chunks belong to; see `layout_digest`."""
    chunk_nbytes: Mapping[ChunkId, Positive]
    """Every chunk that a moment touches or an update needs."""
    moments: tuple[Moment, ...]
    sampling_interval_s: Seconds = 0.0
    """Longest time between two looks of the sampling thread: what lives shorter may be missed; 0: none ran."""
    remote_groups: frozenset[int] = frozenset()
    """Groups that another rank owns."""
    regions: tuple[Region, ...] = ()
    """Regions in the order of their forward."""
    before_s: Seconds = 0.0
    """Computed before the first moment: by the first modules, before they read a parameter."""
    update_form: UpdateForm = UpdateForm.FP32
    """Form of most updates of the step."""
    by_block: bool = False
    """Blocks were heard of as a whole: [Note: Blocks as a whole] in `chunkmem.modules.blocks`."""

    def __post_init__(self) -> None:
        held: set[ChunkId] = set()
        exchanged: set[ChunkId] = set()
        for index, moment in enumerate(self.moments):
            if moment.chunk not in self.chunk_nbytes:
                raise TraceError(f"moment {index} ({moment}) names {moment.chunk}, which the trace has no size of")
            if moment.kind is Kind.HOLD:
                if moment.chunk in held:
                    raise TraceError(f"moment {index} ({moment}) holds {moment.chunk}, which is held already")
                held.add(moment.chunk)
            elif moment.kind is Kind.RELEASE:
                if moment.chunk not in held:
                    raise TraceError(f"moment {index} ({moment}) releases {moment.chunk}, which is not held")
                if moment.chunk in exchanged:
                    raise TraceError(f"moment {index} ({moment}) releases {moment.chunk}, whose exchange has no ARRIVE")
                held.remove(moment.chunk)
            elif moment.kind in (Kind.EXCHANGE, Kind.ARRIVE):
                if moment.chunk not in held or (moment.chunk in exchanged) is (moment.kind is Kind.EXCHANGE):
                    raise TraceError(
                        f"moment {index} ({moment}): {moment.kind.value} of {moment.chunk}, which has to be held, and "
                        "has one ARRIVE after each EXCHANGE"
                    )
                exchanged ^= {moment.chunk}
            elif moment.chunk in held:
                raise TraceError(f"moment {index} ({moment}): {moment.kind.value} of {moment.chunk} while it is held")
            if moment.duration_s < 0 or moment.non_model_peak_nbytes < 0:
                raise TraceError(f"moment {index} ({moment}): durations and bytes are 0 or more")
            if not all(0 <= entry.share <= 1 for entry in moment.entered):
                raise TraceError(f"moment {index} ({moment}): modules are entered at shares from 0 to 1 of its time")
        if held:
            raise TraceError(f"{min(held, key=str)} is still held at the trace's end")
        if any(nbytes <= 0 for nbytes in self.chunk_nbytes.values()):
            raise TraceError("a chunk of the trace has no bytes")
        if self.sampling_interval_s < 0:
            raise TraceError(f"sampling_interval_s is {self.sampling_interval_s}; seconds are 0 or more")
        for region in self.regions:
            self._check_region(region)

    def _check_region(self, region: Region) -> None:
        where = f"region {region.name} ({region.chunk})"
        if not region.chunk.role.kind.is_of_call:
            raise TraceError(f"{where}: its chunk has to be one of activations")
        if region.nbytes < 0 or self.chunk_nbytes.get(region.chunk, region.nbytes) != region.nbytes:
            raise TraceError(f"{where}: {region.nbytes} bytes are saved, the chunk has another size")
        spans = {"forward": region.forward, "backward": region.backward, "recomputed": region.recomputed}
        for name, span in spans.items():
            if span is not None and not 0 <= span[0] <= span[1] <= len(self.moments):
                raise TraceError(f"{where}: {name} is {list(span)}, and the trace has {len(self.moments)} moments")
        (start, stop), again = region.backward, region.recomputed
        if start < region.forward[1]:
            raise TraceError(f"{where}: backward begins at moment {start}, it comes after its forward")
        if again is not None and not start <= again[0] <= again[1] <= stop:
            raise TraceError(f"{where}: recomputed is {list(again)}, and lies within backward, {[start, stop]}")

    def __repr__(self) -> str:
        return (
            f"Trace({self.mode.value}, {len(self.moments)} moments, {len(self.chunk_nbytes)} chunks of "
            f"{format_nbytes(sum(self.chunk_nbytes.values()))}, {1e3 * self.compute_s:.1f} ms)"
        )

    @cached_property
    def compute_s(self) -> float:
        """Time computed in all moments."""
        return sum(moment.duration_s for moment in self.moments)

    @cached_property
    def between(self) -> Mapping[int, str]:
        """The moments between units, when nothing is held any more or a group has been updated, and after which layer
        they come: that of the last module that was named, or `UPDATES`."""
        num_held, layer, found = 0, "the model", dict[int, str]()
        for index, moment in enumerate(self.moments):
            num_held += (moment.kind is Kind.HOLD) - (moment.kind is Kind.RELEASE)
            layer = UPDATES if moment.kind is Kind.UPDATE else layer_of(module_named(moment.label)) or layer
            if not num_held and moment.kind in (Kind.RELEASE, Kind.CONSUME):
                found[index] = layer
        return found

    @cached_property
    def non_model_peak_nbytes(self) -> int:
        """Highest bytes of non-model data in any moment."""
        return max((moment.non_model_peak_nbytes for moment in self.moments), default=0)

    def update(self, group: int) -> GroupUpdate:
        """Return what an update of `group` reads and writes."""
        return self._updates.get(group, _NO_UPDATE)

    def touched_nbytes(self, group: int) -> int:
        """Return the bytes that an update of `group` reads and writes."""
        update = self.update(group)
        return self.nbytes(update.reads) + self.nbytes(update.writes)

    def nbytes(self, chunks: Iterable[ChunkId]) -> int:
        """Return the bytes of some chunks."""
        return sum(self.chunk_nbytes[chunk] for chunk in chunks)

    @cached_property
    def update_moments(self) -> Mapping[int, tuple[int, ...]]:
        """By group that the step updates, in the order of their numbers: the moments in which it is updated."""
        found: dict[int, tuple[int, ...]] = {}
        for at, moment in enumerate(self.moments):
            if moment.kind is Kind.UPDATE:
                found[moment.chunk.group] = (*found.get(moment.chunk.group, ()), at)
        return dict(sorted(found.items()))

    @cached_property
    def _updates(self) -> dict[int, GroupUpdate]:
        found: dict[int, list[ChunkId]] = {}
        for chunk in sorted(self.chunk_nbytes, key=lambda chunk: chunk.role.order):
            found.setdefault(chunk.group, []).append(chunk)
        return {
            group: GroupUpdate(
                chunks=tuple(chunks),
                reads=tuple(chunk for chunk in chunks if not self.is_rounded(chunk)),
                writes=tuple(chunk for chunk in chunks if not chunk.role.kind.is_of_step),
            )
            for group, chunks in found.items()
        }

    def is_remote(self, chunk: ChunkId) -> bool:
        """Tell whether another rank owns a chunk."""
        return chunk.group in self.remote_groups

    def is_rounded(self, chunk: ChunkId) -> bool:
        """Tell whether a chunk is rounded from one in float32, so that its content can be made again at any time."""
        return chunk.role is Role.PARAM and ChunkId(Role.MASTER, chunk.group) in self.chunk_nbytes

    @cached_property
    def digest(self) -> str:
        """Identity of the sequence of events; durations, peaks and how they were measured do not enter."""
        events = [(m.kind.value, m.chunk.role.value, m.chunk.group) for m in self.moments]
        sizes = sorted((c.role.value, c.group, n) for c, n in self.chunk_nbytes.items())
        ranks = [sorted(self.remote_groups)] if self.remote_groups else []
        text = json.dumps([self.mode.value, self.layout, sizes, events, *ranks], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
