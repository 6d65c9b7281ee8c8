"""How chunks become files of torch.distributed.checkpoint: small ones, chunk after chunk."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo, _write_item
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from chunkmem.checkpoints.checksums import checksum, entry_name, write_checksums
from chunkmem.checkpoints.directory import MANIFEST
from chunkmem.checkpoints.odd_files import parse_json
from chunkmem.checkpoints.unfinished import naming
from chunkmem.data.errors import CheckpointError, said
from chunkmem.modules.lazy_tensor import LazyTensor, Piece

EXTRA = "extra"
"""The key of what a user adds."""
RANKS = "ranks"
"""The key of what each rank has of its own, by its number: the same keys again."""
_FILE_NBYTES = 32 << 20
"""Of a file, at most; a larger tensor has one of its own."""
_MAX_OPEN = 64
"""Files that are written and not on the disk yet: to wait for the disk is put off, as training may wait for the next
chunk to be written."""


@dataclass(frozen=True)
class _Whole:
    """What is written as one object, whatever its keys are."""

    content: Any


def _with_whole_extra(state: dict[str, Any]) -> dict[str, Any]:
    return state | {EXTRA: _Whole(state[EXTRA])} if EXTRA in state else dict(state)


class ChunkPlanner(DefaultSavePlanner):
    """Has each rank write the pieces of lazy tensors that it can read itself, and one rank what is ordinary."""

    def __init__(self, *, writes_tensors: bool, writes_objects: bool) -> None:
        """Make one.

        Args:
            writes_tensors: this rank writes ordinary tensors, as buffers are.
            writes_objects: it writes what is no tensor.
        """
        super().__init__()
        self._writes_tensors = writes_tensors
        self._writes_objects = writes_objects

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Name the values by their place in nested dicts; what a user adds is one object, whatever its keys are."""
        nested = _with_whole_extra(state_dict)
        if RANKS in state_dict:
            own = state_dict[RANKS].items()
            nested[RANKS] = {rank: _with_whole_extra(part) if isinstance(part, dict) else part for rank, part in own}
        super().set_up_planner(nested, storage_meta, is_coordinator)
        for name, value in self.state_dict.items():
            if isinstance(value, _Whole):
                self.state_dict[name] = value.content

    def create_local_plan(self) -> SavePlan:
        """Return what this rank writes."""
        items: list[WriteItem] = []
        for name, value in self.state_dict.items():
            if isinstance(value, LazyTensor):
                items += [_item(name, value, piece) for piece in value.pieces if piece.source.is_here]
            elif isinstance(value, torch.Tensor) and value.is_meta:
                continue
            elif self.mappings[name][0] == RANKS or self._writes(value):  # no other rank has what is under RANKS
                items += create_default_local_save_plan({name: value}, is_coordinator=True).items
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def _writes(self, value: Any) -> bool:
        return self._writes_tensors if isinstance(value, torch.Tensor) else self._writes_objects

    def piece_of(self, item: WriteItem) -> Piece | None:
        """Return where the values are that an item writes; None for what is in no chunk."""
        value, index = self.state_dict[item.index.fqn], item.index
        if not isinstance(value, LazyTensor):
            return None
        return next(piece for piece in value.pieces if piece.offsets == tuple(index.offset or piece.offsets))

    def contents(self) -> Iterator[tuple[WriteItem, torch.Tensor | io.BytesIO]]:
        """Read what this rank writes, chunk after chunk."""

        def place(item: WriteItem) -> str:
            piece = self.piece_of(item)
            return "" if piece is None else piece.source.place

        return ((item, self.resolve_data(item)) for item in sorted(self.plan.items, key=place))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Read what an item writes."""
        piece = self.piece_of(write_item)
        return super().resolve_data(write_item) if piece is None else piece.read_here()


def _item(name: str, value: LazyTensor, piece: Piece) -> WriteItem:
    offsets, sizes = torch.Size(piece.offsets), torch.Size(piece.shape)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
        properties=TensorProperties(dtype=value.dtype),
        size=torch.Size(value.shape),
    )
    return WriteItem(index=MetadataIndex(name, offsets), type=WriteItemType.SHARD, tensor_data=data)


def _first_cause(error: BaseException, folder: Path) -> BaseException:
    """Return what the system said, where torch says what came of that: it keeps writing after a write has failed."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return error if cause is None else OSError(cause.errno, cause.strerror, cause.filename or str(folder))


