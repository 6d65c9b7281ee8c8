"""All that a suite has found, in one file that travels between machines which begin bare."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from benchmarks.gpu.rows import StoreError, replacing

MOST_NBYTES = 15 << 20
"""Of the archive, so that it passes wherever files of 16 MiB do."""
MOST_LOG_NBYTES = 64 << 10
"""Of each log, its end."""
CACHE = "cache"
"""Where programs keep what they have made, of which the native libraries are packed: compiling takes a minute."""
NATIVE = "native"


class Archive:
    """A folder packed into one file, which is whole and valid at any time.

    Args:
        path: the file.
        folder: what it is unpacked to, and packed from.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self.path = path
        self.left_out: list[str] = []
        """Files that the archive had no room for when it was last saved."""
        self._folder = folder

    def open(self) -> None:
        """Unpack what an earlier command has saved.

        Raises:
            StoreError: the file is no archive.
        """
        if not self.path.exists():
            return
        try:
            with tarfile.open(self.path) as archive:
                archive.extractall(self._folder, filter="data")
        except (tarfile.TarError, EOFError, OSError, ValueError) as error:
            raise StoreError(f"{self.path} is no archive of rows ({error}); move it away") from None
        for path in (self._folder / CACHE).rglob("*"):
            if path.is_dir():
                path.chmod(0o700)  # a library in a folder that others may write to is not loaded

    def save(self) -> None:
        """Pack the folder: rows first, then what else there is, the smallest files first, as long as there is room."""
        paths = [path for path in self._folder.rglob("*") if path.is_file() and self._is_kept(path)]
        paths.sort(key=lambda path: (path.parent != self._folder, path.stat().st_size, path))
        left_nbytes, self.left_out = MOST_NBYTES, []
        with replacing(self.path) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for path in paths:
                name = str(path.relative_to(self._folder))
                content = path.read_bytes()
                if path.suffix == ".txt":
                    content = content[-MOST_LOG_NBYTES:]
                # Counted as it lies there: what is compressed already is not made smaller.
                if len(content) > left_nbytes:
                    self.left_out.append(name)
                    continue
                left_nbytes -= len(content)
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(content), path.stat().st_mode & 0o777
                archive.addfile(member, io.BytesIO(content))

    def _is_kept(self, path: Path) -> bool:
        """Tell whether it is whole, and of use on another machine."""
        parts = path.relative_to(self._folder).parts
        return path.suffix == ".so" and NATIVE in parts if parts[0] == CACHE else path.suffix != ".new"
