"""Files of one versioned JSON object: written whole or not at all, read with one sentence for whatever is wrong."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from chunkmem.errors import ChunkmemError
from chunkmem.schema import Check, integer, number, one_of
from chunkmem.sizes import shown

T = TypeVar("T")


def _parse_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _parse_list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError
    return value


TEXT = Check("a string", _parse_text)
LIST = Check("a list", _parse_list)
COUNT = integer(0)
FINITE = number("a finite number", lambda x: True)
SECONDS = number("a finite number of seconds, 0 or more", lambda x: x >= 0)


def member_of(kind: type[enum.Enum]) -> Check:
    """Check for the value of a member of `kind`, all of which are strings; kept as the member."""
    members = {member.value: member for member in kind}
    names = one_of(*members)
    return Check(names.allowed, lambda value: members[names.parse(value)])


def item_of(name: str, items: Sequence[object]) -> Check:
    """Check for an index into `items`, which the file calls `name`; kept as the item."""
    position = integer(0, len(items) - 1)

    def parse(value: object) -> object:
        index = position.parse(value)
        assert isinstance(index, int)
        return items[index]

    return Check(f"an index into {name}, which has {len(items)} of them", parse)


@dataclass(frozen=True)
class Fields:
    """The values of one JSON object. Its methods raise `error`, which says where in the file the value is."""

    values: Mapping[str, Any]
    at: str
    """Path of the object within the file, with a dot at its end; empty for the whole file."""
    error: type[ChunkmemError]

    def checked(self, path: str, value: object, check: Check) -> Any:
        """Return `value`, found at `path`, in the form that `check` keeps it in."""
        try:
            return check.parse(value)
        except ValueError:
            raise self.error(f"{self.at}{path} is {shown(value)}, but must be {check.allowed}") from None

    def one(self, key: str, check: Check) -> Any:
        """Return the value of a key."""
        return self.checked(key, self.values[key], check)

    def column(self, key: str, check: Check) -> list[Any]:
        """Return the list of a key, each item in the form that `check` keeps it in."""
        return [self.checked(f"{key}[{index}]", item, check) for index, item in enumerate(self.one(key, LIST))]

    def row(self, path: str, value: object, checks: Sequence[Check]) -> list[Any]:
        """Return the list `value`, found at `path`, each item in the form that its check keeps it in."""
        row = self.checked(path, value, LIST)
        if len(row) != len(checks):
            raise self.error(f"{self.at}{path} is {shown(row)}, but must be a list of {len(checks)} values")
        kept = []
        for position, check in enumerate(checks):
            # Not `checked`: a path for each of a million values would take longer than all the rest.
            try:
                kept.append(check.parse(row[position]))
            except ValueError:
                self.checked(f"{path}[{position}]", row[position], check)
        return kept

    def rows(self, key: str, *checks: Check) -> Iterator[list[Any]]:
        """Yield each row of the table of a key; `checks` are of its columns."""
        for index, value in enumerate(self.one(key, LIST)):
            yield self.row(f"{key}[{index}]", value, checks)

    def table(self, key: str, *checks: Check) -> dict[tuple[Any, ...], Any]:
        """Return the table of a key, from all columns but the last to the last; no row may repeat another's key."""
        found: dict[tuple[Any, ...], Any] = {}
        for index, (*names, value) in enumerate(self.rows(key, *checks)):
            if tuple(names) in found:
                row = shown(self.values[key][index])
                raise self.error(f"{self.at}{key}[{index}] is {row}, but an earlier row is for the same")
            found[tuple(names)] = value
        return found


@dataclass(frozen=True)
class Format:
    """A kind of file: what its ``format`` says, the version that is written and read, its other keys."""

    name: str
    version: int
    keys: tuple[str, ...]
    error: type[ChunkmemError]
    """Raised for everything that is wrong with such a file."""
    added: Mapping[str, object] = field(default_factory=dict)
    """Keys that came later than the version, with what they mean where they are missing; always written."""

    def document(self, *values: object) -> dict[str, Any]:
        """Return the whole object, from the values of `keys` and `added` in their order."""
        keys = (*self.keys, *self.added)
        return {"format": self.name, "version": self.version, **dict(zip(keys, values, strict=True))}

    def fields(self, values: object, *, at: str = "") -> Fields:
        """Return the values of a whole object, which is found at the path `at` in another one.

        Raises:
            ChunkmemError: `error`, if it is not an object, or one of another format or version, or of other keys.
        """
        prefix = f"{at}." if at else ""
        if not isinstance(values, Mapping):
            raise self.error(f"{at or 'the content'} is {shown(values)}, but must be an object: a {self.name}")
        for key in ("format", "version"):
            if key not in values:
                raise self.error(f"{prefix}{key} is missing, which every {self.name} has")
        if values["format"] != self.name:
            found = shown(values["format"])
            raise self.error(f'{at or "this"} has the format {found}, but a "{self.name}" is needed here')
        self._check_version(values["version"], f"{prefix}version")
        needed = ("format", "version", *self.keys)
        known = (*needed, *self.added)
        if missing := [key for key in needed if key not in values]:
            raise self.error(f"{prefix}{missing[0]} is missing, which every {self.name} has")
        if unknown := [key for key in values if key not in known]:
            has = f"{at or 'this'} has a key {shown(unknown[0])}"
            raise self.error(f"{has}, which no {self.name} has; allowed: {', '.join(known)}")
        return Fields({**self.added, **values}, prefix, self.error)

    def _check_version(self, version: object, path: str) -> None:
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            raise self.error(f"{path} is {shown(version)}, but must be an integer from 1 to {self.version}")
        if version > self.version:
            raise self.error(
                f"{path} of this {self.name} is {shown(version)}, but this chunkmem reads only up to {self.version}; "
                "update chunkmem, or save it again with this one"
            )

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
