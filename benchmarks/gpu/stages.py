"""Part after part within a number of seconds, again and again until all is there; and what to read at the end of each.

[Note: Short calls] A rented machine is often bare, ends a command after some minutes, and shows the end of what it has
printed. So the stages are called again until they are through: the seconds of each are those of all calls together, a
row that was found is kept, and the digest at the end of a call is all there is to read.
"""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any

from benchmarks.gpu import rows as saved
from benchmarks.gpu.harness import Choice, carry_out, log_of
from benchmarks.gpu.rows import Reason, Row, Store
from benchmarks.gpu.setting import Setting

DIGEST_CHARS = 11_500
LOG_LINES, LOG_CHARS = 12, 160
"""Of a log in the digest."""


class Pause(Enum):
    """When a call ends after a stage, so that somebody looks before the next."""

    NEVER = "never"
    FAILED = "failed"
    """A row has failed that was not there before, or a test in it."""
    MEASURED = "measured"
    """There are rows that were not there before."""


@dataclass(frozen=True)
class Stage:
    """Some rows of a part, and their time."""

    part: Any
    """A module: `NAME`, `tasks(setting, store)`, and `table(content)` of a file of rows."""
    seconds: float = inf
    """Over all calls, but for what is killed; of one call if it is `in_each_call`."""
    only: Sequence[str] = ("*",)
    pause: Pause = Pause.NEVER
    pauses_for: Sequence[str] = ("*",)
    """Rows that a pause may be for; what other rows found can wait for the end of the call."""
    in_each_call: bool = False
    """Its rows are measured again: the machine may be another one, on which nothing is built."""


@dataclass
class Progress:
    """How far a call has come."""

    is_over: bool = True
    """No stage is left that another call would get further with."""
    lines: list[str] = field(default_factory=list)
    """One for each stage that was begun."""
    begun: list[Any] = field(default_factory=list)
    """Parts."""
    failed: list[tuple[str, str]] = field(default_factory=list)
    """(part, key) of rows that failed in this call."""
    has_failed: bool = False
    """Any row has failed, also in an earlier call."""


def run_stages(
    stages: Sequence[Stage],
    setting: Setting,
    choice: Choice,
    *,
    open_store: Callable[[Any], Store],
    progress: Progress,
) -> None:
    """Run stages until `choice.budget_s` is spent, or one of them asks for a pause; write into `progress`.

    Raises:
        KeyboardInterrupt: as it came; `progress` is of what was done until then.
    """
    end_s = time.monotonic() + choice.budget_s
    for number, stage in enumerate(stages):
        store = open_store(stage.part)
        only = stage.only if choice.only == ("*",) else choice.only
        left_s, spent_s = end_s - time.monotonic(), 0.0 if stage.in_each_call else _spent_s(stage, store)
        stage_left_s = stage.seconds - spent_s
        before = {row.key: row for row in store}
        progress.begun += [] if stage.part in progress.begun else [stage.part]
        tasks = stage.part.tasks(setting, store)
        left: list[str] = []
        try:
            again, retry = choice.again or stage.in_each_call, choice.retry or stage.in_each_call
            told = Choice(min(left_s, stage_left_s), only=only, retry=retry, again=again)
            left = carry_out(tasks, store, setting, told)
        finally:
            store.leave(left)
            new = [row for row in store if before.get(row.key) != row]
            failed = [row for row in new if _has_failed(row)]
            progress.failed += [(stage.part.NAME, row.key) for row in failed]
            progress.has_failed |= any(map(_has_failed, store))
            progress.lines.append(_line(stage, store, left))
        # What only this call had too little time for is worth another one.
        if left and left_s < stage_left_s:
            progress.is_over = False
            return
        asking = {Pause.NEVER: [], Pause.FAILED: failed, Pause.MEASURED: new}[stage.pause]
        asks = any(fnmatch.fnmatch(row.key, pattern) for row in asking for pattern in stage.pauses_for)
        if asks and number + 1 < len(stages):
            progress.is_over = False
            progress.lines.append("paused: look at the above, mend what needs it, and call again to continue")
            return


def _rows(stage: Stage, store: Store) -> list[Row]:
    return [row for row in store if any(fnmatch.fnmatch(row.key, pattern) for pattern in stage.only)]


def _spent_s(stage: Stage, store: Store) -> float:
    return sum(row.wall_s for row in _rows(stage, store))


def _has_failed(row: Row) -> bool:
    is_given_up = row.reason is Reason.CUT and row.is_final
    return row.reason is Reason.FAILED or is_given_up or bool((row.figures or {}).get("failures"))


def _line(stage: Stage, store: Store, left: Sequence[str]) -> str:
    rows = _rows(stage, store)
    num_found = sum(row.figures is not None for row in rows)
    why = {reason: sum(row.reason is reason for row in rows) for reason in Reason}
    without = "".join(f", {num} {reason.value}" for reason, num in why.items() if num)
    seconds = f"{_spent_s(stage, store):.0f} s" + ("" if stage.seconds == inf else f" of {stage.seconds:.0f}")
    return f"{stage.part.NAME}: {num_found} with figures{without}, {len(left)} left; {seconds}"


def digest(progress: Progress, setting: Setting) -> str:
    """Return what to read at the end of a call, in at most `DIGEST_CHARS`: what is over earliest is cut first."""
    blocks: list[str] = []
    for part in progress.begun:
        table = part.table(saved.read(setting.folder / f"{part.NAME}.json"))
        # What it ran on is the same for all, and explanations are for readers of tables.
        blocks += [] if blocks else [table.partition("\n\n|")[0]]
        lines = [line for line in table.splitlines() if line.startswith(("| ", "- "))]
        blocks.append("\n".join([f"## {part.NAME}", *lines]))
    for part_name, key in progress.failed[-3:]:
        log = log_of(setting.folder, key)
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
        blocks.append("\n".join([f"## log of {part_name}: {key}", *(line[:LOG_CHARS] for line in lines)]))
    end = "\n".join(["## stages", *progress.lines])
    text = "\n\n".join(blocks)
    room = DIGEST_CHARS - len(end) - 40
    if len(text) > room:
        text = "(cut here; --show has all)\n" + text[len(text) - room :].partition("\n")[2]
    return f"{text}\n\n{end}"
