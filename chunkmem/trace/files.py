"""Files of one JSON object: written whole or not at all, read with one sentence for whatever is wrong."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from chunkmem.errors import ChunkmemError
from chunkmem.sizes import shown

T = TypeVar("T")


@dataclass(frozen=True)
class JsonFile:
    """A kind of file: what it is called, and what is raised for everything that is wrong with one."""

    name: str
    error: type[ChunkmemError]

    def load(self, path: str | os.PathLike[str], from_dict: Callable[[Any], T]) -> T:
        """Return what `from_dict` makes of the object in a file.

        Raises:
            ChunkmemError: `error`, naming the file, if it cannot be read, is not JSON, or `from_dict` refuses it.
        """
        name = self._path_name(path)
        try:
            return from_dict(self._parsed(self._read(name)))
        except RecursionError:
            raise self.error(_one_line(f"{name}: the content is nested too deeply to be a {self.name}")) from None
        except self.error as error:
            raise self.error(_one_line(f"{name}: {error}")) from None

    def save(self, values: Mapping[str, Any], path: str | os.PathLike[str], from_dict: Callable[[Any], object]) -> None:
        """Write an object to a file, which is replaced as a whole or, after an error, as it was.

        Raises:
            ChunkmemError: `error`, naming the file, if it cannot be written, or `from_dict` would refuse it.
        """
        name = self._path_name(path)
        target = Path(os.path.realpath(name))  # A symbolic link stays one.
        try:
            # That a file cannot be read would otherwise be found out when what it was made from is gone.
            from_dict(values)
            _replace(target, json.dumps(values, separators=(",", ":"), allow_nan=False).encode())
        except self.error as error:
            raise self.error(_one_line(f"{name} cannot be written: {error}")) from None
        except OSError as error:
            advice = "give the path of a file that can be written"
            if isinstance(error, FileNotFoundError):
                advice = f"create the directory {target.parent} first"
            raise self.error(_one_line(f"{name} cannot be written: {error.strerror}; {advice}")) from None

    def _path_name(self, path: object) -> str:
        name = os.fsdecode(path) if isinstance(path, str | os.PathLike) else ""
        if not name or "\0" in name:
            raise self.error(f"{shown(path)} is not the path of a file; give one of a {self.name}")
        return name

    def _read(self, name: str) -> str:
        try:
            content = Path(name).read_bytes()
        except OSError as error:
            raise self.error(f"cannot be read: {error.strerror}; give the path of a {self.name}") from None
        if not content.strip():
            raise self.error(f"the file is empty, so it is no {self.name}; save it again")
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            if content.startswith(b"{") and error.reason == "unexpected end of data":
                raise self._truncated() from None
            raise self.error(f"byte {error.start} is not UTF-8 text, so this is no {self.name}") from None

    def _parsed(self, text: str) -> object:
        try:
            return json.loads(text, object_pairs_hook=_unique)
        except json.JSONDecodeError as error:
            whole = text.rstrip()
            # An object's last character is its brace; another one ends with what is inside the object.
            if whole.startswith("{") and (not whole.endswith("}") or error.pos >= len(whole)):
                raise self._truncated() from None
            raise self.error(f"not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
        except ValueError as error:  # A key given twice, or an integer of more digits than Python reads.
            raise self.error(str(error)) from None

    def _truncated(self) -> ChunkmemError:
        return self.error(f"the file looks truncated: it ends inside its {self.name}; save or copy it again")


def _replace(target: Path, content: bytes) -> None:
    # Renaming over a device file or a socket would destroy it.
    if target.exists() and not target.is_file():
        raise OSError(0, "it is not a regular file")
    # Not tempfile, whose files nobody but their owner can read. Short: the name of the target may be of full length.
    partial = target.with_name(f".chunkmem-{secrets.token_hex(8)}.part")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            # Else a crash of the machine may leave the new name on old, empty blocks.
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shown(twice)} is given twice in one object")
    return values


def _one_line(message: str) -> str:
    # Labels and paths may have line breaks in them, and lone surrogates, which cannot be printed.
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
