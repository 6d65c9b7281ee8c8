"""What two regions have both saved, one as its output and the next one as its input: in neither's chunk. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from chunkmem.trace.model import Region, Trace


@dataclass(frozen=True, slots=True)
class Shared:
    """What a region has saved, and one next to it as well: in no chunk if both are kept."""

    before: int | None
    """Index of the region whose output it has as its input."""
    before_nbytes: int
    """Saved by that one, too."""
    after: int | None
    """Index of the region that has its output as its input."""
    after_nbytes: int
    elsewhere_nbytes: int = 0
    """Saved by it, and kept by others in any case, as a batch is by the training loop."""

    def nbytes(self, recomputed: Collection[int]) -> int:
        """Return what is not in the chunk of the region, which is kept."""
        with_before = self.before is not None and self.before not in recomputed
        with_after = self.after is not None and self.after not in recomputed
        return self.before_nbytes * with_before + self.after_nbytes * with_after + self.elsewhere_nbytes


def neighbours(regions: Collection[Region]) -> dict[int, tuple[int | None, int | None]]:
    """Return, by index of a region, the ones whose output it takes and which takes its output, as far as one can tell.

    They are calls of the blocks before and after, at the same place among the calls of a block: whether a step takes
    one micro-batch after the other, or one block.
    """
    calls: dict[str, list[int]] = {}
    for index, region in enumerate(regions):
        calls.setdefault(region.name, []).append(index)
    before: dict[int, int] = {}
    for first, second in pairwise(calls.values()):
        before |= dict(zip(second, first, strict=False))
    after = {earlier: index for index, earlier in before.items()}
    return {index: (before.get(index), after.get(index)) for index in range(len(regions))}


def known_nbytes(trace: Trace) -> dict[int, int]:
    """Return what regions have in their chunks, by number, if they are kept and so are those next to them."""
    found = {}
    for index, (before, after) in neighbours(trace.regions).items():
        around = (trace.regions[at] for at in (before, index, after) if at is not None)
        if all(region.recomputed is None for region in around):
            found[trace.regions[index].number] = trace.regions[index].nbytes
    return found


def shared_bytes(recorded: Trace, kept_nbytes: Mapping[int, int]) -> dict[int, Shared]:
    """Return what regions are taken to share with those next to them, by index.

    Where it is not known, it is as much of inputs and outputs as where it is; where nothing is known, inputs.

    Args:
        recorded: a step in which each region is recomputed, from a chunk of its own if it has inputs.
        kept_nbytes: of regions, by number; see `known_nbytes`.
    """
    regions, sizes = recorded.regions, recorded.chunk_nbytes
    around = neighbours(regions)

    def border_nbytes(index: int | None) -> int:
        inputs = None if index is None else regions[index].inputs
        return 0 if inputs is None else sizes[inputs]

    most = {i: (border_nbytes(i) * (before is not None), border_nbytes(after)) for i, (before, after) in around.items()}
    """Inputs and outputs that have a region next to them."""
    known: dict[int, tuple[int, int, int]] = {}
    for index, region in enumerate(regions):
        if region.number in kept_nbytes:
            saved_nbytes = sizes[region.chunk] + border_nbytes(index)
            nbytes = max(0, saved_nbytes - kept_nbytes[region.number])
            inputs_nbytes = min(most[index][0], nbytes)
            outputs_nbytes = min(most[index][1], nbytes - inputs_nbytes)
            known[index] = inputs_nbytes, outputs_nbytes, nbytes - inputs_nbytes - outputs_nbytes
    inputs_part = median([known[at][0] / most[at][0] for at in known if most[at][0]] or [1.0])
    outputs_part = median([known[at][1] / most[at][1] for at in known if most[at][1]] or [0.0])
    found = {}
    for index, (before, after) in around.items():
        guessed = int(inputs_part * most[index][0]), int(outputs_part * most[index][1]), 0
        before_nbytes, after_nbytes, elsewhere_nbytes = known.get(index, guessed)
        found[index] = Shared(before, before_nbytes, after, after_nbytes, elsewhere_nbytes)
    return found
