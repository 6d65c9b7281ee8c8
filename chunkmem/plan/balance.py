"""Cut a row of blocks into stages of a pipeline so that the slowest stage is as fast as possible. Pure.

A pipeline is as fast as its slowest stage, so the largest time comes first, and among all cuts with that time the
smallest largest number of bytes. One dynamic program finds the time, over (stages, blocks before the cut); a second one
finds the bytes, among stages that take no longer. One program for both would not be exact: what has the best time up to
a cut may not be part of what has the fewest bytes in the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from chunkmem.data.errors import CapacityError, ConfigError
from chunkmem.data.sizes import format_nbytes


@dataclass(frozen=True)
class Block:
    """What cannot be cut, and what it costs in a step."""

    name: str
    forward_s: float
    backward_s: float
    """Recomputation included."""
    nbytes: int
    """Bytes of weights, gradients and optimizer states that only this block has."""
    shared: Mapping[str, int] = field(default_factory=dict)
    """Bytes of parameters that other blocks have, too, by their first name: a stage has them once."""
    weight_nbytes: int = 0
    """Bytes of all weights that the block reads."""
    output_nbytes: int = 0
    """Handed on to the next block in a step, in all."""

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Stage:
    """Blocks in a row, which one device computes."""

    blocks: tuple[Block, ...]

    @property
    def forward_s(self) -> float:
        return sum(block.forward_s for block in self.blocks)

    @property
    def backward_s(self) -> float:
        return sum(block.backward_s for block in self.blocks)

    @property
    def seconds(self) -> float:
        return sum(block.seconds for block in self.blocks)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks) + sum(self.shared.values())

    @property
    def weight_nbytes(self) -> int:
        return sum(block.weight_nbytes for block in self.blocks)

    @property
    def shared(self) -> dict[str, int]:
        """Bytes of parameters that more than one block of the model has, by name."""
        return {name: nbytes for block in self.blocks for name, nbytes in block.shared.items()}

    @property
    def output_nbytes(self) -> int:
        return self.blocks[-1].output_nbytes


def tie_groups(blocks: Sequence[Block]) -> tuple[tuple[int, ...], ...]:
    """Return the indices of blocks that share a parameter, by parameter."""
    users: dict[str, list[int]] = {}
    for index, block in enumerate(blocks):
        for name in block.shared:
            users.setdefault(name, []).append(index)
    return tuple(sorted({tuple(indices) for indices in users.values() if len(indices) > 1}))


def tied_over(stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    """Return the stages that have a copy of a parameter each, by its name."""
    names = dict.fromkeys(name for stage in stages for name in stage.shared)
    found = {name: tuple(at for at, stage in enumerate(stages) if name in stage.shared) for name in names}
    return {name: having for name, having in found.items() if len(having) > 1}


def balance(
    blocks: Sequence[Block],
    num_stages: int,
    *,
    cap_nbytes: int | None = None,
    ties: Iterable[Collection[int]] = (),
) -> tuple[Stage, ...]:
    """Cut blocks into stages: least time of the slowest one, then least bytes of the largest one.

    Where several ways are as good, all ranks find the same one.

    Args:
        blocks: in the order of forward.
        num_stages: how many stages; each has a block at least.
        cap_nbytes: what a stage may have; None: as much as it likes.
        ties: indices of blocks that have to be in one stage, such as `tie_groups(blocks)`.

    Raises:
        ConfigError: there are fewer blocks than stages, or ties leave too few places to cut.
        CapacityError: a stage has more bytes than the cap, however blocks are cut.
    """
    cuts = _allowed_cuts(len(blocks), ties)
    if not 1 <= num_stages < len(cuts):
        tied = f", which ties keep together in {len(cuts) - 1} groups" if len(cuts) <= len(blocks) else ""
        raise ConfigError(
            f"{num_stages} stages, and the model has {len(blocks)} blocks{tied}: a stage needs one at least; give 1 to "
            f"{len(cuts) - 1} stages"
        )
    pieces = [Stage(tuple(blocks[start:stop])) for start, stop in pairwise(cuts)]
    seconds, nbytes = _costs(pieces)
    limit_nbytes = inf if cap_nbytes is None else cap_nbytes
    fitting_s = {span: seconds[span] if nbytes[span] <= limit_nbytes else inf for span in seconds}
    slowest_s, _ = _least(fitting_s, num_stages)
    if slowest_s == inf:
        needed_nbytes, limit = int(_least(nbytes, num_stages)[0]), int(limit_nbytes)
        raise CapacityError(
            f"{num_stages} stages: the largest one needs {format_nbytes(needed_nbytes)} for weights, gradients and "
            f"optimizer states at least, and may have {format_nbytes(limit)}; give it more, or use more stages",
            needed_nbytes=needed_nbytes,
            cap_nbytes=limit,
        )
    _, chosen = _least({span: nbytes[span] if fitting_s[span] <= slowest_s else inf for span in seconds}, num_stages)
    return tuple(
        Stage(tuple(block for piece in pieces[first:stop] for block in piece.blocks))
        for first, stop in pairwise(chosen)
    )


def _allowed_cuts(num_blocks: int, ties: Iterable[Collection[int]]) -> list[int]:
    """Return where one stage may end and the next begin, both ends included."""
    inside = {cut for tie in ties for cut in range(min(tie) + 1, max(tie) + 1)}
    return [cut for cut in range(num_blocks + 1) if cut not in inside]


def _costs(pieces: Sequence[Stage]) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], int]]:
    """Return the seconds and the bytes of every stage there could be, by its first piece and one past its last."""
    seconds: dict[tuple[int, int], float] = {}
    nbytes: dict[tuple[int, int], int] = {}
    for first in range(len(pieces)):
        total_s, own_nbytes, shared = 0.0, 0, dict[str, int]()
        for stop in range(first + 1, len(pieces) + 1):
            piece = pieces[stop - 1]
            total_s += piece.seconds
            own_nbytes += sum(block.nbytes for block in piece.blocks)
            shared |= piece.shared
            seconds[first, stop], nbytes[first, stop] = total_s, own_nbytes + sum(shared.values())
    return seconds, nbytes


def _least(cost: Mapping[tuple[int, int], float], num_stages: int) -> tuple[float, list[int]]:
    """Return the least largest cost of any stage, given that of each there could be, and the cuts of one way."""
    num_pieces = max(stop for _, stop in cost)
    best: list[list[float]] = [[0.0] + [inf] * num_pieces]
    before: list[list[int]] = [[]]
    for stage in range(1, num_stages + 1):
        row, come = [inf] * (num_pieces + 1), [stage - 1] * (num_pieces + 1)
        for stop in range(stage, num_pieces + 1):
            for first in range(stage - 1, stop):
                largest = max(best[-1][first], cost[first, stop])
                if largest < row[stop]:
                    row[stop], come[stop] = largest, first
        best.append(row)
        before.append(come)
    cuts = [num_pieces]
    for come in reversed(before[1:]):
        cuts.insert(0, come[cuts[0]])
    return best[-1][num_pieces], cuts
