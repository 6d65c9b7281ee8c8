"""`chunkmem config`: every key of the configuration, or what a file of yours sets."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from chunkmem.cli.answer import CommandResult
from chunkmem.cli.machine import parse_size
from chunkmem.config import Config, flattened
from chunkmem.contrib.deepspeed.convert import convert
from chunkmem.data.errors import ConfigError
from chunkmem.data.schema import Section, read_json

NAME = "config"
SUMMARY = "all keys of the configuration, or a check of a file"
DESCRIPTION = """\
Show every key of the configuration: its default, what it takes, what it does. Given a file, check it, and show what it
sets to something else than the default.

  chunkmem config
  chunkmem config chunkmem.json
  chunkmem config --schema > chunkmem.schema.json     # a JSON Schema, for editors
  chunkmem config --markdown > configuration.md       # the same as docs/configuration.md
  chunkmem config --from ds_config.json --out chunkmem.json

--from prints what a configuration of DeepSpeed is here, with one line on each of its keys. What it offloads to NVMe
needs a cap in bytes here, of each process: --disk-capacity."""
_WIDTH = 100
Sections = Mapping[type[Section], list[dict[str, Any]]]
"""Keys by section, as `--json` prints them."""
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TITLE = """\
# Configuration

Keys of `Config.from_json(path)` and `Config.from_dict(values)`, each with its default. A dot stands for an object in an
object: `memory.device` is `{"memory": {"device": ...}}`. [tuning.md](tuning.md) tells how to choose values.

`chunkmem config` prints this reference, `chunkmem config FILE` checks a file, `chunkmem config --schema` prints a JSON
Schema for editors.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", type=Path, nargs="?", help="a configuration in JSON to check")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--schema", action="store_true", help="print a JSON Schema")
    kind.add_argument("--markdown", action="store_true", help="print the page of the documentation")
    kind.add_argument("--from", dest="source", metavar="DS_CONFIG.json", type=Path, help="convert one of DeepSpeed")
    parser.add_argument("--out", metavar="CHUNKMEM.json", type=Path, help="write what --from makes here")
    parser.add_argument("--disk-capacity", metavar="SIZE", help='cap on the disk that it offloads to, such as "1TB"')


def run(options: argparse.Namespace) -> CommandResult:
    """Answer with all keys, or with those that a file sets."""
    if options.file is not None and (options.schema or options.markdown):
        raise ConfigError("--schema and --markdown describe every configuration: leave out the file")
    if options.file is not None and options.source is not None:
        raise ConfigError("--from converts another file: give one of the two")
    if options.source is None and (options.out is not None or options.disk_capacity is not None):
        raise ConfigError("--out and --disk-capacity are about --from; give that, too")
    if options.source is not None:
        return _converted(options.source, options.out, options.disk_capacity)
    if options.schema:
        schema = {"$schema": _DIALECT, "title": "chunkmem", **Config.json_schema()}
        return CommandResult(schema, json.dumps(schema, indent=2))
    if options.file is not None:
        return _checked(options.file)
    sections = dict(_sections(Config))
    text = _markdown(sections) if options.markdown else _text(sections)
    return CommandResult({"keys": [key for keys in sections.values() for key in keys]}, text)


def _sections(section: type[Section]) -> Iterator[tuple[type[Section], list[dict[str, Any]]]]:
    """Yield a section with what is told of its own keys, then the sections in it."""
    keys: list[dict[str, Any]] = []
    inner: list[type[Section]] = []
    types = get_type_hints(section)
    for each in dataclasses.fields(section):
        found = [kind for kind in (types[each.name], *get_args(types[each.name])) if _is_section(kind)]
        inner += found
        if not found or each.default is None:
            is_required = each.default is dataclasses.MISSING
            keys.append({
                "key": section.key_path(each.name), "default": None if is_required else each.default,
                "is_required": is_required, "allowed": each.metadata["check"].allowed, "about": each.metadata["about"],
            })  # fmt: skip
    if keys:
        yield section, keys
    for each_section in inner:
        yield from _sections(each_section)


def _purpose(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split("\n\n")[0].split())


def _default(key: Mapping[str, Any]) -> str:
    return "required" if key["is_required"] else json.dumps(key["default"])


def _is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _checked(file: Path) -> CommandResult:
    config = Config.from_json(file)
    defaults = flattened(Config().to_dict())
    found = {path: value for path, value in flattened(config.to_dict()).items() if defaults.get(path) != value}
    data = {"file": str(file), "set": found}
    lines = [f"{path} = {json.dumps(value)}" for path, value in found.items()] or ["every key has its default"]
    return CommandResult(data, "\n".join(lines))


def _converted(source: Path, target: Path | None, disk_capacity: str | None) -> CommandResult:
    from chunkmem.report.files import write_whole

    if disk_capacity is not None:
        parse_size("--disk-capacity", disk_capacity)
    try:
        found = convert(read_json(source), disk_capacity=disk_capacity)
        Config.from_dict(found.values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    notes = [{"key": note.key, "outcome": note.outcome.value, "text": note.text} for note in found.notes]
    content = json.dumps(found.values, indent=2)
    data = {"from": str(source), "config": found.values, "notes": notes, "out": None if target is None else str(target)}
    lines = [str(note) for note in found.notes]
    if target is None:
        lines += ["", content]
    else:
        write_whole(target, f"{content}\n".encode())
        lines += ["", f"written to {target}"]
    return CommandResult(data, "\n".join(lines))


def _text(sections: Sections) -> str:
    blocks = []
    for section, keys in sections.items():
        name = section.section_path
        lines = [f"{name}: {_purpose(section)}" if name else "top level"]
        for key in keys:
            lines.append(f"  {key['key']} = {_default(key)}")
            told = textwrap.wrap(f"{key['about']} Takes {key['allowed']}.", _WIDTH, break_on_hyphens=False)
            lines += [f"      {line}" for line in told]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _markdown(sections: Sections) -> str:
    parts = [_TITLE]
    for section, keys in sections.items():
        name = section.section_path
        heading = f"## `{name}`\n\n{_purpose(section)}\n\n" if name else ""
        rows = [f"| `{key['key']}` | `{_default(key)}` | {key['allowed']} | {key['about']} |" for key in keys]
        parts.append("\n".join([f"{heading}| key | default | takes | |", "|---|---|---|---|", *rows, ""]))
    return "\n".join(parts).rstrip("\n")
