"""How chunks become files of torch.distributed.checkpoint: small ones, chunk after chunk."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Generator, Sequence
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
from chunkmem.checkpoints.odd_files import parse_json, said
from chunkmem.checkpoints.unfinished import naming
from chunkmem.errors import CheckpointError
from chunkmem.nn.lazy_tensor import LazyTensor, Piece

EXTRA = "extra"
"""The key of what a user adds."""
RANKS = "ranks"
"""The key of what each rank has of its own, by its number: the same keys again."""
_FILE_NBYTES = 32 << 20
"""Of a file, at most; a larger tensor has one of its own."""
_MAX_OPEN = 64
"""Files that are written and not on the disk yet: to wait for the disk is put off, as training may wait for the next
chunk to be written."""


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
        extras: dict[tuple[str, ...], Any] = {(EXTRA,): state_dict[EXTRA]} if EXTRA in state_dict else {}
        named = {key: value for key, value in state_dict.items() if key != EXTRA}
        if RANKS in state_dict:
            own = {rank: part for rank, part in state_dict[RANKS].items() if isinstance(part, dict) and EXTRA in part}
            extras |= {(RANKS, rank, EXTRA): part[EXTRA] for rank, part in own.items()}
            rest = {rank: {key: value for key, value in part.items() if key != EXTRA} for rank, part in own.items()}
            named[RANKS] = {rank: part for rank, part in {**state_dict[RANKS], **rest}.items() if part}
        super().set_up_planner(named, storage_meta, is_coordinator)
        for keys, extra in extras.items():
            self.state_dict[".".join(keys)] = extra
            self.mappings[".".join(keys)] = keys

    def create_local_plan(self) -> SavePlan:
        """Return what this rank writes."""
        items: list[WriteItem] = []
        for name, value in self.state_dict.items():
            if isinstance(value, LazyTensor):
                items += [_item(name, value, piece) for piece in value.pieces if piece.source.is_here]
            elif isinstance(value, torch.Tensor):
                if (self._writes_tensors or self._is_own(name)) and not value.is_meta:
                    items += create_default_local_save_plan({name: value}, is_coordinator=True).items
            elif self._writes_objects or self._is_own(name):
                items += create_default_local_save_plan({name: value}, is_coordinator=True).items
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def _is_own(self, name: str) -> bool:
        """Tell whether no other rank has it."""
        return self.mappings[name][0] == RANKS

    def piece_of(self, item: WriteItem) -> Piece | None:
        """Return where the values are that an item writes; None for what is in no chunk."""
        value, index = self.state_dict[item.index.fqn], item.index
        if not isinstance(value, LazyTensor):
            return None
        return next(piece for piece in value.pieces if piece.offsets == tuple(index.offset or piece.offsets))

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


class _Checked(WriteResult):
    """What was written, on its way to the rank that collects it."""

    crc: int | None = None

    @classmethod
    def of(cls, index: MetadataIndex, nbytes: int, place: _StorageInfo, crc: int | None) -> _Checked:
        result = cls(index, nbytes, place)
        object.__setattr__(result, "crc", crc)
        return result


def results_as_json(results: Sequence[WriteResult]) -> bytes:
    """Return what a rank has written, for the rank that collects it: not as a pickle, as it goes through a file."""
    rows = [
        [result.index.fqn, result.index.offset, result.size_in_bytes, vars(result.storage_data), _crc_of(result)]
        for result in results
    ]
    return json.dumps({"results": rows}).encode()


def results_of_json(content: bytes, path: Path) -> list[WriteResult]:
    """Return what `results_as_json` was given; `path` is that of the file.

    Raises:
        CheckpointError: it is not that.
    """
    what = "list of what a rank has written"
    try:
        rows = parse_json(content, path, what)["results"]
        return [
            _Checked.of(MetadataIndex(name, offset), nbytes, _StorageInfo(**place), crc)
            for name, offset, nbytes, place, crc in rows
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no {what}: {said(error)}") from None


def _crc_of(result: WriteResult) -> int | None:
    return result.crc if isinstance(result, _Checked) else None


class ItemFiles:
    """The files of one rank, written item by item: each has 32 MiB at most, or one larger tensor."""

    def __init__(self, writer: ChunkWriter, prefix: str) -> None:
        """Begin with none; `prefix` begins their names."""
        self._writer = writer
        self._prefix = f"{writer.generation}{prefix}"
        self._count = 0
        self._open: list[io.BufferedWriter] = []
        """Not on the disk yet; the last one is being written."""
        self.results: list[WriteResult] = []
        """What was written."""

    def write(self, item: WriteItem, data: torch.Tensor | io.BytesIO) -> None:
        """Write an item.

        Raises:
            OSError: it cannot be written.
        """
        nbytes = data.nbytes if isinstance(data, torch.Tensor) else data.getbuffer().nbytes
        if not self._open or (self._open[-1].tell() and self._open[-1].tell() + nbytes > _FILE_NBYTES):
            self._begin()
        file, writer = self._open[-1], self._writer
        try:
            written = _write_item(
                writer.transforms, file, data, item, Path(file.name).name, writer.serialization_format
            )
        except Exception as error:
            raise _first_cause(error, Path(file.name)) from error
        crc = checksum(data)
        self.results.append(_Checked.of(written.index, written.size_in_bytes, written.storage_data, crc))

    def _begin(self) -> None:
        if self._open:
            with naming(Path(self._open[-1].name)):
                self._open[-1].flush()
            # The disk begins to write it, and nobody waits: `fsync` finds less to do.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._open[-1].fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if len(self._open) == _MAX_OPEN:
            self.sync_first()
        self._open.append((Path(self._writer.path) / f"{self._prefix}{self._count}.distcp").open("wb"))
        self._count += 1

    def sync(self) -> None:
        """Have all of them on the disk.

        Raises:
            OSError: they are not.
        """
        while self.sync_first():
            pass

    def sync_first(self) -> bool:
        """Have the one on the disk that was begun first; return whether there was one. Raises what `sync` does."""
        if not self._open:
            return False
        file = self._open.pop(0)
        with naming(Path(file.name)), file:
            file.flush()
            os.fsync(file.fileno())
        return True

    def close(self) -> None:
        """Close what is open yet, as after an error."""
        while self._open:
            with contextlib.suppress(OSError):
                self._open.pop().close()


class ChunkWriter(FileSystemWriter):
    """Writes small files, chunk after chunk."""

    def __init__(self, folder: Path, *, generation: str) -> None:
        """Write to a folder, files whose names begin with `generation`."""
        super().__init__(folder, single_file_per_rank=True, overwrite=True)
        self.generation = generation

    def write_in_steps(self, plan: SavePlan, planner: ChunkPlanner) -> Generator[None, None, list[WriteResult]]:
        """Write the items of a plan, one a step; return what was written.

        Raises:
            OSError: it cannot be written.
        """
        files = ItemFiles(self, plan.storage_data.prefix)

        def place(item: WriteItem) -> str:
            piece = planner.piece_of(item)
            return "" if piece is None else piece.source.place

        try:
            for item in sorted(plan.items, key=place):
                files.write(item, planner.resolve_data(item))
                yield
            while files.sync_first():
                yield
        finally:
            files.close()
        return files.results

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> list[str]:  # type: ignore[override]
        """Write what makes the checkpoint complete; return the names of the files with values.

        Raises:
            OSError: it cannot be written.
        """
        with naming(Path(self.path) / MANIFEST):
            super().finish(metadata, [list(rows) for rows in results])
        every = [result for rows in results for result in rows]
        checksums = ((result.index, _crc_of(result)) for result in every)
        found = {entry_name(index): crc for index, crc in checksums if crc is not None}
        write_checksums(Path(self.path), found)
        return sorted({result.storage_data.relative_path for result in every})
