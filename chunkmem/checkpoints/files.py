"""How chunks become files of torch.distributed.checkpoint: small ones, chunk after chunk."""

from __future__ import annotations

import io
import queue
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from chunkmem.checkpoints.checksums import checksum, entry_name, write_checksums
from chunkmem.nn.lazy_tensor import LazyTensor, Piece

EXTRA = "extra"
"""The key of what a user adds."""
_FILE_NBYTES = 32 << 20
"""Of a file, at most; a larger tensor has one of its own."""


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
        self.checksums: dict[MetadataIndex, int] = {}
        """Of what was written so far."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Name the values by their place in nested dicts; what a user adds is one object, whatever its keys are."""
        named = {key: value for key, value in state_dict.items() if key != EXTRA}
        super().set_up_planner(named, storage_meta, is_coordinator)
        if EXTRA in state_dict:
            self.state_dict[EXTRA] = state_dict[EXTRA]
            self.mappings[EXTRA] = (EXTRA,)

    def create_local_plan(self) -> SavePlan:
        """Return what this rank writes."""
        items: list[WriteItem] = []
        for name, value in self.state_dict.items():
            if isinstance(value, LazyTensor):
                items += [_item(name, value, piece) for piece in value.pieces if piece.source.is_here]
            elif isinstance(value, torch.Tensor):
                if self._writes_tensors and not value.is_meta:
                    items += create_default_local_save_plan({name: value}, is_coordinator=True).items
            elif self._writes_objects:
                items += create_default_local_save_plan({name: value}, is_coordinator=True).items
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def place_of(self, item: WriteItem) -> str:
        """Return where the values are that an item writes; empty for what is in no chunk."""
        value = self.state_dict[item.index.fqn]
        return _piece(value, item.index).source.place if isinstance(value, LazyTensor) else ""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Read what an item writes."""
        value, index = self.state_dict[write_item.index.fqn], write_item.index
        data = _piece(value, index).read_here() if isinstance(value, LazyTensor) else super().resolve_data(write_item)
        self.checksums[index] = checksum(data)
        return data


def _item(name: str, value: LazyTensor, piece: Piece) -> WriteItem:
    offsets, sizes = torch.Size(piece.offsets), torch.Size(piece.shape)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
        properties=TensorProperties(dtype=value.dtype),
        size=torch.Size(value.shape),
    )
    return WriteItem(index=MetadataIndex(name, offsets), type=WriteItemType.SHARD, tensor_data=data)


def _piece(value: LazyTensor, index: MetadataIndex) -> Piece:
    return next(piece for piece in value.pieces if piece.offsets == tuple(index.offset or piece.offsets))


def _files_of(items: Sequence[WriteItem]) -> list[list[WriteItem]]:
    """Divide items into files, in their order: torch holds the tensors of a file in memory until it is complete."""
    files: list[list[WriteItem]] = [[]]
    nbytes = 0
    for item in items:
        data = item.tensor_data
        own = 0 if data is None else data.properties.dtype.itemsize * data.chunk.sizes.numel()
        if files[-1] and nbytes + own > _FILE_NBYTES:
            files.append([])
            nbytes = 0
        files[-1].append(item)
        nbytes += own
    return files


def _first_cause(error: BaseException, folder: Path) -> BaseException:
    """Return what the system said, where torch says what came of that: it goes on writing after a write has failed."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return error if cause is None else OSError(cause.errno, cause.strerror, cause.filename or str(folder))


class _Checked(WriteResult):
    """What was written, on its way to the rank that collects it."""

    crc: int | None = None


class ChunkWriter(FileSystemWriter):
    """Writes small files, chunk after chunk."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of a plan."""
        assert isinstance(planner, ChunkPlanner)
        waiting: queue.Queue[Any] = queue.Queue()
        for number, items in enumerate(_files_of(sorted(plan.items, key=planner.place_of))):
            name = f"{plan.storage_data.prefix}{number}.distcp"
            waiting.put((self.fs.concat_path(self.path, name), name, items))
        try:
            rows = self._write_data(planner, waiting).wait()
        except Exception as error:
            raise _first_cause(error, Path(self.path)) from error
        results: list[WriteResult] = []
        for written in rows:
            result = _Checked(written.index, written.size_in_bytes, written.storage_data)
            object.__setattr__(result, "crc", planner.checksums.get(written.index))
            results.append(result)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """Write what makes the checkpoint complete."""
        super().finish(metadata, [list(rows) for rows in results])
        written = (result for rows in results for result in rows if isinstance(result, _Checked))
        found = {entry_name(result.index): result.crc for result in written if result.crc is not None}
        write_checksums(Path(self.path), found)
