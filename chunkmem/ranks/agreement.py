"""What ranks are about to do: all of them the same, or all of them raise the same error.

Collectives are matched by their place in the sequence. Ranks that issue different ones mix their bytes, abort, or wait
for ever. So before an operation between ranks begins, each of them states it. A few numbers go from rank to rank, in
ceil(log2 W) messages from each, and then all know the smallest of each number: where the smallest and the largest hash
are the same, so are the operations. Where they are not, all ranks are told what each of them was about to do, and raise
the same error; nothing was issued.

A rank may wait for the others, at the end of its step or at clipping. It is told what they are about to do and joins
in, until all of them wait at the same place.

Before that they find out that they run the same chunkmem, as another version may not know the form of what is sent.

Decided in ADR 17.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from chunkmem.data.errors import RankError
from chunkmem.ranks.failure_detector import by_text, named

_NOTHING = 1 << 62
"""Larger than any hash, rank or flag."""
_RANKS = 1 << 32
"""More than there are of them."""
_TAG = (1 << 30) - 64
"""Tag of the messages of the first round; later rounds have the tags after it."""
_NEXT = (
    "all have to run the same modules in the same order; a module that not every rank runs belongs to one unit with "
    "the module that chooses: manager.unit(module)"
)


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that all ranks do together."""

    label: str
    """What it is, for messages; the same text on two ranks means that they do the same."""
    detail: str = ""
    """Any other value that has to be equal on all ranks, such as a size."""
    joinable: Any = None
    """What a rank that waits needs in order to join in, as `pickle` copies it; None: it cannot."""
    waits: bool = False
    """Only that the others come, too; what they do until then is joined in."""
    can: bool = True
    """False: this rank would, but has no room for it."""
    count: int = 0
    """A number of which all learn the smallest and the largest over ranks."""
    state: bytes = b""
    """What may differ, of which all learn whether it does."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks know after each has stated an operation."""

    is_same: bool
    all_can: bool
    all_wait: bool
    one_waits: bool
    source: int
    """The first rank that does not wait."""
    complete: int
    """If all wait: the first rank that has not joined in what others did since it last came to the end of a step."""
    one_joined: bool
    """If all wait: at least one rank has joined in what others did since its last end of a step."""
    least: int
    """The smallest `Operation.count`."""
    most: int
    """The largest one."""
    fullest: int
    """The first rank that has it."""
    is_alike: bool
    """`Operation.state` is the same on all ranks."""


@dataclass(frozen=True)
class Statement:
    """What one rank says when the ranks differ."""

    label: str
    error: str
    """Text of the error that the rank has raised before; empty: none."""
    facts: frozenset[str]


def numbers_of(operation: Operation, rank: int, *, facts: str, has_joined: bool) -> list[int]:
    """Return what a rank contributes: the smallest of each over ranks is what `verdict` takes.

    Args:
        operation: what it is about to do.
        rank: this one.
        facts: a digest of what has to be the same on all ranks meanwhile.
        has_joined: it has joined in what others did since it last came to the end of a step.
    """
    code = _hash(f"{operation.label}\n{operation.detail}\n{facts}".encode())
    state = _hash(operation.state)
    busy, waiting = ((_NOTHING, _NOTHING), (code, -code)) if operation.waits else ((code, -code), (_NOTHING, _NOTHING))
    return [
        *busy,
        *waiting,
        _NOTHING if operation.waits else rank,
        -int(operation.waits),
        int(operation.can),
        int(operation.waits or operation.joinable is not None),
        rank if operation.waits and not has_joined else _NOTHING,
        -int(has_joined),
        operation.count,
        rank - operation.count * _RANKS,
        state,
        -state,
    ]


def _hash(value: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(value, digest_size=7).digest(), "big")


