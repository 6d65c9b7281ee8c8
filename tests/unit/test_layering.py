"""Who may import whom, and who may touch what; read from the source text."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "chunkmem"

LAYERS = (
    ("data", "version"),
    ("plan", "config"),
    ("runtime", "report"),
    ("ranks", "activations"),
    ("modules", "steps"),
    ("optim", "packing", "nn"),
    ("assembly",),
    ("pipeline", "freezing", "checkpoints", "estimate", "building", "reporting"),
    ("contrib",),
    ("manager",),
    ("engine", "testing", "integrations"),
    ("cli", "__init__"),
    ("__main__",),
)
"""Lowest first; a name is a file or a folder of the package. Each imports itself and lower layers, no neighbours."""

STDLIB_ONLY = LAYERS[:2]

HOMES = {
    "torch.cuda": {"runtime.device"},
    "torch.accelerator": {"runtime.device"},
    "torch.distributed": {
        "ranks.connection",
        "ranks.agreement",
        "ranks.failure_detector",
        "ranks.exchange",
        "ranks.groups",
        "ranks.local_parts",
        "ranks.mesh",
        "ranks.methods",
        "ranks.neighbours",
        "ranks.ranks",
        "checkpoints.asynchronous",
        "checkpoints.checksums",
        "checkpoints.files",
        "checkpoints.metadata",
        "checkpoints.reading",
        "checkpoints.saving",
        "pipeline.schedules",
        "pipeline.stage",
    },
    "os.environ": {"config"},
    "os.environb": {"config"},
    "os.getenv": {"config"},
    "os.putenv": {"config"},
}
"""The only modules that may use what would otherwise spread."""


def module_name(path: Path) -> str:
    """``runtime/pool.py`` to ``runtime.pool``, ``plan/__init__.py`` to ``plan``, the package's own to ``__init__``."""
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}


def level(module: str) -> int:
    """The index of a module's layer."""
    part = module.split(".")[0]
    found = [index for index, parts in enumerate(LAYERS) if part in parts]
    assert found, f"chunkmem/{part} is in no layer: add it to LAYERS, and to the table of docs/architecture.md"
    return found[0]


@cache
def parsed(source: str) -> ast.Module:
    """The tree of a module; the same one each time, which is not to be changed."""
    return ast.parse(source)


