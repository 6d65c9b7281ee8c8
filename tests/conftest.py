"""One thread, one seed per test, and what `full` and `few` leave out of an ordinary run."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers.few import choose
from tests.helpers.scripts import Scripts

SEED = 20240607
LONG_FILES = (
    "cpu/test_tensor_parallel.py",
    "cpu/test_estimate.py",
    "cpu/test_stages.py",
    "cpu/test_compile.py",
    "cpu/test_ranks.py",
    "cpu/test_repartition.py",
    "contrib/test_elastic.py",
    "unit/test_plan_codec.py",
    "cpu/test_by_block.py",
    "cpu/test_estimate_largest.py",
    "cpu/test_activations_lifecycle.py",
    "hostile/test_hostile.py",
    "cpu/test_activations_hostile.py",
    "cpu/test_tiled_chunks.py",
    "cpu/test_mesh.py",
    "cpu/test_any_class.py",
    "cpu/test_pipeline_hostile.py",
    "cpu/test_ema.py",
    "cpu/test_check.py",
    "hostile/test_harness.py",
    "cpu/test_overlap.py",
    "cpu/test_phases.py",
    "cpu/test_example.py",
    "contrib/test_asynchronous_ranks.py",
    "cpu/test_rank_plans.py",
    "cpu/test_frozen_stages.py",
    "cpu/test_sgd.py",
    "cpu/test_host_modules.py",
    "unit/test_plan_properties.py",
    "cpu/test_estimate_ranks.py",
    "contrib/test_asynchronous_save.py",
    "cpu/test_pipeline_frozen.py",
    "cpu/test_tiled_ranks.py",
    "cpu/test_happens_before.py",
    "hostile_ranks/test_fuzz.py",
    "cpu/test_eight_bit_states.py",
    "cpu/test_in_backward.py",
    "cpu/test_any_class_refused.py",
    "contrib/test_frozen_cache_ranks.py",
    "cpu/test_estimate_truth.py",
    "cpu/test_activations.py",
    "cpu/test_pipeline_outputs.py",
    "cpu/test_codes.py",
    "cpu/test_optimizer.py",
    "contrib/test_asynchronous.py",
    "cpu/test_meta.py",
    "cpu/test_disk_tier.py",
    "unit/test_plan_regions.py",
    "cpu/test_zoo.py",
    "cpu/test_checkpoint_files.py",
    "cpu/test_any_class_saved.py",
    "cpu/test_activations_order.py",
    "cpu/test_pipeline_resident.py",
    "cpu/test_freezing_ranks.py",
    "cpu/test_lazy_gradients.py",
    "cpu/test_checkpoint_memory.py",
    "cpu/test_recompute_ranks.py",
)
"""What takes six seconds of a processor or more, the longest first.

Begun last, one would keep its worker busy and the others idle.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked full")


def pytest_configure(config: pytest.Config) -> None:
    # One thread in the processes that tests start, too. Beside other tests, torch's would mostly wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A thread of gloo that wakes would take the processor from the one that holds the lock it then asks for, over and
    # over, until its turn ends: three milliseconds for an agreement of ranks that takes a tenth of one.
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(PermissionError):  # where that is forbidden, tests take longer, and are the same
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if config.getoption("--full"):
        os.environ["TESTS_ARE_FULL"] = "1"  # for tests/helpers/twins.py
    # xdist's own order is by the number of tests in a file, which says nothing about how long they take.
    config.option.loadscopereorder = False
    # cuBLAS reads it once, when it is first used; without it, it is free to split sums differently in every call.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # How long an example takes says more about what else the machine does than about the code.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile: of all that is made then, next to nothing is."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, object, object]:
    """Make no items of cases that an ordinary run leaves out: two thirds of all, and half of the time to collect them.

    Those are cases marked `full`, and all but so many of a test that is marked `few(count)`.
    """
    result = yield
    if not includes_full(metafunc.config) and not metafunc.definition.get_closest_marker("full"):
        # Without any, pytest would take the test for one without parameters.
        kept = [case for case in metafunc._calls if not is_full(case.marks)] or metafunc._calls
        few = metafunc.definition.get_closest_marker("few")
        if few is not None:
            values = [{name: repr(value) for name, value in case.params.items()} for case in kept]
            kept = [kept[place] for place in choose(values, few.args[0])]
        metafunc._calls = kept
    return result


def includes_full(config: pytest.Config) -> bool:
    """Whether a run has tests that are marked `full`."""
    return bool(config.getoption("--full")) or config.option.markexpr == "full"


def is_full(marks: Iterable[pytest.Mark]) -> bool:
    """Whether these marks leave a test to a full run."""
    return any(mark.name == "full" for mark in marks)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=place)
    if includes_full(config):
        return
    left = [item for item in items if is_full(item.iter_markers())]
    config.hook.pytest_deselected(items=left)
    gone = set(map(id, left))
    items[:] = [item for item in items if id(item) not in gone]


def place(item: pytest.Item) -> int:
    """Where the file of a test stands among those that workers are given in turn."""
    name = "/".join(item.path.parts[-2:])
    return LONG_FILES.index(name) if name in LONG_FILES else len(LONG_FILES)


@pytest.fixture(scope="module", autouse=True)
def known_objects() -> None:
    """Have collections of garbage pass over what is there before the tests of a file.

    That is a million objects of torch, of the tests and of what they import. A manager that is made while another is
    open asks for a collection, which took more time than all the rest of such a test.
    """
    if "torch" in sys.modules:
        import tests.helpers.preloaded  # noqa: F401 - the first optimizer would import it: most of torch
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_conditions() -> None:
    """Bits depend on the number of threads and on the seed: both are the same in every test, alone or in a suite.

    At equal threads, plain PyTorch on the CPU repeats itself in all that is tested here; between thread counts it does
    not, as matmuls and reductions split their sums differently. On CUDA it does not either, as backward of embeddings,
    indexing and attention adds atomically in no fixed order, unless deterministic algorithms are asked for.
    """
    torch = sys.modules.get("torch")
    # tests/unit does without torch: importing it here would hide a module that needs it and should not.
    if torch is None:
        return
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(torch.cuda.is_available())
    torch.manual_seed(SEED)


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Scripts:
    """What runs scripts in plain PyTorch and in chunks, in a folder of this test."""
    monkeypatch.chdir(tmp_path)
    return Scripts(tmp_path, capfd)
