"""A step takes no more calls for a module than it did: counted, so that no noise of a machine is in it."""

from __future__ import annotations

import pytest

from benchmarks.calls.run import NUM_LEAVES, PIPELINED, accumulating, count, managed, pipelined, plain
from tests.helpers.preloaded import WORK_IN_TRAINING
from tests.helpers.twins import cpu_only

BLOCKS = 16


@pytest.mark.few(1)
@cpu_only
@pytest.mark.parametrize(("share", "most"), [(None, 7), (0.3, 230)])
def test_a_step_takes_few_calls_more_than_plain_pytorch(
    share: float | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chunkmem.steps.planning.WORK_A_STEP", WORK_IN_TRAINING)  # plans are final in time
    ours = count(lambda num_blocks: managed(num_blocks, share=share), BLOCKS)
    assert ours - count(plain, BLOCKS) <= most


@pytest.mark.few(1)
@cpu_only
@pytest.mark.parametrize(("checkpoint", "most"), [("never", 95), ("always", 710)])
def test_a_block_in_a_pipeline_takes_few_calls_more_than_plain_pytorch(checkpoint: str, most: int) -> None:
    ours = count(lambda _: pipelined(checkpoint), PIPELINED) - count(lambda _: accumulating(), PIPELINED)
    assert ours * NUM_LEAVES / PIPELINED <= most
