"""Documents: links between them, and the site that `make docs` makes of them, which needs mkdocs and is stricter."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
PACKAGE = ROOT / "chunkmem"
MOST_WORDS = 25_000
"""Of README.md and docs/*.md, as `wc -w` counts them: who adds a paragraph looks for one that says the same."""


@cache
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prose(path: Path) -> str:
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(path: Path) -> set[str]:
    return {hooks().slug(heading, "-") for heading in re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for match in hooks().LINK.finditer(prose(path)):
        target, anchor = match[3], match[4]
        if target is None or hooks().HAS_SCHEME.match(target):
            continue
        found = path.parent / target if target else path
        assert found.exists(), match[0]
        assert not anchor or anchor[1:] in anchors(found.resolve()), match[0]


def test_documents_stay_short() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= MOST_WORDS


def test_sections_are_named_as_github_names_them() -> None:
    assert hooks().slug("`overlap_optimizer`, `update_threads` and `undo_log_ratio`", "-") == (
        "overlap_optimizer-update_threads-and-undo_log_ratio"
    )


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == {"index.md", *hooks().PAGES[1:], *(path.name for path in (ROOT / "docs").glob("*.md"))}


def test_links_of_the_repository_become_links_of_the_site() -> None:
    pages = {"index.md", "tuning.md", "adr/README.md", "benchmarks/adam/README.md", "images/memory.png"}
    files = SimpleNamespace(get_file_from_path=lambda path: path if path in pages else None)

    def on_site(site_path: str, text: str) -> str:
        page = SimpleNamespace(file=SimpleNamespace(src_uri=site_path))
        return str(hooks().on_page_markdown(text, page=page, config=None, files=files))

    assert on_site("index.md", "[a](docs/tuning.md#x) ![b](docs/images/memory.png)") == (
        "[a](tuning.md#x) ![b](images/memory.png)"
    )
    assert on_site("index.md", "[decisions](docs/adr)") == "[decisions](adr/README.md)"
    assert on_site("tuning.md", "[x](../README.md) [y](#z) [w](https://w)") == "[x](index.md) [y](#z) [w](https://w)"
    assert on_site("tuning.md", "`layers[i](x)` is [`code`](../README.md)") == "`layers[i](x)` is [`code`](index.md)"
    assert on_site("tuning.md", "[a test](../tests/smoke.py)") == "a test"
    assert on_site("adr/README.md", "[a](../../benchmarks/adam/README.md)") == "[a](../benchmarks/adam/README.md)"
    assert on_site("tuning.md", "[lost](nowhere.md)") == "[lost](nowhere.md)", "mkdocs says so"
    assert on_site("tuning.md", "```\n[a](../tests/smoke.py)\n```") == "```\n[a](../tests/smoke.py)\n```"


def test_the_architecture_page_has_a_row_for_every_file() -> None:
    files = [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    page = SimpleNamespace(file=SimpleNamespace(src_uri="architecture.md"))
    shown = hooks().on_page_markdown("# Architecture\n", page=page, config=None, files=None)
    rows = re.findall(r"^\| `(\S+)` \| (\S.*\.) \|$", shown, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(files)


def test_files_of_a_room_are_listed() -> None:
    assert hooks().files_table("activations").count("activations/") == 17
    with pytest.raises(SystemExit, match=r"chunkmem/activation has no files; there are activations, "):
        hooks().files_table("activation")
