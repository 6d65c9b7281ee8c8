"""Which rank owns which chunk, and the bytes that follow from it. Plain arithmetic.

The chunks of a role are dealt out to the ranks like cards; as many consecutive ones as there are ranks are exchanged
together. With 7 chunks and 3 ranks::

    chunk   0 1 2 | 3 4 5 | 6        the last exchange group is short: nothing is made up to fill it
    owner   0 1 2 | 0 1 2 | 0
    group     0   |   1   | 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chunkmem.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Sharding:
    """The chunks of one role, dealt out to ranks.

    Raises:
        LayoutError: there are fewer than 0 chunks, or no rank.
    """

    num_chunks: int
    world_size: int

    def __post_init__(self) -> None:
        if self.num_chunks < 0 or self.world_size < 1:
            raise LayoutError(
                f"{self.num_chunks} chunks cannot be dealt out to {self.world_size} ranks; "
                f"there have to be 0 chunks or more, and 1 rank or more"
            )

    @property
    def num_groups(self) -> int:
        """Exchange groups, the short one included."""
        return -(-self.num_chunks // self.world_size)

    def owner(self, index: int) -> int:
        """Return the rank that keeps a chunk between its uses, and updates it.

        Raises:
            LayoutError: there is no such chunk.
        """
        return self._checked(index, self.num_chunks, "chunk") % self.world_size

    def group_of(self, index: int) -> int:
        """Return the exchange group of a chunk.

        Raises:
            LayoutError: there is no such chunk.
        """
        return self._checked(index, self.num_chunks, "chunk") // self.world_size

    def members(self, group: int) -> range:
        """Return the chunks of an exchange group: each has another owner, the first that of rank 0.

        Raises:
            LayoutError: there is no such group.
        """
        first = self._checked(group, self.num_groups, "exchange group") * self.world_size
        return range(first, min(first + self.world_size, self.num_chunks))

    def owned(self, rank: int) -> range:
        """Return the chunks of a rank: no rank has more than one more than another.

        Raises:
            LayoutError: there is no such rank.
        """
        return range(self._checked(rank, self.world_size, "rank"), self.num_chunks, self.world_size)

    def owned_nbytes(self, rank: int, chunk_nbytes: Sequence[int]) -> int:
        """Return the bytes that a rank keeps between uses.

        Args:
            rank: whose.
            chunk_nbytes: of every chunk, by its index.

        Raises:
            LayoutError: there is no such rank, or `chunk_nbytes` is not of `num_chunks` chunks.
        """
        self._check_sizes(chunk_nbytes)
        return sum(chunk_nbytes[index] for index in self.owned(rank))

    def remote_nbytes(self, rank: int, group: int, chunk_nbytes: Sequence[int]) -> int:
        """Return the bytes that a rank has beside its own while an exchange group is whole.

        They are what it takes in when the group is gathered, and what it gives away when it is reduced.

        Raises:
            LayoutError: there is no such rank or group, or `chunk_nbytes` is not of `num_chunks` chunks.
        """
        self._check_sizes(chunk_nbytes)
        self._checked(rank, self.world_size, "rank")
        return sum(chunk_nbytes[index] for index in self.members(group) if self.owner(index) != rank)

    def peak_nbytes(self, rank: int, chunk_nbytes: Sequence[int], *, num_whole: int = 1) -> int:
        """Return the most bytes that a rank has while `num_whole` exchange groups at a time are whole.

        Raises:
            LayoutError: there is no such rank, or `chunk_nbytes` is not of `num_chunks` chunks.
        """
        owned_nbytes = self.owned_nbytes(rank, chunk_nbytes)
        remote = sorted((self.remote_nbytes(rank, g, chunk_nbytes) for g in range(self.num_groups)), reverse=True)
        return owned_nbytes + sum(remote[:num_whole])

    def taken_nbytes(self, rank: int, chunk_nbytes: Sequence[int]) -> int:
        """Return the bytes a rank takes in when every chunk is gathered once, and gives away when all are reduced.

        Raises:
            LayoutError: there is no such rank, or `chunk_nbytes` is not of `num_chunks` chunks.
        """
        return sum(chunk_nbytes) - self.owned_nbytes(rank, chunk_nbytes)

    def given_nbytes(self, rank: int, chunk_nbytes: Sequence[int]) -> int:
        """Return the bytes a rank gives away when every chunk is gathered once, and takes in when all are reduced.

        Content goes straight from its owner to every other rank, or the other way.

        Raises:
            LayoutError: there is no such rank, or `chunk_nbytes` is not of `num_chunks` chunks.
        """
        return (self.world_size - 1) * self.owned_nbytes(rank, chunk_nbytes)

    def _check_sizes(self, chunk_nbytes: Sequence[int]) -> None:
        if len(chunk_nbytes) != self.num_chunks:
            raise LayoutError(f"sizes of {len(chunk_nbytes)} chunks were given, for {self.num_chunks} chunks; give all")

    def _checked(self, value: int, count: int, what: str) -> int:
        """Refuse what Python would count from the end, or beyond it."""
        if not 0 <= value < count:
            raise LayoutError(f"there is no {what} {value}: there are {count}, counted from 0")
        return value
