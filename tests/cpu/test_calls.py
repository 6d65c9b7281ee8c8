"""A step takes no more calls for a module than it did: counted, so that no noise of a machine is in it."""

from __future__ import annotations

import pytest

from benchmarks.calls.run import count, managed, plain
from tests.helpers.twins import cpu_only

BLOCKS = 12


@cpu_only
@pytest.mark.parametrize(("share", "most"), [(None, 7), (0.3, 560)])
def test_a_step_takes_few_calls_more_than_plain_pytorch(share: float | None, most: int) -> None:
    ours = count(lambda num_blocks: managed(num_blocks, share=share), BLOCKS)
    assert ours - count(plain, BLOCKS) <= most
