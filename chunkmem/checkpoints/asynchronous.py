"""A checkpoint that a thread writes while training continues; see [Note: Snapshots] in `chunkmem.runtime.snapshot`.

Each rank's thread writes the chunks that it owns, and tells the first rank, whose thread completes the checkpoint and
tells the others how that has ended. Threads use the store that the ranks met in, and a file of each rank: the groups
that training exchanges over are not for two threads.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem

from chunkmem.assembly.runtime import Runtime
from chunkmem.checkpoints.files import Written, results_as_json, results_of_json
from chunkmem.checkpoints.odd_files import read_all
from chunkmem.checkpoints.replacing import not_written, replacing, told_to_all
from chunkmem.checkpoints.saving import PlannedSave, plan_save
from chunkmem.checkpoints.unfinished import in_one_line, sync, written
from chunkmem.data.errors import CheckpointError, RankError
from chunkmem.modules.lazy_tensor import Piece
from chunkmem.optim.slot_source import SlotSource
from chunkmem.ranks.notes import Notes
from chunkmem.runtime.chunk import Chunk
from chunkmem.runtime.snapshot import Snapshot

_LABEL = "manager.save(asynchronous=True)"
_FAREWELL_S = 10.0
"""How long the first rank keeps the store for the others to read how a save has ended."""


@dataclass
class _Outcome:
    """How a save has ended, and who knows."""

    path: Path
    problem: str = ""
    was_told: bool = False

    def error(self) -> CheckpointError | None:
        """Return what went wrong, to be raised."""
        self.was_told = True
        return not_written(self.path, self.problem) if self.problem else None

    def complain(self) -> None:
        """Warn if nobody has asked."""
        if self.problem and not self.was_told:
            warnings.warn(str(self.error()), stacklevel=1)


class Saving:
    """A checkpoint that is being written, or was: what `ChunkManager.save` returns."""

    def __init__(
        self, path: Path, outcome: _Outcome, thread: threading.Thread | None = None, snapshot: Snapshot | None = None
    ) -> None:
        self.path = path
        """Of the checkpoint's directory."""
        self._thread = thread
        self._snapshot = weakref.ref(snapshot) if snapshot is not None else lambda: None
        self._trains_in = threading.get_ident()
        self._outcome = outcome
        weakref.finalize(self, outcome.complain)

    @classmethod
    def over(cls, path: Path) -> Saving:
        """Return one that is complete."""
        return cls(path, _Outcome(path))

    def done(self) -> bool:
        """Return whether it is over, without waiting: `wait` returns, or raises, at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is complete, those parts of it that other ranks write included.

        Raises:
            CheckpointError: it could not be written; what was there before is there still.
        """
        if (error := self.outcome()) is not None:
            raise error

    def outcome(self) -> CheckpointError | None:
        """Wait as `wait` does; return what that raises."""
        self.join()
        return self._outcome.error()

    def join(self) -> None:
        """Wait, and do not ask how it has ended."""
        snapshot = self._snapshot() if threading.get_ident() == self._trains_in else None
        with contextlib.nullcontext() if snapshot is None else snapshot.without_training():
            if self._thread is not None:
                self._thread.join()

    @property
    def was_told(self) -> bool:
        """Whether anybody has asked how it ended."""
        return self._outcome.was_told


@dataclass
class _Part:
    """What this rank writes."""

    ready: list[tuple[WriteItem, Any]] = field(default_factory=list)
    """Copies."""
    lazy: dict[Chunk, list[tuple[WriteItem, Piece]]] = field(default_factory=dict)
    """By the chunk that has the values."""

    @classmethod
    def of(cls, planned: PlannedSave, order: Mapping[int, int]) -> _Part:
        """Find it in a plan; chunks in an `order` of groups, those that have none there last."""
        part, lazy = cls(), dict[Chunk, list[tuple[WriteItem, Piece]]]()
        for item in planned.planner.plan.items:
            piece = planned.planner.piece_of(item)
            if piece is None:
                part.ready.append((item, planned.planner.resolve_data(item)))
            else:
                lazy.setdefault(_slot(piece).chunk, []).append((item, piece))
        last = len(order)
        part.lazy = {chunk: lazy[chunk] for chunk in sorted(lazy, key=lambda each: order.get(each.id.group, last))}
        return part

    def wanted(self) -> dict[Chunk, set[int]]:
        """Return the positions of slots by chunk."""
        return {chunk: {_slot(piece).position for _, piece in items} for chunk, items in self.lazy.items()}


def _slot(piece: Piece) -> SlotSource:
    assert isinstance(piece.source, SlotSource)
    return piece.source


