"""One place makes the parts of training, for estimates as well; read from the source text."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "chunkmem"
BUILDER = PACKAGE / "assembly" / "parts.py"
PARTS = {
    "AccessTracker",
    "BackwardTracker",
    "GradientHooks",
    "GroupUpdater",
    "ModelPacker",
    "ModelRegistry",
    "ModuleHooks",
    "ModuleOverrides",
    "Packer",
    "ParameterOperators",
    "Reduction",
    "ShardStore",
    "SpeculativeUpdater",
    "StepLock",
}
"""Classes that training is made of, whatever memory is behind them."""


def made_in(source: str) -> set[str]:
    """The names of what a module calls."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {func.id for func in calls if isinstance(func, ast.Name)}


def test_the_builder_makes_all_parts() -> None:
    assert made_in(BUILDER.read_text("utf-8")) >= PARTS


def attributes_of(source: str, name: str) -> set[str]:
    """What a class assigns to itself, or declares."""
    (found,) = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)
    assigned = (node for node in ast.walk(found) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    fields = {
        node.target.id for node in found.body if isinstance(node, ast.AnnAssign) if isinstance(node.target, ast.Name)
    }
    return fields | {node.attr for node in assigned if isinstance(node.value, ast.Name) and node.value.id == "self"}


@pytest.mark.parametrize(("file", "name"), [("runtime.py", "Runtime"), ("entry_points.py", "EntryPoints")])
def test_a_composition_stays_small(file: str, name: str) -> None:
    assert 10 < len(attributes_of((BUILDER.parent / file).read_text("utf-8"), name)) <= 20


def test_nobody_else_makes_one() -> None:
    made = {file: made_in(file.read_text("utf-8")) & PARTS for file in PACKAGE.rglob("*.py") if file != BUILDER}
    assert {file: names for file, names in made.items() if names} == {}
