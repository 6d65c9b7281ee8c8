"""What `mkdocs build` needs beyond docs/: pages from elsewhere in the repository, and links as they are written there.

Pages link to each other as files of the repository, so that they can be read in it. On the site the README is the first
page, and a link to a file that is no page, such as a test or an example, is its text.
"""

from __future__ import annotations

import ast
import posixpath
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"`[^`\n]*`|(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
"""Or code, which has no links: its groups are None."""
HAS_SCHEME = re.compile(r"[a-z]+:")
ARCHITECTURE = "architecture.md"


def files_table(room: str = "") -> str:
    """Return a table of the files of the package, or of one of its rooms, and what each is for.

    Raises:
        SystemExit: there is no such room.
    """
    package = ROOT / "chunkmem"
    found = sorted(path for path in (package / room).rglob("*.py") if path.name != "__init__.py")
    if not found:
        rooms = ", ".join(sorted(path.parent.name for path in package.glob("*/__init__.py")))
        raise SystemExit(f"chunkmem/{room} has no files; there are {rooms}")
    rows = [f"| `{path.relative_to(package)}` | {_first_sentence(path)} |" for path in found]
    return "\n".join(("| file | what it is for |", "|---|---|", *rows, ""))


def _first_sentence(path: Path) -> str:
    document = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert document, f"{path} does not say what it is for"
    return " ".join(document.split("\n\n")[0].split()).replace("|", "\\|")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name sections as GitHub does, and list decisions and benchmarks below a heading each."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    assert config.nav is not None
    decisions = ["adr/README.md", *(f"adr/{path.name}" for path in sorted((ROOT / "docs" / "adr").glob("[0-9]*.md")))]
    config.nav += [{"Decisions": decisions}, {"Benchmarks": _benchmarks()}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for path in (*PAGES, *_benchmarks()):
        files.append(File.generated(config, _site_path(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site; add the table of files."""
    site_path = page.file.src_uri
    if site_path == ARCHITECTURE:
        markdown += "\n" + files_table()
    source = "README.md" if site_path == "index.md" else site_path
    folder = posixpath.dirname(source if (ROOT / source).exists() else f"docs/{source}")

    def link(match: re.Match[str]) -> str:
        image, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        if not target or HAS_SCHEME.match(target):  # code, a section of this page, or an address
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if (ROOT / path / "README.md").exists():
            path = f"{path}/README.md"
        if (ROOT / path).exists() and files.get_file_from_path(_site_path(path)) is None:
            return text
        relative = posixpath.relpath(_site_path(path), posixpath.dirname(site_path) or ".")
        return f"{image}[{text}]({relative}{anchor})"

    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in parts)


def slug(heading: str, separator: str) -> str:
    """Return the anchor that GitHub gives a heading: `a.b` and `c` becomes ab-and-c."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def _benchmarks() -> list[Any]:
    found = (ROOT / "benchmarks").rglob("*.md")
    return sorted((str(path.relative_to(ROOT)) for path in found), key=lambda path: (path.count("/"), path))


def _site_path(path: str) -> str:
    """Return where a file of the repository is on the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


if __name__ == "__main__":
    sys.stdout.write(files_table(*sys.argv[1:2]))
