"""How values are written to JSON and read back, as the types of dataclass fields say.

A dataclass or a tuple is a row of its fields, one of several dataclasses a row that begins with its name, a mapping the
rows of its items. Chunk ids and labels are indices into tables, ``chunks`` and ``labels``, of the object around them.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, Self

from chunkmem.schema import BOOL, NULL, Check, either, integer, number, one_of
from chunkmem.sizes import shown
from chunkmem.types import ChunkId, Role


def _parse_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _parse_role(value: object) -> Role:
    if not isinstance(value, str) or not value.isidentifier():
        raise ValueError
    return Role(value)


_TEXT = Check("a string", _parse_text)
_FINITE = number("a finite number", lambda x: True)


class Mark(enum.Enum):
    """What the type of a field does not say."""

    POSITIVE = "positive"
    INTEGER = "integer"
    """Of any sign; an `int` without a mark is 0 or more."""
    SECONDS = "seconds"
    LABEL = "label"
    """A string that many rows share: an index into the table ``labels``."""
    SPEED = "speed"
    """Bytes a second, whose infinity is null in a file."""
    SORTED = "sorted"
    """A mapping that is written in the order of its keys; others keep their own."""
    LEFT_OUT = "left out"
    """A last field that is left out of a row where it is empty, so that it could be added to rows that are in files."""


Positive = Annotated[int, Mark.POSITIVE]
Integer = Annotated[int, Mark.INTEGER]
Seconds = Annotated[float, Mark.SECONDS]
Label = Annotated[str, Mark.LABEL]
Speed = Annotated[float, Mark.SPEED]


class Wrong(Exception):
    """A value is not what its place needs; on its way up it gets its path."""

    def __init__(self, sentence: str) -> None:
        self.path = ""
        self.sentence = sentence

    @classmethod
    def needs(cls, value: object, allowed: str) -> Wrong:
        return cls(f"is {shown(value)}, but must be {allowed}")

    def under(self, part: str) -> Wrong:
        self.path = part + self.path
        return self


class Document(ABC):
    """An object of its own, in a file or as a field of another one."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON-serialisable data."""

    @classmethod
    @abstractmethod
    def read(cls, values: object) -> Self:
        """Make one from what `to_dict` gave.

        Raises:
            Wrong: a key or a value is not allowed.
        """


Tables = dict[str, Any]
"""By name of a table: while writing, indices by item; while reading, its items."""


@dataclass(frozen=True)
class Codec:
    """How values of one type are written and read. Reading raises `Wrong`."""

    plain: Callable[[Any, Tables], Any]
    read: Callable[[Any, Tables], Any]
    allowed: Callable[[Tables], str] = lambda tables: ""
    """What a single value may be, for messages."""


def _checked(check: Check, plain: Callable[[Any], Any] = lambda value: value) -> Codec:
    parse = check.parse

    def read(value: object, tables: Tables) -> Any:
        try:
            return parse(value)
        except ValueError:
            raise Wrong.needs(value, check.allowed) from None

    return Codec(lambda value, tables: plain(value), read, lambda tables: check.allowed)


