"""How values are written to JSON and read back, as the types of dataclass fields say.

A dataclass or a tuple is a row of its fields, one of several dataclasses a row that begins with its name, a mapping the
rows of its items. Chunk ids and labels are indices into tables, ``chunks`` and ``labels``, of the object around them.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Annotated, Any

from chunkmem.data.schema import BOOL, NULL, Check, either, integer, number, one_of
from chunkmem.data.sizes import shown
from chunkmem.data.types import ChunkId, Role


def _parse_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _parse_role(value: object) -> Role:
    if not isinstance(value, str) or not value.isidentifier():
        raise ValueError
    return Role(value)


class Mark(enum.Enum):
    """What the type of a field does not say."""

    SORTED = "sorted"
    """A mapping that is written in the order of its keys; others keep their own."""
    LEFT_OUT = "left out"
    """A last field that is left out of a row where it is empty, so that it could be added to rows that are in files."""


class Wrong(Exception):
    """A value is not what its place needs; on its way up it gets its path."""

    def __init__(self, sentence: str, *, allowed: str = "") -> None:
        self.path = ""
        self.sentence = sentence
        self.allowed = allowed
        """The allowed values, if that is all there is to say."""

    @classmethod
    def needs(cls, value: object, allowed: str) -> Wrong:
        return cls(f"is {shown(value)}, but must be {allowed}", allowed=allowed)

    def under(self, part: str) -> Wrong:
        self.path = part + self.path
        return self


Tables = Mapping[str, Any]
"""By name of a table of one document: while writing, indices by item; while reading, its items."""


@dataclass(frozen=True)
class Codec:
    """How values of one type are written and read. Reading raises `Wrong`."""

    plain: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _checked(check: Check, plain: Callable[[Any], Any] = _same) -> Codec:
    parse = check.parse

    def read(value: object) -> Any:
        try:
            return parse(value)
        except ValueError:
            raise Wrong.needs(value, check.allowed) from None

    return Codec(plain, read)


def _indexed(name: str, table: Any) -> Codec:
    def read(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(table):
            raise Wrong.needs(value, f"an index into {name}, which has {len(table)} of them")
        return table[value]

    return Codec(lambda value: table.setdefault(value, len(table)), read)


_FINITE = number("a finite number", lambda x: True)
Positive = Annotated[int, _checked(integer(1))]
Integer = Annotated[int, _checked(integer(-(2**63)))]
"""An `int` of any sign; an `int` alone is 0 or more."""
Seconds = Annotated[float, _checked(number("a finite number of seconds, 0 or more", lambda x: x >= 0))]
Rate = Annotated[float, _checked(number("a finite number above 0", lambda x: x > 0))]
Label = Annotated[str, "labels"]
"""A string that many rows share: an index into the table of that name."""
Speed = Annotated[
    float,
    _checked(
        either(
            Check(NULL.allowed, lambda value: inf if NULL.parse(value) is None else value),
            Check(f"{_FINITE.allowed} of bytes a second", _FINITE.parse),
        ),
        lambda value: None if value == inf else value,
    ),
]
"""Bytes a second, whose infinity is null in a file."""


def _member_of(kind: type[enum.Enum]) -> Codec:
    members = {member.value: member for member in kind}
    names = _checked(one_of(*members))
    return Codec(lambda member: member.value, lambda value: members[names.read(value)])


def _optional(inner: Codec) -> Codec:
    def read(value: object) -> Any:
        if value is None:
            return None
        try:
            return inner.read(value)
        except Wrong as wrong:
            if wrong.path or not wrong.allowed:
                raise
            raise Wrong.needs(value, f"null, or {wrong.allowed}") from None

    return Codec(lambda value: None if value is None else inner.plain(value), read)


def _list_of(
    item: Codec,
    make: Callable[[list[Any]], Any],
    *,
    order: Callable[[Any], Iterable[Any]] = iter,
    key: Callable[[Any], object] | None = None,
) -> Codec:
    """Return how a list is written, in an `order`, and what is made of it is read; no two may have the same `key`."""

    def read(value: object) -> Any:
        kept, first = list[Any](), dict[object, int]()
        for index, each in enumerate(_list(value)):
            try:
                kept.append(item.read(each))
                if key is not None and first.setdefault(key(kept[-1]), index) != index:
                    raise Wrong(f"is {shown(each)}, but an earlier row is for the same")
            except Wrong as wrong:
                raise wrong.under(f"[{index}]") from None
        return make(kept)

    return Codec(lambda value: [item.plain(each) for each in order(value)], read)


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
    split: Callable[[Any], Sequence[Any]]
    join: Callable[..., Any]
    may_lack_last: bool = False
    """See `Mark.LEFT_OUT`."""

    @property
    def codec(self) -> Codec:
        return Codec(self._plain, self._read)

    def _plain(self, value: Any) -> list[Any]:
        values = self.split(value)
        columns = self.columns[:-1] if self.may_lack_last and not values[-1] else self.columns
        return [codec.plain(each) for codec, each in zip(columns, values, strict=False)]

    def _read(self, value: object) -> Any:
        length, kept = len(self.columns), list[Any]()
        if self.may_lack_last and not (isinstance(value, list) and len(value) == length):
            length -= 1
        row = _list(value, length=length)
        try:
            for codec, each in zip(self.columns, row, strict=False):
                kept.append(codec.read(each))
        except Wrong as wrong:
            raise wrong.under(f"[{len(kept)}]") from None
        return self.join(*kept)


def _fields_of(kind: Any, tables: Tables) -> _Row:
    """Return how a dataclass or a NamedTuple is laid out."""
    hints = typing.get_type_hints(kind, include_extras=True)
    columns = [codec_of(each, tables) for each in hints.values()]
    *_, last = hints.values()
    may_lack_last = Mark.LEFT_OUT in typing.get_args(last)
    return _Row(columns, lambda value: [getattr(value, name) for name in hints], kind, may_lack_last)


def _row_of(hint: Any, tables: Tables) -> _Row | None:
    """Return how a dataclass, a NamedTuple or a tuple of fixed length is laid out; None for what is no row."""
    if dataclasses.is_dataclass(hint) or (isinstance(hint, type) and issubclass(hint, tuple)):
        return _fields_of(hint, tables)
    if typing.get_origin(hint) is tuple and ... not in typing.get_args(hint):
        return _Row([codec_of(each, tables) for each in typing.get_args(hint)], _same, lambda *values: values)
    return None


def _columns_of(hint: Any, tables: Tables) -> _Row:
    """Return how a key or a value of a mapping is laid out."""
    row = None if hint is ChunkId else _row_of(hint, tables)
    return row or _Row([codec_of(hint, tables)], lambda value: (value,), _same)


def _one_of_several(kinds: Sequence[type], tables: Tables) -> Codec:
    names = _checked(one_of(*(kind.__name__.lower() for kind in kinds)))

    def named(kind: type) -> Codec:
        row, name = _fields_of(kind, tables), kind.__name__.lower()
        columns = [names, *row.columns]
        return _Row(columns, lambda value: [name, *row.split(value)], lambda _, *cells: row.join(*cells)).codec

    rows = {kind.__name__.lower(): named(kind) for kind in kinds}

    def read(value: object) -> Any:
        name, *_ = _list(value) or [None]
        try:
            row = rows[names.read(name)]
        except Wrong as wrong:
            raise wrong.under("[0]") from None
        return row.read(value)

    return Codec(lambda value: rows[type(value).__name__.lower()].plain(value), read)


def _mapping_of(key: _Row, value: _Row, *, is_sorted: bool) -> Codec:
    width = len(key.columns)
    row = _Row(
        [*key.columns, *value.columns],
        lambda item: [*key.split(item[0]), *value.split(item[1])],
        lambda *cells: (key.join(*cells[:width]), value.join(*cells[width:])),
    )

    def order(items: Mapping[Any, Any]) -> Iterable[Any]:
        return sorted(items.items(), key=lambda item: _order(item[0])) if is_sorted else items.items()

    return _list_of(row.codec, dict, order=order, key=lambda item: item[0])


def _order(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return [_order(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple):
        return [_order(each) for each in value]
    return value.value if isinstance(value, enum.Enum) else value


_PLAIN = {
    str: _checked(Check("a string", _parse_text)),
    int: _checked(integer(0)),
    float: _checked(_FINITE),
    bool: _checked(BOOL),
    Role: _checked(Check("the name of a role", _parse_role), str),
}


def codec_of(hint: Any, tables: Tables) -> Codec:
    """Return how values of a type are written and read, in a document with these tables.

    Raises:
        TypeError: no rule here is for that type.
    """
    mark: object = None
    if typing.get_origin(hint) is Annotated:
        hint, mark = typing.get_args(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(mark, Codec):
        return mark
    if (name := "chunks" if hint is ChunkId else mark) in tables:
        return _indexed(str(name), tables[str(name)])
    if hint in _PLAIN:
        return _PLAIN[hint]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _member_of(hint)
    if hasattr(hint, "to_dict"):  # an object of its own: see `chunkmem.data.json_files`
        return Codec(hint.to_dict, hint.read)
    if origin is types.UnionType:
        kinds = [each for each in args if each is not types.NoneType]
        inner = codec_of(kinds[0], tables) if len(kinds) == 1 else _one_of_several(kinds, tables)
        return inner if len(kinds) == len(args) else _optional(inner)
    if (row := _row_of(hint, tables)) is not None:
        return row.codec
    if origin is tuple:
        return _list_of(codec_of(args[0], tables), tuple)
    if origin is frozenset:  # it has no order of its own
        return _list_of(codec_of(args[0], tables), frozenset, order=lambda value: sorted(value, key=_order), key=_same)
    if origin is Mapping:
        return _mapping_of(*(_columns_of(each, tables) for each in args), is_sorted=mark is Mark.SORTED)
    raise TypeError(f"{hint} has no form in a file")


TABLES: Mapping[str, Codec] = types.MappingProxyType(
    {
        "chunks": _list_of(_fields_of(ChunkId, {}).codec, list, key=_same),
        "labels": _list_of(_PLAIN[str], list, key=_same),
    }
)
"""How the tables of an object are written and read."""
