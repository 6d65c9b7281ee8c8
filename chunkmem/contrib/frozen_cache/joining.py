"""Have the ranks of a machine use one copy of what a cache keeps: one of them makes it, the others open it.

    1 where   each rank says which machine it is on, and what it asks for
    2 make    the first one of each machine makes memory and the file, and says where
    3 open    the others open them; each counts its share

Nobody leaves a step before all ranks have come to it, those of other machines and pipeline stages included, and all
raise if one does. Where a rank cannot open what another has made, as in containers of their own, each rank of that
machine has a copy of its own, of its share.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chunkmem.assembly.runtime import Runtime
from chunkmem.contrib.frozen_cache.shared_index import HEADER_NBYTES
from chunkmem.contrib.frozen_cache.shared_levels import SharedDisk, SharedLevels, disk_errors, share_of
from chunkmem.contrib.frozen_cache.shared_memory import SharedDiskFile, SharedFile
from chunkmem.data.errors import ConfigError, StateError

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Wanted:
    """What is asked of a cache, for a machine."""

    host_nbytes: int
    folder: Path | None
    disk_nbytes: int | None
    """None: half of what is free."""

    @property
    def most_disk_nbytes(self) -> int:
        """The most bytes of the file; looked up if it was not said."""
        if self.folder is None or self.disk_nbytes is not None:
            return self.disk_nbytes or 0
        there = (path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
        return shutil.disk_usage(next(there, self.folder)).free // 2


@dataclass
class _Copy:
    """The files of a copy, as this process has them."""

    disk_nbytes: int
    """The most bytes of the file on DISK."""
    files: list[SharedFile] = field(default_factory=list)
    """For values, for the index, and to lock."""
    disk: SharedDiskFile | None = None

    @property
    def all(self) -> list[SharedFile | SharedDiskFile]:
        return [*self.files, *([] if self.disk is None else [self.disk])]

    @classmethod
    def make(cls, wanted: Wanted) -> _Copy:
        """Make the files.

        Raises:
            ConfigError: the folder cannot be used.
            OSError: the system has no memory that others can open.
        """
        copy = cls(wanted.most_disk_nbytes)
        if wanted.folder is not None:
            with disk_errors():
                copy.disk = SharedDiskFile(wanted.folder, nbytes=copy.disk_nbytes)
        try:
            copy.files += (SharedFile() for _ in range(3))
            for file, nbytes in zip(copy.files, (wanted.host_nbytes, HEADER_NBYTES), strict=False):
                file.resize(nbytes)
        except OSError:
            copy.close()
            raise
        return copy

    @classmethod
    def open(cls, disk_nbytes: int, files: Sequence[tuple[str, tuple[int, int]]], wanted: Wanted) -> _Copy:
        """Open what the first rank of the machine has made.

        Raises:
            OSError: it is not there, or something else is: this process sees other processes than that rank does.
        """
        for path, identity in files:  # before any of them is opened, as it might be anybody's
            if identity_at(path) != identity:
                raise FileNotFoundError(path)
        copy, paths = cls(disk_nbytes), [path for path, _ in files]
        try:
            copy.files += map(SharedFile, paths[:3])
            if wanted.folder is not None:
                copy.disk = SharedDiskFile(wanted.folder, nbytes=0, opened=paths[3])
        except BaseException:
            copy.close()
            raise
        return copy

    def levels(self, runtime: Runtime, host_nbytes: int, *, rank: int = 0, num_ranks: int = 1) -> SharedLevels:
        """Return values in these files, which are given back with them, or if that raises."""
        try:
            return SharedLevels(
                runtime.memory.pager,
                self.files,
                None if self.disk is None else SharedDisk(self.disk, self.disk_nbytes),
                rank=rank,
                num_ranks=num_ranks,
                host_nbytes=host_nbytes,
                timeout_s=runtime.ranks.connection.timeout_s,
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for file in self.all:
            file.close()


def open_values(runtime: Runtime, wanted: Wanted) -> SharedLevels:
    """Return the values of this rank's machine; all ranks call it.

    Args:
        runtime: of this rank.
        wanted: the same on all ranks of a machine.

    Raises:
        ConfigError: the folder cannot be used, or ranks of a machine want different things.
        CapacityError: HOST has no room for this rank's share, or for that of another one.
        RankError: a rank is missing.
    """
    if runtime.ranks.are_one:
        return _Copy.make(wanted).levels(runtime, wanted.host_nbytes)
    with runtime.ranks.telling():
        return _Joining(runtime, wanted).run()


class _Joining:
    def __init__(self, runtime: Runtime, wanted: Wanted) -> None:
        self._runtime = runtime
        self._wanted = wanted
        self._copy: _Copy | None = None
        """That this rank has made for all of its machine, until it has values."""
        self._values: SharedLevels | None = None

    def run(self) -> SharedLevels:
        """See `open_values`."""
        try:
            members, own = self._members()
            rank, num = members.index(own), len(members)
            made = self._all(lambda: self._make() if rank == 0 else None)
            opened = self._all(lambda: self._take(made[members[0]], rank, num))
            if not all(opened[member] for member in members):
                self._close()
                self._take_own(rank, num)
        except BaseException:
            self._close()
            raise
        assert self._values is not None
        return self._values

    def _all(self, step: Callable[[], Any]) -> list[Any]:
        """Take a step on all ranks; return what it returns on each of them.

        Raises:
            StateError: another rank has raised something; else what this one has.
        """
        value, error = None, None
        try:
            value = step()
        except Exception as raised:
            error = raised
        said = "" if error is None else f"{type(error).__name__}: {error}"
        found, _ = self._runtime.ranks.values_of_all((said, value), label="chunkmem.FrozenCache()")
        if error is not None:
            raise error
        errors = [each[0] for each in found if each[0]]
        if errors:
            raise StateError(f"FrozenCache: another rank refuses: {errors[0]}")
        return [each[1] for each in found]

    def _members(self) -> tuple[list[int], int]:
        """Return the ranks of this machine, and this one, all counted in the whole job."""
        wanted = self._wanted
        here = f"{socket.gethostname()} {_BOOT.read_text().strip()}"
        asked = f"host={wanted.host_nbytes}, disk={wanted.folder}, disk_capacity={wanted.disk_nbytes}"
        found = self._all(lambda: [here, asked])
        _, own = self._runtime.ranks.values_of_all("", label="chunkmem.FrozenCache()")
        different = sorted({each[1] for each in found if each[0] == here})

        def compare() -> None:
            if len(different) > 1:
                raise ConfigError(
                    f"FrozenCache: the ranks of a machine have one copy, and ask for {' and for '.join(different)}; "
                    "give them the same"
                )

        self._all(compare)
        return [number for number, each in enumerate(found) if each[0] == here], own

    def _make(self) -> Any:
        """Make a copy; return how large its file may be, and where others open what; None: the system cannot."""
        try:
            copy = self._copy = _Copy.make(self._wanted)
        except OSError:
            return None
        return [copy.disk_nbytes, [[file.path, file.identity] for file in copy.all]]

    def _take(self, made: Any, rank: int, num: int) -> bool:
        """Have values of this rank; return False if it cannot open what another has made."""
        if made is None:
            return False
        disk_nbytes, files = made
        try:
            copy = self._copy or _Copy.open(disk_nbytes, files, self._wanted)
        except OSError:
            return False
        self._copy = None
        self._values = copy.levels(self._runtime, self._wanted.host_nbytes, rank=rank, num_ranks=num)
        return True

    def _take_own(self, rank: int, num: int) -> None:
        """Have values of this rank alone, in its share of what there is."""
        host_nbytes, disk_nbytes = share_of(self._wanted.host_nbytes, rank, num), self._wanted.most_disk_nbytes // num
        own = Wanted(host_nbytes, self._wanted.folder, disk_nbytes)
        self._values = _Copy.make(own).levels(self._runtime, host_nbytes)

    def _close(self) -> None:
        for each in (self._values, self._copy):
            if each is not None:
                each.close()


def identity_at(path: str) -> tuple[int, int]:
    """Return what tells the file at a path from all others of this machine; raise an OSError if there is none."""
    found = os.stat(path)
    return found.st_dev, found.st_ino
