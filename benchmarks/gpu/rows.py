"""What a part has found so far: a row for each thing measured, on disk as soon as it is known."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, Self

MAX_TRIES = 2
"""How often a row is begun whose time, or whose call, ends before it does."""


class StoreError(Exception):
    """A file of rows cannot be used: it is damaged, or of another machine."""


class NotHereError(Exception):
    """A row needs what this machine does not have; the message is the row's."""


class NoRoomError(Exception):
    """It is known beforehand that the memory does not suffice; the message is the row's."""


class Reason(Enum):
    """Why a row has no figures."""

    MISSING = "missing"
    """What it needs is not here: a GPU, a library, room on disk."""
    NO_ROOM = "no room"
    """It ran out of the memory it was given. For a ladder of sizes this is the answer."""
    TIME = "time"
    """It was ended at the limit of a row."""
    CUT = "cut"
    """The call ended, or was killed, while it ran. The next call tries it again, once."""
    FAILED = "failed"
    """Anything else; the log says what."""


@dataclass(frozen=True)
class Row:
    """One thing that was measured, or why it was not."""

    key: str
    figures: Mapping[str, Any] | None = None
    why_not: str | None = None
    reason: Reason | None = None
    wall_s: float = 0.0
    """All of it: starting a process, building, warming up."""
    at: str = ""
    """When, in UTC."""
    tries: int = 1

    def __post_init__(self) -> None:
        if (self.figures is None) == (self.why_not is None) or (self.why_not is None) != (self.reason is None):
            raise ValueError(f"row {self.key}: either figures, or why not and a reason")

    @property
    def is_final(self) -> bool:
        """It is not begun again unless that is asked for."""
        return self.reason is not Reason.CUT or self.tries >= MAX_TRIES

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, without its key."""
        told = {"wall_s": round(self.wall_s, 2), "at": self.at, **({"tries": self.tries} if self.tries > 1 else {})}
        if self.reason is None:
            return {"figures": dict(self.figures or {}), **told}
        return {"why_not": self.why_not, "reason": self.reason.value, **told}

    @classmethod
    def from_dict(cls, key: str, values: Mapping[str, Any]) -> Self:
        """Make a row of what `to_dict` returned."""
        reason = Reason(values["reason"]) if "reason" in values else None
        told = values["wall_s"], values["at"], values.get("tries", 1)
        return cls(key, values.get("figures"), values.get("why_not"), reason, *told)


class Store:
    """The rows of one part in a file, which is whole and valid at any time.

    Args:
        path: the file; its folder exists.
        machine: what rows of one file have in common. Those of another machine are not mixed in.
        told: what else belongs beside them, such as versions; the latest run's is kept.
        saved: called whenever the file has been written.

    Raises:
        StoreError: the file is not one of these, or of another machine.
    """

    def __init__(
        self,
        path: Path,
        *,
        machine: Mapping[str, Any],
        told: Mapping[str, Any],
        saved: Callable[[], object] = lambda: None,
    ) -> None:
        self.path = path
        self._saved = saved
        self._head: dict[str, Any] = {"machine": dict(machine), **told}
        self._rows: dict[str, Row] = {}
        if path.exists():
            saved = read(path)
            if saved["machine"] != self._head["machine"]:
                raise StoreError(
                    f"{path} has rows of {_shown(saved['machine'])}, and this is {_shown(machine)}: "
                    "name another --out or --archive, or move the file away"
                )
            self._rows = {key: Row.from_dict(key, values) for key, values in saved["rows"].items()}

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[Row]:
        return iter(list(self._rows.values()))

    def get(self, key: str) -> Row | None:
        """Return a row; None if there is none yet."""
        return self._rows.get(key)

    def figures(self, key: str) -> Mapping[str, Any] | None:
        """Return a row's figures; None if it has none, or is not there."""
        row = self._rows.get(key)
        return None if row is None else row.figures

    def put(self, row: Row) -> None:
        """Add or replace a row, and write the file again."""
        self._rows[row.key] = row
        self.save()

    def remove(self, key: str) -> None:
        """Forget a row, and write the file again."""
        self._rows.pop(key, None)
        self.save()

    def leave(self, keys: list[str]) -> None:
        """Note which rows there was no time for, and write the file again."""
        self._head["left"] = list(keys)
        self.save()

    def save(self) -> None:
        """Write the file, as a whole."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"
        with replacing(self.path) as file:
            file.write(text.encode())
        self._saved()

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {**self._head, "rows": {row.key: row.to_dict() for row in self}}


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path` when the block ends: a reader or a kill never sees half of one."""
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def read(path: Path) -> dict[str, Any]:
    """Return the content of a file of rows as plain data.

    Raises:
        StoreError: it cannot be read or is something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for key, values in content["rows"].items():
            Row.from_dict(key, values)
        dict(content["machine"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} is no file of rows ({type(error).__name__}: {error}); move it away") from None
    return dict(content)


def _shown(machine: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in machine.items())
