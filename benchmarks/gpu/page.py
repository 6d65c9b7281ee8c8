"""Put the tables of the committed rows into docs/performance.md: ``python -m benchmarks.gpu.page``."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.gpu.__main__ import PARTS
from benchmarks.gpu.rows import StoreError, read

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = Path(__file__).parent / "results"
STATE = "state"


def filled(text: str, results: Path) -> str:
    """Return the page with what stands between each part's marks made again from the files in `results`.

    Raises:
        StoreError: a file is damaged, or of a dry run.
        ValueError: a mark is missing.
    """
    contents = {name: path for name in PARTS if (path := results / f"{name}.json").exists()}
    tables = {name: _table(name, path) for name, path in contents.items()}
    text = _between(text, STATE, _state(list(tables)))
    for name in PARTS:
        text = _between(text, name, tables.get(name, "Not measured yet."))
    return text


def _table(name: str, path: Path) -> str:
    content = read(path)
    if content["hardware"]["card"] is None:
        raise StoreError(f"{path} is of a dry run, whose figures say nothing; keep it out of {path.parent}")
    return str(PARTS[name].table(content))


def _state(measured: list[str]) -> str:
    missing = [f"`{name}`" for name in PARTS if name not in measured]
    if not measured:
        return (
            "**No GPU figure exists yet.** The suite is built and tested in its dry mode; nobody has run it on a GPU."
        )
    if missing:
        return f"Measured: {', '.join(f'`{name}`' for name in measured)}. Not measured yet: {', '.join(missing)}."
    return "All parts have been measured; what each lacks is said below its table."


def _between(text: str, name: str, content: str) -> str:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the page has no marks {begin} and {end}")
    return f"{before}{begin}\n{content}\n{end}{after}"


def main() -> int:
    """Write the page again; return the exit status."""
    try:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")
    except (StoreError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
