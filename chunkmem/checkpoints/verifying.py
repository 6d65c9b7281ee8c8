"""Look a checkpoint over as a whole, without a model: is all of it there, and as it was written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from chunkmem.checkpoints.checksums import NAME
from chunkmem.checkpoints.converting import Format, format_of, load_torch, tensors_in
from chunkmem.checkpoints.directory import standing
from chunkmem.checkpoints.reading import CheckpointFiles, tried
from chunkmem.checkpoints.safetensors_files import StoredTensor, open_safetensors
from chunkmem.checkpoints.saved_objects import UntrustedError
from chunkmem.data.errors import CheckpointError, said

Progress = Callable[[int, int], object]
"""Is told how many bytes were looked at since the last time, and how many there are in all."""


@dataclass
class Part:
    """What is saved under one key."""

    num_tensors: int = 0
    num_objects: int = 0
    nbytes: int = 0
    num_damaged: int = 0
    """Tensors, or parts of them, and objects."""


@dataclass
class Verified:
    """What was found."""

    format: Format
    compared_with: str
    """What tells whether values have changed."""
    parts: dict[str, Part] = field(default_factory=dict)
    """By key; of safetensors, by file."""
    problems: list[str] = field(default_factory=list)
    """What is damaged, in a sentence each."""
    needs_trust: list[str] = field(default_factory=list)
    """Functions and classes that objects name, which are not run: only `trust` reads those objects."""

    @property
    def is_whole(self) -> bool:
        """Nothing is damaged."""
        return not self.problems

    def part(self, key: str) -> Part:
        """Return the part of a key."""
        return self.parts.setdefault(key, Part())

    def damaged(self, key: str, error: CheckpointError) -> None:
        """Note that something under a key is."""
        self.part(key).num_damaged += 1
        self.problems.append(str(error))


def verify(path: Path, *, on_read: Progress = lambda more, total: None) -> Verified:
    """Read all of a checkpoint: of `manager.save`, `dcp.save` or `torch.save`, or safetensors. Nothing of it is run.

    Raises:
        CheckpointError: it is none.
    """
    path = standing(path)
    kind = format_of(path)
    found = Verified(kind, "nothing: safetensors have no checksums")
    try:
        if kind is Format.DCP:
            _verify_dcp(path, found, on_read)
        elif kind is Format.SAFETENSORS:
            _verify_safetensors(path, found, on_read)
        else:
            _verify_torch(path, found)
    except CheckpointError as error:  # of what says where everything else is
        found.problems.append(str(error))
    return found


def _verify_dcp(path: Path, found: Verified, on_read: Progress) -> None:
    files = CheckpointFiles(path)
    found.compared_with = NAME if files.checksums else "the CRC-32 of each archive of torch.save()"
    total = sum(stored.place.length for stored in (*files.tensors, *files.objects))
    read = ((stored, tried(files.object, stored)[1]) for stored in files.objects)
    for stored, error in chain(files.verified(files.tensors), read):
        part, nbytes = found.part(stored.key), stored.place.length
        part.nbytes += nbytes
        part.num_tensors += stored.like is not None and stored.is_first  # its other parts are of the same
        part.num_objects += stored.like is None
        if isinstance(error, UntrustedError):
            found.needs_trust = sorted({*found.needs_trust, *error.names})
        elif error is not None:
            found.damaged(stored.key, error)
        on_read(nbytes, total)


def _verify_safetensors(path: Path, found: Verified, on_read: Progress) -> None:
    sources = [value.pieces[0].source for value in open_safetensors(path).values()]
    stored = [source.values for source in sources if isinstance(source, StoredTensor)]
    total = sum(values.nbytes for values in stored)
    for values in stored:
        part = found.part(values.path.name)
        part.num_tensors += 1
        part.nbytes += values.nbytes
        try:
            values.checksum()
        except (OSError, EOFError) as error:
            found.damaged(values.path.name, CheckpointError(f"{values.path} cannot be read: {said(error)}"))
        on_read(values.nbytes, total)


def _verify_torch(path: Path, found: Verified) -> None:
    found.compared_with = "the CRC-32 of its archive"
    found.part(path.name).nbytes = path.stat().st_size
    try:
        found.part(path.name).num_tensors = len(tensors_in("", load_torch(path, trust=False)))
    except UntrustedError as error:
        found.needs_trust = list(error.names)
    except CheckpointError as error:
        found.damaged(path.name, error)
