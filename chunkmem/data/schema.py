"""Plain JSON-like data to frozen sections: a check for every field, and errors that name the key path."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self

from chunkmem.data.errors import ConfigError
from chunkmem.data.sizes import parse_nbytes, shown


@dataclass(frozen=True)
class Check:
    """What one field takes."""

    allowed: str
    """Says so in an error, after "must be"."""
    parse: Callable[[Any], object]
    """Returns the value in the form it is kept in; raises ValueError. Takes its own results unchanged."""
    schema: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What it takes, in the words of JSON Schema; empty: anything that `parse` does."""

    def __call__(self, path: str, value: object) -> object:
        """Return `value` in the form it is kept in; a `ConfigError` names `path`."""
        try:
            return self.parse(value)
        except ValueError:
            raise ConfigError(f"{path} is {shown(value)}, but must be {self.allowed}") from None


def number(allowed: str, accepts: Callable[[float], bool], **limits: float) -> Check:
    """Check for a finite float that `accepts`. Integers are taken and become floats; booleans are not numbers.

    `limits` say the same in the words of JSON Schema, such as ``exclusiveMinimum=0``.
    """

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError
        try:
            result = float(value)
        except OverflowError:
            raise ValueError from None
        if not math.isfinite(result) or not accepts(result):
            raise ValueError
        return result

    return Check(allowed, parse, {"type": "number", **limits})


def integer(low: int, high: int = 2**63 - 1) -> Check:
    """Check for an int in ``[low, high]``. Booleans and floats are not integers."""

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError
        return int(value)

    upper = "2**63 - 1" if high == 2**63 - 1 else str(high)
    return Check(f"an integer from {low} to {upper}", parse, {"type": "integer", "minimum": low, "maximum": high})


def whole(low: int, high: int = 2**63 - 1) -> Check:
    """Check for an int, as `integer`, or a float without a fraction, which argparse makes with ``type=float``."""
    check = integer(low, high)

    def parse(value: object) -> object:
        return check.parse(int(value) if isinstance(value, float) and value.is_integer() else value)

    return dataclasses.replace(check, parse=parse)