@dataclass(frozen=True)
class Written(WriteResult):
    """What was written, on its way to the rank that collects it."""

    crc: int
    """CRC-32 of the values."""


def results_as_json(results: Sequence[Written]) -> bytes:
    """Return what a rank has written, for the rank that collects it: not as a pickle, as it goes through a file."""
    rows = [
        [result.index.fqn, result.index.offset, result.size_in_bytes, vars(result.storage_data), result.crc]
        for result in results
    ]
    return json.dumps({"results": rows}).encode()


def results_of_json(content: bytes, path: Path) -> list[Written]:
    """Return what `results_as_json` was given; `path` is that of the file.

    Raises:
        CheckpointError: it is not that.
    """
    what = "list of what a rank has written"
    try:
        rows = parse_json(content, path, what)["results"]
        return [
            Written(MetadataIndex(name, offset), nbytes, _StorageInfo(**place), crc)
            for name, offset, nbytes, place, crc in rows
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no {what}: {said(error)}") from None


class ChunkWriter(FileSystemWriter):
    """Writes small files, chunk after chunk: each has 32 MiB at most, or one larger tensor."""

    def __init__(self, folder: Path, *, generation: str) -> None:
        """Write to a folder, files whose names begin with `generation`."""
        super().__init__(folder, single_file_per_rank=True, overwrite=True)
        self._generation = generation
        self._count = 0
        self._open: list[io.BufferedWriter] = []
        """Not on the disk yet; the last one is being written."""
        self.results: list[Written] = []
        """What this rank has written."""

    def write_all(
        self, contents: Iterable[tuple[WriteItem, torch.Tensor | io.BytesIO]], plan: SavePlan
    ) -> Iterator[bool]:
        """Write items with what is in them, and have all on the disk; yield True after each step.

        Nothing stays open after an error.

        Args:
            contents: of all items.
            plan: of this rank, which says how the names of its files differ from those of others.

        Raises:
            OSError: one cannot be written.
        """
        try:
            for item, data in contents:
                self._write(item, data, f"{self._generation}{plan.storage_data.prefix}")
                del data  # before the next one is read
                yield True
            while self._open:
                self._sync_first()
                yield True
        finally:
            while self._open:
                with contextlib.suppress(OSError):
                    self._open.pop().close()

    def _write(self, item: WriteItem, data: torch.Tensor | io.BytesIO, prefix: str) -> None:
        nbytes = data.nbytes if isinstance(data, torch.Tensor) else data.getbuffer().nbytes
        if not self._open or (self._open[-1].tell() and self._open[-1].tell() + nbytes > _FILE_NBYTES):
            self._begin(prefix)
        file = self._open[-1]
        try:
            written = _write_item(self.transforms, file, data, item, Path(file.name).name, self.serialization_format)
        except Exception as error:
            raise _first_cause(error, Path(file.name)) from error
        self.results.append(Written(written.index, written.size_in_bytes, written.storage_data, checksum(data)))

    def _begin(self, prefix: str) -> None:
        if self._open:
            with naming(Path(self._open[-1].name)):
                self._open[-1].flush()
            # The disk begins to write it, and nobody waits: `fsync` finds less to do.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._open[-1].fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if len(self._open) == _MAX_OPEN:
            self._sync_first()
        self._open.append((Path(self.path) / f"{prefix}{self._count}.distcp").open("wb"))
        self._count += 1

    def _sync_first(self) -> None:
        """Have the one on the disk that was begun first."""
        file = self._open.pop(0)
        with naming(Path(file.name)), file:
            file.flush()
            os.fsync(file.fileno())

    def finish(self, metadata: Metadata, results: Sequence[Sequence[Written]]) -> list[str]:  # type: ignore[override]
        """Write what makes the checkpoint complete; return the names of the files with values.

        Raises:
            OSError: it cannot be written.
        """
        with naming(Path(self.path) / MANIFEST):
            super().finish(metadata, [list(rows) for rows in results])
        every = [result for rows in results for result in rows]
        write_checksums(Path(self.path), {entry_name(result.index): result.crc for result in every})
        return sorted({result.storage_data.relative_path for result in every})
