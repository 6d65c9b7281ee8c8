"""Is what came of a script on all ranks what it declares? Reports are plain data, as they come from `worker`."""

from __future__ import annotations

import re
from typing import Any

from tests.hostile_ranks.harness import Alike, Either, Equal, Expected, Leaves, Refused

PROMPT_S = 120.0
"""An error that came after more than this has been waited for, until gloo gave up, soon before `TIMEOUT_S`.

One that comes at once takes a second, and one that a failure detection comes before, `DETECTION_S` more.
"""

Report = dict[str, Any]


def verdict(expect: Expected, reports: list[Report]) -> str | None:
    """What is wrong with the reports of all ranks, in one line; None if they are what the script declares."""
    for rank, report in enumerate(reports):
        if "reference" in report:
            return f"rank {rank}, the reference itself: {said(report['reference'])}"
    if isinstance(expect, Either):
        same = _not_equal(reports)
        return same and _not_refused(Refused(expect.error, expect.phrase), [_without_bytes(each) for each in reports])
    if isinstance(expect, Equal | Alike):
        return _not_equal(reports)
    if isinstance(expect, Refused):
        return _not_refused(expect, reports)
    return _not_left(expect, reports)


def _not_equal(reports: list[Report]) -> str | None:
    for rank, report in enumerate(reports):
        if "error" in report or report["differences"]:
            return "; ".join(f"rank {other}: {said(each)}" for other, each in enumerate(reports))
        if report["digest"] != reports[0]["digest"]:
            return f"rank {rank} has other weights or states than rank 0"
    return None


def _not_refused(expect: Refused, reports: list[Report]) -> str | None:
    for rank, report in enumerate(reports):
        if not re.fullmatch(expect.error, report.get("error", "")) or not report["is_ours"]:
            return f"rank {rank}: {said(report)}, where {expect.error} is declared; {_others(reports, rank)}"
        if not re.search(expect.phrase, report["message"]):
            return f"rank {rank}: {said(report)}, where {expect.phrase!r} is declared"
        if (report["error"], report["message"]) != (reports[0]["error"], reports[0]["message"]):
            return f"rank {rank}: {said(report)}; in other words on rank 0: {said(reports[0])}"
    return _late(reports)


def _without_bytes(report: Report) -> Report:
    """Return a report whose message names no number of bytes: ranks that train batches of their own need their own."""
    if "message" not in report:
        return report
    return {**report, "message": re.sub(r"\d+(\.\d+)? ([KMG]i)?(B|bytes)\b", "N", report["message"])}


def _not_left(expect: Leaves, reports: list[Report]) -> str | None:
    first = next(report for rank, report in enumerate(reports) if rank != expect.rank)
    for rank, report in enumerate(reports):
        wanted = expect.error if rank == expect.rank else "RankError"
        if report.get("error") != wanted:
            return f"rank {rank}: {said(report)}, where {wanted} is declared; {_others(reports, rank)}"
        if rank == expect.rank:
            continue
        if f"rank {expect.rank}" not in report["message"]:
            return f"rank {rank}: {said(report)}, which does not name rank {expect.rank}"
        if report["message"] != first["message"]:
            return f"rank {rank}: {said(report)}; in other words elsewhere: {said(first)}"
    return _late(reports)


def _late(reports: list[Report]) -> str | None:
    slowest = max(report["seconds"] for report in reports)
    if slowest < PROMPT_S:
        return None
    return f"the error was waited for {slowest:.1f} s: {said(reports[0])}"


def _others(reports: list[Report], rank: int) -> str:
    return "; ".join(f"rank {other}: {said(report)}" for other, report in enumerate(reports) if other != rank)


def said(report: Report) -> str:
    """A report in one line."""
    if "error" in report:
        return f"{report['error']}: {report['message'][:600]} (at {report['where']})"
    found = report["differences"] or ["nothing raised, and no difference"]
    return found[0] if len(found) == 1 else f"{found[0]} (and {len(found) - 1} more)"
