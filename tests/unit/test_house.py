"""What the package costs to whoever carries it on (ADR 79): none of these figures grows. Where one falls, lower it."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest

from tests.unit.test_layering import SOURCES, internal_imports, parsed

CORE = {module: source for module, source in SOURCES.items() if not module.startswith("contrib")}

MOST_TOKENS = 389_508
"""Names, numbers, operators and strings; without imports, docstrings and comments."""
MOST_NOTES = 25
"""Stories with a name, `[Note: ...]`, that other files refer to."""
MOST_WITH_ONE_IMPORTER = 50
"""Files that one other imports, of their own folder."""
MOST_ASSIGNED_LATE = 0
"""Attributes of parts that whoever puts them together assigns, where the constructor should be given them."""
MOST_ATTRIBUTES, MOST_METHODS = 20, 45
FACADES = ("ChunkManager",)
"""What users call may have more methods."""
ASSEMBLY = ("parts", "make", "runtime", "built_models", "entry_points")
WIRING = (*(f"assembly.{name}" for name in ASSEMBLY), "manager", "building", "reporting")
THREADS = {
    "updates in backward": (r"in_backward(?!\()|InBackward|BackwardUpdate", "optim", 13),
    "speculative updates": (r"specul|shadow|roll_back", "runtime", 14),
    "modules on HOST": (r"compute_tier|on_host\b|is_on_host|HostModules|cpu_embedding", "modules packing", 41),
    "tiles": (r"[Tt]iled|\btiles?\b|tile_numel|untile", "optim", 15),
    "averages": (r"EMA\b|AVERAGES|[Aa]verages", "optim", 7),
    "disk": (r"[Dd]isk|DISK", "cli", 18),
    "regions and recompute": (r"[Rr]egion|recomput", "activations modules", 42),
    "freezing": (r"Freez|\bfreeze\b(?!\()", "freezing", 6),
    "deferred init": (
        r"overrides\.uninitialized|Uninitialized|Materialize|is_released|\bReleased|PutOff",
        "modules packing",
        5,
    ),
    "left-out moments": (r"LeftOut|num_left_out|\.left_out\.|entry\.left_out", "steps", 3),
}
"""Of each feature: what names it in code, the folders that have most of it, and how many other files name it, too."""


@cache
def lines_of_code(source: str) -> frozenset[int]:
    """Numbers of lines that are not empty, comments, imports or docstrings."""
    aside: set[int] = set()
    for node in ast.walk(parsed(source)):
        value = node.value if isinstance(node, ast.Expr) else None
        is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
        if isinstance(node, ast.Import | ast.ImportFrom) or is_text:
            aside.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return frozenset(n for n, line in lines if line.strip() and not line.strip().startswith("#")) - aside


def num_tokens(source: str) -> int:
    """Count tokens of code; an f-string is one, whether the version of Python tells its parts or not."""
    counted = {tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING}
    begins, ends = (getattr(tokenize, name, -1) for name in ("FSTRING_START", "FSTRING_END"))
    lines, depth, num = lines_of_code(source), 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_outermost = depth == 0
        depth += (token.type == begins) - (token.type == ends)
        num += is_outermost and token.start[0] in lines and token.type in {*counted, begins}
    return num


def functions(source: str) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(parsed(source)) if isinstance(node, ast.FunctionDef))


def test_tokens_are_counted_as_documented() -> None:
    assert num_tokens('"""Text."""\nimport os\n\n# A comment.\nx = f(1, "s")\n') == 8
    assert (
        num_tokens('x = f"{a} and {f"{b:{c}}" if b else 1}"\n' if sys.version_info >= (3, 12) else 'x = f"{a}"\n') == 3
    )


def test_code_does_not_grow() -> None:
    assert sum(map(num_tokens, CORE.values())) <= MOST_TOKENS


def test_no_more_stories_have_names() -> None:
    starts = r"^\[?\"*\[Note: ([^\]]+)\] "
    assert sum(len(set(re.findall(starts, source, re.MULTILINE))) for source in SOURCES.values()) <= MOST_NOTES


@pytest.mark.parametrize("feature", THREADS)
def test_no_more_files_name_a_feature(feature: str) -> None:
    pattern, home, most = THREADS[feature]
    named = set()
    for module, source in CORE.items():
        lines = source.splitlines()
        if any(re.search(pattern, lines[number - 1]) for number in lines_of_code(source)):
            named.add(module)
    others = {module for module in named if module.rpartition(".")[0] not in home.split()}
    assert 0 < len(others) <= most


def test_no_class_name_is_in_two_rooms() -> None:
    rooms = defaultdict[str, set[str]](set)
    for module, source in SOURCES.items():
        for node in parsed(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                rooms[node.name].add(module.split(".")[0] if not module.startswith("contrib") else module)
    assert not {name: where for name, where in rooms.items() if len(where) > 1}


def test_no_function_is_longer_than_a_screen() -> None:
    long = {
        f"{module}.{function.name}"
        for module, source in CORE.items()
        for function in functions(source)
        if (function.end_lineno or 0) - function.lineno >= 60
    }
    assert not long


def test_constructors_are_given_what_parts_need() -> None:
    late = [
        f"chunkmem/{module}.py:{node.lineno}"
        for module in WIRING
        for node in ast.walk(parsed(SOURCES[module]))
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") not in ("self", "cls")
    ]
    assert len(late) <= MOST_ASSIGNED_LATE, late


def test_files_are_not_cut_from_others() -> None:
    importers = defaultdict[str, set[str]](set)
    for module, source in SOURCES.items():
        for imported in internal_imports(source, SOURCES):
            importers[imported].add(module)

    def folder(module: str) -> str:
        return module.rpartition(".")[0]

    of_one = [m for m in CORE if len(importers[m]) == 1 and folder(m) == folder(next(iter(importers[m])))]
    assert len(of_one) <= MOST_WITH_ONE_IMPORTER, of_one


def test_no_class_is_several() -> None:
    """Attributes and methods along the bases: a class that was cut into a chain of them counts as one."""
    classes = {
        node.name: node for source in SOURCES.values() for node in parsed(source).body if isinstance(node, ast.ClassDef)
    }

    def bases(node: ast.ClassDef) -> list[str]:
        return [ast.unparse(base).partition("[")[0] for base in node.bases]

    def chain(name: str) -> list[ast.ClassDef]:
        """Return a class and its bases, protocols aside."""
        found = [base for base in bases(classes[name]) if base in classes and base != name]
        implemented = [base for base in found if not {"Protocol", "ABC"} & set(bases(classes[base]))]
        return [classes[name], *(one for base in implemented for one in chain(base))]

    def attributes(node: ast.ClassDef) -> set[str]:
        stored = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
        fields = (n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name))
        return {n.attr for n in stored if getattr(n.value, "id", "") == "self"} | set(fields)

    large = {}
    for name in classes:
        nodes = chain(name)
        num_attributes = len(set().union(*map(attributes, nodes)))
        num_methods = sum(isinstance(n, ast.FunctionDef) for node in nodes for n in node.body)
        if (num_attributes > MOST_ATTRIBUTES or num_methods > MOST_METHODS) and name not in FACADES:
            large[name] = num_attributes, num_methods
    assert not large
