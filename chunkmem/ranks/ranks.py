"""The ranks of a process group: what they have to have in common, and the numbers they add up."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any, TypeVar

import numpy
import torch
import torch.distributed as dist

from chunkmem.config import num_processes_said
from chunkmem.data.errors import ConfigError, StateError
from chunkmem.ranks.agreement import Operation
from chunkmem.ranks.connection import Connection, group_of, within
from chunkmem.ranks.failure_detector import by_text
from chunkmem.ranks.groups import RankGroup
from chunkmem.ranks.mesh import Mesh
from chunkmem.ranks.notes import Notes

_K = TypeVar("_K")
_T = TypeVar("_T")
_BUCKET_NBYTES = 64 << 20
"""Most bytes of tensors that are sent together."""


def open_ranks(
    process_group: Any = None,
    *,
    mesh: Mesh | None = None,
    members: tuple[int, ...] | None = None,
    timeout_s: float,
) -> Ranks:
    """Find the others: those of `mesh`, or all of `process_group`. For arguments and errors see `Connection`."""
    found = members or (() if mesh is None else tuple(chain(*mesh.rows)))
    return Ranks(Connection(process_group, members=found, timeout_s=timeout_s), mesh)


class Ranks:
    """The processes that train one model, or one pipeline stage of it, together; without a process group, one."""

    stages: Ranks | None = None
    """One of each pipeline stage, with which this one exchanges activations; None without stages."""
    parts: Ranks | None = None
    """Those with the other parts of this one's parameters; None without tensor parallelism."""

    def __init__(self, connection: Connection, mesh: Mesh | None = None) -> None:
        """Be the ranks that are connected, divided as `mesh` says. Raises what `Connection` does."""
        self.connection = connection
        self.rank = connection.rank
        """Among these ranks, counted from 0."""
        self.size = connection.size
        self._everyone: Ranks | None = None
        is_rare = mesh is not None and len(mesh.rows) > 1  # within and across replicas there are groups of their own
        self.all_ranks = connection.part("chunks", range(self.size), connection.process_group, is_rare=is_rare)
        """Group of all ranks."""
        self.shard = self.all_ranks
        """Group of the ranks over which this rank's replica is sharded, numbered within it."""
        self.replicate: RankGroup | None = None
        """Group of the ranks with the same shard in other replicas; None: there is one replica."""
        self.num_local = 1
        """Number of ranks on this machine, including those of other stages and this one."""
        if self.size > 1:
            here = socket.gethostname()
            self.num_local = connection.count_alike(here, "looking for ranks on the same machine")
            self.agree("the mesh of the ranks", str(() if mesh is None else mesh.rows))
        if mesh is not None:
            self._divide(mesh)
        if mesh is not None and mesh.stage_group is not None:
            self.stages = self._joined(mesh.stage_group)
        if mesh is not None and mesh.part_group is not None:
            self.parts = self._joined(mesh.part_group)

    @property
    def wider(self) -> list[Ranks]:
        """Those that have the rest of the model: ranks of other stages, and ranks with other parts of parameters."""
        return [ranks for ranks in (self.stages, self.parts) if ranks is not None]

    @property
    def are_one(self) -> bool:
        """This rank trains alone."""
        return self.size == 1 and not self.wider

    @property
    def is_first(self) -> bool:
        """This is the first of all ranks that train the model."""
        return self.rank == 0 and all(ranks.rank == 0 for ranks in self.wider)

    def require_whole(self) -> None:
        """Raise a `ConfigError` if this rank trains alone, and is one of several processes that do not know it."""
        if self.connection.process_group is not None:
            return
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                f"torch.distributed was initialised after this manager was made: each of the {dist.get_world_size()} "
                "ranks would train a model of its own; call init_process_group() before ChunkManager()"
            )
        if (size := num_processes_said()) > 1:
            raise ConfigError(
                f"WORLD_SIZE is {size}, and torch.distributed is not initialised: each of the {size} processes would "
                "train a model of its own; call torch.distributed.init_process_group() before ChunkManager(), or take "
                "WORLD_SIZE out of the environment where that is meant"
            )

    def require_one(self, call: str) -> None:
        """Raise a `StateError` if there are others: what a call returns would need them whenever it is used."""
        if not self.are_one:
            raise StateError(
                f"{call} over several ranks: each of its values would be read by all of them together; use "
                "manager.save(), where every rank writes what it owns"
            )

    def everyone(self) -> Ranks:
        """Return all ranks that train the model, as ranks of one kind: those of the first pipeline stage come first.

        With stages, or tensor parallelism, their groups are opened by the first call, which all ranks make.

        Raises:
            RankError: a rank did not come.
        """
        if not self.wider:
            return self
        if self._everyone is None:
            found, _ = self.values_of_all(self.name(self.rank), label="looking for all ranks")
            self._everyone = open_ranks(members=tuple(found), timeout_s=self.connection.timeout_s)
        return self._everyone

    def notes(self, name: str) -> Notes:
        """Return notes that these ranks leave for each other, in any thread.

        Args:
            name: the same on all ranks, and new.
        """
        group = None if self.are_one else group_of(self.connection.process_group)
        store = dist.HashStore() if group is None else within(group.get_group_store(), name)  # type: ignore[attr-defined]
        timeout_s = self.connection.timeout_s
        return Notes(store, self.rank, self.size, timeout_s=timeout_s, is_lost=lambda: self.is_lost)

    def name(self, rank: int) -> int:
        """Return the number in the whole job of one of these ranks."""
        return self.connection.names[rank]

    @property
    def row(self) -> list[int]:
        """Numbers in the whole job of the ranks over which this one's replica is sharded."""
        size = self.shard.size
        return [*self.connection.names[self.rank // size * size :][:size]]

    def column(self) -> Ranks:
        """Return the ranks with the same shard in other replicas, and this one; all ranks call it, and close it.

        Raises:
            RankError: a rank did not come.
        """
        members = self.connection.names[self.shard.rank :: self.shard.size]
        return open_ranks(members=members, timeout_s=self.connection.timeout_s)

    @property
    def is_lost(self) -> bool:
        """Whether an exchange with other ranks has failed, so that there are no more."""
        return self.connection.is_lost or any(ranks.is_lost for ranks in self.wider)

    def _joined(self, group: dist.ProcessGroup) -> Ranks:
        """Return the ranks of a group that have other ranks to train their part with; count those on this machine."""
        others = open_ranks(group, timeout_s=self.connection.timeout_s)
        here = socket.gethostname()
        pairs = others._of_all((self.num_local, here), "looking for ranks on the same machine")
        self.num_local = sum(num for num, host in pairs if host == here)
        return others

    def _divide(self, mesh: Mesh) -> None:
        num_shards = len(mesh.rows[0])
        row, column = divmod(self.rank, num_shards)
        part = self.connection.part
        self.shard = part("shard", range(row * num_shards, (row + 1) * num_shards), mesh.shard_group)
        if len(mesh.rows) > 1:
            self.replicate = part("replicate", range(column, self.size, num_shards), mesh.replicate_group)

    def close(self) -> None:
        """Give the groups back. The second time, do nothing."""
        for part in (self.connection, self.all_ranks, self.shard, self.replicate, *self.wider, self._everyone):
            if part is not None:
                part.close()

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Note what is raised inside, see `note_error`."""
        try:
            yield
        except Exception as error:
            self.note_error(error)
            raise

    def note_error(self, error: BaseException) -> None:
        """Have the others say what this rank raises, those of other stages and parts included."""
        self.connection.note_error(error)
        for others in (*self.wider, self._everyone):
            if others is not None:
                others.note_error(error)

    def agree(self, name: str, digest: str) -> None:
        """Check that all ranks have the same of something: see `agree_on_all`."""
        self.agree_on_all({name: digest}, label=f"comparing {name}")

    def agree_on_all(self, digests: Mapping[str, str], *, label: str) -> None:
        """Check that all ranks have the same of several things.

        Args:
            digests: by what it is, as a sentence may begin: ``"the layout of the chunks"``. The same text on two ranks
                means that they have the same.
            label: what for, for messages.

        Raises:
            ConfigError: they have not; on every rank, in the same words.
            RankError: a rank did not come.
        """
        if self.size == 1:
            return
        if self.connection.are_alike(label, repr(dict(digests)).encode()):
            return
        everybodys = self.connection.of_all(dict(digests), label)
        for name in digests:
            texts = {rank: each.get(name, "nothing") for rank, each in enumerate(everybodys)}
            ranks_of = by_text(texts, self.connection.names)
            if len(ranks_of) > 1:
                found = ", ".join(f"{text} on {ranks}" for text, ranks in ranks_of.items())
                raise ConfigError(f"{name} differs between ranks: {found}; start all ranks with the same of it")

    def sum_over(self, values: Sequence[float], *, label: str = "summing numbers") -> tuple[float, ...]:
        """Return the sums over the ranks of one replica, in float64 and in their order: the same bits on all ranks.

        All replicas have the same numbers, so it is those of the first that are added. Those of all pipeline stages,
        and of all parts of parameters, are added up.

        Args:
            values: as many on every rank.
            label: what for, for messages.

        Raises:
            RankError: a rank did not come.
        """
        self.connection.begin(Operation(label, f"{len(values)} numbers"))
        every = self.connection.exchange(torch.tensor(values, dtype=torch.float64, device="cpu"), label)
        num = self.size if self.replicate is None else self.shard.size
        found = tuple(reduce(torch.add, every[:num]).tolist())
        for others in self.wider:
            found = others.sum_over(found, label=label)
        return found

    def over_stages(self, found: Mapping[_K, _T], *, label: str) -> dict[_K, _T]:
        """Return the entries that the pipeline stages have, all of them; of what several have, the last one's.

        Raises:
            RankError: a rank did not come.
        """
        if self.stages is None:
            return dict(found)
        together: dict[_K, _T] = {}
        for source in range(self.stages.size):
            own = dict(found) if source == self.stages.rank else {}
            together.update(self.stages.broadcast_object(own, label=label, source=source))
        return together

    def max_over(self, values: Sequence[float], *, label: str = "comparing numbers") -> tuple[float, ...]:
        """Return the largest over ranks, NaN if one is NaN. Arguments and errors are those of `sum_over`."""
        own = torch.tensor(values, dtype=torch.float64, device="cpu")
        self.connection.begin(Operation(label, f"{len(values)} numbers"))
        return tuple(self.connection.over_ranks(own, torch.maximum, label).tolist())

    def any_over(self, flags: Sequence[bool], *, label: str, is_agreed: bool = False) -> list[bool]:
        """Tell of each flag whether it is set on any rank; a flag is a bit of a message. Errors are those of
        `sum_over`. With `is_agreed`, all ranks are known to be here: they have just agreed on what comes before."""
        if self.size == 1 or not flags:
            return list(flags)
        if not is_agreed:
            self.connection.begin(Operation(label, f"{len(flags)} flags"))
        own = torch.from_numpy(numpy.packbits(numpy.array(flags, dtype=bool)))
        found = self.connection.over_ranks(own, torch.bitwise_or, label)
        return [bool(flag) for flag in numpy.unpackbits(found.numpy(), count=len(flags))]

    def broadcast_object(self, value: _T, *, label: str = "sending an object", source: int = 0) -> _T:
        """Return what rank `source` passes, as `pickle` copies it; that rank's is the one it passed.

        Raises:
            RankError: a rank did not come.
        """
        self.connection.begin(Operation(label))
        return self.connection.send_object(value, label, source)

    def from_first(self, value: _T, *, label: str) -> _T:
        """Return what the first of all ranks passes, those of other pipeline stages and parts included.

        Raises:
            RankError: a rank did not come.
        """
        for others in reversed(self.wider):
            value = others.broadcast_object(value, label=label)
        return self.broadcast_object(value, label=label)

    def merged(self, own: Mapping[_K, _T], *, label: str) -> dict[_K, _T]:
        """Return the entries of all ranks, as `pickle` copies them; of what several have, the last one's.

        Raises:
            RankError: a rank did not come.
        """
        if self.size == 1:
            return dict(own)
        together: dict[_K, _T] = {}
        for each in self._of_all(dict(own), label):
            together |= each
        return together

    def any_text(self, text: str, *, label: str) -> str:
        """Return the text of the first rank, those of other stages and parts included, that has one; else "".

        Raises:
            RankError: a rank did not come.
        """
        first = self.connection.least(label, self.rank if text else self.size)
        found = self.connection.send_object(text, label, first) if first < self.size else ""
        for others in self.wider:
            found = others.any_text(found, label=label)
        return found

    def values_of_all(self, value: _T, *, label: str) -> tuple[list[_T], int]:
        """Return what each rank passes, as `pickle` copies it, and which of them this rank is.

        Those of other stages and parts are included.

        Raises:
            RankError: a rank did not come.
        """
        values, own = self._of_all(value, label), self.rank
        for others in self.wider:
            rows = others._of_all(values, label)
            own += sum(map(len, rows[: others.rank]))
            values = list(chain(*rows))
        return values, own

    def gather_to_first(self, value: _T, *, label: str) -> list[_T] | None:
        """Return, on rank 0, what each rank passes, as `pickle` copies it.

        Raises:
            RankError: a rank did not come.
        """
        if self.size == 1:
            return [value]
        self.connection.begin(Operation(label))
        rows = self.connection.gather(value, label)
        return rows if self.rank == 0 else None

    def scatter_from_first(self, values: Sequence[_T] | None, *, label: str) -> _T:
        """Return what rank 0 passes for this one, as `pickle` copies it; others pass None.

        Raises:
            RankError: a rank did not come.
        """
        if self.size == 1:
            assert values is not None
            return values[0]
        self.connection.begin(Operation(label))
        return self.connection.scatter(values or (), label)

    def broadcast_tensors(self, tensors: Sequence[torch.Tensor], *, label: str) -> None:
        """Overwrite tensors with what rank 0 has in them.

        Args:
            tensors: strided ones, of the same shapes and dtypes on all ranks.
            label: what they are, for messages.

        Raises:
            RankError: a rank did not come, or has other tensors.
        """
        if self.size == 1 or not tensors:
            return
        self.connection.begin(Operation(label, ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in tensors)))
        for some in _buckets(tensors):
            with torch.no_grad():
                flat = [tensor.detach().to("cpu", copy=True).contiguous().reshape(-1) for tensor in some]
                raw = [one.view(torch.uint8) for one in flat]
                together = self.connection.broadcast(torch.cat(raw), 0, label)
                if self.rank > 0:
                    for tensor, part in zip(some, together.split([one.numel() for one in raw]), strict=True):
                        tensor.copy_(part.view(tensor.dtype).view(tensor.shape))

    def barrier(self, *, label: str) -> None:
        """Return once every rank has come.

        Raises:
            RankError: a rank did not come.
        """
        self.connection.begin(Operation(label))

    def _of_all(self, value: _T, label: str) -> list[_T]:
        """Return what each rank passes, as `pickle` copies it, once all are here."""
        self.connection.begin(Operation(label))
        return self.connection.of_all(value, label)


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors in turn, as many at a time as make up a bucket."""
    some: list[torch.Tensor] = []
    for tensor in tensors:
        some.append(tensor)
        if sum(one.nbytes for one in some) >= _BUCKET_NBYTES:
            yield some
            some = []
    if some:
        yield some
