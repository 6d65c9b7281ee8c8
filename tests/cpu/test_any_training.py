"""Training in which hardly two steps are alike has the numbers of plain PyTorch, at any cap and with late copies."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import chunkmem
from chunkmem.testing import AdversarialLanes
from tests.helpers.audit import audit
from tests.helpers.disorder import Disorder
from tests.helpers.twins import AMPLE_NBYTES, Twin, assert_equal, config, copied, cpu_only

NUM_QUICK, NUM_ALL = 10, 400


def played(disorder: Disorder, manager: chunkmem.ChunkManager | None) -> Any:
    twin = Twin(manager, disorder.build)
    return copied(disorder.play(twin)), twin.weights()


def check(seed: int) -> None:
    disorder = Disorder(seed)
    expected = played(disorder, None)
    cap_nbytes = AMPLE_NBYTES
    for lanes in (seed, seed + 1):
        chosen = config(cap_nbytes, **disorder.keys())
        with chunkmem.ChunkManager(chosen, make_lanes=lambda _, lanes=lanes: AdversarialLanes(lanes)) as manager:
            for pool in manager.runtime.memory.store.pools.values():
                pool.poison = True
            assert_equal(played(disorder, manager), expected)
            audit(manager)
            cap_nbytes = disorder.cap_nbytes(manager.memory().device.required_nbytes)


@pytest.mark.few(1)
@cpu_only
@pytest.mark.parametrize(
    "seed", [seed if seed < NUM_QUICK else pytest.param(seed, marks=pytest.mark.full) for seed in range(NUM_ALL)]
)
def test_any_training(seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of plans that do not fit any step
        check(seed)
