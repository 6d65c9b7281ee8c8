"""Sets that do not change by accident: public names, files, what is installed. The keys of `Config`: test_config.py."""

from __future__ import annotations

import argparse
import ast
import re
import tomllib
from pathlib import Path

import pytest

import chunkmem
from chunkmem.cli.main import make_parser
from chunkmem.data import errors

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "chunkmem"

PUBLIC_NAMES = {
    "Adam",
    "AdamW",
    "CapacityError",
    "CheckpointError",
    "ChunkManager",
    "ChunkmemError",
    "Config",
    "ConfigError",
    "EMA",
    "ExchangeMethod",
    "FreezeSchedule",
    "FrozenCache",
    "LayoutError",
    "MemoryReport",
    "Optimizer",
    "PlanError",
    "RankError",
    "SGD",
    "SplitSampler",
    "StateError",
    "TierIOError",
    "TiledLinear",
    "TraceError",
    "__version__",
    "checkpoint",
    "checkpoint_sequential",
    "initialize_engine",
    "tile_optimizer_state",
    "untile_optimizer_state",
}

TESTING_NAMES = {
    "AdversarialLanes",
    "CheckReport",
    "Comparison",
    "Difference",
    "ThrottledLanes",
    "check",
}
"""What `chunkmem.testing` offers."""

OPTIONS = {
    "run": "CHUNKMEM.json SCRIPT.py ... --nproc --record",
    "estimate": "MODEL --accumulate --activations --batch --checkpointing --chunk-size --cpu-embedding --device "
    "--disk --disk-speed --hardware --host --host-memory --in-backward --largest --link --master --mesh "
    "--micro-batches --network --nic-speed --nics --nnodes --no-master-weights --optimizer --picture --precision "
    "--reduce-dtype --replicas --seq --stages --states --tflops --tile --world --json",
    "check": "MODEL --batch --chunk-size --device --disk --host --optimizer --orders --precision --seed --seq --steps "
    "--json",
    "plan": "TRACE --d2h --device --disk --disk-read --disk-write --h2d --host --keep-ties --machine "
    "--margin-use-ratio --mesh --out --stages --json",
    "report": "RUN --against --out --perfetto --watch --json",
    "convert": "SOURCE TARGET --max-shard-size --to --trust --json",
    "verify": "CHECKPOINT --json",
    "chunk-size": "MODEL --device --json",
    "config": "FILE --disk-capacity --from --markdown --out --schema --json",
    "info": "--disk --json",
    "build": "--json",
}
"""What each command takes, in addition to `--help`."""


def test_the_public_names() -> None:
    assert set(chunkmem.__all__) == PUBLIC_NAMES
    assert len(chunkmem.__all__) == len(PUBLIC_NAMES)
    assert set(dir(chunkmem)) >= PUBLIC_NAMES


def test_the_public_names_of_testing() -> None:
    # Read, not imported: it needs torch.
    tree = ast.parse((PACKAGE / "testing" / "__init__.py").read_text(encoding="utf-8"))
    (names,) = (node.value for node in tree.body if isinstance(node, ast.Assign))
    assert set(ast.literal_eval(names)) == TESTING_NAMES


def test_every_error_is_public() -> None:
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert raised <= PUBLIC_NAMES
    assert all(getattr(chunkmem, name) is getattr(errors, name) for name in raised)


def test_lazy_names_are_defined_where_they_are_looked_for() -> None:
    assert PUBLIC_NAMES - {"__version__"} - set(vars(errors)) == set(chunkmem._HOMES)
    for name, home in chunkmem._HOMES.items():
        tree = ast.parse((ROOT / home.replace(".", "/")).with_suffix(".py").read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}, home


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'chunkmem' has no attribute 'Chunkmanager'"):
        _ = chunkmem.Chunkmanager


def test_the_options_of_the_command_line() -> None:
    (commands,) = (action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    found = {
        name: {word for action in parser._actions for word in action.option_strings or [str(action.metavar)]}
        for name, parser in commands.choices.items()
    }
    everywhere = {"-h", "--help"}
    assert found == {name: everywhere | set(words.split()) for name, words in OPTIONS.items()}


def test_what_is_installed_lists_every_folder() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("*.py")}
    assert set(project["tool"]["setuptools"]["packages"]) == {*folders, "chunkmem.csrc"}


def test_a_release_has_one_version() -> None:
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited is not None
    assert cited[1] == chunkmem.__version__
    released = re.findall(r"^## \[(\d.*)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert released[0] == chunkmem.__version__
