"""Frozen dataclasses that are kept in files: an object with a key for each field, and what is wrong with another one.

Paths in messages are those of the file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from chunkmem.data.codec import TABLES, Codec, Tables, Wrong, codec_of
from chunkmem.data.errors import ChunkmemError
from chunkmem.data.files import replace_file
from chunkmem.data.schema import with_unique_keys
from chunkmem.data.sizes import printable, shown

VERSION = 2
"""Version of all kinds of files, whose forms the codec decides."""


class Saved:
    """A dataclass that is kept in files: ``class Trace(Saved, name="chunkmem trace", error=TraceError, ...)``."""

    _name: ClassVar[str]
    _error: ClassVar[type[ChunkmemError]]
    _again: ClassVar[str]
    _tables: ClassVar[tuple[str, ...]]
    _optional: ClassVar[tuple[str, ...]]

    def __init_subclass__(
        cls,
        *,
        name: str,
        error: type[ChunkmemError],
        again: str,
        tables: tuple[str, ...] = (),
        optional: tuple[str, ...] = (),
    ) -> None:
        """Describe such files.

        Args:
            name: what one is called.
            error: raised for all that is wrong with one.
            again: how one is made again, if it is of an old version.
            tables: those of `TABLES` that its fields need.
            optional: fields that are left out of a file where they have their default. So a field can be added without
                another `VERSION`: a file without it means what it always meant.
        """
        cls._name, cls._error, cls._again, cls._tables, cls._optional = name, error, again, tables, optional

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file. A file that is there is replaced as a whole; no directory is created.

        Raises:
            ChunkmemError: the file cannot be written, or it has a value, such as NaN, that none should have.
        """
        name, values = self._path_name(path), self.to_dict()
        try:
            # That a file cannot be read would otherwise be found out when what it was made from is gone.
            self.from_dict(values)
            replace_file(name, json.dumps(values, separators=(",", ":"), allow_nan=False).encode())
        except self._error as error:
            raise self._refused(f"{name} cannot be written: {error}") from None
        except OSError as error:
            advice = "give the path of a file that can be written"
            if isinstance(error, FileNotFoundError):
                advice = f"create the directory {Path(os.path.realpath(name)).parent} first"
            raise self._refused(f"{name} cannot be written: {error.strerror}; {advice}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return what `save` wrote.

        Raises:
            ChunkmemError: it cannot be read, or is something else, of another version, or damaged; names the file.
        """
        name = cls._path_name(path)
        try:
            return cls.from_dict(cls._parsed(cls._text(name)))
        except RecursionError:
            raise cls._refused(f"{name}: the content is nested too deeply to be a {cls._name}") from None
        except cls._error as error:
            raise cls._refused(f"{name}: {error}") from None

    @classmethod
    def _refused(cls, sentence: str) -> ChunkmemError:
        return cls._error(printable(sentence, breaks=""))

    @classmethod
    def _path_name(cls, path: object) -> str:
        name = os.fsdecode(path) if isinstance(path, str | os.PathLike) else ""
        if not name or "\0" in name:
            raise cls._error(f"{shown(path)} is not the path of a file; give one of a {cls._name}")
        return name

    @classmethod
    def _text(cls, name: str) -> str:
        try:
            content = Path(name).read_bytes()
        except OSError as error:
            raise cls._error(f"cannot be read: {error.strerror}; give the path of a {cls._name}") from None
        if not content.strip():
            raise cls._error(f"the file is empty, so it is no {cls._name}; save it again")
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            if content.startswith(b"{") and error.reason == "unexpected end of data":
                raise cls._truncated() from None
            raise cls._error(f"byte {error.start} is not UTF-8 text, so this is no {cls._name}") from None

    @classmethod
    def _parsed(cls, text: str) -> object:
        try:
            return json.loads(text, object_pairs_hook=with_unique_keys)
        except json.JSONDecodeError as error:
            whole = text.rstrip()
            # An object's last character is its brace; another one ends with what is inside the object.
            if whole.startswith("{") and (not whole.endswith("}") or error.pos >= len(whole)):
                raise cls._truncated() from None
            raise cls._error(f"not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
        except ValueError as error:  # A key given twice, or an integer of more digits than Python reads.
            raise cls._error(str(error)) from None

    @classmethod
    def _truncated(cls) -> ChunkmemError:
        return cls._error(f"the file looks truncated: it ends inside its {cls._name}; save or copy it again")

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-serialisable data; see the module's docstring for the form."""
        tables: Tables = {name: {} for name in self._tables}
        left_out = {key for key in self._optional if getattr(self, key) == getattr(type(self), key)}
        codecs = self._codecs(tables).items()
        values = {key: codec.plain(getattr(self, key)) for key, codec in codecs if key not in left_out}
        contents = {name: TABLES[name].plain(table) for name, table in tables.items()}
        return {"format": self._name, "version": VERSION, **contents, **values}

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Make one from what `to_dict` gave, which is only read.

        Raises:
            ChunkmemError: a key is missing or unknown, or a value is not allowed; says where it is.
        """
        try:
            return cls.read(values)
        except Wrong as wrong:
            where = wrong.path.lstrip(".") or ("this" if isinstance(values, Mapping) else "the content")
            raise cls._error(f"{where} {wrong.sentence}") from None

    def require_sound(self) -> None:
        """Refuse what the types of the fields allow and no file should have.

        Raises:
            ChunkmemError: says what it is.
        """

    @classmethod
    def _codecs(cls, tables: Tables) -> dict[str, Codec]:
        hints = typing.get_type_hints(cls, include_extras=True)
        assert dataclasses.is_dataclass(cls)
        return {field.name: codec_of(hints[field.name], tables) for field in dataclasses.fields(cls)}

    @classmethod
    def read(cls, values: object) -> Self:
        """Make one from what `to_dict` gave; raises `Wrong`, with the path so far."""
        if not isinstance(values, Mapping):
            raise Wrong.needs(values, f"an object: a {cls._name}")
        assert dataclasses.is_dataclass(cls)
        names = (field.name for field in dataclasses.fields(cls))
        cls._require_keys(values, ("format", "version", *cls._tables, *names))
        tables = {name: _at(name, TABLES[name], values) for name in cls._tables}
        codecs = cls._codecs(tables).items()
        found = cls(**{key: _at(key, codec, values) for key, codec in codecs if key in values})
        found.require_sound()
        return found

    @classmethod
    def _require_keys(cls, values: Mapping[Any, Any], needed: Sequence[str]) -> None:
        for key in ("format", "version"):
            if key not in values:
                raise Wrong(f"is missing, which every {cls._name} has").under(f".{key}")
        if values["format"] != cls._name:
            raise Wrong(f'has the format {shown(values["format"])}, but a "{cls._name}" is needed here')
        cls._require_version(values["version"])
        if missing := [key for key in needed if key not in values and key not in cls._optional]:
            raise Wrong(f"is missing, which every {cls._name} has").under(f".{missing[0]}")
        if unknown := [key for key in values if key not in needed]:
            raise Wrong(f"has a key {shown(unknown[0])}, which no {cls._name} has; allowed: {', '.join(needed)}")

    @classmethod
    def _require_version(cls, version: object) -> None:
        sentence = ""
        if isinstance(version, bool) or not isinstance(version, int) or version < 1:
            sentence = f"is {shown(version)}, but must be an integer from 1 to {VERSION}"
        elif version != VERSION:
            only, advice = f"only {VERSION}", cls._again
            if version > VERSION:
                only, advice = f"only up to {VERSION}", "update chunkmem, or save it again with this one"
            sentence = f"of this {cls._name} is {shown(version)}, but this chunkmem reads {only}; {advice}"
        if sentence:
            raise Wrong(sentence).under(".version")


def _at(key: str, codec: Codec, values: Mapping[str, Any]) -> Any:
    try:
        return codec.read(values[key])
    except Wrong as wrong:
        raise wrong.under(f".{key}") from None
