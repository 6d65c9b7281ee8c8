"""What an exchange of chunks between ranks takes and gives back, whichever way it goes.

A list of shards goes in: the chunks that are exchanged together, each with the rank that owns it, and memory for it on
this rank. After a gather every rank has the owner's content; after a reduction the owner has the mean over ranks.

A mean is a sum in fp32 (float64 for float64), divided once by the number of ranks, rounded once to the dtype of the
chunk. Point to point, the sum begins with rank 0's and continues in the order of the ranks: the bits depend on the
values alone, and a single process can repeat them. The libraries add in an order of their own. Where a user asks for it
(`distributed.reduce_dtype`), gradients are sent in bf16, and the libraries' sums are rounded to it, too.

Every rank issues the same exchanges in the same order. They may be waited for in any order, on each rank in another
one: whatever an exchange sends or receives was issued with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from chunkmem.data.errors import StateError
from chunkmem.ranks.groups import RankGroup

_BLOCK_NUMEL = 1 << 16
"""Elements of a mean that a CPU works out at a time: they stay in its cache, and no whole chunk in fp32 is needed."""


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A chunk in an exchange."""

    index: int
    """Number of the chunk: different in each shard of an exchange, equal on all ranks."""
    owner: int
    """A rank, counted within the process group; `EACH`: each rank of a replica has another chunk there."""
    flat: torch.Tensor  # 1-D, contiguous
    """This rank's memory for it: allocated, and left alone by all others, until the exchange was waited for."""

    def to_copy(self) -> Shard:
        """Return the shard as it is copied: integers and booleans as bytes, since libraries do not have all dtypes."""
        return self if self.flat.is_floating_point() else Shard(self.index, self.owner, self.flat.view(torch.uint8))

    def to(self, dtype: torch.dtype) -> Shard:
        """Return the shard if it has a dtype, else one with a copy of its content in that dtype."""
        return self if self.flat.dtype == dtype else Shard(self.index, self.owner, self.flat.to(dtype))


@dataclass(slots=True)
class Traffic:
    """What one object has exchanged, seen from this rank.

    Bytes are those of content as it goes from rank to rank. A library may pass it on by other ways.
    """

    num_gathers: int = 0
    num_reductions: int = 0
    num_operations: int = 0
    """Collectives, or messages, issued for them."""
    sent_nbytes: int = 0
    received_nbytes: int = 0
    buffered_nbytes: int = 0
    """Non-model memory of the reductions under way; that inside of a library is not known."""
    peak_buffered_nbytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def count(self, **more: int) -> None:
        """Add to fields, in any thread."""
        with self._lock:
            for name, number in more.items():
                setattr(self, name, getattr(self, name) + number)
            self.peak_buffered_nbytes = max(self.peak_buffered_nbytes, self.buffered_nbytes)

    def buffer(self, nbytes: int) -> None:
        """Count `nbytes` more of such memory, or fewer."""
        self.count(buffered_nbytes=nbytes)


class Work(Protocol):
    """An exchange that was issued."""

    def done(self) -> bool:
        """Tell, without waiting, whether `wait` would return, or raise, at once.

        False may also mean that it is not known: gloo does not tell of messages point to point, nor of reduce-scatters,
        which are done when `wait` has returned.
        """
        ...

    def wait(self) -> None:
        """Block until the content is there, and this rank's memory is no longer read. The second time, do nothing.

        Over NCCL, only what is issued on the current stream from now on waits.

        Raises:
            RankError: a rank is missing, or the ranks are in different places of the program.
        """
        ...


class Exchange(Protocol):
    """A way to exchange chunks."""

    traffic: Traffic

    def gather(self, shards: Sequence[Shard], *, label: str) -> Work:
        """Begin to copy the content of each chunk from its owner to all ranks.

        Args:
            shards: in the same order on all ranks.
            label: what is exchanged, for the messages of all ranks.

        Raises:
            RankError: an exchange failed before, or this one cannot begin.
            StateError: a shard cannot be exchanged.
        """
        ...

    def reduce(self, shards: Sequence[Shard], *, label: str) -> Work:
        """Begin to form the mean over ranks of each chunk at its owner.

        What other ranks than the owner have in its memory is undefined from now on. What is each rank's own is the sum
        over its replica already.

        Args:
            shards: in the same order on all ranks; all of them each rank's own, or none.
            label: what is exchanged, for the messages of all ranks.

        Raises:
            RankError: an exchange failed before, or this one cannot begin.
            StateError: a shard cannot be exchanged.
        """
        ...


