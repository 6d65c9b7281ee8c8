"""Steps of models whose blocks are regions: as a GPT's, all alike, and as a CNN's, with less and less to save."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from chunkmem.data.trace import Kind, Mode, Moment, Moments, Region, Trace
from chunkmem.data.types import ChunkId, Role
from tests.helpers.traces import LAYOUT, grad, param, updated_chunks


@dataclass(frozen=True)
class Block:
    """One region of a model."""

    group: int
    """Of its weights."""
    weights_nbytes: int
    """Of that chunk."""
    saved_nbytes: int
    forward_s: float
    temporaries_nbytes: int = 0


def gpt_like(num_blocks: int, *, blocks_per_chunk: int = 4, saved: int = 24, forward_s: float = 4e-3) -> list[Block]:
    """Return blocks that are all alike; sizes in MiB."""
    mib = 1 << 20
    return [Block(at // blocks_per_chunk, 16 * mib, saved * mib, forward_s, 2 * mib) for at in range(num_blocks)]


def cnn_like(num_blocks: int, *, forward_s: float = 4e-3) -> list[Block]:
    """Return blocks in stages: each stage saves half as much as the one before, and has twice the weights."""
    mib = 1 << 20
    stage = [4 * at // num_blocks for at in range(num_blocks)]
    return [
        Block(at, mib << s, (64 * mib) >> s, forward_s * (1 + 0.1 * (at % 3)), (8 * mib) >> s)
        for at, s in enumerate(stage)
    ]


def region_trace(blocks: Sequence[Block], recomputed: Collection[int] = (), *, update_s: float = 1e-3) -> Trace:
    """Return the step of a model of these blocks, of which some are recomputed. Written down, not edited."""
    sizes = {chunk: block.weights_nbytes for block in blocks for chunk in updated_chunks(block.group)}
    first_own = max(block.group for block in blocks) + 1
    moments: list[Moment] = []
    forwards: list[Moments] = []
    regions: list[Region] = []

    def add(kind: Kind, chunk: ChunkId, label: str, *, s: float = 0.0, peak: int = 0) -> None:
        moments.append(Moment(kind, chunk, f"{label} {kind.value}", s, peak))

    def forward(at: int, *, saves: bool) -> Moments:
        start, block, label = len(moments), blocks[at], f"blocks.{at} forward"
        half = block.saved_nbytes // 2 if saves else 0
        for part in (1, 2):
            peak = block.temporaries_nbytes + part * half
            add(Kind.HOLD, param(block.group), label, s=block.forward_s / 2, peak=peak)
            add(Kind.RELEASE, param(block.group), label, peak=peak)
        return start, len(moments)

    for at, block in enumerate(blocks):
        start, stop = forward(at, saves=at not in recomputed)
        if at not in recomputed:
            own = ChunkId(Role.ACTIVATION, first_own + at)
            sizes[own] = block.saved_nbytes
            moments.append(Moment(Kind.CREATE, own, f"blocks.{at} forward", 0.0, block.temporaries_nbytes))
            stop += 1
        forwards.append((start, stop))
    begun: set[int] = set()
    for at in reversed(range(len(blocks))):
        block, own, label = blocks[at], ChunkId(Role.ACTIVATION, first_own + at), f"blocks.{at} backward"
        start, again, temporaries = len(moments), None, 2 * block.temporaries_nbytes
        half = block.saved_nbytes // 2 if at in recomputed else 0
        if at in recomputed:
            again = forward(at, saves=True)
            # Its last moment is also the first one of backward itself.
            moments[-1] = replace(moments[-1], non_model_peak_nbytes=temporaries + 2 * half)
        else:
            moments.append(Moment(Kind.HOLD, own, label, 0.0, temporaries))
        peak = temporaries + 2 * half  # all of it until the block's backward is over
        for _ in range(2):
            add(Kind.HOLD, param(block.group), label, s=block.forward_s, peak=peak)
            add(Kind.WRITE if block.group in begun else Kind.CREATE, grad(block.group), label, peak=peak)
            add(Kind.RELEASE, param(block.group), label, peak=peak)
            begun.add(block.group)
        if at not in recomputed:
            moments += (Moment(kind, own, label, 0.0, temporaries) for kind in (Kind.RELEASE, Kind.CONSUME))
        regions.insert(0, Region(f"blocks.{at}", own, block.saved_nbytes, forwards[at], (start, len(moments)), again))
    for group in sorted(begun):
        add(Kind.UPDATE, param(group), f"group {group}", s=update_s)
        add(Kind.CONSUME, grad(group), f"group {group}")
    return Trace(Mode.TRAIN, LAYOUT, sizes, tuple(moments), regions=tuple(regions))


def as_recorded(blocks: Sequence[Block], kept: Collection[int] = (), *, inputs_nbytes: int = 1) -> Trace:
    """Return the step that recomputes all regions but those `kept` as it is recorded: with chunks for inputs, and for
    what is saved."""
    trace = region_trace(blocks, [at for at in range(len(blocks)) if at not in kept])
    sizes = dict(trace.chunk_nbytes)
    before: dict[int, list[Moment]] = defaultdict(list)
    saved: dict[int, int] = defaultdict(int)
    for region in reversed([region for region in trace.regions if region.recomputed is not None]):
        inputs, label = _inputs_of(region, len(blocks)), f"{region.name} backward"
        sizes |= {region.chunk: region.nbytes, inputs: inputs_nbytes}
        assert region.recomputed is not None
        (start, stop), again = region.backward, region.recomputed[1]
        before[region.forward[1]].append(Moment(Kind.CREATE, inputs, f"{region.name} forward"))
        before[start].append(Moment(Kind.HOLD, inputs, label))
        peak = trace.moments[stop - 1].non_model_peak_nbytes - region.nbytes
        before[again] += (Moment(kind, region.chunk, label, 0.0, peak) for kind in (Kind.CREATE, Kind.HOLD))
        for chunk in (region.chunk, inputs):
            before[stop] += (Moment(kind, chunk, "", 0.0, peak) for kind in (Kind.RELEASE, Kind.CONSUME))
        saved |= dict.fromkeys(range(again - 1, stop), region.nbytes)
    moments: list[Moment] = []
    for at, moment in enumerate(trace.moments):
        moments += before[at]
        moments.append(replace(moment, non_model_peak_nbytes=moment.non_model_peak_nbytes - saved[at]))
    if kept:
        return replace(trace, chunk_nbytes=sizes, moments=tuple(moments), regions=())
    places = {(moment.kind, moment.chunk): at for at, moment in enumerate(moments)}
    regions: list[Region] = []
    for number, region in enumerate(trace.regions):
        inputs = _inputs_of(region, len(blocks))
        created, held, again = places[Kind.CREATE, inputs], places[Kind.HOLD, inputs], places[Kind.CREATE, region.chunk]
        forward = regions[-1].forward[1] if regions else 0, created
        backward = held, places[Kind.RELEASE, region.chunk]
        regions.append(
            Region(region.name, region.chunk, region.nbytes, forward, backward, (held + 1, again), inputs, number)
        )
    return replace(trace, chunk_nbytes=sizes, moments=tuple(moments), regions=tuple(regions))


def _inputs_of(region: Region, num_blocks: int) -> ChunkId:
    return ChunkId(Role.ACTIVATION, region.chunk.group + num_blocks)