def _indexed(name: str) -> Codec:
    def plain(value: object, tables: Tables) -> int:
        table: dict[object, int] = tables[name]
        return table.setdefault(value, len(table))

    def allowed(tables: Tables) -> str:
        return f"an index into {name}, which has {len(tables[name])} of them"

    def read(value: object, tables: Tables) -> object:
        items: list[object] = tables[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(items):
            raise Wrong.needs(value, allowed(tables))
        return items[value]

    return Codec(plain, read, allowed)


def _member_of(kind: type[enum.Enum]) -> Codec:
    members = {member.value: member for member in kind}
    names = one_of(*members)
    return _checked(Check(names.allowed, lambda value: members[names.parse(value)]), lambda member: member.value)


def _optional(inner: Codec) -> Codec:
    def read(value: object, tables: Tables) -> Any:
        if value is None:
            return None
        try:
            return inner.read(value, tables)
        except Wrong:
            raise Wrong.needs(value, f"null, or {inner.allowed(tables)}") from None

    return Codec(lambda value, tables: None if value is None else inner.plain(value, tables), read)


def _list_of(item: Codec, make: Callable[[list[Any]], Any], order: Callable[[Any], Iterable[Any]] = iter) -> Codec:
    def read(value: object, tables: Tables) -> Any:
        kept = []
        for index, each in enumerate(_list(value)):
            try:
                kept.append(item.read(each, tables))
            except Wrong as wrong:
                raise wrong.under(f"[{index}]") from None
        return make(kept)

    return Codec(lambda value, tables: [item.plain(each, tables) for each in order(value)], read)


def _list(value: object, *, length: int | None = None) -> list[Any]:
    if not isinstance(value, list):
        raise Wrong.needs(value, "a list")
    if length is not None and len(value) != length:
        raise Wrong.needs(value, f"a list of {length} values")
    return value


@dataclass(frozen=True)
class _Row:
    """Values that are laid out one after the other: the fields of a dataclass or tuple, or a single value."""

    columns: Sequence[Codec]
    split: Callable[[Any], Iterable[Any]]
    join: Callable[..., Any]
    may_lack_last: bool = False
    """See `Mark.LEFT_OUT`."""

    def plain(self, value: Any, tables: Tables) -> list[Any]:
        values = list(self.split(value))
        if self.may_lack_last and not values[-1]:
            values.pop()
        return [codec.plain(each, tables) for codec, each in zip(self.columns, values, strict=False)]

    def read(self, row: Sequence[Any], tables: Tables, *, first: int = 0) -> Any:
        kept: list[Any] = []
        columns = self.columns[:-1] if self.may_lack_last and len(row) - first < len(self.columns) else self.columns
        try:
            for position, codec in enumerate(columns, first):
                kept.append(codec.read(row[position], tables))
        except Wrong as wrong:
            raise wrong.under(f"[{first + len(kept)}]") from None
        return self.join(*kept)


def _row_of(hint: Any) -> _Row | None:
    """Return how a dataclass, a NamedTuple or a tuple of fixed length is laid out; None for what is no row."""
    if dataclasses.is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, tuple)):
        hints = typing.get_type_hints(hint, include_extras=True)
        columns = [codec_of(each) for each in hints.values()]
        make: Any = hint
        *_, last = hints.values()
        may_lack_last = Mark.LEFT_OUT in typing.get_args(last)
        return _Row(columns, lambda value: [getattr(value, name) for name in hints], make, may_lack_last)
    if typing.get_origin(hint) is tuple and ... not in typing.get_args(hint):
        return _Row([codec_of(each) for each in typing.get_args(hint)], lambda value: value, lambda *values: values)
    return None


def _columns_of(hint: Any) -> _Row:
    """Return how a key or a value of a mapping is laid out."""
    row = None if hint is ChunkId else _row_of(hint)
    return row or _Row([codec_of(hint)], lambda value: (value,), lambda value: value)


def _row_codec(row: _Row) -> Codec:
    length = len(row.columns)

    def read(value: object, tables: Tables) -> Any:
        has_last = isinstance(value, list) and len(value) == length
        return row.read(_list(value, length=length - (row.may_lack_last and not has_last)), tables)

    return Codec(row.plain, read)


def _one_of_several(kinds: Sequence[type]) -> Codec:
    rows = {kind.__name__.lower(): row for kind in kinds if (row := _row_of(kind)) is not None}
    names = one_of(*rows)

    def plain(value: object, tables: Tables) -> list[Any]:
        name = type(value).__name__.lower()
        return [name, *rows[name].plain(value, tables)]

    def read(value: object, tables: Tables) -> Any:
        values = _list(value)
        name = values[0] if values else None
        try:
            row = rows[str(names.parse(name))]
        except ValueError:
            raise Wrong.needs(name, names.allowed).under("[0]") from None
        return row.read(_list(values, length=1 + len(row.columns)), tables, first=1)

    return Codec(plain, read)


