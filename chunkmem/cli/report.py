"""`chunkmem report`: pictures of a recorded run."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from chunkmem.cli.answer import CommandResult, table
from chunkmem.data.errors import PlanError, TraceError
from chunkmem.data.sizes import format_nbytes

if TYPE_CHECKING:
    from chunkmem.report.run import Run

_POLL_S = 0.5
_RELOAD_S = 5
NAME = "report"
SUMMARY = "pictures of a recorded run"
DESCRIPTION = """\
Show what a step did: as a table, as a picture (memory.png: bytes by role over the moments of the step), and as a page
(timeline.html: what ran when, where each chunk was, what waited) that any browser opens, without a network. The step
is what manager.record(RUN) wrote after it.

  chunkmem report runs/gpt
  chunkmem report runs/gpt --against runs/gpt-larger-cap --out pictures
  chunkmem report runs/gpt --perfetto                      # perfetto.json, for ui.perfetto.dev
  chunkmem report runs/now --watch                         # of `chunkmem run --record runs/now ...`, while it trains
  chunkmem report runs/gpt --json | jq .run.happened.stall_s"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_directory", metavar="RUN", type=Path, help="a directory that manager.record() wrote")
    parser.add_argument(
        "--against", metavar="RUN2", type=Path, help="another run, shown below the first on the same time axis"
    )
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="where memory.png and timeline.html go; default: into RUN"
    )
    parser.add_argument("--perfetto", action="store_true", help="write perfetto.json, a Chrome trace, as well")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="do so whenever RUN is recorded again, a line each, until Ctrl-C; timeline.html reloads itself",
    )


def run(options: argparse.Namespace) -> CommandResult:
    """Read the runs, write the picture and the page, and tell the figures."""
    return _watch(options) if options.watch else _report(options)


def _watch(options: argparse.Namespace) -> NoReturn:
    """Report each time that the run is recorded, which need not have begun."""
    timeline, seen_ns = options.run_directory / "timeline.json", -1
    if not timeline.exists():
        print(f"chunkmem: waiting until {options.run_directory} is recorded", file=sys.stderr)
    while True:
        if timeline.exists() and (written_ns := timeline.stat().st_mtime_ns) != seen_ns:
            seen_ns = written_ns
            try:
                data = _report(options).data
            except (PlanError, TraceError) as error:  # of two steps, as it is being written
                print(f"chunkmem: {error}", file=sys.stderr)
            else:
                print(json.dumps(data) if options.json else _line(data["run"]), flush=True)
        time.sleep(_POLL_S)  # another process writes the files, and tells nobody


def _line(summary: Mapping[str, Any]) -> str:
    from chunkmem.report.text import format_s

    predicted, happened = summary["predicted"], summary["happened"]
    peak, plain = happened["peak_nbytes"]["device"], summary["plain_pytorch_nbytes"]
    return (
        f"{time.strftime('%H:%M:%S')}  a step takes {format_s(happened['step_s'])}, predicted "
        f"{format_s(predicted['step_s'])}, stalls {format_s(happened['stall_s'])}, plan misses "
        f"{happened['plan_misses']}; {format_nbytes(peak)} of chunks on DEVICE, where plain PyTorch has "
        f"{format_nbytes(plain)} with activations"
    )


def _report(options: argparse.Namespace) -> CommandResult:
    from chunkmem.report.files import write_report
    from chunkmem.report.run import load_run
    from chunkmem.report.summary import summarize

    runs = [load_run(path) for path in (options.run_directory, options.against) if path is not None]
    folder = options.run_directory if options.out is None else options.out
    reload_s = _RELOAD_S if options.watch else None
    files, notes = write_report(runs, folder, with_perfetto=options.perfetto, reload_s=reload_s)
    summaries = [summarize(run) for run in runs]
    against = summaries[1] if len(summaries) > 1 else None
    names = {key: None if path is None else str(path) for key, path in files.items()}
    data = {"run": summaries[0], "against": against, "files": names, "notes": notes}
    lines = _lines(runs, summaries, [name for name in names.values() if name], notes)
    return CommandResult(data, "\n".join(lines))


def _lines(
    runs: Sequence[Run], summaries: Sequence[Mapping[str, Any]], files: Sequence[str], notes: Sequence[str]
) -> Iterator[str]:
    from chunkmem.report.regions import region_policies
    from chunkmem.report.text import (
        REGION_COLUMNS,
        difference_lines,
        non_model_lines,
        region_rows,
        role_rows,
        step_rows,
    )

    for run, summary in zip(runs, summaries, strict=True):
        chunks = f"{summary['num_moments']} moments, {summary['num_chunks']} chunks"
        yield f"{summary['run']}: one step of {chunks}"
        yield ""
        yield table(("", "predicted", "happened", "cap"), step_rows(summary))
        yield ""
        yield table(("peak of each role", "predicted", "happened"), role_rows(summary))
        yield ""
        if regions := region_policies(run.plan, run.trace):
            yield table(REGION_COLUMNS, region_rows(regions))
            yield ""
        yield "predicted against happened"
        yield from (f"  {line}" for line in difference_lines(summary))
        yield ""
        yield "non-model memory"
        yield from (f"  {line}" for line in non_model_lines(summary))
        yield ""
    yield from (f"wrote {path}" for path in files)
    yield from notes
