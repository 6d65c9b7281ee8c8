"""A mesh of ranks: how many replicas, shards, tensor-parallel ranks and stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod

from chunkmem.data.errors import ConfigError

_MOST_RANKS = 2**31 - 1


@dataclass(frozen=True)
class RankMesh:
    """Ranks by dimension, as those of the mesh that `ChunkManager` takes.

    Ranks of a tensor-parallel group are next to each other, then those of a replica, then replicas, then stages.
    """

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    stage: int = 1

    @classmethod
    def parse(cls, text: str) -> RankMesh:
        """Return the mesh that ``replicate=2,shard=8,tp=4,stage=4`` names; what is left out is 1.

        Raises:
            ConfigError: it names none.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = part.partition("=")
            if name not in cls.__dataclass_fields__ or name in sizes:
                what = "is there twice" if name in sizes else "is no dimension"
                raise ConfigError(f"--mesh {text!r}: {name!r} {what}; give some of replicate, shard, tp and stage")
            if not (size.isascii() and size.isdigit() and 1 <= int(size) <= _MOST_RANKS):
                raise ConfigError(f"--mesh {text!r}: {name} is {size!r}; give a whole number above 0")
            sizes[name] = int(size)
        mesh = cls(**sizes)
        if mesh.replicate > 1 and mesh.shard == 1:
            raise ConfigError(f"--mesh {text!r}: each replica is sharded over two ranks or more; give shard, too")
        if mesh.num_ranks > _MOST_RANKS:
            raise ConfigError(f"--mesh {text!r} has {mesh.num_ranks} ranks; give at most {_MOST_RANKS}")
        return mesh

    @property
    def world(self) -> int:
        """Ranks of a stage that have a batch each; of one with tensor-parallel ranks, all have the same."""
        return self.replicate * self.shard

    @property
    def across_share(self) -> float:
        """Of the gradients, what a rank sends to other replicas: all ranks all-reduce a part each."""
        return 2 * (self.replicate - 1) / self.world

    @property
    def num_ranks(self) -> int:
        return prod(asdict(self).values())

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in asdict(self).items() if size > 1) or "shard=1"


ALONE = RankMesh()


def meshes(num_ranks: int, *, most_tp: int, most_stages: int) -> Iterator[RankMesh]:
    """Yield the meshes of so many ranks. Replicas are sharded over two ranks at least."""
    for tp in _divisors(num_ranks, most_tp):
        for stage in _divisors(num_ranks // tp, most_stages):
            rest = num_ranks // tp // stage
            for replicate in _divisors(rest, max(1, rest // 2)):
                yield RankMesh(replicate, rest // replicate, tp, stage)


def _divisors(number: int, most: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0]