def _mapping_of(key: _Row, value: _Row, *, is_sorted: bool) -> Codec:
    width, length = len(key.columns), len(key.columns) + len(value.columns)

    def plain(items: Mapping[Any, Any], tables: Tables) -> list[Any]:
        keys = sorted(items, key=_order) if is_sorted else items
        return [[*key.plain(each, tables), *value.plain(items[each], tables)] for each in keys]

    def read(rows: object, tables: Tables) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for index, row in enumerate(_list(rows)):
            try:
                each = key.read(_list(row, length=length), tables)
                content = value.read(row, tables, first=width)
            except Wrong as wrong:
                raise wrong.under(f"[{index}]") from None
            if each in found:
                raise Wrong(f"is {shown(row)}, but an earlier row is for the same").under(f"[{index}]")
            found[each] = content
        return found

    return Codec(plain, read)


def _set_of(item: Codec) -> Codec:
    # A set has no order of its own.
    return _all_different(_list_of(item, list, lambda value: sorted(value, key=_order)), frozenset)


def _all_different(items: Codec, make: Callable[[list[Any]], Any]) -> Codec:
    def read(value: Any, tables: Tables) -> Any:
        found = items.read(value, tables)
        if len(set(found)) < len(found):
            index = next(at for at, each in enumerate(found) if each in found[:at])
            raise Wrong(f"is {shown(value[index])}, but an earlier row is for the same").under(f"[{index}]")
        return make(found)

    return dataclasses.replace(items, read=read)


def _order(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return [_order(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple):
        return [_order(each) for each in value]
    return value.value if isinstance(value, enum.Enum) else value


_PLAIN = {
    str: _checked(_TEXT),
    int: _checked(integer(0)),
    float: _checked(_FINITE),
    bool: _checked(BOOL),
    Role: _checked(Check("the name of a role", _parse_role), str),
}
_MARKED = {
    Mark.POSITIVE: _checked(integer(1)),
    Mark.INTEGER: _checked(integer(-(2**63))),
    Mark.SECONDS: _checked(number("a finite number of seconds, 0 or more", lambda x: x >= 0)),
    Mark.LABEL: _indexed("labels"),
    Mark.SPEED: _checked(
        either(
            Check(NULL.allowed, lambda value: inf if NULL.parse(value) is None else value),
            Check(f"{_FINITE.allowed} of bytes a second", _FINITE.parse),
        ),
        lambda value: None if value == inf else value,
    ),
}
TABLES: Mapping[str, Any] = types.MappingProxyType({"chunks": ChunkId, "labels": str})
"""What is in the tables of an object."""


def codec_of(hint: Any) -> Codec:
    """Return how values of a type are written and read.

    Raises:
        TypeError: no rule here is for that type.
    """
    mark: object = None
    if typing.get_origin(hint) is Annotated:
        hint, mark = typing.get_args(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(mark, Mark) and mark in _MARKED:
        return _MARKED[mark]
    if hint is ChunkId:
        return _indexed("chunks")
    if hint in _PLAIN:
        return _PLAIN[hint]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _member_of(hint)
    if isinstance(hint, type) and issubclass(hint, Document):
        return Codec(lambda value, tables: value.to_dict(), lambda value, tables: hint.read(value))
    if origin is types.UnionType:
        kinds = [each for each in args if each is not types.NoneType]
        inner = codec_of(kinds[0]) if len(kinds) == 1 else _one_of_several(kinds)
        return inner if len(kinds) == len(args) else _optional(inner)
    if (row := _row_of(hint)) is not None:
        return _row_codec(row)
    if origin is tuple:
        return _list_of(codec_of(args[0]), tuple)
    if origin is frozenset:
        return _set_of(codec_of(args[0]))
    if origin is Mapping:
        return _mapping_of(*map(_columns_of, args), is_sorted=mark is Mark.SORTED)
    raise TypeError(f"{hint} has no form in a file")


def table_of(name: str) -> Codec:
    """Return how a table is written and read: a list whose items all differ."""
    row = _row_of(TABLES[name])
    return _all_different(_list_of(codec_of(TABLES[name]) if row is None else _row_codec(row), list), list)
