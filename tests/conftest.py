"""One thread, one seed per test, and what `full` leaves out of an ordinary run."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

SEED = 20240607


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked full")


def pytest_configure() -> None:
    # cuBLAS reads it once, when it is first used; without it, it is free to split sums differently in every call.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # How long an example takes says more about what else the machine does than about the code.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full") or "full" in config.option.markexpr:
        return
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
    items[:] = [item for item in items if not item.get_closest_marker("full")]


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
