"""A checkpoint takes the place of another one: there is all of it, or what was there before.

[Note: Replacing a checkpoint] A checkpoint is written into an unfinished folder (see [Note: Unfinished folders] in
`chunkmem.checkpoints.unfinished`). If there is no directory at its path, the folder is renamed to it, in one step. If
there is one, it stays, with its mode, its owner and whatever else lies in it, and the checkpoint in it is replaced:

1. The new files are moved into it. Their names are new, too, so nobody sees them.
2. `checksums.json` is replaced by one that has the checksums of the new checkpoint and of the old one.
3. `.metadata`, which says what the checkpoint is, is replaced, in one step of the file system: from here on it is the
   new one. Should the name not come to the disk, the old `.metadata` is put back, and 1 undone.
4. The files of the old checkpoint are removed. What a killed process leaves of that, the next one removes.

Who does so has the directory locked from 1 to 3. So of two who save to one path, one comes after the other.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from chunkmem.checkpoints.checksums import NAME as CHECKSUMS
from chunkmem.checkpoints.checksums import add_checksums_of
from chunkmem.checkpoints.directory import MANIFEST, standing
from chunkmem.checkpoints.unfinished import (
    LOCK,
    Unfinished,
    alone_in,
    in_one_line,
    is_unfinished,
    make_folder,
    sweep,
    sync,
    written,
)
from chunkmem.data.errors import CheckpointError, RankError
from chunkmem.ranks.ranks import Ranks

_LABEL = "making the directory of a checkpoint"
_SAVING = "manager.save()"
_LATE_S = 5.0
"""How long a file may take to be seen by another machine."""
_VALUES = re.compile(r"([0-9a-f]{16})?__\d+_\d+\.distcp")
"""Names of files with values: those of torch.distributed.checkpoint, and ours."""
_OLD_MANIFEST = f"{MANIFEST}.before"
_IS_NEW = "the new one is in place, and may be gone after a crash of the machine"


@dataclass
class Replacement:
    """A checkpoint that is being written, to take the place of what is at its path."""

    path: Path
    folder: Path
    """To write to; the same on all ranks."""
    own: Unfinished | None
    """On the first rank."""
    may_be_there: bool = False
    """Now, or after a crash of the machine: its files must not be removed."""

    @property
    def generation(self) -> str:
        """What names of files with values begin with, so that they differ from those that are there."""
        return self.folder.name.split(".")[-2]

    def put_in_place(self, values: Collection[str]) -> None:
        """Have the checkpoint at its path, with files of these names; the first rank does so.

        Raises:
            OSError: it is not; what was there before is.
            CheckpointError: that, too.
        """
        if self.path.is_dir() or not self._is_renamed():
            self._replace(values)
        assert self.own is not None
        self.own.discard()

    def _is_renamed(self) -> bool:
        """Give the folder its name; return False if somebody else has made one with that name."""
        sync(self.folder)
        try:
            self.folder.rename(self.path)
        except OSError:
            if self.path.is_dir():
                return False
            raise
        try:
            sync(self.path.parent)
        except OSError:  # nobody knows whether it would be there after a crash
            self.path.rename(self.folder)
            raise
        return True

    def _replace(self, values: Collection[str]) -> None:
        moved: list[Path] = []
        with alone_in(self.path, is_new=not (self.path / MANIFEST).exists()):
            before = [name for name in os.listdir(self.path) if _VALUES.fullmatch(name)]
            try:
                for name in values:
                    (self.folder / name).rename(self.path / name)
                    moved.append(self.path / name)
                add_checksums_of(self.path, to=self.folder)
                os.replace(self.folder / CHECKSUMS, self.path / CHECKSUMS)
                sync(self.path)
                self._replace_manifest()
            except BaseException:
                if not self.may_be_there:
                    _remove(moved)
                raise
        _remove([self.path / name for name in before])

    def _replace_manifest(self) -> None:
        manifest, kept = self.path / MANIFEST, self.folder / _OLD_MANIFEST
        was_there = manifest.exists()
        if was_there:
            with written(kept) as file:  # put back without its content, it would be no manifest after a crash
                file.write(manifest.read_bytes())
        self.may_be_there = True
        try:
            os.replace(self.folder / MANIFEST, manifest)
        except OSError:
            self.may_be_there = False
            raise
        try:
            sync(self.path)
        except OSError as error:
            try:
                os.replace(kept, manifest) if was_there else manifest.unlink()
            except OSError:
                raise CheckpointError(f"{self.path}: {error.strerror}; {_IS_NEW}") from None
            with contextlib.suppress(OSError):
                sync(self.path)
                self.may_be_there = False
            raise

    def discard(self) -> None:
        """Remove what is not complete, as far as that is possible; the next time does so, too."""
        if self.own is not None:
            self.own.discard()


@contextlib.contextmanager
def replacing(path: Path, ranks: Ranks) -> Iterator[Replacement]:
    """Yield a directory, the same on all ranks, to take the place of `path`; after an error inside it is removed.

    What is written to it is the checkpoint once the names of its files with values have been given to
    `Replacement.put_in_place`, in the block or later. After a kill or an error, there is what was there before, or all
    of what was written. What a killed process has left is removed by the next one.

    Raises:
        CheckpointError: it cannot be made or renamed, or `path` is something else than a checkpoint; on every rank.
    """
    with told_to_all(path, ranks):
        own = _make(path) if ranks.is_first else None
    name = ranks.from_first("" if own is None else os.path.relpath(own.folder, path.parent), label=_LABEL)
    replacement = Replacement(path, path.parent / name, own)
    try:
        if not ranks.are_one:
            _check_shared(replacement, ranks)
        yield replacement
    except BaseException:
        replacement.discard()
        raise


def _check_shared(replacement: Replacement, ranks: Ranks) -> None:
    """Raise a `CheckpointError` on every rank if one of them has another directory, which lacks what others write."""
    path = replacement.path
    mark = replacement.folder / ranks.from_first(f".seen-by-all-{uuid.uuid4().hex}", label=_LABEL)
    with told_to_all(path, ranks):
        if ranks.is_first:
            mark.touch()
    problem = "" if _appears(mark) else f"rank {ranks.name(ranks.rank)} does not see what the first rank writes there"
    problem = ranks.any_text(f"{path}: {problem}" if problem else "", label=_LABEL)
    if ranks.is_first:
        mark.unlink(missing_ok=True)
    if problem:
        raise CheckpointError(
            f"the checkpoint could not be written ({problem}); what was there before is there. Name a directory on a "
            "file system that all ranks share"
        )


def _appears(mark: Path) -> bool:
    """Tell whether there is a file that another machine has just made; file systems over a network may be late."""
    deadline_s = time.monotonic() + _LATE_S
    while not mark.exists():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_LATE_S / 100)
        with contextlib.suppress(OSError):
            os.listdir(mark.parent)  # has it looked up again
    return True


@contextlib.contextmanager
def told_to_all(path: Path, ranks: Ranks) -> Iterator[None]:
    """Raise on all ranks what goes wrong inside on one of them, as a checkpoint that could not be written."""
    problem = ""
    interrupt: BaseException | None = None
    try:
        yield
    except RankError:
        raise
    except BaseException as error:  # the others would wait for this rank
        problem = f"rank {ranks.name(ranks.rank)}: {in_one_line(error)}"
        interrupt = None if isinstance(error, Exception) else error
    problem = ranks.any_text(problem, label=_SAVING)
    if interrupt is not None:
        raise interrupt
    if problem:
        raise not_written(path, problem)


def not_written(path: Path, problem: str) -> CheckpointError:
    """Return the error of a checkpoint that could not be written."""
    still = "" if problem.endswith(_IS_NEW) else "; what was there before is there still"
    return CheckpointError(f"{path} could not be written: {problem}{still}")


def _make(path: Path) -> Unfinished:
    if (left := standing(path)) != path:
        left.rename(path)
    if not path.exists():
        make_folder(path.parent)
        return Unfinished.make(path.parent, path.name)
    if not (path / MANIFEST).exists() and not (path.is_dir() and all(map(_is_own, path.iterdir()))):
        raise CheckpointError(f"{path} is there, and is no checkpoint; name another directory")
    with contextlib.suppress(OSError):  # what was left before the directory was there
        sweep(path.parent, path.name)
    return Unfinished.make(path)


def _is_own(entry: Path) -> bool:
    """Tell whether somebody who was killed while saving may have left it in a directory that was empty."""
    name = entry.name
    return is_unfinished(name) or name in (LOCK, CHECKSUMS) or _VALUES.fullmatch(name) is not None


def _remove(paths: Collection[Path]) -> None:
    """Remove files as far as that is possible; who replaces the checkpoint next does so, too."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