@dataclass(eq=False, slots=True)
class PendingWork:
    """What torch.distributed was asked for, and what is left to do when it is done."""

    ranks: RankGroup
    label: str
    transfers: Sequence[dist.Work]
    finish: Callable[[], None] | None = None
    held: Sequence[object] = ()
    """Memory that the transfers use."""
    _over: bool = field(default=False, init=False)

    def done(self) -> bool:
        return self._over or (bool(self.transfers) and all(transfer.is_completed() for transfer in self.transfers))

    def wait(self) -> None:
        if self._over:
            return
        with self.ranks.waiting(self.label):
            for transfer in self.transfers:
                transfer.wait()
        if self.finish is not None:
            with self.ranks.waiting(self.label, is_own=True):
                self.finish()
        self._over = True
        # Memory is given back as soon as it can be, however long this object is kept.
        self.transfers, self.finish, self.held = [], None, ()


def require_exchangeable(shards: Sequence[Shard], ranks: RankGroup, label: str, *, is_copied: bool = True) -> None:
    """Refuse shards that cannot be exchanged; those that are not copied but added up have to be floats.

    Raises:
        StateError: a chunk occurs twice, has an owner that is not there, memory that is not flat, or such a dtype.
    """
    indices = [shard.index for shard in shards]
    if len(set(indices)) != len(indices):
        raise StateError(f"{label}: chunks {indices} are exchanged together, and one of them twice; pass each once")
    for shard in shards:
        if not 0 <= shard.owner < ranks.size:
            raise StateError(f"{label}: chunk {shard.index} has owner {shard.owner}, and there are {ranks.size} ranks")
        flat = shard.flat
        is_known = flat.is_floating_point() or (is_copied and not flat.is_complex())
        if flat.dim() != 1 or not flat.is_contiguous() or not is_known:
            raise StateError(
                f"{label}: chunk {shard.index} is a {flat.dtype} tensor of shape {list(flat.shape)}, stride "
                f"{list(flat.stride())}; only 1-D contiguous tensors of reals are exchanged, means of a floating dtype"
            )


def has_one_of_each(shards: Sequence[Shard], size: int) -> bool:
    """Tell whether shards are one of each of so many ranks, all alike."""
    owners = sorted(shard.owner for shard in shards)
    kinds = {(shard.flat.numel(), shard.flat.dtype) for shard in shards}
    return owners == list(range(size)) and len(kinds) == 1


def hand_over(ranks: RankGroup, shard: Shard, to: int, *, label: str) -> Work:
    """Begin to copy the content of a chunk in RAM from its owner to one other rank; these two alone call it.

    Raises:
        RankError: an exchange failed before, or this one cannot begin.
        StateError: the shard cannot be exchanged.
    """
    require_exchangeable([shard], ranks, label)
    shard = shard.to_copy()
    with ranks.waiting(label):
        group, flat, tag = ranks.group(shard.flat.device), shard.flat, shard.index
        is_mine = shard.owner == ranks.rank
        transfer = group.send([flat], to, tag) if is_mine else group.recv([flat], shard.owner, tag)
    return PendingWork(ranks, label, [transfer], held=[shard])


def sum_dtype(dtype: torch.dtype, reduce_dtype: torch.dtype = torch.float32) -> torch.dtype:
    """Return the dtype that a mean is summed in: `reduce_dtype`, unless it is of float64."""
    return dtype if dtype == torch.float64 else reduce_dtype


def mean_in_order(target: torch.Tensor, contributions: Sequence[torch.Tensor]) -> None:
    """Write the mean of tensors, added in their order, into one that may be one of them.

    Args:
        target: 1-D.
        contributions: of its shape and dtype.
    """
    step = _BLOCK_NUMEL if target.is_cpu else max(1, target.numel())
    for start in range(0, target.numel(), step):
        block = slice(start, start + step)
        total = contributions[0][block].to(sum_dtype(target.dtype), copy=True)
        for contribution in contributions[1:]:
            total += contribution[block]
        target[block].copy_(total.div_(len(contributions)))