class _WithoutTypeChecking(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return node.orelse
        return self.generic_visit(node)


def absolute_imports(source: str, *, for_types: bool = True) -> set[str]:
    """The dotted names that a module imports, wherever it does; ``from a import b`` is ``a.b``.

    Without `for_types`, what stands under ``if TYPE_CHECKING:`` is left out.
    """
    tree: ast.AST = parsed(source) if for_types else _WithoutTypeChecking().visit(ast.parse(source))
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative imports hide the layer; write chunkmem. in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def internal_imports(source: str, modules: Iterable[str], *, for_types: bool = True) -> set[str]:
    """The modules of the package that a module imports."""
    known = set(modules)
    found: set[str] = set()
    for name in absolute_imports(source, for_types=for_types):
        if name.split(".")[0] != "chunkmem":
            continue
        inner = name.removeprefix("chunkmem").removeprefix(".")
        while inner and inner not in known:
            inner = inner.rpartition(".")[0]
        found.add(inner or "__init__")
    return found


def upward_imports(imports: Mapping[str, set[str]]) -> list[str]:
    """The imports that are neither within a file or folder of `LAYERS` nor of a lower layer."""
    return [
        f"{module} imports {imported}"
        for module, names in sorted(imports.items())
        for imported in sorted(names)
        if module.split(".")[0] != imported.split(".")[0] and level(imported) >= level(module)
    ]


def uses(source: str) -> set[str]:
    """The dotted names that a module reaches, through imports and attributes: ``import os as o; o.environ`` too."""
    tree = parsed(source)
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.split(".")[0]
                bound[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    found = absolute_imports(source)
    for node in ast.walk(tree):
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        if attributes and isinstance(node, ast.Name):
            found.add(".".join([bound.get(node.id, node.id), *attributes]))
    return found


def strays(source: str, module: str) -> list[str]:
    """What a module uses away from home."""
    return [
        f"chunkmem.{module} uses {name}"
        for name in sorted(uses(source))
        for banned, homes in HOMES.items()
        if f"{name}.".startswith(f"{banned}.") and module not in homes
    ]


# Layers.


def test_each_module_imports_only_its_own_package_and_lower_layers() -> None:
    # The package's own __init__ names everything, for type checkers only.
    imports = {m: internal_imports(source, SOURCES, for_types=m != "__init__") for m, source in SOURCES.items()}
    assert upward_imports(imports) == []


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """A circle of imports; empty if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_no_import_cycles() -> None:
    # The package's own __init__ names everything, for type checkers only.
    graph = {module: internal_imports(source, SOURCES) for module, source in SOURCES.items() if module != "__init__"}
    assert cycle(graph) == []


def test_no_import_cycles_in_benchmarks() -> None:
    files = sorted((ROOT / "benchmarks").rglob("*.py"))
    sources = {".".join(file.relative_to(ROOT).with_suffix("").parts): file.read_text("utf-8") for file in files}
    assert len(sources) > 50
    graph = {
        module: {
            known
            for name in absolute_imports(source)
            for known in (name, name.rpartition(".")[0])
            if known in sources and known != module
        }
        for module, source in sources.items()
    }
    assert cycle(graph) == []


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})


@pytest.mark.parametrize("module", [m for m in SOURCES if m != "__init__" and level(m) < len(STDLIB_ONLY)])
def test_lower_layers_import_the_standard_library_only(module: str) -> None:
    roots = {name.split(".")[0] for name in absolute_imports(SOURCES[module])}
    assert roots <= {*sys.stdlib_module_names, "chunkmem"}


def test_importing_lower_layers_does_not_import_torch() -> None:
    lower = ["chunkmem", *(f"chunkmem.{m}" for m in SOURCES if m != "__init__" and level(m) < len(STDLIB_ONLY))]
    program = f"import sys, {', '.join(lower)}; print(*sorted({{'torch', 'numpy', 'psutil'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_banned_apis_stay_home() -> None:
    found = {module: strays(source, module) for module, source in SOURCES.items()}
    assert {module: names for module, names in found.items() if names} == {}


def test_only_optimizers_name_their_states() -> None:
    """Or what predicts their updates; a docstring may, as an example."""
    states = {"exp_avg", "exp_avg_sq", "momentum_buffer"}
    named = {
        module
        for module, source in SOURCES.items()
        for node in ast.walk(parsed(source))
        for name in (getattr(node, field, None) for field in ("value", "id", "attr", "arg"))
        if isinstance(name, str) and name.lower().strip("_") in states
    }
    assert {module.rpartition(".")[0] for module in named} == {"optim", "contrib.async_pipeline"}


def test_features_of_contrib_are_named_by_the_facade_alone() -> None:
    """And not by each other."""
    facade = {"__init__", "manager", "cli.config"}
    for module, source in SOURCES.items():
        rooms = {name.split(".")[1] for name in internal_imports(source, SOURCES) if name.startswith("contrib.")}
        own = {module.split(".")[1]} if module.startswith("contrib.") else set()
        assert rooms <= own or module in facade, f"chunkmem/{module} imports {sorted(rooms - own)} of contrib"


# The checks themselves.


def test_imports_are_found_wherever_they_stand() -> None:
    source = (
        "from typing import TYPE_CHECKING\n"
        "import chunkmem.plan.demand\n"
        "if TYPE_CHECKING:\n"
        "    from chunkmem.modules import binding, Tensor\n"
        "def late():\n"
        "    from chunkmem.data.types import Tier\n"
        "    from chunkmem import __version__\n"
    )
    modules = ["plan", "plan.demand", "modules", "modules.binding", "data.types", "__init__"]
    assert internal_imports(source, modules) == {"plan.demand", "modules.binding", "modules", "data.types", "__init__"}
    assert internal_imports(source, modules, for_types=False) == {"plan.demand", "data.types", "__init__"}
    with pytest.raises(AssertionError, match="line 1: relative imports"):
        absolute_imports("from . import binding")


@pytest.mark.parametrize(
    ("module", "imported", "allowed"),
    [
        ("plan.demand", "plan.victims", True),
        ("plan.demand", "data.types", True),
        ("cli.main", "data.types", True),
        ("data.sizes", "data.errors", True),
        ("plan.demand", "runtime.store", False),
        ("data.types", "plan.demand", False),
        ("plan.demand", "config", False),
        ("optim.adam", "modules.binding", True),
        ("modules.hooks", "optim.adam", False),
        ("optim.adam", "pipeline", False),
        ("optim.adam", "manager", False),
        ("manager", "__init__", False),
    ],
)
def test_layers_are_strict(module: str, imported: str, allowed: bool) -> None:
    violations = upward_imports({module: {imported}})
    assert violations == ([] if allowed else [f"{module} imports {imported}"])


def test_a_module_in_no_layer_is_refused() -> None:
    with pytest.raises(AssertionError, match="chunkmem/utils is in no layer"):
        level("utils.misc")


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.cuda.synchronize()",
        "import torch as t\nstream = t.cuda.Stream()",
        "import torch.cuda",
        "import torch.cuda as c",
        "import torch.cuda.nvtx",
        "from torch import cuda",
        "from torch.cuda import Stream",
        "def f():\n    import torch\n    return torch.cuda",
    ],
)
def test_a_banned_api_is_found_however_it_is_written(source: str) -> None:
    assert set(strays(source, "manager")) >= {
        f"chunkmem.manager uses {name}" for name in uses(source) if "cuda" in name
    }
    assert strays(source, "manager") != []
    assert strays(source, "runtime.device") == []


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['A']", "from os import environ", "import os\nos.getenv('A')"]
)
def test_the_environment_is_read_in_config_only(source: str) -> None:
    assert strays(source, "runtime.device") != []
    assert strays(source, "config") == []


@pytest.mark.parametrize(
    "source", ["import torch\ntorch.backends.cuda", "import torch\ntorch.cudagraph", "kind = 'torch.cuda'", "cuda = 1"]
)
def test_what_only_looks_like_a_banned_api(source: str) -> None:
    assert strays(source, "manager") == []