def verdict(smallest: Sequence[int]) -> Verdict:
    """Return what follows from the smallest of each number over ranks."""
    busy, minus_busy, waiting, minus_waiting, source, minus_waits, can, joinable, complete, *others = smallest
    minus_joined, least, fullest, state, minus_state = others
    all_wait, one_waits = source == _NOTHING, minus_waits < 0
    if all_wait:
        is_same = waiting == -minus_waiting
    else:
        is_same = busy == -minus_busy and (joinable == 1 or not one_waits)
    return Verdict(
        is_same,
        can == 1,
        all_wait,
        one_waits,
        source,
        complete,
        minus_joined < 0,
        least,
        -(fullest // _RANKS),
        fullest % _RANKS,
        state == -minus_state,
    )


def farther(rank: int, size: int) -> list[int]:
    """Return the ranks that are 1, 2, 4, ... before or after one: whom `over_ranks`, and broadcasts of gloo, go to."""
    distances = [1 << bit for bit in range((size - 1).bit_length())]
    return sorted({(rank + way * distance) % size for distance in distances for way in (1, -1)})


def over_ranks(
    group: dist.ProcessGroup,
    rank: int,
    size: int,
    known: torch.Tensor,
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return what the tensors of all ranks make together, the same on all of them, in ceil(log2 size) messages each.

    In round k each rank hands what it knows to the one 2**k further on, so that after the last round it has heard of
    all. It may have heard of some twice.

    Args:
        group: over gloo; this thread alone uses it.
        rank: this one.
        size: of the group.
        known: of the same shape and dtype on every rank.
        combine: a minimum or the like, of which the order does not matter, nor how often a rank counts.

    Raises:
        RuntimeError: a rank did not come.
    """
    distance = 1
    while distance < size:
        heard, told = torch.empty_like(known), known
        tag = _TAG + distance.bit_length()
        receive = group.recv([heard], (rank - distance) % size, tag)
        send = group.send([told], (rank + distance) % size, tag)
        receive.wait()
        known = combine(known, heard)
        send.wait()
        distance *= 2
    return known


def rows_of_ranks(group: dist.ProcessGroup, rank: int, size: int, mine: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all ranks, in ceil(log2 size) messages each: each round, a rank hands on all it knows.

    Arguments and errors are those of `over_ranks`.
    """
    known = mine.new_empty((size, *mine.shape))
    known[0] = mine  # row i is that of the rank i before this one
    distance = 1
    while distance < size:
        count = min(distance, size - distance)
        tag = _TAG + distance.bit_length()
        receive = group.recv([known[distance : distance + count]], (rank - distance) % size, tag)
        send = group.send([known[:count]], (rank + distance) % size, tag)
        receive.wait()
        send.wait()
        distance *= 2
    return [known[(rank - other) % size] for other in range(size)]


def rows_to_first(group: dist.ProcessGroup, rank: int, size: int, mine: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all ranks on rank 0, and none elsewhere, in at most ceil(log2 size) messages of a rank.

    In round k every other rank that is left hands all it has to the one 2**k before it. Arguments and errors are those
    of `over_ranks`.
    """
    rows, distance = [mine], 1
    while distance < size:
        tag = _TAG + distance.bit_length()
        if rank & distance:
            group.send([torch.stack(rows)], rank - distance, tag).wait()
            return []
        if (count := min(distance, size - rank - distance)) > 0:
            heard = mine.new_empty((count, *mine.shape))
            group.recv([heard], rank + distance, tag).wait()
            rows += heard
        distance *= 2
    return rows


def row_from_first(
    group: dist.ProcessGroup, rank: int, size: int, rows: Sequence[torch.Tensor], mine: torch.Tensor
) -> None:
    """Fill `mine` with this rank's one of the `rows` that rank 0 has, on the ways of `rows_to_first`, back."""
    distance = rank & -rank or 1 << (size - 1).bit_length()
    if rank:
        heard = mine.new_empty((min(distance, size - rank), *mine.shape))
        group.recv([heard], rank - distance, _TAG + distance.bit_length()).wait()
        rows = list(heard)
    while (distance := distance // 2) > 0:
        if further := rows[distance:]:
            group.send([torch.stack(list(further))], rank + distance, _TAG + distance.bit_length()).wait()
        rows = rows[:distance]
    mine.copy_(rows[0])


def stated(operation: Operation, raised: str, facts: Collection[str]) -> Statement:
    """Return what a rank says when the ranks differ."""
    label = f"{operation.label} ({operation.detail})" if operation.detail else operation.label
    return Statement(label, raised, frozenset(facts))


def difference(statements: Sequence[Statement], numbers: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Say what ranks differ in, in the same words on all of them, and which of them raised an error.

    Args:
        statements: by rank.
        numbers: what messages call each rank.
    """
    labels = by_text({rank: each.label for rank, each in enumerate(statements)}, numbers)
    places = ", ".join(f"{who} in '{label}'" for label, who in labels.items())
    raised = {rank: each.error for rank, each in enumerate(statements) if each.error}
    errors = "".join(f"; {who} raised {error} before" for error, who in by_text(raised, numbers).items())
    where = f"the ranks are in different places: {places}{errors}; {_NEXT}"
    facts = [each.facts for each in statements]
    some = sorted(frozenset().union(*facts) - facts[0].intersection(*facts))
    if some:
        with_it = [rank for rank, known in enumerate(facts) if some[0] in known]
        without = [rank for rank, known in enumerate(facts) if some[0] not in known]
        more = f" (and {len(some) - 1} more)" if len(some) > 1 else ""
        said = f"{some[0]} on {named(with_it, numbers)} and not on {named(without, numbers)}{more}"
        where = f"{said}; {where}" if len(labels) > 1 else f"{said}{errors}; do the same on every rank"
    return where, tuple(numbers[rank] for rank in raised)


if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_PACKAGE = Path(__file__).parents[1]


@functools.cache
def code_digest() -> str:
    """Return what tells this chunkmem from another one: a digest of its source files.

    It is that of the first call: the files may be replaced while a job runs.
    """
    found = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        found.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def require_same_code(store: Store, rank: int, names: Sequence[int], *, timeout_s: float) -> None:
    """Check that all ranks run the same code; all of them call it, and use `store` for nothing else so far.

    Ranks of different versions send messages of other sizes, for which gloo aborts the process.

    Args:
        store: that they have met in.
        rank: this one, among them.
        names: what messages call each of them.
        timeout_s: how long to wait for the others.

    Raises:
        RankError: they do not; on all ranks that check it.
        RuntimeError: a rank did not come in time.
    """
    own = code_digest()
    store.set(f"code of rank {rank}", own)
    if store.compare_set("code", "", own).decode() != own:
        store.set("codes differ", "1")
    if store.add("ranks that came", 1) == len(names):
        store.set("all came", "codes differ" if store.check(["codes differ"]) else "one code")
    store.wait(["all came"], timedelta(seconds=timeout_s))
    if store.get("all came") == b"codes differ":
        ranks_of: dict[str, list[int]] = {}
        for other, name in enumerate(names):
            ranks_of.setdefault(store.get(f"code of rank {other}").decode(), []).append(name)
        found = "; ".join(
            f"{digest} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            for digest, ranks in ranks_of.items()
        )
        fewest = min(ranks_of.values(), key=len)
        raise RankError(
            f"the ranks run different versions of chunkmem (digests of its source files: {found}; this rank has "
            f"{_PACKAGE}); install the same one everywhere, and start all ranks again",
            tuple(fewest),
        )