def begin_saving(state: dict[str, Any], path: Path, runtime: Runtime) -> Saving:
    """Begin to write a checkpoint of what chunks hold now; all ranks call it.

    Args:
        state: nested dicts; what is lazy is read later, and all else is copied now.
        path: of the directory.
        runtime: of the chunks.

    Raises:
        CheckpointError: that is known not to be possible; on every rank.
    """
    ranks, store = runtime.ranks.everyone(), runtime.memory.store
    with replacing(path, ranks) as replacement:
        try:
            planned = plan_save(state, replacement, runtime.ranks)
            with told_to_all(path, ranks):
                order = {group: at for at, group in enumerate(runtime.memory.pager.last_updates)}
                part = _Part.of(planned, order)
                runtime.controller.residence.leave()
                snapshot = store.snapshot = _take_snapshot(part, runtime)
            outcome, name = _Outcome(path), ranks.from_first(uuid.uuid4().hex, label=_LABEL)
            writing = _Writing(planned, part, snapshot, ranks.notes(f"chunkmem saves {name}"), outcome)
            # Not a daemon: Python waits for it before it ends.
            thread = threading.Thread(target=writing.run, name=f"chunkmem saves {path.name}")
            thread.start()
        except BaseException:
            store.snapshot = None
            raise
    for chunk in runtime.memory.pager.held:  # somebody may write to them as soon as this returns
        store.before_change(chunk)
    return Saving(path, outcome, thread, snapshot)


def _take_snapshot(part: _Part, runtime: Runtime) -> Snapshot:
    pager = runtime.memory.pager
    with runtime.modules.step_lock.taken():
        for chunk in runtime.modules.access.chunks.values():
            pager.notice_writes(chunk)
        return Snapshot(part.wanted(), runtime.memory.compute.reader())


@dataclass
class _Writing:
    """What the thread of a rank does."""

    planned: PlannedSave
    part: _Part
    snapshot: Snapshot
    notes: Notes
    outcome: _Outcome

    def run(self) -> None:
        """Write, and say how it has ended. Meanwhile this rank is not lost to the others, however slow its disk is."""
        with self.notes.working():
            self._run()

    def _run(self) -> None:
        problem, results = "", self.planned.writer.results
        try:
            for _ in self.planned.writer.write_all(self._contents(), self.planned.planner.plan):
                """Nobody is told meanwhile."""
        except BaseException as error:
            self.snapshot.give_up(error)
            problem = f"rank {self.notes.rank}: {in_one_line(error)}"
        try:
            if self.notes.rank == 0:
                problem = self._complete(problem, results)
            else:
                problem = self._report(problem, results)
        except BaseException as error:
            problem = problem or in_one_line(error)
        self.outcome.problem = problem

    def _contents(self) -> Iterator[tuple[WriteItem, Any]]:
        """Copy what this rank writes, chunk after chunk."""
        while self.part.ready:
            yield self.part.ready.pop()
        while (taken := self.snapshot.take()) is not None:
            for item, piece in self.part.lazy.pop(taken.chunk):
                source = _slot(piece)
                yield item, source.part_of(taken.slots[source.position], piece.start, piece.shape)

    # Over ranks.

    def _report(self, problem: str, results: list[Written]) -> str:
        """Tell the first rank of this one's part; return what went wrong on any of them."""
        if not problem:
            try:
                file = self._file_of(self.notes.rank)
                with written(file) as stream:
                    stream.write(results_as_json(results))
                sync(file.parent)
            except OSError as error:
                problem = f"rank {self.notes.rank}: {in_one_line(error)}"
        self.notes.leave(f"the part of rank {self.notes.rank}", problem)
        outcome = self.notes.wait_for("the completion of a checkpoint", of=0)
        self.notes.leave(f"rank {self.notes.rank} knows", "")
        return outcome

    def _complete(self, problem: str, results: list[Written]) -> str:
        """Complete the checkpoint once all have written their parts; return what went wrong on any rank."""
        others = range(1, self.notes.size)
        try:
            found = [self.notes.wait_for(f"the part of rank {rank}", of=rank) for rank in others]
            problem = next(filter(None, [problem, *found]), "")
            if not problem:
                rows = [results, *(_taken(self._file_of(rank)) for rank in others)]
                self.planned.finish(rows)
        except (OSError, CheckpointError, RankError) as error:
            problem = problem or in_one_line(error)
        if problem:
            self.planned.replacement.discard()
        if others:
            self.notes.leave("the completion of a checkpoint", problem)
            with contextlib.suppress(RankError):  # the store may end with this process: not before they have read it
                for rank in others:
                    self.notes.wait_for(f"rank {rank} knows", of=rank, limit_s=_FAREWELL_S)
        return problem

    def _file_of(self, rank: int) -> Path:
        """Return the file in which a rank says where in the checkpoint it has written what."""
        return self.planned.replacement.folder / f".part-{rank}"


def _taken(file: Path) -> list[Written]:
    results = results_of_json(read_all(file), file)
    file.unlink()
    return results
