"""How large the chunks of kept regions are: without what two of them have both saved. Pure.

What a region returns is the next one's input, so the next one saves it. Where the region has saved it as well, as a
residual block with an activation at its end does, it is in neither's chunk: others held it when the region was left,
and the region holds it later. It is non-model data; where that counts, it is charged to the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from statistics import median

from chunkmem.data.trace import Region, Trace

_SHARE = 0.5
"""Of an output that is taken to be saved by the region that returns it, where nothing is known."""


def kept_nbytes(
    recorded: Trace, outside: Mapping[int, int], kept: Collection[int], *, charges_non_model: bool
) -> dict[int, int]:
    """Return the bytes of the chunks of regions, by index, if exactly these are kept.

    Args:
        recorded: a step that recomputes all of its regions.
        outside: what is known, see `outside_nbytes`; the others are taken to be like those.
        kept: indices into its regions.
        charges_non_model: non-model data counts.
    """
    regions, before = recorded.regions, inputs_from(recorded.regions)
    boundary = {earlier: _inputs_nbytes(recorded, later) for later, earlier in before.items()}
    """By index of a region: bytes of its output that the next region saves as well."""
    known = {at: outside[region.number] for at, region in enumerate(regions) if region.number in outside}
    shares = [min(1.0, known[at] / nbytes) for at, nbytes in boundary.items() if at in known and nbytes]
    share = median(shares or [0.0 if charges_non_model else _SHARE])
    left = {at: int(share * nbytes) for at, nbytes in boundary.items()} | known
    found = {}
    for at in kept:
        nbytes = _saved_nbytes(recorded, at) - left.get(at, 0)
        if before.get(at) in kept and not charges_non_model:
            nbytes -= min(left[before[at]], boundary[before[at]])
        found[at] = max(0, nbytes)
    return found


def outside_nbytes(recorded: Trace, measured: Trace) -> dict[int, int]:
    """Return what regions have saved that is in no chunk, by number, besides what the ones before them have left out.

    Args:
        recorded: a step that recomputes all of its regions.
        measured: one of the same kind, of which the regions count that it keeps.
    """
    own_nbytes = {region.number: region.nbytes for region in measured.regions if region.recomputed is None}
    before = inputs_from(recorded.regions)
    found: dict[int, int] = {}
    for at, region in enumerate(recorded.regions):
        if region.number in own_nbytes:
            given = found.get(recorded.regions[before[at]].number, 0) if at in before else 0
            nbytes = _saved_nbytes(recorded, at) - own_nbytes[region.number]
            found[region.number] = max(0, nbytes - min(given, _inputs_nbytes(recorded, at)))
    return found


def inputs_from(regions: Collection[Region]) -> dict[int, int]:
    """Return, by index of a region, the one whose output it takes, as far as one can tell.

    It is a call of the block before, at the same place among the calls of a block: whether a step takes one micro-batch
    after the other, or one block.
    """
    calls: dict[str, list[int]] = {}
    for index, region in enumerate(regions):
        calls.setdefault(region.name, []).append(index)
    return {
        later: earlier
        for first, second in pairwise(calls.values())
        for later, earlier in zip(second, first, strict=False)
    }


def _inputs_nbytes(recorded: Trace, index: int) -> int:
    inputs = recorded.regions[index].inputs
    return 0 if inputs is None else recorded.chunk_nbytes[inputs]


def _saved_nbytes(recorded: Trace, index: int) -> int:
    return recorded.chunk_nbytes[recorded.regions[index].chunk] + _inputs_nbytes(recorded, index)
