"""`chunkmem report`: pictures of a recorded run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from chunkmem.cli.answer import CommandResult, table

NAME = "report"
SUMMARY = "pictures of a recorded run"
DESCRIPTION = """\
Show what a step did: as a table, as a picture (memory.png: bytes by role over the moments of the step), and as a page
(timeline.html: what ran when, where each chunk was, what waited) that any browser opens, without a network. The step
is what manager.record(RUN) wrote after it.

  chunkmem report runs/gpt
  chunkmem report runs/gpt --against runs/gpt-larger-cap --out pictures
  chunkmem report runs/gpt --perfetto                      # perfetto.json, for ui.perfetto.dev
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


def run(options: argparse.Namespace) -> CommandResult:
    """Read the runs, write the picture and the page, and tell the figures."""
    from chunkmem.report.files import write_report
    from chunkmem.report.run import load_run
    from chunkmem.report.summary import summarize

    runs = [load_run(path) for path in (options.run_directory, options.against) if path is not None]
    folder = options.run_directory if options.out is None else options.out
    files, notes = write_report(runs, folder, with_perfetto=options.perfetto)
    summaries = [summarize(run) for run in runs]
    against = summaries[1] if len(summaries) > 1 else None
    names = {key: None if path is None else str(path) for key, path in files.items()}
    data = {"run": summaries[0], "against": against, "files": names, "notes": notes}
    lines = _lines(summaries, [name for name in names.values() if name], notes)
    return CommandResult(data, "\n".join(map(_printable, lines)))


def _printable(text: str) -> str:
    """Labels may hold anything: line breaks of their own, and lone surrogates, which cannot be printed."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _lines(summaries: Sequence[Mapping[str, Any]], files: Sequence[str], notes: Sequence[str]) -> Iterator[str]:
    from chunkmem.report.regions import Policy, RegionPolicy
    from chunkmem.report.text import (
        REGION_COLUMNS,
        difference_lines,
        non_model_lines,
        region_rows,
        role_rows,
        step_rows,
    )

    for summary in summaries:
        chunks = f"{summary['num_moments']} moments, {summary['num_chunks']} chunks"
        yield f"{summary['run']}: one step of {chunks}"
        yield ""
        yield table(("", "predicted", "happened", "cap"), step_rows(summary))
        yield ""
        yield table(("peak of each role", "predicted", "happened"), role_rows(summary))
        yield ""
        if regions := [RegionPolicy(**{**region, "policy": Policy(region["policy"])}) for region in summary["regions"]]:
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