def one_of(*names: str) -> Check:
    """Check for one of some strings."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError
        return value

    quoted = [f'"{name}"' for name in names]
    return Check(" or ".join(filter(None, (", ".join(quoted[:-1]), quoted[-1]))), parse, {"enum": list(names)})


def pair_of(check: Check) -> Check:
    """Check for a list or tuple of two values; kept as a tuple."""

    def parse(value: object) -> tuple[object, object]:
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise ValueError
        return check.parse(value[0]), check.parse(value[1])

    schema = {"type": "array", "items": check.schema, "minItems": 2, "maxItems": 2}
    return Check(f"two values, each {check.allowed}", parse, schema)


def either(first: Check, second: Check) -> Check:
    """Check for what one of two checks takes."""

    def parse(value: object) -> object:
        try:
            return first.parse(value)
        except ValueError:
            return second.parse(value)

    return Check(f"{first.allowed}, or {second.allowed}", parse, {"anyOf": [first.schema, second.schema]})


def _parse_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _parse_null(value: object) -> None:
    if value is not None:
        raise ValueError


def _parse_capacity(value: Any) -> int:
    try:
        nbytes = parse_nbytes(value)
    except ConfigError:
        raise ValueError from None
    if nbytes == 0:
        raise ValueError
    return nbytes


def _parse_path(value: object) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text:
        raise ValueError
    return text


BOOL = Check("true or false", _parse_bool, {"type": "boolean"})
NULL = Check("null", _parse_null, {"type": "null"})
CAPACITY = Check(
    'a size in bytes above 0, such as 4096, "512MiB", "1.5GiB" or "200GB"',
    _parse_capacity,
    {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 2**63 - 1}, {"type": "string", "minLength": 1}]},
)
PATH = Check("a path as a non-empty string", _parse_path, {"type": "string", "minLength": 1})


def option(check: Check, default: object = dataclasses.MISSING, *, about: str = "") -> Any:
    """Declare a field of a `Section`, and what it is `about`; without a default the key must be given."""
    return dataclasses.field(default=default, metadata={"check": check, "about": about})


def subsection(section: type[Section]) -> Check:
    """Check for a nested section: an instance of it, or a mapping of its keys."""

    def parse(value: object) -> Section:
        if isinstance(value, section):
            return value
        if isinstance(value, Mapping):
            return section.from_dict(value)
        raise ValueError

    return Check(f"an object with the keys {', '.join(section.checks())}", parse, section.json_schema())


@dataclass(frozen=True)
class Section:
    """A part of a configuration: a frozen dataclass of `option` fields, checked however it is made.

    A subclass says where it sits (`at`, a dotted path, "" for the root) and which other spellings of its keys are read
    (`aliases`): ``class OptsConfig(Section, at="client.opts")``.
    """

    section_path: ClassVar[str] = ""
    section_aliases: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init_subclass__(cls, *, at: str = "", aliases: Mapping[str, str] = MappingProxyType({})) -> None:
        cls.section_path = at
        cls.section_aliases = aliases

    def __post_init__(self) -> None:
        for name, check in self.checks().items():
            object.__setattr__(self, name, check(self.key_path(name), getattr(self, name)))

    @classmethod
    def checks(cls) -> dict[str, Check]:
        """Return the check of every key, in the order declared."""
        return {field.name: field.metadata["check"] for field in dataclasses.fields(cls)}

    @classmethod
    def key_path(cls, key: object) -> str:
        """Return the dotted path of a key of this section."""
        return f"{cls.section_path}.{key}" if cls.section_path else str(key)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make the section from plain data, which is only read.

        Raises:
            ConfigError: a key is unknown, missing, given twice with different values, or its value is not allowed.
        """
        if not isinstance(values, Mapping):
            name = cls.section_path or "the configuration"
            raise ConfigError(f"{name} is {shown(values)}, but must be an object with keys")
        checks = cls.checks()
        given: dict[str, Any] = {}
        spelled: dict[str, object] = {}
        for key, value in values.items():
            name = cls.section_aliases.get(key, key)
            if name not in checks:
                raise cls._unknown(key, value)
            parsed = checks[name](cls.key_path(key), value)
            if name in given and given[name] != parsed:
                raise ConfigError(
                    f"{cls.key_path(key)} is {shown(parsed)}, but {cls.key_path(spelled[name])}, another spelling of "
                    f"it, is {shown(given[name])}; give only one of them"
                )
            given[name], spelled[name] = parsed, key
        for field in dataclasses.fields(cls):
            if field.name not in given and field.default is dataclasses.MISSING:
                raise ConfigError(f"{cls.key_path(field.name)} is missing, it must be {checks[field.name].allowed}")
        make: Callable[..., Self] = cls
        return make(**given)

    def to_dict(self) -> dict[str, Any]:
        """Return the section as JSON-serialisable data that `from_dict` reads back."""
        return {name: _plain(getattr(self, name)) for name in self.checks()}

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return what `from_dict` takes as a JSON Schema, with defaults and descriptions."""
        properties: dict[str, Any] = {}
        for each in dataclasses.fields(cls):
            properties[each.name] = dict(each.metadata["check"].schema)
            if each.metadata["about"]:
                properties[each.name]["description"] = each.metadata["about"]
            if each.default is not dataclasses.MISSING and not isinstance(each.default, Section):
                properties[each.name]["default"] = _plain(each.default)
        for alias, name in cls.section_aliases.items():
            properties[alias] = {**properties[name], "deprecated": True}
        required = [each.name for each in dataclasses.fields(cls) if each.default is dataclasses.MISSING]
        return {
            "type": "object",
            "description": " ".join((cls.__doc__ or "").split()),
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    @classmethod
    def _unknown(cls, key: object, value: object) -> ConfigError:
        known = list(cls.checks())
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = f" (did you mean {cls.key_path(near[0])}?)" if near else ""
        where = f"in {cls.section_path}" if cls.section_path else "at the top level"
        return ConfigError(
            f"{cls.key_path(key)}, set to {shown(value)}, is not a known key{hint}; allowed {where}: {', '.join(known)}"
        )


def _plain(value: object) -> object:
    if isinstance(value, Section):
        return value.to_dict()
    return list(value) if isinstance(value, tuple) else value


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the content of a JSON file in UTF-8.

    Raises:
        ConfigError: it cannot be read, or is not JSON, or an object in it has a key twice; the message names the file.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"{shown(path)} is not the path of a JSON file")
    name = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text (byte {error.start} does not fit); save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(f"{shown(name)} is not the path of a JSON file") from None
    if not text.strip():
        raise ConfigError(f"{name} is empty; a configuration of defaults is written {{}}")
    try:
        return json.loads(text, object_pairs_hook=with_unique_keys)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply to be a configuration") from None
    except ValueError as error:  # A key given twice, or an integer of more digits than Python reads.
        raise ConfigError(f"{name} cannot be used: {error}") from None


def with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, as its ``object_pairs_hook``.

    Raises:
        ValueError: it has a key twice; names the key.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shown(twice)} is given twice in one object")
    return values
